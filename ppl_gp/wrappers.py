"""Distributions behind masks, expansions and `to_event`: what stands in a trace, as the entries
that it scores.
"""

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool

_WRAPPERS = (dist.MaskedDistribution, dist.ExpandedDistribution, dist.Independent)


def unwrap(fn) -> Any:
    """The distribution beneath masks, expansions and `to_event` (Predictive masks every site, a
    plate expands it).
    """
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    return fn


def bare(fn: dist.Distribution) -> dist.Distribution:
    """The distribution without masks and `to_event`, at its full batch shape."""
    core = unwrap(fn)
    return core.expand(bare_shape(fn))


def bare_shape(fn: dist.Distribution) -> tuple[int, ...]:
    """The batch shape of `bare(fn)`: the axes that `to_event` took for events are batch axes
    again.
    """
    shape = fn.shape()
    return tuple(shape[: len(shape) - unwrap(fn).event_dim])


def hidden_axes(fn: dist.Distribution) -> int:
    """How many axes on the right of `bare_shape(fn)` are events of fn."""
    return len(bare_shape(fn)) - len(fn.batch_shape)


def mask_of(fn: dist.Distribution) -> Bool[Array, "..."]:
    """Which entries count, by every mask around a distribution; broadcasts against the batch shape
    of `bare(fn)`.
    """
    mask = jnp.ones((), bool)
    while fn is not unwrap(fn):
        if isinstance(fn, dist.MaskedDistribution):
            mask = mask & fn._mask
        if isinstance(fn, dist.Independent) and mask.ndim:
            mask = mask.reshape(mask.shape + (1,) * fn.reinterpreted_batch_ndims)
        fn = fn.base_dist  # pyright: ignore[reportAttributeAccessIssue]
    return mask
