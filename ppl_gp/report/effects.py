"""Hyperparameters and effects in a table and in a picture, and what each term of a predictor adds,
along a variable with its band.
"""

import html
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import equinox as eqx
import numpy as np
from jax import random
from numpyro.distributions import Distribution

from ppl_gp.errors import DataError
from ppl_gp.kept import FromPseudo
from ppl_gp.report.panels import Column, draw_band, draw_bars, grid, variable
from ppl_gp.report.slices import inputs_in_columns, place, slice_through, with_arguments
from ppl_gp.results.datatree import draws_with_parts
from ppl_gp.results.fit import Fit
from ppl_gp.results.record import unfolded

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_PANEL = (3.4, 2.8)  # inches
_DRAWS, _LEVELS = 4000, np.array([0.05, 0.95])


def summary(fit: Fit) -> "pd.DataFrame":
    """As `Fit.summary`."""
    moved, rows = _moved_by_skewness(fit), _of_hyper(fit)
    for name, q in fit.sites.items():
        if isinstance(q, Distribution) and q.support is not None and not q.support.is_discrete:
            ends = _quantiles(q) + moved.get(name, 0.0)
            rows |= _rows(name, "marginal", q.mean, np.sqrt(q.variance), *ends)
    return _table(rows)


def as_html(fit: Fit) -> str:
    """The headline, and the table without effects, whose marginals may take seconds."""
    return f"<p>{html.escape(fit.headline)}</p>{_table(_of_hyper(fit))._repr_html_()}"


def _of_hyper(fit: Fit) -> dict[str, tuple]:
    """The rows of `summary` that need no marginals of effects."""
    weights = np.exp(np.asarray(fit.draws.log_weights, float))
    points = unfolded({k: fit.hyper[k] for k in fit.points})
    even, rows = unfolded(fit.draws.of_equal_weight(_DRAWS).hyper), {}
    for name, x in unfolded(fit.draws.hyper).items():
        mean = np.tensordot(weights, np.asarray(x, float), 1)
        if name in points:
            rows |= _rows(name, "point", mean, *np.full((3, *mean.shape), np.nan))
        else:
            variance = np.tensordot(weights, (np.asarray(x, float) - mean) ** 2, 1)
            ends = np.quantile(np.asarray(even[name]), _LEVELS, axis=0)
            rows |= _rows(name, "draws", mean, np.sqrt(variance), *ends)
    return rows


def _table(rows: dict[str, tuple]) -> "pd.DataFrame":
    import pandas as pd  # with xarray it takes a second, which a fit need not wait for

    table = pd.DataFrame.from_dict(rows, orient="index")
    return table.set_axis(["kind", "mean", "sd", "5 %", "95 %"][: table.shape[1]], axis=1)


def _moved_by_skewness(fit: Fit) -> dict[str, np.ndarray]:
    """{effect: by how much the skewness of draws moves their quantiles}, by the same draws."""
    if all(not isinstance(k, FromPseudo) or k.sites.third is None for k in fit.latent.values()):
        return {}
    thirds = lambda draws: [k.sites.third for k in draws.kept.values()]  # noqa: E731
    straight = replace(fit, draws=eqx.tree_at(thirds, fit.draws, replace_fn=np.zeros_like))
    skewed, plain = (draws_with_parts(f, random.key(0), _DRAWS)[2] for f in (fit, straight))
    ends = lambda x: np.quantile(x, _LEVELS, axis=0)  # noqa: E731
    return {k: ends(skewed[k]) - ends(plain[k]) for k in skewed}


def _rows(name: str, kind: str, *figures) -> dict[str, tuple]:
    places = itertools.product(*map(range, np.shape(figures[0])))
    label = lambda at: f"{name}[{','.join(map(str, at))}]" if at else name  # noqa: E731
    return {label(at): (kind, *(float(np.asarray(x)[at]) for x in figures)) for at in places}


def _quantiles(q: Distribution):
    """In closed form, else by halving of a distribution function (mixtures), else by draws."""
    try:
        return np.stack([np.asarray(q.icdf(level)) for level in _LEVELS])
    except (NotImplementedError, ImportError):  # some of NumPyro's need TensorFlow's
        drawn = np.asarray(q.sample(random.key(0), (400,)))  # both levels lie within them
    try:
        return np.stack([_halved(q.cdf, p, drawn.min(0), drawn.max(0)) for p in _LEVELS])
    except (NotImplementedError, ImportError):
        return np.quantile(q.sample(random.key(0), (_DRAWS,)), _LEVELS, axis=0)


def _halved(cdf, level: float, low, high):
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = np.where(cdf(middle) >= level, (low, middle), (middle, high))  # NaN: below
    return high


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
        ends = np.sort([change(mean - 2.0 * sd), change(mean + 2.0 * sd)], 0)
        _draw_term(ax, along_it, change(mean), ends)
        ax.set_title(f"{term}\n{held}", fontsize="medium") if held else ax.set_title(term)
        ax.set(xlabel=(labels or {}).get(term, along_it.name))
    axes[0, 0].set_ylabel("added to the predictor" if response is None else "on the response")
    figure.suptitle("Terms of the predictor:\nmean and ±2 standard deviations")
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


def _draw_term(ax, along: Column, mean, ends) -> None:
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
        ends = part[["5 %", "95 %"]].to_numpy()
        how = {"fmt": "o", "color": "black", "capsize": 3}
        drawn = ax.errorbar(ends.mean(1), place, xerr=0.5 * np.diff(ends)[:, 0], **how)
        drawn.lines[0].set_xdata(part["mean"])  # which may lie outside
        ax.update_datalim(np.stack([part["mean"], place], 1))
        ax.axvline(0.0, color="grey", linestyle="--", linewidth=1)
        ax.set_yticks(place, part.index)
        ax.set(title=site, ylim=(len(part) - 0.5, -0.5))
    figure.suptitle("Mean and central 90 % interval")
    return figure
