"""What calls and configurations are given: keys of random numbers, whole and positive numbers, and
the numbers of every sampler's chains.
"""

import dataclasses
import functools
import math
from contextlib import suppress
from numbers import Integral, Real
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import random

from ppl_gp.errors import DataError


def as_key(rng_key, call: str):
    """A key of JAX's default kind from an integer seed, one `jax.random.key` of any kind or a raw
    `jax.random.PRNGKey`, whose axis code that splits keys would count as one of keys.

    Every public call that takes a key passes it through here. Raises `DataError`.
    """
    if isinstance(rng_key, Integral):
        with suppress(OverflowError):
            return random.key(int(rng_key))
    dtype, default = getattr(rng_key, "dtype", None), random.key(0)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and not rng_key.shape:
        if dtype == default.dtype:
            return rng_key
        # NumPyro's samplers rebuild keys from their data, as that of the default kind
        return functools.reduce(random.fold_in, random.key_data(rng_key), default)
    if dtype == jnp.uint32 and rng_key.shape == random.key_data(default).shape:
        return random.wrap_key_data(jnp.asarray(rng_key))
    raise DataError(
        "rng_key must be an integer seed of at most 64 bits or one jax.random.key; got "
        f"{_described(rng_key)}. For example: {call}."
    )


def _described(value) -> str:
    shape = f" of shape {jnp.shape(value)}" if hasattr(value, "shape") else ""
    return f"{type(value).__name__}{shape}" if shape or value is None else repr(value)


def require_known(config: object) -> None:
    """Raise `DataError` where an option of a configuration, or of one inside it, is traced."""
    for f in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        value = getattr(config, f.name)
        require_known(value)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
            raise DataError(
                f"{type(config).__name__}({f.name}=...) has a value that jax.jit, jax.vmap or "
                "jax.grad traces, and fit needs numbers: call it outside of them. Inside of them, "
                "pg.log_evidence(pg.Laplace(), pg.read(model, X, y=y, hyper={...}))[0] has "
                "derivatives by the values of hyper."
            )


def require_whole(owner: object, *names: str, least: int = 1) -> None:
    """Raise `DataError` unless fields are whole numbers from `least` on, or `None` by default."""
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


@runtime_checkable
class ChainSettings(Protocol):
    """`num_chains` chains; in each, `num_warmup` transitions that adapt, and `num_samples` that are
    kept.

    A protocol and not a base class: the samplers have their own order of these fields, among
    others, and their own defaults, which calls by position rely on.
    """

    @property
    def num_warmup(self) -> int: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def num_chains(self) -> int: ...

    @property
    def target_accept_prob(self) -> float: ...


def require_settings(config: ChainSettings, *further: str) -> None:
    """Raise `DataError` unless the chains' numbers, and those named in `further`, are whole and
    from 1 on, and the acceptance lies in (0, 1).
    """
    require_whole(config, *further, "num_warmup", "num_samples", "num_chains")
    if not 0.0 < (share := config.target_accept_prob) < 1.0:
        raise DataError(
            f"{type(config).__name__}(target_accept_prob={share!r}): give a number between 0 and 1."
        )
