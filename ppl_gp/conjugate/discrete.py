"""Factors of discrete sites with few categories, summed one by one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from ppl_gp.conjugate.family import Family, Nodes

LEAST = -1e300  # of log q and log p: nothing times it is nothing, as nothing times -inf is not


class CategoricalOver(dist.CategoricalProbs):
    """P(X = values_k) = probs_k, probs (..., K), of integers that need not count from zero."""

    pytree_data_fields = ("probs",)
    pytree_aux_fields = ("values",)

    def __init__(self, probs, values: tuple[int, ...], *, validate_args=None):
        self.values = tuple(values)
        super().__init__(probs, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self):
        """From the smallest value to the largest."""
        return constraints.integer_interval(min(self.values), max(self.values))

    def sample(self, key, sample_shape=()):
        """Of the values."""
        return jnp.asarray(self.values)[super().sample(key, sample_shape)]

    def log_prob(self, value):
        """Of values; of what lies between them, -inf."""
        if self._validate_args:
            self._validate_sample(value)
        own = jnp.asarray(value)[..., None] == jnp.asarray(self.values)
        return jnp.max(jnp.where(own, self.logits, -jnp.inf), -1)

    @property
    def mean(self):
        """sum_k probs_k values_k."""
        return self.probs @ jnp.asarray(self.values, self.probs.dtype)

    @property
    def variance(self):
        """sum_k probs_k values_k^2 - mean^2."""
        away = jnp.asarray(self.values) - self.mean[..., None]
        return jnp.sum(self.probs * away**2, -1)

    def enumerate_support(self, expand=True):
        """The values."""
        return jnp.asarray(self.values)[super().enumerate_support(expand)]


class Discrete(Family):
    """q(z_n = values_k) of each element; t = one-hot.

    Nodes: every category, for all elements at once, with the probabilities as weights. O(K) an
    element.
    """

    sites: tuple[str, ...] = eqx.field(static=True)
    batch: tuple[int, ...] = eqx.field(static=True)
    categories: tuple[int, ...] = eqx.field(static=True)
    log_probs: Float[Array, "*batch K"]

    def coordinates(self):
        """Probabilities."""
        return jnp.exp(self.log_probs)

    def nodes(self, coordinates):
        """K."""
        values = jnp.asarray(self.categories).reshape(-1, *(1 for _ in self.batch))
        every = jnp.broadcast_to(values, (len(self.categories), *self.batch))
        return Nodes({self.sites[0]: every}, jnp.moveaxis(coordinates, -1, 0))

    def natural(self, coordinates, gradient):
        """q_k in proportion to exp E[log p at k] (PRML 10.49)."""
        log_probs = jax.nn.log_softmax(gradient)
        return Discrete(self.sites, self.batch, self.categories, log_probs)

    def eta(self):
        """log q, whose constant does not matter; a category that cannot be has a finite one."""
        return jnp.maximum(self.log_probs, LEAST)

    def at_eta(self, eta):
        """Normalised."""
        log_probs = jax.nn.log_softmax(eta)
        return Discrete(self.sites, self.batch, self.categories, log_probs)

    def entropy(self):
        """- sum q log q."""
        q = jnp.exp(self.log_probs)
        return -jnp.sum(jnp.where(q > 0, q * jnp.where(q > 0, self.log_probs, 0.0), 0.0))

    def distributions(self):
        """`Categorical`; over the site's own values where these do not count from zero."""
        probs = jnp.exp(self.log_probs)
        counts = self.categories == tuple(range(len(self.categories)))
        own = dist.CategoricalProbs(probs) if counts else CategoricalOver(probs, self.categories)
        return {self.sites[0]: own}

    def log_prob(self, values):
        """Of labels among the categories."""
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
        """The site's values."""
        k = free.astype(int).reshape(self.batch)
        return {self.sites[0]: jnp.asarray(self.categories)[k]}

    def statistics(self, row):
        """One-hot."""
        return jax.nn.one_hot(row[0], len(self.categories))


def discrete(sites, batch, categories, probs: Array) -> Discrete:
    """With these probabilities."""
    return Discrete(tuple(sites), tuple(batch), tuple(categories), jnp.log(probs))
