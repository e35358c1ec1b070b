"""Square roots R of K_uu, in the form that its structure allows, and families of q(u): Gaussians,
each seen as q(v) = N(m, S) of the whitened v = R^-1 (u - E[u]).

A family has arrays (several functions at one site: a leading axis F). Natural gradients train q(v)
in natural parameters: a step of size 1 lands on the maximum of the bound's linearisation; for a
Gaussian likelihood that is the optimum (Hensman, Fusi & Lawrence 2013; Khan & Lin 2017).

`DenseRoot` carries the derivative of its Cholesky factor as one matrix: to first order L + dL = L
(I + omega), omega lower triangular. `omega` is zero in value. Every product with the root adds its
part to omega's cotangent, and only their sum is taken back to K_uu, by two products with L^-1 and
no triangular solve (Murray 2016, eq. 8 and 10).
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float

from ppl_gp.numerics.linalg import (
    add_diagonal,
    cholesky,
    half_log_det,
    lower_half,
    lower_of_product,
    product,
    robust_cholesky,
    tril_gram,
    tril_inverse,
    tril_outer,
    tril_transpose_product,
    tril_tril_product,
)


class Root(eqx.Module):
    """R with R R^T = K_uu. u = m_u + R v, v ~ N(0, I)."""

    @abstractmethod
    def whiten(self, C: Float[Array, "M B"]) -> Float[Array, "M B"]:
        """R^-1 C; for C = Cov[u, f(X)] this is Cov[v, f(X)]."""

    @abstractmethod
    def color(self, v: Float[Array, "M S"]) -> Float[Array, "M S"]:
        """R v."""

    @property
    def added(self) -> Float[Array, ""]:
        """Variance that had to be added to K_uu's diagonal before it could be factored."""
        return jnp.zeros(())


class DiagonalRoot(Root):
    """K_uu = diag(variance). Whitening costs O(M B)."""

    variance: Float[Array, "M"]

    def whiten(self, C):
        return C / jnp.sqrt(self.variance)[:, None]

    def color(self, v):
        return v * jnp.sqrt(self.variance)[:, None]


class LowRankRoot(Root):
    """K_uu = diag(variance) + U U^T with U (M, r), r << M. Whitening costs O(M r B), the set-up O(M
    r^2).

    R = D^(1/2) (I + Q (T - I) Q^T): Q an orthonormal basis of D^(-1/2) U, T T^T = I + G, G = Q^T
    D^(-1/2) U U^T D^(-1/2) Q.
    """

    variance: Float[Array, "M"]
    Q: Float[Array, "M r"]
    T: Float[Array, "r r"]

    def __init__(self, variance, U):
        scaled = U / jnp.sqrt(variance)[:, None]
        gram = product(scaled.T, scaled)
        eps = 8 * jnp.finfo(gram.dtype).eps * jnp.trace(lax.stop_gradient(gram))
        L, _ = robust_cholesky(add_diagonal(gram, eps), eps)
        self.variance, self.Q = variance, product(scaled, tril_inverse(L).T)
        # Q^T scaled = L^-1 gram = L^T up to eps, so that G = L^T L.
        self.T, _ = robust_cholesky(add_diagonal(product(L.T, L), 1.0), eps)

    def whiten(self, C):
        C = C / jnp.sqrt(self.variance)[:, None]
        inside = product(self.Q.T, C)
        return C + product(self.Q, product(tril_inverse(self.T), inside) - inside)

    def color(self, v):
        inside = product(self.Q.T, v)
        v = v + product(self.Q, product(self.T, inside) - inside)
        return v * jnp.sqrt(self.variance)[:, None]


class DenseRoot(Root):
    """R = L, the Cholesky factor of a dense K_uu, with its inverse W: whitening is one matrix
    product, O(M^2 B).

    L and W carry no derivative themselves; `omega` does. Set-up: two thirds of M^3 multiply-adds.
    """

    L: Float[Array, "M M"]
    W: Float[Array, "M M"]
    omega: Float[Array, "M M"]
    raised: Float[Array, ""]

    def whiten(self, C):
        return _whiten(self.W, self.omega, C)

    def color(self, v):
        return product(self.L, v + product(self.omega, v))

    @property
    def added(self):
        return self.raised


def dense_root(K: Float[Array, "M M"], unit: Float[Array, ""]) -> DenseRoot:
    """Factor K_uu, which carries its jitter already; `unit` is the first raise where that fails."""
    L, W, omega, added = _factor(K, unit)
    return DenseRoot(lax.stop_gradient(L), lax.stop_gradient(W), omega, lax.stop_gradient(added))


