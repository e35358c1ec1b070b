"""What pictures of several fits share: a panel a fit, a mean with its band, the data beneath;
and these data as arrays, with what a fit's names, or their own, call their axes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.frames.names import arrays
from ppl_gp.frames.opened import ArrayNames, Labelled, opened
from ppl_gp.reading.arguments import argument_names
from ppl_gp.results.fit import Fit
from ppl_gp.results.query.by_names import with_observations
from ppl_gp.results.record import Record

_PANEL = (3.6, 3.2)  # inches
# How methods are told apart: seven of them per panel, by colours that the colour-blind see (Okabe &
# Ito 2008) and by markers that grey keeps.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000")
MARKERS = "osD^vP*"
CLASS_COLOURS = COLOURS[:2]


def panels(names: Sequence[str], title: str, **kwargs):
    """(figure, {name: axes}): one panel a method, at most three in a row."""
    import matplotlib.pyplot as plt

    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    size = (max(_PANEL[0] * columns, 5.0) + 0.8, _PANEL[1] * rows + 0.6)
    figure, axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **kwargs
    )
    figure.suptitle(title)
    for unused in axes.ravel()[len(names) :]:
        unused.set_axis_off()
    return figure, dict(zip(names, axes.ravel(), strict=False))


def probability_of(figure, response: str | None, held: str = "") -> str:
    """Title a picture of classes, and return what its vertical axis shows."""
    what = f"Probability of each {response or 'class'}"
    figure.suptitle(f"{what}; the data are the marks above{held}")
    return what


def as_fits(fits: Fit | Mapping[str, Fit]) -> dict[str, Fit]:
    """{name: fit}; a single fit is named after its method."""
    return {type(fits.method).__name__: fits} if isinstance(fits, Fit) else dict(fits)


def mean_and_interval(name: str, fit: Fit, X_new, kwargs: dict, observed: bool):
    """(mean (M,), the central 95 % interval (2, M)) of y or f; for y of more than two classes,
    whose integers have no mean, (probabilities (M, C), `None`). Raises `DataError` if the fit
    called `name` predicts anything else but one number per row.
    """
    if not observed and not fit.sampled:  # one Gaussian, whose quantiles need no search
        p = fit.predict(X_new, **kwargs)
        _require_rows(name, p.f_mean, len(X_new))
        half = 1.959964 * np.sqrt(np.asarray(p.f_variance))
        return np.asarray(p.f_mean), np.asarray(p.f_mean) + np.stack([-half, half])
    p = fit.predict(X_new, quantiles=(0.025, 0.975), **kwargs)
    if observed and np.ndim(p.probs) == 2 and not p.counts:
        return np.asarray(p.probs), None
    mean, ends = (p.mean, p.quantiles) if observed else (p.f_mean, p.f_quantiles)
    _require_rows(name, mean, len(X_new))
    return np.asarray(mean), np.asarray(ends)


def _require_rows(name: str, mean, num: int) -> None:
    if np.shape(mean) != (num,):
        told = f"sites {list(mean)}" if isinstance(mean, dict) else f"shape {np.shape(mean)}"
        raise DataError(
            f"'{name}' predicts {told} at {num} rows, and a band needs one per row; draw each "
            "function or site by matplotlib from fit.predict(...)."
        )


def draw_band(ax, x, mean, ends, color="black", dashes="-", label="mean"):
    """A line and its band. x (M,), mean (M,), ends (2, M)."""
    ax.plot(x, mean, dashes, color=color, label=label)
    told = "95 % interval" if label == "mean" else None
    ax.fill_between(x, *ends, color=color, alpha=0.15, linewidth=0, label=told)


def draw_bars(ax, x, mean, ends, color="black", marker="o", label="mean"):
    """A point and a bar at each of a few values, x (M,), mean (M,), ends (2, M)."""
    bars = np.abs(np.stack([mean - ends[0], ends[1] - mean]))
    told = "mean, 95 % interval" if label == "mean" else label
    ax.errorbar(x, mean, bars, fmt=marker, color=color, capsize=3, label=told)


def draw_classes(ax, x, probs, data_x, y, levels=None, marker=""):
    """The probability of each class, probs (M, C), with the data of the class as a rug above."""
    for c, p in enumerate(probs.T):
        colour = COLOURS[c % len(COLOURS)]
        ax.plot(x, p, f"-{marker}", color=colour, label=levels[c] if levels else f"y = {c}")
        at = data_x[y == c]
        ax.plot(at, np.full(at.size, 1.05 + 0.05 * c), "|", color=colour)
    ax.set_yticks(np.linspace(0.0, 1.0, 6))


def draw_points(ax, x, y, label="data"):
    """The data on y's own axis."""
    ax.plot(x, y, "o", color=CLASS_COLOURS[0], markersize=3, alpha=0.7, label=label)


def draw_rug(ax, x, y, levels=None):
    """Where the data are along x, by class where y is 0 or 1; `levels`: what these are called."""
    called = levels if levels and len(levels) == 2 else ("y = 0", "y = 1")
    transform = ax.get_xaxis_transform()
    if set(np.unique(y).tolist()) <= {0, 1}:
        for label, height in ((0, 0.02), (1, 0.98)):
            at = x[y == label]
            ax.plot(
                at,
                np.full(at.size, height),
                "|",
                color=CLASS_COLOURS[label],
                transform=transform,
                label=called[label],
            )
    else:
        ax.plot(
            x, np.full(x.size, 0.02), "|", color=CLASS_COLOURS[0], transform=transform, label="data"
        )


def sevens(fits: Mapping) -> list[dict]:
    """The fits in their order, those of a panel together."""
    names, most = list(fits), len(COLOURS)
    return [{k: fits[k] for k in names[i : i + most]} for i in range(0, len(names), most)]


class Shown(NamedTuple):
    """Inputs and observations as arrays; names of the inputs' columns and of y, and the labels of
    y, `None` where there are none.
    """

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


class Variable(NamedTuple):
    """A variable to draw along: numbers (M,), its name or `""`, and the labels of the numbers where
    it holds labels.
    """

    values: np.ndarray
    name: str
    labels: tuple[str, ...] | None


def variable(what: str, values: Any) -> Variable:
    """Of a column of a frame, a DataArray or an array. Raises `DataError` as
    `frames.opened.opened`.
    """
    if (table := opened(what, values)) is None:
        return Variable(np.asarray(values), "", None)
    (part, *_), names = table.parts, table.names
    labels = part.labels if isinstance(part, Labelled) else None
    array = table.array(what, names.levels or (None,))
    return Variable(array, names.columns[0] if names.columns else "", labels)
