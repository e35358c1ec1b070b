"""Factors of discrete sites with few categories, summed one by one, and of their probabilities:
Dirichlet, and beta as the Dirichlet of two.
"""

import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, random
from jax.nn import log_softmax, logsumexp
from jax.scipy.special import digamma
from jaxtyping import Array, Float
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from ppl_gp.mean_field.family import Family, Nodes, Rule, Values, lower

LEAST = -1e300  # of log q and log p: nothing times it is nothing, as nothing times -inf is not


class CategoricalOver(dist.CategoricalProbs):
    """P(X = values_k) = probs_k, probs (..., K), of integers that need not count from zero."""

    pytree_data_fields = ("probs",)
    pytree_aux_fields = ("values",)

    def __init__(self, probs, values: tuple[int, ...], *, validate_args=None):
        self.values = tuple(values)
        super().__init__(probs, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=0)  # pyright: ignore[reportArgumentType] of NumPyro's
    def support(self):
        """From the smallest value to the largest."""
        return constraints.integer_interval(min(self.values), max(self.values))

    def sample(self, key, sample_shape=()):
        return jnp.asarray(self.values)[super().sample(key, sample_shape)]

    @validate_sample
    def log_prob(self, value):
        """Of values; of what lies between them, -inf."""
        own = jnp.asarray(value)[..., None] == jnp.asarray(self.values)
        return jnp.max(jnp.where(own, self.logits, -jnp.inf), -1)  # pyright: ignore[reportArgumentType] a property

    @property
    def mean(self):
        """sum_k probs_k values_k."""
        return self.probs @ jnp.asarray(self.values, jnp.result_type(self.probs))

    @property
    def variance(self):
        """sum_k probs_k values_k^2 - mean^2."""
        return jnp.sum(self.probs * (jnp.asarray(self.values) - self.mean[..., None]) ** 2, -1)

    def enumerate_support(self, expand=True):
        return jnp.asarray(self.values)[super().enumerate_support(expand)]


class Discrete(Family):
    """q(z_n = values_k) of each element; t = one-hot. Nodes: every category, for all elements at
    once, with the probabilities as weights. O(K) an element.
    """

    is_discrete: ClassVar[bool] = True

    categories: tuple[int, ...] = eqx.field(static=True)
    log_probs: Float[Array, "*batch K"]

    def coordinates(self):
        return jnp.exp(self.log_probs)

    def nodes(self, coordinates):
        values = jnp.asarray(self.categories).reshape(-1, *(1 for _ in self.batch))
        every = jnp.broadcast_to(values, (len(self.categories), *self.batch))
        return Nodes({self.sites[0]: every}, jnp.moveaxis(coordinates, -1, 0))

    def natural(self, coordinates, gradient):
        """q_k in proportion to exp E[log p at k] (PRML 10.49)."""
        return self.at_eta(gradient)

    def eta(self):
        """log q, whose constant does not matter; a category that cannot be has a finite one."""
        return jnp.maximum(self.log_probs, LEAST)

    def at_eta(self, eta):
        return Discrete(self.sites, self.batch, self.categories, log_softmax(eta))

    def distributions(self):
        """`Categorical`; over the site's own values where these do not count from zero."""
        probs = jnp.exp(self.log_probs)
        counts = self.categories == tuple(range(len(self.categories)))
        own = dist.CategoricalProbs(probs) if counts else CategoricalOver(probs, self.categories)
        return {self.sites[0]: own}

    def log_prob(self, values):
        own = values[self.sites[0]][..., None] == jnp.asarray(self.categories)
        return jnp.sum(jnp.where(own, self.log_probs, 0.0))

    def draw(self, key, num):
        """Independent, by the inverse of the distribution function: one random number a draw, where
        Gumbel's trick takes K logarithms. O(num K) an element.
        """
        steps = jnp.cumsum(jnp.exp(self.log_probs), -1)
        u = random.uniform(key, (num, *self.batch), steps.dtype) * steps[..., -1]
        k = jnp.sum(u[..., None] >= steps[..., :-1], -1)
        return {self.sites[0]: jnp.asarray(self.categories)[k]}

    def free(self, key, spread):
        """Categories, as floats."""
        shape = (self.log_probs[..., 0].size, 1)
        return random.randint(key, shape, 0, len(self.categories)).astype(self.log_probs.dtype)

    def at(self, free):
        k = free.astype(int).reshape(self.batch)
        return {self.sites[0]: jnp.asarray(self.categories)[k]}

    def statistics(self, row):
        return jax.nn.one_hot(row[0], len(self.categories))


def discrete(sites, batch, categories, probs: Array) -> Discrete:
    """With these probabilities."""
    return Discrete(tuple(sites), tuple(batch), tuple(categories), jnp.log(probs))


