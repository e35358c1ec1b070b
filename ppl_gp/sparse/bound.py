"""What a sparse variational bound is made of: a batch, a model at it under q(u), the KL of q(u).

`deep.bound.terms` puts a bound together from these.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.gp import GP, unwrap
from ppl_gp.model.declared import declare
from ppl_gp.model.factors import JointLogLikelihood
from ppl_gp.model.roles import roles
from ppl_gp.model.tracing import run
from ppl_gp.proofs.degree import degree
from ppl_gp.sparse.expectation import (
    NODES,
    Expectation,
    expectation_error,
    expected_log_lik,
    flatten,
)
from ppl_gp.sparse.families import Family, Nudge, Whitened
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.own_effects import Averaged, all_apart, averaged
from ppl_gp.sparse.process import SparseProcess
from ppl_gp.sparse.projection import gram
from ppl_gp.sparse.several import is_coupled

_PAIRED = 4000  # rows whose covariance matrix is made


class Batch(NamedTuple):
    """A minibatch: the model's arguments at its rows, each row's weight (N / B; 0 where padded), a
    key for draws.

    `given`: further sites of the trace that are given values, such as the indices of the model's
    own subsampling plate. `rows`: where the rows stand in the data, (B,), for what is kept by row;
    `None` where that is nothing.
    """

    args: tuple
    kwargs: dict
    weights: Float[Array, "B"]
    key: Any
    given: dict = {}
    rows: Any = None

    @property
    def num(self) -> int:
        """B."""
        return self.weights.shape[0]


class Variational(NamedTuple):
    """The variational part of the parameters: {GP site: ...}, and {latent site: q(h)}."""

    variables: dict[str, InducingVariables]
    q: dict[str, Family]
    latents: dict[str, Any] = {}


class Terms(eqx.Module):
    """What a bound is made of, nats, and each q(v) in the coordinates of this evaluation."""

    expected: Float[Array, ""]
    kl: Float[Array, ""]
    shared: Float[Array, ""]
    q: dict[str, Whitened]
    kl_weights: dict[str, Array]  # of each site's KL in `kl`, () or (*F,)

    @property
    def bound(self) -> Float[Array, ""]:
        """The ELBO at these hyperparameters, nats (without their prior)."""
        return self.expected - self.kl + self.shared


def priors_at(model: Callable, batch: Batch, hyper: dict) -> dict[str, GP]:
    """The GP priors that the model declares at a minibatch. O(B)."""
    trace = run(
        declare(model, batch.args, batch.kwargs), batch.args, batch.kwargs, {**hyper, **batch.given}
    )
    return {k: unwrap(trace[k]["fn"]) for k in roles(trace).gps}


class AtBatch(NamedTuple):
    """A declared model at a batch under q(u): one run of it, and the processes that it gives."""

    model: Callable
    batch: Batch
    given: dict  # values of hyperparameters, and of the batch's further sites
    trace: dict
    priors: dict[str, GP]
    processes: dict[str, SparseProcess]
    q: dict[str, Whitened]
    own: dict[str, Array]  # variances of effects that stand one a datum, which f is without

    @property
    def log_lik(self) -> JointLogLikelihood | Averaged:
        """{GP site: f} -> log p(y_n | f_n), (B,)."""
        batch = self.batch
        joint = JointLogLikelihood(self.model, batch.num, self.given, batch.args, batch.kwargs)
        return averaged(joint, self.own)

    def marginals(self) -> tuple[dict, dict]:
        """({GP site: mean}, {GP site: variance}) of f at the inputs that the trace has; of a
        predictor's correlated functions covariances. O(M^2 B) each.
        """
        found = {k: self.processes[k].moments(prior) for k, prior in self.priors.items()}
        return {k: m for k, (m, _) in found.items()}, {k: v for k, (_, v) in found.items()}


def at_batch(
    model: Callable,
    hyper: dict,
    variational: Variational,
    batch: Batch,
    nudge: dict[str, Nudge] | None = None,
) -> AtBatch:
    """Run the model on a batch. O(M^3) a GP site."""
    model, given = declare(model, batch.args, batch.kwargs), {**hyper, **batch.given}
    trace = run(model, batch.args, batch.kwargs, given)
    priors, own = all_apart({k: unwrap(trace[k]["fn"]) for k in roles(trace).gps})
    found = processes(priors, variational, nudge)
    return AtBatch(model, batch, given, trace, priors, *found, own)


def quadrature_gap(at: AtBatch, expectation: Expectation):
    """(sum_n w_n (E_q[log p(y_n | f_n)] by the bound's nodes - by finer ones), the same of absolute
    values), nats. Of effects that stand one a datum the nodes of both integrals count.

    Zero, and no finer nodes, where log p(y_n | f_n) is proved a polynomial that Gauss-Hermite nodes
    integrate exactly.
    """
    batch, log_lik, (mean, variance) = at.batch, at.log_lik, at.marginals()
    f, rebuild = flatten(mean)
    # n nodes are exact up to degree 2 n - 1
    if degree(lambda f: log_lik(rebuild(f)), f) < 2 * min(NODES.values()):
        return jnp.zeros(()), jnp.zeros(())
    finer = log_lik.finer() if isinstance(log_lik, Averaged) else None
    gap = expectation_error(log_lik, mean, variance, expectation, batch.key, finer)
    gap = jnp.where(batch.weights > 0, batch.weights * gap, 0.0)
    return jnp.sum(gap), jnp.sum(jnp.abs(gap))


def inducing_gap(at: AtBatch, expectation: Expectation, share) -> Float[Array, ""]:
    """By how much more inducing variables could raise the bound at these hyperparameters, nats, at
    most. O(B^2 M). Each row of the batch stands for `share` data. NaN for correlated functions and
    for a batch of more than `_PAIRED` rows.

    With g_n, -t_n the expected slope and curvature of log p(y_n | f_n) under q(f_n), T = diag(t)
    and R = K - A^T A, what u leaves of the prior's covariance:

    log p(y) - bound <= (tr(T R) + g^T R g) / 2

    for Gaussian noise at the best q(u) (Titsias 2014 has an eigenvalue of R in the second term; it
    is y^T C y >= 2 v^T y - v^T C^-1 v at v = g, C^-1 = K + T^-1). To second order elsewhere. Pairs
    of different rows are seen for a part share^-2 of them.
    """
    batch = at.batch
    if any(is_coupled(prior) for prior in at.priors.values()) or batch.num > _PAIRED:
        return jnp.full((), jnp.nan)

    def expected(mean, variance):
        terms = expected_log_lik(at.log_lik, mean, variance, expectation, batch.key)
        return jnp.sum(jnp.where(batch.weights > 0, batch.weights * terms, 0.0))

    g, half = jax.grad(expected, (0, 1))(*at.marginals())
    total = jnp.zeros(())
    for name, prior in at.priors.items():
        process = at.processes[name]
        A = process.root.whiten(process.inducing.cross(prior, prior.X))
        R = prior.covariance_matrix - gram(A)
        left, each = jnp.maximum(jnp.diagonal(R), 0.0), jnp.reshape(g[name], (-1, len(R)))
        own = jnp.sum(each**2 * left)
        pairs = jnp.maximum(jnp.sum((each @ R) * each) - own, 0.0)
        total += 0.5 * share * (own + share * pairs) - share * jnp.sum(half[name] * left)
    return jnp.maximum(total, 0.0)


def kl_weights(trace: dict, sites: Iterable[str], beta) -> dict[str, Array]:
    """Weights of each GP site's KL: `beta`, and the `numpyro.handlers.scale` around the site."""
    scales = {k: trace[k]["scale"] for k in sites}
    return {k: jnp.asarray(beta if s is None else beta * s) for k, s in scales.items()}


def weighted_kl(q: dict[str, Whitened], weights: dict[str, Array]) -> Float[Array, ""]:
    """The sum of all KL terms, nats."""
    return sum([jnp.sum(weights[k] * w.kl) for k, w in q.items()], jnp.zeros(()))


def processes(
    priors: dict[str, GP], variational: Variational, nudge: dict[str, Nudge] | None = None
) -> tuple[dict[str, SparseProcess], dict[str, Whitened]]:
    """The posterior process and q(v) of every GP site. O(M^3) each."""
    posterior, q = {}, {}
    for name, prior in priors.items():
        variables = variational.variables[name]
        q[name] = variational.q[name].whitened()
        m, P = q[name].mean, q[name].reduction
        if nudge is not None and name in nudge:
            m, P = m + nudge[name].mean, P + nudge[name].reduction
        posterior[name] = SparseProcess(prior, variables, variables.root(prior), m, P)
    return posterior, q
