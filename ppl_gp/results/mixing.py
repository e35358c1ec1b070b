"""Equal-weight mixtures over draws, accumulated in one pass: memory does not grow with the number of draws."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class Moments(NamedTuple):
    """Mean and variance of something, arrays of one shape."""

    mean: Float[Array, "..."]
    variance: Float[Array, "..."]


def mixture(component: Callable[[Any], Any], draws: Any) -> Any:
    """Mix component(draw) over the leading axis of the pytree `draws`.

    `Moments` in what a component returns mix by the laws of total expectation and total variance; any other array is a
    log density, and mixes as logsumexp over draws - log S.
    """
    num = jax.tree.leaves(draws)[0].shape[0]
    if num == 1:
        return component(jax.tree.map(lambda x: x[0], draws))

    def step(carry, draw):
        count, total = carry
        return (count + 1, _combine(total, component(draw), count)), None

    shape = jax.eval_shape(component, jax.tree.map(lambda x: x[0], draws))
    empty = jax.tree.map(_empty, shape, is_leaf=_is_moments)
    (_, total), _ = lax.scan(step, (jnp.zeros((), jnp.int32), empty), draws)
    return total


def _is_moments(x):
    return isinstance(x, Moments)


def _empty(shape):
    if _is_moments(shape):
        return Moments(*(jnp.zeros(s.shape, s.dtype) for s in shape))
    return jnp.full(shape.shape, -jnp.inf, shape.dtype)


def _combine(total, part, count):
    """The mixture of `count` draws and one more."""

    def combine(old, new):
        dtype = jnp.result_type(new.mean if _is_moments(new) else new)
        w = 1.0 / (count.astype(dtype) + 1.0)
        if not _is_moments(new):
            return jnp.logaddexp(old + jnp.log1p(-w), new + jnp.log(w))
        shift = new.mean - old.mean
        return Moments(old.mean + w * shift, (1 - w) * old.variance + w * new.variance + w * (1 - w) * shift**2)

    return jax.tree.map(combine, total, part, is_leaf=_is_moments)
