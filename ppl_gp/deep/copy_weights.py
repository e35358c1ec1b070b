"""Weights of a datum's K copies that pass through the layers together.

Inner layers are drawn, jointly over a datum's copies; the last is integrated (Salimbeni &
Deisenroth 2017, eq. 16; Salimbeni et al. 2019).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jaxtyping import Array, Float
from numpyro.distributions import Distribution

from ppl_gp.deep.importance import Sampling, log_ratio, own_site, per_datum_bound, with_share
from ppl_gp.deep.latents import LatentGuide
from ppl_gp.deep.layers import COPIES, Moments, Passed, pass_through
from ppl_gp.deep.structure import Structure
from ppl_gp.model.factors import JointLogLikelihood
from ppl_gp.model.roles import plate_scale
from ppl_gp.sparse.bound import AtBatch
from ppl_gp.sparse.expectation import Expectation, expected_log_lik


class Copies(NamedTuple):
    """A batch's copies on their way through the layers."""

    at: AtBatch
    expectation: Expectation
    sampling: Sampling
    structure: Structure
    latents: dict[str, LatentGuide]
    known: dict[str, Moments]  # of GP sites that stand at the data in every copy

    @property
    def axis(self) -> str | None:
        """The name of the copies' axis, where a GP site is drawn at copies of different inputs."""
        several = self.sampling.num_importance > 1
        return COPIES if several and self.sampling.jointly_drawn(self.structure) else None

    def log_mean_weight(self, key) -> Float[Array, "B"]:
        """log (1/K) sum_k w_nk, (B,), nats."""
        key_f, *keys = random.split(key, 1 + self.sampling.num_importance)
        if len(keys) == 1:
            return self._log_weight(key_f, keys[0], None)
        keys = jnp.stack(keys)

        def log_weights(share):
            return self._log_weights(key_f, keys, share), None

        return per_datum_bound(log_weights, self.sampling)[0]

    def _log_weights(self, key_f, keys, share) -> Float[Array, "K B"]:
        if self.axis is None:  # one after the other, which is faster than one large problem
            return lax.map(lambda k: self._log_weight(key_f, *k), (keys, share))
        one = jax.vmap(lambda k, s: self._log_weight(key_f, k, s), axis_name=COPIES)
        return one(keys, share)

    def _log_weight(self, key_f, key_h, share) -> Float[Array, "B"]:
        """log of p(y_n | h_n) p(h_n) / q(h_n) of one copy."""
        q = self._latent_posteriors(self.latents)
        h = {k: one.sample(random.fold_in(key_h, i)) for i, (k, one) in enumerate(q.items())}
        if share is not None:
            q = self._latent_posteriors(lax.stop_gradient(self.latents))
            h = {k: with_share(v, self.at.trace[k], share) for k, v in h.items()}
        given = {**self.at.given, **h}
        passed = self._pass(given, key_f)
        under_q = {k: {**own_site(passed.trace, k), "fn": one} for k, one in q.items()}
        ratio = log_ratio(passed.trace, under_q, self.at.batch.num, self.sampling)
        log_lik = self._log_lik(passed, given, key_f) / plate_scale(passed.trace)
        return log_lik + self.sampling.beta * ratio

    def _latent_posteriors(self, guides: dict[str, LatentGuide]) -> dict[str, Distribution]:
        batch, sites = self.at.batch, self.at.trace
        return {
            k: guides[k].at(sites[k], batch.rows, batch.args, batch.kwargs)
            for k in self.structure.latents
        }

    def _pass(self, given: dict, key) -> Passed:
        at = self.at
        return pass_through(
            at.model,
            at.batch.args,
            at.batch.kwargs,
            given,
            at.processes,
            self.structure,
            key,
            axis=self.axis,
            drawn=self.sampling.drawn(self.structure),
            known=self.known,
        )

    def _log_lik(self, passed: Passed, given: dict, key) -> Float[Array, "B"]:
        """E_q(f)[log p(y_n | f_n)], (B,), or log p(y_n | f_n) where every layer was drawn."""
        batch = self.at.batch
        fixed = {**given, **passed.values(self.sampling.drawn(self.structure))}
        log_lik = JointLogLikelihood(self.at.model, batch.num, fixed, batch.args, batch.kwargs)
        if not passed.moments:
            return log_lik(passed.values(self.structure.outer))
        mean, variance = (
            {k: getattr(m, part) for k, m in passed.moments.items()}
            for part in ("mean", "variance")
        )
        return expected_log_lik(log_lik, mean, variance, self.expectation, key)
