"""The Gaussian distributions that a local method integrates, and what it asks of each.

One more Gaussian is one more class here: its mean is NumPyro's own, `spread` is what it is computed
from beside its mean, and `root` takes independent standard normal variables, in the shape of the
site, to innovations: z = mean + root(w).
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array

from ppl_gp.gp import GP
from ppl_gp.wrappers import unwrap


class GaussianSite:
    """What is asked of one kind of Gaussian distribution, `kind`."""

    kind: type[dist.Distribution]

    @staticmethod
    @abstractmethod
    def spread(fn: Any) -> list:
        """What `fn` is computed from beside its mean."""

    @staticmethod
    @abstractmethod
    def root(fn: Any) -> Callable[[Array], Array]:
        """white -> L white, in the shape of the site: L L^T is its covariance."""


class OfGP(GaussianSite):
    """A GP, or several of one kernel."""

    kind = GP

    @staticmethod
    def spread(fn):
        """Inputs, covariances, and variances with jitter."""
        return [fn.X, fn.kernel(fn.X, fn.X), fn.variance]

    @staticmethod
    def root(fn):
        """By the lower factor of the prior covariance."""
        return lambda white: white @ fn.scale_tril.T


class OfNormal(GaussianSite):
    """Independent entries."""

    kind = dist.Normal

    @staticmethod
    def spread(fn):
        """The standard deviation."""
        return [fn.scale]

    @staticmethod
    def root(fn):
        """The standard deviation times white."""
        return lambda white: jnp.broadcast_to(fn.scale, jnp.shape(white)) * white


class OfMultivariateNormal(GaussianSite):
    """Any covariance."""

    kind = dist.MultivariateNormal

    @staticmethod
    def spread(fn):
        """The covariance."""
        return [fn.covariance_matrix]

    @staticmethod
    def root(fn):
        """By the lower factor."""
        return lambda white: jnp.einsum("...ij,...j->...i", fn.scale_tril, white)


class OfRandomWalk(GaussianSite):
    """z_t = z_{t-1} + scale w_t, z_0 = scale w_0 (`numpyro.distributions.GaussianRandomWalk`)."""

    kind = dist.GaussianRandomWalk

    @staticmethod
    def spread(fn):
        """The standard deviation of a step."""
        return [jnp.asarray(fn.scale)]

    @staticmethod
    def root(fn):
        """Sums of steps, O(T)."""
        return lambda white: jnp.cumsum(jnp.expand_dims(fn.scale, -1) * white, -1)


class OfCAR(GaussianSite):
    """Precision tau (D - rho W) of areas with adjacency W and D its row sums."""

    kind = dist.CAR

    @staticmethod
    def spread(fn):
        """The precision."""
        return [fn.precision_matrix]

    @staticmethod
    def root(fn):
        """By the lower factor of the covariance. O(A^3) for A areas."""
        return OfMultivariateNormal.root(
            dist.MultivariateNormal(precision_matrix=fn.precision_matrix)
        )


_KINDS: tuple[type[GaussianSite], ...] = (
    OfGP,
    OfNormal,
    OfMultivariateNormal,
    OfRandomWalk,
    OfCAR,
)


def gaussian(fn: Any) -> type[GaussianSite] | None:
    """What is asked of a distribution, through NumPyro's wrappers, or `None` where it is not known
    to be Gaussian. Of exact classes and their subclasses.
    """
    inner = unwrap(fn)
    return next((kind for kind in _KINDS if isinstance(inner, kind.kind)), None)


def spread_of(fn: Any) -> list:
    """What a Gaussian is computed from beside its mean."""
    kind = gaussian(fn)
    assert kind is not None
    return kind.spread(unwrap(fn))


def root_of(fn: Any) -> Callable[[Array], Array]:
    """white -> L white, in the shape of the site `fn`, which may be expanded."""
    kind, shape = gaussian(fn), fn.shape()
    assert kind is not None
    root = kind.root(unwrap(fn))
    return lambda white: jnp.broadcast_to(root(white), shape)
