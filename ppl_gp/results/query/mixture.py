"""Mixtures over weighted draws, accumulated in one pass: memory does not grow with the number of
draws.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.numerics import blocks as small


class Moments(NamedTuple):
    """Mean and variance of something, arrays of one shape."""

    mean: Float[Array, "..."]
    variance: Float[Array, "..."]


class JointMoments(NamedTuple):
    """Mean and variance of R functions that are correlated within a row, (R, M), and S with S S^T
    their covariance there, (M, R, R).
    """

    mean: Float[Array, "R M"]
    variance: Float[Array, "R M"]
    root: Float[Array, "M R R"]

    @classmethod
    def of(cls, mean, variance, covariance: Float[Array, "M R R"]) -> "JointMoments":
        """With S a factor, which a covariance without full rank has too."""
        return cls(mean, variance, small.lower_root(covariance))

    def at(self, z: Float[Array, "R _"]) -> Float[Array, "R M"]:
        """The functions at independent standard normal z."""
        rows = jnp.broadcast_to(z, self.mean.shape)
        return self.mean + jnp.einsum("mab,bm->am", self.root, rows)


def plain(moments: Moments | JointMoments) -> Moments:
    """Without the correlations, which a mixture need not carry."""
    return Moments(moments.mean, moments.variance)


def mixture(
    component: Callable[[Any], Any], draws: Any, log_weights: Float[Array, "S"] | None = None
) -> Any:
    """Mix component(draw) over the leading axis of the pytree `draws`, by weights exp(log_weights),
    or in equal shares.

    `Moments` in what a component returns mix by the laws of total expectation and total variance;
    any other array is a log density, and mixes as logsumexp over draws of log weight + log density.
    """
    num = jax.tree.leaves(draws)[0].shape[0]
    if num == 1:
        return component(jax.tree.map(lambda x: x[0], draws))
    # Only the weights' ratios matter: what was mixed so far has the sum of its weights.
    weights = jnp.ones(num) if log_weights is None else jnp.exp(log_weights - jnp.max(log_weights))

    def step(carry, entry):
        before, total = carry
        draw, weight = entry
        after = before + weight
        return (after, _combine(total, component(draw), weight / after)), None

    shape = jax.eval_shape(component, jax.tree.map(lambda x: x[0], draws))
    empty = jax.tree.map(_empty, shape, is_leaf=_is_moments)
    (_, total), _ = lax.scan(step, (jnp.zeros((), weights.dtype), empty), (draws, weights))
    return total


def _is_moments(x):
    return isinstance(x, Moments)


def _empty(shape):
    if _is_moments(shape):
        return Moments(*(jnp.zeros(s.shape, s.dtype) for s in shape))
    return jnp.full(shape.shape, -jnp.inf, shape.dtype)


def _combine(total, part, share):
    """The mixture of draws before and one more, which has this share of it."""

    def combine(old, new):
        w = share.astype(jnp.result_type(new.mean if _is_moments(new) else new))
        if not _is_moments(new):
            return jnp.logaddexp(old + jnp.log1p(-w), new + jnp.log(w))
        shift = new.mean - old.mean
        return Moments(
            old.mean + w * shift, (1 - w) * old.variance + w * new.variance + w * (1 - w) * shift**2
        )

    return jax.tree.map(combine, total, part, is_leaf=_is_moments)
