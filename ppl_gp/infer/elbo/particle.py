"""One estimate of a bound by datum: what a guide draws and a model scores, for K copies of the
data's latents.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence

from ppl_gp.deep.importance import (
    Sampling,
    log_ratio,
    own_scale,
    per_datum_bound,
    require_separate,
    with_share,
)
from ppl_gp.deep.layers import COPIES
from ppl_gp.deep.structure import Structure, layers
from ppl_gp.errors import ModelError
from ppl_gp.gp import unwrap
from ppl_gp.infer.elbo.densities import OfCopy, auxiliary, held, scaled
from ppl_gp.infer.probes.guides import require_guide
from ppl_gp.model.roles import (
    data_axis,
    data_plates,
    is_observed,
    log_prob_per_datum,
    plate_scale,
    roles,
)
from ppl_gp.model.tracing import annotated, run
from ppl_gp.sparse.expectation import Expectation, expected_log_lik
from ppl_gp.sparse.site import SparseMarginals
from ppl_gp.wrappers import bare_shape


class _Given(NamedTuple):
    """What is known of a model before it is drawn."""

    structure: Structure
    plates: frozenset[str]  # the data's
    num: int  # B


class Particle(NamedTuple):
    """One estimate of the bound."""

    expectation: Expectation
    sampling: Sampling
    key: Any
    params: dict
    model: Any
    guide: Any
    args: tuple
    kwargs: dict

    def bound(self) -> Float[Array, ""]:
        """Nats."""
        given = self._look()
        if self.sampling.num_importance > 1:
            require_separate(self.sampling, given.structure, "ImportanceWeightedELBO")
        per_datum, (shared, scale) = per_datum_bound(
            lambda share: self._copies(given, share), self.sampling
        )
        # Global terms are the same in all copies.
        return scale[0] * jnp.sum(per_datum) + jnp.mean(shared)

    def _look(self) -> _Given:
        with handlers.block():
            drawn = self._traced(self._seeded(self.guide, self.params, random.key(0)))
        indices = {k: s["value"] for k, s in drawn.items() if s["type"] == "plate"}

        def rerun(values):
            return run(self.model, self.args, self.kwargs, {**self.params, **indices, **values})

        trace = rerun({})
        require_guide(drawn, trace, "ELBO")
        structure = layers(roles(trace), trace, rerun)
        return _Given(structure, frozenset(data_plates(trace)), _num_data(trace))

    def _copies(self, given: _Given, share):
        """(log w_nk (K, B), (log p - log q of what is global (K,), N / B (K,))) of all copies."""
        K = self.sampling.num_importance
        if K == 1:
            return jax.tree.map(lambda x: x[None], self._copy(given, 0, None))
        one = jax.vmap(lambda k, s: self._copy(given, k, s), axis_name=COPIES)
        return one(jnp.arange(K), share)

    def _copy(self, given: _Given, k, share):
        key_guide, key_model = random.split(self.key)
        axis = COPIES if self.sampling.num_importance > 1 else None
        seeded = self._seeded(self.guide, self.params, key_guide)
        drawn = q = self._traced(OfCopy(seeded, given.plates, given.structure, k, axis))
        if share is not None:
            drawn, q = self._doubly(given, drawn, share, key_guide)
        seeded = self._seeded(self.model, self.params, key_model)
        trace = self._traced(handlers.replay(seeded, drawn))
        latents = {
            h: {**trace[h], "fn": q[h]["fn"], "scale": own_scale(q, h)}
            for h in given.structure.latents
        }
        ratio = log_ratio(trace, latents, given.num, self.sampling)
        shared, scale = self._global(given, trace, drawn), plate_scale(trace)
        log_lik = self._log_lik(given, drawn, key_model) / scale
        return log_lik + self.sampling.beta * ratio, (shared, jnp.asarray(1.0 * scale))

    def _seeded(self, fn, params: dict, key):
        return handlers.seed(handlers.substitute(fn, data=params), key)

    def _traced(self, fn) -> Any:
        return annotated(handlers.trace(fn).get_trace(*self.args, **self.kwargs), self.model)

    def _doubly(self, given: _Given, drawn: dict, share, key) -> tuple[Any, Any]:
        """The guide's trace with latents that only `share` of a gradient reaches, and the same with
        its parameters held.

        The guide runs again: a GP site must stand at the scaled latents, and one latent that
        depends on another must not be scaled twice.
        """
        values: Any = drawn | {
            h: {**drawn[h], "value": with_share(drawn[h]["value"], drawn[h], share)}
            for h in given.structure.latents
        }

        def again(params):
            return self._traced(handlers.replay(self._seeded(self.guide, params, key), values))

        return again(self.params), again(lax.stop_gradient(self.params))

    def _log_lik(self, given: _Given, drawn: dict, key) -> Float[Array, "B"]:
        """E_q(f)[log p(y_n | f_n)] over f of the last layer, or log p(y_n | f_n) where it was
        drawn.
        """
        outer = {k: drawn[k]["fn"] for k in given.structure.outer if k in drawn}
        q = {k: fn for k, fn in outer.items() if isinstance(fn, SparseMarginals)}
        values = {k: s["value"] for k, s in drawn.items() if s["type"] in ("sample", "plate")}

        def log_lik(f):
            again = run(self.model, self.args, self.kwargs, {**self.params, **values, **f})
            terms = [log_prob_per_datum(s) for s in again.values() if is_observed(s)]
            return sum([t for t in terms if t.ndim], jnp.zeros(given.num))

        if not q or not self.sampling.expected_last:
            return log_lik({})
        mean, variance = (
            {k: fn.loc for k, fn in q.items()},
            {k: fn.variance_n for k, fn in q.items()},
        )
        return expected_log_lik(log_lik, mean, variance, self.expectation, key)

    def _global(self, given: _Given, trace: dict, drawn: dict) -> Float[Array, ""]:
        """log p - log q of sites outside the data's plates, by their KL where that is known."""
        sites = {
            k: s
            for k, s in trace.items()
            if s["type"] == "sample" and k not in given.structure.latents
        }
        terms = [self._global_term(s, drawn.get(k)) for k, s in sites.items()]
        return sum(terms, jnp.zeros(())) - self.sampling.beta * auxiliary(drawn, trace, held)

    def _global_term(self, site: dict, drawn: dict | None):
        """-KL[q || p] of a site, or log p of something observed there."""
        if site["is_observed"]:
            shared = log_prob_per_datum(site)
            return 0.0 if jnp.ndim(shared) else shared
        if drawn is None:
            return 0.0  # missing observations integrate to one
        q, beta = drawn["fn"], self.sampling.beta
        if isinstance(q, SparseMarginals):
            return -beta * jnp.sum(scaled(drawn, kl_divergence(q, unwrap(site["fn"]))))
        log_p, log_q = site["fn"].log_prob(site["value"]), held(q).log_prob(drawn["value"])
        ratio = jnp.sum(scaled(site, log_p)) - jnp.sum(scaled(drawn, log_q))
        try:  # the value without noise, the gradient of the draw
            known = -jnp.sum(scaled(drawn, kl_divergence(q, site["fn"])))
        except NotImplementedError:
            return beta * ratio
        return beta * (ratio + lax.stop_gradient(known - ratio) if q.has_rsample else known)


def _num_data(trace) -> int:
    """B, the entries of what is observed along the axis of the data."""
    shapes = [
        (bare_shape(s["fn"]), s)
        for s in trace.values()
        if is_observed(s) and s["data_axis"] is not None
    ]
    if not shapes:
        raise ModelError(
            "the model observes nothing in a plate that grows with the rows of its first "
            "argument; give the inputs, one row per datum, as the first argument, and declare "
            "numpyro.plate('data', X.shape[0]) around what is observed."
        )
    shape, site = shapes[0]
    return shape[data_axis(site, len(shape))]  # pyright: ignore[reportArgumentType]
