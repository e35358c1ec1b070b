"""Marginals of f under q(v): the inner loop of everything sparse, with a hand-written reverse rule.

With A = R^-1 Cov[u, f(X)] and q(v) = N(m, S), P = I - S:
mean_n = m_X + a_n^T m,  variance_n = k_nn - a_n^T P a_n.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float

from ppl_gp.numerics.arrow import Arrow, ArrowCovariance
from ppl_gp.numerics.blocks import product_blocks
from ppl_gp.numerics.linalg import (
    lower_of_product,
    product,
    symmetric_product,
    tril_transpose_product,
)
from ppl_gp.sparse.parts import LevelColumns
from ppl_gp.sparse.root import DenseRoot, Root


def explained(
    root: Root, C: Any, mean: Float[Array, "*F M"], reduction: Any
) -> tuple[Float[Array, "*F B"], Float[Array, "*F B"]]:
    """(a_n^T m, a_n^T P a_n) for C = Cov[u, f(X)], (M, B); several functions F share the root.

    `reduction` is P, (M, M), or its diagonal, (M,), or an `Arrow`, which costs O(V^2 B) where the
    rows see one level each. A dense root costs 2 M^2 B multiply-adds
    forward and 2 M^2 B in reverse (about 6 M^3 besides), and half of that for each further
    function; differentiating through triangular solves takes 10 M^2 B.
    """
    if isinstance(reduction, Arrow):
        return _explained_arrow(root.whiten(C), mean, reduction)
    if mean.ndim > 1 and reduction.ndim > mean.ndim:
        return _of_several(root.whiten(C), mean, reduction)
    if mean.ndim > 1:
        return jax.vmap(partial(explained, root, C))(mean, reduction)
    if reduction.ndim == 1:
        A = root.whiten(C)
        return mean @ A, reduction @ A**2
    if isinstance(root, DenseRoot):
        return _explained_dense(root.W, root.omega, C, mean, reduction)
    return _explained(root.whiten(C), mean, reduction)


def gram(A: Any) -> Float[Array, "B B"]:
    """A^T A."""
    if isinstance(A, LevelColumns):
        same = jnp.where(A.index[:, None] == A.index, A.weight[:, None] * A.weight, 0.0)
        return product(A.few.T, A.few) + same
    return product(A.T, A)


def squares(A: Any) -> Float[Array, "B"]:
    """The diagonal of A^T A."""
    if isinstance(A, LevelColumns):
        return squares(A.few) + A.weight**2
    return jnp.sum(A**2, 0)


def explained_jointly(A: Any, mean, reduction: Any) -> Float[Array, "*F B B"]:
    """A^T P A."""
    if isinstance(reduction, Arrow):
        return gram(A) - _arrow_quadratic(A, covariance_of_arrow(reduction))
    dense = reduction.ndim > mean.ndim
    return product(A.T, reduction @ A if dense else reduction[..., None] * A)


def explained_blocks(A, reduction: Any, like: Float[Array, "R R B"]) -> Float[Array, "R R B"]:
    """The blocks of A^T P A within a row, of A (M, R B). O(M^2 R B + M R^2 B)."""
    PA = product(reduction, A) if reduction.ndim == 2 else reduction[:, None] * A
    return product_blocks(A, PA, like)


def reduction_of_some(reduction: Any, start: int, size: int) -> Array:
    """P of some of the unknowns, side by side; of an `Arrow`, of the few."""
    if isinstance(reduction, Arrow):
        at = start if start < reduction.start else start - len(reduction.own)
        return reduction_of_some(reduction.block, at, size)
    some = slice(start, start + size)
    return reduction[some, some] if reduction.ndim == 2 else reduction[some]


def covariance_of_arrow(reduction: Arrow) -> ArrowCovariance:
    """Cov q(v) = I - P by its conditionals."""
    return reduction.times(-1.0).plus_diagonal(1.0).covariance()


def _arrow_quadratic(A: Any, S: ArrowCovariance) -> Float[Array, "B B"]:
    """A^T S A: of rows that see one level each, O(B^2 V), with no array of (levels x B)."""
    if not isinstance(A, LevelColumns):
        X, Y = S.halves(A)
        return gram(X) + gram(Y)
    few = S.L.T @ (A.few + S.slopes[A.index].T * A.weight)
    own = jnp.sqrt(S.given[A.index]) * A.weight
    return gram(LevelColumns(few, A.index, own, A.num, A.start))


def _explained_arrow(A: Any, m, P: Arrow):
    if not isinstance(A, LevelColumns):
        X, Y = covariance_of_arrow(P).halves(A)
        return m @ A, squares(A) - squares(X) - squares(Y)
    few, levels = P.split(m)
    mean, square = _explained(A.few, few, P.block)
    across = jnp.sum(P.across[A.index] * A.few.T, 1)
    square = square + A.weight * (2.0 * across + A.weight * P.own[A.index])
    return mean + A.weight * levels[A.index], square


def _of_several(A, mean, reduction):
    """One function after another, so that M x B arrays stay in the processor's cache."""
    M, F = mean.shape[-1], mean.shape[:-1]
    each = (jnp.reshape(mean, (-1, M)), jnp.reshape(reduction, (-1, M, M)))
    m, square = lax.map(lambda q: _explained(A, *q), each)
    return jnp.reshape(m, (*F, -1)), jnp.reshape(square, (*F, -1))


@jax.custom_vjp
def _explained(A, m, P):
    return _forward(A, m, P)[:2]


# Under `vmap`, too, one M x B problem after the other.
@sequential_vmap
def _forward(A, m, P):
    PA = product(P, A)
    return m @ A, jnp.sum(A * PA, 0), PA


@sequential_vmap
def _reverse(A, PA, m, g_mean, g_square):
    return 2.0 * PA * g_square + m[:, None] * g_mean, A @ g_mean, symmetric_product(A * g_square, A)


def _explained_forward(A, m, P):
    mean, square, PA = _forward(A, m, P)
    return (mean, square), (A, PA, m)


_explained.defvjp(_explained_forward, lambda saved, bars: _reverse(*saved, *bars))


@jax.custom_vjp
def _explained_dense(W, omega, C, m, P):
    return _dense_forward(W, C, m, P)[:2]


@sequential_vmap
def _dense_forward(W, C, m, P):
    A = product(W, C)
    return *_forward(A, m, P), A


@sequential_vmap
def _dense_reverse(W, P, A, PA, m, g_mean, g_square):
    A_bar, m_bar, P_bar = _reverse(A, PA, m, g_mean, g_square)
    # omega_bar = -A_bar A^T, and A_bar A^T = 2 P (A g A^T) + m (A g_mean)^T: a product of M^3 in
    # place of M^2 B.
    # Only its lower triangle counts: omega is lower triangular.
    omega_bar = -2.0 * lower_of_product(P, P_bar) - m[:, None] * m_bar
    return omega_bar, tril_transpose_product(W, A_bar), m_bar, P_bar


def _explained_dense_forward(W, omega, C, m, P):
    mean, square, PA, A = _dense_forward(W, C, m, P)
    return (mean, square), (W, P, A, PA, m)


_explained_dense.defvjp(
    _explained_dense_forward,
    lambda saved, bars: (jnp.zeros_like(saved[0]), *_dense_reverse(*saved, *bars)),
)
