"""`arrays`: a call's frames, columns and labelled arrays as plain arrays, and the `Names` that a
fit keeps of them.
"""

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np

from ppl_gp.errors import DataError, ModelError
from ppl_gp.frames.opened import ArrayNames, Labelled, Table, opened

TREES = (dict, OrderedDict, defaultdict)  # of whose entries JAX knows that they are leaves


@dataclasses.dataclass(frozen=True)
class Names(Mapping[str, ArrayNames]):
    """{path of an array in the model's arguments, `"X"` or `"covariates['age']"`: what it was
    called}; arguments that came without names are not in it.
    """

    arguments: tuple[tuple[str, ArrayNames], ...] = ()

    def __getitem__(self, path: str) -> ArrayNames:
        return dict(self.arguments)[path]

    def __iter__(self) -> Iterator[str]:
        return (path for path, _ in self.arguments)

    def __len__(self) -> int:
        return len(self.arguments)

    def require_same_rows(self, aligned: Container[str]) -> None:
        """Raise `DataError` where arguments with an entry per row, the paths `aligned`, label their
        rows otherwise: pandas would align them by their labels, arrays go by their order.
        """
        of = {p: names.rows for p, names in self.items() if p in aligned and names.rows}
        for path, rows in of.items():
            first, other = next(iter(of.items()))
            if len(rows) == len(other) and rows != other:
                at = next(i for i, (a, b) in enumerate(zip(rows, other, strict=True)) if a != b)
                raise DataError(
                    f"arguments '{first}' and '{path}' label their rows otherwise: row {at} is "
                    f"{other[at]!r} in one and {rows[at]!r} in the other. Bring them into one "
                    f"order ({path}.loc[{first}.index]), or drop labels that mean nothing "
                    "(reset_index(drop=True))."
                )

    def again(
        self, order: Sequence[str], args: tuple, kwargs: dict, aligned: Container[str] = ()
    ) -> tuple[tuple, dict, "Names"]:
        """The arguments of a prediction as plain arrays, the same label as the same integer, and
        their names: columns and labels of the fit, rows of their own.

        `order`: names of the positional arguments; `aligned`: paths of those with an entry per row.
        Raises `DataError` as `opened` does, for other columns or dimensions than in training,
        unknown labels, labels in place of numbers, and rows labelled otherwise in one aligned
        argument than in another. An array without names is taken for the
        columns of the fit in their order.
        """
        new: dict[str, ArrayNames] = {}
        kept = dict(self.without_rows(aligned))  # an argument that is left out is as it was

        def plain(path, value):
            known = self.get(path, ArrayNames())
            if path in kept and value is not None:
                kept[path] = dataclasses.replace(known, rows=None)
            if (table := opened(f"argument '{path}'", value, known.columns, known.levels)) is None:
                require_codes_of(path, known, value)
                return value
            new[path] = table.names
            require_columns(known, table, path == "y" or path.startswith(("y[", "y.")))
            require_kinds(known, table)
            return table.array(known.levels)

        args, kwargs = _walked(order, args, kwargs, plain, self)
        Names(tuple(new.items())).require_same_rows(aligned)
        own = {p: dataclasses.replace(self.get(p, n), rows=n.rows) for p, n in new.items()}
        return args, kwargs, Names(tuple({**kept, **own}.items()))

    def without_rows(self, paths: Container[str] | None = None) -> "Names":
        """Columns and labels alone, of these arguments, by default of all."""
        bare = lambda n: dataclasses.replace(n, rows=None)  # noqa: E731
        some = ((p, bare(n) if paths is None or p in paths else n) for p, n in self.items())
        return Names(tuple(some))


def arrays(order: Sequence[str], args: tuple, kwargs: dict) -> tuple[tuple, dict, Names]:
    """A fit's arguments as plain arrays, as the user's own `.to_numpy()` would give them, labels as
    integers, and their names. `order`: names of the positional arguments.

    Containers (dictionaries, tuples, lists) are walked through. Raises `DataError` as `opened`
    does; whether rows are labelled alike is for `Names.require_same_rows`, which knows the model.
    """
    names: dict[str, ArrayNames] = {}

    def plain(path, value):
        if (table := opened(f"argument '{path}'", value)) is None:
            return value
        names[path] = table.names
        return table.array()

    args, kwargs = _walked(order, args, kwargs, plain)
    return args, kwargs, Names(tuple(names.items()))


def plain_numbers(what: str, value: Any) -> Any:
    """A frame or labelled array of numbers as an array, and anything else as it is; for inputs that
    are no argument of a model. Raises `DataError` for labels, whose integers are not known there.
    """
    if (table := opened(what, value)) is None:
        return value
    if any(isinstance(part, Labelled) for part in table.parts):
        raise DataError(f"{what} holds labels, which have no integers here; give numbers.")
    return table.array()


def _walked(order, args: tuple, kwargs: dict, plain: Callable, tables: Container[str] = ()):
    """(args, kwargs); a dictionary of columns at the path of one of `tables` is a leaf."""

    def walk(path, value):
        return plain(path, value) if path in tables else _walk(path, value, plain)

    positional = tuple(map(walk, order, args))
    return positional, {path: walk(path, value) for path, value in kwargs.items()}


def refilled(value, entries: Iterable) -> Any:
    """A dictionary of the same kind, and of the same order, with other entries."""
    new = copy(value)
    new.update(entries)
    return new


