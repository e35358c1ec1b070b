"""A slice through several inputs: rows along which one column varies and the others are held, and
pictures of it, whose title says where.
"""

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.frames.names import arrays
from ppl_gp.frames.opened import ArrayNames
from ppl_gp.reading.arguments import argument_names
from ppl_gp.report.panels import (
    COLOURS,
    MARKERS,
    Shown,
    Variable,
    as_fits,
    draw_band,
    draw_bars,
    draw_classes,
    draw_points,
    draw_rug,
    mean_and_interval,
    panels,
    probability_of,
    shown,
)
from ppl_gp.results.fit import Fit
from ppl_gp.results.query.by_names import by_names
from ppl_gp.results.record import Record

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


if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINES = COLOURS[2:]  # the first two are the classes' and the data's
_DASHES = ("-", "--", ":", "-.")


def plot_slice(
    fits: Fit | Mapping[str, Fit],
    X,
    y,
    *,
    along: str | int,
    at: Mapping[Any, Any] | None = None,
    units: Mapping[Any, tuple[float, float]] | None = None,
    num: int = 100,
    flabel: str = "f",
    observed: bool = False,
    **kwargs,
) -> "Figure":
    """Mean and central 95 % interval along one of several inputs, the others held, one panel a fit.

    **Arguments:**

    - `fits`: {name: fit} or one fit; `X` (N, D), `y` (N,): the data, by names or as arrays.
    - `along`: the column that varies, by name or by place: `num` values from its smallest to its
      largest, its integers, or its labels, which get points with bars.
    - `at`: {column: value or label} of the others. By default a column's median (of an even number
      the lower of the two in the middle, which is a value of the column), of labels the most
      frequent. One of them may have several, `{"ward": ["north", "south"]}`: a line each.
    - `units`: {column: (shift, scale)} of columns that hold (value - shift) / scale; axis, title
      and `at` are then in the column's own units.
    - `observed`: the mean and interval of y, with the data as points (their other inputs are as
      they are), instead of those of f, with the data as a rug. For y of more than two classes the
      probability of each class.
    - `kwargs`: the model's other arguments at the M rows of a slice; a plain number is for all.

    Raises `DataError` for columns and labels that are not there, inputs that are no table, and
    where a fit predicts several functions or sites. Cost: as `predict` at M rows.
    """
    fits, units = as_fits(fits), units or {}
    first = next(iter(fits.values()))
    inputs, data = inputs_in_columns(first, X), shown(first, X, y)
    slices = _slices(inputs, along, dict(at or {}), num, units)
    what = (data.response or "y") if observed else flabel
    figure, axes = panels(
        list(fits),
        f"Mean of {what} and its 95 % interval{_held(slices, 60 if len(fits) == 1 else 90)}",
        sharex=True,
        sharey=True,
    )
    x = _in_units(inputs, along, units)
    for name, ax in axes.items():
        for i, (label, cut) in enumerate(slices.items()):
            mean, ends = mean_and_interval(name, fits[name], cut.X, kwargs, observed)
            if ends is not None:
                _draw(ax, cut, mean, ends, label, i, len(slices))
            elif len(slices) > 1:
                raise DataError(f"at={at}: classes have a line each; give one value per column.")
        if ends is None:
            mark = "o" if cut.along.labels else ""
            draw_classes(ax, cut.along.values, mean, x, data.y, data.levels, mark)
            what = probability_of(figure, data.response, _held(slices, 90))
        else:
            _data(ax, x, data, cut, observed)
        ax.set(title=name, xlabel=cut.along.name, ylabel=what)
        if cut.along.labels is not None:
            ax.set_xticks(cut.along.values, cut.along.labels)
            ax.set_xlim(-0.6, len(cut.along.labels) - 0.4)
    told = next(iter(axes.values())).get_legend_handles_labels()
    figure.legend(*told, loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _slices(inputs: Inputs, along, at: dict, num: int, units) -> dict[str, Slice]:
    """{label of a line: its slice}; a single one is called "mean"."""
    several = [k for k, v in at.items() if np.ndim(v) == 1]
    if len(several) > 1 or any(np.ndim(v) > 1 or np.size(v) == 0 for v in at.values()):
        raise DataError(f"at={at}: one column may have several values, in a list; the others one.")
    if not several:
        return {"mean": slice_through(inputs, along, at, num, units)}
    (k,) = several
    name = inputs.columns[inputs.place("at", k)]
    cuts = [slice_through(inputs, along, {**at, k: v}, num, units) for v in at[k]]
    return {f"{name} = {cut.held[name]}": cut for cut in cuts}


def _held(slices: Mapping[str, Slice], width: int) -> str:
    """What all lines share, as further lines of the title."""
    first, *others = slices.values()
    same = {k: v for k, v in first.held.items() if all(c.held[k] == v for c in others)}
    told = first.title(same, width)
    return f"\n{told}" if told else ""


def _draw(ax, cut: Slice, mean, ends, label: str, i: int, num: int) -> None:
    """Line i of `num`, told from the others by dashes or marks too; bars stand side by side."""
    colour = "black" if num == 1 else _LINES[i % len(_LINES)]
    if cut.along.labels is None:
        draw_band(ax, cut.along.values, mean, ends, colour, _DASHES[i % len(_DASHES)], label)
    else:
        x = cut.along.values + 0.5 * (i - 0.5 * (num - 1)) / num
        draw_bars(ax, x, mean, ends, colour, MARKERS[i % len(MARKERS)], label)


def _in_units(inputs: Inputs, along, units) -> np.ndarray:
    j = inputs.place("along", along)
    shift, scale = {inputs.place("units", k): v for k, v in units.items()}.get(j, (0.0, 1.0))
    return shift + scale * inputs.X[:, j]


def _data(ax, x, data: Shown, cut: Slice, observed: bool) -> None:
    """Beneath the lines; along labels a rug would show the same mark again and again."""
    if observed:
        draw_points(ax, x, data.y, label="data" if not cut.held else "data, all rows")
    elif cut.along.labels is None:
        draw_rug(ax, x, data.y, data.levels)
