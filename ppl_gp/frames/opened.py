"""Reading pandas and polars: frames, columns and categories through narwhals, one code for both.

None of these packages is imported before a user hands over something of theirs: their objects are
known by the module of their class.
"""

import dataclasses
import sys
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from ppl_gp.errors import DataError


@dataclasses.dataclass(frozen=True)
class ArrayNames:
    """What one array argument was called where the user had it.

    - `columns`: names of the columns of a frame, of the last axis of a DataArray, or of a single
      column, which then stands alone; `None` where they had none.
    - `levels`: one entry a column: the labels of a column of categories, whose integers are their
      places here, and `None` of a column of numbers.
    - `rows`: labels of the rows (a pandas index that is no RangeIndex, the coordinate of a
      DataArray's first dimension), else `None`.
    - `dims`: the dimensions of a DataArray, else `None`.
    """

    columns: tuple[str, ...] | None = None
    levels: tuple[tuple[str, ...] | None, ...] = ()
    rows: tuple[str | int, ...] | None = None
    dims: tuple[str, ...] | None = None

    def level(self, column: int) -> tuple[str, ...] | None:
        """The labels of a column, `None` where it holds numbers."""
        return self.levels[column] if column < len(self.levels) else None

    def place(self, column: int) -> str:
        """What a message adds to an argument's name to name a column."""
        return f", column '{self.columns[column]}'," if self.columns else ""


class Labelled(NamedTuple):
    """A column of labels: row n has `labels[index[n]]`. Not all labels need occur."""

    labels: tuple[str, ...]
    index: np.ndarray


class Table(NamedTuple):
    """A value with names. `parts`: one array or `Labelled` per column of a frame, else just one."""

    what: str  # messages call it
    parts: list[np.ndarray | Labelled]
    names: ArrayNames
    is_frame: bool

    def place(self, column: int) -> str:
        """What messages call a column."""
        return f"{self.what}{self.names.place(column)}"

    def array(self, levels: tuple[tuple[str, ...] | None, ...] = ()) -> np.ndarray:
        """(N, D) of a frame, else as it is, labels as their places in `levels`, or in its own.
        Columns of several types have the type that holds them all (of integers and floats: floats).
        """
        levels = levels or self.names.levels
        columns = [
            codes(self.place(j), part, levels[j] or ()) if isinstance(part, Labelled) else part
            for j, part in enumerate(self.parts)
        ]
        return np.stack(columns, 1) if self.is_frame else columns[0]


def codes(where: str, column: Labelled, levels: tuple[str, ...]) -> np.ndarray:
    """(N,) the place of each label in `levels`: labels are looked up, rows follow by one gather.
    Raises `DataError` for labels that are not there.
    """
    place = {label: i for i, label in enumerate(levels)}
    found = np.array([place.get(label, -1) for label in column.labels], int)[column.index]
    if unknown := np.flatnonzero(found < 0).tolist():
        labels = list(dict.fromkeys(column.labels[i] for i in column.index[unknown]))
        raise DataError(
            f"{where} has {labels[:5]} (first in row {unknown[0]}), and the labels of the fit are "
            f"{list(levels)}: an unknown label has no integer. Drop these rows, or fit with all "
            "labels declared as categories."
        )
    return found


def labels_of(where: str, labels) -> tuple[str, ...]:
    """Labels as text. Raises `DataError` where two would be one."""
    told = tuple(map(str, labels))
    if len(set(told)) < len(told):
        twice = sorted(x for x, num in Counter(told).items() if num > 1)
        raise DataError(f"{where} has several categories that read {twice}; rename them.")
    return told


def row_labels(labels) -> tuple[str | int, ...]:
    return tuple(x if type(x) in (str, int) else str(x) for x in labels)


_LIBRARIES = ("pandas", "polars", "xarray")
_REMEDIES = {  # of what is no array yet
    "LazyFrame": "call .collect()",
    "Dataset": "give one DataArray, ds.to_dataarray().T, or ds.to_dataframe()",
    "DataTree": "give one of its DataArrays",
}
_DATES = ("Datetime", "Date", "Duration", "Time")


