"""Pictures of a slice through several inputs: one varies, the others are held, which the title
tells.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.results.fit import Fit
from ppl_gp.results.panels import (
    COLOURS,
    MARKERS,
    as_fits,
    draw_band,
    draw_bars,
    draw_classes,
    draw_points,
    draw_rug,
    mean_and_interval,
    panels,
    probability_of,
)
from ppl_gp.results.shown import Shown, shown
from ppl_gp.results.slices import Inputs, Slice, inputs_in_columns, slice_through

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
