"""Roots, inverses and determinants of batches of symmetric positive definite matrices of any size,
differentiable.

Up to four rows the loops are written out over the batch (`numerics.blocks`); above, LAPACK takes
one matrix after another (`numerics.linalg`). O(D^3) a matrix. Derivatives are written down,
products with the inverse, so that differentiating traces and compiles no second set of loops.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.numerics import blocks as small
from ppl_gp.numerics.linalg import cholesky, lower_half, solve_lower

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
