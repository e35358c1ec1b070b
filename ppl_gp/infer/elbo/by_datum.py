"""Bounds as NumPyro ELBO objects: for its `SVI`, with any guide, in function space (GP sites) and
in weight space alike.

Sites in the data's plates (what is observed, and latents that stand one a datum) enter for each
datum; every other latent site, q(u) of a GP and a network's weights among them, enters by its KL
divergence, once, outside the log. A plate that subsamples makes them minibatch bounds, unbiased for
num_importance = 1. `GlobalImportanceWeightedELBO` takes one log over draws of everything.
"""

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.infer.elbo import ELBO as NumPyroELBO

from ppl_gp.deep.importance import Sampling
from ppl_gp.errors import DataError, ModelError
from ppl_gp.infer.elbo.particle import OverRows, Particle, auxiliary, log_density, seeded
from ppl_gp.infer.hyper.autoguides import require_guide
from ppl_gp.reading.reading import declare
from ppl_gp.reading.roles import plate_scale
from ppl_gp.reading.tracing import bare_trace
from ppl_gp.settings import require_whole
from ppl_gp.sparse.expectation import Expectation


class ImportanceWeightedELBO(NumPyroELBO):
    """sum_n (N / B) E log (1/K) sum_k w_nk - sum over global sites of KL[q || p], nats (its
    negative is the loss).

    w_nk = exp(E_q(f)[log p(y_n | f, h_nk)]) p(h_nk) / q(h_nk): K copies of each datum's latents
    under one function (Salimbeni et al. 2019, eq. 17; Leibfried et al. 2022). Rises with K; at K =
    1 it is `ELBO`.

    - `num_importance`: K. `num_particles`: independent estimates that are averaged.
    - `expected_last`: integrate GP sites that only the likelihood sees, or else draw them jointly
      at the copies.
    - `doubly_reparameterised`: the gradient of q(h) of Tucker et al. (2019), whose signal does not
      vanish as K grows. For latents that enter no jointly drawn GP site (`ModelError`). Twice the
      forward passes.
    - `beta`: weight of every KL term and log ratio; 1 for a bound.

    Cost: K passes of the model a particle; K^3 B for a GP site drawn jointly. `DataError` for
    counts below 1.
    """

    def __init__(
        self,
        num_importance: int = 10,
        num_particles: int = 1,
        *,
        expected_last: bool = True,
        doubly_reparameterised: bool = False,
        beta: float = 1.0,
        num_nodes: int | None = None,
    ):
        super().__init__(num_particles=num_particles)
        self.num_importance, self.expected_last = num_importance, expected_last
        self.beta, self.num_nodes = beta, num_nodes
        self.doubly_reparameterised = doubly_reparameterised
        require_whole(self, "num_importance", "num_particles")
        if not 0.0 <= beta < float("inf"):
            raise DataError(f"beta={beta}: give a finite weight of the KL terms, at least 0.")

    def loss_with_mutable_state(self, rng_key, param_map, model, guide, *args, **kwargs):
        """{"loss": minus the bound, "mutable_state": None}, as NumPyro asks for it."""
        given = param_map, declare(model, args, kwargs), guide, args, kwargs
        sampling = Sampling(
            num_importance=self.num_importance,
            expected_last=self.expected_last,
            doubly_reparameterised=self.doubly_reparameterised,
            beta=self.beta,
        )
        how = Expectation(self.num_nodes), sampling
        keys = random.split(rng_key, self.num_particles)
        bounds = jax.vmap(lambda key: Particle(*how, key, *given).bound())(keys)
        return {"loss": -jnp.mean(bounds), "mutable_state": None}


class ELBO(ImportanceWeightedELBO):
    """sum_n (N / B) (E log p(y_n | f, h_n) - KL[q(h_n) || p(h_n)]) - sum over global sites of KL[q
    || p], nats.

    As NumPyro's TraceMeanField_ELBO, with f of the last layer integrated rather than drawn.
    Arguments as `ImportanceWeightedELBO`.
    """

    def __init__(
        self,
        num_particles: int = 1,
        *,
        expected_last: bool = True,
        beta: float = 1.0,
        num_nodes: int | None = None,
    ):
        super().__init__(
            1, num_particles, expected_last=expected_last, beta=beta, num_nodes=num_nodes
        )


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
        super().__init__(num_particles=num_particles)
        self.num_importance = num_importance
        require_whole(self, "num_importance", "num_particles")

    def log_weights(self, rng_key, param_map, model, guide, *args, **kwargs):
        """log p(y, everything_k) - log q(everything_k), (num_importance,), nats."""
        given = param_map, model, guide, args, kwargs
        keys = random.split(rng_key, self.num_importance)
        return lax.map(lambda key: self._log_weight(key, *given), keys)

    def loss_with_mutable_state(self, rng_key, param_map, model, guide, *args, **kwargs):
        """{"loss": minus the bound, "mutable_state": None}."""
        given = param_map, model, guide, *args
        keys = random.split(rng_key, self.num_particles)
        weights = jax.vmap(lambda key: self.log_weights(key, *given, **kwargs))(keys)
        bound = jnp.mean(logsumexp(weights, 1)) - jnp.log(self.num_importance)
        return {"loss": -bound, "mutable_state": None}

    def _log_weight(self, key, params, model, guide, args, kwargs):
        key_guide, key_model = random.split(key)
        joint = OverRows(seeded(guide, params, key_guide))
        drawn = handlers.trace(joint).get_trace(*args, **kwargs)
        require_guide(drawn, bare_trace(model, args, kwargs, params), type(self).__name__)
        replayed = handlers.replay(seeded(model, params, key_model), drawn)
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
            total = total + log_density(site, site["fn"], site["value"])
            if not site["is_observed"] and name in drawn:
                total = total - log_density(drawn[name], drawn[name]["fn"], site["value"])
        return total - auxiliary(drawn, trace)
