"""Latents of new data, h* given (x*, y*): importance resampling from an encoder, or from a Gaussian
fitted to each datum.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.deep.latents import encoder_of, latent_form
from ppl_gp.errors import DataError, ModelError
from ppl_gp.quick import full_jit
from ppl_gp.results.integrals.latents import Proposals
from ppl_gp.results.integrals.several import coupled_groups
from ppl_gp.results.query.by_names import observing, with_observations
from ppl_gp.results.query.query import Query, query_at
from ppl_gp.results.record import Record
from ppl_gp.settings import as_key


class LatentDraws(NamedTuple):
    """`draws`: {latent site: (num_samples, ...)} in the site's own shape at the new inputs. `ess`:
    effective number of proposals behind each datum's draws, (M,); a few mean that the draws repeat
    each other.
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
            f"{type(fit.method).__name__} has no q(h) of latents one a datum; fit a model with "
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
    """values (proposals, ..., M at `axis`, ...) at each datum's chosen proposals, (samples,
    ...).
    """
    moved = jnp.moveaxis(values, 1 + axis, 1)  # (proposals, M, ...)
    return jnp.moveaxis(moved[chosen, jnp.arange(moved.shape[1])], 1, 1 + axis)
