"""The cavity q_{-n} = q / site_n of every datum, from what a fit keeps of a pseudo-likelihood."""

from typing import Any

import jax.numpy as jnp

from ppl_gp.gp import GP
from ppl_gp.kept import FromFunctions, FromPseudo
from ppl_gp.local.condition import condition, prediction_root
from ppl_gp.model.predictor_prior import covariance_of
from ppl_gp.numerics import small
from ppl_gp.numerics.blocks import as_blocks
from ppl_gp.results.query.mixture import JointMoments, Moments


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
