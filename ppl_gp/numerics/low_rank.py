"""A covariance as an array (N, N), as a factor with few columns (and an array that is added), or
as blocks of independent functions.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.numerics.independent import Independent
from ppl_gp.numerics.loads import Loads


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
