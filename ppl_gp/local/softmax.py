"""K of independent functions under the pseudo-likelihood of a softmax, factored: (R + 1) N^3 / 3 in
place of (R N)^3 / 3 (Rasmussen & Williams 2006, section 3.5, algorithm 3.3).

T = D - D 1 S^-1 1^T D with D = diag(d), 1 the sum over functions and S = 1^T D 1. With E = (K +
D^-1)^-1, a block E_c a function, and M = 1^T E 1:

(I + T K)^-1 = A + E 1 M^-1 1^T (I - A), A = (I + D K)^-1,
(K + T^-1)^-1 = E - E 1 M^-1 1^T E, and |I + T K| = prod_c |B_c| |M| / |S|.

A datum of no weight has a zero row in M, which is set apart.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.local.factor import Factor, Inverse, Root
from ppl_gp.numerics.independent import Independent
from ppl_gp.numerics.lapack import cholesky, solve_lower
from ppl_gp.numerics.linalg import add_diagonal, half_log_det, tril_gram, tril_inverse


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


class SoftmaxInverse(Inverse):
    """Of a `SoftmaxFactor`."""

    K: Independent
    d: Float[Array, "R N"]
    precise: SoftmaxPrecision

    def variance(self):
        def function(entry):
            K, E, half = entry
            return jnp.einsum("nm,mn->n", K, E @ K), half @ K

        explained, G = jax.lax.map(function, (self.K.parts, self.precise.E, self.precise.half))
        own = jnp.eye(len(explained), dtype=explained.dtype)[:, :, None] * explained
        return self.K.within() - own + jnp.einsum("ajn,bjn->abn", G, G)

    def precision(self):
        return self.precise

    def root(self) -> Root:
        raise NotImplementedError("predictions take the blocks of a softmax written out.")


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
        moved = self._within(jnp.sum(EKr, 0))
        return jnp.ravel(split - EKr + jnp.einsum("rnm,m->rn", self.E, moved))

    def _within(self, x):
        return solve_lower(self.L, solve_lower(self.L, x), trans=1)

    def inverse(self):
        half = jax.lax.map(lambda E: solve_lower(self.L, E), self.E)
        return SoftmaxInverse(self.K, self.d, SoftmaxPrecision(self.E, half))
