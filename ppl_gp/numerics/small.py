"""Factors and inverses of many small matrices at once, (..., R, R), R a few functions: loops over R
that are written out, elementwise over the batch.

LAPACK's batched kernels on CPU wait in the thread pool that runs the program (`numerics.lapack`),
and cost more than the arithmetic of matrices of ten rows. Cost: R^3 operations an entry of the
batch, and R^2 to compile. Differentiable.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

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
    limit = _LEFT * jnp.finfo(A.dtype).eps * _scale(A)
    return jnp.max(jnp.abs(rest), (-1, -2)) <= limit


def is_definite(A: Float[Array, "*batch R R"]) -> Bool[Array, "*batch"]:
    """Whether A is positive definite."""
    L, _ = _eliminated(A)
    return is_semidefinite(A) & jnp.all(jnp.diagonal(L, axis1=-2, axis2=-1) > 0, -1)


def lower_inverse(L: Float[Array, "*batch R R"]) -> Float[Array, "*batch R R"]:
    """L^-1 of a lower triangular L; where columns of L are zero, G with L G r = r for every r = L
    w.
    """
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


def _scale(A):
    return jnp.max(jnp.abs(jnp.diagonal(A, axis1=-2, axis2=-1)), -1)


def _eliminated(A):
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
