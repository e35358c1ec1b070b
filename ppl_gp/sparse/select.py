"""Choosing inducing points among the inputs: greedily by conditional variance, by k-means, or at
random.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ppl_gp.errors import DataError
from ppl_gp.gp import GP

MAX_CANDIDATES = 10_000  # rows that a choice looks at, a random subset of more
RULES = ("greedy", "kmeans", "subset")


def select(rule: str, prior: GP, X, num: int, seed: int, tol: float = 1e-6) -> np.ndarray:
    """At most `num` inducing points Z (M, *D) for the GP prior, from the rows of X.

    - "greedy": the next point is the one of largest variance given those before it (a pivoted
      Cholesky factorisation; Burt, Rasmussen & van der Wilk 2020, section 7). Stops early where no
      variance exceeds `tol` of the prior's. O(N M^2).
    - "kmeans": centres of clusters of X / (column standard deviation); not rows of X. O(N M) a
      pass.
    - "subset": rows at random.

    Duplicate rows are dropped first; where fewer than `num` remain, all are taken. Raises
    `DataError` for another rule.
    """
    if rule not in RULES:
        raise DataError(
            f"inducing={rule!r} is no rule for choosing points; give one of {RULES}, an array Z, "
            "or inducing variables."
        )
    rng = np.random.default_rng([seed, 17])
    X = np.asarray(X)
    rows = (
        X
        if len(X) <= MAX_CANDIDATES
        else X[np.sort(rng.choice(len(X), MAX_CANDIDATES, replace=False))]
    )
    rows = np.unique(rows, axis=0)
    if len(rows) <= num:
        return rows
    if rule == "kmeans":
        return _kmeans(rows, num, rng)
    if rule == "subset":
        return rows[np.sort(rng.choice(len(rows), num, replace=False))]
    at = GP(prior.kernel, rows, prior.mean_function, prior.jitter)
    chosen, variance = greedy(at, num)
    enough = np.asarray(variance) > tol * float(jnp.mean(at.variance))
    return rows[np.asarray(chosen)[: max(1, int(np.sum(np.minimum.accumulate(enough))))]]


def _kmeans(rows, num, rng):
    scale = np.where(rows.std(0) > 0, rows.std(0), 1.0)
    columns = (rows / scale).reshape(len(rows), -1)
    from scipy.cluster.vq import kmeans2  # here: it takes a fifth of a second

    centres, _ = kmeans2(columns, num, minit="++", seed=rng)
    centres = np.unique(centres, axis=0)
    return (centres.reshape(-1, *rows.shape[1:]) * scale).astype(rows.dtype)


@partial(jax.jit, static_argnames="num")
def greedy(prior: GP, num: int) -> tuple[Int[Array, "M"], Float[Array, "M"]]:
    """(rows in the order chosen, each one's variance given those before it) of a pivoted Cholesky
    factorisation.
    """
    X, variance = prior.X, prior.variance

    def step(carry, i):
        columns, left = carry
        row = jnp.argmax(left)
        k = prior.kernel(X, lax.dynamic_slice_in_dim(X, row, 1))[:, 0]
        pivot = jnp.maximum(left[row], jnp.finfo(left.dtype).tiny)
        column = (k - columns.T @ columns[:, row]) / jnp.sqrt(pivot)
        left_after = jnp.maximum(left - column**2, 0.0).at[row].set(0.0)
        return (columns.at[i].set(column), left_after), (row, left[row])

    empty = jnp.zeros((num, X.shape[0]), variance.dtype)
    _, out = lax.scan(step, (empty, variance), jnp.arange(num))
    return out
