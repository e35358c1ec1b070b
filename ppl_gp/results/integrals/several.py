"""Integrals over several independent functions a datum: a product over groups of functions that the
likelihood couples (`groups`).

Functions that do not meet are integrated apart, one by one on the nodes of `numerics.quadrature`
(several outputs, or several observed sites, each with a function of its own); those that meet in a
log-likelihood that is proved quadratic in closed form, else two or three by cubature and more by
weighted draws, with an error.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.quick import pruned
from ppl_gp.reading.affine import degree
from ppl_gp.results.integrals import cubature
from ppl_gp.results.integrals.likelihood import floored, log_expectation
from ppl_gp.results.query.mixture import JointMoments, Moments
from ppl_gp.sparse.expectation import flatten

# draws among which a datum's point of reference is looked for where the means have no density
REFERENCES = 64


class Effort(NamedTuple):
    """Static: nodes of one function, whether `many` integrals are averaged, and draws of more
    functions than cubature serves.
    """

    nodes: int
    many: bool
    draws: int


def stacked(f: dict[str, Any]):
    """(means (F, M), variances that nodes resolve (F, M), the way back to {site: f}) of independent
    coordinates: the functions, or, where they are correlated, standard normal ones behind them.
    """
    joint = {k: v for k, v in f.items() if isinstance(v, JointMoments)}
    mean, rebuild = flatten(
        {k: jnp.zeros_like(v.mean) if k in joint else v.mean for k, v in f.items()}
    )
    variance = flatten(
        {k: jnp.ones_like(v.mean) if k in joint else v.variance for k, v in f.items()}
    )[0]

    def back(rows):
        return {k: joint[k].at(x) if k in joint else x for k, x in rebuild(rows).items()}

    return mean, jax.vmap(lambda m, v: floored(Moments(m, v)).variance)(mean, variance), back


def log_expectation_over(log_lik, f: dict[str, Any], groups, effort: Effort, key):
    """(log E[exp log_lik(f)_n], squared relative error), (M,) each, under Gaussian f of these
    `Moments` or `JointMoments`; log_lik: {site: f} -> (M,).
    """
    mean, variance, rebuild = stacked(f)
    sd, at = jnp.sqrt(variance), lambda rows: log_lik(rebuild(rows))
    if not groups:
        return at(mean), jnp.zeros_like(mean[0])
    base, offset = mean, jnp.zeros_like(mean[0])
    is_quadratic = degree(at, mean) <= 2.0  # a Gaussian likelihood, say
    if len(groups) > 1:
        base, offset = _reference(at, mean, sd)
    parts = []
    for size in sorted({len(g) for g in groups}):
        index = jnp.asarray([g for g in groups if len(g) == size])

        def one(entry, size=size):
            i, key = entry

            def log_g(z):
                return at(base.at[i].set(mean[i] + sd[i] * z)) - offset

            if size == 1:
                (i,) = i
                alone = lambda x: at(base.at[i].set(x)) - offset  # noqa: E731
                log_p = log_expectation(alone, Moments(mean[i], variance[i]), effort.nodes)
                return log_p, jnp.zeros_like(log_p)
            if is_quadratic:
                return cubature.log_integral_of_quadratic(log_g, size, mean[0])
            if size <= cubature.MAX_DIMENSIONS:
                return cubature.log_integral(log_g, size, mean[0], effort.many)
            return cubature.log_integral_by_draws(log_g, size, mean[0], effort.draws, key)

        log_p, error = lax.map(
            one, (index, random.split(random.fold_in(key, size), index.shape[0]))
        )
        parts.append((jnp.sum(log_p, 0), jnp.sum(error, 0)))
    log_p, error = (sum(x[1:], x[0]) for x in zip(*parts, strict=True))
    log_p = offset + log_p
    return jnp.where(jnp.isnan(log_p), -jnp.inf, log_p), jnp.where(jnp.isnan(log_p), jnp.inf, error)


def _reference(at, mean, sd):
    """(rows, log_lik there): the means, and where they have no density the likeliest of a few
    draws.

    Terms of other groups are taken relative to it, so it must be finite.
    """
    z = random.normal(random.key(5), (REFERENCES, *mean.shape), mean.dtype)
    trials = jnp.concatenate([mean[None], mean + sd * z])
    values = lax.map(at, trials)
    finite = jnp.where(jnp.isfinite(values), values, -jnp.inf)
    best = jnp.where(jnp.isfinite(values[0]), 0, jnp.argmax(finite, 0))
    take = lambda x: jnp.take_along_axis(x, jnp.broadcast_to(best, x.shape[1:])[None], 0)[0]  # noqa: E731
    return take(trials), take(values)


def quadratic_log_expectation(log_lik, f: dict[str, Moments]) -> Float[Array, "M"]:
    """log E[exp log_lik(f)_n] with log_lik replaced by its slope and curvature along each function
    at the means, (M,).
    """
    mean, variance, rebuild = stacked(f)
    slope = jax.grad(pruned(lambda rows: jnp.sum(log_lik(rebuild(rows))), mean))

    def along(i):
        direction = jnp.zeros_like(mean).at[i].set(1.0)
        g, h = jax.jvp(slope, (mean,), (direction,))
        return g[i], jnp.minimum(h[i], 0.0)

    g, h = jax.vmap(along)(jnp.arange(mean.shape[0]))
    shrunk = 1.0 - variance * h
    return log_lik(rebuild(mean)) + 0.5 * jnp.sum(variance * g**2 / shrunk - jnp.log(shrunk), 0)
