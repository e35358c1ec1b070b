"""The Gaussian pseudo-likelihood that Laplace, EP, VI and the local bound share, and its exact conditioning.

Each datum's likelihood is replaced by exp(nat1_n f_n - nat2_n f_n^2 / 2): nat2 is a precision and may be negative. With
K = k(X, X) + jitter I and T = diag(nat2) the posterior is N(mu, Sigma), Sigma = (K^-1 + T)^-1, computed without K^-1:

- nat2 >= 0: B = I + sqrt(T) K sqrt(T), eigenvalues >= 1 (R&W 3.26);
- any nat2 < 0: K = L L^T and A = I + L^T T L, whose Cholesky factor exists if and only if Sigma is positive definite.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.numerics.lapack import cholesky, solve_lower
from ppl_gp.numerics.linalg import (
    add_diagonal,
    default_jitter,
    half_log_det,
    robust_cholesky,
    tril_gram,
    tril_inverse,
)

_TINY_PRECISION = 1e-6  # below this nat2 x prior variance, (1 - diag B^-1) / nat2 loses digits


class Sites(eqx.Module):
    """The pseudo-likelihood's natural parameters, (N,) each: exp(nat1 f - nat2 f^2 / 2). A leading axis holds draws."""

    nat1: Float[Array, "*S N"]
    nat2: Float[Array, "*S N"]


class Marginals(NamedTuple):
    """Posterior mean and variance of each f_n, (N,), and log int N(f; m, K) prod_n site_n(f_n) df, nats.

    `variance` is NaN where it was not asked for.
    """

    mean: Float[Array, "N"]
    variance: Float[Array, "N"]
    log_partition: Float[Array, ""]
    alpha: Float[Array, "N"]  # K^-1 (mean - m)


class Root(eqx.Module):
    """(K + T^-1)^-1 = diag(diagonal) + sign W^T W: what a prediction needs. W (N, N)."""

    W: Float[Array, "N N"]
    diagonal: Float[Array, "N"]
    sign: Float[Array, ""]


def _positive_factor(K, sites):
    s = jnp.sqrt(sites.nat2)
    return cholesky(add_diagonal(s[:, None] * K * s, 1.0)), s


def _signed_factor(K, sites):
    L, _ = robust_cholesky(K, default_jitter(jnp.diagonal(K)))
    return cholesky(add_diagonal((L.T * sites.nat2) @ L, 1.0)), L


def _finish(K, mean, sites, alpha, half_log_determinant, variance):
    centred = K @ alpha
    r = sites.nat1 - sites.nat2 * mean
    constant = jnp.sum(mean * (sites.nat1 - 0.5 * sites.nat2 * mean))
    return Marginals(mean + centred, variance, constant + 0.5 * r @ centred - half_log_determinant, alpha)


def _condition_positive(K, mean, sites, with_variance, with_root):
    C, s = _positive_factor(K, sites)
    r = sites.nat1 - sites.nat2 * mean
    # R&W 3.27, alpha = r - s B^-1 s K r, cancels badly for precise data; with r = s (r / s) it is s B^-1 (r / s).
    flat = s == 0.0
    free = jnp.where(flat, r, 0.0)
    alpha = free + s * _cho_solve(C, jnp.where(flat, 0.0, r / jnp.where(flat, 1.0, s)) - s * (K @ free))
    inverse = tril_inverse(C) if with_variance or with_root else jnp.zeros((0, 0), K.dtype)
    variance = _variance_positive(K, sites, s, inverse) if with_variance else jnp.full_like(mean, jnp.nan)
    precision = tril_gram(inverse) * s[:, None] * s if with_root else jnp.zeros((0, 0), K.dtype)
    return _finish(K, mean, sites, alpha, half_log_det(C), variance), precision


def _variance_positive(K, sites, s, inverse):
    prior = jnp.diagonal(K)

    def fast():
        return (1.0 - jnp.sum(inverse**2, 0)) / sites.nat2  # diag(Sigma) = (1 - diag B^-1) / T

    def careful():
        return prior - jnp.sum((inverse @ (s[:, None] * K)) ** 2, 0)  # R&W 3.29

    return lax.cond(jnp.all(sites.nat2 * prior > _TINY_PRECISION), fast, careful)


def _condition_signed(K, mean, sites, with_variance, with_root):
    C, L = _signed_factor(K, sites)
    r = sites.nat1 - sites.nat2 * mean
    alpha = r - sites.nat2 * (L @ _cho_solve(C, L.T @ r))
    V = tril_inverse(C) @ L.T if with_variance or with_root else jnp.zeros((0, 0), K.dtype)  # Sigma = V^T V
    variance = jnp.sum(V**2, 0) if with_variance else jnp.full_like(mean, jnp.nan)
    precision = jnp.zeros((0, 0), K.dtype)
    if with_root:
        VT = V * sites.nat2
        precision = jnp.diag(sites.nat2) - VT.T @ VT
    return _finish(K, mean, sites, alpha, half_log_det(C), variance), precision


