"""Factors of positive numbers (gamma, and inverse gamma as the gamma of 1 / x) and of positive
definite matrices (Wishart, and inverse Wishart as the Wishart of X^-1).
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from jax.scipy.special import digamma, gammaln, multigammaln
from jaxtyping import Array, Float

from ppl_gp.mean_field.family import (
    Family,
    Nodes,
    Values,
    by_element,
    lower,
    symmetric,
)
from ppl_gp.numerics.roots import inverse, log_det, root


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


def expected_log_det(df, rate):
    """E log|W| of W ~ Wishart(df, rate^-1): PRML (B.81)."""
    D = rate.shape[-1]
    steps = jnp.sum(digamma(0.5 * (df[..., None] - jnp.arange(D))), -1)
    return steps + D * math.log(2.0) - log_det(rate)


def log_normaliser(df, rate):
    """log integral of |W|^((df - D - 1) / 2) exp(-tr(rate W) / 2): minus log B of PRML (B.79)."""
    D = rate.shape[-1]
    own = 0.5 * df * D * math.log(2.0) + multigammaln(0.5 * df, D)
    return own - 0.5 * df * log_det(rate)


def wishart_entropy(df, rate):
    """PRML (B.82)."""
    D = rate.shape[-1]
    log_mean = expected_log_det(df, rate)
    return log_normaliser(df, rate) - 0.5 * (df - D - 1.0) * log_mean + 0.5 * df * D


def wishart_log_prob(W, df, rate):
    """PRML (B.78)."""
    own = 0.5 * (df - rate.shape[-1] - 1.0) * log_det(W)
    return own - 0.5 * jnp.sum(rate * W, (-2, -1)) - log_normaliser(df, rate)


def from_triangle(row: Array, size: int) -> Array:
    """L L' of its free entries, the diagonal's logarithms first."""
    L = jnp.diag(jnp.exp(row[:size])).at[jnp.tril_indices(size, -1)].set(row[size:])
    return L @ L.T


def some_triangles(key, mean: Array, spread) -> Array:
    """(E, D (D + 1) / 2) free entries of roots about those of the mean: rows scaled by factors of
    size exp(spread), and entries off the diagonal moved by little, whatever D, of which the
    condition would be exponential.
    """
    L = root(mean).reshape(-1, *mean.shape[-2:])
    D = L.shape[-1]
    rows, columns = jnp.tril_indices(D, -1)
    diagonal = jnp.diagonal(L, axis1=-2, axis2=-1)
    eps = spread * random.normal(key, (len(L), D * (D + 1) // 2), L.dtype)
    lower = L[:, rows, columns] + diagonal[:, rows] * eps[:, D:] / D
    scaled = jnp.exp(eps[:, rows]) * lower
    return jnp.concatenate([jnp.log(diagonal) + eps[:, :D], scaled], -1)


class Wishart(Family):
    """W ~ Wishart(df, rate^-1) of each element, t = (W, log|W|); the site is W, or W^-1 where it is
    `inverted`.

    Two nodes (1 -+ s) E[W], of equal weights: their mean is E[W], that of their log-determinants
    E log|W|. O(D^3) an element.
    """

    sites: tuple[str, ...] = eqx.field(static=True)
    batch: tuple[int, ...] = eqx.field(static=True)
    inverted: bool = eqx.field(static=True)
    df: Float[Array, "*batch"]
    rate: Float[Array, "*batch D D"]

    @property
    def size(self) -> int:
        """D."""
        return self.rate.shape[-1]

    def coordinates(self):
        """(E[W], E log|W|)."""
        return self.df[..., None, None] * inverse(self.rate), expected_log_det(self.df, self.rate)

    def nodes(self, coordinates):
        """Two."""
        mean, log_mean = coordinates
        factors = two_factors((log_det(mean) - log_mean) / self.size)
        W = jnp.stack([c[..., None, None] * mean for c in factors])
        return Nodes(self.of(W), jnp.full(2, 0.5, W.dtype))

    def natural(self, coordinates, gradient):
        """log q = (df - D - 1) / 2 log|W| - tr(rate W) / 2 + const; of W^-1, the volume is
        |W|^(D + 1).
        """
        by_mean, by_log = gradient
        shift = -1.0 if self.inverted else 1.0
        df = 2.0 * by_log + shift * (self.size + 1.0)
        return Wishart(self.sites, self.batch, self.inverted, df, -2.0 * symmetric(by_mean))

    def entropy(self):
        """Of the site."""
        volume = (self.size + 1.0) * expected_log_det(self.df, self.rate) if self.inverted else 0.0
        return jnp.sum(wishart_entropy(self.df, self.rate) - volume)

    def log_prob(self, values):
        """Of the site."""
        W = self.of(values[self.sites[0]])[self.sites[0]]
        volume = (self.size + 1.0) * log_det(W) if self.inverted else 0.0
        return jnp.sum(wishart_log_prob(W, self.df, self.rate) + volume)

    def distributions(self):
        """`Wishart` or `InverseWishart`."""
        own: dist.Distribution = (
            dist.InverseWishart(self.df, scale_matrix=self.rate)
            if self.inverted
            else dist.Wishart(self.df, rate_matrix=self.rate)
        )
        return {self.sites[0]: own}

    def draw(self, key, num):
        """Independent."""
        W = dist.Wishart(self.df, rate_matrix=self.rate).sample(key, (num,))
        return self.of(W)

    def free(self, key, spread):
        """Roots about the mean's; matrices of large condition would show rounding alone."""
        return some_triangles(key, self.coordinates()[0], 0.3 * spread)

    def at(self, free):
        """The site's values."""
        W = jax.vmap(lambda row: from_triangle(row, self.size))(free)
        return self.of(W.reshape(*self.batch, self.size, self.size))

    def statistics(self, row):
        """(W, log|W|)."""
        W = from_triangle(row, self.size)
        return jnp.append(W[jnp.tril_indices(self.size)], 2.0 * jnp.sum(row[: self.size]))

    def expectations(self, coordinates):
        """(E[W], E log|W|)."""
        mean, log_mean = coordinates
        return by_element(self.batch, lower(mean), log_mean[..., None])

    def of(self, W) -> Values:
        """The site's values at values of W."""
        return {self.sites[0]: inverse(W) if self.inverted else W}


def wishart(sites, batch, mean, inverted: bool = False) -> Wishart:
    """With D + 1 degrees of freedom and this mean of W."""
    df = jnp.full(batch, mean.shape[-1] + 1.0, mean.dtype)
    rate = df[..., None, None] * inverse(jnp.broadcast_to(mean, (*batch, *mean.shape[-2:])))
    return Wishart(tuple(sites), tuple(batch), inverted, df, rate)
