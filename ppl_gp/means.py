"""Mean functions: callables X -> (N,), X as (N, D) or (N,)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ppl_gp.errors import DataError
from ppl_gp.kernels.inputs import as_inputs, fill, per_column, scalar


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
    """m(x) = slope . x + intercept; `slope` is (D,), or one number for all inputs; `intercept` one number."""

    slope: ArrayLike
    intercept: ArrayLike = 0.0

    def __call__(self, X: ArrayLike) -> Float[Array, "N"]:
        X = as_inputs(X)
        slope = per_column(self.slope, X.shape[1], "Linear(slope=...)")
        return jnp.sum(X * slope, 1) + scalar(self.intercept, "Linear(intercept=...)")


def as_mean(mean: Any) -> Any:
    """`None` is the zero mean, a number a constant one, a callable X -> (N,) itself; anything else is a `DataError`."""
    if mean is None:
        return Zero()
    if callable(mean) and not isinstance(mean, type):
        # A function is a leaf that jit refuses; in a Partial it is part of the tree's structure.
        return jax.tree_util.Partial(mean) if jax.tree_util.all_leaves([mean]) else mean
    try:
        return Constant(scalar(mean, "mean"))
    except TypeError:
        raise DataError(f"mean={mean!r} is no mean function; give None, a number, or a callable X -> (N,).") from None
