"""Bounds as NumPyro ELBO objects: for its `SVI`, with any guide, in function space (GP sites) and
in weight space alike.

Sites in the data's plates (what is observed, and latents that stand one a datum) enter for each
datum; every other latent site, q(u) of a GP and a network's weights among them, enters by its KL
divergence, once, outside the log. A plate that subsamples makes them minibatch bounds, unbiased for
num_importance = 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence
from numpyro.infer.elbo import ELBO as NumPyroELBO

from ppl_gp.deep.bound import COPIES, own_scale, scale_gradient
from ppl_gp.deep.structure import Structure, layers
from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import unwrap
from ppl_gp.infer.hyper.autoguides import log_q
from ppl_gp.infer.particle import OfCopy, OverRows, along_data
from ppl_gp.model.declared import declare
from ppl_gp.model.tracing import (
    annotated,
    data_axis,
    data_plates,
    is_observed,
    log_prob_per_datum,
    plate_scale,
    roles,
    run,
    sum_per_datum,
)
from ppl_gp.sparse.expectation import Expectation, expected_log_lik
from ppl_gp.sparse.site import SparseMarginals
from ppl_gp.wrappers import bare_shape


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
        if min(num_importance, num_particles) < 1:
            raise DataError(
                f"num_importance={num_importance}, num_particles={num_particles}: a bound "
                "averages over at least 1 copy and 1 draw."
            )
        if not 0.0 <= beta < float("inf"):
            raise DataError(f"beta={beta}: give a finite weight of the KL terms, at least 0.")
        self.num_importance, self.expected_last = num_importance, expected_last
        self.doubly_reparameterised, self.beta, self.num_nodes = (
            doubly_reparameterised,
            beta,
            num_nodes,
        )
        super().__init__(num_particles=num_particles)

    def loss_with_mutable_state(self, rng_key, param_map, model, guide, *args, **kwargs):
        """{"loss": minus the bound, "mutable_state": None}, as NumPyro asks for it."""
        model = declare(model, args, kwargs)
        keys = random.split(rng_key, self.num_particles)
        bounds = jax.vmap(
            lambda key: _Particle(self, key, param_map, model, guide, args, kwargs).bound()
        )(keys)
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


class _Given(NamedTuple):
    """What is known of a model before it is run: its layers, the data's plates, B."""

    of: Structure
    plates: frozenset[str]
    num: int
    rest: dict  # values of parameters


