"""Square roots of K_uu, R R^T = K_uu, in the form that its structure allows: what whitening means
for each.

`DenseRoot` carries the derivative of its Cholesky factor as one matrix: to first order L + dL = L
(I + omega), omega lower triangular. `omega` is zero in value. Every product with the root adds its
part to omega's cotangent, and only their sum is taken back to K_uu, by two products with L^-1 and
no triangular solve (Murray 2016, eq. 8 and 10).
"""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float

from ppl_gp.numerics.linalg import (
    add_diagonal,
    lower_half,
    product,
    robust_cholesky,
    tril_inverse,
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
        inverse = tril_inverse(L)
        self.variance, self.Q = variance, product(scaled, inverse.T)
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
    # Zero, and computed from L: of a constant, `vmap` would take one cotangent for the whole batch,
    # their sum.
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
