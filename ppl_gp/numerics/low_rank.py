"""A covariance as an array (N, N), as a factor with few columns (and an array that is added), or
as blocks of R functions that are independent a priori, (R, N, N) in place of (R N, R N).

The factor is F (N, U) of K = F F^T, U unknowns behind N data, in two forms: an array, and one
unknown a row beside an array. What is asked of F: products, and G = I + F^T T F factored, T =
diag(nat2). A grouping factor of many levels has one unknown a row; G is then an arrow, diagonal but
for the columns of the other unknowns, and costs O(N V^2 + U V^2) for V others, in place of O(N U^2
+ U^3 / 3).
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ppl_gp.numerics.arrow import Arrow, ArrowGram, joined, split
from ppl_gp.numerics.blocks import blocks_in, gram_blocks, times
from ppl_gp.numerics.linalg import (
    add_diagonal,
    cholesky,
    half_log_det,
    solve_factored,
    tril_gram,
    tril_inverse,
)


class DenseGram(eqx.Module):
    """G by its Cholesky factor."""

    C: Float[Array, "U U"]

    def half_log_det(self) -> Float[Array, ""]:
        """log|G| / 2."""
        return half_log_det(self.C)

    def solve(self, b: Float[Array, "U"]) -> Float[Array, "U"]:
        """G^-1 b."""
        return solve_factored(self.C, b)

    def half(self) -> Float[Array, "U U"]:
        """H with H^T H = G^-1. O(U^2) memory in either form."""
        return tril_inverse(self.C)

    def half_of(self, start: int, size: int) -> Float[Array, "K size"]:
        """H' with H'^T H' the block of G^-1 of some unknowns, side by side."""
        return self.half()[:, start : start + size]

    def colour(self, z: Float[Array, "K U"]) -> Float[Array, "K U"]:
        """Rows of covariance G^-1 from rows z of covariance I."""
        return z @ self.half()


