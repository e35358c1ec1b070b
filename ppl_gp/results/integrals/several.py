"""What the observed sites say about y given f, entry by entry and row by row; and of several
functions, which each entry depends on, which are integrated together, and the integral over all.

Functions that meet in a nonlinear operation of the likelihood, as `reading.interactions` proves, or
are correlated, are integrated together (`cubature`). The others (several outputs, or several
observed sites, each with a function of its own) are integrated apart: a product over groups.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.draws import JointMoments, Moments
from ppl_gp.errors import ModelError
from ppl_gp.gp import bare, unwrap
from ppl_gp.numerics.blocks import flatten
from ppl_gp.numerics.quadrature import inverse_mills
from ppl_gp.quick import pruned
from ppl_gp.reading import dependence as affine
from ppl_gp.reading.dependence import Dependence
from ppl_gp.reading.interactions import dependence
from ppl_gp.reading.roles import log_prob_per_datum
from ppl_gp.results.integrals import cubature
from ppl_gp.results.query.layout import ObservedSite
from ppl_gp.results.query.query import Integration, Query


def by_datum(x, site: ObservedSite):
    """(entries, M): a site's values with the data last and its other axes in one."""
    return jnp.reshape(jnp.moveaxis(x, site.axis, -1), (-1, x.shape[site.axis]))  # pyright: ignore[reportArgumentType]


def over_entries(site: ObservedSite, shape, functions, f: Moments, ask: Callable):
    """ask(read, f of the entry (D, M)), (M,), of each entry of a site, in the site's `shape`.

    `functions`: rows of f (F, M) that each entry sees, one tuple for all or one for each.
    read(value) makes a function of all rows, with values in the site's shape, one of the entry's
    own rows, with values (M,).
    """
    others = tuple(n for i, n in enumerate(shape) if i != site.axis)
    num = math.prod(others)
    index = jnp.broadcast_to(jnp.asarray(functions), (num, len(functions[0])))

    def one(entry):
        e, own = entry
        place = lambda x: x if len(f.mean) == 1 else f.mean.at[own].set(x)  # noqa: E731
        of_entry = lambda x: by_datum(x, site)[e]  # noqa: E731
        read = lambda value: lambda x: jax.tree.map(of_entry, value(place(x)))  # noqa: E731
        return ask(read, Moments(f.mean[own], f.variance[own]))

    found = lax.map(one, (jnp.arange(num), index))
    back = lambda x: jnp.moveaxis(jnp.reshape(x, (*others, -1)), -1, site.axis)  # noqa: E731  # pyright: ignore[reportArgumentType]
    return jax.tree.map(back, found)


# `mean` and `variance` of these are a direction's, not the expectations of y and (y - E[y])^2
_CIRCULAR = (dist.VonMises, dist.SineSkewed, dist.SineBivariateVonMises, dist.ProjectedNormal)


def mean_and_variance(fn) -> list[Float[Array, "..."]]:
    """Of y; raises `NotImplementedError` where NumPyro has none, or has a circular one."""
    if _is_circular(fn):
        raise NotImplementedError
    found, core = [fn.mean, fn.variance], unwrap(fn)
    if isinstance(core, _TRUNCATED) and isinstance(core.base_dist, dist.Normal):
        pairs = zip(found, _in_tail(core), strict=True)
        found = [jnp.where(jnp.isfinite(x), x, tail) for x, tail in pairs]
    return [jnp.broadcast_to(x, fn.shape()) for x in found]


_TRUNCATED = (
    dist.LeftTruncatedDistribution,
    dist.RightTruncatedDistribution,
    dist.TwoSidedTruncatedDistribution,
)


def _in_tail(core: Any) -> tuple:
    """(mean, variance) of a normal far below `low`, or above `high`: its share between underflows,
    and NumPyro has 0 / 0. With x the scaled distance, negative, and h its inverse Mills ratio.
    """
    loc, scale = core.base_dist.loc, core.base_dist.scale
    low, high = getattr(core, "low", -jnp.inf), getattr(core, "high", jnp.inf)
    end, sign = jnp.where(loc < low, low, high), jnp.where(loc < low, 1.0, -1.0)
    x = sign * (loc - end) / scale
    h = inverse_mills(x)
    return end + sign * scale * (x + h), scale**2 * jnp.maximum(1.0 - h * (x + h), 0.0)


