"""A covariance as an array (N, N), as a factor with few columns (and an array that is added), or
as blocks of R functions that are independent a priori, (R, N, N) in place of (R N, R N).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.numerics.loads import Loads


class Independent(eqx.Module):
    """K = diag(K_1, ..., K_R): rows are (function, row), functions outermost."""

    parts: Float[Array, "R N N"]

    @property
    def dtype(self):
        """Of its entries."""
        return self.parts.dtype

    def __matmul__(self, x):
        split = jnp.reshape(x, (*self.parts.shape[:2], -1))
        return jnp.reshape(self.parts @ split, x.shape)

    def diagonal(self) -> Float[Array, "RN"]:
        """Variances."""
        return jnp.ravel(jnp.einsum("rnn->rn", self.parts))

    def within(self) -> Float[Array, "R R N"]:
        """Covariances within a row."""
        variances = jnp.einsum("rnn->rn", self.parts)
        return jnp.eye(len(variances), dtype=self.dtype)[:, :, None] * variances

    def dense(self) -> Float[Array, "RN RN"]:
        """The matrix."""
        return jax.scipy.linalg.block_diag(*self.parts)


class LowRank(eqx.Module):
    """K = F F^T, F (N, U) with fewer unknowns U than data: coefficients, groups, repeated places.

    What the local methods ask of K, without the matrix: a step costs O(N U^2) in place of O(N^3),
    and O(N V^2) where all but V unknowns are levels of one grouping factor (`numerics.loads`).

    `rest`: an array to add, K = rest + F F^T. Columns whose prior is wide (a coefficient of a year
    or of an income) would leave no digits of the rest in their sum.
    """

    F: Loads
    rest: Float[Array, "N N"] | None = None

    @property
    def dtype(self):
        """Of its entries."""
        return jnp.result_type(*(x for x in jax.tree.leaves(self.F) if eqx.is_inexact_array(x)))

    def __matmul__(self, x):
        product = self.F @ self.F.pull(x)
        return product if self.rest is None else product + self.rest @ x

    def diagonal(self) -> Float[Array, "N"]:
        """Variances."""
        squares = self.F.squares()
        return squares if self.rest is None else squares + jnp.diagonal(self.rest)

    def dense(self) -> Float[Array, "N N"]:
        """The matrix."""
        F = self.F.array()
        return F @ F.T if self.rest is None else self.rest + F @ F.T


Covariance = Float[Array, "RN RN"] | LowRank | Independent


def dense(K: Covariance) -> Float[Array, "N N"]:
    """As an array."""
    return K.dense() if isinstance(K, LowRank | Independent) else K


def within(K: Covariance, functions: int) -> Float[Array, "R R N"]:
    """The blocks of a covariance of R functions, (R N, R N), that are within a datum."""
    if isinstance(K, Independent):
        return K.within()
    if isinstance(K, LowRank):
        F = jnp.reshape(K.F.array(), (functions, -1, K.F.shape[1]))
        blocks = jnp.einsum("anu,bnu->abn", F, F)
        return blocks if K.rest is None else blocks + within(K.rest, functions)
    whole = jnp.reshape(K, (functions, len(K) // functions, functions, -1))
    return jnp.einsum("anbn->abn", whole)
