"""Matrices that couple the R functions of a datum and no two data: blocks (R, R, N) for vectors
(R N,), functions outermost.

For one function they are vectors (N,), and every function here is the elementwise one. For a
softmax they are diag(d) - d d^T / sum d, given by d, (R, N): "minus rank one".

Factors and inverses of many small matrices (..., R, R) are loops over R that are written out,
elementwise over the batch: LAPACK's batched kernels on CPU wait in the thread pool that runs the
program (`numerics.linalg`), and cost more than the arithmetic of matrices of ten rows. Cost: R^3
operations per entry of the batch, and R^2 to compile. Differentiable.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def num_functions(T: Float[Array, "..."]) -> int:
    """R."""
    return 1 if T.ndim == 1 else T.shape[0]


def as_blocks(T: Float[Array, "..."], draws: int = 0) -> Float[Array, "..."]:
    """T with minus rank one written out; `draws` axes stand in front of it."""
    if T.ndim - draws != 2:
        return T
    share = _over(T, jnp.sum(T, -2, keepdims=True))
    eye = jnp.eye(T.shape[-2], dtype=T.dtype)[:, :, None]
    return eye * T[..., None, :, :] - T[..., :, None, :] * share[..., None, :, :]


def pulled_to(T: Float[Array, "..."], bar: Float[Array, "..."]) -> Float[Array, "..."]:
    """The cotangent of T as it is given, of that of its blocks."""
    return bar if T.ndim != 2 else jax.vjp(as_blocks, T)[1](bar)[0]


def _over(x: Array, total: Array):
    return jnp.where(total == 0, 0.0, x / jnp.where(total == 0, 1.0, total))


def times(T: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """T x, x (R N,) or (R N, J). O(R^2 N J)."""
    if T.ndim == 1:
        return T * x if x.ndim == 1 else T[:, None] * x
    if T.ndim == 2:
        scaled = T[..., None] * jnp.reshape(x, (*T.shape, -1))
        whole = jnp.sum(scaled, 0, keepdims=True)
        share = _over(T, jnp.sum(T, 0, keepdims=True))[..., None]
        return jnp.reshape(scaled - share * whole, x.shape)
    split = jnp.reshape(x, (T.shape[0], T.shape[2], -1))
    return jnp.reshape(jnp.einsum("abn,bnj->anj", T, split), x.shape)


def per_datum(x: Float[Array, "RN"], T: Float[Array, "..."]) -> Float[Array, "N"]:
    """Sums over the functions of a datum; T says how many there are."""
    return x if T.ndim == 1 else jnp.sum(jnp.reshape(x, (T.shape[0], -1)), 0)


def diagonal_of(T: Float[Array, "..."]) -> Float[Array, "RN"]:
    """The diagonal."""
    T = as_blocks(T)
    return T if T.ndim == 1 else jnp.ravel(jnp.einsum("aan->an", T))


def times_transposed(T: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """T^T x, as `times`, of numbers or blocks."""
    return times(T if T.ndim == 1 else jnp.swapaxes(T, 0, 1), x)


def roots(T: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """(S with S S^T = T, G with S G r = r for r = S w) of positive semi-definite numbers or blocks;
    directions without weight are zero in both.
    """
    if T.ndim == 1:
        S = jnp.sqrt(T)
        return S, _over(jnp.ones_like(S), S)
    S = lower_root(jnp.moveaxis(T, -1, 0))
    return jnp.moveaxis(S, 0, -1), jnp.moveaxis(lower_inverse(S), 0, -1)


def split_by(S: Float[Array, "..."], G: Float[Array, "..."], r: Array):
    """(w, rest) with r = S w + rest of `roots` (S, G), rest without weight: of numbers exactly zero
    where there is any, as it is multiplied by large ones.
    """
    if S.ndim == 1:
        return _over(r, S), jnp.where(S == 0.0, r, 0.0)
    w = times(G, r)
    return w, r - times(S, w)


def matrix_of(T: Float[Array, "..."]) -> Float[Array, "RN RN"]:
    """T as a matrix."""
    if T.ndim == 1:
        return jnp.diag(T)
    T = as_blocks(T)
    R, _, N = T.shape
    whole = jnp.einsum("abn,nm->anbm", T, jnp.eye(N, dtype=T.dtype))
    return jnp.reshape(whole, (R * N, R * N))


def blocks_in(M: Float[Array, "RN RN"], functions: int) -> Float[Array, "..."]:
    """The part of a matrix that is within a datum: its diagonal, or its blocks."""
    if functions == 1:
        return jnp.diagonal(M)
    whole = jnp.reshape(M, (functions, len(M) // functions, functions, -1))
    return jnp.einsum("anbn->abn", whole)


def gram_blocks(V: Float[Array, "U RN"], like: Float[Array, "..."]) -> Float[Array, "..."]:
    """`blocks_in` of V^T V, without the matrix."""
    return product_blocks(V, V, like)


def product_blocks(A, B, like: Float[Array, "..."]) -> Float[Array, "..."]:
    """`blocks_in` of A^T B, both (U, R N), without the matrix."""
    if like.ndim == 1:
        return jnp.sum(A * B, 0)
    A, B = (jnp.reshape(x, (-1, like.shape[0], like.shape[-1])) for x in (A, B))
    return jnp.einsum("uan,ubn->abn", A, B)


def outer(x, y, like: Float[Array, "..."]) -> Float[Array, "..."]:
    """`blocks_in` of x y^T, made symmetric."""
    if like.ndim == 1:
        return x * y
    x, y = (jnp.reshape(v, (like.shape[0], -1)) for v in (x, y))
    one = x[:, None] * y
    return 0.5 * (one + jnp.swapaxes(one, 0, 1))


def is_positive(T: Float[Array, "..."]) -> Array:
    """Whether T is positive semi-definite, of blocks up to rounding."""
    return jnp.all(T >= 0 if T.ndim < 3 else is_semidefinite(jnp.moveaxis(T, -1, 0)))


def positive_part(T: Float[Array, "..."]) -> Float[Array, "..."]:
    """T without what is negative; of blocks that are not semi-definite diagonal ones above them."""
    if T.ndim < 3:
        return jnp.maximum(T, 0.0)
    blocks = jnp.moveaxis(T, -1, 0)
    whole = is_semidefinite(blocks)[:, None, None]
    return jnp.moveaxis(jnp.where(whole, blocks, majorant(blocks)), 0, -1)


_NONE = 100  # roundings of the largest diagonal entry: a pivot below has no weight
_LEFT = 1e5  # roundings that may be left of a positive semi-definite matrix


def lower_root(A: Float[Array, "*batch R R"]) -> Float[Array, "*batch R R"]:
    """Lower L with L L^T = A, positive semi-definite; directions without weight are zero columns.
    What is not positive semi-definite loses its negative part in an unspecified way.
    """
    return _eliminated(A)[0]


def is_semidefinite(A: Float[Array, "*batch R R"]) -> Bool[Array, "*batch"]:
    """Whether A is positive semi-definite, up to rounding: elimination leaves nothing."""
    _, rest = _eliminated(A)
    return jnp.max(jnp.abs(rest), (-1, -2)) <= _LEFT * jnp.finfo(A.dtype).eps * _scale(A)


def is_definite(A: Float[Array, "*batch R R"]) -> Bool[Array, "*batch"]:
    """Whether A is positive definite."""
    L, _ = _eliminated(A)
    return is_semidefinite(A) & jnp.all(jnp.diagonal(L, axis1=-2, axis2=-1) > 0, -1)


def lower_inverse(L: Float[Array, "*batch R R"]) -> Float[Array, "*batch R R"]:
    """L^-1 of a lower L; where columns are zero, G with L G r = r for every r = L w."""
    R, rows = L.shape[-1], []
    unit = jnp.eye(R, dtype=L.dtype)
    for j in range(R):
        known = sum((L[..., j, k, None] * rows[k] for k in range(j)), jnp.zeros(R, L.dtype))
        pivot = L[..., j, j, None]
        left = (unit[j] - known) / jnp.where(pivot > 0, pivot, 1.0)
        rows.append(jnp.where(pivot > 0, left, 0.0))
    return jnp.stack(rows, -2)


def inverse(A: Float[Array, "*batch R R"]) -> Float[Array, "*batch R R"]:
    """A^-1 of a positive definite A."""
    half = lower_inverse(lower_root(A))
    return jnp.swapaxes(half, -1, -2) @ half


def log_det(A: Float[Array, "*batch R R"]) -> Float[Array, "*batch"]:
    """log|A| of a positive definite A."""
    return 2.0 * jnp.sum(jnp.log(jnp.diagonal(lower_root(A), axis1=-2, axis2=-1)), -1)


def majorant(A: Float[Array, "*batch R R"]) -> Float[Array, "*batch R R"]:
    """A diagonal matrix that is above A and -A: the sums of the absolute values of its rows."""
    return jnp.eye(A.shape[-1], dtype=A.dtype) * jnp.sum(jnp.abs(A), -1, keepdims=True)


def _scale(A: Array):
    return jnp.max(jnp.abs(jnp.diagonal(A, axis1=-2, axis2=-1)), -1)


def _eliminated(A: Array):
    """(L, what is left of A)."""
    least = _NONE * jnp.finfo(A.dtype).eps * _scale(A)
    columns, rest = [], A
    for j in range(A.shape[-1]):
        pivot = rest[..., j, j]
        used = pivot > least
        root = jnp.sqrt(jnp.where(used, pivot, 1.0))
        column = jnp.where(used[..., None], rest[..., :, j] / root[..., None], 0.0)
        column = jnp.where(jnp.arange(A.shape[-1]) < j, 0.0, column)
        rest = rest - column[..., :, None] * column[..., None, :]
        columns.append(column)
    return jnp.stack(columns, -1), rest


def flatten(latent: dict) -> tuple[Float[Array, "F B"], Callable]:
    """All functions as rows, and the way back from (F, B) to {site: (*C, B)}."""
    shapes = {k: x.shape for k, x in latent.items()}
    rows = jnp.concatenate([jnp.reshape(x, (-1, x.shape[-1])) for x in latent.values()])

    def rebuild(rows):
        out, start = {}, 0
        for name, shape in shapes.items():
            size = math.prod(shape[:-1])
            out[name] = jnp.reshape(rows[start : start + size], shape)
            start += size
        return out

    return rows, rebuild
