"""The ELBO of a model at given hyperparameters, and how a batch is passed through the layers.

  sum_n w_n E log (1/K) sum_k exp(E_q(f)[log p(y_n | f_n, h_n^k)]) p(h_n^k) / q(h_n^k)
  - sum over GP sites of KL[q(u) || p(u)]
  + log p of observations that belong to no datum,      w_n = N / B,

for K copies h_n^k ~ q(h_n) of every datum's latents, a bound that rises with K (Burda, Grosse &
Salakhutdinov 2016; Salimbeni, Dutordoir, Hensman & Deisenroth 2019, eq. 16-17; Leibfried et al.
2022), with the weights of `SVGP` and of NumPyro's `SVI`. The log is taken for each
datum, the global KL stands outside it, w_n outside the mean. At K = 1 the first line is
  sum_n w_n (E[log p(y_n | f_n, h_n)] - KL[q(h_n) || p(h_n)]),
and without latents and layers sum_n w_n E_q(f)[log p(y_n | f_n)] (Hensman, Fusi & Lawrence 2013;
Hensman, Matthews & Ghahramani 2015, eq. 19).

Inner GP sites are drawn, outer ones leave their moments for the likelihood (Salimbeni & Deisenroth
2017, eq. 16; Salimbeni et al. 2019). K copies of each datum share one function: draws of f are
joint over all of them. The copies are the rows of a `jax.vmap` with a named axis. At a GP site each
copy asks its sisters for their inputs, the K x K covariance of every datum is factored once, and
each takes its own entry of the draw. Independent draws would not give a lower bound: a log-mean-exp
over copies is one only where f is the same function in all of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.distributions import Distribution
from numpyro.distributions.kl import kl_divergence

from ppl_gp.deep.latents import LatentGuide, latent_form
from ppl_gp.deep.structure import Structure
from ppl_gp.errors import ModelError
from ppl_gp.gp import GP
from ppl_gp.kernels.base import jitter_of
from ppl_gp.numerics.linalg import robust_factors
from ppl_gp.reading.factors import JointLogLikelihood, shared_log_prob
from ppl_gp.reading.roles import log_prob_per_datum, plate_scale, sum_per_datum
from ppl_gp.reading.tracing import annotated, set_gps
from ppl_gp.sparse.bound import (
    AtBatch,
    Batch,
    Terms,
    Variational,
    at_batch,
    kl_weights,
    weighted_kl,
)
from ppl_gp.sparse.expectation import Expectation, expected_log_lik
from ppl_gp.sparse.families import Nudge
from ppl_gp.sparse.process import SparseProcess
from ppl_gp.sparse.svgp import Layers

COPIES = "ppl_gp_copies"  # the axis's name


def draw_copy(process: SparseProcess, new: GP, key, axis: str) -> Float[Array, "*F B"]:
    """This copy's part of a draw of f that is joint over the copies of each datum, which give the
    same `key`; `new`: the prior at its inputs. O(M^2 K B + K^3 B) for all copies.
    """
    mean, covariance = _over_copies(process, new, lax.all_gather(new.X, axis))
    unit = jnp.finfo(covariance.dtype).eps * jnp.mean(new.variance)
    white = random.normal(key, mean.shape, mean.dtype)
    drawn = mean + jnp.einsum("...ij,...j->...i", robust_factors(covariance, unit), white)
    return jnp.take(drawn, lax.axis_index(axis), -1)


def _over_copies(process: SparseProcess, prior: GP, X: Float[Array, "K B *D"]):
    """(mean (*F, B, K), covariance (*F, B, K, K)) of each datum's copies."""
    rows = jnp.reshape(X, (-1, *X.shape[2:]))
    jitter = jitter_of(prior.kernel, rows) if prior.jitter is None else prior.jitter

    def of_datum(x):
        return process.joint(GP(prior.kernel, x, prior.mean_function, jitter))

    return jax.vmap(of_datum, 1, (-2, -3))(X)


