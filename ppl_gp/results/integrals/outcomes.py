"""Moments and probabilities of outcomes whose entries see several functions each."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.results.integrals import cubature
from ppl_gp.results.integrals.groups import Entries
from ppl_gp.results.integrals.likelihood import (
    by_datum,
    expected_moments,
    from_by_datum,
    log_expectation,
    moments_shape,
)
from ppl_gp.results.integrals.several import Effort, stacked
from ppl_gp.results.query.mixture import Moments
from ppl_gp.wrappers import bare


def outcomes_over(sites, entries: dict[str, Entries], trace_at, f: dict[str, Any], effort: Effort):
    """({label: Moments of y}, {label: log p (K, ...)}) of the sites whose entries need no draws:
    they see at most three functions, or all of them in a straight line. trace_at: {site: f} ->
    trace.
    """
    mean, variance, rebuild = stacked(f)
    sd, y, log_probs = jnp.sqrt(variance), {}, {}
    for site in sites:
        if entries[site.label].are_drawn:
            continue
        fn_at = lambda rows, site=site: bare(trace_at(rebuild(rows))[site.name]["fn"])  # noqa: E731
        if entries[site.label].is_affine:
            shape: Any = moments_shape(fn_at, mean)
            parts = _affine_moments(site, fn_at, shape, mean, sd)
            y[site.label] = Moments(*(from_by_datum(x, site, shape) for x in parts))
            continue
        index = jnp.asarray(entries[site.label].functions)
        if site.support is not None:
            log_probs[site.label] = _outcome_log_probs(site, fn_at, index, mean, sd, effort)
        elif (shape := moments_shape(fn_at, mean)) is not None:
            each = lambda e, a=(site, fn_at, shape, index, mean, sd, effort): _entry_moments(*a, e)  # noqa: E731
            parts = lax.map(each, jnp.arange(index.shape[0]))
            y[site.label] = Moments(*(from_by_datum(x, site, shape) for x in parts))
    return y, log_probs


def _outcome_log_probs(site, fn_at, index, mean, sd, effort: Effort) -> Float[Array, "K ..."]:
    shape = jax.eval_shape(fn_at, mean).batch_shape

    def entry(outcome, e):
        i = index[e]

        def log_lik(x):
            fn = fn_at(mean.at[i].set(x))
            return by_datum(fn.log_prob(jnp.full(fn.batch_shape, outcome)), site)[e]

        if index.shape[1] == 1:
            return log_expectation(
                lambda x: log_lik(x[None]), Moments(mean[i[0]], sd[i[0]] ** 2), effort.nodes
            )
        return cubature.log_integral(
            lambda z: log_lik(mean[i] + sd[i] * z), index.shape[1], mean[0], effort.many
        )[0]

    entries = jnp.arange(index.shape[0])
    log_p = lax.map(lambda k: lax.map(lambda e: entry(k, e), entries), jnp.asarray(site.support))
    log_p = jax.vmap(lambda x: from_by_datum(x, site, shape))(log_p)
    return log_p - logsumexp(log_p, 0)


def _affine_moments(site, fn_at, shape, mean, sd) -> Moments:
    """E[a f + b] = a E[f] + b, Var = sum_i (a_i sd_i)^2 + Var[y | f]: exact, of any number of
    functions.
    """

    def read(name):
        return lambda x: by_datum(jnp.broadcast_to(getattr(fn_at(x), name), shape), site)

    def along(i):
        step = jnp.zeros_like(mean).at[i].set(sd[i])
        return jax.jvp(read("mean"), (mean,), (step,))[1]

    slopes = lax.map(along, jnp.arange(mean.shape[0]))
    return Moments(read("mean")(mean), read("variance")(mean) + jnp.sum(slopes**2, 0))


def _entry_moments(site, fn_at, shape, index, mean, sd, effort: Effort, e) -> Moments:
    i = index[e]

    def read(name):
        return lambda x: by_datum(
            jnp.broadcast_to(getattr(fn_at(mean.at[i].set(x)), name), shape), site
        )[e]

    first, spread = read("mean"), read("variance")
    if index.shape[1] == 1:
        f = Moments(mean[i[0]], sd[i[0]] ** 2)
        return expected_moments(
            lambda x: first(x[None]), lambda x: spread(x[None]), f, effort.nodes
        )
    at = lambda z: mean[i] + sd[i] * z  # noqa: E731
    return cubature.moments(
        lambda z: first(at(z)), lambda z: spread(at(z)), index.shape[1], mean[0], effort.many
    )
