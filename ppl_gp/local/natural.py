"""The pseudo-likelihood that the local methods share, one datum's Gaussian in natural form, and
exact conditioning of N(f; m, K) on it, with its reverse rule.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.local.factor import Factor, low_rank, moved, positive, pulled_back, signed
from ppl_gp.local.softmax import PredictionRoot, SoftmaxFactor
from ppl_gp.numerics.blocks import (
    as_blocks,
    diagonal_of,
    is_positive,
    num_functions,
    outer,
    per_datum,
    positive_part,
    pulled_to,
    times,
)
from ppl_gp.numerics.low_rank import Covariance, Independent, LowRank, dense, within


class PseudoLikelihood(eqx.Module):
    """The Gaussians that replace each datum's likelihood, (N,) each: exp(nat1 f - nat2 f^2 / 2), a
    precision nat2 that may be negative; for R functions (R N,) and (R, R, N) (`numerics.blocks`):
    exp(nat1^T f - f^T nat2 f / 2). A leading axis is for draws.

    `third`: d^3 log p(y_n | f_n) at the mode, for the skewness of draws of one function.
    """

    nat1: Float[Array, "*S RN"]
    nat2: Float[Array, "..."]
    third: Float[Array, "*S N"] | None = None

    @property
    def functions(self) -> int:
        """R, of one draw."""
        return num_functions(self.nat2)

    def like(self, nat1, nat2) -> "PseudoLikelihood":
        """Others of the same class: signs are known from where an iteration starts."""
        return type(self)(nat1, nat2)


class Positive(PseudoLikelihood):
    """A pseudo-likelihood whose nat2 is positive semi-definite, as those of a log-concave
    likelihood are: algebra for the other sign is not compiled.
    """


class MinusRankOne(Positive):
    """Of a softmax whose scores are the R functions: nat2 is d, (R, N), and stands for diag(d) - d
    d^T / sum d (R&W 3.38).
    """


class Marginals(NamedTuple):
    """Posterior mean and variance of each f_n, (N,), and log int N(f; m, K) prod_n site_n(f_n) df,
    nats. Of R functions (R N,), and the covariances within each datum, (R, R, N). Variances cost
    twice as much as all the rest: a method that needs none has `None`.
    """

    mean: Float[Array, "RN"]
    variance: Any
    log_partition: Float[Array, ""]
    alpha: Float[Array, "RN"]  # K^-1 (mean - m)
    half_log_det: Float[Array, ""]  # log|I + T K| / 2


def flat(
    like: Float[Array, "RN"], form: type[PseudoLikelihood] = PseudoLikelihood, functions: int = 1
) -> PseudoLikelihood:
    """A pseudo-likelihood that says nothing."""
    zero, N = jnp.zeros_like(like), like.size // functions
    if functions == 1:
        return form(zero, zero)
    rows = (functions,) if issubclass(form, MinusRankOne) else (functions, functions)
    return form(zero, jnp.zeros((*rows, N), like.dtype))


def at_mean(q: Marginals, sites: PseudoLikelihood) -> Float[Array, "N"]:
    """log t_n at the posterior mean."""
    return per_datum(sites.nat1 * q.mean - 0.5 * q.mean * times(sites.nat2, q.mean), sites.nat2)


def assembled(q: Marginals, mean: Float[Array, "RN"], terms: Float[Array, "N"]):
    """log int N(f; m, K) prod sites df + sum_n (terms_n - log t_n at the posterior mean), where
    terms_n holds the site at the mean already.

    The integral and the sites are each of the size of f^2 over the noise's variance, and their sum
    has lost all digits where that is 1e14 (a noise of 1e-7): so neither is computed.
    """
    return jnp.sum(terms) - 0.5 * q.alpha @ (q.mean - mean) - q.half_log_det


def admissible(sites: PseudoLikelihood) -> PseudoLikelihood:
    """The nearest sites that their class allows: a negative precision of a log-concave likelihood
    is an error of quadrature or of extrapolation. Others are what they are.
    """
    if not isinstance(sites, Positive):
        return sites
    return sites.like(sites.nat1, positive_part(sites.nat2))


def as_general(tree: Any) -> Any:
    """A tree in which nothing is claimed of the signs of sites."""

    def one(x):
        if isinstance(x, MinusRankOne):
            return PseudoLikelihood(x.nat1, as_blocks(x.nat2, x.nat1.ndim - 1))
        return PseudoLikelihood(x.nat1, x.nat2, x.third) if isinstance(x, PseudoLikelihood) else x

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, PseudoLikelihood))


def as_kept(sites: PseudoLikelihood) -> PseudoLikelihood:
    """As a fit keeps it, in one form whatever was known of the signs: of a softmax d, else nat2."""
    return sites if isinstance(sites, MinusRankOne) else as_general(sites)


def of_arrays(nat1: Float[Array, "S RN"], nat2: Float[Array, "S ..."]) -> PseudoLikelihood:
    """`as_kept` of S draws: nat2 of a softmax has one axis more than nat1, and blocks have two."""
    form = MinusRankOne if jnp.ndim(nat2) == jnp.ndim(nat1) + 1 else PseudoLikelihood
    return form(nat1, nat2)


def site_weights(q: Marginals, sites: PseudoLikelihood) -> PseudoLikelihood:
    """Weights that turn a change of the sites into (about) posterior standard deviations."""
    sd = jnp.sqrt(diagonal_of(q.variance))
    return sites.like(sd, outer(sd, sd, sites.nat2))


def mismatch(q: Marginals, sites: PseudoLikelihood, target: PseudoLikelihood) -> Float[Array, ""]:
    """The most that the target alone would move a mean, in standard deviations, or log variance."""
    d1, d2 = target.nat1 - sites.nat1, target.nat2 - sites.nat2
    weights = site_weights(q, sites)
    mean = jnp.max(jnp.abs(d1 - times(d2, q.mean)) * weights.nat1)
    return jnp.maximum(mean, jnp.max(jnp.abs(d2) * weights.nat2))


def lifted(q: Marginals) -> tuple[Marginals, Array]:
    """(q, whether each function varies). One that is known beforehand, as its covariates are zero,
    gets a variance that no likelihood can see, as moments divide by it.
    """
    R, V = num_functions(q.variance), diagonal_of(q.variance)
    each = jnp.reshape(V, (R, -1))
    few, least = (1e-20, 1e-20) if R == 1 else (1e-14, 1e-12)  # blocks lose smaller pivots
    known = (each >= 0) & (each <= few * jnp.max(each, 1, keepdims=True))
    beside = jnp.max(each, 0) if R > 1 else 0.0
    unit = jnp.where(beside > 0, beside, jnp.where(jnp.any(V > 0), jnp.max(V), 1.0))
    more = jnp.where(known, least * unit - each, 0.0)
    more = more[0] if R == 1 else jnp.eye(R, dtype=V.dtype)[..., None] * more
    return q._replace(variance=q.variance + more), ~jnp.ravel(known)


def of_varying(varies: Array, sites: PseudoLikelihood) -> PseudoLikelihood:
    """Sites that are flat in functions which are known beforehand."""
    both = outer(1.0 * varies, 1.0 * varies, sites.nat2) > 0
    return sites.like(jnp.where(varies, sites.nat1, 0.0), jnp.where(both, sites.nat2, 0.0))


def drop_rounding(nat2: Float[Array, "N"], precision: Float[Array, "N"]) -> Float[Array, "N"]:
    """Zero a site precision that is rounding error (1e-10 or 32 eps) of the precision it was
    subtracted from, so that flat sites of log-concave likelihoods do not look negative.
    """
    noise = 1e-10 + 32.0 * jnp.finfo(nat2.dtype).eps
    return jnp.where(jnp.abs(nat2) < noise * precision, 0.0, nat2)


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