def _is_circular(fn) -> bool:
    """Also of mixtures, and what is built on another distribution."""
    core = unwrap(fn)
    inner = [getattr(core, k, None) for k in ("base_dist", "component_distribution")]
    inner += getattr(core, "component_distributions", ())
    return isinstance(core, _CIRCULAR) or any(_is_circular(x) for x in inner if x is not None)


def log_density_per_datum(trace: dict, weighed: bool = False) -> Float[Array, "M"]:
    """sum over observed sites of log p(y_n | f), (M,), nats. Masks hold; `scale`, a device of
    training, does not unless `weighed`.

    A factor counts where it sees observations (censored data, say); another one is a penalty, and
    no part of a density of y. Raises `ModelError` if no observed site has a log density per datum.
    """
    sites = [s for s in trace.values() if s["type"] == "sample" and s["is_scored"]]
    terms = [log_prob_per_datum(s if weighed else {**s, "scale": None}) for s in sites]
    pointwise = [t for t in terms if jnp.ndim(t)]
    if not sites:
        raise ModelError(
            "log_density scores observations, and the model was given none: give them after X_new, "
            "or by keyword, y=..."
        )
    if not pointwise:
        raise ModelError(
            f"the model's observed sites {[s['name'] for s in sites]} have no log density for "
            "each datum: each is one event. Put them into a plate with one entry per row of X_new."
        )
    return sum(pointwise[1:], pointwise[0])


# draws among which a datum's point of reference is looked for where the means have no density
REFERENCES = 64


def outer_sites(query: Query) -> list[str]:
    """GP sites that no other GP sees, nor the prior of a latent."""
    return [k for k in query.draws.kept if k not in query.layout.inner]


def coupled_groups(query: Query) -> tuple[tuple[int, ...], ...]:
    """Groups of functions that log p(y_n | f) sees, between which it is a sum; none where it is not
    proved that rows are apart, or for one function.
    """
    is_joint = query.integration is Integration.joint_draws
    if is_joint or query.site is not None or not outer_sites(query):
        return ()
    from scipy.sparse.csgraph import connected_components  # here: few models need it

    trace_at, rows = _rows_at(query)
    found = dependence(lambda f: log_density_per_datum(trace_at(f)), rows.shape[0], rows)
    correlated = _correlated(query)
    # those that are seen, and those that are correlated with them
    seen = correlated @ np.asarray(found.on[0].any(1))
    _, own = connected_components((found.coupled | correlated) & seen[:, None] & seen)
    return tuple(sorted({tuple(np.flatnonzero(own == k).tolist()) for k in own[seen]}))


@dataclass(frozen=True)
class Entries:
    """Which functions each entry of an observed site sees: (E, D) rows of `flatten`, D the most of
    any, or (1, D) for all entries; `None` above three. `is_affine`: the mean of y is affine in all
    of them and its variance constant, as proved on the jaxpr.
    """

    functions: tuple[tuple[int, ...], ...] | None
    is_affine: bool = False


def entries_of(query: Query) -> dict[str, Entries]:
    """{label: Entries} of the observed sites that are predicted, where functions decide them."""
    if query.site is not None:
        return {site.label: Entries(((0,),)) for site in query.layout.sites}
    if query.integration is not Integration.functions:
        return {}
    trace_at, rows = _rows_at(query)
    companions = _correlated(query)
    return {site.label: _entries(trace_at, site, rows, companions) for site in query.layout.sites}


