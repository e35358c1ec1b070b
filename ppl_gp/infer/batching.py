"""One function over a leading axis: a compiled loop on CPU, a vectorised map on accelerators.

On CPU every Cholesky factor already fills the cores, and a vectorised `while_loop` would run all lanes as long as the
slowest and both sides of every `cond`; on a GPU one wide kernel is worth that.
"""

import jax
from jax import lax


def over_leading_axis(function, xs):
    """function mapped over the leading axis of the pytree xs."""
    if jax.default_backend() == "cpu":
        return lax.map(function, xs)
    return jax.vmap(function)(xs)