def _cho_solve(C, b):
    return solve_lower(C, solve_lower(C, b), trans=1)


def _condition(K, mean, sites, with_variance, with_root):
    def branch(form):
        return lambda: form(K, mean, sites, with_variance, with_root)

    return lax.cond(jnp.all(sites.nat2 >= 0), branch(_condition_positive), branch(_condition_signed))


def condition(K: Float[Array, "N N"], mean: Float[Array, "N"], sites: Sites, *, with_variance=True) -> Marginals:
    """Marginals of N(f; mean, K) times the sites; NaN where the product is not a proper Gaussian. Not for gradients.

    O(N^3 / 3) for the mean, and about 2 N^3 / 3 more for the variances.
    """
    return _condition(K, mean, sites, with_variance, False)[0]


@jax.custom_vjp
def log_partition_and_mean(K, mean, sites: Sites):
    """(log int N(f; mean, K) prod_n site_n(f_n) df, posterior mean), differentiable (reverse mode) in all arguments.

    d log Z = alpha^T dK alpha / 2 - tr(R dK) / 2 + alpha^T dm + mu^T dnat1 - (mu^2 + diag Sigma)^T dnat2 / 2, with
    alpha = K^-1 (mu - m), R = (K + T^-1)^-1; and dmu = (I + K T)^-1 (dm + dK alpha + K (dnat1 - dnat2 mu)).
    """
    marginals, _ = _condition(K, mean, sites, False, False)
    return marginals.log_partition, marginals.mean


def _forward(K, mean, sites):
    marginals, R = _condition(K, mean, sites, True, True)
    return (marginals.log_partition, marginals.mean), (K, marginals, R)


def _backward(residuals, cotangents):
    K, q, R = residuals
    z_bar, mean_bar = cotangents
    w = mean_bar - R @ (K @ mean_bar)  # (I + T K)^-1 mean_bar
    Kw = K @ w
    K_bar = (0.5 * z_bar) * (q.alpha[:, None] * q.alpha - R) + w[:, None] * q.alpha
    nat2_bar = -0.5 * z_bar * (q.mean**2 + q.variance) - Kw * q.mean
    return K_bar, z_bar * q.alpha + w, Sites(z_bar * q.mean + Kw, nat2_bar)


log_partition_and_mean.defvjp(_forward, _backward)


def prior_marginals(K, mean) -> Marginals:
    """What `condition` gives for flat sites, without a factorisation."""
    return Marginals(mean, jnp.diagonal(K), jnp.zeros((), K.dtype), jnp.zeros_like(mean))


def start_from(K, mean, init: Sites | None, *, with_variance=True) -> tuple[Sites, Marginals]:
    """Warm-start sites with their marginals; flat sites where there are none, or where they are flat or improper."""
    flat = Sites(jnp.zeros_like(mean), jnp.zeros_like(mean))
    prior = prior_marginals(K, mean)
    if init is None:
        return flat, prior
    empty = jnp.all(init.nat2 == 0)
    q = lax.cond(empty, lambda: prior, lambda: condition(K, mean, init, with_variance=with_variance))
    proper = jnp.isfinite(q.log_partition) & (jnp.all(q.variance > 0) | (not with_variance))
    return jax.tree.map(lambda a, b: jnp.where(proper, a, b), (init, q), (flat, prior))


def site_weights(q: Marginals) -> Sites:
    """Weights that turn a change of the sites into (about) posterior standard deviations."""
    return Sites(jnp.sqrt(q.variance), q.variance)


def mismatch(q: Marginals, sites: Sites, target: Sites) -> Float[Array, ""]:
    """Largest change of a marginal's mean (in standard deviations) or log variance that the target would make alone."""
    d1, d2 = target.nat1 - sites.nat1, target.nat2 - sites.nat2
    return jnp.maximum(jnp.max(jnp.abs(d1 - d2 * q.mean) * jnp.sqrt(q.variance)), jnp.max(jnp.abs(d2) * q.variance))


def drop_rounding(nat2, precision):
    """Zero a site precision that is rounding error of the precision it was subtracted from (1e-10 of it in float64).

    It keeps flat sites of log-concave likelihoods from looking negative; a real negative precision is far above it.
    """
    noise = 5e5 * jnp.finfo(nat2.dtype).eps
    return jnp.where(jnp.abs(nat2) < noise * precision, 0.0, nat2)


def prediction_root(K: Float[Array, "N N"], sites: Sites) -> Root:
    """The factor of (K + T^-1)^-1 behind predictive variances: k** - k*^T R k*. O(N^3)."""

    def positive():
        C, s = _positive_factor(K, sites)
        return Root(tril_inverse(C) * s, jnp.zeros_like(s), jnp.ones((), K.dtype))

    def signed():
        C, L = _signed_factor(K, sites)
        return Root((tril_inverse(C) @ L.T) * sites.nat2, sites.nat2, -jnp.ones((), K.dtype))

    return lax.cond(jnp.all(sites.nat2 >= 0), positive, signed)
