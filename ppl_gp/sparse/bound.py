"""What a sparse variational bound is made of: a batch, a model at it under q(u), the KL of q(u)
(`deep.bound.terms` puts a bound together from these); and Titsias' collapsed bound: q(u) at its
optimum in closed form, if the likelihood is Gaussian in f.

A datum's log-likelihood c_n + b_n d - t_n d^2 / 2 in d = f_n - m_n has the bound (Titsias 2009, eq.
9, for any t_n)

sum_n c_n - sum_n t_n (k_nn - a_n^T a_n) / 2 - log|B| / 2 + beta^T B^-1 beta / 2,  B = I + A diag(t)
A^T, beta = A b,

with A = R^-1 Cov[u, f(X)]. The optimal q(v) has natural parameters beta and B - I.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, unwrap
from ppl_gp.numerics.blocks import flatten
from ppl_gp.numerics.linalg import add_diagonal, half_log_det, product, robust_cholesky, solve_lower
from ppl_gp.reading.dependence import degree
from ppl_gp.reading.factors import JointLogLikelihood
from ppl_gp.reading.reading import declare
from ppl_gp.reading.roles import roles
from ppl_gp.reading.tracing import run
from ppl_gp.sparse.expectation import (
    NODES,
    Averaged,
    Expectation,
    averaged,
    expectation_error,
    expected_log_lik,
    quadratic,
    split_effects,
)
from ppl_gp.sparse.families import Family, NaturalGaussian, Nudge, Whitened
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.process import SparseProcess, gram, is_coupled, sparse_process

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
    weights: Float[Array, "B"] | np.ndarray  # which it is on the host
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
    args = batch.args, batch.kwargs
    trace = run(declare(model, *args), *args, {**hyper, **batch.given})
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
    own: dict[str, Array]  # variances of per-datum effects, which f is without

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
    priors, own = split_effects({k: unwrap(trace[k]["fn"]) for k in roles(trace).gps})
    return AtBatch(model, batch, given, trace, priors, *processes(priors, variational, nudge), own)


def quadrature_gap(at: AtBatch, expectation: Expectation):
    """(sum_n w_n (E_q[log p(y_n | f_n)] by the bound's nodes - by finer ones), the same of absolute
    values), nats. Of per-datum effects the nodes of both integrals count.

    Zero, and no finer nodes, where log p(y_n | f_n) is proved a polynomial that Gauss-Hermite nodes
    integrate exactly.
    """
    batch, log_lik, (mean, variance) = at.batch, at.log_lik, at.marginals()
    f, rebuild = flatten(mean)
    num = expectation.nodes(len(f)) or min(NODES.values())
    # n nodes are exact up to degree 2 n - 1
    if degree(lambda f: log_lik(rebuild(f)), f) < 2 * num:
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
        at = q[name] = variational.q[name].whitened()
        if nudge is not None and name in nudge:
            more = nudge[name]
            at = at._replace(mean=at.mean + more.mean, reduction=at.reduction + more.reduction)
        posterior[name] = sparse_process(prior, variational.variables[name], at)
    return posterior, q


class Collapsed(NamedTuple):
    """The bound (nats) and the sites of the optimal q(u)."""

    bound: Float[Array, ""]
    sites: NaturalGaussian


def collapsed(
    model: Callable, hyper: dict, variables: dict[str, InducingVariables], batch: Batch
) -> Collapsed:
    """The collapsed bound on the evidence, differentiable in hyperparameters and inducing
    variables, of one latent function and all data (`require_gaussian`). O(N M^2).
    """
    priors, own = split_effects(priors_at(model, batch, hyper))
    ((name, prior),) = priors.items()
    joint = JointLogLikelihood(model, batch.weights.shape[0], hyper, batch.args, batch.kwargs)
    log_lik = averaged(joint, own)
    c, b, t = quadratic(lambda f: log_lik({name: f}), prior.mean)
    A = variables[name].root(prior).whiten(variables[name].cross(prior, prior.X))
    beta, nat2 = A @ b, product(A * t, A.T)
    L, _ = robust_cholesky(add_diagonal(nat2, 1.0), jnp.zeros((), nat2.dtype))
    inside = solve_lower(L, beta)
    unexplained = prior.variance - jnp.sum(A**2, 0)
    bound = jnp.sum(c) - 0.5 * t @ unexplained - half_log_det(L) + 0.5 * inside @ inside
    return Collapsed(bound + log_lik.shared(), NaturalGaussian(beta, nat2))


def require_gaussian(model: Callable, hyper: dict, batch: Batch) -> None:
    """Raise `ModelError` unless there is one latent function (N,) whose likelihood is Gaussian in
    f, proved at any f: `degree` <= 2 and a curvature that is not positive.
    """
    trace = run(declare(model, batch.args, batch.kwargs), batch.args, batch.kwargs, hyper)
    gps = {k: trace[k] for k in roles(trace).gps}
    if len(gps) > 1 or any(len(s["fn"].shape()) > 1 for s in gps.values()):
        told = {k: tuple(s["fn"].shape()) for k, s in gps.items()}
        raise ModelError(
            "CollapsedSVGP() needs one latent function of shape (N,); the model has the GP "
            f"sites {told}. Give SVGP()."
        )
    ((name, site),) = gps.items()
    if site["scale"] is not None:
        raise ModelError(
            f"CollapsedSVGP(): numpyro.handlers.scale stands around '{name}', and q(u) at a KL "
            "weight of 1 is what has a closed form; give SVGP()."
        )
    log_lik = JointLogLikelihood(model, batch.weights.shape[0], hyper, batch.args, batch.kwargs)
    at = lambda f: log_lik({name: f})  # noqa: E731
    mean = unwrap(site["fn"]).mean
    if degree(at, mean) > 2 or not bool(jnp.all(quadratic(at, mean)[2] >= 0)):
        raise ModelError(
            "CollapsedSVGP(): the likelihood is not Gaussian in f, or not seen to be (its "
            "logarithm a polynomial of degree 2), so that q(u) has no closed form; give SVGP()."
        )
