"""Exact conditioning of N(f; m, K) on a Gaussian pseudo-likelihood, and its reverse rule."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.local.factor import Factor, low_rank, moved, positive, pulled_back, signed
from ppl_gp.local.natural import Marginals, MinusRankOne, Positive, PseudoLikelihood, flat
from ppl_gp.local.softmax import PredictionRoot, SoftmaxFactor
from ppl_gp.numerics.blocks import as_blocks, diagonal_of, is_positive, outer, pulled_to, times
from ppl_gp.numerics.low_rank import Covariance, Independent, LowRank, dense, within


def _marginals(K, mean, sites: PseudoLikelihood, factor: Factor, variance=None) -> Marginals:
    """alpha = (I + T K)^-1 (nat1 - nat2 m), and log Z = [r^T K alpha + m^T (2 nat1 - nat2 m)] / 2 -
    log|I + T K| / 2.
    """
    pulled = times(sites.nat2, mean)
    r = sites.nat1 - pulled
    alpha = factor.solve(r)
    centred = factor.centred(K, r, alpha)
    constant = jnp.sum(mean * (sites.nat1 - 0.5 * pulled))
    half = factor.half_log_det()
    log_partition = constant + 0.5 * r @ centred - half
    return Marginals(mean + centred, variance, log_partition, alpha, half)


def condition_mean(K: Covariance, mean: Float[Array, "N"], sites: PseudoLikelihood) -> Marginals:
    """`condition` without variances: O(N^3 / 3)."""
    return asked(K, sites, lambda factor: _marginals(K, mean, sites, factor))


def condition(K: Covariance, mean: Float[Array, "N"], sites: PseudoLikelihood) -> Marginals:
    """Marginals of N(f; mean, K) times the sites; NaN where the product is not a proper Gaussian.
    Not for gradients. O(N^3).
    """
    ask = lambda factor: _marginals(K, mean, sites, factor, factor.inverse().variance())  # noqa: E731
    return asked(K, sites, ask)


@jax.custom_vjp
def log_partition_and_mean(K, mean, sites: PseudoLikelihood):
    """(log int N(f; mean, K) prod_n site_n(f_n) df, posterior mean), differentiable (reverse mode)
    in all arguments.

    d log Z = alpha^T dK alpha / 2 - tr(R dK) / 2 + alpha^T dm + mu^T dnat1 - (mu^2 + diag Sigma)^T
    dnat2 / 2, with alpha = K^-1 (mu - m), R = (K + T^-1)^-1; and dmu = (I + K T)^-1 (dm + dK alpha
    + K (dnat1 - dnat2 mu)).
    """
    q = condition_mean(K, mean, sites)
    return q.log_partition, q.mean


def condition_for_gradients(K, mean, sites: PseudoLikelihood) -> tuple[Marginals, Any]:
    """(`condition`, R = (K + T^-1)^-1). O(N^3)."""

    def ask(factor):
        inverse = factor.inverse()
        return _marginals(K, mean, sites, factor, inverse.variance()), inverse.precision()

    return asked(K, sites, ask)


def _forward(K, mean, sites):
    q, R = condition_for_gradients(K, mean, sites)
    return (q.log_partition, q.mean), (K, sites, q, R)


def _backward(residuals, cotangents):
    K, sites, q, R = residuals
    z_bar, mean_bar = cotangents
    w, Kw = moved(K, R, mean_bar)
    K_bar = pulled_back(K, R, z_bar, w, q.alpha)
    # d / dT of -(mu^T T mu + tr(T Sigma)) / 2, and of the mean's movement K (dnat1 - dT mu)
    seen = outer(q.mean, q.mean, sites.nat2) + q.variance
    nat2_bar = -0.5 * z_bar * seen - outer(Kw, q.mean, sites.nat2)
    bars = sites.like(z_bar * q.mean + Kw, pulled_to(sites.nat2, nat2_bar))
    return K_bar, z_bar * q.alpha + w, bars


log_partition_and_mean.defvjp(_forward, _backward)


def prior_marginals(K, mean, functions: int = 1) -> Marginals:
    """What `condition` gives for flat sites, without a factorisation."""
    zero = jnp.zeros((), K.dtype)
    return Marginals(mean, within(K, functions), zero, jnp.zeros_like(mean), zero)


def start_from(
    K, mean, init: PseudoLikelihood | None, functions: int = 1, variances: bool = True
) -> tuple[PseudoLikelihood, Marginals]:
    """Warm-start sites with their marginals, or without their `variances`; flat sites where there
    are none, or where they are flat or improper.
    """
    prior, ask = prior_marginals(K, mean, functions), condition
    if not variances:
        prior, ask = prior._replace(variance=None), condition_mean
    if init is None:
        return flat(mean, functions=functions), prior
    q = lax.cond(jnp.all(init.nat2 == 0), lambda: prior, lambda: ask(K, mean, init))
    proper = jnp.isfinite(q.log_partition)
    if variances:
        proper &= jnp.all(diagonal_of(q.variance) > 0)
    start, none = (init, q), (jax.tree.map(jnp.zeros_like, init), prior)
    return jax.tree.map(lambda a, b: jnp.where(proper, a, b), start, none)


def prediction_root(K: Covariance, sites: PseudoLikelihood) -> PredictionRoot:
    """The factor of (K + T^-1)^-1 behind predictive variances: k** - k*^T R k*. O(N^3), of R
    functions O((R N)^3), and O(R N^3) of a softmax of independent ones.
    """
    whole = K if isinstance(K, Independent) else dense(K)
    return asked(whole, sites, lambda factor: factor.root())


def asked(K: Covariance, sites: PseudoLikelihood, ask: Callable[[Factor], Any]) -> Any:
    """ask(factor), of the form that K and the signs of nat2 allow; both where these are unknown."""
    if isinstance(sites, MinusRankOne):
        if isinstance(K, Independent):
            return ask(SoftmaxFactor.of(K, sites.nat2))
        sites = Positive(sites.nat1, as_blocks(sites.nat2))
    if isinstance(K, LowRank):
        if K.rest is None:
            return ask(low_rank(K, sites.nat2))
        return asked(K.rest, sites, lambda alone: ask(low_rank(K, sites.nat2, alone)))
    if isinstance(K, Independent):
        K = K.dense()
    if isinstance(sites, Positive):
        return ask(positive(K, sites.nat2))
    forms = [lambda: ask(positive(K, sites.nat2)), lambda: ask(signed(K, sites.nat2))]
    return lax.cond(is_positive(sites.nat2), *forms)
