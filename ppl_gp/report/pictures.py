"""Pictures of fits, each a matplotlib Figure: probability surfaces, evidence against truth,
forest, calibration.

Matplotlib is imported when a picture is made, not with the package. Close a figure with
`matplotlib.pyplot.close` when many are made.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import stats

from ppl_gp.errors import DataError
from ppl_gp.report import panels
from ppl_gp.results.fit import Fit
from ppl_gp.results.predict import scores
from ppl_gp.results.predict.prediction import is_classification, outcome_probabilities
from ppl_gp.results.query.layout import with_observations
from ppl_gp.results.tree_groups import dots, row_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ppl_gp.results.compare.compare import Comparison

_LEVEL = 0.9  # of the bars about observed frequencies


def plot_surface(fits, X, y, *, labels=None, classes=None, num: int = 20, **kwargs) -> "Figure":
    """Plot p(y = 1) over two input dimensions, one panel per fit, with the boundary p = 1/2.

    Parameters
    ----------
    fits : Fit or mapping
        A fit, or {name: fit}.
    X, y : array or frame
        The data to show, (N, 2) and (N,).
    labels, classes : sequence of str, default None
        Of the axes, with units, and of y = 0, 1. None takes the names in the fit, or in X and y.
    num : int, default 20
        Grid points per side. Prediction takes num^2 rows.
    **kwargs
        The model's other arguments.

    Returns
    -------
    matplotlib.figure.Figure

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
    >>> X = np.random.default_rng(0).normal(size=(10, 2))
    >>> y = (X[:, 0] > 0.0).astype(int)
    >>> figure = pg.plot_surface(pg.fit(model, pg.Laplace(), 0, X, y=y), X, y, num=5)
    """
    fits = panels.as_fits(fits)
    data = panels.shown(next(iter(fits.values())), X, y)
    X, y, labels = data.X, data.y, labels or data.columns or ("x1", "x2")
    classes = classes or data.levels or ("y = 0", "y = 1")
    if X.ndim != 2 or X.shape[1] != 2:
        raise DataError(
            f"plot_surface(X=...) has shape {X.shape}; it shows two columns, plot_predictions one."
        )
    margin = 0.08 * np.ptp(X, axis=0)
    sides = np.linspace(X.min(0) - margin, X.max(0) + margin, num).T
    grid = np.stack([side.ravel() for side in np.meshgrid(*sides)], 1)
    figure, axes = panels.one_each(list(fits), f"Probability of {classes[1]}, and its boundary 1/2")
    for name, ax in axes.items():
        probs = np.asarray(fits[name].predict(grid, **kwargs).probs)
        if probs.shape != (len(grid),):
            told = f"'{name}' predicts shape {probs.shape}."
            raise DataError(f"plot_surface shows p(y = 1) of binary observations; {told}")
        shown = (*sides, probs.reshape(num, num))
        surface = ax.contourf(*shown, np.linspace(0, 1, 11), cmap="PuOr_r", alpha=0.8)
        ax.contour(*shown, [0.5], colors="black", linewidths=1.2)
        for c, (marker, colour) in enumerate(zip("o^", panels.CLASS_COLOURS, strict=True)):
            how = {"color": colour, "edgecolors": "white", "linewidths": 0.4}
            ax.scatter(*X[y == c].T, s=14, marker=marker, label=classes[c], **how)
        ax.set(title=name, xlabel=labels[0], ylabel=labels[1])
    next(iter(axes.values())).legend(loc="best", fontsize="small", framealpha=0.8)
    figure.colorbar(surface, ax=list(axes.values()), label=f"p({classes[1]})")
    return figure


def plot_evidence(comparison: "Comparison") -> "Figure":
    """Plot each method's log evidence or bound, and the importance-sampled truth.

    Parameters
    ----------
    comparison : Comparison
        What `compare` returned.

    Returns
    -------
    matplotlib.figure.Figure
        The truth has bars of 2 standard errors.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fits = {"laplace": pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x))}
    >>> comparison = pg.compare(fits, x + 0.05, np.sin(6.0 * x + 0.3), num_importance_samples=200)
    >>> figure = pg.plot_evidence(comparison)
    """
    if not (rows := [row for row in comparison.table if row["log_evidence"] is not None]):
        raise DataError(
            "plot_evidence: no fit has a log evidence (their hyperparameters were sampled)."
        )
    figure, ((ax,),) = panels.grid(1, 1, (1.4 * len(rows) + 3.0, 4.0))
    x = np.arange(len(rows))
    own = np.array([row["log_evidence"] for row in rows])
    truth, error = (np.array([row[k] for row in rows], float) for k in ("truth", "truth_se"))
    ax.plot(x, own, "D", color="tab:red", label="the method's own value")
    if np.any(known := np.isfinite(truth)):
        told = "importance-sampled truth ±2 s.e."
        how = {"fmt": "o", "color": "black", "capsize": 6, "label": told}
        ax.errorbar(x[known], truth[known], yerr=2.0 * error[known], **how)
    for i, gap in enumerate(own - truth):
        told = f"{gap:+.2f}" if known[i] else "no truth"
        at = {"xytext": (9, -4), "textcoords": "offset points"}
        ax.annotate(told, (i, own[i]), fontsize=9, **at)
    title = "Log evidence at each method's own hyperparameters\n"
    title += "(figures: method minus truth, where weights of draws could find it)"
    ax.set(title=title, xlabel="method", ylabel="log evidence (nats)", xlim=(-0.5, len(rows) - 0.3))
    ax.set_xticks(x, [row["method"] for row in rows])
    ax.ticklabel_format(axis="y", useOffset=False)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", fontsize="small")
    return figure


def plot_forest(
    fits: Mapping[str, Fit], *, site: str | None = None, num_latents: int = 4
) -> "Figure":
    """Plot medians and 50 % and 94 % intervals of parameters and some latents, method by method.

    Parameters
    ----------
    fits : mapping
        {name: fit}.
    site : str, default None
        The GP site of the latents. None is the first one that all fits have.
    num_latents : int, default 4
        How many rows, spread over the training data.

    Returns
    -------
    matplotlib.figure.Figure
        A method that fixes or maximises hyperparameters shows them as points. Positive
        hyperparameters have a panel with a logarithmic axis, because their posteriors have long
        right tails.

    Raises
    ------
    DataError
        If the fits have no hyperparameters and latents in common.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x))
    >>> figure = pg.plot_forest({"laplace": fit}, num_latents=2)
    """
    trees = {name: fit.to_datatree() for name, fit in fits.items()}
    sites = [k for fit in fits.values() for k in fit.latent]
    if site is None:
        shared = [k for k in sites if all(dots(k) in t.posterior for t in trees.values())]
        site = shared[0] if shared else None
    draws = {k: _forest_draws(trees[k], fit, site, num_latents) for k, fit in fits.items()}
    first, *others = draws.values()
    labels = [k for k in first if all(k in found for found in others)]
    latents = [k for k in labels if site is not None and k.startswith(f"{site}[")]
    if not (shown := [p for p in ([k for k in labels if k not in latents], latents) if p]):
        raise DataError(f"plot_forest: the fits share none of the sites {sites}; draw each alone.")
    groups, heights = panels.sevens(draws), [len(p) for p in shown]
    rows = len(groups[0]) + 1
    size, how = (8.0 * len(groups), 1.0 + 0.16 * rows * sum(heights)), {"height_ratios": heights}
    figure, axes = panels.grid(len(shown), len(groups), size, sharex="row", **how)
    for column, group in zip(axes.T, groups, strict=True):
        for ax, panel in zip(column, shown, strict=True):
            _forest(ax, group, panel, rows)
            positive = all(np.min(d[k]) > 0 for d in draws.values() for k in panel)
            if panel is not latents and positive:
                ax.set_xscale("log")
        if latents:
            column[-1].set_xlabel(f"latent value of {site} at a training row")
        column[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle("Hyperparameters and latents: median, 50 % and 94 % intervals")
    return figure


def _forest(ax, group: Mapping[str, dict], panel: Sequence[str], rows: int) -> None:
    """One panel: a block of lines a quantity, one a method."""
    for j, (name, draws) in enumerate(group.items()):
        how, marker = {"color": panels.COLOURS[j]}, panels.MARKERS[j]
        for i, label in enumerate(panel):
            low, q1, median, q3, high = np.quantile(draws[label], [0.03, 0.25, 0.5, 0.75, 0.97])
            y = -rows * i - j
            ax.plot([low, high], [y, y], lw=1, **how)
            ax.plot([q1, q3], [y, y], lw=3, **how)
            ax.plot(median, y, marker, ms=5, label=name if i == 0 else None, **how)
    ax.set_yticks([-rows * i - 0.5 * (len(group) - 1) for i in range(len(panel))], panel)
    ax.set_ylim(-rows * (len(panel) - 1) - len(group), 1.0)
    ax.grid(axis="x", alpha=0.3)


def _forest_draws(tree, fit: Fit, site: str | None, num_latents: int) -> dict[str, np.ndarray]:
    """{label: all draws} of entries of hyperparameters, and `num_latents` rows of f by label."""
    flat = {}
    known = fit.draws.of_equal_weight(1000).known
    for name, x in ((k, x) for k, x in known.items() if hasattr(x, "shape")):  # no network
        entries = np.reshape(np.asarray(x), (len(x), -1)).T
        single = len(entries) == 1
        flat |= {name if single else f"{name}[{i}]": entry for i, entry in enumerate(entries)}
    if site is None:
        return flat
    f = np.asarray(tree.posterior[dots(site)])
    names = row_names(fit, f.shape[-1])
    f = f.reshape(f.shape[0] * f.shape[1], -1, len(names))  # functions, rows
    of = [f"{c}, " if f.shape[1] > 1 else "" for c in range(f.shape[1])]
    chosen = np.linspace(0, f[0].size - 1, num_latents).round().astype(int)
    places = np.stack(np.unravel_index(chosen, f.shape[1:]), 1)
    return flat | {f"{site}[{of[c]}{names[n]}]": f[:, c, n] for c, n in places}


class _Curve(NamedTuple):
    """One fit's line: frequencies stated and observed, and of bins the rows in each."""

    stated: np.ndarray
    observed: np.ndarray
    rows: np.ndarray | None
    score: scores.Score
    axes: tuple[str, str]


