"""Predictions at many inputs in chunks of rows: one compiled function, and memory that does not
grow with their number.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.model.arguments import Leaves
from ppl_gp.model.declared import Declared

# A prime: no other axis of a result is likely to have this size.
ROWS = 10_007


def by_rows(
    function: Callable, model: Declared, X, args: tuple, kwargs: dict, observed: tuple = ()
):
    """function(X, observed + args, kwargs) on chunks of `ROWS` rows of X and of all that has one
    entry per datum, put together.

    `observed`: y_new by position, one entry per row. The last chunk is filled with rows before it,
    which are dropped. For functions whose
    rows do not depend on each other.
    """
    num = jnp.shape(X)[0]
    starts = [*range(0, num - ROWS, ROWS), num - ROWS]
    parts = []
    for i, start in enumerate(starts):
        first, others, named = rows_from(start, model, X, args, kwargs)
        part = function(first, (*(y[start : start + ROWS] for y in observed), *others), named)
        repeated = 0 if i == 0 else starts[i - 1] + ROWS - start
        parts.append(jax.tree.map(lambda x, r=repeated: _drop(np.asarray(x), r), part))
    return jax.tree.map(
        lambda *xs: jnp.asarray(np.concatenate(xs, xs[0].shape.index(ROWS))), *parts
    )


def rows_from(start: int, model: Declared, X, args: tuple, kwargs: dict) -> tuple:
    """(X, args, kwargs) at `ROWS` rows from `start` on."""
    leaves, axes = Leaves(model, (X, *args), kwargs), model.reading.row_axes
    rows = {
        p: x[(slice(None),) * axes[p] + (slice(start, start + ROWS),)]
        for p, x in leaves.arrays.items()
        if p in axes and x.shape
    }
    (first, *others), named = leaves.replaced(rows)
    return first, tuple(others), named


def _drop(x, repeated: int):
    axis = x.shape.index(ROWS)
    return x[(slice(None),) * axis + (slice(repeated, None),)]
