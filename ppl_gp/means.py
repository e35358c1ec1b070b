"""Mean functions: callables X -> (N,), X as (N, D) or (N,); in a plate of P units also X -> (P, N),
a mean for each unit.
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
    """m(x) = 0."""

    def __call__(self, X: ArrayLike) -> Float[Array, "N"]:
        X = as_inputs(X)
        return jnp.zeros(X.shape[0], X.dtype)


class Constant(eqx.Module):
    """m(x) = c, one number."""

    c: ArrayLike = 0.0

    def __call__(self, X: ArrayLike) -> Float[Array, "N"]:
        return fill(scalar(self.c, "Constant(c=...)"), as_inputs(X))


class Linear(eqx.Module):
    """m(x) = slope . x + intercept; `slope` is (D,) or, as `intercept`, one number."""

    slope: ArrayLike
    intercept: ArrayLike = 0.0

    def __call__(self, X: ArrayLike) -> Float[Array, "N"]:
        X = as_inputs(X)
        slope = per_column(self.slope, X.shape[1], "Linear(slope=...)")
        return jnp.sum(X * slope, 1) + scalar(self.intercept, "Linear(intercept=...)")


class Identity(eqx.Module):
    """Unit p of a layer has the mean m_p(x) = x_p: (P, N), in a plate of P = D units."""

    def __call__(self, X: ArrayLike) -> Float[Array, "P N"]:
        return as_inputs(X).T


class Projection(eqx.Module):
    """Mean (x W)_p of unit p in a plate of P units: (P, N); W is constant, `principal_axes` say."""

    W: Float[Array, "D P"]

    def __call__(self, X: ArrayLike) -> Float[Array, "P N"]:
        X = as_inputs(X)
        if jnp.ndim(self.W) != 2 or self.W.shape[0] != X.shape[1]:
            raise DataError(f"Projection(W) has shape {jnp.shape(self.W)}; give ({X.shape[1]}, P).")
        return (X @ self.W).T


def principal_axes(X: ArrayLike, num: int) -> Float[Array, "D num"]:
    """W (D, num) of unit columns: the inputs' principal axes, largest variance first, zeros beyond
    D.

    The linear mean of a layer narrower or wider than its inputs (Salimbeni & Deisenroth 2017,
    section 2). Computed once from all training inputs; a constant of the model. O(N D^2).
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