@jax.custom_vjp
def _factor(K, unit):
    L, added = robust_cholesky(K, unit)
    # zero, and computed from L: of a constant, `vmap` would sum the cotangents of the whole batch
    return L, tril_inverse(L), jnp.where(jnp.isnan(L), 0.0, jnp.zeros_like(L)), added


def _factor_forward(K, unit):
    out = _factor(K, unit)
    return out, (out[1], out[3] / jnp.where(out[3] > 0, unit, 1.0))


def _factor_reverse(residuals, cotangents):
    W, power = residuals  # of ten, by which the unit was raised
    K_bar = _pull_back(W, cotangents[2])
    return K_bar, power * jnp.trace(K_bar)


# Under `vmap`, over draws of the hyperparameters, one matrix after the other.
@sequential_vmap
def _pull_back(W, omega_bar):
    """The transpose of dK -> Phi(W dK W^T): W^T Phi(omega_bar) W, with triangular factors."""
    K_bar = tril_transpose_product(W, tril_tril_product(lower_half(omega_bar), W))
    return 0.5 * (K_bar + K_bar.T)


_factor.defvjp(_factor_forward, _factor_reverse)


@jax.custom_jvp
def _whiten(W, omega, C):
    return product(W, C)


@_whiten.defjvp
def _whiten_jvp(primals, tangents):
    W, _, _ = primals
    _, d_omega, dC = tangents
    A = _whiten(*primals)
    return A, product(W, dC) - product(d_omega, A)


class Whitened(NamedTuple):
    """q(v) = N(mean, I - reduction), a matrix P, its diagonal or an `Arrow`; `kl` in nats."""

    mean: Float[Array, "*F M"]
    reduction: Any
    kl: Float[Array, "*F"]


class Family(eqx.Module):
    """A parameterised q(u)."""

    @abstractmethod
    def whitened(self) -> Whitened:
        """q(v), with KL[q(u) || p(u)]."""

    @abstractmethod
    def narrowed(self, scale: Float[Array, ""]) -> "Family":
        """The same mean with `scale` times the standard deviations."""


class FullGaussian(Family):
    """q(v) = N(loc, L L^T), L the lower triangle of `scale_tril`, whatever its diagonal's signs."""

    loc: Float[Array, "*F M"]
    scale_tril: Float[Array, "*F M M"]

    def whitened(self):
        m, L = self.loc, jnp.tril(self.scale_tril)
        S = jnp.vectorize(_outer, signature="(m,m)->(m,m)")(L)
        half_log_det_S = jnp.sum(jnp.log(jnp.abs(jnp.diagonal(L, axis1=-2, axis2=-1))), -1)
        trace = jnp.trace(S, axis1=-2, axis2=-1)
        kl = 0.5 * (trace + jnp.sum(m**2, -1) - m.shape[-1]) - half_log_det_S
        return Whitened(m, jnp.eye(S.shape[-1], dtype=S.dtype) - S, kl)

    def narrowed(self, scale):
        return FullGaussian(self.loc, scale * self.scale_tril)


class Values(Family):
    """u known: q(v) = delta(v - values), P = I. What MCMC over inducing variables draws."""

    values: Float[Array, "*F M"]

    def whitened(self):
        one = jnp.ones_like(self.values)
        return Whitened(self.values, one, jnp.zeros_like(one[..., 0]))

    def narrowed(self, scale):
        return self


class DiagonalGaussian(Family):
    """q(v) = N(loc, diag(scale^2)): O(M B), no M x M parameters; too narrow along correlations."""

    loc: Float[Array, "*F M"]
    log_scale: Float[Array, "*F M"]

    def whitened(self):
        variance = jnp.exp(2.0 * self.log_scale)
        kl = 0.5 * jnp.sum(variance + self.loc**2 - 1.0, -1) - jnp.sum(self.log_scale, -1)
        return Whitened(self.loc, 1.0 - variance, kl)

    def narrowed(self, scale):
        return DiagonalGaussian(self.loc, self.log_scale + jnp.log(scale))


@jax.custom_vjp
def _outer(L):
    """L L^T of a lower triangular L; its reverse rule is one product, 2 tril(S_bar L)."""
    return tril_outer(L)


_outer.defvjp(
    lambda L: (tril_outer(L), L), lambda L, S_bar: (jnp.tril(lower_of_product(S_bar + S_bar.T, L)),)
)


