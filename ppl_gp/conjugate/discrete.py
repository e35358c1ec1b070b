"""Factors of discrete sites with few categories, summed one by one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from jaxtyping import Array, Float

from ppl_gp.conjugate.family import Family, Nodes

_LEAST = -1e300  # of log q: (1 - rate) times it is a number at a rate of one too


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
        return jnp.maximum(self.log_probs, _LEAST)

    def at_eta(self, eta):
        """Normalised."""
        log_probs = jax.nn.log_softmax(eta)
        return Discrete(self.sites, self.batch, self.categories, log_probs)

    def entropy(self):
        """- sum q log q."""
        q = jnp.exp(self.log_probs)
        return -jnp.sum(jnp.where(q > 0, q * jnp.where(q > 0, self.log_probs, 0.0), 0.0))

    def distributions(self):
        """`Categorical` over the positions of the categories: over the values, where these count
        from zero.
        """
        return {self.sites[0]: dist.Categorical(probs=jnp.exp(self.log_probs))}

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
