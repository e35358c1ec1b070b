"""K under the pseudo-likelihood's precisions T = diag(nat2), factored once: what every conditional
asks for.

The posterior is N(mu, Sigma), Sigma = (K^-1 + T)^-1, computed without K^-1, in one of two forms
with the same questions:

- nat2 >= 0: B = I + sqrt(T) K sqrt(T), eigenvalues >= 1 (R&W 3.26);
- any nat2 < 0: K = L L^T and A = I + L^T T L, whose Cholesky factor exists if and only if Sigma is
  positive definite; of either sign where L has few columns (`LowRank`), beside a K0 factored so.

Of R functions a datum K is (R N, R N), T has blocks (`numerics.blocks`), and sqrt(T) is S with
S S^T = T: R^3 times the cost of one function.
"""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.local.covariance import Precision
from ppl_gp.numerics.blocks import blocks_in, gram_blocks, matrix_of, roots, times, times_transposed
from ppl_gp.numerics.lapack import cholesky, solve_lower
from ppl_gp.numerics.linalg import (
    add_diagonal,
    default_jitter,
    half_log_det,
    robust_cholesky,
    tril_gram,
    tril_inverse,
)
from ppl_gp.numerics.loads import Dense, DenseGram, Gram, Loads
from ppl_gp.numerics.low_rank import Covariance, LowRank

_TINY_PRECISION = 1e-6  # below this nat2 x prior variance, (1 - diag B^-1) / nat2 loses digits


class PredictionRoot(eqx.Module):
    """R = (K + T^-1)^-1 as a prediction asks for it."""

    @abc.abstractmethod
    def explained(self, C: Float[Array, "RN M"]) -> Float[Array, "M"]:
        """diag(C^T R C)."""

    @abc.abstractmethod
    def quadratic(self, C: Float[Array, "RN M"]) -> Float[Array, "M M"]:
        """C^T R C."""

    @abc.abstractmethod
    def of_sum(self, a: Float[Array, "R N"]) -> "PredictionRoot":
        """A^T R A, (N, N), A f = (a_1 f, ..., a_R f): of an f that enters the functions so."""


class Root(PredictionRoot):
    """(K + T^-1)^-1 = diagonal + sign W^T W. W (N, N), or (U, N); `diagonal` has the form of T."""

    W: Float[Array, "U RN"]
    diagonal: Float[Array, "..."]
    sign: Float[Array, ""]

    def explained(self, C):
        return jnp.sum((self.W @ C) ** 2, 0) * self.sign + jnp.sum(C * times(self.diagonal, C), 0)

    def quadratic(self, C):
        WC = self.W @ C
        return self.sign * WC.T @ WC + C.T @ times(self.diagonal, C)

    def of_sum(self, a):
        diagonal = self.diagonal if len(a) > 1 else self.diagonal[None, None]
        W = jnp.sum(a * jnp.reshape(self.W, (len(self.W), *a.shape)), 1)
        return Root(W, jnp.einsum("an,abn,bn->n", a, diagonal, a), self.sign)


class Inverse(eqx.Module):
    """The factor's inverse, of which variances, R and the prediction's root are made. 2 N^3 / 3
    more than the factor.
    """

    @abc.abstractmethod
    def variance(self) -> Float[Array, "..."]:
        """diag(Sigma), or the blocks of it."""

    @abc.abstractmethod
    def precision(self) -> Any:
        """R = (K + T^-1)^-1, (N, N), or a `Precision`."""

    @abc.abstractmethod
    def root(self) -> PredictionRoot:
        """R as a root."""


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

    def root(self) -> PredictionRoot:
        """R as a root, where nothing else is asked of the inverse."""
        return self.inverse().root()


class _PositiveInverse(Inverse):
    K: Float[Array, "N N"]
    nat2: Float[Array, "N"]
    s: Float[Array, "N"]
    C_inverse: Float[Array, "N N"]

    def variance(self):
        prior = jnp.diagonal(self.K)

        def fast():
            # diag(Sigma) = (1 - diag B^-1) / T
            return (1.0 - jnp.sum(self.C_inverse**2, 0)) / self.nat2

        def careful():
            # R&W 3.29
            return prior - jnp.sum((self.C_inverse @ (self.s[:, None] * self.K)) ** 2, 0)

        return lax.cond(jnp.all(self.nat2 * prior > _TINY_PRECISION), fast, careful)

    def precision(self):
        return tril_gram(self.C_inverse) * self.s[:, None] * self.s

    def root(self):
        return Root(self.C_inverse * self.s, jnp.zeros_like(self.s), jnp.ones((), self.K.dtype))