class Copies(NamedTuple):
    """A batch's copies on their way through the layers."""

    at: AtBatch
    expectation: Expectation
    layers: Layers
    structure: Structure
    latents: dict[str, LatentGuide]
    known: dict[str, tuple]  # (mean, variance) of GP sites that stand at the data in every copy

    @property
    def axis(self) -> str | None:
        """The name of the copies' axis, where a GP site is drawn at copies of different inputs."""
        several = self.layers.num_importance > 1
        return COPIES if several and drawn(self.layers, self.structure)[1] else None

    def log_mean_weight(self, key) -> Float[Array, "B"]:
        """log (1/K) sum_k w_nk, (B,), nats."""
        key_f, *keys = random.split(key, 1 + self.layers.num_importance)
        if len(keys) == 1:
            return self._log_weight(key_f, keys[0], None)
        keys = jnp.stack(keys)

        def log_weights(share):
            return self._log_weights(key_f, keys, share), None

        return per_datum_bound(log_weights, self.layers)[0]

    def _log_weights(self, key_f, keys, share) -> Float[Array, "K B"]:
        if self.axis is None:  # one after the other, which is faster than one large problem
            return lax.map(lambda k: self._log_weight(key_f, *k), (keys, share))
        return jax.vmap(partial(self._log_weight, key_f), axis_name=COPIES)(keys, share)

    def _log_weight(self, key_f, key_h, share) -> Float[Array, "B"]:
        """log of p(y_n | h_n) p(h_n) / q(h_n) of one copy."""
        q = self._latent_posteriors(self.latents)
        h = {k: one.sample(random.fold_in(key_h, i)) for i, (k, one) in enumerate(q.items())}
        if share is not None:
            q = self._latent_posteriors(lax.stop_gradient(self.latents))
            h = {k: with_share(v, self.at.trace[k], share) for k, v in h.items()}
        given = {**self.at.given, **h}
        trace, *moments = self._pass(given, key_f)
        under_q = {k: {**own_site(trace, k), "fn": one} for k, one in q.items()}
        ratio = log_ratio(trace, under_q, self.at.batch.num, self.layers)
        log_lik = self._log_lik(trace, *moments, given, key_f) / plate_scale(trace)
        return log_lik + self.layers.beta * ratio

    def _latent_posteriors(self, guides: dict[str, LatentGuide]) -> dict[str, Distribution]:
        batch, sites = self.at.batch, self.at.trace
        rows = batch.rows, batch.args, batch.kwargs
        return {k: guides[k].at(sites[k], *rows) for k in self.structure.latents}

    def _pass(self, given: dict, key) -> tuple[dict, dict, dict]:
        """(trace, {GP site that is not drawn: mean}, {the same: variance}) of the model with
        hyperparameters and latents given. O(M^2 B) a GP site.
        """
        at, structure, means, variances = self.at, self.structure, {}, {}
        alone, together = drawn(self.layers, structure)

        def value(name, new: GP):
            process, own = at.processes[name], random.fold_in(key, structure.gps.index(name))
            if self.axis is not None and name in together:
                return draw_copy(process, new, own, self.axis)
            mean, variance = self.known.get(name) or process.marginals(new)
            # at the same inputs all copies have the same f, and the same key gives it
            if name in alone:
                return mean + jnp.sqrt(variance) * random.normal(own, mean.shape, mean.dtype)
            means[name], variances[name] = mean, variance
            return mean

        with handlers.block():
            seeded = handlers.substitute(handlers.seed(at.model, random.key(0)), data=given)
            run = handlers.trace(set_gps(seeded, value)).get_trace
            trace = annotated(run(*at.batch.args, **at.batch.kwargs), at.model)
        return trace, means, variances

    def _log_lik(self, trace: dict, mean: dict, variance: dict, given: dict, key):
        """E_q(f)[log p(y_n | f_n)], (B,), or log p(y_n | f_n) where every layer was drawn."""
        batch, values = self.at.batch, lambda names: {k: trace[k]["value"] for k in names}
        fixed = {**given, **values(drawn(self.layers, self.structure)[0])}
        log_lik = JointLogLikelihood(self.at.model, batch.num, fixed, batch.args, batch.kwargs)
        if not mean:
            return log_lik(values(self.structure.outer))
        return expected_log_lik(log_lik, mean, variance, self.expectation, key)


def terms(
    model: Callable,
    expectation: Expectation,
    layers: Layers,
    structure: Structure,
    hyper: dict,
    variational: Variational,
    batch: Batch,
    nudge: dict[str, Nudge] | None = None,
) -> Terms:
    """The bound's terms, nats. O(M^3 + M^2 B) a GP site (see `sparse.process.explained`), times
    num_paths K where its inputs differ; K^3 B a drawn layer; the quadrature of the likelihood.
    """
    at, counts = at_batch(model, hyper, variational, batch, nudge), batch.weights
    if structure.is_shallow:
        per_datum = expected_log_lik(at.log_lik, *at.marginals(), expectation, batch.key)
    else:
        known = {k: at.processes[k].marginals(at.priors[k]) for k in structure.given}
        copies = Copies(at, expectation, layers, structure, variational.latents, known)
        keys = random.split(at.batch.key, layers.num_paths)
        # log (1/K) sum_k w_nk, averaged over paths
        per_datum = jnp.mean(lax.map(copies.log_mean_weight, keys), 0)
        counts = counts * plate_scale(at.trace)  # which no log of a mean holds
    # a padded row repeats another one; `where` keeps 0 x inf, of what a mask leaves out, from NaN
    expected = jnp.sum(jnp.where(batch.weights > 0, counts * per_datum, 0.0))
    weights = kl_weights(at.trace, at.priors, layers.beta)
    kl = weighted_kl(at.q, weights)
    return Terms(expected, kl, shared_log_prob(at.trace), at.q, weights)


