"""Pictures of an additive predictor: each term along a variable with its band, and each effect."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.report.panels import Column, draw_band, draw_bars, grid, variable
from ppl_gp.report.slices import inputs_in_columns, place, slice_through, with_arguments
from ppl_gp.results.fit import Fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANEL = (3.4, 2.8)  # inches


def plot_components(
    fit: Fit,
    X_new,
    *args,
    along: Mapping[str, object],
    at: Mapping[Any, Any] | None = None,
    num: int = 100,
    labels: Mapping[str, str] | None = None,
    response: Callable | None = None,
    **kwargs,
) -> "Figure":
    """Plot what each term of the linear predictor adds, one panel per term.

    The picture shows the mean and 2 standard deviations on both sides.

    Parameters
    ----------
    fit : Fit
        A fit that integrates a linear predictor.
    X_new, *args, **kwargs
        As for `fit.components`.
    along : mapping
        {term: the variable along which it is drawn}. Only these terms are drawn, in this order;
        they may include `"total"` and `"offset"`. A variable is an array of values, (M,), or a
        column of X_new by name or place, as in {"f": "age"} or {"f": 0}. A column draws a slice: it
        varies, and the other columns and per-row arguments are fixed, as the title says.
    at, num : mapping, int, default None, 100
        Where the other columns are fixed, and the number of points, as for `plot_predictions`.
    labels : mapping, default None
        {term: the name of its variable}. None takes the names of a frame's columns.
    response : callable, default None
        The inverse of the link, applied to the mean and the edges of the band. For a log rate,
        `jnp.exp` shows the factor of the rate. None draws on the scale of the link.

    Returns
    -------
    matplotlib.figure.Figure
        A variable with fewer than ten different values, such as groups, has points with bars.

    Raises
    ------
    DataError
        For an unknown term, column or label, and if a row depends on several functions.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(level + f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=2.0 + np.sin(6.0 * x))
    >>> figure = pg.plot_components(fit, x, along={"f": x})
    """
    terms = _terms(fit, X_new, args, kwargs, along, at or {}, num)
    lines = max((len(held.splitlines()) for *_, held in terms.values()), default=0)
    change = (lambda x: x) if response is None else (lambda x: np.asarray(response(x)))
    figure, axes = grid(1, len(along), (_PANEL[0] * len(along), _PANEL[1] + 0.2 * lines))
    for ax, (term, (found, along_it, held)) in zip(axes[0], terms.items(), strict=True):
        mean, sd = np.asarray(found.mean), np.sqrt(np.asarray(found.variance))
        if mean.ndim > 1:
            raise DataError(
                f"term '{term}' has {len(mean)} functions; draw fit.components(...) each."
            )
        ends = np.stack([change(mean - 2.0 * sd), change(mean + 2.0 * sd)])
        _draw(ax, along_it, change(mean), ends)
        ax.set_title(f"{term}\n{held}", fontsize="medium") if held else ax.set_title(term)
        ax.set(xlabel=(labels or {}).get(term, along_it.name))
    axes[0, 0].set_ylabel("added to the predictor" if response is None else "on the response")
    figure.suptitle("Terms of the predictor, mean and ±2 standard deviations")
    return figure


def _terms(fit: Fit, X_new, args, kwargs, along, at, num: int) -> dict:
    """{term: (its distribution, the variable that it is drawn along, what is held, in words)}."""
    whole = [k for k, v in along.items() if np.ndim(v)]
    there = fit.components(X_new, *args, **kwargs) if whole else {}
    found = {}
    for term, values in along.items():
        if not np.ndim(values):
            columns = inputs_in_columns(fit, X_new)
            j = place(columns, "along", values)
            held = {k: v for k, v in at.items() if place(columns, "at", k) != j}
            call = f"plot_components(fit, X, along={{{term!r}: {values!r}}}, "
            cut = slice_through(columns, j, held, num)
            cut, others, named = with_arguments(cut, call, fit, X_new, args, kwargs)
            along_it = cut.along._replace(labels=columns[j].labels)
            terms = fit.components(cut.X, *others, **named)
            told = cut.title(cut.held, 36)
        else:
            along_it = variable(f"plot_components(along={{{term!r}: ...}})", values)
            terms, told = there, ""
        if term not in terms:
            raise DataError(
                f"plot_components(along=...) names {term!r}; the terms are {list(terms)}."
            )
        found[term] = terms[term], along_it, told
    return found


def _draw(ax, along: Column, mean, ends) -> None:
    x = along.values
    if len(np.unique(x)) < 10 or along.labels is not None:
        first = np.unique(x, return_index=True)[1]
        draw_bars(ax, x[first], mean[first], ends[:, first])
        ax.set_xticks(x[first], along.labels and [along.labels[i] for i in x[first]])
    else:
        order = np.argsort(x)
        draw_band(ax, x[order], mean[order], ends[:, order])


def plot_effects(fit: Fit, sites: Sequence[str] | None = None) -> "Figure":
    """Plot effects with their central 90 % intervals, one panel per site.

    Parameters
    ----------
    fit : Fit
        Any fit. The picture shows the intervals of `fit.summary()`.
    sites : sequence of str, default None
        Which sites. None is all that have a distribution or draws.

    Returns
    -------
    matplotlib.figure.Figure
        Each entry of a site is a row. A dashed line is at zero.

    Raises
    ------
    DataError
        For sites without an interval: points under `MAP()` and `Fixed()`, and GPs.

    Examples
    --------
    >>> def model(X, y=None):
    ...     slope = numpyro.sample("slope", dist.Normal(0.0, 3.0))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(slope * X)), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> figure = pg.plot_effects(pg.fit(model, pg.Laplace(), 0, x, y=np.arange(10)))
    """
    table = fit.summary()
    table = table[table["kind"] != "point"] if len(table) else table
    entries: dict[str, list] = {}
    for row in table.index:
        entries.setdefault(str(row).partition("[")[0], []).append(row)
    shown = list(entries) if sites is None else list(sites)
    if missing := [k for k in shown if k not in entries] or not shown:
        raise DataError(
            f"plot_effects: there are no intervals of {missing if shown else 'any site'}; the fit "
            f"has those of {list(entries)}. Hyperparameters have one under Grid() or Sample()."
        )
    rows = max(len(entries[k]) for k in shown)
    figure, axes = grid(1, len(shown), (_PANEL[0] * len(shown), 1.2 + 0.22 * rows))
    for ax, site in zip(axes[0], shown, strict=True):
        part = table.loc[entries[site]]
        place = np.arange(len(part))
        bars = np.abs([part["mean"] - part["5 %"], part["95 %"] - part["mean"]])
        ax.errorbar(part["mean"], place, xerr=bars, fmt="o", color="black", capsize=3)
        ax.axvline(0.0, color="grey", linestyle="--", linewidth=1)
        ax.set_yticks(place, part.index)
        ax.set(title=site, ylim=(len(part) - 0.5, -0.5))
    figure.suptitle("Mean and central 90 % interval")
    return figure