class Dense(eqx.Module):
    """An array; of R functions with R N rows."""

    F: Float[Array, "RN U"]

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, U)."""
        return self.F.shape

    def __matmul__(self, w: Float[Array, "U"]) -> Float[Array, "N"]:
        return self.F @ w

    def pull(self, x: Float[Array, "N"]) -> Float[Array, "U"]:
        """F^T x."""
        return self.F.T @ x

    def squares(self) -> Float[Array, "N"]:
        """diag(F F^T)."""
        return jnp.sum(self.F**2, 1)

    def array(self) -> Float[Array, "N U"]:
        """F written out."""
        return self.F

    @property
    def several(self) -> Float[Array, "N V"]:
        """The columns that a row may see several of."""
        return self.F

    def gram(self, nat2) -> DenseGram:
        """I + F^T T F, factored."""
        return DenseGram(cholesky(add_diagonal(self.F.T @ times(nat2, self.F), 1.0)))

    def variance(self, gram, like) -> Float[Array, "..."]:
        """diag(F G^-1 F^T), or the blocks of it that T has."""
        return gram_blocks(gram.half() @ self.F.T, like)

    def through(self, gram) -> "Dense":
        """F G^-1, where F has entries."""
        return Dense(self.F @ tril_gram(gram.half()))

    def scaled(self, nat2) -> "Dense":
        """T F."""
        return Dense(times(nat2, self.F))

    def outer(self, x: Float[Array, "N"], w: Float[Array, "U"]) -> "Dense":
        """x w^T, where F has entries."""
        return Dense(jnp.outer(x, w))


class OneAndOthers(eqx.Module):
    """Row n: `weight[n]` at unknown `index[n]` of `num`, beside the others' columns. The `num`
    stand at `start` among all U. It answers as `Dense` does.
    """

    index: Int[Array, "N"]
    weight: Float[Array, "N"]
    others: Float[Array, "N V"]
    num: int = eqx.field(static=True)
    start: int = eqx.field(static=True)

    @property
    def shape(self):
        return len(self.weight), self.num + self.others.shape[1]

    def __matmul__(self, w):
        others, one = split(w, self.start, self.num)
        return self.weight * one[self.index] + self.others @ others

    def pull(self, x):
        return joined(self._summed(self.weight * x), self.others.T @ x, self.start)

    def squares(self):
        return self.weight**2 + jnp.sum(self.others**2, 1)

    @property
    def several(self):
        return self.others

    def array(self):
        one = (self.index[:, None] == jnp.arange(self.num)) * self.weight[:, None]
        return joined(one, self.others, self.start, 1)

    def gram(self, nat2):
        """As an arrow."""
        scaled = nat2 * self.weight
        cross = self._summed(scaled[:, None] * self.others)
        block = self.others.T @ (nat2[:, None] * self.others)
        arrow = Arrow(block, cross, self._summed(scaled * self.weight), self.start)
        return arrow.plus_diagonal(1.0).factored()

    def variance(self, gram, like):
        G = gram.inverse
        across = jnp.sum(G.across[self.index] * self.others, 1)
        block = jnp.sum((self.others @ G.block) * self.others, 1)
        return self.weight * (self.weight * G.own[self.index] + 2.0 * across) + block

    def through(self, gram: ArrowGram):
        G = gram.inverse
        across = G.across[self.index]
        weight = self.weight * G.own[self.index] + jnp.sum(across * self.others, 1)
        return self._like(weight, self.weight[:, None] * across + self.others @ G.block)

    def scaled(self, nat2):
        return self._like(nat2 * self.weight, nat2[:, None] * self.others)

    def outer(self, x, w):
        others, one = split(w, self.start, self.num)
        return self._like(x * one[self.index], jnp.outer(x, others))

    def _like(self, weight, others) -> "OneAndOthers":
        """Other numbers where this one has entries."""
        return OneAndOthers(self.index, weight, others, self.num, self.start)

    def _summed(self, x) -> Float[Array, "..."]:
        """Rows added by level."""
        return jax.ops.segment_sum(x, self.index, self.num)


Loads = Dense | OneAndOthers
Gram = DenseGram | ArrowGram


def apart(F: Any, precision: Float[Array, ""]) -> Float[Array, ""]:
    """The least share of the square of one of `several` that those before do not explain."""
    C = F.gram(jnp.full(F.shape[0], precision)).C
    whole = 1.0 + precision * jnp.sum(F.several**2, 0)
    return jnp.min(jnp.diagonal(C) ** 2 / whole, initial=1.0)


class Independent(eqx.Module):
    """K = diag(K_1, ..., K_R): rows are (function, row), functions outermost."""

    parts: Float[Array, "R N N"]

    @property
    def dtype(self):
        """Of its entries."""
        return self.parts.dtype

    def __matmul__(self, x):
        return jnp.reshape(self.parts @ jnp.reshape(x, (*self.parts.shape[:2], -1)), x.shape)

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

    It answers what the local methods need of K without the matrix: O(N U^2) a step, not O(N^3).

    `rest`: an array to add, K = rest + F F^T. Columns whose prior is wide (a coefficient of a year
    or of an income) would leave no digits of the rest in their sum.
    """

    F: Loads
    rest: Float[Array, "N N"] | None = None

    @property
    def dtype(self):
        return jnp.result_type(*(x for x in jax.tree.leaves(self.F) if eqx.is_inexact_array(x)))

    def __matmul__(self, x):
        product = self.F @ self.F.pull(x)
        return product if self.rest is None else product + self.rest @ x

    def diagonal(self) -> Float[Array, "N"]:
        squares = self.F.squares()
        return squares if self.rest is None else squares + jnp.diagonal(self.rest)

    def dense(self) -> Float[Array, "N N"]:
        F = self.F.array()
        return F @ F.T if self.rest is None else self.rest + F @ F.T


Covariance = Float[Array, "RN RN"] | LowRank | Independent


def dense(K: Covariance) -> Float[Array, "N N"]:
    """As an array."""
    return K.dense() if isinstance(K, LowRank | Independent) else K


def within(K: Covariance, functions: int) -> Float[Array, "..."]:
    """The part of a covariance of R functions that is within a datum: variances of one."""
    if functions == 1:
        return K.diagonal()
    if isinstance(K, Independent):
        return K.within()
    if isinstance(K, LowRank):
        F = jnp.reshape(K.F.array(), (functions, -1, K.F.shape[1]))
        blocks = jnp.einsum("anu,bnu->abn", F, F)
        return blocks if K.rest is None else blocks + blocks_in(K.rest, functions)
    return blocks_in(K, functions)
