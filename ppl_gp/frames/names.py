"""`arrays`: a call's frames, columns and labelled arrays as plain arrays, and the `Names` that a
fit keeps of them.
"""

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from ppl_gp.errors import DataError
from ppl_gp.frames.match import require_codes_of, require_columns, settled
from ppl_gp.frames.opened import opened
from ppl_gp.frames.table import ArrayNames, Labelled


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
        """Raise `DataError` where arguments with an entry a row, the paths `aligned`, label their
        rows otherwise: pandas would align them by their labels, arrays go by their order.
        """
        _require_same_rows({p: names for p, names in self.items() if p in aligned})

    def again(
        self, order: Sequence[str], args: tuple, kwargs: dict, aligned: Container[str] = ()
    ) -> tuple[tuple, dict, "Names"]:
        """The arguments of a prediction as plain arrays, the same label as the same integer, and
        their names: columns and labels of the fit, rows of their own.

        `order`: names of the positional arguments; `aligned`: paths of those with an entry a row.
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
            if (table := opened(f"argument '{path}'", value, known.columns)) is None:
                require_codes_of(path, known, value)
                return value
            new[path] = table.names
            require_columns(path, known, table, _is_of("y", path))
            levels = known.levels or (None,) * len(table.parts)
            return settled(path, known, table).array(f"argument '{path}'", levels)

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
        return table.array(f"argument '{path}'", table.names.levels or (None,))

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
    return table.array(what, (None,) * len(table.parts))


def _walked(order, args: tuple, kwargs: dict, plain: Callable, tables: Container[str] = ()):
    """(args, kwargs); what has the path of one of `tables` is a leaf, also where it is a dictionary
    of columns.
    """

    def walk(path, value):
        return plain(path, value) if path in tables else _walk(path, value, plain)

    return tuple(map(walk, order, args)), {
        path: walk(path, value) for path, value in kwargs.items()
    }


def _walk(path: str, value: Any, plain: Callable) -> Any:
    """The same containers with `plain(path, leaf)` in place of each leaf; paths as
    `model.arguments.Leaves` has them.
    """
    if type(value) is dict:
        return {k: _walk(f"{path}[{k!r}]", v, plain) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)  # pyright: ignore[reportAttributeAccessIssue]
        return type(value)(*(_walk(f"{path}.{k}", v, plain) for k, v in named))
    if type(value) in (tuple, list):
        return type(value)(_walk(f"{path}[{i}]", v, plain) for i, v in enumerate(value))
    return plain(path, value)


def _is_of(argument: str, path: str) -> bool:
    return path == argument or path.startswith((f"{argument}[", f"{argument}."))


def _require_same_rows(names: Mapping[str, ArrayNames]) -> None:
    of = {p: n.rows for p, n in names.items() if n.rows}
    for path, rows in of.items():
        first, other = next(iter(of.items()))
        if len(rows) == len(other) and rows != other:
            at = next(i for i, (a, b) in enumerate(zip(rows, other, strict=True)) if a != b)
            raise DataError(
                f"arguments '{first}' and '{path}' label their rows otherwise: row {at} is "
                f"{other[at]!r} in one and {rows[at]!r} in the other. Bring them into one order "
                f"({path}.loc[{first}.index]), or drop labels that mean nothing "
                "(reset_index(drop=True))."
            )
