"""F (N, U) of a covariance K = F F^T, U unknowns behind N data, in two forms: an array, and one
unknown a row beside an array.

What is asked of F: products, and G = I + F^T T F factored, T = diag(nat2). A grouping factor of
many levels has one unknown a row; G is then an arrow, diagonal but for the columns of the other
unknowns, and costs O(N V^2 + U V^2) for V others, in place of O(N U^2 + U^3 / 3).
"""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ppl_gp.numerics.blocks import gram_blocks, times
from ppl_gp.numerics.lapack import cholesky, solve_lower
from ppl_gp.numerics.linalg import add_diagonal, half_log_det, tril_gram, tril_inverse


class Gram(eqx.Module):
    """G = I + F^T T F, factored."""

    @abstractmethod
    def half_log_det(self) -> Float[Array, ""]:
        """log|G| / 2."""

    @abstractmethod
    def solve(self, b: Float[Array, "U"]) -> Float[Array, "U"]:
        """G^-1 b."""

    @abstractmethod
    def half(self) -> Float[Array, "U U"]:
        """H with H^T H = G^-1. O(U^2) memory in either form."""

    def half_of(self, start: int, size: int) -> Float[Array, "K size"]:
        """H' with H'^T H' the block of G^-1 of some unknowns, side by side."""
        return self.half()[:, start : start + size]

    @abstractmethod
    def colour(self, z: Float[Array, "K U"]) -> Float[Array, "K U"]:
        """Rows of covariance G^-1 from rows z of covariance I."""


class Loads(eqx.Module):
    """F."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(N, U)."""

    @abstractmethod
    def __matmul__(self, w: Float[Array, "U"]) -> Float[Array, "N"]:
        """F w."""

    @abstractmethod
    def pull(self, x: Float[Array, "N"]) -> Float[Array, "U"]:
        """F^T x."""

    @abstractmethod
    def squares(self) -> Float[Array, "N"]:
        """diag(F F^T)."""

    @abstractmethod
    def array(self) -> Float[Array, "N U"]:
        """F written out."""

    @abstractmethod
    def gram(self, nat2) -> Gram:
        """I + F^T T F, factored."""

    @property
    @abstractmethod
    def several(self) -> Float[Array, "N V"]:
        """The columns that a row may see several of."""

    def apart(self, precision: Float[Array, ""]) -> Float[Array, ""]:
        """The least share of the square of one of them that those before it do not explain."""
        C = self.gram(jnp.full(self.shape[0], precision)).C  # pyright: ignore[reportAttributeAccessIssue]
        whole = 1.0 + precision * jnp.sum(self.several**2, 0)
        return jnp.min(jnp.diagonal(C) ** 2 / whole, initial=1.0)

    @abstractmethod
    def variance(self, gram: Any, like) -> Float[Array, "..."]:
        """diag(F G^-1 F^T), or the blocks of it that T has."""

    @abstractmethod
    def through(self, gram: Any) -> "Loads":
        """F G^-1, where F has entries."""

    @abstractmethod
    def scaled(self, nat2) -> "Loads":
        """T F."""

    @abstractmethod
    def outer(self, x: Float[Array, "N"], w: Float[Array, "U"]) -> "Loads":
        """x w^T, where F has entries."""


class Dense(Loads):
    """An array; of R functions with R N rows."""

    F: Float[Array, "RN U"]

    @property
    def shape(self):
        return self.F.shape

    def __matmul__(self, w):
        return self.F @ w

    def pull(self, x):
        return self.F.T @ x

    def squares(self):
        return jnp.sum(self.F**2, 1)

    def array(self):
        return self.F

    @property
    def several(self):
        return self.F

    def gram(self, nat2):
        """I + F^T T F, factored as one matrix."""
        return DenseGram(cholesky(add_diagonal(self.F.T @ times(nat2, self.F), 1.0)))

    def variance(self, gram, like):
        return gram_blocks(gram.half() @ self.F.T, like)

    def through(self, gram):
        return Dense(self.F @ tril_gram(gram.half()))

    def scaled(self, nat2):
        return Dense(times(nat2, self.F))

    def outer(self, x, w):
        return Dense(jnp.outer(x, w))


class DenseGram(Gram):
    """By its Cholesky factor."""

    C: Float[Array, "U U"]

    def half_log_det(self):
        return half_log_det(self.C)

    def solve(self, b):
        return solve_lower(self.C, solve_lower(self.C, b), trans=1)

    def half(self):
        return tril_inverse(self.C)

    def colour(self, z):
        return z @ self.half()