def drawn(layers: Layers, structure: Structure) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(GP sites that are drawn, not integrated; those drawn jointly, at copies of other inputs)."""
    each = structure.inner if layers.expected_last else structure.gps
    return each, tuple(g for g in structure.varying if g in each)


def per_datum_bound(log_weights: Callable, layers: Layers) -> tuple[Float[Array, "B"], Any]:
    """(log (1/K) sum_k w_nk, nats; what `log_weights` gives beside the weights).

    `log_weights(share)` -> (log w_nk (K, B), anything). `share` (K, B) scales what reaches q(h)'s
    parameters through each copy's latents, while those inside log q are held; `None`: all of it,
    and none is held.

    The doubly reparameterised gradient (Tucker, Lawson, Gu & Maddison 2019) is
      sum_k v_nk^2 (d log w_nk / dh_nk) (dh_nk / dphi),  v_nk = w_nk / sum_j w_nj.
    One v_nk is the derivative of the log-mean-exp, the other is `share`. Twice the passes.
    """
    share = None
    if layers.doubly_reparameterised and layers.num_importance > 1:
        share = jax.nn.softmax(lax.stop_gradient(log_weights(None)[0]), 0)
    found, beside = log_weights(share)
    return logsumexp(found, 0) - jnp.log(layers.num_importance), beside


def log_ratio(trace: dict, q: dict[str, dict], num: int, layers: Layers) -> Float[Array, "B"]:
    """sum over latents of log p(h_n) - log q(h_n), (B,), nats, of one copy: its log weight is
    log p(y_n | h_n) + beta times this.

    `trace`: the model's; `q`: {latent site: its site under q, as `own_site` gives it}.
    """
    ratios = [_log_ratio(own_site(trace, k), site, layers) for k, site in q.items()]
    return sum(ratios, jnp.zeros(num))


def _log_ratio(p: dict, q: dict, layers: Layers) -> Float[Array, "B"]:
    """Or minus its expectation KL[q || p] where that is known and K = 1; each with the `scale` of
    its own site, as NumPyro's `Trace_ELBO` has it.
    """
    if layers.num_importance == 1:
        try:
            known = -sum_per_datum(q, q["scale"] * kl_divergence(q["fn"], p["fn"]))
        except NotImplementedError:
            pass
        else:
            more = p["scale"] - q["scale"]
            is_same = isinstance(more, float) and more == 0.0
            return known if is_same else known + log_prob_per_datum({**p, "scale": more})
    return log_prob_per_datum(p) - log_prob_per_datum(q)


def own_site(trace: dict, name: str) -> dict:
    """A site with its own `scale`, without the N / B of the data's plate that subsamples."""
    scale = trace[name]["scale"]
    return {**trace[name], "scale": 1.0 if scale is None else scale / plate_scale(trace)}


def with_share(value: ArrayLike, site: dict, share: Float[Array, "B"]) -> ArrayLike:
    """A latent's value, of which `share` of each datum's gradient is handed on."""
    axis, _ = latent_form(site, share.shape[0])
    others = [i for i in range(jnp.ndim(value)) if i != axis]
    return _scale_gradient(value, jnp.expand_dims(share, others))


@jax.custom_vjp
def _scale_gradient(x, factor):
    """x, whose cotangent is multiplied by `factor` on its way back."""
    return x


_scale_gradient.defvjp(
    lambda x, factor: (x, factor), lambda factor, g: (factor * g, jnp.zeros_like(factor))
)


def require_separate(layers: Layers, structure: Structure, method: str) -> None:
    """Raise `ModelError` where the copies' weights depend on each other's latents: then the doubly
    reparameterised gradient does not hold.
    """
    joint = list(drawn(layers, structure)[1])
    if layers.doubly_reparameterised and joint:
        raise ModelError(
            f"{method}(doubly_reparameterised=True): the GP sites {joint} are drawn jointly at the "
            "copies, whose weights then depend on each other's latents; that gradient is for "
            "latents that enter the last layer, with expected_last=True."
        )
