"""The importance-weighted bound with one log over draws of everything, as a NumPyro ELBO object."""

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.infer.elbo import ELBO as NumPyroELBO

from ppl_gp.errors import DataError, ModelError
from ppl_gp.infer.elbo.densities import OverRows, auxiliary, scaled
from ppl_gp.infer.probes.guides import require_guide
from ppl_gp.model.roles import plate_scale
from ppl_gp.model.tracing import bare_trace


class GlobalImportanceWeightedELBO(NumPyroELBO):
    """E log (1/K) sum_k p(y, everything_k) / q(everything_k), nats: one log over K draws of all
    latents, u and weights among them.

    Leibfried et al. (2022), eq. 38 and 43; Burda et al. (2016). Tends to the log evidence as K
    grows, and exp of it is an unbiased estimate of the evidence at any K; with many data it needs
    far more draws than the bound by datum. f is drawn jointly over all rows, O(K N^3) a GP site.
    All data at once: `ModelError` for a plate that subsamples; a guide's points (`AutoDelta`) count
    with their log prior, as they do in MAP estimation.
    """

    def __init__(self, num_importance: int = 100, num_particles: int = 1):
        if min(num_importance, num_particles) < 1:
            raise DataError(
                f"num_importance={num_importance}, num_particles={num_particles}: give at least 1 "
                "each."
            )
        self.num_importance = num_importance
        super().__init__(num_particles=num_particles)

    def log_weights(self, rng_key, param_map, model, guide, *args, **kwargs):
        """log p(y, everything_k) - log q(everything_k), (num_importance,), nats."""
        keys = random.split(rng_key, self.num_importance)
        return lax.map(
            lambda key: self._log_weight(key, param_map, model, guide, args, kwargs), keys
        )

    def loss_with_mutable_state(self, rng_key, param_map, model, guide, *args, **kwargs):
        """{"loss": minus the bound, "mutable_state": None}."""
        keys = random.split(rng_key, self.num_particles)
        weights = jax.vmap(
            lambda key: self.log_weights(key, param_map, model, guide, *args, **kwargs)
        )(keys)
        bound = jnp.mean(logsumexp(weights, 1)) - jnp.log(self.num_importance)
        return {"loss": -bound, "mutable_state": None}

    def _log_weight(self, key, params, model, guide, args, kwargs):
        key_guide, key_model = random.split(key)
        seeded = handlers.seed(handlers.substitute(guide, data=params), key_guide)
        joint = OverRows(seeded)
        drawn = handlers.trace(joint).get_trace(*args, **kwargs)
        require_guide(drawn, bare_trace(model, args, kwargs, params), type(self).__name__)
        replayed = handlers.replay(
            handlers.seed(handlers.substitute(model, data=params), key_model), drawn
        )
        trace = handlers.trace(replayed).get_trace(*args, **kwargs)
        if plate_scale(trace) != 1:
            raise ModelError(
                "GlobalImportanceWeightedELBO takes all data at once, and a plate of this model "
                "subsamples."
            )
        total = sum(joint.log_ratios.values(), jnp.zeros(()))
        for name, site in trace.items():
            if site["type"] != "sample" or name in joint.log_ratios:
                continue
            total = total + jnp.sum(scaled(site, site["fn"].log_prob(site["value"])))
            if not site["is_observed"] and name in drawn:
                total = total - jnp.sum(
                    scaled(drawn[name], drawn[name]["fn"].log_prob(site["value"]))
                )
        return total - auxiliary(drawn, trace)
