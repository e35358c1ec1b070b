"""Products with triangular factors and symmetric products, by halving: what is known to be zero, or
a mirror, is not computed.

Below `BLOCK` rows one plain product is faster. Operands' upper triangles are taken to be zero, not
read.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

BLOCK = 256


def product(A, B):
    """A @ B at the inputs' full precision: accelerators round float32 products to fewer bits by
    default.
    """
    return jnp.matmul(A, B, precision=lax.Precision.HIGHEST)


def _halves(n: int) -> int | None:
    """Where to cut n rows, or `None` where they are few."""
    return None if n <= BLOCK else n // 2


def transposed(A: Float[Array, "N M"]) -> Float[Array, "M N"]:
    """A^T in memory: on CPU a product that folds the transpose of its left operand takes up to
    twice as long.
    """
    return lax.optimization_barrier(A.T)


def tril_transpose_product(L: Float[Array, "M M"], C: Float[Array, "M B"]) -> Float[Array, "M B"]:
    """L^T C for a lower triangular L."""
    h = _halves(L.shape[0])
    if h is None:
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
    h = _halves(L.shape[0])
    if h is None:
        return product(L, L.T)
    corner = product(L[:h, :h], L[h:, :h].T)
    last = symmetric_product(L[h:, :h], L[h:, :h]) + tril_outer(L[h:, h:])
    return jnp.block([[tril_outer(L[:h, :h]), corner], [corner.T, last]])


def symmetric_product(A: Float[Array, "M B"], C: Float[Array, "M B"]) -> Float[Array, "M M"]:
    """A C^T where that is symmetric, as for C = A diag(g): 3 M^2 B / 4 multiply-adds at one cut."""
    h = _halves(A.shape[0])
    if h is None:
        return product(A, C.T)
    corner = product(A[h:], C[:h].T)
    return jnp.block(
        [[symmetric_product(A[:h], C[:h]), corner.T], [corner, symmetric_product(A[h:], C[h:])]]
    )


def lower_of_product(A: Float[Array, "M K"], B: Float[Array, "K M"]) -> Float[Array, "M M"]:
    """The lower triangle of A B; what stands above the diagonal blocks is zero, within them it is
    not.
    """
    n, h = A.shape[0], _halves(A.shape[0])
    if h is None:
        return product(A, B)
    zero = jnp.zeros((h, n - h), A.dtype)
    corner = product(A[h:], B[:, :h])
    return jnp.block(
        [[lower_of_product(A[:h], B[:, :h]), zero], [corner, lower_of_product(A[h:], B[:, h:])]]
    )