class OneAndOthers(Loads):
    """Row n: `weight[n]` at unknown `index[n]` of `num`, beside the others' columns. The `num`
    stand at `start` among all U.
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
        one, others = self.split(w)
        return self.weight * one[self.index] + self.others @ others

    def pull(self, x):
        return self.join(self.summed(self.weight * x), self.others.T @ x)

    def squares(self):
        return self.weight**2 + jnp.sum(self.others**2, 1)

    @property
    def several(self):
        return self.others

    def array(self):
        levels = jnp.arange(self.num)
        return self.join((self.index[:, None] == levels) * self.weight[:, None], self.others, 1)

    def gram(self, nat2):
        """I + F^T T F, factored as an arrow."""
        scaled = nat2 * self.weight
        d = 1.0 + self.summed(scaled * self.weight)
        cross = self.summed(scaled[:, None] * self.others)
        block = self.others.T @ (nat2[:, None] * self.others) - cross.T @ (cross / d[:, None])
        # of a d that is not positive no Gaussian is left: NaN, as from a Cholesky factor
        C = cholesky(add_diagonal(block, 1.0))
        return ArrowGram(jnp.where(d > 0, d, jnp.nan), cross, C, self.start)

    def variance(self, gram, like):
        across = jnp.sum(gram.across[self.index] * self.others, 1)
        block = jnp.sum((self.others @ gram.block) * self.others, 1)
        return self.weight * (self.weight * gram.own[self.index] + 2.0 * across) + block

    def through(self, gram):
        across = gram.across[self.index]
        weight = self.weight * gram.own[self.index] + jnp.sum(across * self.others, 1)
        return self.like(weight, self.weight[:, None] * across + self.others @ gram.block)

    def scaled(self, nat2):
        return self.like(nat2 * self.weight, nat2[:, None] * self.others)

    def outer(self, x, w):
        one, others = self.split(w)
        return self.like(x * one[self.index], jnp.outer(x, others))

    def like(self, weight, others) -> "OneAndOthers":
        """Other numbers where this one has entries."""
        return OneAndOthers(self.index, weight, others, self.num, self.start)

    def summed(self, x) -> Float[Array, "..."]:
        """Rows added by level."""
        return jax.ops.segment_sum(x, self.index, self.num)

    def split(self, w):
        """(the levels' unknowns, the others)."""
        a, b = self.start, self.start + self.num
        return w[a:b], jnp.concatenate([w[:a], w[b:]])

    def join(self, one, others, axis: int = 0):
        """All unknowns in order."""
        return joined(one, others, self.start, axis)


def joined(one, others, start: int, axis: int = 0):
    """`one` among the `others`, from `start` on."""
    before, after = jnp.split(others, [start], axis)
    return jnp.concatenate([before, one, after], axis)


class ArrowGram(Gram):
    """G with diag(d) for the levels and `cross` (levels, others), by the Cholesky factor C of what
    is left of the others' block.
    """

    d: Float[Array, "G"]
    cross: Float[Array, "G V"]
    C: Float[Array, "V V"]
    start: int = eqx.field(static=True)
    # of G^-1: the others' block, its rows at the levels, and the levels' diagonal
    block: Float[Array, "V V"]
    across: Float[Array, "G V"]
    own: Float[Array, "G"]

    def __init__(self, d, cross, C, start: int):
        self.d, self.cross, self.C, self.start = d, cross, C, start
        self.block = tril_gram(tril_inverse(C))
        relative = cross / d[:, None]
        self.across = -relative @ self.block
        self.own = 1.0 / d - jnp.sum(self.across * relative, 1)

    @property
    def num(self) -> int:
        """Levels."""
        return self.d.shape[0]

    def half_of(self, start, size):
        if start < self.start + self.num and self.start < start + size:
            return super().half_of(start, size)
        at = start if start < self.start else start - self.num
        return tril_inverse(self.C)[:, at : at + size]

    def half_log_det(self):
        return 0.5 * jnp.sum(jnp.log(self.d)) + half_log_det(self.C)

    def solve(self, b):
        one, others = (b[self.start : self.start + len(self.d)], self._without(b))
        right = others - self.cross.T @ (one / self.d)
        found = solve_lower(self.C, solve_lower(self.C, right), trans=1)
        return joined((one - self.cross @ found) / self.d, found, self.start)

    def _without(self, b):
        return jnp.concatenate([b[: self.start], b[self.start + len(self.d) :]])

    def colour(self, z):
        levels = z[:, self.start : self.start + len(self.d)]
        others = jax.vmap(self._without)(z) @ tril_inverse(self.C)
        one = levels / jnp.sqrt(self.d) - others @ (self.cross / self.d[:, None]).T
        return joined(one, others, self.start, 1)

    def half(self):
        s = jnp.sqrt(self.d)
        inverse = tril_inverse(self.C)
        top = joined(jnp.diag(1.0 / s), jnp.zeros_like(self.cross), self.start, 1)
        rows = joined((-inverse @ (self.cross / self.d[:, None]).T), inverse, self.start, 1)
        return jnp.concatenate([top, rows])