def opened(
    path: str, value: Any, columns: tuple[str, ...] | None = None, levels: tuple = ()
) -> Table | None:
    """What a frame, column or DataArray holds; `None` of anything else (arrays, numbers, options).
    Of a frame that has these `columns` they alone, in this order; a dictionary of them is a frame,
    in which a number or text stands for all rows. `levels`: the labels of each column in the fit.

    Raises `DataError`: missing entries of a type that has no NaN, columns that are neither numbers
    nor categories, columns of one name, what is no array yet.
    """
    if type(value) is dict and columns:
        import pandas  # which xarray brings

        if missing := [k for k in columns if k not in value]:
            raise DataError(f"{path} lacks the columns {missing}: the fit was made with {columns}.")
        # by place, not by a Series' labels, with its categories
        every = {k: getattr(value[k], "array", value[k]) for k in columns}
        num = max(map(np.size, every.values()))
        every = {k: x if np.ndim(x) else np.repeat(x, num) for k, x in every.items()}
        if unlike := [k for k, x in every.items() if len(x) != num]:
            raise DataError(f"{path}: columns {unlike} have not as many entries as others, {num}.")
        value = pandas.DataFrame(every)
    roots = (cls.__module__.partition(".")[0] for cls in type(value).__mro__)
    if (library := next((root for root in roots if root in _LIBRARIES), None)) is None:
        return None
    if remedy := _REMEDIES.get(type(value).__name__):
        raise DataError(f"{path} is a {library} {type(value).__name__}; {remedy}.")
    if library == "xarray":
        return open_labelled(path, value)
    return _open_frame(path, value, library, columns, levels)


def _open_frame(path: str, value, library: str, wanted, known: tuple) -> Table | None:
    import narwhals.stable.v2 as nw

    if library == "pandas" and not hasattr(value, "iloc") and getattr(value, "ndim", 0) == 1:
        value = sys.modules["pandas"].Series(value)  # an Index, a Categorical, another array
    try:
        found: Any = nw.from_native(value, allow_series=True, eager_only=True, pass_through=True)
        is_frame = isinstance(found, nw.DataFrame)
        if not is_frame and not isinstance(found, nw.Series):
            return None
        if is_frame and wanted and set(wanted) <= set(found.columns):
            found = found.select(*wanted)
        elif wanted and wanted[1:] and set(wanted) <= set(getattr(value, "index", ())):
            raise DataError(f"{path} is one row, a Series; give a frame, frame.iloc[[0]].")
        columns = list(found.iter_columns()) if isinstance(found, nw.DataFrame) else [found]
    except nw.exceptions.DuplicateError as error:
        raise DataError(f"{path} has columns of one name: {error}; rename them.") from error
    if not columns:
        raise DataError(f"{path} is a frame without columns; give at least one.")
    named = _names([c.name for c in columns], is_frame)
    rows, at = _rows(nw.maybe_get_index(found)), ArrayNames(named)
    told = [*known, *[None] * len(columns)]
    parts = [_part(f"{path}{at.place(j)}", c, rows, told[j]) for j, c in enumerate(columns)]
    levels = tuple(p.labels if isinstance(p, Labelled) else None for p in parts)
    return Table(path, parts, ArrayNames(named, levels, rows), is_frame)


def _names(names: list, is_frame: bool) -> tuple[str, ...] | None:
    """`None` where pandas numbered the columns for want of names, or a column has none."""
    if (is_frame and names == list(range(len(names)))) or names in ([None], [""]):
        return None
    return labels_of("a frame", names)


def _rows(index) -> tuple[str | int, ...] | None:
    if index is None or type(index).__name__ == "RangeIndex":
        return None
    return row_labels(index.tolist())


