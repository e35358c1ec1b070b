"""What every kernel does with its arguments: (N, D) floats, columns picked, shapes checked."""

from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ppl_gp.errors import DataError

ActiveDims = tuple[int, ...] | None


def active_dims_field():
    """`active_dims` of a kernel: a keyword, `None` for all columns."""
    return eqx.field(default=None, static=True, kw_only=True, converter=as_active_dims)


def as_inputs(X: Any, active_dims: ActiveDims = None, name: str = "X") -> Float[Array, "N D"]:
    """X as (N, D) floats, of the columns `active_dims`; (N,) means D = 1. Raises `DataError`."""
    X = jnp.asarray(X)
    if X.ndim not in (1, 2) or X.shape[1:] == (0,):
        raise DataError(
            f"{name} has shape {X.shape}; inputs are (N, D) with D >= 1, or (N,) for one input "
            "dimension."
        )
    if jnp.issubdtype(X.dtype, jnp.complexfloating):
        raise DataError(
            f"{name} has dtype {X.dtype}; inputs are real: pass the real and imaginary parts as "
            "columns."
        )
    X = floating(X if X.ndim == 2 else X[:, None])
    if active_dims is None:
        return X
    if not all(0 <= d < X.shape[1] for d in active_dims):
        raise DataError(
            f"active_dims={active_dims} is out of range for {name}, which has {X.shape[1]} "
            f"column(s): give column numbers from 0 to {X.shape[1] - 1}."
        )
    return X[:, jnp.array(active_dims)]


def input_pair(
    X1: Any, X2: Any, active_dims: ActiveDims
) -> tuple[Float[Array, "N1 D"], Float[Array, "N2 D"]]:
    """Both arguments of `k(X1, X2)` as (N, D); one object where both are the same object."""
    d1, d2 = (1 if jnp.ndim(X) == 1 else jnp.shape(X)[-1] if jnp.ndim(X) else 0 for X in (X1, X2))
    if d1 != d2:
        raise DataError(
            f"X1 has {d1} column(s) and X2 has {d2} (shapes {jnp.shape(X1)} and {jnp.shape(X2)}): "
            "both arguments of a kernel have the same input dimensions."
        )
    A = as_inputs(X1, active_dims, "X1")
    return A, A if X2 is X1 else as_inputs(X2, active_dims, "X2")


def as_active_dims(dims: int | Iterable[int] | None) -> ActiveDims:
    """One column number or several as the static tuple that a kernel keeps."""
    if dims is None:
        return None
    dims = (dims,) if isinstance(dims, int | np.integer) else tuple(int(d) for d in dims)
    if not dims:
        raise DataError(
            "active_dims=() picks no column: give at least one column number, or None for all "
            "columns."
        )
    return dims


def floating(x: ArrayLike) -> Float[Array, "..."]:
    """As an array of floats."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))


def as_tree(function: Any) -> Any:
    """A callable as a pytree: a function is a leaf that jit refuses; in a Partial it is part of the
    tree's structure.
    """
    is_function = jax.tree_util.all_leaves([function])
    return jax.tree_util.Partial(function) if is_function else function


def scalar(value: Any, name: str) -> Float[Array, ""]:
    """A parameter that has to be one number."""
    value = jnp.asarray(value)
    if value.ndim:
        raise DataError(
            f"{name} has shape {value.shape}; it is one number (for a batch of kernels, jax.vmap "
            "over it)."
        )
    return floating(value)


def per_column(value: Any, D: int, name: str) -> Float[Array, "..."]:
    """A parameter that is one number for all columns, or one for each, (D,)."""
    value = jnp.asarray(value)
    if value.shape not in ((), (D,)):
        raise DataError(
            f"{name} has shape {value.shape}, and there are {D} input column(s) (the active ones, "
            f"with active_dims): give one number, or shape ({D},)."
        )
    return floating(value)


def fill(value: Float[Array, ""], X: Float[Array, "N D"]) -> Float[Array, "N"]:
    """One value for every row of X, in the dtype that a computation with both has."""
    return jnp.full(X.shape[0], value, jnp.result_type(X, value))
