"""Squared distances between rows, and a square root that has a derivative at zero."""

from functools import partial, reduce
from operator import add

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.numerics.linalg import product

# up to here differences, exact but O(D) passes over the matrix; above it one matrix product
MAX_DIRECT_COLUMNS = 16


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def squared_distance(
    A: Float[Array, "N1 D"], B: Float[Array, "N2 D"], same: bool = False
) -> Float[Array, "N1 N2"]:
    """r2_ij = sum_d (a_id - b_jd)^2; `same` says that A and B are one array, so that the diagonal
    is exactly zero.

    Up to 16 columns the differences themselves are taken: no cancellation, and equal rows are at
    distance 0. Above, the expansion |a|^2 + |b|^2 - 2 a.b of centred inputs, clipped at 0: its
    absolute error is about eps max|a|^2.

    The derivative is written as two products with thin matrices. Its transpose, what a gradient
    needs, then reads the cotangent twice whatever D is, where differentiating the sum of squares
    reads and writes it several times a column.
    """
    return _by_differences(A, B) if A.shape[1] <= MAX_DIRECT_COLUMNS else _by_products(A, B, same)


@squared_distance.defjvp
def _squared_distance_jvp(same, primals, tangents):
    # dr2_ij = 2 (a_i - b_j).(da_i - db_j), multiplied out; any common shift of a and b leaves it as
    # it is.
    A, B = _centred(*primals)
    dA, dB = tangents
    from_A = product(_append(-dA, jnp.sum(A * dA, 1)), _append(B, jnp.ones_like(B[:, 0])).T)
    from_B = product(_append(-A, jnp.ones_like(A[:, 0])), _append(dB, jnp.sum(B * dB, 1)).T)
    return squared_distance(*primals, same), 2.0 * (from_A + from_B)


def _by_differences(A, B):
    # One column at a time, so that XLA fuses the sum into one pass and no (N1, N2, D) array exists.
    # XLA would also fuse what makes the inputs (scaling, a layer's draws) into that pass, and
    # repeat it for every pair; it does not fuse a product, so the product with I stops it (an
    # optimization barrier does not, on CPU).
    A, B = (product(X, jnp.eye(X.shape[1], dtype=X.dtype)) for X in (A, B))
    return reduce(add, ((A[:, d, None] - B[None, :, d]) ** 2 for d in range(A.shape[1])))


def _by_products(A, B, same):
    A, B = _centred(A, B)
    r2 = jnp.sum(A**2, 1)[:, None] + jnp.sum(B**2, 1)[None, :] - 2.0 * product(A, B.T)
    r2 = jnp.maximum(r2, 0.0)
    return jnp.where(jnp.eye(A.shape[0], dtype=bool), 0.0, r2) if same else r2


def _centred(A, B):
    centre = middle(A)
    return A - centre, B - centre


def middle(X: Float[Array, "N D"]) -> Float[Array, "D"]:
    """The mean, without bad values, to measure from where only differences count."""
    return lax.stop_gradient(jnp.mean(jnp.where(jnp.isfinite(X), X, 0.0), 0))


def _append(A, column):
    return jnp.concatenate([A, column[:, None]], 1)


def safe_sqrt(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """sqrt(x) for x >= 0 whose derivative at 0 is 0, not inf: below the smallest normal number x
    counts as that number.

    No `where(x == 0, ...)`: XLA may compute x anew for each use and round it differently (fused
    multiply-adds), so that two tests of one x disagree. A guard like this one, continuous across
    its threshold, is safe.
    """
    return jnp.sqrt(jnp.maximum(x, jnp.finfo(x.dtype).tiny))
