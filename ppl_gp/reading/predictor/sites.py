"""The Gaussian distributions that a local method integrates: z = mean + L w, w independent standard
normal variables, of each the mean and the linear map L.

A distribution is Gaussian if its class is in the table below, or if it is a Gaussian transformed by
what is proved to be affine (`reading.affine`): `ZeroSumNormal`, `CirculantNormal`,
`GaussianStateSpace`, and those that a user composes.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions.transforms import ComposeTransform

from ppl_gp.gp import GP, unwrap
from ppl_gp.reading.affine import Dependence, dependence

Root = Callable[[Array], Array]


def _by_factor(fn) -> Root:
    """By the lower factor of a covariance."""
    return lambda white: jnp.einsum("...ij,...j->...i", fn.scale_tril, white)


def _of_matrix(fn) -> Root:
    columns = jnp.swapaxes(fn.scale_tril_column, -2, -1)
    return lambda white: fn.scale_tril_row @ white @ columns


# class -> (distribution) -> (white, in the shape of the site, -> L white)
_ROOTS: dict[type, Callable[[Any], Root]] = {
    GP: lambda fn: lambda white: white @ fn.scale_tril.T,
    dist.Normal: lambda fn: lambda white: jnp.broadcast_to(fn.scale, jnp.shape(white)) * white,
    dist.MultivariateNormal: _by_factor,
    dist.LowRankMultivariateNormal: _by_factor,
    dist.MatrixNormal: _of_matrix,
    # z_t = z_{t-1} + scale w_t: sums of steps, O(T)
    dist.GaussianRandomWalk: lambda fn: (
        lambda white: jnp.cumsum(jnp.expand_dims(fn.scale, -1) * white, -1)
    ),
    # precision tau (D - rho W) of areas with adjacency W. O(A^3) for A areas
    dist.CAR: lambda fn: _by_factor(dist.MultivariateNormal(precision_matrix=fn.precision_matrix)),
}


def gaussian(fn: Any) -> bool:
    """Whether a distribution is known to be Gaussian, through NumPyro's wrappers. Abstract."""
    inner = unwrap(fn)
    if kind := next((k for k in _ROOTS if isinstance(inner, k)), None):
        return kind is GP or type(inner).log_prob is kind.log_prob  # a user's class may differ
    if not isinstance(inner, dist.TransformedDistribution):
        return False
    base: Any = inner.base_dist
    if not gaussian(base) or math.prod(base.shape()) > math.prod(inner.shape()):
        return False
    return dependence(_map_of(inner), jnp.zeros(base.shape())) == (Dependence.affine,)


def _map_of(fn: dist.TransformedDistribution) -> ComposeTransform:
    return ComposeTransform(list(fn.transforms))


def mean_of(fn: Any) -> Array:
    """The mean of a Gaussian, in a shape that broadcasts to that of the site."""
    inner = unwrap(fn)
    if not isinstance(inner, dist.TransformedDistribution):
        return inner.mean
    base = inner.base_dist
    return jnp.asarray(_map_of(inner)(jnp.broadcast_to(mean_of(base), base.shape())))


def spread_of(fn: Any) -> list:
    """What a Gaussian is computed from beside its mean."""
    inner = unwrap(fn)
    if isinstance(inner, GP):
        return [inner.X, inner.kernel(inner.X, inner.X), inner.variance]
    return [_root(inner)(jnp.ones(inner.shape()))]


def root_of(fn: Any) -> Root:
    """white -> L white, in the shape of the site `fn`, which may be expanded."""
    root, shape = _root(unwrap(fn)), fn.shape()
    return lambda white: jnp.broadcast_to(root(white), shape)


def _root(fn: Any) -> Root:
    if isinstance(fn, dist.TransformedDistribution):
        return _of_map(fn)
    return next(root(fn) for kind, root in _ROOTS.items() if isinstance(fn, kind))


def _of_map(fn: dist.TransformedDistribution) -> Root:
    """The slope of the map times the root of its base, which has as many variables as the site or
    fewer: what is left over counts for nothing.
    """
    base: Any = fn.base_dist
    event = base.shape()[len(fn.batch_shape) :]
    root, transform = _root(unwrap(base)), _map_of(fn)

    def pushed(white):
        lead = white.shape[: white.ndim - fn.event_dim]
        flat = jnp.reshape(white, (*lead, -1))[..., : math.prod(event)]
        step = root(jnp.reshape(flat, (*lead, *event)))
        return jax.jvp(transform, (jnp.zeros_like(step),), (step,))[1]

    return pushed
