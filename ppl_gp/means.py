"""Mean functions of a GP: callables that map X, (N, D) or (N,), to (N,).

In a plate of P units they may map X to (P, N), one mean per unit.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ppl_gp.errors import DataError
from ppl_gp.kernels.base import as_inputs, as_tree, fill, per_column, scalar


class Zero(eqx.Module):
    """The mean m(x) = 0, which `pg.GP` uses by default.

    Examples
    --------
    >>> pg.means.Zero()(np.arange(3.0)).tolist()
    [0.0, 0.0, 0.0]
    """

    def __call__(self, X: ArrayLike) -> Float[Array, "N"]:
        X = as_inputs(X)
        return jnp.zeros(X.shape[0], X.dtype)


class Constant(eqx.Module):
    """Mean that is the same number everywhere, m(x) = c.

    Parameters
    ----------
    c : float, default 0.0
        The mean.

    Examples
    --------
    >>> pg.means.Constant(2.0)(np.zeros(3)).tolist()
    [2.0, 2.0, 2.0]
    """

    c: ArrayLike = 0.0

    def __call__(self, X: ArrayLike) -> Float[Array, "N"]:
        return fill(scalar(self.c, "Constant(c=...)"), as_inputs(X))


class Linear(eqx.Module):
    """Mean that is linear in the inputs, m(x) = slope . x + intercept.

    Parameters
    ----------
    slope : float or array
        One number, or one per column, (D,).
    intercept : float, default 0.0
        The mean at x = 0.

    Examples
    --------
    >>> pg.means.Linear(2.0, 1.0)(np.array([0.0, 3.0])).tolist()
    [1.0, 7.0]
    """

    slope: ArrayLike
    intercept: ArrayLike = 0.0

    def __call__(self, X: ArrayLike) -> Float[Array, "N"]:
        X = as_inputs(X)
        slope = per_column(self.slope, X.shape[1], "Linear(slope=...)")
        return jnp.sum(X * slope, 1) + scalar(self.intercept, "Linear(intercept=...)")


class Identity(eqx.Module):
    """Mean of a layer of P = D units: unit p has the mean x_p, (P, N).

    Examples
    --------
    >>> pg.means.Identity()(np.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[1.0, 3.0], [2.0, 4.0]]
    """

    def __call__(self, X: ArrayLike) -> Float[Array, "P N"]:
        return as_inputs(X).T


class Projection(eqx.Module):
    """Mean of a layer of P units that is linear in the inputs: unit p has (x W)_p, (P, N).

    Parameters
    ----------
    W : array
        Weights, (D, P), constant in the model. For example those of `principal_axes`.

    Examples
    --------
    >>> W = jnp.array([[1.0], [1.0]])
    >>> pg.means.Projection(W)(np.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[3.0, 7.0]]
    """

    W: Float[Array, "D P"]

    def __call__(self, X: ArrayLike) -> Float[Array, "P N"]:
        X = as_inputs(X)
        if jnp.ndim(self.W) != 2 or self.W.shape[0] != X.shape[1]:
            raise DataError(f"Projection(W) has shape {jnp.shape(self.W)}; give ({X.shape[1]}, P).")
        return (X @ self.W).T


def principal_axes(X: ArrayLike, num: int) -> Float[Array, "D num"]:
    """Compute the principal axes of the inputs, for the linear mean of a layer.

    Use them with `Projection` if a layer is narrower or wider than its inputs. Compute them once,
    from all training inputs.

    Parameters
    ----------
    X : array
        Training inputs, (N, D).
    num : int
        The number of axes.

    Returns
    -------
    array
        W, (D, num): unit columns, largest variance first, and zeros beyond D.

    Notes
    -----
    O(N D^2). Source: Salimbeni & Deisenroth (2017), section 2.

    Examples
    --------
    >>> W = pg.means.principal_axes(np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]), 1)
    >>> abs(W).round(2).tolist()
    [[0.71], [0.71]]
    """
    X = np.asarray(as_inputs(X))
    if num < 1:
        raise DataError(f"principal_axes(num={num}): give at least 1.")
    axes = np.linalg.svd(X - X.mean(0), full_matrices=False)[2].T[:, :num]
    return jnp.asarray(np.pad(axes, ((0, 0), (0, num - axes.shape[1]))))


def as_mean(mean: Any) -> Any:
    """`None` as the zero mean, a number as a constant one; what is no callable: `DataError`."""
    if mean is None:
        return Zero()
    if hasattr(mean, "shape") and mean.shape:
        raise DataError(
            f"mean=... is an array of shape {tuple(mean.shape)}, and new inputs have other values: "
            "give a function of X, GP(kernel, X, mean=lambda X: slope * X[:, 0]) or "
            "pg.means.Linear(slope); or add the array to the function, f + slope * x."
        )
    if callable(mean) and not isinstance(mean, type):
        return as_tree(mean)
    try:
        return Constant(scalar(mean, "mean"))
    except TypeError:
        raise DataError(
            f"mean={mean!r} is no mean function; give None, a number, or a callable X -> (N,)."
        ) from None
