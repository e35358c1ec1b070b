"""The Cholesky factor and triangular solves, safe and cheap under `vmap`.

Under `vmap` these functions loop over the batch on CPU, where one factor fills the cores, and use
the batched kernels on accelerators. jaxlib 0.10.0 to 0.11.0, which are excluded, hand a batch to
the thread pool that runs the program itself and wait there: two such waits at once on two cores
never end.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float


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

    O(N^3 / 3). Not differentiable: `numerics.linalg.robust_cholesky` is.
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
