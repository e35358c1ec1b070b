"""Factors of positive numbers (gamma, and inverse gamma as the gamma of 1 / x) and of positive
definite matrices (Wishart, and inverse Wishart as the Wishart of X^-1).
"""

import math
from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, random
from jax.scipy.special import digamma, multigammaln
from jaxtyping import Array, Float

from ppl_gp.mean_field.family import Family, Nodes, Rule, Values, by_element, lower, symmetric
from ppl_gp.numerics.linalg import inverse, log_det, root

_LARGEST = 300.0  # gap of two nodes: float64 has no exp(-2 gap) from 373 on


class Scaled(Family):
    """A factor of a positive number or matrix w, alone or with a mean whose precision it scales.

    Nodes have w at two multiples 1 -+ s of E[w], of weight M / 2 each, and at E[w], of weight 1 -
    M: their mean is E[w], and s is such that the mean of log|w| is that of q too. M > 1 where E
    log|w| is too low for two nodes. Where 1 / w has the mean of q, M is 1.
    """

    @property
    @abstractmethod
    def harmony(self) -> Array:
        """1 / (E[w] E[1 / w]) of each element, (*batch,); not positive if E[1 / w] is infinite."""

    @abstractmethod
    def gap(self, coordinates) -> Array:
        """(log|E[w]| - E log|w|) / D of each element, (*batch,)."""

    @abstractmethod
    def nodes_at(self, factors, weights, coordinates) -> Nodes:
        """Nodes with w at these multiples of its mean, of these weights."""

    def nodes(self, coordinates):
        gap = self.gap(coordinates)
        M = jnp.maximum(1.0, jnp.max(lax.stop_gradient(gap)) / _LARGEST)
        factors = *two_factors(gap / M), jnp.ones_like(gap)
        return self.nodes_at(factors, jnp.stack([0.5 * M, 0.5 * M, 1.0 - M]), coordinates)

    def lacks_variances(self):
        return float(jnp.min(self.harmony)) <= 0.0

    def moment_rules(self):
        return () if self.lacks_variances() else (self._rule(),)

    def _rule(self) -> Rule:
        return Rule(self, type(self).with_inverse, Scaled._with_inverses)

    @abstractmethod
    def with_inverse(self, row) -> Array:
        """(w, 1 / w) of one element, and what its mean makes with them."""

    def _with_inverses(self) -> Nodes:
        """Nodes with E[w] and E[1 / w]; where the latter is infinite, a node is zero."""
        gap = -0.5 * jnp.log(jnp.maximum(self.harmony, 0.0))
        return self.nodes_at(two_factors(gap), jnp.full(2, 0.5), self.coordinates())


def two_factors(gap: Array) -> tuple[Array, Array]:
    """(1 - s, 1 + s), s^2 = 1 - exp(-2 gap): mean logarithm -gap, mean inverse exp(2 gap)."""
    s = jnp.sqrt(-jnp.expm1(-2.0 * gap))
    return jnp.exp(-2.0 * gap) / (1.0 + s), 1.0 + s