class _Particle(NamedTuple):
    """One estimate of the bound."""

    elbo: ImportanceWeightedELBO
    key: Any
    params: dict
    model: Any
    guide: Any
    args: tuple
    kwargs: dict

    def bound(self):
        """Nats."""
        K, given = self.elbo.num_importance, self._look()
        if K == 1:
            return self._combine(
                given, *jax.tree.map(lambda x: x[None], self._copy(given, 0, None))
            )

        def copies(share):
            return jax.vmap(lambda k, s: self._copy(given, k, s), axis_name=COPIES)(
                jnp.arange(K), share
            )

        share = None
        if self.elbo.doubly_reparameterised:
            self._require_separate(given.of)
            share = jax.nn.softmax(lax.stop_gradient(copies(None)[0]), 0)
        return self._combine(given, *copies(share))

    def _combine(self, given, log_weights, rest, scale):
        # Global terms are the same in all copies.
        per_datum = logsumexp(log_weights, 0) - jnp.log(self.elbo.num_importance)
        return scale[0] * jnp.sum(per_datum) + jnp.mean(rest)

    def _look(self) -> _Given:
        with handlers.block():
            drawn = handlers.trace(
                handlers.seed(handlers.substitute(self.guide, data=self.params), random.key(0))
            )
            indices = {
                k: s["value"]
                for k, s in drawn.get_trace(*self.args, **self.kwargs).items()
                if s["type"] == "plate"
            }
        given = {**self.params, **indices}
        trace = run(self.model, self.args, self.kwargs, given)
        found, plates, num = roles(trace), frozenset(data_plates(trace)), _num_data(trace)
        of = layers(
            found,
            trace,
            lambda values: run(self.model, self.args, self.kwargs, {**given, **values}),
        )
        return _Given(of, plates, num, given)

    def _require_separate(self, of: Structure) -> None:
        joint = [g for g in of.varying if g in of.inner or not self.elbo.expected_last]
        if joint:
            raise ModelError(
                f"doubly_reparameterised=True: the GP sites {joint} are drawn jointly at the "
                "copies, and that gradient is for latents that enter the last layer, with "
                "expected_last=True."
            )

    def _copy(self, given: _Given, k, share):
        """(log w_nk (B,), minus the global KL terms, N / B) of one copy."""
        K = self.elbo.num_importance
        key_guide, key_model = random.split(self.key)
        seeded = handlers.seed(handlers.substitute(self.guide, data=self.params), key_guide)
        guide = OfCopy(seeded, given.plates, given.of, k, COPIES if K > 1 else None)
        drawn: Any = annotated(
            handlers.trace(guide).get_trace(*self.args, **self.kwargs), self.model
        )
        q = drawn
        if share is not None:
            drawn, q = self._doubly(given, drawn, share, key_guide)
        seeded = handlers.seed(handlers.substitute(self.model, data=self.params), key_model)
        trace = handlers.trace(handlers.replay(seeded, drawn)).get_trace(*self.args, **self.kwargs)
        trace = annotated(trace, self.model)
        scale = plate_scale(trace)
        ratio = sum(
            [self._log_ratio(trace, q, h, given.num) for h in given.of.latents],
            jnp.zeros(given.num),
        )
        rest = sum(
            [self._global(name, site, drawn, given) for name, site in trace.items()], jnp.zeros(())
        )
        rest = rest - self.elbo.beta * _auxiliary(drawn, trace)
        return (
            self._log_lik(given, trace, drawn, key_model) / scale + self.elbo.beta * ratio,
            rest,
            jnp.asarray(1.0 * scale),
        )

    def _doubly(self, given: _Given, drawn, share, key) -> tuple[dict, dict]:
        """The guide's trace with latents that only `share` of a gradient reaches, and the same with
        its parameters held.

        The guide runs again: a GP site must stand at the scaled latents, and one latent that
        depends on another must not be scaled twice.
        """
        scaled_h = {
            h: scale_gradient(drawn[h]["value"], along_data(share, drawn[h], given.num))
            for h in given.of.latents
        }
        values = drawn | {h: {**drawn[h], "value": value} for h, value in scaled_h.items()}

        def again(params):
            seeded = handlers.seed(handlers.substitute(self.guide, data=params), key)
            trace = handlers.trace(handlers.replay(seeded, values)).get_trace(
                *self.args, **self.kwargs
            )
            return annotated(trace, self.model)

        return again(self.params), again(lax.stop_gradient(self.params))

    def _log_lik(self, given: _Given, trace, drawn, key):
        marginals = {
            k: drawn[k]["fn"]
            for k in given.of.outer
            if k in drawn and isinstance(drawn[k]["fn"], SparseMarginals)
        }

        def log_lik(latent):
            values = {k: s["value"] for k, s in drawn.items() if s["type"] in ("sample", "plate")}
            again = run(self.model, self.args, self.kwargs, {**self.params, **values, **latent})
            terms = [log_prob_per_datum(s, given.num) for s in again.values() if is_observed(s)]
            return sum([t for t in terms if t.ndim], jnp.zeros(given.num))

        if not marginals or not self.elbo.expected_last:
            return log_lik({})
        mean, variance = (
            {k: q.loc for k, q in marginals.items()},
            {k: q.variance_n for k, q in marginals.items()},
        )
        return expected_log_lik(log_lik, mean, variance, Expectation(self.elbo.num_nodes), key)

    def _log_ratio(self, trace, q, name, num):
        """log p - log q of a latent of the data, (B,), each with the `scale` of its own site, as
        NumPyro's bounds have it.
        """
        p = {**trace[name], "scale": own_scale(trace, name)}
        q = {**trace[name], "fn": q[name]["fn"], "scale": own_scale(q, name)}
        if self.elbo.num_importance == 1:
            try:
                return -sum_per_datum(q, q["scale"] * kl_divergence(q["fn"], p["fn"]), num)
            except NotImplementedError:
                pass
        return log_prob_per_datum(p, num) - log_prob_per_datum(q, num)

    def _global(self, name, site, drawn, given: _Given):
        """What a site outside the data's plates adds: -KL[q || p], or log p of something observed
        there.
        """
        if site["type"] != "sample" or name in given.of.latents:
            return 0.0
        if site["is_observed"]:
            shared = log_prob_per_datum(site, given.num)
            return 0.0 if jnp.ndim(shared) else shared
        if name not in drawn:
            return 0.0  # missing observations integrate to one
        q = drawn[name]["fn"]
        p = unwrap(site["fn"]) if isinstance(q, SparseMarginals) else site["fn"]
        try:
            return -self.elbo.beta * jnp.sum(scaled(drawn[name], kl_divergence(q, p)))
        except NotImplementedError:
            log_p, log_q = site["fn"].log_prob(site["value"]), q.log_prob(drawn[name]["value"])
            return self.elbo.beta * (
                jnp.sum(scaled(site, log_p)) - jnp.sum(scaled(drawn[name], log_q))
            )


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
            "argument; give the inputs, one row a datum, as the first argument, and declare "
            "numpyro.plate('data', X.shape[0]) around what is observed."
        )
    shape, site = shapes[0]
    return shape[data_axis(site, len(shape))]  # pyright: ignore[reportArgumentType]


def _auxiliary(drawn, trace):
    """log q of what the guide alone draws, such as the joint vector of `AutoMultivariateNormal`,
    nats.
    """
    sites = [
        s
        for k, s in drawn.items()
        if s["type"] == "sample" and not s["is_observed"] and k not in trace
    ]
    return sum([jnp.sum(scaled(s, log_q(s))) for s in sites], jnp.zeros(()))


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
        return total - _auxiliary(drawn, trace)


def scaled(site, log_prob):
    """With the site's own `scale` handler."""
    return log_prob if site["scale"] is None else site["scale"] * log_prob
