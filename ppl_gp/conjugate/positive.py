"""Factors of positive numbers: gamma, and inverse gamma as the gamma of 1 / x."""

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Float

from ppl_gp.conjugate.family import Family, Nodes, Values


def two_factors(gap: Array) -> tuple[Array, Array]:
    """(c_-, c_+) of mean 1 whose logarithms have the mean -gap: 1 -+ s with s^2 = 1 - exp(-2
    gap).
    """
    s = jnp.sqrt(-jnp.expm1(-2.0 * gap))
    return jnp.exp(-2.0 * gap) / (1.0 + s), 1.0 + s


class Gamma(Family):
    """w ~ Gamma(shape, rate) of each element, t = (w, log w); the site is w, or 1 / w where it is
    `inverted`.

    Two nodes E[w] (1 -+ s), of equal weights: their mean is E[w], that of their logarithms E[log
    w]. O(1) an element.
    """

    sites: tuple[str, ...] = eqx.field(static=True)
    batch: tuple[int, ...] = eqx.field(static=True)
    inverted: bool = eqx.field(static=True)
    shape: Float[Array, "*batch"]
    rate: Float[Array, "*batch"]

    def coordinates(self):
        """(E[w], E[log w])."""
        return self.shape / self.rate, digamma(self.shape) - jnp.log(self.rate)

    def nodes(self, coordinates):
        """Two."""
        mean, log_mean = coordinates
        w = jnp.stack([mean * c for c in two_factors(jnp.log(mean) - log_mean)])
        return Nodes(self.of(w), jnp.full(2, 0.5, w.dtype))

    def natural(self, coordinates, gradient):
        """log q = (shape - 1) log w - rate w + const; of x = 1 / w, dx = w^-2 dw."""
        by_mean, by_log = gradient
        shape = by_log + (-1.0 if self.inverted else 1.0)
        return Gamma(self.sites, self.batch, self.inverted, shape, -by_mean)

    def entropy(self):
        """Of the site."""
        a, (_, log_mean) = self.shape, self.coordinates()
        own = a - jnp.log(self.rate) + gammaln(a) + (1.0 - a) * digamma(a)
        return jnp.sum(own - 2.0 * log_mean if self.inverted else own)

    def distributions(self):
        """`Gamma` or `InverseGamma`."""
        kind = dist.InverseGamma if self.inverted else dist.Gamma
        return {self.sites[0]: kind(self.shape, self.rate)}

    def draw(self, key, num):
        """Independent."""
        w = random.gamma(key, self.shape, (num, *self.batch)) / self.rate
        return self.of(w)

    def free(self, key, spread):
        """log w, about the mean."""
        centre = jnp.log(self.shape / self.rate).reshape(-1, 1)
        return centre + spread * random.normal(key, centre.shape, centre.dtype)

    def at(self, free):
        """The site's values."""
        return self.of(jnp.exp(free).reshape(self.batch))

    def statistics(self, row):
        """(w, log w)."""
        return jnp.concatenate([jnp.exp(row), row])

    def expectations(self, coordinates):
        """(E[w], E[log w])."""
        mean, log_mean = coordinates
        return jnp.stack([mean.reshape(-1), log_mean.reshape(-1)], 1)

    def of(self, w) -> Values:
        """The site's values at values of w."""
        return {self.sites[0]: 1.0 / w if self.inverted else w}


def gamma(sites, batch, mean, inverted: bool = False) -> Gamma:
    """With shape one and this mean of w."""
    mean = jnp.broadcast_to(mean, batch)
    return Gamma(tuple(sites), tuple(batch), inverted, jnp.ones_like(mean), 1.0 / mean)