def _walk(path: str, value: Any, plain: Callable) -> Any:
    """The same containers, `plain(path, leaf)` for each leaf; paths as in `Leaves`."""
    if type(value) in TREES:
        return refilled(value, ((k, _walk(f"{path}[{k!r}]", v, plain)) for k, v in value.items()))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)  # pyright: ignore[reportAttributeAccessIssue]
        return type(value)(*(_walk(f"{path}.{k}", v, plain) for k, v in named))
    if type(value) in (tuple, list):
        return type(value)(_walk(f"{path}[{i}]", v, plain) for i, v in enumerate(value))
    return plain(path, value)


def require_columns(known: ArrayNames, table: Table, is_y: bool) -> None:
    """Raise `DataError` for columns that are missing, extra or in another order, and for swapped
    dimensions. A single column of observations may have another name.
    """
    new = table.names
    if known.dims and new.dims and known.dims != new.dims and set(known.dims) == set(new.dims):
        raise DataError(
            f"{table.what} has the dimensions {list(new.dims)}, and in training "
            f"{list(known.dims)}; give .transpose{known.dims}."
        )
    if not known.columns or not new.columns or known.columns == new.columns:
        return
    if is_y and len(known.columns) == len(new.columns) == 1:
        return
    missing = [k for k in known.columns if k not in new.columns]
    extra = [k for k in new.columns if k not in known.columns]
    what = f"lacks the columns {missing}" if missing else ""
    what += " and " if missing and extra else ""
    what += f"has the columns {extra}, which the fit had not" if extra else ""
    # a column for a column, which is (N,), a frame for a frame, (N, D)
    first, *others = known.columns
    wanted = first if not (table.is_frame or others) else list(known.columns)
    raise DataError(
        f"{table.what} {what or f'has its columns in another order, {list(new.columns)}'}: the "
        f"fit was made with {list(known.columns)}. Give these, frame[{wanted!r}]."
    )


def require_kinds(known: ArrayNames, table: Table) -> None:
    """Raise `DataError` for labels where the fit had numbers, and for numbers where it had labels.
    Integers may replace labels in a DataArray without coordinates, which counts as an array.
    """
    for j, part in enumerate(table.parts):
        where, levels = table.place(j), known.level(j)
        if isinstance(part, Labelled) and levels is None:
            told = "labels have no integers. Give numbers, or fit with the labels."
            raise DataError(f"{where} holds labels, and the fit was made with numbers: {told}")
        if levels is not None and not isinstance(part, Labelled):
            if table.names.columns or table.names.dims is None:
                raise DataError(
                    f"{where} holds {part.dtype} entries, and the fit was made with the labels "
                    f"{list(levels)} there. Give labels (astype('category'), polars.Enum), or "
                    "their places as an array without names, .to_numpy()."
                )
            require_codes(where, part, levels)


def require_codes_of(path: str, known: ArrayNames, value: Any) -> None:
    """Raise `DataError` if an array without names holds other numbers than places of labels."""
    if not any(known.levels) or not (hasattr(value, "__array__") or isinstance(value, list)):
        return
    array = np.asarray(value)
    if len(known.levels) > 1 and array.shape[-1:] != (len(known.levels),):
        raise DataError(
            f"argument '{path}' has shape {array.shape}, and the fit was made with the "
            f"{len(known.levels)} columns {list(known.columns or ())}; give as many."
        )
    for j, levels in enumerate(known.levels):
        column = array[..., j] if len(known.levels) > 1 or array.ndim > 1 else array
        if levels is not None and array.dtype.kind in "biuf":
            require_codes(f"argument '{path}'{known.place(j)}", column, levels)


def require_codes(where: str, column: np.ndarray, levels: tuple[str, ...]) -> None:
    """Raise `DataError` for numbers that are no places of labels; NaN is refused elsewhere."""
    column = column[np.isfinite(column)]
    wrong = column[(column != np.round(column)) | (column < 0) | (column >= len(levels))]
    if wrong.size:
        raise DataError(
            f"{where} has {wrong.ravel()[0]}, where the fit was made with the labels "
            f"{list(levels)}: give labels, or integers from 0 to {len(levels) - 1}."
        )


@contextmanager
def explained(names: Iterable[str], arrays: Mapping[str, Any], inputs: str) -> Iterator[None]:
    """Errors about shapes say which arguments came as frames of one column.

    `names`: paths of arguments that came with names; `inputs`: of those that are (N, 1) by right,
    unless something became (N, N); `arrays`: {path: array}. Nothing is refused that a model can
    use.
    """
    try:
        yield
    except (DataError, ModelError) as error:
        single = [p for p in names if p in arrays and arrays[p].shape[1:] == (1,)]
        square = [p for p in single if str((len(arrays[p]),) * 2) in str(error)]
        single = [p for p in single if p != inputs] or square
        if type(error) not in (DataError, ModelError) or "shape" not in str(error) or not single:
            raise
        raise type(error)(
            f"{error} The argument{'s' * (len(single) > 1)} {', '.join(map(repr, single))} came as "
            f"a frame of one column, which is an array of shape {arrays[single[0]].shape}: where "
            "the model wants one entry per row, an index of groups, say, give the column, "
            "frame['name'], not frame[['name']]."
        ) from error
