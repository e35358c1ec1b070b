"""What the proofs of a likelihood share: moves of half of the rows, which find the steps that
slopes cannot see, and when numbers count as equal.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from ppl_gp.errors import DataError

ROUNDINGS = 1e3  # roundings within which numbers count as equal
_TRIALS = 6  # moves of half of the rows


def require_finite(rows) -> None:
    """Raise `DataError` if terms of the log-likelihood, or their slopes, are not finite."""
    if bad := np.flatnonzero(~np.asarray(rows))[:3].tolist():
        raise DataError(
            f"the log-likelihood of row(s) {bad}, or its slope, is not finite at random values of "
            "f: look at these observations, and at what their distribution is computed from. An "
            "exposure of zero, for instance, is 0 log 0 = NaN: leave such rows out."
        )


def unmoved(log_lik, f, key):
    """Whether each term stays where it is while a random half of the *other* values moves far, up
    and down, (N,): what slopes cannot see, a step at the mean of f, say.
    """
    here = log_lik(f)
    rows = jax.tree.leaves(f)[0].shape[-1]

    def stays(trial):
        key_rows, key_size = random.split(random.fold_in(key, trial))
        moves = random.bernoulli(key_rows, 0.5, (rows,))
        size = (
            jnp.where(trial % 2 == 0, 1.0, -1.0)
            * 4.0 ** (trial // 2)
            * random.uniform(key_size, (rows,), minval=0.5)
        )
        there = log_lik(jax.tree.map(lambda x: x + (moves * size).astype(x.dtype), f))
        close = jnp.abs(there - here) <= ROUNDINGS * jnp.finfo(here.dtype).eps * (
            1.0 + jnp.abs(here)
        )
        return moves | close | ~jnp.isfinite(here)

    return jnp.all(lax.map(stays, jnp.arange(_TRIALS)), 0)