class _PositiveFactor(Factor):
    K: Float[Array, "N N"]
    nat2: Float[Array, "N"]
    s: Float[Array, "N"]
    C: Float[Array, "N N"]

    def half_log_det(self):
        return half_log_det(self.C)

    def solve(self, r):
        # R&W 3.27, alpha = r - s B^-1 s K r, cancels badly for precise data; with r = s (r / s) it
        # is s B^-1 (r / s).
        flat = self.s == 0.0
        free = jnp.where(flat, r, 0.0)
        scaled = jnp.where(flat, 0.0, r / jnp.where(flat, 1.0, self.s)) - self.s * (self.K @ free)
        return free + self.s * _cho_solve(self.C, scaled)

    def inverse(self):
        return _PositiveInverse(self.K, self.nat2, self.s, tril_inverse(self.C))


class _BlockInverse(Inverse):
    """Of several functions: B^-1 = C_inverse^T C_inverse, T = S S^T."""

    K: Float[Array, "RN RN"]
    S: Float[Array, "R R N"]
    C_inverse: Float[Array, "RN RN"]

    def variance(self):
        half = self.C_inverse @ times_transposed(self.S, self.K)
        return blocks_in(self.K, self.S) - gram_blocks(half, self.S)

    def precision(self):
        return tril_gram(self.root().W)

    def root(self):
        W = times(self.S, self.C_inverse.T).T
        return Root(W, jnp.zeros_like(self.S), jnp.ones((), self.K.dtype))


class _BlockFactor(Factor):
    """Of several functions: T = S S^T, directions without weight zero in S, and B = I + S^T K S."""

    K: Float[Array, "RN RN"]
    S: Float[Array, "R R N"]
    whiten: Float[Array, "R R N"]  # of r = S w makes such a w
    C: Float[Array, "RN RN"]

    def half_log_det(self):
        return half_log_det(self.C)

    def solve(self, r):
        # As for one function: r = S w + free, (I + S S^T K)^-1 S w = S B^-1 w.
        w = times(self.whiten, r)
        free = r - times(self.S, w)
        scaled = w - times_transposed(self.S, self.K @ free)
        return free + times(self.S, _cho_solve(self.C, scaled))

    def inverse(self):
        return _BlockInverse(self.K, self.S, tril_inverse(self.C))


class _SignedInverse(Inverse):
    nat2: Float[Array, "..."]
    V: Float[Array, "RN RN"]  # Sigma = V^T V

    def variance(self):
        return gram_blocks(self.V, self.nat2)

    def precision(self):
        VT = times(self.nat2, self.V.T).T
        return matrix_of(self.nat2) - VT.T @ VT

    def root(self):
        return Root(times(self.nat2, self.V.T).T, self.nat2, -jnp.ones((), self.V.dtype))


class _SignedFactor(Factor):
    nat2: Float[Array, "..."]
    L: Float[Array, "RN RN"]  # K = L L^T
    C: Float[Array, "RN RN"]

    def half_log_det(self):
        return half_log_det(self.C)

    def solve(self, r):
        return r - times(self.nat2, self.L @ _cho_solve(self.C, self.L.T @ r))

    def inverse(self):
        return _SignedInverse(self.nat2, tril_inverse(self.C) @ self.L.T)


class _LowRankInverse(Inverse):
    nat2: Float[Array, "..."]
    F: Loads
    E: Loads
    G: Gram
    rest: tuple[Array, Inverse] | None  # (K0, its inverse)

    def variance(self):
        if self.rest is None:
            return self.F.variance(self.G, self.nat2)
        K0, alone = self.rest
        left = Dense(self.F.array() - K0 @ self.E.array())  # (I + K0 T)^-1 F
        return alone.variance() + left.variance(self.G, self.nat2)

    def precision(self):
        rest = None if self.rest is None else (self.rest[0], self.rest[1].precision())
        return Precision(self.nat2, self.F, self.E, self.G, rest)

    def root(self):
        V = self.G.half() @ self.F.array().T
        return Root(times(self.nat2, V.T).T, self.nat2, -jnp.ones((), V.dtype))


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
        # F^T (I + T K)^-1 r is G^-1 F^T (I + T K0)^-1 r, without the cancellation that wide priors
        # bring
        left = r if self.alone is None else self.alone.solve(r)
        return left, self.G.solve(self.K.F.pull(left))

    def inverse(self):
        rest = None if self.alone is None else (self.K.rest, self.alone.inverse())
        return _LowRankInverse(self.nat2, self.K.F, self.E, self.G, rest)


def positive(K, nat2) -> Factor:
    """Of nat2 that is positive semi-definite."""
    if nat2.ndim > 1:
        S, whiten = roots(nat2)
        half = times_transposed(S, times_transposed(S, K).T)
        return _BlockFactor(K, S, whiten, cholesky(add_diagonal(half, 1.0)))
    s = jnp.sqrt(nat2)
    return _PositiveFactor(K, nat2, s, cholesky(add_diagonal(s[:, None] * K * s, 1.0)))


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


def _cho_solve(C, b):
    return solve_lower(C, solve_lower(C, b), trans=1)
