"""Arguments of a model as JAX arrays, checked at the boundary: the same for fitting and for predicting."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import DataError


def as_arrays(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """NumPy arrays, lists of numbers and pandas columns as JAX arrays; other arguments as they are.

    Observations `y` given as booleans become integers; a boolean mask stays one. Raises `DataError` for NaN, infinity
    or entries that are not numbers, naming the argument.
    """
    positional = tuple(as_array(f"positional argument {i}", value) for i, value in enumerate(args))
    named = {name: as_array(f"argument '{name}'", value) for name, value in kwargs.items()}
    if eqx.is_array(named.get("y")) and named["y"].dtype == bool:
        named["y"] = named["y"].astype(int)
    return positional, named


def as_array(name: str, value):
    """One argument of this name, as `as_arrays` describes. A memory map stays on disk, to be checked as it is read."""
    if isinstance(value, np.memmap):
        return value
    if not (isinstance(value, jax.Array) or hasattr(value, "__array__") or isinstance(value, list)):
        return value
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if isinstance(array, np.ndarray) and array.dtype.kind not in "biuf":
        raise DataError(f"{name} holds {array.dtype} entries; convert them to numbers.")
    if jnp.issubdtype(array.dtype, jnp.floating) and not bool(np.all(np.isfinite(array))):
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(np.asarray(array)))[0])
        raise DataError(
            f"{name} has {array[where]} at index {where}; drop or impute the row, or keep "
            "it and leave it out of the likelihood with numpyro.handlers.mask or obs_mask."
        )
    return jnp.asarray(array)
