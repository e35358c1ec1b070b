"""Symmetric matrices of which only the entries of an arrow count: a dense block of V few unknowns,
their rows at U others, and the diagonal of those.

A grouping factor of many levels gives them: each row of the data depends on one level, so that
levels are coupled through the few only. The precision of such a Gaussian is an arrow. Its
covariance is not, but a row's variance needs only the same entries of it. Memory O(U V + V^2).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.numerics.linalg import (
    add_diagonal,
    cholesky,
    half_log_det,
    product,
    solve_factored,
    solve_lower,
    tril_gram,
    tril_inverse,
)


class Arrow(eqx.Module):
    """The levels stand at `start` among all M = V + U."""

    block: Float[Array, "V V"]
    across: Float[Array, "U V"]
    own: Float[Array, "U"]
    start: int = eqx.field(static=True)

    @classmethod
    def zeros(cls, few: int, num: int, start: int, dtype) -> "Arrow":
        """Of V = `few` and U = `num`."""
        shapes = (few, few), (num, few), (num,)
        return cls(*(jnp.zeros(shape, dtype) for shape in shapes), start)

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, M); axes of draws stand in front."""
        *batch, num = jnp.shape(self.own)
        M = num + jnp.shape(self.block)[-1]
        return (*batch, M, M)

    @property
    def ndim(self) -> int:
        """2, and the axes of draws."""
        return len(self.shape)

    def __add__(self, other: "Arrow") -> "Arrow":
        return jax.tree.map(jnp.add, self, other)

    def times(self, factor) -> "Arrow":
        """A number times this."""
        return jax.tree.map(lambda x: factor * x, self)

    def plus_diagonal(self, d) -> "Arrow":
        """This + d I."""
        return Arrow(add_diagonal(self.block, d), self.across, self.own + d, self.start)

    def symmetric(self) -> "Arrow":
        """The block as a symmetric matrix."""
        return Arrow(0.5 * (self.block + self.block.T), self.across, self.own, self.start)

    def split(self, x: Float[Array, "... M"]) -> tuple[Array, Array]:
        """(the few's entries, the levels')."""
        return split(x, self.start, self.own.shape[0])

    def __matmul__(self, x: Float[Array, "M"]) -> Float[Array, "M"]:
        few, levels = self.split(x)
        top = self.block @ few + self.across.T @ levels
        return joined(self.across @ few + self.own * levels, top, self.start)

    def factored(self) -> "ArrowGram":
        """As a precision: by the Cholesky factor of the few's Schur complement, NaN where it is not
        positive definite. O(U V^2 + V^3).
        """
        d = jnp.where(self.own > 0, self.own, jnp.nan)
        schur = self.block - product(self.across.T, self.across / d[:, None])
        return ArrowGram(d, self.across, cholesky(0.5 * (schur + schur.T)), self.start)

    def covariance(self) -> "ArrowCovariance":
        """Of the Gaussian with these entries whose precision is an arrow. O(U V^2 + V^3)."""
        L = cholesky(self.block)
        half = solve_lower(L, self.across.T)
        given = self.own - jnp.sum(half**2, 0)
        least = jnp.finfo(given.dtype).eps * self.own
        slopes = solve_lower(L, half, trans=1).T
        return ArrowCovariance(L, slopes, jnp.maximum(given, least), self.start)


class ArrowGram(eqx.Module):
    """A positive definite arrow G, diag(d) for the levels and `cross` (levels, few), by the
    Cholesky factor C of the few's Schur complement. `inverse`: what G^-1 has where G has entries.
    """

    d: Float[Array, "U"]
    cross: Float[Array, "U V"]
    C: Float[Array, "V V"]
    inverse: Arrow

    def __init__(self, d, cross, C, start: int):
        self.d, self.cross, self.C = d, cross, C
        block, relative = tril_gram(tril_inverse(C)), cross / d[:, None]
        across = -relative @ block
        self.inverse = Arrow(block, across, 1.0 / d - jnp.sum(across * relative, 1), start)

    @property
    def start(self) -> int:
        return self.inverse.start

    @property
    def num(self) -> int:
        return self.d.shape[0]

    def half_log_det(self):
        """As `numerics.low_rank.DenseGram`, and all that follows."""
        return 0.5 * jnp.sum(jnp.log(self.d)) + half_log_det(self.C)

    def solve(self, b):
        few, levels = self.inverse.split(b)
        found = solve_factored(self.C, few - self.cross.T @ (levels / self.d))
        return joined((levels - self.cross @ found) / self.d, found, self.start)

    def colour(self, z):
        few, levels = self.inverse.split(z)
        few = few @ tril_inverse(self.C)
        rows = levels / jnp.sqrt(self.d) - few @ (self.cross / self.d[:, None]).T
        return joined(rows, few, self.start, 1)

    def half(self):
        s, inverse = jnp.sqrt(self.d), tril_inverse(self.C)
        top = joined(jnp.diag(1.0 / s), jnp.zeros_like(self.cross), self.start, 1)
        rows = joined((-inverse @ (self.cross / self.d[:, None]).T), inverse, self.start, 1)
        return jnp.concatenate([top, rows])

    def half_of(self, start, size):
        if start < self.start + self.num and self.start < start + size:
            return self.half()[:, start : start + size]
        at = start if start < self.start else start - self.num
        return tril_inverse(self.C)[:, at : at + size]


class ArrowCovariance(eqx.Module):
    """N(0, S) by its conditionals: the few have covariance L L^T; levels given the few are
    independent, with means `slopes` (few) and variances `given`.
    """

    L: Float[Array, "V V"]
    slopes: Float[Array, "U V"]
    given: Float[Array, "U"]
    start: int = eqx.field(static=True)

    def colour(self, white: Float[Array, "... M"]) -> Float[Array, "... M"]:
        """R white, R R^T = S. O(U V) a draw."""
        few, levels = split(white, self.start, len(self.given))
        few = few @ self.L.T
        rows = few @ self.slopes.T + jnp.sqrt(self.given) * levels
        return joined(rows, few, self.start, few.ndim - 1)

    def half_log_det(self) -> Float[Array, ""]:
        """log|S| / 2."""
        return half_log_det(self.L) + 0.5 * jnp.sum(jnp.log(self.given))

    def halves(self, A: Float[Array, "M B"]) -> tuple[Array, Array]:
        """(X (V, B), Y (U, B)) with A^T S A = X^T X + Y^T Y. O(U V B)."""
        few, levels = split(A.T, self.start, len(self.given))
        inside = (few + levels @ self.slopes) @ self.L
        return inside.T, (jnp.sqrt(self.given) * levels).T


def split(x: Float[Array, "... M"], start: int, num: int) -> tuple[Array, Array]:
    """(the others' entries, those of the `num` from `start` on)."""
    end = start + num
    return jnp.concatenate([x[..., :start], x[..., end:]], -1), x[..., start:end]


def joined(one, others, start: int, axis: int = 0):
    """`one` among the `others`, from `start` on."""
    before, after = jnp.split(others, [start], axis)
    return jnp.concatenate([before, one, after], axis)
