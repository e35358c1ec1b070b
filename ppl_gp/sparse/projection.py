"""Marginals of f under q(v): the inner loop of everything sparse, with a hand-written reverse rule.

With A = R^-1 Cov[u, f(X)] and q(v) = N(m, S), P = I - S:
mean_n = m_X + a_n^T m,  variance_n = k_nn - a_n^T P a_n.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.numerics.triangular import lower_of_product, product, symmetric_product, tril_transpose_product
from ppl_gp.sparse.root import DenseRoot, Root


def explained(
    root: Root, C: Float[Array, "M B"], mean: Float[Array, "*F M"], reduction: Float[Array, "..."]
) -> tuple[Float[Array, "*F B"], Float[Array, "*F B"]]:
    """(a_n^T m, a_n^T P a_n) for C = Cov[u, f(X)]; several functions F share the root.

    `reduction` is P, (M, M), or its diagonal, (M,). A dense root costs 2 M^2 B multiply-adds forward and 2 M^2 B in reverse
    (about 6 M^3 besides), and half of that for each further function; differentiating through triangular solves takes 10 M^2 B.
    """
    if mean.ndim > 1 and reduction.ndim > mean.ndim:
        M, F = mean.shape[-1], mean.shape[:-1]
        m, square = _explained_many(root.whiten(C), jnp.reshape(mean, (-1, M)), jnp.reshape(reduction, (-1, M, M)))
        return jnp.reshape(m, (*F, -1)), jnp.reshape(square, (*F, -1))
    if mean.ndim > 1:
        return jax.vmap(partial(explained, root, C))(mean, reduction)
    if reduction.ndim == 1:
        A = root.whiten(C)
        return mean @ A, reduction @ A**2
    if isinstance(root, DenseRoot):
        return _explained_dense(root.W, root.omega, C, mean, reduction)
    return _explained(root.whiten(C), mean, reduction)


@jax.custom_vjp
def _explained(A, m, P):
    return m @ A, jnp.sum(A * product(P, A), 0)


def _explained_forward(A, m, P):
    PA = product(P, A)
    return (m @ A, jnp.sum(A * PA, 0)), (A, PA, m)


def _explained_reverse(saved, cotangents):
    A, PA, m = saved
    g_mean, g_square = cotangents
    return 2.0 * PA * g_square + m[:, None] * g_mean, A @ g_mean, symmetric_product(A * g_square, A)


_explained.defvjp(_explained_forward, _explained_reverse)


@jax.custom_vjp
def _explained_dense(W, omega, C, m, P):
    return _explained(product(W, C), m, P)


def _dense_forward(W, omega, C, m, P):
    out, saved = _explained_forward(product(W, C), m, P)
    return out, (W, P, *saved)


def _dense_reverse(saved, cotangents):
    W, P, A, _, m = saved
    A_bar, m_bar, P_bar = _explained_reverse(saved[2:], cotangents)
    # omega_bar = -A_bar A^T, and A_bar A^T = 2 P (A g A^T) + m (A g_mean)^T: a product of M^3 in place of M^2 B.
    # Only its lower triangle counts: omega is lower triangular.
    omega_bar = -2.0 * lower_of_product(P, P_bar) - m[:, None] * m_bar
    return jnp.zeros_like(W), omega_bar, tril_transpose_product(W, A_bar), m_bar, P_bar


_explained_dense.defvjp(_dense_forward, _dense_reverse)


@jax.custom_vjp
def _explained_many(A, m, P):
    """`_explained` for F functions, whose cotangents of A are summed before they go further."""
    return m @ A, jnp.sum(A * _each(P, A), 1)


def _each(P, A):
    """P_f A of every function in one product, (F, M, B)."""
    return jnp.reshape(product(jnp.reshape(P, (-1, P.shape[-1])), A), (*P.shape[:-1], A.shape[1]))


def _many_forward(A, m, P):
    PA = _each(P, A)
    return (m @ A, jnp.sum(A * PA, 1)), (A, PA, m)


def _many_reverse(saved, cotangents):
    A, PA, m = saved
    g_mean, g_square = cotangents
    A_bar = 2.0 * jnp.sum(PA * g_square[:, None], 0) + m.T @ g_mean
    weighted = jnp.reshape(A * g_square[:, None], (-1, A.shape[1]))
    return A_bar, product(g_mean, A.T), jnp.reshape(product(weighted, A.T), (len(m), *A.shape[:1], A.shape[0]))


_explained_many.defvjp(_many_forward, _many_reverse)
