"""K of independent functions under the pseudo-likelihood of a softmax, factored: (R + 1) N^3 / 3 in
place of (R N)^3 / 3 (Rasmussen & Williams 2006, section 3.5, algorithm 3.3).

T = D - D 1 S^-1 1^T D with D = diag(d), 1 the sum over functions and S = 1^T D 1. With E = (K +
D^-1)^-1, a block E_c a function, and M = 1^T E 1:

(I + T K)^-1 = A + E 1 M^-1 1^T (I - A), A = (I + D K)^-1,
(K + T^-1)^-1 = E - E 1 M^-1 1^T E, and |I + T K| = prod_c |B_c| |M| / |S|.

A datum of no weight has a zero row in M, which is set apart.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.local.factor import Factor, Inverse, Root
from ppl_gp.numerics.linalg import (
    add_diagonal,
    cholesky,
    half_log_det,
    solve_factored,
    solve_lower,
    tril_gram,
    tril_inverse,
)
from ppl_gp.numerics.low_rank import Independent


class SoftmaxPrecision(eqx.Module):
    """(K + T^-1)^-1 = E - E 1 M^-1 1^T E, without the matrix."""

    E: Float[Array, "R N N"]
    half: Float[Array, "R N N"]  # chol(M)^-1 E_c

    def __matmul__(self, x):
        split = jnp.reshape(x, (*self.E.shape[:2], -1))
        whole = jnp.sum(self.half @ split, 0)
        return jnp.reshape(self.E @ split - jnp.swapaxes(self.half, 1, 2) @ whole, x.shape)

    def blocks(self) -> Float[Array, "R N N"]:
        """Those on the diagonal, one a function."""
        return jax.lax.map(lambda pair: pair[0] - pair[1].T @ pair[1], (self.E, self.half))


class SoftmaxRoot(eqx.Module):
    """(K + T^-1)^-1 as E and the inverse of chol(M), with the questions of a `Root`: 2 N^3 / 3 more
    than the factor, and (R + 1) N^2 numbers, where a root of the whole matrix has (R N)^2.
    """

    E: Float[Array, "R N N"]
    whiten: Float[Array, "N N"]  # chol(M)^-1

    def explained(self, C):
        C, EC, G = self._seen(C)
        return jnp.sum(C * EC, (0, 1)) - jnp.sum(G**2, 0)

    def quadratic(self, C):
        C, EC, G = self._seen(C)
        return jnp.einsum("rnl,rnm->lm", C, EC) - G.T @ G

    def _seen(self, C):
        """(C, E C, chol(M)^-1 1^T E C) of columns (R N, M), the first two as (R, N, M)."""
        split = jnp.reshape(C, (*self.E.shape[:2], -1))
        EC = jax.lax.map(lambda pair: pair[0] @ pair[1], (self.E, split))
        return split, EC, self.whiten @ jnp.sum(EC, 0)

    def of_sum(self, a):
        E = jnp.einsum("rn,rnm,rm->nm", a, self.E, a)
        return Difference(E, self.whiten @ jnp.einsum("rnm,rm->nm", self.E, a))

    def separately(self, k: Float[Array, "R N M"]) -> tuple[Array, Array]:
        """(diag(k_r^T E_r k_r), G_r = chol(M)^-1 E_r k_r) of covariances that each function has
        with itself alone, (R, M) and (R, N, M): the posterior's are k** - k^T E k within a function
        and G_r^T G_s between any two. O(R N^2 M).
        """
        return self._by_function(lambda k, Ek: jnp.sum(k * Ek, 0), k)

    def left(self, K: Float[Array, "R M M"], k: Float[Array, "R N M"]) -> tuple[Array, Array]:
        """(A, G): a posterior covariance as diag(A_1, ..., A_R) + G^T G with A_r = K_r - k_r^T E_r
        k_r, (R, M, M), from the prior's K. O(R (N^2 M + N M^2)).
        """
        return self._by_function(lambda K, k, Ek: K - k.T @ Ek, K, k)

    def _by_function(self, ask: Callable, *arrays: Array) -> tuple[Array, Array]:
        """(ask(its arrays, E_r k_r), chol(M)^-1 E_r k_r) of one function after another."""

        def function(entry):
            E, *own = entry
            Ek = E @ own[-1]
            return ask(*own, Ek), self.whiten @ Ek

        return jax.lax.map(function, (self.E, *arrays))


class Difference(eqx.Module):
    """E - H^T H: what a softmax leaves of the precision of one function, or of a sum of them."""

    E: Float[Array, "N N"]
    H: Float[Array, "N N"]

    def explained(self, C):
        return jnp.sum(C * (self.E @ C), 0) - jnp.sum((self.H @ C) ** 2, 0)

    def quadratic(self, C):
        HC = self.H @ C
        return C.T @ (self.E @ C) - HC.T @ HC

    def of_sum(self, a):
        (a,) = a
        return Difference(a[:, None] * self.E * a, self.H * a)


PredictionRoot = Root | SoftmaxRoot | Difference


class SoftmaxFactor(Factor):
    """Factors of the B_c = I + D_c^(1/2) K_c D_c^(1/2), and of M."""

    K: Independent
    d: Float[Array, "R N"]
    E: Float[Array, "R N N"]
    half_log_dets: Float[Array, "R"]
    L: Float[Array, "N N"]  # of M

    @classmethod
    def of(cls, K: Independent, d: Float[Array, "R N"]) -> "SoftmaxFactor":
        """O((R + 1) N^3 / 3), and the inverses of the R factors."""

        def function(entry):
            part, weights = entry
            s = jnp.sqrt(weights)
            C = cholesky(add_diagonal(s[:, None] * part * s, 1.0))
            return tril_gram(tril_inverse(C)) * s[:, None] * s, half_log_det(C)

        E, half_log_dets = jax.lax.map(function, (K.parts, d))
        apart = jnp.where(jnp.sum(d, 0) == 0, 1.0, 0.0)
        return cls(K, d, E, half_log_dets, cholesky(add_diagonal(jnp.sum(E, 0), apart)))

    def half_log_det(self):
        weight = jnp.sum(self.d, 0)
        log_s = jnp.sum(jnp.where(weight == 0, 0.0, jnp.log(jnp.where(weight == 0, 1.0, weight))))
        return jnp.sum(self.half_log_dets) + half_log_det(self.L) - 0.5 * log_s

    def solve(self, r):
        split = jnp.reshape(r, self.d.shape)
        # (I - A) r = E K r
        EKr = jnp.einsum("rnm,rm->rn", self.E, jnp.einsum("rnm,rm->rn", self.K.parts, split))
        moved = solve_factored(self.L, jnp.sum(EKr, 0))
        return jnp.ravel(split - EKr + jnp.einsum("rnm,m->rn", self.E, moved))

    def inverse(self):
        halves = jax.lax.map(lambda E: solve_lower(self.L, E), self.E)

        def function(entry):
            K, E, half = entry
            return jnp.einsum("nm,mn->n", K, E @ K), half @ K

        def variance():
            explained, G = jax.lax.map(function, (self.K.parts, self.E, halves))
            own = jnp.eye(len(explained), dtype=explained.dtype)[:, :, None] * explained
            return self.K.within() - own + jnp.einsum("ajn,bjn->abn", G, G)

        return Inverse(variance, lambda: SoftmaxPrecision(self.E, halves), self.root)

    def root(self):
        return SoftmaxRoot(self.E, tril_inverse(self.L))  # without the halves