class Gamma(Scaled):
    """w ~ Gamma(shape, rate) of each element, t = (w, log w); the site is w, or 1 / w where it is
    `inverted`. Three nodes; O(1) an element.
    """

    inverted: bool = eqx.field(static=True)
    shape: Float[Array, "*batch"]
    rate: Float[Array, "*batch"]

    @property
    def harmony(self):
        return (self.shape - 1.0) / self.shape

    def coordinates(self):
        """(E[w], E[log w])."""
        return self.shape / self.rate, digamma(self.shape) - jnp.log(self.rate)

    def gap(self, coordinates):
        mean, log_mean = coordinates
        return jnp.log(mean) - log_mean

    def nodes_at(self, factors, weights, coordinates):
        return Nodes(self.of(jnp.stack([c * coordinates[0] for c in factors])), weights)

    def natural(self, coordinates, gradient):
        """log q = (shape - 1) log w - rate w + const; of x = 1 / w, dx = w^-2 dw."""
        by_mean, by_log = gradient
        return self.at_eta((by_log + (-1.0 if self.inverted else 1.0), -by_mean))

    def distributions(self):
        kind = dist.InverseGamma if self.inverted else dist.Gamma
        return {self.sites[0]: kind(self.shape, self.rate)}

    def free(self, key, spread):
        """log w, about the mean."""
        centre = jnp.log(self.shape / self.rate).reshape(-1, 1)
        return centre + spread * random.normal(key, centre.shape, centre.dtype)

    def at(self, free):
        return self.of(jnp.exp(free).reshape(self.batch))

    def statistics(self, row):
        return jnp.concatenate([jnp.exp(row), row])

    def expectations(self, coordinates):
        return jnp.stack([x.reshape(-1) for x in coordinates], 1)

    def moment_rules(self):
        """Of variances 1 / w, for any shape; rates of counts; waiting times of scale 1 / w."""
        least = float(jnp.min(self.shape))
        found = [self._rule()]
        found += [Rule(self, Gamma._with_square, Gamma._three)] if least > 1.0 else []
        found += [Rule(self, Gamma._inverse_square, Gamma._two_inverses)] if least > 3.0 else []
        return tuple(found)

    def with_inverse(self, row):
        return jnp.concatenate([jnp.exp(row), jnp.exp(-row)])

    def _with_square(self, row):
        """(w, 1 / w, w^2)."""
        return jnp.concatenate([self.with_inverse(row), jnp.exp(2.0 * row)])

    def _three(self):
        """For shapes a > 1. The roots of x^3 - 3 a x^2 + 3 a (a - 1/2) x - a (a - 1/2) (a - 1) have
        the sums 3 a of x, 3 a (a + 1) of x^2 and 3 / (a - 1) of 1 / x.
        """
        a = self.shape
        angle = jnp.arccos(jnp.sqrt(0.5 / a))
        turns = 2.0 * jnp.pi * jnp.arange(3.0).reshape(-1, *(1 for _ in a.shape))
        away = jnp.sqrt(2.0 * a) * jnp.cos((angle + turns) / 3.0)
        return Nodes.equal(self.of((a + away) / self.rate))

    def _inverse_square(self, row):
        """(1 / w, 1 / w^2)."""
        return jnp.concatenate([jnp.exp(-row), jnp.exp(-2.0 * row)])

    def _two_inverses(self):
        """For shapes a > 3: two, mean and standard deviation of 1 / w."""
        s = 1.0 / jnp.sqrt(self.shape - 2.0)
        mean = self.rate / (self.shape - 1.0)
        return Nodes.equal(self.of(jnp.stack([1.0 / (mean * (1.0 - s)), 1.0 / (mean * (1.0 + s))])))

    def of(self, w) -> Values:
        """The site's values at values of w."""
        return {self.sites[0]: 1.0 / w if self.inverted else w}


