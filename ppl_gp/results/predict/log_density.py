"""Compiled log densities of new observations, with the errors of their nodes and of their draws,
and probability integral transforms: where in its predictive distribution an observation lies.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Array, Float
from numpy import ndarray

from ppl_gp.errors import DataError
from ppl_gp.mean_field.family import Family
from ppl_gp.quick import full_jit
from ppl_gp.reading.factors import is_concave
from ppl_gp.results.integrals.averages import (
    LATENT_DRAWS,
    LAYER_NODES,
    MIN_DRAWS,
    all_marginals,
    average,
    below_outer,
    effort_of,
    keys_of,
    marginals,
    num_nodes,
    repeats,
    trace_above,
)
from ppl_gp.results.integrals.compiled import predictive
from ppl_gp.results.integrals.enumerated import combinations, summed_log_density
from ppl_gp.results.integrals.factorised import integrated_log_density
from ppl_gp.results.integrals.groups import coupled_groups, outer_sites
from ppl_gp.results.integrals.integration import Integration, plan_integration
from ppl_gp.results.integrals.latent_proposals import Proposals
from ppl_gp.results.integrals.likelihood import (
    log_density_per_datum,
    log_expectation,
    log_expectation_and_error,
)
from ppl_gp.results.integrals.quantiles import cdf_at
from ppl_gp.results.integrals.several import Effort, log_expectation_over, quadratic_log_expectation
from ppl_gp.results.query.by_names import observations_at, with_observations
from ppl_gp.results.query.mixture import mixture
from ppl_gp.results.query.query import Query, drawn_trace, query_at
from ppl_gp.results.record import Record


class LogDensity(NamedTuple):
    """log p(y*_n | x*_n, data), (M,), nats, and its estimated errors: of nodes, and of draws
    (standard errors).
    """

    value: Float[Array, "M"]
    nodes: Float[Array, "M"]
    draws: Float[Array, "M"]


def log_density_at(
    query: Query,
    integration: Integration,
    observations: dict,
    num_draws: int | None,
    effective: float | None,
    blocks: tuple[Family, ...] = (),
) -> LogDensity:
    """The log density mixed over draws; integrated over the `blocks` of mean field where that is
    exact.

    `effective`: how many independent draws of the posterior the fit's are worth, if they are random
    ones; where they are not (one setting, or weighted points) only what is drawn within each counts
    as an error.
    """
    groups = groups_above(query, integration, observations)
    least = (
        LATENT_DRAWS
        if query.layout.local_latents and integration is Integration.layers
        else MIN_DRAWS
    )
    labels = combinations(query) if integration is Integration.layers else None
    if blocks:
        exact = integrated_log_density(query, blocks, observations, labels)
        if exact is not None:
            return LogDensity(exact, jnp.zeros_like(exact), jnp.zeros_like(exact))
    log_p, nodes, within, between = (
        _log_density(query, integration, groups, observations, num_draws or least)
        if labels is None
        else _of_labels(query, observations, jnp.asarray(labels))
    )
    square = within if effective is None else between / effective
    return LogDensity(log_p, nodes, jnp.sqrt(square))


def groups_above(
    query: Query, integration: Integration, observations: dict
) -> tuple[tuple[int, ...], ...]:
    """Groups of outer functions that the likelihood couples; none where it is not proved that rows
    are apart, or for one function.
    """
    alone = (Integration.given, Integration.quadrature, Integration.joint_draws)
    if integration in alone or query.site is not None or not query.draws.kept:
        return ()
    return coupled_groups(query, observations)


@full_jit
def _log_density(
    query: Query, integration: Integration, groups, observations: dict, num_draws: int
):
    if integration is Integration.quadrature:

        def by_quadrature(draw):
            def log_lik(f):
                return log_density_per_datum(
                    query.trace(draw, {query.site: f}, **observations), query.layout
                )

            concave = is_concave(
                lambda f: query.trace(draw, {query.site: f}, **observations), None, query.layout.num
            )
            log_p, log_error = log_expectation_and_error(
                log_lik, marginals(query, draw), num_nodes(query), concave
            )
            return log_p, log_error, 2.0 * log_p

        first, log_error, second = query.mixture(by_quadrature)
        _, between = _squared_errors(query, first, second, second, 1)
        return first, jnp.exp(log_error), jnp.zeros_like(first), between
    if integration is Integration.given:

        def at_draw(draw):
            trace = query.trace(draw, {}, **observations)
            log_p = log_density_per_datum(trace, query.layout)
            return log_p, 2.0 * log_p, 2.0 * log_p

        sums = query.mixture(at_draw)
        return sums[0], jnp.zeros_like(sums[0]), *_squared_errors(query, *sums, 1)
    if integration is Integration.functions:

        def over_functions(draw, key):
            def log_lik(f):
                return log_density_per_datum(query.trace(draw, f, **observations), query.layout)

            f, effort = all_marginals(query, draw), effort_of(query, num_draws)
            log_p, error = log_expectation_over(log_lik, f, groups, effort, key)
            return log_p, 2.0 * log_p + jnp.log1p(error), 2.0 * log_p

        sums = query.mixture(over_functions, random.split(random.key(0), query.draws.num))
        return sums[0], jnp.zeros_like(sums[0]), *_squared_errors(query, *sums, 1)
    if query.layout.local_latents and integration is Integration.layers:
        sums = _over_latents(query, groups, observations, num_draws)
    else:

        def weight(trace, f):
            log_p = log_density_per_datum(trace, query.layout)
            if integration is Integration.layers:
                log_p = log_lik_above(query, trace, f, observations, groups, random.key(1))
            return log_p, 2.0 * log_p

        sums = average(query, integration, weight, num_draws, _with_square, **observations)
    return (
        sums[0],
        jnp.zeros_like(sums[0]),
        *_squared_errors(query, *sums, repeats(query, num_draws)),
    )


@full_jit
def _of_labels(query: Query, observations: dict, labels):
    """As `_log_density`, discrete latents of new rows summed: exact at each draw."""

    def at_draw(draw):
        log_p = summed_log_density(query, draw, observations, labels)
        return log_p, 2.0 * log_p, 2.0 * log_p

    sums = query.mixture(at_draw)
    return sums[0], jnp.zeros_like(sums[0]), *_squared_errors(query, *sums, 1)


def _with_square(sums):
    """(log E[w], log E[w^2]) of one draw and the log of E[w] squared, whose mean over draws tells
    their variance.
    """
    return *sums, 2.0 * sums[0]


def _squared_errors(query: Query, first, second, square, each: int):
    """Squared relative errors of E[w]: (of what is drawn within a posterior draw, `each` times; the
    variance between draws).

    From log E[w], log E[w^2] and log of E[E[w | draw]^2], mixed over draws.
    """
    ratio, between = jnp.exp(second - 2.0 * first), jnp.exp(square - 2.0 * first)
    known = jnp.isfinite(first)
    within = jnp.maximum(ratio - between, 0.0) / (each * query.draws.effective)
    return jnp.where(known, within, jnp.inf), jnp.where(
        known, jnp.maximum(between - 1.0, 0.0), jnp.inf
    )


def _over_latents(query: Query, groups, observations: dict, num_draws: int):
    """(log E[w], log E[w^2], log E[E[w | draw]^2]) of importance weights over the latents of new
    data (`latent_proposals`).
    """

    def log_lik(trace, f, key):
        return log_lik_above(query, trace, f, observations, groups, key)

    proposals = Proposals.fitted(
        query, observations, quick_log_lik(query, observations, groups), {}, random.key(2)
    )

    def component(draw, entries):
        conditionals, base = query.conditionals(draw), proposals.base(query, draw)

        def one(entry):
            key, which = entry
            h, log_ratio = proposals.draw(query, draw, base, key, which)
            trace, f = drawn_trace(
                query, draw, conditionals, key, joint=False, latents=h, **observations
            )
            log_w = log_lik(trace, f, key) + log_ratio
            return log_w, 2.0 * log_w

        return _with_square(mixture(one, entries))

    keys = keys_of(query, num_draws)
    which = jnp.arange(keys.size).reshape(keys.shape)
    return query.mixture(component, (keys, which))


def log_lik_above(query: Query, trace: dict, f: dict, observations: dict, groups, key):
    """log p(y*_n | what was drawn below the outer GP sites), (M,): these are integrated."""
    below = below_outer(query, trace)

    def log_lik(x):
        return log_density_per_datum(trace_above(query, below, x, **observations), query.layout)

    if not query.draws.kept:
        return log_lik({})
    if query.site is not None:
        return log_expectation(log_lik, f[query.site], LAYER_NODES)
    outer = {k: f[k] for k in outer_sites(query)}
    return log_expectation_over(
        log_lik, outer, groups, Effort(LAYER_NODES, True, LAYER_NODES), key
    )[0]


def quick_log_lik(query: Query, observations: dict, groups):
    """(trace, f, key) -> nearly log p(y*_n | what was drawn below), (M,), for fitting proposals.

    Several functions: log p is taken as quadratic about their means, which is exact for Gaussian
    noise, and costs two gradients.
    """
    if query.site is not None or not query.draws.kept:
        return lambda trace, f, key: log_lik_above(query, trace, f, observations, groups, key)

    def log_lik(trace, f, key):
        below, outer = below_outer(query, trace), {k: f[k] for k in outer_sites(query)}
        return quadratic_log_expectation(
            lambda x: log_density_per_datum(
                trace_above(query, below, x, **observations), query.layout
            ),
            outer,
        )

    return log_lik


class Pit(NamedTuple):
    """p(y* < y) and p(y* <= y) of each observation, in y's shape; equal where y is continuous.

    A number drawn uniformly between the two is uniform on (0, 1) over data of the model (Czado,
    Gneiting & Held 2009).
    """

    below: Float[ndarray, "..."]
    up_to: Float[ndarray, "..."]


def pit(fit: Record, X_new, y_new, *args, **kwargs) -> Pit | None:
    """Of observations y_new at X_new under the predictive distribution; `None` where an event is a
    vector or several sites are observed. Arguments, errors and cost as for `predict`.
    """
    X_new, y_new, args, kwargs = with_observations(fit, X_new, y_new, args, kwargs)
    query = query_at(fit, X_new, args, kwargs)
    if len(query.layout.sites) != 1:
        return None
    observations_at(query, y_new)
    integration, (site,) = plan_integration(query), query.layout.sites
    if site.support is None:
        found = cdf_at(query, integration, site, jnp.asarray(y_new))
        return None if found is None else Pit(*(np.asarray(x) for x in found))
    _, _, log_probs, _ = predictive(query, integration, None)
    p = np.exp(np.asarray(log_probs[site.label]))
    if p.shape[1:] != np.shape(y_new):
        raise DataError(f"y_new has shape {np.shape(y_new)}, and predictions of it {p.shape[1:]}.")
    outcomes = np.reshape(site.support, (-1,) + (1,) * np.ndim(y_new))
    below = np.sum(np.where(outcomes < np.asarray(y_new), p, 0.0), 0)
    return Pit(below, below + np.sum(np.where(outcomes == np.asarray(y_new), p, 0.0), 0))