class Nudge(NamedTuple):
    """Zeros added to q(v)'s mean and P: the derivative in them is the natural gradient."""

    mean: Float[Array, "*F M"]
    reduction: Any  # as q(v)'s


class NaturalGaussian(Family):
    """q(v) proportional to N(v; 0, I) exp(nat1^T v - v^T nat2 v / 2): the likelihood's part in
    natural parameters.

    The dual parameterisation (Adam, Chang, Khan & Solin 2021), in whitened coordinates.
    """

    nat1: Float[Array, "*F M"]
    nat2: Any  # (*F, M, M)

    def whitened(self):
        each = jnp.vectorize(_from_natural, signature="(m),(m,m)->(m),(m,m),()")
        return Whitened(*each(self.nat1, self.nat2))

    def narrowed(self, scale):
        # the precision I + nat2, held where v is whitened
        nat2 = add_diagonal(self.nat2, 1.0) / scale**2
        return NaturalGaussian(self.nat1 / scale**2, add_diagonal(nat2, -1.0))

    def nudge(self) -> Nudge:
        """Zeros of the shapes of q(v)'s mean and P."""
        return Nudge(*jax.tree.map(jnp.zeros_like, (self.nat1, self.nat2)))

    def target(self, q: Whitened, gradient: Nudge, weight) -> "NaturalGaussian":
        """The sites that maximise the bound's linearisation at q = this: nat1 = (dE/dm + 2 (dE/dP)
        m) / weight, nat2 = 2 dE/dP / weight.

        P = I - S; `weight` of the KL, whose natural gradient is weight x (the sites).
        """
        share = (1.0 / jnp.asarray(weight)).astype(gradient.mean.dtype)
        both = gradient.reduction + jnp.swapaxes(gradient.reduction, -1, -2)
        nat2 = share[..., None, None] * both
        pulled = jnp.einsum("...ij,...j->...i", nat2, q.mean)
        return NaturalGaussian(share[..., None] * gradient.mean + pulled, nat2)

    def expected_gain(self, q: Whitened, target: "NaturalGaussian", weight) -> Array:
        """What a whole step is expected to gain, nats, summed over functions: KL[q || target] to
        second order, r^T S r / 2 + tr((S D)^2) / 4 with D the step of nat2 and r = (the step of
        nat1) - D m. Zero at the optimum alone. O(M^3).
        """
        S = add_diagonal(-q.reduction, 1.0)
        D = target.nat2 - self.nat2
        r = target.nat1 - self.nat1 - jnp.einsum("...ij,...j->...i", D, q.mean)
        SD = S @ D
        ahead = jnp.einsum("...i,...ij,...j->...", r, S, r)
        turned = jnp.einsum("...ij,...ji->...", SD, SD)
        return jnp.sum(weight * (0.5 * ahead + 0.25 * turned))

    def blended(self, target: "NaturalGaussian", rate) -> "NaturalGaussian":
        """A natural-gradient step of size `rate` in (0, 1]."""
        return jax.tree.map(lambda a, b: (1.0 - rate) * a + rate * b, self, target)

    def is_proper(self) -> Bool[Array, ""]:
        """Whether the precision I + nat2 is positive definite, of every function."""
        precisions = jnp.reshape(self.nat2, (-1, *self.nat2.shape[-2:]))
        L = lax.map(lambda nat2: cholesky(add_diagonal(nat2, 1.0)), precisions)
        return jnp.all(jnp.isfinite(L[:, -1, -1]))


def _from_natural(nat1, nat2):
    """(m, I - S, KL) of precision I + nat2; all NaN where that is not positive definite."""
    S, half_log_det_precision = _inverse(add_diagonal(0.5 * (nat2 + nat2.T), 1.0))
    m = S @ nat1
    kl = 0.5 * (jnp.trace(S) + jnp.sum(m**2) - m.size) + half_log_det_precision
    return m, add_diagonal(-S, 1.0), kl


@jax.custom_vjp
def _inverse(B):
    """(B^-1, log|B| / 2) of a positive definite B."""
    L, _ = robust_cholesky(B, jnp.zeros((), B.dtype))
    return tril_gram(tril_inverse(L)), half_log_det(L)


def _inverse_forward(B):
    out = _inverse(B)
    return out, out[0]


def _inverse_reverse(S, cotangents):
    S_bar, log_det_bar = cotangents
    S_bar = 0.5 * (S_bar + S_bar.T)
    return (0.5 * log_det_bar * S - product(S, product(S_bar, S)),)


_inverse.defvjp(_inverse_forward, _inverse_reverse)