class Wishart(Scaled):
    """W ~ Wishart(df, rate^-1) of each element, t = (W, log|W|); the site is W, or W^-1 where it is
    `inverted`. Three nodes; O(D^3) an element.
    """

    inverted: bool = eqx.field(static=True)
    df: Float[Array, "*batch"]
    rate: Float[Array, "*batch D D"]

    @property
    def size(self) -> int:
        return self.rate.shape[-1]

    @property
    def harmony(self):
        return (self.df - self.size - 1.0) / self.df

    def coordinates(self):
        """(E[W], E log|W|): PRML (B.80), (B.81)."""
        steps = jnp.sum(digamma(0.5 * (self.df[..., None] - jnp.arange(self.size))), -1)
        log_mean = steps + self.size * math.log(2.0) - log_det(self.rate)
        return self.df[..., None, None] * inverse(self.rate), log_mean

    def gap(self, coordinates):
        mean, log_mean = coordinates
        return (log_det(mean) - log_mean) / self.size

    def nodes_at(self, factors, weights, coordinates):
        W = jnp.stack([c[..., None, None] * coordinates[0] for c in factors])
        return Nodes(self.of(W), weights)

    def natural(self, coordinates, gradient):
        """log q = (df - D - 1) / 2 log|W| - tr(rate W) / 2 + const; for W^-1 see `_volume`."""
        by_mean, by_log = gradient
        shift = -1.0 if self.inverted else 1.0
        return self.at_eta((2.0 * by_log + shift * (self.size + 1.0), -2.0 * symmetric(by_mean)))

    def _log_normaliser(self):
        """log integral of |W|^((df - D - 1) / 2) exp(-tr(rate W) / 2): -log B of PRML (B.79)."""
        own = 0.5 * self.df * self.size * math.log(2.0) + multigammaln(0.5 * self.df, self.size)
        return own - 0.5 * self.df * log_det(self.rate)

    def _volume(self, log_w):
        """log|dW / dx| of the site x, at log|W|."""
        return (self.size + 1.0) * log_w if self.inverted else 0.0

    def entropy(self):
        """PRML (B.82), of the site."""
        _, log_mean = self.coordinates()
        own = self._log_normaliser() - 0.5 * (self.df - self.size - 1.0) * log_mean
        return jnp.sum(own + 0.5 * self.df * self.size - self._volume(log_mean))

    def log_prob(self, values):
        W = self.of(values[self.sites[0]])[self.sites[0]]
        log_w = log_det(W)
        own = 0.5 * (self.df - self.size - 1.0) * log_w - 0.5 * jnp.sum(self.rate * W, (-2, -1))
        return jnp.sum(own - self._log_normaliser() + self._volume(log_w))

    def distributions(self):
        if self.inverted:
            return {self.sites[0]: dist.InverseWishart(self.df, scale_matrix=self.rate)}
        return {self.sites[0]: dist.Wishart(self.df, rate_matrix=self.rate)}

    def draw(self, key, num):
        return self.of(dist.Wishart(self.df, rate_matrix=self.rate).sample(key, (num,)))

    def free(self, key, spread):
        """Free entries of roots about the mean's, (E, D (D + 1) / 2): rows scaled by factors of
        size exp(0.3 spread), as matrices of large condition would show rounding alone, and entries
        off the diagonal moved by little, whatever D, of which the condition would be exponential.
        """
        D = self.size
        L = root(self.coordinates()[0]).reshape(-1, D, D)
        rows, columns = jnp.tril_indices(D, -1)
        diagonal = jnp.diagonal(L, axis1=-2, axis2=-1)
        eps = 0.3 * spread * random.normal(key, (len(L), D * (D + 1) // 2), L.dtype)
        below = L[:, rows, columns] + diagonal[:, rows] * eps[:, D:] / D
        scaled = jnp.exp(eps[:, rows]) * below
        return jnp.concatenate([jnp.log(diagonal) + eps[:, :D], scaled], -1)

    def at(self, free):
        W = jax.vmap(lambda row: from_triangle(row, self.size))(free)
        return self.of(W.reshape(*self.batch, self.size, self.size))

    def statistics(self, row):
        return jnp.append(lower(from_triangle(row, self.size)), 2.0 * jnp.sum(row[: self.size]))

    def expectations(self, coordinates):
        mean, log_mean = coordinates
        return by_element(self.batch, lower(mean), log_mean[..., None])

    def with_inverse(self, row):
        W = from_triangle(row, self.size)
        return jnp.concatenate([lower(W), lower(inverse(W))])

    def of(self, W) -> Values:
        """The site's values at values of W."""
        return {self.sites[0]: inverse(W) if self.inverted else W}


def from_triangle(row: Array, size: int) -> Array:
    """L L' of its free entries, the diagonal's logarithms first."""
    L = jnp.diag(jnp.exp(row[:size])).at[jnp.tril_indices(size, -1)].set(row[size:])
    return L @ L.T
