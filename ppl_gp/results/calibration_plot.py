"""The picture of calibration: what was predicted on test data against what was observed there."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import stats

from ppl_gp.errors import DataError
from ppl_gp.results.compare import scores
from ppl_gp.results.fit import Fit
from ppl_gp.results.panels import COLOURS, MARKERS, as_fits, sevens
from ppl_gp.results.predict.log_density import pit
from ppl_gp.results.query.by_names import with_observations

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEVEL = 0.9  # of the bars about observed frequencies


class _Curve(NamedTuple):
    """One fit's line: frequencies stated and observed, and of bins the rows in each."""

    stated: np.ndarray
    observed: np.ndarray
    rows: np.ndarray | None
    score: scores.Score
    axes: tuple[str, str]


def plot_calibration(fits, X_test, y_test, *args, **kwargs) -> "Figure":
    """Observed against stated frequency on test data, one line a fit; the diagonal is calibrated.

    Finitely many outcomes: a reliability diagram over `scores.NUM_BINS` bins, with the rows of each
    bin beneath and bars of the central 90 % interval of the bin's frequency (Jeffreys' beta, Brown,
    Cai & DasGupta 2001, equation 9): a bin of few rows says little, and its bar is long. Otherwise
    the observed coverage of the predictive central intervals.
    """
    import matplotlib.pyplot as plt

    curves = {
        name: _curve(fit, X_test, y_test, args, kwargs) for name, fit in as_fits(fits).items()
    }
    groups, binned = sevens(curves), any(c.rows is not None for c in curves.values())
    figure, axes = plt.subplots(
        1 + binned,
        len(groups),
        figsize=(5.6 * len(groups), 5.2 + 1.3 * binned),
        height_ratios=[4, 1][: 1 + binned],
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for column, group in zip(axes.T, groups, strict=True):
        _draw(column[0], group)
        if binned:
            _draw_rows(column[1], group)
        column[-1].set_xlabel(next(iter(group.values())).axes[0])
    told = f"Calibration on {len(y_test)} test rows: on the dashed line it is right"
    figure.suptitle(told + "\n(bars: 90 % interval of a bin's frequency)" * binned)
    return figure


def _draw(ax, group: dict[str, _Curve]) -> None:
    ax.plot([0, 1], [0, 1], "--", color="grey", label="calibrated")
    for j, (name, curve) in enumerate(group.items()):
        label = f"{name} ({curve.score.name} {curve.score.value:.3f})"
        ax.plot(curve.stated, curve.observed, alpha=0.8, label=label, markersize=5, **_style(j))
        if curve.rows is not None:
            ends = _share_interval(curve.observed * curve.rows, curve.rows)
            ax.vlines(curve.stated, *ends, color=COLOURS[j], alpha=0.35, linewidth=1)
    ax.set(ylabel=next(iter(group.values())).axes[1], xlim=(0, 1), ylim=(0, 1))
    ax.legend(fontsize="small")


def _draw_rows(ax, group: dict[str, _Curve]) -> None:
    for j, curve in enumerate(group.values()):
        if curve.rows is not None:
            ax.plot(curve.stated, curve.rows, alpha=0.8, markersize=3, **_style(j))
    ax.set(yscale="log", ylabel="rows in the bin")
    ax.yaxis.set_major_formatter("{x:.0f}")
    ax.grid(axis="y", alpha=0.3)


def _style(j: int) -> dict:
    return {"marker": MARKERS[j], "color": COLOURS[j], "linewidth": 1.2}


def _share_interval(happened, rows):
    """Jeffreys' central interval of a frequency; to the end where none, or every one, happened."""
    tail = 0.5 * (1.0 - _LEVEL)
    low, high = (
        stats.beta.ppf(p, happened + 0.5, rows - happened + 0.5) for p in (tail, 1.0 - tail)
    )
    return np.where(happened < 0.5, 0.0, low), np.where(happened > rows - 0.5, 1.0, high)


def _curve(fit: Fit, X_test, y_test, args, kwargs) -> _Curve:
    X, y, others, named = with_observations(fit, X_test, y_test, args, kwargs)
    prediction = fit.predict(X, *others, **named)
    if scores.is_classification(prediction):
        score = scores.calibration(prediction, y)
        several = scores.outcome_probabilities(prediction).shape[-1] > 2
        words = (
            ("probability of the most probable class", "how often it was observed")
            if several
            else ("predicted probability", "observed frequency")
        )
        return _Curve(*scores.reliability(prediction, y), score, words)
    found = pit(fit, X, y, *others, **named)
    if found is None:
        raise DataError(
            "plot_calibration shows one observed site of numbers or classes; the model "
            "observes vectors or several sites."
        )
    score = scores.calibration(prediction, y, found)
    words = ("nominal coverage", "observed coverage")
    return _Curve(scores.LEVELS, scores.coverage(found), None, score, words)
