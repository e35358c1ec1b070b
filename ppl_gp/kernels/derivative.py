"""Gradients of f as values of one process: a last input column says which partial derivative a row
is. A derivative is a linear functional, so f and its partial derivatives are jointly Gaussian, with
Cov[d f/d x_i, d f/d x'_j] = d^2 k(x, x') / d x_i d x'_j (Rasmussen & Williams 2006, section 9.4;
Solak et al. 2003).
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from ppl_gp.errors import DataError, ModelError
from ppl_gp.kernels.base import Kernel, as_inputs, as_kernel, as_tree, input_pair
from ppl_gp.kernels.stationary import Matern12, White


class WithDerivatives(Kernel):
    """k((x, i), (x', j)) = D_i D'_j base(x, x'): D_0 f = f, D_i f = d f / d x_(i-1).

    Inputs are (N, D + 1): the D columns of `base`, then the column i in {0, ..., D}, which
    `value_inputs` and `derivative_inputs` append. `active_dims` of `base` count its own columns.
    The column i is rounded and carries no derivative: training that moves inducing inputs moves x
    and leaves i.

    Each row is differentiated along its own unit vector, so that one nested jvp gives all four
    kinds of entry: about eight evaluations of `base` and four matrices, whatever D is; `diag` is
    O(N). Finite at equal points.

    Raises `ModelError` where `base` holds a Matern12 or a White, whose draws have no derivative (a
    Matern32's have one, which is enough), `DataError` where i is no whole number in 0 .. D; traced,
    it gives NaN.
    """

    base: Any = eqx.field(converter=as_kernel)

    def __check_init__(self):
        require_differentiable(self.base, "WithDerivatives(base)")

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        (A, i), (B, j) = (split_inputs(X) for X in input_pair(X1, X2, None))
        (K, K1), (K2, K12) = _jet(self.base, A, B, unit_vectors(A, i), unit_vectors(B, j))
        left, right = (i == 0)[:, None], (j == 0)[None, :]
        chosen = jnp.where(left, jnp.where(right, K, K2), jnp.where(right, K1, K12))
        return chosen + _nan_outside(A, i)[:, None] + _nan_outside(B, j)

    def diag(self, X: ArrayLike) -> Float[Array, "N"]:
        """The vector k(x_n, x_n), of values and slopes."""
        A, i = split_inputs(as_inputs(X))
        own = lambda a, s: _jet(self.base, a, a, s, s)[1][1][0, 0]  # noqa: E731
        mixed = jax.vmap(own)(A[:, None], unit_vectors(A, i)[:, None])
        chosen = jnp.where(i == 0, self.base.diag(A), mixed)
        return chosen + _nan_outside(A, i)


class MeanWithDerivatives(eqx.Module):
    """The mean function that goes with `WithDerivatives`: m(x) where i = 0, d m / d x_(i-1)
    elsewhere.

    `base` is a mean function X -> (N,), `means.Linear(...)` say. A zero mean needs no wrapper; a
    constant one does, since its derivatives are zero.
    """

    base: Any

    def __init__(self, base):
        if not callable(base):
            raise DataError(
                f"MeanWithDerivatives(base={base!r}) is not callable; give means.Constant(c), say."
            )
        self.base = as_tree(base)

    def __call__(self, X: ArrayLike) -> Float[Array, "N"]:
        A, i = split_inputs(as_inputs(X))
        value, slope = jax.jvp(self.base, (A,), (unit_vectors(A, i),))
        return jnp.where(i == 0, value, slope) + _nan_outside(A, i)


def value_inputs(X: ArrayLike) -> Float[Array, "N D1"]:
    """Inputs of `WithDerivatives` for f(X): X, (N, D) or (N,), and zeros, (N, D + 1)."""
    X = as_inputs(X)
    return jnp.concatenate([X, jnp.zeros_like(X[:, :1])], 1)


def derivative_inputs(X: ArrayLike, dim: int | None = None) -> Float[Array, "K D1"]:
    """Inputs of `WithDerivatives` for d f / d x_dim at X, (N, D + 1); `dim` counts columns from 0.

    `None` gives all D partial derivatives, (D N, D + 1): column 0 at all points, then column 1 ...
    """
    X = as_inputs(X)
    dims = range(X.shape[1]) if dim is None else [as_dim(dim, X.shape[1], "derivative_inputs")]
    return jnp.concatenate([jnp.concatenate([X, jnp.full_like(X[:, :1], d + 1)], 1) for d in dims])


def as_dim(dim: int, D: int, name: str) -> int:
    """A column number, checked."""
    if not 0 <= dim < D:
        raise DataError(f"{name}(dim={dim}): inputs have {D} column(s), counted from 0.")
    return int(dim)


def require_differentiable(kernel: Any, name: str) -> None:
    """`ModelError` where a part of `kernel` has no mean-square derivative."""
    parts = jax.tree_util.tree_leaves(kernel, is_leaf=lambda k: isinstance(k, (Matern12, White)))
    for part in parts:
        if isinstance(part, (Matern12, White)):
            raise ModelError(
                f"{name}: draws of {type(part).__name__} have no derivative; use Matern32, "
                "Matern52 or RBF (noise belongs in the likelihood), or inducing Points."
            )


def split_inputs(X: Float[Array, "N D1"]) -> tuple[Float[Array, "N D"], Int[Array, "N"]]:
    """The columns of the base kernel, and which derivative each row stands for."""
    if X.shape[1] < 2:
        raise DataError(
            f"inputs of WithDerivatives have shape {X.shape}; their last column says which "
            "derivative a row is: make them with value_inputs(X) and derivative_inputs(X, dim)."
        )
    column = lax.stop_gradient(X[:, -1])
    if not isinstance(column, Tracer):
        _check_column(np.asarray(column), X.shape[1] - 1)
    # What is NaN or far off becomes -1, outside 0 .. D, whatever a conversion to integers would
    # make of it.
    usable = (column > -0.5) & (column < X.shape[1])
    return X[:, :-1], jnp.where(usable, jnp.round(column), -1.0).astype(int)


def unit_vectors(A: Float[Array, "N D"], i: Int[Array, "N"]) -> Float[Array, "N D"]:
    """Row n is the unit vector of column i_n - 1, zero for i_n = 0."""
    return jax.nn.one_hot(i - 1, A.shape[1], dtype=A.dtype)


def _check_column(column, D):
    bad = column[~np.isin(np.round(column), np.arange(D + 1))]
    if bad.size:
        raise DataError(
            f"the last column of the inputs holds {bad[0]}; it is 0 (f) or 1 .. {D} (a partial "
            "derivative): make inputs with value_inputs(X) and derivative_inputs(X, dim)."
        )


def _nan_outside(A, i):
    return jnp.where((i >= 0) & (i <= A.shape[1]), 0.0, jnp.nan).astype(A.dtype)


def _jet(k, A, B, S, T):
    """((k, D k), (D' k, D D' k)) at (A, B), D along rows S of the first argument, D' along T."""
    return jax.jvp(lambda B: jax.jvp(lambda A: k(A, B), (A,), (S,)), (B,), (T,))
