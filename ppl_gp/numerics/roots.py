"""Roots, inverses and determinants of batches of symmetric positive definite matrices of any size,
differentiable.

Up to ten rows the loops are written out over the batch (`numerics.small`); above, LAPACK takes one
matrix after another (`numerics.lapack`). O(D^3) a matrix.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.numerics import small
from ppl_gp.numerics.lapack import cholesky, solve_lower

_FEW = 10  # rows up to which written-out loops are faster, and compile in well under a second


def root(A: Float[Array, "*batch D D"]) -> Float[Array, "*batch D D"]:
    """Lower L with L L' = A; NaN, or zero columns, where A is not positive definite.

    Of the correlations, so that values in units of 1e8 and 1e-8 may stand beside each other.
    """
    R, scale = _scaled(A)
    L = small.lower_root(R) if A.shape[-1] <= _FEW else _over_batch(_root, R)
    return scale[..., :, None] * L


def inverse(A: Float[Array, "*batch D D"]) -> Float[Array, "*batch D D"]:
    """A^-1, as `root`."""
    R, scale = _scaled(A)
    found = small.inverse(R) if A.shape[-1] <= _FEW else _over_batch(_inverse, R)
    return found / (scale[..., :, None] * scale[..., None, :])


def log_det(A: Float[Array, "*batch D D"]) -> Float[Array, "*batch"]:
    """log|A|."""
    return 2.0 * jnp.sum(jnp.log(jnp.diagonal(root(A), axis1=-2, axis2=-1)), -1)


def _scaled(A):
    """(A with a unit diagonal, the roots of its diagonal)."""
    scale = jnp.sqrt(jnp.diagonal(A, axis1=-2, axis2=-1))
    return A / (scale[..., :, None] * scale[..., None, :]), scale


def _over_batch(function, A):
    flat = A.reshape(-1, *A.shape[-2:])
    # one matrix needs no vmap, under which LAPACK's results are copied
    found = function(flat[0])[None] if len(flat) == 1 else jax.vmap(function)(flat)
    return found.reshape(A.shape)


@jax.custom_jvp
def _root(A):
    return cholesky(A)


@_root.defjvp
def _root_jvp(primals, tangents):
    L, dA = _root(primals[0]), tangents[0]
    # dL = L Phi(L^-1 dA L^-T), Phi the lower triangle with a halved diagonal (Murray 2016, eq. 8)
    inner = solve_lower(L, solve_lower(L, 0.5 * (dA + dA.T)).T)
    return L, L @ (jnp.tril(inner) - 0.5 * jnp.diag(jnp.diag(inner)))


def _inverse(A):
    half = solve_lower(_root(A), jnp.eye(len(A), dtype=A.dtype))
    return half.T @ half
