"""Predictions at many inputs in chunks of rows: one compiled function, and memory that does not grow with their number."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

# A prime: no other axis of a result is likely to have this size.
ROWS = 10_007


def by_rows(function: Callable, X, args: tuple, kwargs: dict):
    """function(X, args, kwargs) on chunks of `ROWS` rows of every array with as many rows as X, put together again.

    The last chunk is filled with rows before it, which are dropped. For functions whose rows do not depend on each other.
    """
    num = jnp.shape(X)[0]
    starts = [*range(0, num - ROWS, ROWS), num - ROWS]

    def take(value, start):
        is_row = getattr(value, "ndim", 0) and value.shape[0] == num
        return value[start : start + ROWS] if is_row else value

    parts = []
    for i, start in enumerate(starts):
        part = function(*jax.tree.map(lambda v, s=start: take(v, s), (X, args, kwargs)))
        repeated = 0 if i == 0 else starts[i - 1] + ROWS - start
        parts.append(jax.tree.map(lambda x, r=repeated: _drop(np.asarray(x), r), part))
    return jax.tree.map(lambda *xs: jnp.asarray(np.concatenate(xs, xs[0].shape.index(ROWS))), *parts)


def _drop(x, repeated: int):
    axis = x.shape.index(ROWS)
    return x[(slice(None),) * axis + (slice(repeated, None),)]