_LARGEST = 200.0  # of a node's log probability: far from what float64 rounds to zero
_LARGEST_OF_BETA = 5.0  # whose model has 1 - p for the second: far from what rounding leaves of it
_LEAST_OFF = 1e-30  # where rounding would leave nothing of it, or less


class Dirichlet(Family):
    """p ~ Dirichlet(alpha) of each element, t = log p; K = 2 and the first alone: a beta.

    Nodes inside the simplex whose weighted logarithms are m = E[log p], which no single point of it
    has: with u = -log K, m' = u + (m - u) / M and c = log sum exp m' <= 0, the point of logarithms
    m' - c, of weight M; the two of logarithms +-h d - log sum exp(+-h d), d = (1, -1, 1, ...), that
    are u + c on average, of weight M / 2 each; and the centre u, of weight 1 - 2 M. M >= 1 keeps
    the logarithms of an empty component (E[log p] = -1000 for alpha = 0.001) where floating point
    has numbers. O(K) an element.
    """

    is_beta: bool = eqx.field(static=True)
    alpha: Float[Array, "*batch K"]

    @property
    def name(self) -> str:
        return "Beta" if self.is_beta else "Dirichlet"

    @property
    def size(self) -> int:
        return self.alpha.shape[-1]

    def coordinates(self):
        """E[log p]."""
        return digamma(self.alpha) - digamma(jnp.sum(self.alpha, -1, keepdims=True))

    def nodes(self, coordinates):
        """Four; of one category, which is sure, one."""
        if (K := self.size) == 1:
            return Nodes(self.of(jnp.exp(coordinates)[None]), jnp.ones(1))
        centre = jnp.full_like(coordinates, -math.log(K))
        largest = _LARGEST_OF_BETA if self.is_beta else _LARGEST
        M = jnp.maximum(1.0, jnp.max(jnp.abs(lax.stop_gradient(coordinates))) / largest)
        inner = centre + (coordinates - centre) / M
        # of n entries 1 and K - n entries -1 in d: sinh(h)^2 = K^2 (exp(-2 c) - 1) / (4 n (K - n))
        n = (K + 1) // 2
        off = jnp.maximum(-2.0 * logsumexp(inner, -1, keepdims=True), _LEAST_OFF)
        h = jnp.arcsinh(0.5 * K * jnp.sqrt(jnp.expm1(off) / (n * (K - n))))
        step = jnp.where(jnp.arange(K) % 2 == 0, h, -h)
        log_p = jnp.stack([*map(log_softmax, (inner, step, -step)), centre])
        return Nodes(self.of(jnp.exp(log_p)), jnp.stack([M, 0.5 * M, 0.5 * M, 1.0 - 2.0 * M]))

    def natural(self, coordinates, gradient):
        """log q = sum (alpha - 1) log p + const."""
        return self.at_eta((1.0 + gradient,))

    def distributions(self):
        if self.is_beta:
            return {self.sites[0]: dist.Beta(self.alpha[..., 0], self.alpha[..., 1])}
        return {self.sites[0]: dist.Dirichlet(self.alpha)}

    def draw(self, key, num):
        """Independent, in logarithms first: a small alpha has draws below the smallest number."""
        w = random.loggamma(key, self.alpha, (num, *self.alpha.shape))
        return self.of(jnp.exp(log_softmax(w)))

    def free(self, key, spread):
        return spread * random.normal(key, (self.alpha[..., 0].size, self.size), self.alpha.dtype)

    def at(self, free):
        return self.of(jax.nn.softmax(free).reshape(*self.batch, self.size))

    def statistics(self, row):
        return log_softmax(row)

    def expectations(self, coordinates):
        return coordinates.reshape(-1, self.size)

    def moment_rules(self):
        """p, and of one element p p'."""
        first = Rule(self, Dirichlet._probabilities, Dirichlet._mean)
        alone = self.alpha.size == self.size
        return (first, Rule(self, Dirichlet._products, Dirichlet._urn)) if alone else (first,)

    def _probabilities(self, row):
        return jnp.exp(log_softmax(row))

    def _mean(self):
        mean = self.alpha / jnp.sum(self.alpha, -1, keepdims=True)
        return Nodes.equal(self.of(mean[None]))

    def _products(self, row):
        p = self._probabilities(row)
        return lower(jnp.outer(p, p))

    def _urn(self):
        """Polya's urn: E[p p'] = (A m m' + diag(m)) / (A + 1), A = sum alpha; mean and corners."""
        alpha, K = self.alpha.reshape(-1), self.size
        total = jnp.sum(alpha)
        points = jnp.concatenate([alpha[None] / total, jnp.eye(K, dtype=alpha.dtype)])
        weights = jnp.concatenate([total[None], alpha / total]) / (total + 1.0)
        return Nodes(self.of(points.reshape(K + 1, *self.batch, K)), weights)

    def of(self, p) -> Values:
        """The site's values at probabilities p."""
        return {self.sites[0]: p[..., 0] if self.is_beta else p}
