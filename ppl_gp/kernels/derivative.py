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
    """Kernel of a function and its partial derivatives, for observed or predicted slopes.

    Append a column i to X: 0 is a row of f, and i = 1 ... D a row of d f / d x_i, counted from 1.
    `value_inputs` and `derivative_inputs` do so.

    Parameters
    ----------
    base : Kernel or callable
        The kernel of f. Its `active_dims` count its own D columns.

    Raises
    ------
    ModelError
        If `base` contains a Matern12 or a White, whose functions do not have a derivative. Those of
        a Matern32 have one, which is enough.
    DataError
        If i is not a whole number in 0 ... D. Under tracing the result is NaN instead.

    Notes
    -----
    `k((x, i), (x', j)) = D_i D'_j base(x, x')`, with `D_0 f = f` and `D_i f` the derivative along
    column i. It costs about eight evaluations of `base` and four matrices for any D, and `diag` is
    O(N). It is finite at equal points. The column i is rounded and has no derivative: training that
    moves inducing inputs moves x and leaves i.

    Examples
    --------
    >>> kernel = pg.kernels.WithDerivatives(pg.kernels.RBF(1.0, 0.5))
    >>> slope = pg.kernels.derivative_inputs(np.array([0.0]))
    >>> kernel(slope, slope).round(2).tolist()
    [[4.0]]
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
        """The vector k(x_n, x_n), (N,), of values and slopes."""
        A, i = split_inputs(as_inputs(X))
        own = lambda a, s: _jet(self.base, a, a, s, s)[1][1][0, 0]  # noqa: E731
        mixed = jax.vmap(own)(A[:, None], unit_vectors(A, i)[:, None])
        return jnp.where(i == 0, self.base.diag(A), mixed) + _nan_outside(A, i)


class MeanWithDerivatives(eqx.Module):
    """Mean function for `WithDerivatives`: m(x) if i = 0, else its derivative along column i.

    A zero mean needs no wrapper. A constant one does, because its derivatives are zero.

    Parameters
    ----------
    base : callable
        A mean function X -> (N,), for example `means.Linear(...)`.

    Examples
    --------
    >>> mean = pg.kernels.MeanWithDerivatives(pg.means.Linear(2.0, 1.0))
    >>> mean(pg.kernels.derivative_inputs(np.array([0.0, 3.0]))).tolist()
    [2.0, 2.0]
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
    """Make inputs of `WithDerivatives` for the values f(X).

    Parameters
    ----------
    X : array
        Inputs, (N, D) or (N,).

    Returns
    -------
    array
        X and a column of zeros, (N, D + 1).

    Examples
    --------
    >>> pg.kernels.value_inputs(np.array([1.0, 2.0])).tolist()
    [[1.0, 0.0], [2.0, 0.0]]
    """
    X = as_inputs(X)
    return jnp.concatenate([X, jnp.zeros_like(X[:, :1])], 1)


def derivative_inputs(X: ArrayLike, dim: int | None = None) -> Float[Array, "K D1"]:
    """Make inputs of `WithDerivatives` for the partial derivatives of f at X.

    Parameters
    ----------
    X : array
        Inputs, (N, D) or (N,).
    dim : int, default None
        The column of the derivative, counted from 0. None gives all D partial derivatives.

    Returns
    -------
    array
        (N, D + 1), or (D N, D + 1) for all: column 0 at all points, then column 1, and so on.

    Examples
    --------
    >>> pg.kernels.derivative_inputs(np.array([1.0, 2.0]), 0).tolist()
    [[1.0, 1.0], [2.0, 1.0]]
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
    usable = (column > -0.5) & (column < X.shape[1]) & _is_whole(column)
    return X[:, :-1], jnp.where(usable, jnp.round(column), -1.0).astype(int)


def unit_vectors(A: Float[Array, "N D"], i: Int[Array, "N"]) -> Float[Array, "N D"]:
    """Row n is the unit vector of column i_n - 1, zero for i_n = 0."""
    return jax.nn.one_hot(i - 1, A.shape[1], dtype=A.dtype)


def _is_whole(column):
    return abs(column - column.round()) < 1e-3


def _check_column(column, D):
    bad = column[~(np.isin(np.round(column), np.arange(D + 1)) & _is_whole(column))]
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