def _entries(trace_at, site: ObservedSite, rows, companions) -> Entries:
    num = rows.shape[0]
    fn_at = lambda f: bare(trace_at(f[:num])[site.name]["fn"])  # noqa: E731

    def seen(f):
        fn = fn_at(f)
        if fn.event_dim:
            return mean_and_variance(fn)
        # Moments need not show what the distribution sees (a Cauchy's scale). The value is any
        # number, from a row of its own, so that what is found holds for all.
        return [fn.log_prob(_value(fn, site, f[num, 0]))]

    points = jnp.concatenate([rows, rows[:1]])
    try:
        found = dependence(seen, num + 1, points)
    except NotImplementedError:  # vectors without moments, of which nothing is told
        return Entries(((0,),))
    is_affine = site.support is None and _is_affine(fn_at, points)
    by_site = lambda on: np.stack([np.asarray(by_datum(x, site)).any(1) for x in on[:num]])  # noqa: E731
    by_entry = companions @ np.any([by_site(on) for on in found.on], 0)  # (F, E)
    sets = [np.flatnonzero(column).tolist() for column in np.transpose(by_entry)]
    size = max(1, *map(len, sets)) if sets else 1
    if size > cubature.MAX_DIMENSIONS:
        return Entries(None, is_affine)
    # any others will do: the entry does not see them
    filled = [(*s, *(i for i in range(num) if i not in s))[:size] for s in sets]
    return Entries(tuple(filled), is_affine)


def _value(fn, site: ObservedSite, number):
    """`number` for every entry, as a value of the distribution."""
    if site.support is not None:
        number = jnp.asarray(site.support[0] + number, jnp.asarray(site.support).dtype)
    elif fn.support.is_discrete:
        number = jnp.asarray(number, int)
    return jnp.broadcast_to(number, fn.batch_shape)


def _is_affine(fn_at, points) -> bool:
    try:
        mean, variance = affine.dependence(lambda f: mean_and_variance(fn_at(f)), points)
    except NotImplementedError:
        return False
    return mean <= Dependence.affine and variance is Dependence.constant


def _rows_at(query: Query):
    """(trace of rows (F, M) of outer functions, zeros of that shape) at the first draw."""
    first = query.draws.at(0)  # what lies below does not matter here: it is at its prior mean
    declared = query.trace(first, {})
    rows, rebuild = flatten({k: jnp.zeros(declared[k]["fn"].shape()) for k in outer_sites(query)})
    return lambda f: query.trace(first, rebuild(f)), rows


def _correlated(query: Query) -> np.ndarray:
    """(F, F): which functions are correlated within a row, given the data."""
    kept = {k: query.draws.kept[k] for k in outer_sites(query)}
    owners = [
        (k, 0 if v.coupled else i)
        for k, v in kept.items()
        for i in range(v.coupled or math.prod(v.mean.shape[1:-1]))
    ]
    return np.array([[a == b for b in owners] for a in owners])


def stacked(f: dict[str, Any]) -> tuple[Moments, Callable]:
    """(means and variances that nodes resolve (F, M), the way back to {site: f}) of independent
    coordinates: the functions, or, where they are correlated, standard normal ones behind them.
    """
    joint = {k: v for k, v in f.items() if isinstance(v, JointMoments)}
    standard = lambda v: Moments(jnp.zeros_like(v.mean), jnp.ones_like(v.mean))  # noqa: E731
    own = {k: standard(v) if k in joint else v for k, v in f.items()}
    mean, rebuild = flatten({k: v.mean for k, v in own.items()})
    variance, _ = flatten({k: v.variance for k, v in own.items()})

    def back(rows):
        return {k: joint[k].at(x) if k in joint else x for k, x in rebuild(rows).items()}

    return jax.vmap(cubature.floored)(Moments(mean, variance)), back