def _part(where: str, column, rows, known) -> np.ndarray | Labelled:
    import narwhals.stable.v2 as nw

    _require_whole(where, column, rows)
    if isinstance(column.dtype, nw.Enum) or column.dtype in (nw.Categorical, nw.String):
        return _labelled(where, column, known)
    array = column.to_numpy()
    if array.dtype.kind in "biuf":
        return array
    remedy = "convert it to numbers, or to categories"
    if type(column.dtype).__name__ in _DATES:
        remedy = "give numbers, the days since a date of your choice, say"
    raise DataError(f"{where} holds {column.dtype} entries; {remedy}.")


def _require_whole(where: str, column, rows) -> None:
    """NaN of floats is for `reading.arguments` to refuse, as of any array."""
    dtype = getattr(column.to_native(), "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind == "f":
        return
    if (missing := np.flatnonzero(column.is_null().to_numpy())).size:
        row = int(missing[0])
        label = f" (labelled {rows[row]!r})" if rows else ""
        raise DataError(
            f"{where} has no value in row {row}{label}, of {missing.size} missing in all; drop or "
            "impute the row. A missing observation is filled with any value of its support first, "
            "and then left out of the likelihood by numpyro.handlers.mask or obs_mask."
        )


def _labelled(where: str, column, known) -> Labelled:
    """Declared categories in their order; those of polars' Categorical, which are shared by all
    frames of a session, and of text in alphabetical order.
    """
    import narwhals.stable.v2 as nw

    is_own = column.dtype == nw.Categorical and not column.implementation.is_polars()
    if is_own or isinstance(column.dtype, nw.Enum):
        labels = column.cat.get_categories().to_list()
    else:
        if column.dtype == nw.String and not known:
            require_no_numbers(where, column.unique().to_list())
        column = column.cast(nw.String)
        labels = sorted(column.unique().to_list())
    index = column.replace_strict(labels, list(range(len(labels))), return_dtype=nw.Int64)
    return Labelled(labels_of(where, labels), np.asarray(index.to_numpy(), int))


def open_labelled(path: str, value: Any) -> Table | None:
    """A DataArray; `None` of anything else of xarray's."""
    if not (hasattr(value, "dims") and hasattr(value, "coords") and hasattr(value, "values")):
        return None
    values, dims = np.asarray(value.values), tuple(map(str, value.dims))
    rows = None if (labels := _coordinate(value, 0)) is None else row_labels(labels)
    columns = _columns(path, value)
    part = values if values.dtype.kind in "biufc" else _labels_of_array(path, values)
    levels = (part.labels,) if isinstance(part, Labelled) else ()
    return Table(path, [part], ArrayNames(columns, levels, rows, dims or None), False)


def _coordinate(value, axis: int) -> list | None:
    known = value.ndim and value.dims[axis] in value.coords
    return np.asarray(value.coords[value.dims[axis]].values).tolist() if known else None


def _columns(path: str, value) -> tuple[str, ...] | None:
    """The last dimension's coordinate where it is text: numbers there are places, no names."""
    labels = _coordinate(value, -1)
    if value.ndim < 2 or labels is None or not all(isinstance(x, str) for x in labels):
        return None
    return labels_of(f"{path}, dimension '{value.dims[-1]}',", labels)


def _labels_of_array(path: str, values: np.ndarray) -> Labelled:
    text = values.dtype.kind in "OUT" and all(isinstance(x, str) for x in values.ravel().tolist())
    if not text or values.ndim != 1:
        raise DataError(
            f"{path} is a DataArray of {values.dtype} entries, shape {values.shape}; convert it to "
            "numbers, or give one axis of labels."
        )
    labels, index = np.unique(values.astype(str), return_inverse=True)
    require_no_numbers(path, labels.tolist())
    return Labelled(labels_of(path, labels.tolist()), index)


def require_no_numbers(where: str, labels: list[str]) -> None:
    """Raise `DataError` for numbers that were read as text: it may be meant either way."""
    if labels and all(map(reads_as_float, labels)):
        raise DataError(
            f"{where} holds numbers written as text ({labels[:3]}); convert it to numbers "
            "(pandas.to_numeric), or, where they are labels, to declared categories "
            "(astype('category'), polars.Enum)."
        )


def reads_as_float(text: str) -> bool:
    """Whether Python takes a text for a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