def plot_calibration(fits, X_test, y_test, *args, **kwargs) -> "Figure":
    """Plot how calibrated predictions of test data are, one line per fit.

    The diagonal is perfect calibration. For classes the picture is a reliability diagram, else the
    observed coverage of the predictive central intervals.

    Parameters
    ----------
    fits : Fit or mapping
        A fit, or {name: fit}.
    X_test, y_test : array or frame
        Test inputs and observations.
    *args, **kwargs
        The model's other arguments at the test inputs.

    Returns
    -------
    matplotlib.figure.Figure

    Notes
    -----
    The reliability diagram shows the number of rows per bin below. Its bars are the central 90 %
    interval of the bin's frequency (Jeffreys' beta: Brown, Cai & DasGupta 2001, equation 9). A bin
    with few rows has a long bar, because it says little.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x))
    >>> figure = pg.plot_calibration({"laplace": fit}, x + 0.05, np.sin(6.0 * x + 0.3))
    """
    given = X_test, y_test, args, kwargs
    curves = {name: _curve(fit, *given) for name, fit in panels.as_fits(fits).items()}
    groups, binned = panels.sevens(curves), any(c.rows is not None for c in curves.values())
    size, heights = (5.6 * len(groups), 5.2 + 1.3 * binned), [4, 1][: 1 + binned]
    figure, axes = panels.grid(len(heights), len(groups), size, sharex=True, height_ratios=heights)
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
            ax.vlines(curve.stated, *ends, color=panels.COLOURS[j], alpha=0.35, linewidth=1)
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
    return {"marker": panels.MARKERS[j], "color": panels.COLOURS[j], "linewidth": 1.2}


def _share_interval(happened, rows):
    """Jeffreys' central interval of a frequency; to the end where none, or every one, happened."""
    low, high = stats.beta(happened + 0.5, rows - happened + 0.5).interval(_LEVEL)
    return np.where(happened < 0.5, 0.0, low), np.where(happened > rows - 0.5, 1.0, high)


def _curve(fit: Fit, X_test, y_test, args, kwargs) -> _Curve:
    X, y, others, named = with_observations(fit, X_test, y_test, args, kwargs)
    prediction, y, found = scores.judged(fit, X, y, others, named)
    if is_classification(prediction):
        words = ("predicted probability", "observed frequency")
        if outcome_probabilities(prediction).shape[-1] > 2:
            words = ("probability of the most probable class", "how often it was observed")
        curve = scores.reliability(prediction, y)
    elif found is None:
        raise DataError(
            "plot_calibration shows one site of numbers or classes, not vectors or several sites."
        )
    else:
        words = ("nominal coverage", "observed coverage")
        curve = scores.LEVELS, scores.coverage(found), None
    return _Curve(*curve, scores.calibration(prediction, y, found), words)
