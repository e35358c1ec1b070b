"""The R functions that a datum sees of a predictor, as one vector: functions outermost.

They are correlated given the data, so that q of them is one Gaussian over all (R B,) values, with
one q(u) behind it. Of a plain GP everything here is the identity: several functions at one of its
sites are independent, and have a leading axis.
"""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.gp import GP
from ppl_gp.reading.predictor.prior import PredictorGP, blocks_of


def is_coupled(prior: GP) -> bool:
    """Whether a prior is of several functions of a datum that are correlated."""
    return isinstance(prior, PredictorGP) and prior.kernel.functions > 1


def batch_of(prior: GP, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a site of `shape` that have a q(u) each."""
    return () if isinstance(prior, PredictorGP) else tuple(shape[:-1])


def flat_mean(new: GP) -> Float[Array, "*F RB"]:
    """The prior mean at the rows of `new`."""
    mean = new.mean
    return jnp.reshape(mean, (*mean.shape[: mean.ndim - len(new.shape())], -1))


def shaped(x: Float[Array, "*F RB"], new: GP) -> Float[Array, "..."]:
    """Values at the rows of `new` in the shape of its site, (B,) or (R, B)."""
    return jnp.reshape(x, (*x.shape[:-1], *new.shape()))


def prior_moments(prior: GP, shape: tuple[int, ...]) -> tuple[Array, Any]:
    """(mean, variance) in the shape of the site; of coupled functions their covariances within a
    row, (R, R, B), in place of variances.
    """
    if is_coupled(prior):
        return prior.mean, blocks_of(prior)
    return jnp.broadcast_to(prior.mean, shape), jnp.broadcast_to(prior.variance, shape)


def num_values(prior: GP, shape: tuple[int, ...], num: int) -> int:
    """Entries of all u of a site with `num` inducing variables."""
    return math.prod(batch_of(prior, shape)) * num
