"""The cavity q_{-n} = q / site_n of every datum, from what a fit keeps of a pseudo-likelihood."""

from typing import Any

import jax
import jax.numpy as jnp

from ppl_gp.gp import GP
from ppl_gp.kept import FromFunctions, FromInducing, FromPseudo
from ppl_gp.local.condition import condition, prediction_root
from ppl_gp.model.predictor_prior import covariance_of
from ppl_gp.numerics import small
from ppl_gp.numerics.blocks import as_blocks
from ppl_gp.results.query.mixture import JointMoments, Moments
from ppl_gp.sparse.expectation import Expectation, expected_log_lik


def cavity_of_functions(prior: GP, latent: FromFunctions) -> tuple[JointMoments, JointMoments]:
    """(q_{-n}, q) of the functions of every datum; NaN where the former is not proper.

    covariance = (Sigma^-1 - T)^-1 of the blocks within a datum, mean = mu - covariance alpha.
    """
    sites, shape = latent.sites, latent.mean.shape
    q = condition(covariance_of(prior), jnp.ravel(prior.mean), sites)
    Sigma, T = (jnp.moveaxis(x, -1, 0) for x in (q.variance, as_blocks(sites.nat2)))
    # Sigma = L L^T: the cavity's is L (I - L^T T L)^-1 L^T
    L = small.lower_root(Sigma)
    left = jnp.eye(shape[0]) - jnp.swapaxes(L, -1, -2) @ T @ L
    half = small.lower_inverse(small.lower_root(left)) @ jnp.swapaxes(L, -1, -2)
    covariance = jnp.swapaxes(half, -1, -2) @ half
    covariance = jnp.where(small.is_definite(left)[:, None, None], covariance, jnp.nan)
    alpha = jnp.reshape(latent.alpha, shape)
    mean = latent.mean - jnp.einsum("nab,bn->an", covariance, alpha)
    variance = jnp.einsum("naa->an", covariance)
    return (
        JointMoments.of(mean, variance, covariance),
        JointMoments.of(latent.mean, latent.variance, Sigma),
    )


def cavity(prior: GP, latent: FromPseudo) -> Moments:
    """q_{-n}(f_n) of every datum, (N,) each: the posterior marginal without its site; NaN where it
    is not proper.

    variance = v / (1 - nat2 v) = v nat2 / R_nn, R = (K + T^-1)^-1: each form where it does not
    cancel. mean = mu - variance alpha, as alpha_n = nat1_n - nat2_n mu_n.
    """
    v, sites = latent.variance, latent.sites
    root: Any = prediction_root(covariance_of(prior), sites)  # of one function
    R = root.sign * jnp.sum(root.W**2, 0) + root.diagonal
    share = sites.nat2 * v
    variance = jnp.where(share > 0.5, v * sites.nat2 / R, v / (1.0 - share))
    variance = jnp.where((variance > 0) & jnp.isfinite(variance), variance, jnp.nan)
    return Moments(latent.mean - variance * latent.alpha, variance)


def cavity_of_inducing(prior: GP, kept: FromInducing, log_lik) -> tuple[Moments, Moments, Any]:
    """(q(f_n), q_{-n}(f_n), (N,) each; how far q is from the maximum of its bound).

    Var f_n = s + d, d what u leaves unexplained. E = E_q[log p(y_n | f_n)] has slopes g in the mean
    and -L / 2 in the variance of f_n. At the maximum q(v) = N(A g, (I + A L A^T)^-1), A =
    Cov[v, f]: without the site of n, s becomes s / (1 - s L), and the mean falls by that times g.
    The distance is the largest of one step to that fixed point: of means in sd of f_n, of variances
    in shares of them.
    """
    process: Any = kept.process(prior)
    mean, variance = process.marginals(prior)
    A = process.root.whiten(process.inducing.cross(prior, prior.X))
    rest = jnp.maximum(prior.variance - jnp.sum(A**2, 0), 0.0)

    def expected(m, v):
        at = {"f": m}, {"f": v}
        return jnp.sum(expected_log_lik(lambda f: log_lik(f["f"]), *at, Expectation(), None))

    slope, bend = jax.grad(expected, (0, 1))(mean, variance)
    s = jnp.maximum(variance - rest, 0.0)
    share = 1.0 + 2.0 * s * bend
    left = jnp.where(share > 0, s / share, jnp.nan)
    step = jnp.linalg.solve(jnp.eye(len(A)) - 2.0 * (A * bend) @ A.T, A)
    moved = jnp.abs((A @ slope - kept.mean) @ step) / jnp.sqrt(variance)
    off = jnp.maximum(moved, jnp.abs(jnp.sum(A * step, 0) - s) / variance)
    return Moments(mean, variance), Moments(mean - left * slope, left + rest), jnp.max(off)
