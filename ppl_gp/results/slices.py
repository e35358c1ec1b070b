"""A slice through several inputs: rows along which one column varies and the others are held."""

import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.frames.names import arrays
from ppl_gp.frames.table import ArrayNames
from ppl_gp.model.arguments import argument_names
from ppl_gp.results.query.by_names import by_names
from ppl_gp.results.record import Record
from ppl_gp.results.shown import Variable

_LISTED = 6  # columns that a title tells of one by one


class Inputs(NamedTuple):
    """Inputs in columns: X (N, D), the columns' names (by default x0, x1, ...), and the labels of
    each, `None` where it holds numbers.
    """

    X: np.ndarray
    columns: tuple[str, ...]
    levels: tuple[tuple[str, ...] | None, ...]

    def place(self, what: str, column: str | int) -> int:
        """Where a column stands. Raises `DataError` for one that is not there."""
        if isinstance(column, str) and column in self.columns:
            return self.columns.index(column)
        if isinstance(column, int | np.integer) and 0 <= column < len(self.columns):
            return int(column)
        raise DataError(
            f"{what} names the column {column!r}; the inputs are {list(self.columns)} (by name, or "
            "by place from 0)."
        )


class Slice(NamedTuple):
    """`X` (M, D): rows; `along`: the column that varies; `held`: {column: value} of the others, as
    text; `given`: those of them that the user set.
    """

    X: np.ndarray
    along: Variable
    held: dict[str, str]
    given: frozenset[str]

    def title(self, shown: Mapping[str, str], width: int) -> str:
        """A line, or lines, that tell of the columns `shown`: where there are many, those that the
        user set, and how many others there are.
        """
        listed = [k for k in shown if len(shown) <= _LISTED or k in self.given]
        told = [f"{k} = {shown[k]}" for k in listed]
        if others := len(shown) - len(listed):
            told.append(f"{others} others at medians and most frequent labels")
        return textwrap.fill(f"at {', '.join(told)}", width) if told else ""


def inputs_in_columns(fit: Record, X: Any) -> Inputs:
    """Inputs by the names of the fit, else by their own. Raises `DataError` where they are no table
    of rows and columns.
    """
    first = argument_names(fit.model, 1)[0]
    own = arrays([first], (X,), {})[2].get(first)
    names = fit.names.get(first) or own or ArrayNames()
    X = by_names(fit, X, (), {})[0]
    table: Any = np.asarray(X) if hasattr(X, "shape") or isinstance(X, list) else np.zeros(())
    if table.ndim != 2 or not len(table):
        raise DataError(
            f"a slice needs inputs of N rows and D columns; '{first}' is of shape {table.shape} "
            f"and type {type(X).__name__}. Predict at rows of your choice, and draw by matplotlib."
        )
    num = table.shape[1]
    columns = names.columns or tuple(f"x{j}" for j in range(num))
    return Inputs(table, columns, tuple(names.level(j) for j in range(num)))


def slice_through(
    inputs: Inputs,
    along: str | int,
    at: Mapping[Any, Any],
    num: int,
    units: Mapping[Any, tuple[float, float]],
) -> Slice:
    """`num` rows from the smallest to the largest value of a column (its integers, or labels, where
    it holds such), the other columns at `at`.

    `at`: {column: value or label}; by default the median, the lower of the two in the middle, so
    that it is a value of the column; of labels the most frequent one. `units`: {column: (shift,
    scale)} of columns that hold (value - shift) / scale: `at` and what is told are then in the
    column's own units. Raises `DataError` for columns and labels that are not there, and where
    `at` holds the column that varies.
    """
    j = inputs.place("along", along)
    given = {inputs.place("at", k): v for k, v in at.items()}
    scales = {inputs.place("units", k): v for k, v in units.items()}
    if j in given:
        raise DataError(f"at holds {inputs.columns[j]!r}, which varies; leave it out there.")
    values = _values(inputs, j, num)
    held = {
        k: _coded(inputs, k, given[k], scales) if k in given else _middle(inputs, k)
        for k in range(len(inputs.columns))
        if k != j
    }
    X = np.repeat(inputs.X[:1], len(values), 0)
    for k, column in {j: values, **held}.items():
        X[:, k] = column
    told = {inputs.columns[k]: _told(inputs, k, v, scales) for k, v in held.items()}
    shift, scale = scales.get(j, (0.0, 1.0))
    shown = values if inputs.levels[j] else shift + scale * values
    variable = Variable(shown, inputs.columns[j], inputs.levels[j])
    return Slice(X, variable, told, frozenset(inputs.columns[k] for k in given))


def _values(inputs: Inputs, j: int, num: int) -> np.ndarray:
    column, levels = inputs.X[:, j], inputs.levels[j]
    if levels is not None:
        return np.arange(len(levels))
    low, high = column.min(), column.max()
    if column.dtype.kind in "biu":
        return np.unique(np.linspace(low, high, num).round().astype(int))
    return np.linspace(low, high, num)


def _middle(inputs: Inputs, k: int):
    column = inputs.X[:, k]
    if inputs.levels[k] is None:
        return np.sort(column)[(len(column) - 1) // 2]
    values, counts = np.unique(column, return_counts=True)
    return values[np.argmax(counts)]


def _coded(inputs: Inputs, k: int, value, scales):
    """The number that stands for a value, or a label, in the column."""
    levels, name = inputs.levels[k], inputs.columns[k]
    if levels is not None:
        if value not in levels:
            raise DataError(f"at={{{name!r}: {value!r}}}: the labels are {list(levels)}; give one.")
        return levels.index(value)
    if not isinstance(value, int | float | np.number) or not np.isfinite(value):
        raise DataError(f"at={{{name!r}: {value!r}}}: the column holds numbers; give a finite one.")
    shift, scale = scales.get(k, (0.0, 1.0))
    found = (value - shift) / scale
    if inputs.X.dtype.kind in "biu" and found != round(found):
        raise DataError(f"at={{{name!r}: {value!r}}}: the inputs hold integers; give one.")
    return found


def _told(inputs: Inputs, k: int, value, scales) -> str:
    if (levels := inputs.levels[k]) is not None:
        return levels[int(value)]
    shift, scale = scales.get(k, (0.0, 1.0))
    return f"{shift + scale * value:.4g}"
