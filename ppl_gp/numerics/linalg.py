"""Covariances factored under the one jitter policy, products with triangular factors and symmetric
products, by halving: what is known to be zero, or a mirror, is not computed.

Policy: a covariance gets a diagonal `jitter` (an absolute variance; by default a small multiple of
the kernel's mean variance), which `robust_cholesky` raises where the factorisation still fails.

Below `BLOCK` rows one plain product is faster. Operands' upper triangles are taken to be zero, not
read.

Under `vmap` the Cholesky factor and triangular solves loop over the batch on CPU, where one factor
fills the cores, and use the batched kernels on accelerators. jaxlib 0.10.0 to 0.11.0, which are
excluded, hand a batch to the thread pool that runs the program itself and wait there: two such
waits at once on two cores never end.

Roots, inverses and determinants take batches of symmetric positive definite matrices: up to four
rows by loops that are written out over the batch (`numerics.blocks`), above by LAPACK, one matrix
after another. O(D^3) a matrix. Derivatives are written down, products with the inverse, so that
differentiating traces and compiles no second set of loops.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ppl_gp.numerics import blocks as small


def _looped_on_cpu(function, kernel, *xs):
    return lax.platform_dependent(
        *xs, cpu=lambda *xs: lax.map(lambda x: function(*x), xs), default=kernel
    )


def _factor(A):
    return lax.linalg.cholesky(A, symmetrize_input=False)


@custom_vmap
def cholesky(A: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """Lower Cholesky factor of a symmetric A (its lower triangle is read), all NaN where A is not
    positive definite.

    O(N^3 / 3). Not differentiable: `robust_cholesky` is.
    """
    return _factor(A)


@cholesky.def_vmap
def _cholesky_of_a_batch(axis_size, in_batched, A):
    return _looped_on_cpu(cholesky, _factor, A), True


def _solver(trans: int):
    def kernel(L, b):
        return lax.linalg.triangular_solve(
            L, b, left_side=True, lower=True, transpose_a=bool(trans)
        )

    @custom_vmap
    def solve(L, b):
        return kernel(L, b)

    @solve.def_vmap
    def _(axis_size, in_batched, L, b):
        if not in_batched[0]:  # one factor, many right-hand sides: more columns
            columns = jnp.moveaxis(b, 0, 1).reshape(b.shape[1], -1)
            return jnp.moveaxis(solve(L, columns).reshape(b.shape[1], axis_size, -1), 1, 0), True
        b = b if in_batched[1] else jnp.broadcast_to(b, (axis_size, *b.shape))
        return _looped_on_cpu(solve, kernel, L, b), True

    return solve


_SOLVERS = (_solver(0), _solver(1))


@partial(jax.jit, static_argnames="trans")
def solve_lower(
    L: Float[Array, "N N"], b: Float[Array, "N *M"], trans: int = 0
) -> Float[Array, "N *M"]:
    """L^-1 b, or L^-T b where `trans` is 1, for a lower triangular L and b of shape (N,) or (N, M).

    Differentiable in both. O(N^2 M).
    """

    def solve(trans):
        return lambda _, b: _SOLVERS[trans](L, b)

    def product(x):
        T = jnp.tril(L)
        return (T.T if trans else T) @ x

    columns = b if b.ndim == 2 else b[:, None]
    x = lax.custom_linear_solve(product, columns, solve(trans), solve(1 - trans))
    return x.reshape(b.shape)


MAX_RAISES = 6
BLOCK = 256
_RELATIVE_JITTER = {"float64": 1e-8, "float32": 1e-5}
_OF_FINITE_RANK = {"float64": 1e-12, "float32": 1e-5}  # what rounding in a factorisation asks for


def default_jitter(variance: Float[Array, "N"], finite: ArrayLike = 0.0) -> Float[Array, ""]:
    """Absolute jitter variance for a covariance with this diagonal: relative to its mean, by
    precision. The share `finite` of it is of finite rank, as a line's: that makes nothing
    singular, and may be a million times the rest.
    """
    variance = jnp.asarray(variance)
    finite, name = jnp.asarray(finite, variance.dtype), variance.dtype.name
    rest, of_finite = (f.get(name, 1e-5) for f in (_RELATIVE_JITTER, _OF_FINITE_RANK))
    return rest * jnp.mean(variance - finite) + of_finite * jnp.mean(finite)


def add_diagonal(A: Float[Array, "*batch N N"], d: ArrayLike) -> Float[Array, "*batch N N"]:
    """A + diag(d), d a scalar or (*batch, N); one elementwise pass that fuses with what made A,
    where a scatter would copy.
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
    `MAX_RAISES` do not suffice: no jitter repairs such a matrix. Differentiable in K and in `unit`,
    with k fixed. O(N^3 / 3) per attempt.
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


