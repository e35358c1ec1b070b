"""Log densities of new observations, with the errors of their nodes and of their draws; where in
its predictive distribution an observation lies; and latents of new data.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float
from numpy import ndarray

from ppl_gp.deep.latents import encoder_of, latent_form
from ppl_gp.draws import mixture
from ppl_gp.errors import DataError, ModelError
from ppl_gp.mean_field.family import Family
from ppl_gp.quick import full_jit
from ppl_gp.reading.factors import is_concave
from ppl_gp.results.integrals import cubature, several
from ppl_gp.results.integrals.compiled import predictive
from ppl_gp.results.integrals.factorised import integrated_log_density
from ppl_gp.results.integrals.latents import Proposals, combinations, summed_log_density
from ppl_gp.results.integrals.quantiles import cdf_at
from ppl_gp.results.integrals.several import coupled_groups, log_density_per_datum
from ppl_gp.results.query.by_names import observing, with_observations
from ppl_gp.results.query.query import BY_DRAWS, Integration, Query, drawn_runs, query_at
from ppl_gp.results.record import Record
from ppl_gp.settings import as_key


def log_density_at(
    query: Query, blocks: tuple[Family, ...], num_draws: int | None, effective: float | None
) -> tuple[Array, Array, Array]:
    """(log p(y*_n | x*_n, data) of what the query observes, its estimated errors of nodes, and of
    draws: standard errors), (M,) each, nats; integrated over mean field's `blocks` where exact.

    `effective`: how many independent draws of the posterior the fit's are worth, if they are random
    ones; else (one setting, or weighted points) only what is drawn within each counts as an error.
    """
    query.model.reading.require_own_masks()
    has_latents = query.layout.local_latents and query.integration is Integration.layers
    labels = combinations(query) if has_latents else None
    if blocks:
        exact = integrated_log_density(query, blocks, labels)
        if exact is not None:
            return exact, jnp.zeros_like(exact), jnp.zeros_like(exact)
    groups = several.coupled_groups(query)
    num = num_draws or (cubature.LATENT_DRAWS if has_latents else cubature.MIN_DRAWS)
    every = None if labels is None else jnp.asarray(labels)
    log_p, nodes, within, between = _log_density(query, groups, every, num)
    square = within if effective is None else between / effective
    return log_p, nodes, jnp.sqrt(square)


@full_jit
def _log_density(query: Query, groups, labels, num_draws: int):
    """(log p, error of nodes, squared errors within a posterior draw, and between draws)."""
    if labels is None and query.integration in BY_DRAWS:
        sums, each = _over_draws(query, groups, num_draws), cubature.repeats(query, num_draws)
        return sums[0], jnp.zeros_like(sums[0]), *_squared_errors(query, *sums, each)
    of_draw = partial(_integrated, query, groups, labels, num_draws)
    sums, log_nodes = query.mixture(of_draw, random.split(random.key(0), query.draws.num))
    return sums[0], jnp.exp(log_nodes), *_squared_errors(query, *sums, 1)


def _integrated(query: Query, groups, labels, num_draws: int, draw, key):
    """((log w, log w^2, log E[w]^2), log error of nodes) of the density w given a draw."""

    def log_lik(f):
        return log_density_per_datum(query.trace(draw, f))

    error, log_nodes = 0.0, -jnp.inf
    if labels is not None:
        log_p = summed_log_density(query, draw, labels)
    elif query.integration is Integration.quadrature:
        named = lambda f: {query.site: f}  # noqa: E731
        concave = is_concave(lambda f: query.trace(draw, named(f)), None, query.layout.num)
        f: Any = next(iter(query.marginals(draw).values()))
        how = f, cubature.num_nodes(query), concave
        log_p, log_nodes = cubature.log_expectation_and_error(lambda f: log_lik(named(f)), *how)
    else:
        f, effort = query.marginals(draw), cubature.effort_of(query, num_draws)
        log_p, error = several.log_expectation_over(log_lik, f, groups, effort, key)
    sums = log_p, 2.0 * log_p + jnp.log1p(error), 2.0 * log_p
    return sums, jnp.full_like(log_p, log_nodes)


def _squared_errors(query: Query, first, second, square, each: int):
    """Squared relative errors of E[w]: (within a posterior draw, by `each` draws; between draws).

    From log E[w], log E[w^2] and log of E[E[w | draw]^2], mixed over draws.
    """
    ratio, between = jnp.exp(second - 2.0 * first), jnp.exp(square - 2.0 * first)
    known = jnp.isfinite(first)
    within = jnp.maximum(ratio - between, 0.0) / (each * query.draws.effective)
    errors = within, jnp.maximum(between - 1.0, 0.0)
    return tuple(jnp.where(known, error, jnp.inf) for error in errors)


def _over_draws(query: Query, groups, num_draws: int):
    """(log E[w], log E[w^2], log E[E[w | draw]^2]) of densities w given what is drawn within a
    posterior draw: latents of new data (`latent_proposals`), layers below, or all of f.
    """
    log_lik, proposals = several.log_lik_above(query, groups), None
    is_layers = query.integration is Integration.layers
    if is_layers and query.layout.local_latents:
        proposals = Proposals.fitted(query, groups, {}, random.key(2))

    def weight_at(draw):
        if proposals is not None:
            weighed = proposals.weighed(draw)
            return lambda entry: weighed(entry)[1]
        run = drawn_runs(query, draw)
        if is_layers:
            return lambda entry: log_lik(*run(entry[0]), random.key(1))
        return lambda entry: log_density_per_datum(run(entry[0])[0])

    def component(draw, entries):
        weight = weight_at(draw)
        twice = lambda log_w: (log_w, 2.0 * log_w)  # noqa: E731
        first, second = mixture(lambda entry: twice(weight(entry)), entries)
        return first, second, 2.0 * first

    keys = cubature.keys_of(query, num_draws)
    return query.mixture(component, (keys, jnp.arange(keys.size).reshape(keys.shape)))


class Pit(NamedTuple):
    """p(y* < y) and p(y* <= y) of each observation, in y's shape; equal where y is continuous.

    A uniform draw between the two is uniform on (0, 1) over y (Czado, Gneiting & Held 2009).
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
    observing(query, y_new)  # which checks it
    (site,) = query.layout.sites
    if site.support is None:
        found = cdf_at(query, site, jnp.asarray(y_new))
        return None if found is None else Pit(*(np.asarray(x) for x in found))
    _, y = predictive(query, None)
    p = np.exp(np.asarray(y[site.label].log_probs))
    if p.shape[1:] != np.shape(y_new):
        raise DataError(f"y_new has shape {np.shape(y_new)}, and predictions of it {p.shape[1:]}.")
    outcomes = np.reshape(site.support, (-1,) + (1,) * np.ndim(y_new))
    below = np.sum(np.where(outcomes < np.asarray(y_new), p, 0.0), 0)
    return Pit(below, below + np.sum(np.where(outcomes == np.asarray(y_new), p, 0.0), 0))


