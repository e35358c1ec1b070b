"""What pictures of several fits share: a panel a fit, a mean with its band, the data beneath;
and these data as arrays, with what a fit's names, or their own, call their axes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.frames.names import arrays
from ppl_gp.frames.opened import ArrayNames, opened
from ppl_gp.reading.arguments import argument_names
from ppl_gp.results.fit import Fit
from ppl_gp.results.predict.prediction import is_classification
from ppl_gp.results.query.layout import with_observations
from ppl_gp.results.record import Record, has_layers

_PANEL = (3.6, 3.2)  # inches
# How methods are told apart: seven of them per panel, by colours that the colour-blind see (Okabe &
# Ito 2008) and by markers that grey keeps.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000")
MARKERS = "osD^vP*"
CLASS_COLOURS = COLOURS[:2]


def grid(rows: int, columns: int, size: tuple[float, float], **how):
    """(figure of this size in inches, its axes (rows, columns))."""
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **how)


def one_each(names: Sequence[str], title: str):
    """(figure, {name: axes}): one panel a method, at most three in a row, with common axes."""
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    size = (max(_PANEL[0] * columns, 5.0) + 0.8, _PANEL[1] * rows + 0.6)
    figure, axes = grid(rows, columns, size, sharex=True, sharey=True)
    figure.suptitle(title)
    for unused in axes.ravel()[len(names) :]:
        unused.set_axis_off()
    return figure, dict(zip(names, axes.ravel(), strict=False))


def as_fits(fits: Fit | Mapping[str, Fit]) -> dict[str, Fit]:
    """{name: fit}; a single fit is named after its method."""
    return {type(fits.method).__name__: fits} if isinstance(fits, Fit) else dict(fits)


def mean_and_interval(name: str, fit: Fit, X_new, kwargs: dict, observed: bool):
    """(mean (M,), the central 95 % interval (2, M), "mean") of y or f; the median of a y whose mean
    NumPyro does not have; for y of classes, whose integers have no mean, (probabilities (M, C),
    `None`, ""), of two the second alone, (M, 1). Raises `DataError` if the fit called `name`
    predicts anything else but one number per row.
    """
    # one Gaussian, whose quantiles need no search
    known = not (observed or fit.sampled or has_layers(fit))
    p = fit.predict(X_new, quantiles=None if known else (0.025, 0.975), **kwargs)
    if observed and is_classification(p) and np.ndim(p.probs) <= 2:
        return np.reshape(p.probs, (len(X_new), -1)), None, ""
    mean: Any = p.mean if observed else p.f_mean
    lacks = mean is None or (not isinstance(mean, dict) and not np.any(np.isfinite(mean)))
    called = "median" if lacks and p.quantiles is not None else "mean"
    mean = mean if called == "mean" else fit.predict(X_new, quantiles=(0.5,), **kwargs).quantiles[0]
    if np.shape(mean) != (len(X_new),):
        told = f"sites {list(mean)}" if isinstance(mean, dict) else f"shape {np.shape(mean)}"
        raise DataError(
            f"'{name}' predicts {told} at {len(X_new)} rows, and a band needs one per row; draw "
            "each function or site by matplotlib from fit.predict(...)."
        )
    if known:
        half = 1.959964 * np.sqrt(np.asarray(p.f_variance))
        return np.asarray(mean), np.asarray(mean) + np.stack([-half, half]), called
    return np.asarray(mean), np.asarray(p.quantiles if observed else p.f_quantiles), called


def draw_band(ax, x, mean, ends, color="black", dashes="-", label="mean"):
    """A line and its band. x (M,), mean (M,), ends (2, M)."""
    ax.plot(x, mean, dashes, color=color, label=label)
    told = "95 % interval" if label in ("mean", "median") else None
    ax.fill_between(x, *ends, color=color, alpha=0.15, linewidth=0, label=told)


def draw_bars(ax, x, mean, ends, color="black", marker="o", label="mean"):
    """A point and a bar at each of a few values, x (M,), mean (M,), ends (2, M)."""
    told = f"{label}, 95 % interval" if label in ("mean", "median") else label
    middle, half = np.mean(ends, 0), 0.5 * np.abs(ends[1] - ends[0])
    drawn = ax.errorbar(x, middle, half, fmt=marker, color=color, capsize=3, label=told)
    drawn.lines[0].set_ydata(mean)  # which may lie outside
    ax.update_datalim(np.stack([x, mean], 1))


def draw_classes(ax, x, probs, data_x, y, levels=None, marker=""):
    """The probability of each class, probs (M, C), with the data of the class as a rug above."""
    binary = probs.shape[1] == 1  # the curve of the second class, below it the marks of the first
    for c in range(max(2, probs.shape[1])):
        colour, label = COLOURS[c % len(COLOURS)], levels[c] if levels else f"y = {c}"
        at, height = data_x[y == c], 1.05 + 0.05 * c - 1.1 * (binary and c == 0)
        if not binary or c == 1:
            ax.plot(x, probs[:, -1 if binary else c], f"-{marker}", color=colour, label=label)
        named = label if height < 0 else None
        ax.plot(at, np.full(at.size, height), "|", color=colour, label=named)
    ax.set_yticks(np.linspace(0.0, 1.0, 6))


def draw_rug(ax, x, y, levels=None):
    """Where the data are along x, by class where y is 0 or 1; `levels`: what these are called."""
    called = levels if levels and len(levels) == 2 else ("y = 0", "y = 1")
    marks = [("data", x, 0.02, 0)]
    if set(np.unique(y).tolist()) <= {0, 1}:
        marks = [(called[c], x[y == c], height, c) for c, height in ((0, 0.02), (1, 0.98))]
    along = ax.get_xaxis_transform()
    for label, at, height, c in marks:
        heights = np.full(at.size, height)
        ax.plot(at, heights, "|", color=CLASS_COLOURS[c], transform=along, label=label)


def sevens(fits: Mapping) -> list[dict]:
    """The fits in their order, those of a panel together."""
    names, most = list(fits), len(COLOURS)
    return [{k: fits[k] for k in names[i : i + most]} for i in range(0, len(names), most)]


class Shown(NamedTuple):
    """Inputs, observations, names of the inputs' columns and of y, and labels of y, or `None`."""

    X: np.ndarray
    y: np.ndarray
    columns: tuple[str, ...] | None
    response: str | None
    levels: tuple[str, ...] | None