def robust_factors(K: Float[Array, "*batch N N"], unit: ArrayLike) -> Float[Array, "*batch N N"]:
    """L of `robust_cholesky` for every matrix."""
    one = lambda K, unit: robust_cholesky(K, unit)[0]  # noqa: E731
    return jnp.vectorize(one, signature="(n,n),()->(n,n)")(K, unit)


@robust_cholesky.defjvp
def _robust_cholesky_jvp(primals: tuple[Array, Array], tangents):
    L, added = robust_cholesky(*primals)
    power = added / jnp.where(added > 0, primals[1], 1.0)
    dadded = (power * tangents[1]).astype(added.dtype)
    dK = add_diagonal(tangents[0], dadded)
    inner = solve_lower(L, solve_lower(L, 0.5 * (dK + dK.T)).T)
    return (L, added), (L @ lower_half(inner), dadded)


def lower_half(A: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
    """Phi, the lower triangle with a halved diagonal: of a Cholesky factor L of K, dL = L Phi(L^-1
    dK L^-T) (Murray 2016, eq. 8).
    """
    i = jnp.arange(A.shape[-1])
    return jnp.where(i[:, None] > i, A, jnp.where(i[:, None] == i, 0.5 * A, 0.0))


def solve_factored(L: Float[Array, "N N"], b: Float[Array, "N *M"]) -> Float[Array, "N *M"]:
    """(L L^T)^-1 b."""
    return solve_lower(L, solve_lower(L, b), trans=1)


def tril_inverse(L: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """L^-1 of a lower triangular L by halving: [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1,
    C^-1]].

    About 2 N^3 / 3 multiply-adds in matrix products, where solving against the identity takes N^3.
    """
    n, h = L.shape[0], _halves(L.shape[0])
    if h is None:
        return solve_lower(L, jnp.eye(n, dtype=L.dtype))
    A, C = tril_inverse(L[:h, :h]), tril_inverse(L[h:, h:])
    B = -C @ (L[h:, :h] @ A)
    return jnp.block([[A, jnp.zeros((h, n - h), L.dtype)], [B, C]])


def tril_gram(L: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """L^T L of a lower triangular L by halving: about 2 N^3 / 3 operations, not 2 N^3."""
    if (h := _halves(L.shape[0])) is None:
        return L.T @ L
    B, C = L[h:, :h], L[h:, h:]
    cross = B.T @ C
    return jnp.block([[tril_gram(L[:h, :h]) + B.T @ B, cross], [cross.T, tril_gram(C)]])


def half_log_det(L: Float[Array, "N N"]) -> Float[Array, ""]:
    """0.5 log|L L^T| = sum_i log L_ii, nats."""
    return jnp.sum(jnp.log(jnp.diagonal(L)))


def product(A, B):
    """A @ B at full precision, as accelerators round float32 products to fewer bits."""
    return jnp.matmul(A, B, precision=lax.Precision.HIGHEST)


def _halves(n: int) -> int | None:
    """Where to cut n rows, or `None` where they are few."""
    return None if n <= BLOCK else n // 2


def transposed(A: Float[Array, "N M"]) -> Float[Array, "M N"]:
    """A^T in memory: on CPU products that fold a left transpose take up to twice as long."""
    return lax.optimization_barrier(A.T)


def tril_transpose_product(L: Float[Array, "M M"], C: Float[Array, "M B"]) -> Float[Array, "M B"]:
    """L^T C for a lower triangular L."""
    if (h := _halves(L.shape[0])) is None:
        return product(transposed(L), C)
    upper = tril_transpose_product(L[:h, :h], C[:h]) + product(transposed(L[h:, :h]), C[h:])
    return jnp.concatenate([upper, tril_transpose_product(L[h:, h:], C[h:])])


def tril_tril_product(A: Float[Array, "M M"], B: Float[Array, "M M"]) -> Float[Array, "M M"]:
    """A B of two lower triangular matrices: M^3 / 6 multiply-adds in the limit."""
    n, h = A.shape[0], _halves(A.shape[0])
    if h is None:
        return product(A, B)
    corner = product(A[h:, :h], B[:h, :h]) + product(A[h:, h:], B[h:, :h])
    zero = jnp.zeros((h, n - h), A.dtype)
    return jnp.block(
        [
            [tril_tril_product(A[:h, :h], B[:h, :h]), zero],
            [corner, tril_tril_product(A[h:, h:], B[h:, h:])],
        ]
    )


def tril_outer(L: Float[Array, "M M"]) -> Float[Array, "M M"]:
    """L L^T of a lower triangular L."""
    if (h := _halves(L.shape[0])) is None:
        return product(L, L.T)
    corner = product(L[:h, :h], L[h:, :h].T)
    last = symmetric_product(L[h:, :h], L[h:, :h]) + tril_outer(L[h:, h:])
    return jnp.block([[tril_outer(L[:h, :h]), corner], [corner.T, last]])


def symmetric_product(A: Float[Array, "M B"], C: Float[Array, "M B"]) -> Float[Array, "M M"]:
    """A C^T where that is symmetric, as for C = A diag(g): 3 M^2 B / 4 multiply-adds at one cut."""
    if (h := _halves(A.shape[0])) is None:
        return product(A, C.T)
    corner = product(A[h:], C[:h].T)
    return jnp.block(
        [[symmetric_product(A[:h], C[:h]), corner.T], [corner, symmetric_product(A[h:], C[h:])]]
    )


def lower_of_product(A: Float[Array, "M K"], B: Float[Array, "K M"]) -> Float[Array, "M M"]:
    """The lower triangle of A B; within the diagonal blocks all of it."""
    n, h = A.shape[0], _halves(A.shape[0])
    if h is None:
        return product(A, B)
    zero = jnp.zeros((h, n - h), A.dtype)
    corner = product(A[h:], B[:, :h])
    return jnp.block(
        [[lower_of_product(A[:h], B[:, :h]), zero], [corner, lower_of_product(A[h:], B[:, h:])]]
    )


# Rows up to which written-out loops are as fast: of ten rows they compile five times as long as
# LAPACK's calls, and run as long over 2000 matrices.
_FEW = 4


@jax.custom_jvp
def root(A: Float[Array, "*batch D D"]) -> Float[Array, "*batch D D"]:
    """Lower L with L L' = A; NaN, or zero columns, where A is not positive definite.

    Of the correlations, so that values in units of 1e8 and 1e-8 may stand beside each other.
    """
    L, scale = _scaled_root(A)
    return scale[..., :, None] * L


@root.defjvp
def _root_jvp(primals, tangents):
    L, dA = root(*primals), tangents[0]
    G = _lower_inverse(L)
    inner = G @ (0.5 * (dA + jnp.swapaxes(dA, -1, -2))) @ jnp.swapaxes(G, -1, -2)
    return L, L @ lower_half(inner)


@jax.custom_jvp
def inverse(A: Float[Array, "*batch D D"]) -> Float[Array, "*batch D D"]:
    """A^-1, as `root`; no numbers where a variance is zero."""
    L, scale = _scaled_root(A)
    G = _lower_inverse(L)
    return jnp.swapaxes(G, -1, -2) @ G / (scale[..., :, None] * scale[..., None, :])


@inverse.defjvp
def _inverse_jvp(primals, tangents):
    X = inverse(*primals)
    return X, -X @ tangents[0] @ X


@jax.custom_jvp
def log_det(A: Float[Array, "*batch D D"]) -> Float[Array, "*batch"]:
    """log|A|."""
    return 2.0 * jnp.sum(jnp.log(jnp.diagonal(root(A), axis1=-2, axis2=-1)), -1)


@log_det.defjvp
def _log_det_jvp(primals, tangents):
    return log_det(*primals), jnp.sum(inverse(*primals) * tangents[0], (-2, -1))


@jax.jit
def _scaled_root(A):
    """(Root of the correlations, the roots of the diagonal)."""
    scale = jnp.sqrt(jnp.diagonal(A, axis1=-2, axis2=-1))
    R = A / (scale[..., :, None] * scale[..., None, :])
    return small.lower_root(R) if A.shape[-1] <= _FEW else _over_batch(cholesky, R), scale


@jax.jit
def _lower_inverse(L):
    if L.shape[-1] <= _FEW:
        return small.lower_inverse(L)
    return _over_batch(lambda x: solve_lower(x, jnp.eye(len(x), dtype=x.dtype)), L)


def _over_batch(function, A):
    flat = A.reshape(-1, *A.shape[-2:])
    # one matrix needs no vmap, under which LAPACK's results are copied
    found = function(flat[0])[None] if len(flat) == 1 else jax.vmap(function)(flat)
    return found.reshape(A.shape)
