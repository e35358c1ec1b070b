"""Titsias' collapsed bound: q(u) at its optimum in closed form, where the likelihood is Gaussian in
f.

A datum's log-likelihood c_n + b_n d - t_n d^2 / 2 in d = f_n - m_n has the bound (Titsias 2009, eq.
9, for any t_n)

sum_n c_n - sum_n t_n (k_nn - a_n^T a_n) / 2 - log|B| / 2 + beta^T B^-1 beta / 2,  B = I + A diag(t)
A^T, beta = A b,

with A = R^-1 Cov[u, f(X)]. The optimal q(v) has natural parameters beta and B - I.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.errors import ModelError
from ppl_gp.gp import unwrap
from ppl_gp.model.declared import declare
from ppl_gp.model.factors import JointLogLikelihood
from ppl_gp.model.roles import roles
from ppl_gp.model.tracing import run
from ppl_gp.numerics.lapack import solve_lower
from ppl_gp.numerics.linalg import add_diagonal, half_log_det, robust_cholesky
from ppl_gp.numerics.triangular import product
from ppl_gp.proofs.degree import degree
from ppl_gp.sparse.bound import Batch, priors_at
from ppl_gp.sparse.families import NaturalGaussian
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.own_effects import all_apart, averaged, quadratic


class Collapsed(NamedTuple):
    """The bound (nats) and the sites of the optimal q(u)."""

    bound: Float[Array, ""]
    sites: NaturalGaussian


def collapsed(
    model: Callable, hyper: dict, variables: dict[str, InducingVariables], batch: Batch
) -> Collapsed:
    """The collapsed bound on the evidence at these hyperparameters, differentiable in them and in
    the inducing variables.

    One latent function, all data in the batch. O(N M^2). `require_gaussian` says whether the
    likelihood allows it.
    """
    priors, own = all_apart(priors_at(model, batch, hyper))
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
    """Raise `ModelError` unless there is one latent function (N,) whose likelihood is proved to be
    Gaussian in f.

    The proof is `degree` <= 2 and a curvature that is not positive: at any f, not at those that
    were tried.
    """
    trace = run(declare(model, batch.args, batch.kwargs), batch.args, batch.kwargs, hyper)
    gps = {k: trace[k] for k in roles(trace).gps}
    if len(gps) > 1 or any(len(s["fn"].shape()) > 1 for s in gps.values()):
        told = {k: tuple(s["fn"].shape()) for k, s in gps.items()}
        raise ModelError(
            "SVGP(collapsed=True) needs one latent function of shape (N,); the model has the GP "
            f"sites {told}. Leave `collapsed` out."
        )
    ((name, site),) = gps.items()
    if site["scale"] is not None:
        raise ModelError(
            f"SVGP(collapsed=True): numpyro.handlers.scale stands around '{name}', and q(u) at a "
            "KL weight of 1 is what has a closed form; leave `collapsed` out."
        )
    log_lik = JointLogLikelihood(model, batch.weights.shape[0], hyper, batch.args, batch.kwargs)
    at = lambda f: log_lik({name: f})  # noqa: E731
    mean = unwrap(site["fn"]).mean
    if degree(at, mean) > 2 or not bool(jnp.all(quadratic(at, mean)[2] >= 0)):
        raise ModelError(
            "SVGP(collapsed=True): the likelihood is not Gaussian in f, or not seen to be (its "
            "logarithm a polynomial of degree 2), so that q(u) has no closed form; leave "
            "`collapsed` out."
        )
