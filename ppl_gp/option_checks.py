"""What calls and configurations are given: keys of random numbers, whole and positive numbers."""

import math
from numbers import Integral, Real

import jax
import jax.numpy as jnp
from jax import random

from ppl_gp.errors import DataError


def as_key(rng_key, call: str):
    """A typed key from an integer seed, a `jax.random.key` or a raw `jax.random.PRNGKey`.

    Every public call that takes a key passes it through here: a raw key has an axis of its own,
    which code that splits keys would count as one more axis of keys. Raises `DataError`.
    """
    if isinstance(rng_key, Integral):
        return random.key(int(rng_key))
    dtype = getattr(rng_key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and not rng_key.shape:
        return rng_key
    if dtype == jnp.uint32 and rng_key.shape == random.key_data(random.key(0)).shape:
        return random.wrap_key_data(jnp.asarray(rng_key))
    raise DataError(
        f"rng_key must be an integer seed or one jax.random.key; got {_described(rng_key)}. "
        f"For example: {call}."
    )


def _described(value) -> str:
    shape = f" of shape {jnp.shape(value)}" if hasattr(value, "shape") else ""
    return f"{type(value).__name__}{shape}" if shape or value is None else repr(value)


def require_whole(owner: object, *names: str, least: int = 1) -> None:
    """Raise `DataError` unless the fields `names` are whole numbers from `least` on, or `None`
    where that is their default.
    """
    for name in names:
        value = getattr(owner, name)
        if value is None and getattr(type(owner), name, least) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:  # pyright: ignore[reportOperatorIssue]
            raise DataError(
                f"{type(owner).__name__}({name}={value!r}): give a whole number, at least {least}."
            )


def require_positive(owner: object, *names: str) -> None:
    """Raise `DataError` unless the fields `names` are positive, finite numbers."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, Real) or not 0.0 < float(value) < math.inf:
            raise DataError(
                f"{type(owner).__name__}({name}={value!r}): give a positive, finite number."
            )
