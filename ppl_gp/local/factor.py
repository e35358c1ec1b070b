"""K under the pseudo-likelihood's precisions T = diag(nat2), factored once: what every conditional
asks for.

The posterior is N(mu, Sigma), Sigma = (K^-1 + T)^-1, computed without K^-1, in one of two forms
with the same questions:

- nat2 >= 0: B = I + S^T K S, T = S S^T, eigenvalues >= 1 (R&W 3.26);
- any nat2 < 0: K = L L^T and A = I + L^T T L, whose Cholesky factor exists if and only if Sigma is
  positive definite; of either sign where L has few columns (`LowRank`), beside a K0 factored so.

Of R functions a datum K is (R N, R N), and T and S have blocks (`numerics.blocks`): R^3 times the
cost of one function.
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.numerics import blocks
from ppl_gp.numerics.blocks import gram_blocks, times, times_transposed
from ppl_gp.numerics.linalg import (
    add_diagonal,
    cholesky,
    default_jitter,
    half_log_det,
    robust_cholesky,
    solve_factored,
    tril_gram,
    tril_inverse,
)
from ppl_gp.numerics.low_rank import Covariance, Dense, DenseGram, Gram, Independent, Loads, LowRank

_TINY_PRECISION = 1e-6  # below this nat2 x prior variance, (1 - diag B^-1) / nat2 loses digits


class Root(eqx.Module):
    """R = (K + T^-1)^-1 = diagonal + sign W^T W, as a prediction asks for it. W (N, N), or (U, N);
    `diagonal` has the form of T.
    """

    W: Float[Array, "U RN"]
    diagonal: Float[Array, "..."]
    sign: Float[Array, ""]

    def explained(self, C: Float[Array, "RN M"]) -> Float[Array, "M"]:
        """diag(C^T R C)."""
        return jnp.sum((self.W @ C) ** 2, 0) * self.sign + jnp.sum(C * times(self.diagonal, C), 0)

    def quadratic(self, C: Float[Array, "RN M"]) -> Float[Array, "M M"]:
        """C^T R C."""
        WC = self.W @ C
        return self.sign * WC.T @ WC + C.T @ times(self.diagonal, C)

    def of_sum(self, a: Float[Array, "R N"]) -> "Root":
        """A^T R A, (N, N), A f = (a_1 f, ..., a_R f): of an f that enters the functions so."""
        diagonal = self.diagonal if len(a) > 1 else self.diagonal[None, None]
        W = jnp.sum(a * jnp.reshape(self.W, (len(self.W), *a.shape)), 1)
        return Root(W, jnp.einsum("an,abn,bn->n", a, diagonal, a), self.sign)


class Precision(eqx.Module):
    """R = (K + T^-1)^-1 = R0 - E G^-1 E^T of a `LowRank` K = K0 + F F^T; E = (I + T K0)^-1 T F, G =
    I + F^T E, T = diag(nat2). `rest`: (K0, R0 = (K0 + T^-1)^-1); without it, K0 = 0 and R0 = T.
    """

    nat2: Float[Array, "..."]
    F: Loads
    E: Loads
    G: Gram
    rest: tuple[Array, Array] | None = None

    def __matmul__(self, x: Float[Array, "RN"]) -> Float[Array, "RN"]:
        alone = times(self.nat2, x) if self.rest is None else self.rest[1] @ x
        return alone - self.E @ self.G.solve(self.E.pull(x))

    def dense(self) -> Float[Array, "RN RN"]:
        """The matrix, where there is a K0."""
        V = self.G.half() @ self.E.array().T
        return self.rest[1] - V.T @ V  # pyright: ignore[reportOptionalSubscript]

    def moved(self, x):
        """As `moved`."""
        alone = x if self.rest is None else x - self.rest[1] @ (self.rest[0] @ x)
        unknowns = self.G.solve(self.F.pull(alone))
        w, Kw = alone - self.E @ unknowns, self.F @ unknowns
        return w, Kw if self.rest is None else Kw + self.rest[0] @ w


class Inverse(NamedTuple):
    """What the factor's inverse is made for, 2 N^3 / 3 more than the factor; each is computed where
    it is called.

    `variance()`: diag(Sigma), or the blocks of it. `precision()`: R = (K + T^-1)^-1, (N, N), or a
    `Precision`. `root()`: R as a `Root`.
    """

    variance: Callable[[], Float[Array, "..."]]
    precision: Callable[[], Any]
    root: Callable[[], Any]


class Factor(eqx.Module):
    """K under T, factored: N^3 / 3."""

    @abc.abstractmethod
    def half_log_det(self) -> Float[Array, ""]:
        """log|I + T K| / 2."""

    @abc.abstractmethod
    def solve(self, r: Float[Array, "N"]) -> Float[Array, "N"]:
        """(I + T K)^-1 r."""

    def centred(self, K: Covariance, r, solved) -> Float[Array, "N"]:
        """K (I + T K)^-1 r, of which `solved` is (I + T K)^-1 r."""
        return K @ solved

    @abc.abstractmethod
    def inverse(self) -> Inverse:
        """What more than one vector is asked of."""

    def root(self) -> Any:
        """R as a root, where nothing else is asked of the inverse."""
        return self.inverse().root()


class _PositiveFactor(Factor):
    """T = S S^T, directions without weight zero in S, and B = I + S^T K S = C C^T."""

    K: Float[Array, "RN RN"]
    nat2: Float[Array, "..."]
    S: Float[Array, "..."]
    whiten: Float[Array, "..."]  # of r = S w makes such a w
    C: Float[Array, "RN RN"]

    def half_log_det(self):
        return half_log_det(self.C)

    def solve(self, r):
        # R&W 3.27, alpha = r - s B^-1 s K r, cancels badly for precise data; of r = S w + free,
        # (I + S S^T K)^-1 S w = S B^-1 w.
        w, free = blocks.split_by(self.S, self.whiten, r)
        scaled = w - times_transposed(self.S, self.K @ free)
        return free + times(self.S, solve_factored(self.C, scaled))

    def inverse(self):
        S, prior = self.S, blocks.blocks_in(self.K, blocks.num_functions(self.S))
        half = tril_inverse(self.C)  # B^-1 = half^T half

        def fast():
            # diag(Sigma) = (1 - diag B^-1) / T
            return (1.0 - jnp.sum(half**2, 0)) / self.nat2

        def careful():
            # R&W 3.29
            return prior - gram_blocks(half @ times_transposed(S, self.K), S)

        def variance():
            if S.ndim > 1:
                return careful()
            return lax.cond(jnp.all(self.nat2 * prior > _TINY_PRECISION), fast, careful)

        return Inverse(
            variance,
            lambda: times(S, times(S, tril_gram(half)).T),
            lambda: Root(times(S, half.T).T, jnp.zeros_like(S), jnp.ones((), S.dtype)),
        )


class _SignedFactor(Factor):
    nat2: Float[Array, "..."]
    L: Float[Array, "RN RN"]  # K = L L^T
    C: Float[Array, "RN RN"]

    def half_log_det(self):
        return half_log_det(self.C)

    def solve(self, r):
        return r - times(self.nat2, self.L @ solve_factored(self.C, self.L.T @ r))

    def inverse(self):
        V = tril_inverse(self.C) @ self.L.T  # Sigma = V^T V
        VT = times(self.nat2, V.T).T
        return Inverse(
            lambda: gram_blocks(V, self.nat2),
            lambda: blocks.matrix_of(self.nat2) - VT.T @ VT,
            lambda: Root(VT, self.nat2, -jnp.ones((), V.dtype)),
        )


class _LowRankFactor(Factor):
    """Of K = K0 + F F^T, `alone` being the factor of K0: E = (I + T K0)^-1 T F, G = I + F^T E."""

    K: LowRank
    nat2: Float[Array, "..."]
    E: Loads
    G: Gram
    alone: Factor | None

    def half_log_det(self):
        half = self.G.half_log_det()
        return half if self.alone is None else half + self.alone.half_log_det()

    def solve(self, r):
        left, unknowns = self._solved(r)
        return left - self.E @ unknowns

    def centred(self, K, r, solved):
        moved = self.K.F @ self._solved(r)[1]
        return moved if self.alone is None else moved + self.K.rest @ solved

    def _solved(self, r):
        # F^T (I + T K)^-1 r is G^-1 F^T (I + T K0)^-1 r, which does not cancel for wide priors
        left = r if self.alone is None else self.alone.solve(r)
        return left, self.G.solve(self.K.F.pull(left))

    def inverse(self):
        F, nat2, K0 = self.K.F, self.nat2, cast(Any, self.K.rest)
        alone = None if self.alone is None else self.alone.inverse()

        def variance():
            if alone is None:
                return F.variance(self.G, nat2)
            left = Dense(F.array() - K0 @ self.E.array())  # (I + K0 T)^-1 F
            return alone.variance() + left.variance(self.G, nat2)

        def root():
            V = self.G.half() @ F.array().T
            return Root(times(nat2, V.T).T, nat2, -jnp.ones((), V.dtype))

        rest = lambda: None if alone is None else (K0, alone.precision())  # noqa: E731
        return Inverse(variance, lambda: Precision(nat2, F, self.E, self.G, rest()), root)


def positive(K, nat2) -> Factor:
    """Of nat2 that is positive semi-definite."""
    S, whiten = blocks.roots(nat2)
    half = times_transposed(S, times_transposed(S, K).T)
    return _PositiveFactor(K, nat2, S, whiten, cholesky(add_diagonal(half, 1.0)))


def signed(K, nat2) -> Factor:
    """Of either sign."""
    L, _ = robust_cholesky(K, default_jitter(jnp.diagonal(K)))
    return _SignedFactor(nat2, L, cholesky(add_diagonal(L.T @ times(nat2, L), 1.0)))


def low_rank(K: LowRank, nat2, alone: Factor | None = None) -> Factor:
    """Of either sign, with few columns; `alone`: the factor of `K.rest`."""
    if alone is None:
        return _LowRankFactor(K, nat2, K.F.scaled(nat2), K.F.gram(nat2), None)
    F = K.F.array()
    E = jax.vmap(alone.solve, 1, 1)(times(nat2, F))
    return _LowRankFactor(K, nat2, Dense(E), DenseGram(cholesky(add_diagonal(F.T @ E, 1.0))), alone)


def moved(K: Covariance, R, x: Float[Array, "RN"]) -> tuple[Array, Array]:
    """(w, K w) of w = (I + T K)^-1 x: without a product by the squares of wide columns."""
    if isinstance(R, Precision):
        return R.moved(x)
    w = x - R @ (K @ x)
    return w, K @ w


def pulled_back(K: Covariance, R, z_bar, w, alpha) -> Covariance:
    """The cotangent G of K, (z_bar / 2) (alpha alpha^T - R) + w alpha^T; of F in F F^T it is (G +
    G^T) F, with R F = E G^-1.
    """
    if isinstance(K, Independent):
        a, m = (jnp.reshape(x, K.parts.shape[:2]) for x in (alpha, w))
        if hasattr(R, "blocks"):
            own = R.blocks()
        else:
            own = jnp.einsum("rnrm->rnm", jnp.reshape(R, (*a.shape, *a.shape)))
        outer = a[:, :, None] * a[:, None]
        return Independent(0.5 * z_bar * (outer - own) + m[:, :, None] * a[:, None])
    if not isinstance(K, LowRank):
        return (0.5 * z_bar) * (alpha[:, None] * alpha - R) + w[:, None] * alpha
    F = K.F

    def summed(a, b, RF):
        """Entries; an index has no cotangent."""
        return a + b - z_bar * RF if jnp.issubdtype(a.dtype, jnp.inexact) else None

    outer = F.outer(z_bar * alpha + w, F.pull(alpha)), F.outer(alpha, F.pull(w))
    rest = None if K.rest is None else pulled_back(K.rest, R.dense(), z_bar, w, alpha)
    return LowRank(jax.tree.map(summed, *outer, R.E.through(R.G)), rest)  # pyright: ignore[reportArgumentType]