def shown(fit: Record, X, y) -> Shown:
    """The names are those of the fit, else those that X and y come with."""
    order = argument_names(fit.model, 1)
    _, _, own = arrays(order, (X,), {"y": y})
    given = [fit.names.get(path) or own.get(path) or ArrayNames() for path in (order[0], "y")]
    columns, of_y = given[0].columns, given[1].columns
    X, y, _, _ = with_observations(fit, X, y, (), {})
    response = of_y[0] if of_y and len(of_y) == 1 else None
    return Shown(np.asarray(X), np.asarray(y), columns, response, given[1].level(0))


class Column(NamedTuple):
    """What is drawn along: numbers (N,), their name or "", and their labels where they stand for
    some. In its own units it is shift + scale values.
    """

    values: np.ndarray
    name: str
    labels: tuple[str, ...] | None = None
    shift: float = 0.0
    scale: float = 1.0

    @property
    def called(self) -> tuple[str, ...] | None:
        """What its points are called if it is drawn as points: its labels, or whole numbers that
        differ by less than ten. A frame with floats turns truth values and small counts into these.
        """
        own = np.round(self.own(self.values), 9)
        few = self.labels is None and np.ptp(own) < 10 and np.all(own == np.round(own))
        return tuple(map(self.told, np.unique(self.values))) if few else self.labels

    def own(self, numbers):
        return numbers if self.labels else self.shift + self.scale * numbers

    def spread(self, num: int) -> np.ndarray:
        """Numbers from the smallest to the largest: all labels, or integers, where it has such."""
        if self.called is not None:
            return np.unique(self.values) if self.labels is None else np.arange(len(self.labels))
        between = np.linspace(self.values.min(), self.values.max(), num)
        whole = self.values.dtype.kind in "biu"
        return np.unique(between.round().astype(int)) if whole else between

    def middle(self):
        """The median, of an even number the lower of two; of labels the most frequent."""
        if self.labels is None:
            return np.sort(self.values)[(len(self.values) - 1) // 2]
        values, counts = np.unique(self.values, return_counts=True)
        return values[np.argmax(counts)]

    def code(self, value):
        """The number of a value in the column's own units, or of a label."""
        given = f"at={{{self.name!r}: {value!r}}}"
        if self.labels is not None:
            if value not in self.labels:
                raise DataError(f"{given}: the labels are {list(self.labels)}; give one.")
            return self.labels.index(value)
        if not isinstance(value, int | float | np.number) or not np.isfinite(value):
            raise DataError(f"{given}: the column holds numbers; give a finite one.")
        found = (value - self.shift) / self.scale
        if self.values.dtype.kind in "biu" and found != round(found):
            raise DataError(f"{given}: the inputs hold integers; give one.")
        return found

    def told(self, number) -> str:
        if self.labels:
            return self.labels[int(number)]
        own = float(self.own(number))
        return f"{own:.10g}" if own == round(own) else f"{own:.4g}"


def variable(what: str, values: Any) -> Column:
    """Of a column of a frame, a DataArray or an array. Raises `DataError` as `opened`."""
    if (table := opened(what, values)) is None:
        return Column(np.asarray(values), "")
    names = table.names
    return Column(table.array(), names.columns[0] if names.columns else "", names.level(0))