class LatentDraws(NamedTuple):
    """`draws`: {latent site: (num_samples, ...)} in the site's own shape at the new inputs. `ess`:
    effective number of proposals behind each datum's draws, (M,); if it is small, draws repeat.
    """

    draws: dict[str, Array]
    ess: Float[Array, "M"]


def infer_latents(
    fit: Record,
    rng_key,
    X_new,
    y_new=None,
    *args,
    num_samples: int = 200,
    num_proposals: int = 1000,
    **kwargs,
) -> LatentDraws:
    """p(h* | x*, y*, data) of each new datum, proportional to p(h) E_q(f)[p(y* | f([x*, h]))].

    Proposals come from q(h | x*, y*) where the fit has an encoder that sees y, else from a Gaussian
    that is fitted to each datum by Adam; two of three from the prior and the prior widened, which
    bounds the weights (a defensive mixture: Hesterberg 1995). They are weighted by the
    model and resampled, so that the draws are right as `num_proposals` grows: inner layers, and
    hyperparameters that have draws, are drawn anew for each proposal, and outer functions are
    integrated. O(num_proposals M N_u^2) for N_u inducing variables. Raises `ModelError` for a fit
    without q(h) (draws of NUTS are of the training data), `DataError` as `log_density`.
    """
    if min(num_samples, num_proposals) < 1:
        raise DataError(
            f"infer_latents(num_samples={num_samples}, num_proposals={num_proposals}): give at "
            "least 1 each."
        )
    if not fit.local:
        raise ModelError(
            f"{type(fit.method).__name__} has no q(h) of per-datum latents; fit a model with "
            "latents by SVGP()."
        )
    X_new, y_new, args, kwargs = with_observations(fit, X_new, y_new, args, kwargs)
    query = query_at(fit, X_new, args, kwargs)
    query = observing(query, y_new)
    key = as_key(rng_key, "fit.infer_latents(0, X_new, y_new)")
    encoders = {k: q for k, q in fit.local.items() if encoder_of(q) is not None}
    groups = coupled_groups(query)
    # the model's prior is what h* has, not an encoder's guess
    query = dataclasses.replace(query, local={})
    return LatentDraws(*_infer(query, groups, encoders, key, num_samples, num_proposals))


@full_jit
def _infer(query: Query, groups, encoders, key, num_samples: int, num_proposals: int):
    key_fit, key_propose, key_choose = random.split(key, 3)
    proposals = Proposals.fitted(query, groups, encoders, key_fit)

    def component(entry):
        draw, keys, which = entry
        h, log_w = lax.map(proposals.weighed(draw), (keys, which))
        return h, log_w + draw.log_weights

    each = -(-num_proposals // query.draws.num)
    keys = random.split(key_propose, (query.draws.num, each))
    which = jnp.arange(keys.size).reshape(keys.shape)
    together = lambda x: jnp.reshape(x, (-1, *x.shape[2:]))  # noqa: E731
    h, log_w = jax.tree.map(together, lax.map(component, (query.draws, keys, which)))
    log_w = log_w - logsumexp(log_w, 0)
    chosen = random.categorical(key_choose, log_w, axis=0, shape=(num_samples, query.layout.num))
    sites = query.trace(query.draws.at(0), {})
    picked = {
        k: _choose(v, chosen, latent_form(sites[k], query.layout.num)[0]) for k, v in h.items()
    }
    return picked, jnp.exp(-logsumexp(2 * log_w, 0))


def _choose(values, chosen, axis: int):
    """(samples, ...): values (proposals, ..., M at `axis`, ...) at each datum's chosen ones."""
    moved = jnp.moveaxis(values, 1 + axis, 1)  # (proposals, M, ...)
    return jnp.moveaxis(moved[chosen, jnp.arange(moved.shape[1])], 1, 1 + axis)
