"""Pictures of fits, each a matplotlib Figure: bands, probability surfaces, evidence against truth,
forest, calibration.

Matplotlib is imported when a picture is made, not with the package. Close a figure with
`matplotlib.pyplot.close` when many are made.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import stats

from ppl_gp.errors import DataError
from ppl_gp.report.panels import (
    CLASS_COLOURS,
    COLOURS,
    MARKERS,
    as_fits,
    draw_band,
    draw_classes,
    draw_points,
    draw_rug,
    mean_and_interval,
    panels,
    probability_of,
    sevens,
    shown,
)
from ppl_gp.results.compare import scores
from ppl_gp.results.fit import Fit
from ppl_gp.results.predict.log_density import pit
from ppl_gp.results.query.by_names import by_names, with_observations
from ppl_gp.results.tree_dimensions import dots, row_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ppl_gp.results.compare.compare import Comparison

_LEVEL = 0.9  # of the bars about observed frequencies


def plot_band(
    fits, X, y, X_new=None, *, xlabel=None, flabel="f", observed: bool = False, **kwargs
) -> "Figure":
    """Mean and central 95 % interval over one input dimension, one panel a fit, the data beneath.

    **Arguments:** `fits`: {name: fit} or one fit; `X` (N,) or (N, 1), `y` (N,): the data to show;
    `X_new` (M,) or (M, 1): where to predict, by default 100 points over X; `observed`: the mean and
    the interval of y instead of those of f, or the
    probability of each class; `kwargs`: the model's other arguments at X_new. y is
    drawn as points on its own axis only where `observed`; beside f, whose units differ, it is a rug
    (coloured by class where y is 0 or 1). `xlabel`: by default the column's name, where the fit or
    X has one.
    """
    fits = as_fits(fits)
    first = next(iter(fits.values()))
    data = shown(first, X, y)
    X, y = data.X.reshape(len(data.y), -1), data.y
    if X.shape[1] != 1:
        raise DataError(
            f"plot_band(X=...) has {X.shape[1]} columns; it shows one, plot_surface two, and "
            "slice_plots.plot_slice one of several, the others held."
        )
    trained = np.shape(first.args[0] if first.args else data.X)  # (N,) or (N, 1)
    given = np.linspace(X.min(), X.max(), 100) if X_new is None else X_new
    if isinstance(given, np.ndarray):
        given = given.reshape(-1, *trained[1:])
    X_new = np.asarray(by_names(first, given, (), {})[0])
    what = (data.response or "y") if observed else flabel
    xlabel = xlabel or (data.columns or ("x",))[0]
    figure, axes = panels(
        list(fits), f"Mean of {what} and its 95 % interval", sharex=True, sharey=True
    )
    for name, ax in axes.items():
        mean, ends = mean_and_interval(name, fits[name], X_new, kwargs, observed)
        if ends is None:
            draw_classes(ax, X_new.ravel(), mean, X[:, 0], y, data.levels)
            what = probability_of(figure, data.response)
        else:
            draw_band(ax, X_new.ravel(), mean, ends)
            draw_points(ax, X[:, 0], y) if observed else draw_rug(ax, X[:, 0], y, data.levels)
        ax.set(title=name, xlabel=xlabel, ylabel=what)
    next(iter(axes.values())).legend(loc="best", fontsize="small")
    return figure


def plot_surface(fits, X, y, *, labels=None, classes=None, num: int = 20, **kwargs) -> "Figure":
    """p(y = 1) over two input dimensions, one panel a fit, with the boundary p = 1/2 and the data.

    `num`: grid points a side (prediction takes num^2 rows); `labels`: of the axes, with units;
    `classes`: of y = 0, 1; by default what the fit, or X and y, call them.
    """
    fits = as_fits(fits)
    data = shown(next(iter(fits.values())), X, y)
    X, y, labels = data.X, data.y, labels or data.columns or ("x1", "x2")
    classes = classes or data.levels or ("y = 0", "y = 1")
    if X.ndim != 2 or X.shape[1] != 2:
        raise DataError(
            f"plot_surface(X=...) has shape {X.shape}; it shows two columns, plot_band one."
        )
    margin = 0.08 * np.ptp(X, axis=0)
    sides = [
        np.linspace(low, high, num)
        for low, high in zip(X.min(0) - margin, X.max(0) + margin, strict=True)
    ]
    grid = np.stack([side.ravel() for side in np.meshgrid(*sides)], 1)
    figure, axes = panels(
        list(fits), f"Probability of {classes[1]}, and its boundary 1/2", sharex=True, sharey=True
    )
    for name, ax in axes.items():
        probs = np.asarray(fits[name].predict(grid, **kwargs).probs)
        if probs.shape != (len(grid),):
            raise DataError(
                f"plot_surface shows p(y = 1) of binary observations; '{name}' predicts shape "
                f"{probs.shape}."
            )
        surface = ax.contourf(
            *sides, probs.reshape(num, num), np.linspace(0, 1, 11), cmap="PuOr_r", alpha=0.8
        )
        ax.contour(*sides, probs.reshape(num, num), [0.5], colors="black", linewidths=1.2)
        _classes(ax, X, y, classes)
        ax.set(title=name, xlabel=labels[0], ylabel=labels[1])
    next(iter(axes.values())).legend(loc="best", fontsize="small", framealpha=0.8)
    figure.colorbar(surface, ax=list(axes.values()), label=f"p({classes[1]})")
    return figure


def _classes(ax, X, y, classes):
    for label, marker in ((0, "o"), (1, "^")):
        at = X[y == label]
        ax.scatter(
            *at.T,
            s=14,
            marker=marker,
            color=CLASS_COLOURS[label],
            edgecolors="white",
            linewidths=0.4,
            label=classes[label],
        )


def plot_evidence(comparison: "Comparison") -> "Figure":
    """Each method's log evidence or bound beside the importance-sampled truth at the same
    hyperparameters (+-2 s.e.).
    """
    import matplotlib.pyplot as plt

    rows = [row for row in comparison.table if row["log_evidence"] is not None]
    if not rows:
        raise DataError(
            "plot_evidence: no fit has a log evidence (their hyperparameters were sampled)."
        )
    figure, ax = plt.subplots(figsize=(1.4 * len(rows) + 3.0, 4.0), layout="constrained")
    x = np.arange(len(rows))
    ax.plot(
        x,
        [row["log_evidence"] for row in rows],
        "D",
        color="tab:red",
        label="the method's own value",
    )
    known = [
        (i, row["truth"], 2.0 * row["truth_se"])
        for i, row in enumerate(rows)
        if row["truth"] is not None
    ]
    if known:
        at, truth, width = zip(*known, strict=True)
        ax.errorbar(
            at,
            truth,
            yerr=width,
            fmt="o",
            color="black",
            capsize=6,
            label="importance-sampled truth ±2 s.e.",
        )
    for i, row in enumerate(rows):
        gap = "no truth" if row["truth"] is None else f"{row['log_evidence'] - row['truth']:+.2f}"
        ax.annotate(
            gap, (i, row["log_evidence"]), xytext=(9, -4), textcoords="offset points", fontsize=9
        )
    ax.set(
        title="Log evidence at each method's own hyperparameters\n(figures: method minus truth, "
        "where it was found)",
        xlabel="method",
        ylabel="log evidence (nats)",
        xlim=(-0.5, len(rows) - 0.3),
    )
    ax.set_xticks(x, [row["method"] for row in rows])
    ax.ticklabel_format(axis="y", useOffset=False)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", fontsize="small")
    return figure


def plot_forest(
    fits: Mapping[str, Fit], *, site: str | None = None, num_latents: int = 4
) -> "Figure":
    """Posterior medians and intervals (50 % and 94 %) of hyperparameters and of a few latents,
    method by method.

    The latents are those of `num_latents` rows spread over the training data, of the GP site `site`
    (the first that all fits have, if there is one). A method that fixes or maximises
    hyperparameters shows them as points. Positive hyperparameters have a panel with a logarithmic
    axis: their posteriors have long right tails.
    """
    import matplotlib.pyplot as plt

    trees = {name: fit.to_datatree() for name, fit in fits.items()}
    sites = [k for fit in fits.values() for k in fit.latent]
    if site is None:
        shared = [k for k in sites if all(dots(k) in t.posterior for t in trees.values())]
        site = shared[0] if shared else None
    draws = {k: _forest_draws(trees[k], fit, site, num_latents) for k, fit in fits.items()}
    labels = list(next(iter(draws.values())))
    latents = [k for k in labels if site is not None and k.startswith(f"{site}[")]
    panels = [p for p in ([k for k in labels if k not in latents], latents) if p]
    if not panels:
        raise DataError(f"plot_forest: the fits share none of the sites {sites}; draw each alone.")
    groups, heights = sevens(draws), [len(p) for p in panels]
    rows = len(groups[0]) + 1
    figure, axes = plt.subplots(
        len(panels),
        len(groups),
        squeeze=False,
        sharex="row",
        figsize=(8.0 * len(groups), 1.0 + 0.16 * rows * sum(heights)),
        height_ratios=heights,
        layout="constrained",
    )
    for column, group in zip(axes.T, groups, strict=True):
        for ax, panel in zip(column, panels, strict=True):
            _forest(ax, group, panel, rows)
            if panel is not latents and all(
                np.min(d[k]) > 0 for d in draws.values() for k in panel
            ):
                ax.set_xscale("log")
        if latents:
            column[-1].set_xlabel(f"latent value of {site} at a training row")
        column[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle("Hyperparameters and latents: median, 50 % and 94 % intervals")
    return figure


def _forest(ax, group: Mapping[str, dict], panel: Sequence[str], rows: int) -> None:
    """One panel: a block of lines a quantity, one a method."""
    for j, (name, draws) in enumerate(group.items()):
        for i, label in enumerate(panel):
            _interval(ax, draws[label], -rows * i - j, j, name if i == 0 else None)
    ax.set_yticks([-rows * i - 0.5 * (len(group) - 1) for i in range(len(panel))], panel)
    ax.grid(axis="x", alpha=0.3)


def _forest_draws(tree, fit: Fit, site: str | None, num_latents: int) -> dict[str, np.ndarray]:
    """{label: all draws} of every entry of the hyperparameters, then of `num_latents` rows of f, by
    the rows' labels where they have some.
    """
    flat, posterior = {}, tree.posterior
    for name in [k for k in fit.hyper if k in fit.points or dots(k) in posterior]:
        point = name in fit.points
        values = np.asarray(tree["point_estimates" if point else "posterior"][dots(name)])
        entries = values.reshape(1 if point else values.shape[0] * values.shape[1], -1)
        single = entries.shape[1] == 1
        flat |= {name if single else f"{name}[{i}]": entries[:, i] for i in range(entries.shape[1])}
    if site is None:
        return flat
    f = np.asarray(posterior[dots(site)])
    names = row_names(fit, f.shape[-1])
    f = f.reshape(f.shape[0] * f.shape[1], -1, len(names))  # functions, rows
    of = [f"{c}, " if f.shape[1] > 1 else "" for c in range(f.shape[1])]
    chosen = np.linspace(0, f[0].size - 1, num_latents).round().astype(int)
    places = np.stack(np.unravel_index(chosen, f.shape[1:]), 1)
    return flat | {f"{site}[{of[c]}{names[n]}]": f[:, c, n] for c, n in places}


def _interval(ax, draws, y, method: int, label):
    low, quarter, median, three_quarters, high = np.quantile(draws, [0.03, 0.25, 0.5, 0.75, 0.97])
    colour, marker = COLOURS[method], MARKERS[method]
    ax.plot([low, high], [y, y], color=colour, lw=1)
    ax.plot([quarter, three_quarters], [y, y], color=colour, lw=3)
    ax.plot(median, y, marker, color=colour, ms=5, label=label)


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
