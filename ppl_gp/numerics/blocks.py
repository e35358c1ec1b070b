"""Matrices that couple the R functions of a datum and no two data: blocks (R, R, N) beside vectors
(R N,), functions outermost.

For one function they are vectors (N,), and every function here is the elementwise one.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

Blocks = Float[Array, "*S N"] | Float[Array, "*S R R N"]


def num_functions(T: Float[Array, "..."]) -> int:
    """R."""
    return T.shape[0] if T.ndim == 3 else 1


def times(T: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """T x, x (R N,) or (R N, J). O(R^2 N J)."""
    if T.ndim == 1:
        return T * x if x.ndim == 1 else T[:, None] * x
    split = jnp.reshape(x, (T.shape[0], T.shape[2], -1))
    return jnp.reshape(jnp.einsum("abn,bnj->anj", T, split), x.shape)


def per_datum(x: Float[Array, "RN"], T: Float[Array, "..."]) -> Float[Array, "N"]:
    """Sums over the functions of a datum; T says how many there are."""
    return x if T.ndim == 1 else jnp.sum(jnp.reshape(x, (T.shape[0], -1)), 0)


def diagonal_of(T: Float[Array, "..."]) -> Float[Array, "RN"]:
    """The diagonal."""
    return T if T.ndim == 1 else jnp.ravel(jnp.einsum("aan->an", T))


def times_transposed(T: Float[Array, "R R N"], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """T^T x, as `times`."""
    return times(jnp.swapaxes(T, 0, 1), x)


def roots(T: Float[Array, "R R N"]) -> tuple[Float[Array, "R R N"], Float[Array, "R R N"]]:
    """(S with S S^T = T, its pseudo-inverse) of positive semi-definite blocks; directions without
    weight are zero in both.
    """
    values, V = jnp.linalg.eigh(jnp.moveaxis(T, -1, 0))
    least = 100 * jnp.finfo(T.dtype).eps * jnp.max(jnp.abs(values), -1, keepdims=True)
    root = jnp.sqrt(jnp.where(values > least, values, 0.0))
    inverse = jnp.where(root > 0, 1.0 / jnp.where(root > 0, root, 1.0), 0.0)
    return jnp.einsum("nai,ni->ain", V, root), jnp.einsum("nai,ni->ian", V, inverse)


def matrix_of(T: Float[Array, "..."]) -> Float[Array, "RN RN"]:
    """As a matrix."""
    if T.ndim == 1:
        return jnp.diag(T)
    R, _, N = T.shape
    whole = jnp.einsum("abn,nm->anbm", T, jnp.eye(N, dtype=T.dtype))
    return jnp.reshape(whole, (R * N, R * N))


def blocks_in(M: Float[Array, "RN RN"], like: Float[Array, "..."]) -> Float[Array, "..."]:
    """The part of a matrix that has the form of `like`: its diagonal, or its blocks."""
    if like.ndim == 1:
        return jnp.diagonal(M)
    R, _, N = like.shape
    return jnp.einsum("anbn->abn", jnp.reshape(M, (R, N, R, N)))


def gram_blocks(V: Float[Array, "U RN"], like: Float[Array, "..."]) -> Float[Array, "..."]:
    """`blocks_in` of V^T V, without the matrix."""
    if like.ndim == 1:
        return jnp.sum(V**2, 0)
    split = jnp.reshape(V, (-1, like.shape[0], like.shape[2]))
    return jnp.einsum("uan,ubn->abn", split, split)


def product_blocks(A, B, like: Float[Array, "..."]) -> Float[Array, "..."]:
    """`blocks_in` of A^T B, both (U, R N), without the matrix."""
    if like.ndim == 1:
        return jnp.sum(A * B, 0)
    A, B = (jnp.reshape(x, (-1, like.shape[0], like.shape[2])) for x in (A, B))
    return jnp.einsum("uan,ubn->abn", A, B)


def outer(x, y, like: Float[Array, "..."]) -> Float[Array, "..."]:
    """`blocks_in` of x y^T, made symmetric."""
    if like.ndim == 1:
        return x * y
    x, y = (jnp.reshape(v, (like.shape[0], -1)) for v in (x, y))
    one = x[:, None] * y
    return 0.5 * (one + jnp.swapaxes(one, 0, 1))


def is_positive(T: Float[Array, "..."]) -> Array:
    """Whether T is positive semi-definite, up to rounding of its largest entry in a block."""
    if T.ndim == 1:
        return jnp.all(T >= 0)
    values = jnp.linalg.eigvalsh(jnp.moveaxis(T, -1, 0))
    rounding = 100 * jnp.finfo(T.dtype).eps * jnp.max(jnp.abs(values), -1, keepdims=True)
    return jnp.all(values >= -rounding)


def positive_part(T: Float[Array, "..."]) -> Float[Array, "..."]:
    """T without its negative eigenvalues."""
    if T.ndim == 1:
        return jnp.maximum(T, 0.0)
    values, V = jnp.linalg.eigh(jnp.moveaxis(T, -1, 0))
    return jnp.einsum("nai,ni,nbi->abn", V, jnp.maximum(values, 0.0), V)
