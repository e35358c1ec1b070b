"""Passing a batch through the layers: inner GP sites are drawn, outer ones leave their moments for
the likelihood.

K copies of each datum share one function: draws of f are joint over all of them.
The copies are the rows of a `jax.vmap` with a named axis. At a GP site each copy asks its sisters
for their inputs, the K x K covariance of every datum is factored once, and each takes its own entry
of the draw. Independent draws would not give a lower bound: a log-mean-exp over copies is one only
where f is the same function in all of them.

`Copies` has the weights of a datum's copies: inner layers are drawn, the last is integrated
(Salimbeni & Deisenroth 2017, eq. 16; Salimbeni et al. 2019).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.distributions import Distribution

from ppl_gp.deep.importance import Sampling, log_ratio, own_site, per_datum_bound, with_share
from ppl_gp.deep.latents import LatentGuide
from ppl_gp.deep.structure import Structure
from ppl_gp.gp import GP
from ppl_gp.numerics.linalg import add_diagonal, robust_cholesky
from ppl_gp.reading.factors import JointLogLikelihood
from ppl_gp.reading.roles import plate_scale
from ppl_gp.reading.tracing import annotated, set_gps
from ppl_gp.sparse.bound import AtBatch
from ppl_gp.sparse.expectation import Expectation, expected_log_lik
from ppl_gp.sparse.process import SparseProcess

COPIES = "ppl_gp_copies"  # the axis's name


def draw_copy(process: SparseProcess, new: GP, key, axis: str) -> Float[Array, "*F B"]:
    """This copy's part of a draw of f that is joint over the copies of each datum. O(M^2 K B + K^3
    B) for all copies.

    `new`: the prior at this copy's inputs; `key` must be the same in all copies; `axis`: the name
    of the mapped axis.
    """
    X = lax.all_gather(new.X, axis)
    mean, covariance = _over_copies(process, new, X)
    unit = jnp.finfo(covariance.dtype).eps * jnp.mean(new.variance)
    factor = lambda c: robust_cholesky(c, unit)[0]  # noqa: E731
    for _ in covariance.shape[:-2]:
        factor = jax.vmap(factor)
    white = random.normal(key, mean.shape, mean.dtype)
    drawn = mean + jnp.einsum("...ij,...j->...i", factor(covariance), white)
    return jnp.take(drawn, lax.axis_index(axis), -1)


def _over_copies(process: SparseProcess, prior: GP, X: Float[Array, "K B *D"]):
    """(mean (*F, B, K), covariance (*F, B, K, K)) of each datum's copies."""
    K, B = X.shape[:2]
    flat = GP(
        prior.kernel, jnp.reshape(X, (K * B, *X.shape[2:])), prior.mean_function, prior.jitter
    )
    A = process.root.whiten(process.inducing.cross(flat, flat.X))
    m, P = process.mean, process.reduction
    PA = P @ A if P.ndim > m.ndim else P[..., None] * A
    explained = _products(A, PA, K)
    mean = process.at(flat).mean + m @ A
    mean = jnp.swapaxes(
        jnp.reshape(jnp.broadcast_to(mean, (*m.shape[:-1], K * B)), (*m.shape[:-1], K, B)), -1, -2
    )
    variance = jnp.reshape(flat.variance, (K, B)).T
    if process.inducing.is_exact:
        X = jnp.swapaxes(X, 0, 1)
        covariance = jax.vmap(lambda x: prior.kernel(x, x))(X)
        diagonal = variance - jnp.diagonal(covariance, axis1=-2, axis2=-1)  # the jitter
        return mean, _add(covariance, diagonal) - explained
    Q = _products(A, A, K)
    rest = jnp.maximum(variance - jnp.diagonal(Q, axis1=-2, axis2=-1), 0.0)
    return mean, _add(Q, rest) - explained


def _products(A, PA, K: int) -> Float[Array, "*F B K K"]:
    """a_bk^T P a_bj of each datum b."""
    M = A.shape[0]
    left = jnp.reshape(A, (M, K, -1))
    right = jnp.reshape(PA, (*PA.shape[:-1], K, -1))
    return jnp.einsum("mkb,...mjb->...bkj", left, right)


def _add(covariance, diagonal):
    return jax.vmap(add_diagonal)(covariance, diagonal)


class Moments(NamedTuple):
    """Mean and variance of f at the rows of a batch."""

    mean: Float[Array, "*F B"]
    variance: Float[Array, "*F B"]


class Passed(NamedTuple):
    """What one copy of a batch met on its way."""

    trace: dict
    moments: dict[str, Moments]  # of the GP sites that were not drawn

    def values(self, names) -> dict:
        """{site: value}."""
        return {k: self.trace[k]["value"] for k in names}


def pass_through(
    model,
    args,
    kwargs,
    given: dict,
    processes: dict[str, SparseProcess],
    structure: Structure,
    key,
    axis=None,
    drawn=None,
    known: Mapping[str, Moments] = MappingProxyType({}),
) -> Passed:
    """Run the model with hyperparameters and latents given. O(M^2 B) a GP site.

    `drawn`: the GP sites to draw, by default the inner ones. `axis`: the mapped axis of copies,
    over which draws are joint.
    `known`: moments of GP sites that stand at the data in every run.
    """
    drawn, moments = structure.inner if drawn is None else drawn, {}

    def value(name, new: GP):
        process, own = processes[name], random.fold_in(key, structure.gps.index(name))
        if axis is not None and name in structure.varying and name in drawn:
            return draw_copy(process, new, own, axis)
        f = known[name] if name in known else Moments(*process.marginals(new))
        # at the same inputs all copies have the same f, and the same key gives it
        if name in drawn:
            return f.mean + jnp.sqrt(f.variance) * random.normal(own, f.mean.shape, f.mean.dtype)
        moments[name] = f
        return f.mean

    with handlers.block():
        seeded = handlers.substitute(handlers.seed(model, random.key(0)), data=given)
        return Passed(
            annotated(handlers.trace(set_gps(seeded, value)).get_trace(*args, **kwargs), model),
            moments,
        )


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
