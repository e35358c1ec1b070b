"""Quantiles of f and of y at new inputs: their predictive distribution functions, inverted.

f is a mixture of Gaussians over the draws of a fit. Of y, finitely many outcomes are added up; else
p(y <= t) is integrated over f (`predictive_cdf`), by nodes where one to three functions decide an
entry of y and its distribution function is known, by draws where not, with an error then.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logit, ndtr, ndtri
from jaxtyping import Array, Float, Int

from ppl_gp.draws import Moments
from ppl_gp.gp import bare_shape
from ppl_gp.quick import full_jit
from ppl_gp.results.integrals import predictive_cdf
from ppl_gp.results.integrals.compiled import Outcome
from ppl_gp.results.integrals.predictive_cdf import Kind
from ppl_gp.results.integrals.several import entries_of
from ppl_gp.results.query.query import Integration, Query

_WIDE = 2.0  # standard errors of p(y <= v): the interval that holds a quantile with 95 %
_FEWEST = 10.0  # draws beyond a level, from which how far they scatter is known


def quantiles_at(
    query: Query, levels: tuple[float, ...], y: dict[str, Outcome]
) -> tuple[dict[str, Any], dict[str, Outcome]]:
    """({GP site: (Q, ...)} of f, y with its quantiles), y being what `predictive` found."""
    p = jnp.asarray(levels)
    f, log_weights = predictive_cdf.marginals_of_draws(query)
    of_f = {k: _of_gaussians(v.mean, v.variance, log_weights, p) for k, v in f.items()}

    def with_quantiles(site):
        own = y[site.label]
        if own.log_probs is not None:
            found, error = of_outcomes(site.support, own.log_probs, p), None
            if own.below_error is not None:
                error = error_of_outcomes(site.support, own.log_probs, own.below_error, p)
            return own._replace(quantiles=found, quantiles_error=error)
        if (kind := predictive_cdf.kind_of(query, site)) is None:
            return own
        how = query, site, kind, _by_nodes(query, site, kind)
        found, error = _quantiles(*how, f, p, _start(kind, own.moments))
        is_exact = query.integration is Integration.given and kind.has_cdf
        return own._replace(quantiles=found, quantiles_error=None if is_exact else error)

    return of_f, {site.label: with_quantiles(site) for site in query.layout.sites}


def cdf_at(query: Query, site, t):
    """(p(y < t), p(y <= t)) of a site without a list of outcomes; `None` of vectors."""
    kind = predictive_cdf.kind_of(query, site)
    if kind is None:
        return None
    functions = _by_nodes(query, site, kind)
    f = {} if functions is None else predictive_cdf.marginals_of_draws(query)[0]
    t = np.asarray(t, jnp.result_type(float))
    below = [t - 1.0] if kind.integers else [] if kind.has_cdf else [_next_below(t)]
    found = _cdf(query, site, kind, functions, f, jnp.asarray([*below, t]))
    return found[0], found[-1]


def _next_below(t):
    """The largest number below t that JAX tells from it: it takes numbers too near to 0 for 0."""
    return np.minimum(np.nextafter(t, -np.inf), t - np.finfo(t.dtype).tiny)


def _by_nodes(query: Query, site, kind: Kind):
    """Which functions each entry sees, if p(y <= t) is integrated by nodes; else `None`."""
    nodes = (Integration.quadrature, Integration.functions)
    if not kind.has_cdf or query.integration not in nodes:
        return None
    return entries_of(query)[site.label].functions


@full_jit
def _cdf(query: Query, site, kind: Kind, functions, f, t):
    if functions is not None:
        return predictive_cdf.by_nodes(query, site, functions, f)(t)
    parts, log_weights, _ = predictive_cdf.of_draws(query, site, kind)
    return _mixed(parts, log_weights)(t)


@full_jit
def _quantiles(query: Query, site, kind: Kind, functions, f, p, start):
    """(quantiles, their errors or `None`)."""
    p = _levels(p, query.ask(site, bare_shape))
    if functions is not None:
        return _search(kind, predictive_cdf.by_nodes(query, site, functions, f), p, start), None
    return of_draws(kind, *predictive_cdf.of_draws(query, site, kind), p, start)


def _mixed(parts, log_weights):
    """t -> sum_t w_t parts_t(t), for t with a leading axis."""
    w = jnp.exp(log_weights)
    return lambda t: jax.lax.map(lambda t: jnp.einsum("t,t...->...", w, parts(t)), t)


def _levels(p, shape):
    """(Q, *shape)."""
    return jnp.broadcast_to(jnp.reshape(p, (-1,) + (1,) * len(shape)), (p.size, *shape))


@full_jit
def _of_gaussians(mean, variance, log_weights, p):
    """Of the mixture sum_t w_t N(mean_t, variance_t), (Q, ...)."""
    sd, shape = jnp.sqrt(variance), mean.shape[1:]
    p = _levels(p, shape).astype(mean.dtype)
    if mean.shape[0] == 1:
        return mean[0] + sd[0] * ndtri(p)
    w = jnp.reshape(jnp.exp(log_weights), (-1,) + (1,) * len(shape)).astype(mean.dtype)
    centre = jnp.sum(w * mean, 0)
    scale = jnp.sqrt(jnp.sum(w * (variance + (mean - centre) ** 2), 0))

    def F(x):
        def below(x):  # what a draw knows exactly is one step
            share = ndtr((x - mean) / jnp.where(sd > 0, sd, 1.0))
            found: Array = jnp.where(sd > 0, share, x >= mean)
            return jnp.sum(w * found, 0)

        return jax.lax.map(below, x)

    found = invert(F, p, centre + scale * ndtri(p), scale)
    return jnp.where(scale > 0, found, centre)


def of_outcomes(support, log_probs, p):
    """The first outcome up to which the probabilities add up to p."""
    return jnp.asarray(support)[_first_enough(jnp.cumsum(jnp.exp(log_probs), 0), p)]


def _first_enough(total, p):
    """(Q, ...): the first k with total_k >= p, of totals (K, ...) that end at one."""
    total = total.at[-1].set(1.0)
    enough = total[None] >= _levels(p, total.shape) - 1e3 * jnp.finfo(total.dtype).eps
    return jnp.argmax(enough, 1)


def error_of_outcomes(support, log_probs, spread, p):
    """`spread` (K, ...): standard errors of p(y <= k)."""
    total, values = jnp.cumsum(jnp.exp(log_probs), 0), jnp.asarray(support)
    low, found, high = (values[_first_enough(total + d * spread, p)] for d in (_WIDE, 0.0, -_WIDE))
    return half_way(low, found, high)


def half_way(low, found, high):
    """To the farther end, in units of `_WIDE` standard errors."""
    return jnp.maximum(high - found, found - low) / _WIDE


def _start(kind: Kind, moments: Moments | None):
    """(u, scale) about which the search begins, from the moments of y where it has any."""
    if moments is None:
        return jnp.zeros(()), jnp.ones(())
    mean, sd = moments.mean, jnp.sqrt(moments.variance)
    if kind.low is None or kind.integers:
        start, scale = mean, sd + (1.0 if kind.integers else 0.0)
    elif kind.high is None:
        ratio = (sd / (mean - kind.low)) ** 2
        start, scale = jnp.log((mean - kind.low) / jnp.sqrt(1 + ratio)), jnp.sqrt(jnp.log1p(ratio))
    else:
        start = logit((mean - kind.low) / (kind.high - kind.low))
        scale = jnp.ones_like(start)
    usable = jnp.isfinite(start) & jnp.isfinite(scale) & (scale > 0)
    return jnp.where(usable, start, 0.0), jnp.where(usable, scale, 1.0)


def _search(kind: Kind, F, p, start) -> Float[Array, "Q ..."]:
    """F: t -> p(y <= t), both (Q, ...); it begins at the quantile of a Gaussian."""
    centre, scale = start
    first = centre + scale * ndtri(p)
    if kind.integers and (low := kind.low) is not None:
        return invert(F, p, first, scale, low=low - 1.0, integers=True)
    return kind.value(invert(lambda u: F(kind.value(u)), p, first, scale))


def of_draws(kind: Kind, parts, log_weights, num, p, start):
    """(quantiles, their errors) of p(y <= t) = sum_t w_t parts_t(t): the ends of the interval are
    the quantiles at p plus and minus two standard errors of p(y <= quantile).
    """
    F, squares = _mixed(parts, log_weights), _mixed(lambda t: parts(t) ** 2, log_weights)
    found = _search(kind, F, p, start)
    spread = jnp.sqrt(_variance_of_share(kind, F, squares, found, p) / num)
    is_known = jnp.minimum(p, 1.0 - p) ** 2 >= _FEWEST * spread**2
    ends = jnp.where(is_known, jnp.stack([p - _WIDE * spread, p + _WIDE * spread]), p)
    low, high = (_search(kind, F, end, start) for end in ends)
    return found, jnp.where(is_known, half_way(low, found, high), jnp.inf)


def _variance_of_share(kind: Kind, F, squares, found, p):
    """Over draws, of p(y <= quantile | draw): where it is 0 or 1 the level tells, at the largest of
    the draws too, of which none lies beyond.
    """
    if not kind.has_cdf:
        return p * (1.0 - p)
    at = [found, found - 1.0] if kind.integers else [found]
    return jnp.maximum(jnp.max(jnp.stack([squares(t) - F(t) ** 2 for t in at]), 0), 0.0)


_STEPS = 200
_BISECT_EVERY = 4  # regula falsi may creep where F is flat
_CLOSE = 0.4  # of the tolerance: no step ends nearer to an end of the bracket
_ROUNDED = 8.0  # roundings of x that are left to a bracket: a step inside it moves x


class _Bracket(NamedTuple):
    """F(low) < p <= F(high), infinite at first; F - p there, halved where an end stayed twice."""

    low: Float[Array, "..."]
    high: Float[Array, "..."]
    below: Float[Array, "..."]
    above: Float[Array, "..."]
    side: Int[Array, "..."]  # +1 where the last step moved `high`, -1 where `low`
    step: Float[Array, "..."]  # by which the bracket grows
    steps: Int[Array, ""]


def invert(
    F: Callable,
    p: Float[Array, "..."],
    start: Float[Array, "..."],
    scale: Float[Array, "..."],
    *,
    low: float = -float("inf"),
    integers: bool = False,
) -> Float[Array, "..."]:
    """The smallest x with F(x) >= p, elementwise, to 1e-9 of `scale`, or to the rounding of x if
    that is more; exact integers.

    The bracket grows from `start` by doubled steps; inside, regula falsi by the Illinois rule
    (Dowell & Jarratt 1971), every fourth step a bisection. A step to where the bracket has an end
    already, as regula falsi makes once that end is the root to rounding, goes a little further in,
    and closes it (Brent 1973, chapter 4). `low`: a number below the support. F, nondecreasing, is
    evaluated once a step for all entries: 3 to 15 steps as a rule, 90 far from `start`, 130
    where F is flat at p, 200 at most: flat and far away the bracket stays wider (6e-5 at 1e9).
    """
    shape = jnp.broadcast_shapes(jnp.shape(p), jnp.shape(start))
    p, start, scale = (jnp.broadcast_to(x, shape) for x in (p, start, scale))
    eps = jnp.finfo(p.dtype).eps

    def width(s):  # of a bracket at the end
        return 1.0 if integers else eps**0.6 * scale + _ROUNDED * eps * jnp.abs(s.high)

    def running(s):
        return jnp.any(~((s.high - s.low) / width(s) <= 1.0)) & (s.steps < _STEPS)

    def inside(x, s):
        least = jnp.minimum(_CLOSE * width(s), 0.5 * (s.high - s.low))
        return jnp.clip(x, s.low + least, s.high - least)

    def candidate(s: _Bracket):
        share = s.above / (s.above - s.below)
        share = jnp.where(s.steps % _BISECT_EVERY == _BISECT_EVERY - 1, 0.5, share)
        x = s.high - share * (s.high - s.low)
        x = x if integers else inside(x, s)
        x = jnp.where(jnp.isinf(s.low), s.high - s.step, x)
        x = jnp.where(jnp.isinf(s.high), s.low + s.step, x)
        x = jnp.where(s.steps == 0, start, x)
        return jnp.clip(jnp.floor(x), s.low + 1.0, s.high - 1.0) if integers else x

    def advance(s):
        x = candidate(s)
        new = _moved(s, x, F(x) - p)
        is_found = integers & (s.high - s.low <= 1.0)
        low, high = (jnp.where(is_found, a, b) for a, b in ((s.low, new.low), (s.high, new.high)))
        return new._replace(low=low, high=high)

    return lax.while_loop(running, advance, _first(p, scale, low)).high


def _first(p, scale, low: float) -> _Bracket:
    """Before any evaluation."""
    zero = jnp.zeros((), jnp.int32)
    ends = jnp.full(p.shape, low, p.dtype), jnp.full(p.shape, jnp.inf, p.dtype)
    return _Bracket(*ends, -p, 1.0 - p, jnp.zeros(p.shape, jnp.int32), scale, zero)


def _moved(s: _Bracket, x: Array, value: Array) -> _Bracket:
    """The bracket with an end at x, where F - p is `value`."""
    up = value >= 0
    side = jnp.where(up, 1, -1).astype(jnp.int32)
    half = jnp.where(side == s.side, 0.5, 1.0)
    return _Bracket(
        jnp.where(up, s.low, x),
        jnp.where(up, x, s.high),
        jnp.where(up, half * s.below, value),
        jnp.where(up, value, half * s.above),
        side,
        2.0 * s.step,
        s.steps + 1,
    )