def log_expectation_over(log_lik, f: dict[str, Any], groups, effort: cubature.Effort, key):
    """(log E[exp log_lik(f)_n], squared relative error), (M,) each, under Gaussian f of these
    `Moments` or `JointMoments`; log_lik: {site: f} -> (M,).
    """
    if not groups:
        log_p = log_lik({k: v.mean for k, v in f.items()})
        return log_p, jnp.zeros_like(log_p)
    rows, rebuild = stacked(f)
    at = lambda x: log_lik(rebuild(x))  # noqa: E731
    base, offset = rows.mean, jnp.zeros_like(rows.mean[0])
    is_quadratic = affine.degree(at, rows.mean) <= 2.0  # a Gaussian likelihood, say
    if len(groups) > 1:
        base, offset = _reference(at, rows)
    log_p, error = offset, jnp.zeros_like(offset)
    for size in sorted({len(g) for g in groups}):
        index = jnp.asarray([g for g in groups if len(g) == size])

        def one(entry):
            i, key = entry
            log_g = lambda x: at(base.at[i].set(x)) - offset  # noqa: E731
            own = Moments(rows.mean[i], rows.variance[i])
            return cubature.log_integral(log_g, own, effort, key, quadratic=is_quadratic)

        keys = random.split(random.fold_in(key, size), index.shape[0])
        found, squares = lax.map(one, (index, keys))
        log_p, error = log_p + jnp.sum(found, 0), error + jnp.sum(squares, 0)
    is_lost = jnp.isnan(log_p)
    return jnp.where(is_lost, -jnp.inf, log_p), jnp.where(is_lost, jnp.inf, error)


def _reference(at, f: Moments):
    """(rows, log_lik there): the means, or, where they have no density, the likeliest of a few
    draws. Terms of other groups are taken relative to it, so it must be finite.
    """
    z = random.normal(random.key(5), (REFERENCES, *f.mean.shape), f.mean.dtype)
    trials = jnp.concatenate([f.mean[None], f.mean + jnp.sqrt(f.variance) * z])
    values: Array = lax.map(at, trials)
    finite = jnp.where(jnp.isfinite(values), values, -jnp.inf)
    best = jnp.where(jnp.isfinite(values[0]), 0, jnp.argmax(finite, 0))
    take = lambda x: jnp.take_along_axis(x, jnp.broadcast_to(best, x.shape[1:])[None], 0)[0]  # noqa: E731
    return take(trials), take(values)


def quadratic_log_expectation(log_lik, f: dict[str, Moments]) -> Float[Array, "M"]:
    """log E[exp log_lik(f)_n] by slope and curvature along each function at the means, (M,)."""
    (mean, variance), rebuild = stacked(f)
    slope = jax.grad(pruned(lambda rows: jnp.sum(log_lik(rebuild(rows))), mean))
    curvature = jnp.einsum("mii->im", cubature.minus_hessian(slope, mean))
    g, h = slope(mean), -jnp.maximum(curvature, 0.0)
    shrunk = 1.0 - variance * h
    return log_lik(rebuild(mean)) + 0.5 * jnp.sum(variance * g**2 / shrunk - jnp.log(shrunk), 0)


def log_lik_above(query: Query, groups) -> Callable:
    """(trace, f, key) -> log p(y*_n | what was drawn below), (M,): outer sites are integrated."""
    how, outer = cubature.OF_LAYERS, outer_sites(query)

    def log_lik(trace, f, key):
        at = _log_lik_at(query, trace)
        if query.site is not None:
            return cubature.log_expectation(lambda x: at({query.site: x}), f[query.site], how.nodes)
        return log_expectation_over(at, {k: f[k] for k in outer}, groups, how, key)[0]

    return log_lik


def quick_log_lik(query: Query, groups) -> Callable:
    """As `log_lik_above`, nearly, for fitting proposals.

    log p is taken as quadratic about the means of several functions: exact for Gaussian noise.
    """
    outer = outer_sites(query)
    if query.site is not None or not outer:
        return log_lik_above(query, groups)
    return lambda trace, f, _: quadratic_log_expectation(
        _log_lik_at(query, trace), {k: f[k] for k in outer}
    )


def _log_lik_at(query: Query, trace: dict) -> Callable:
    """{outer GP site: f} -> log p(y*_n | f, what was drawn below), (M,)."""
    trace_at = cubature.above(query, trace)
    return lambda f: log_density_per_datum(trace_at(f))
