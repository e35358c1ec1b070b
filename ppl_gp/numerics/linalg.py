"""Covariances factored under the one jitter policy, and what is cheap to compute from a triangular
factor.

Policy: a covariance gets a diagonal `jitter` (an absolute variance; by default a small multiple of
the kernel's mean variance). Where its factorisation still fails, the jitter is raised tenfold up to
`MAX_RAISES` times, and the caller is told how much was added. A factor that is NaN afterwards is a
matrix that no jitter repairs.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ppl_gp.numerics.lapack import cholesky, solve_lower

MAX_RAISES = 6
_RELATIVE_JITTER = {"float64": 1e-8, "float32": 1e-5}
_OF_FINITE_RANK = {"float64": 1e-12, "float32": 1e-5}  # what rounding in a factorisation asks for
_BLOCK = 256  # below this size one triangular solve beats splitting


def default_jitter(variance: Float[Array, "N"], finite: ArrayLike = 0.0) -> Float[Array, ""]:
    """Absolute jitter variance for a covariance with this diagonal: relative to its mean, by
    precision. The share `finite` of it is of finite rank, as a line's: that makes nothing
    singular, and may be a million times the rest.
    """
    variance = jnp.asarray(variance)
    finite = jnp.asarray(finite, variance.dtype)
    rest, of_finite = (
        f.get(variance.dtype.name, 1e-5) for f in (_RELATIVE_JITTER, _OF_FINITE_RANK)
    )
    return rest * jnp.mean(variance - finite) + of_finite * jnp.mean(finite)


def add_diagonal(A: Float[Array, "*batch N N"], d: ArrayLike) -> Float[Array, "*batch N N"]:
    """A + diag(d), d a scalar or (N,); one elementwise pass that fuses with what made A, where a
    scatter would copy.
    """
    i = jnp.arange(A.shape[-1])
    return jnp.where(i[:, None] == i, A + jnp.asarray(d)[..., None], A)


@jax.custom_jvp
def robust_cholesky(
    K: Float[Array, "N N"], unit: Float[Array, ""]
) -> tuple[Float[Array, "N N"], Float[Array, ""]]:
    """Lower Cholesky factor L of K + added * I and `added`: 0 where K factorises, else unit * 10^k,
    k = 0, 1, ...

    K already carries its own jitter; `unit` is the first raise (an absolute variance). L is NaN if
    `MAX_RAISES` do not suffice. Differentiable in K and in `unit`, with k fixed. O(N^3 / 3) per
    attempt.
    """

    def failed(state):
        raises, _, L = state
        return ~jnp.isfinite(L[-1, -1]) & (raises < MAX_RAISES)

    def attempt(state):
        raises, _, _ = state
        added = (unit * 10.0**raises).astype(K.dtype)
        return raises + 1, added, cholesky(add_diagonal(K, added))

    start = (jnp.zeros((), int), jnp.zeros((), K.dtype), cholesky(K))
    _, added, L = lax.while_loop(failed, attempt, start)
    return L, added


@robust_cholesky.defjvp
def _robust_cholesky_jvp(primals, tangents):
    L, added = robust_cholesky(*primals)
    power = added / jnp.where(added > 0, primals[1], 1.0)
    dadded = (power * tangents[1]).astype(added.dtype)
    return (L, added), (L @ _phi(L, add_diagonal(tangents[0], dadded)), dadded)


def _phi(L, dK):
    """Phi(L^-1 dK L^-T), Phi the lower triangle with a halved diagonal; dL is L times it (Murray
    2016, eq. 8).
    """
    inner = solve_lower(L, solve_lower(L, 0.5 * (dK + dK.T)).T)
    return jnp.tril(inner) - 0.5 * jnp.diag(jnp.diag(inner))


def tril_inverse(L: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """L^-1 of a lower triangular L by halving: [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1,
    C^-1]].

    About 2 N^3 / 3 multiply-adds in matrix products, where solving against the identity takes N^3.
    """
    n = L.shape[0]
    if n <= _BLOCK:
        return solve_lower(L, jnp.eye(n, dtype=L.dtype))
    h = n // 2
    A, C = tril_inverse(L[:h, :h]), tril_inverse(L[h:, h:])
    B = -C @ (L[h:, :h] @ A)
    return jnp.block([[A, jnp.zeros((h, n - h), L.dtype)], [B, C]])


def tril_gram(L: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """L^T L of a lower triangular L by halving; about 2 N^3 / 3 operations where the plain product
    takes 2 N^3.
    """
    n = L.shape[0]
    if n <= _BLOCK:
        return L.T @ L
    h = n // 2
    B, C = L[h:, :h], L[h:, h:]
    cross = B.T @ C
    return jnp.block([[tril_gram(L[:h, :h]) + B.T @ B, cross], [cross.T, tril_gram(C)]])


def half_log_det(L: Float[Array, "N N"]) -> Float[Array, ""]:
    """0.5 log|L L^T| = sum_i log L_ii, nats."""
    return jnp.sum(jnp.log(jnp.diagonal(L)))
