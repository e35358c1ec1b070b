"""Factors of discrete sites with few categories, summed one by one, and of their probabilities:
Dirichlet, and beta as the Dirichlet of two.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, random
from jax.nn import log_softmax, logsumexp
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from ppl_gp.mean_field.family import Family, Nodes, Values

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


_LARGEST = 200.0  # of a node's log probability: far from what float64 rounds to zero
_STEPS = 60  # Newton steps from the right of a convex function: the last dozen change rounding


class Dirichlet(Family):
    """p ~ Dirichlet(alpha) of each element, t = log p; K = 2 and the first alone: a beta.

    Nodes inside the simplex whose weighted logarithms are m = E[log p], which no single point of it
    has: with u = -log K and m' = u + (m - u) / M, two points log p = m' +- h d - log sum exp(m' +-
    h d), d fixed, h such that the two normalisers cancel, of weight M / 2 each, and the centre, of
    weight 1 - M. M >= 1 keeps the logarithms of an empty component (E[log p] = -1000 for alpha =
    0.001) where floating point has numbers. O(K) an element.
    """

    sites: tuple[str, ...] = eqx.field(static=True)
    batch: tuple[int, ...] = eqx.field(static=True)
    is_beta: bool = eqx.field(static=True)
    alpha: Float[Array, "*batch K"]

    @property
    def name(self) -> str:
        """Of what it is."""
        return "Beta" if self.is_beta else "Dirichlet"

    @property
    def size(self) -> int:
        """K."""
        return self.alpha.shape[-1]

    def coordinates(self):
        """E[log p]."""
        return digamma(self.alpha) - digamma(jnp.sum(self.alpha, -1, keepdims=True))

    def nodes(self, coordinates):
        """Three; of one category, which is sure, one."""
        if self.size == 1:
            return Nodes(self.of(jnp.exp(coordinates)[None]), jnp.ones(1))
        centre = -jnp.log(jnp.asarray(float(self.size), coordinates.dtype))
        far = jnp.max(jnp.abs(lax.stop_gradient(coordinates)))
        M = jnp.maximum(1.0, far / _LARGEST)
        inner = centre + (coordinates - centre) / M
        d = jnp.where(jnp.arange(self.size) % 2 == 0, 1.0, -1.0).astype(inner.dtype)
        step = _step(inner, d)[..., None] * d
        log_p = jnp.stack(
            [log_softmax(inner + step), log_softmax(inner - step), jnp.full_like(inner, centre)]
        )
        return Nodes(self.of(jnp.exp(log_p)), jnp.stack([0.5 * M, 0.5 * M, 1.0 - M]))

    def natural(self, coordinates, gradient):
        """log q = sum (alpha - 1) log p + const."""
        return Dirichlet(self.sites, self.batch, self.is_beta, 1.0 + gradient)

    def entropy(self):
        """log B(alpha) - sum (alpha - 1) E[log p]."""
        log_b = jnp.sum(gammaln(self.alpha), -1) - gammaln(jnp.sum(self.alpha, -1))
        return jnp.sum(log_b - jnp.sum((self.alpha - 1.0) * self.coordinates(), -1))

    def distributions(self):
        """`Dirichlet` or `Beta`."""
        own: dist.Distribution = (
            dist.Beta(self.alpha[..., 0], self.alpha[..., 1])
            if self.is_beta
            else dist.Dirichlet(self.alpha)
        )
        return {self.sites[0]: own}

    def draw(self, key, num):
        """Independent, in logarithms first: a small alpha has draws below the smallest number."""
        w = random.loggamma(key, self.alpha, (num, *self.alpha.shape))
        return self.of(jnp.exp(log_softmax(w)))

    def free(self, key, spread):
        """Logits."""
        return spread * random.normal(key, (self.alpha[..., 0].size, self.size), self.alpha.dtype)

    def at(self, free):
        """The site's values."""
        return self.of(jax.nn.softmax(free).reshape(*self.batch, self.size))

    def statistics(self, row):
        """log p."""
        return log_softmax(row)

    def expectations(self, coordinates):
        """E[log p]."""
        return coordinates.reshape(-1, self.size)

    def of(self, p) -> Values:
        """The site's values at probabilities p."""
        return {self.sites[0]: p[..., 0] if self.is_beta else p}


def _step(m: Float[Array, "*batch K"], d: Float[Array, "K"]) -> Float[Array, "*batch"]:
    """h > 0 with log sum exp(m + h d) + log sum exp(m - h d) = 0, where m is E[log p] of some p;
    differentiable in m.
    """

    def excess(h, m):
        up, down = m + h[..., None] * d, m - h[..., None] * d
        slope = jnp.sum(d * (jax.nn.softmax(up) - jax.nn.softmax(down)), -1)
        return logsumexp(up, -1) + logsumexp(down, -1), slope

    fixed = lax.stop_gradient(m)
    # the largest entry on either side of d alone is below the sum: the root lies to the left
    right = -0.5 * (jnp.max(fixed[..., 0::2], -1) + jnp.max(fixed[..., 1::2], -1))

    def newton(_, h):
        value, slope = excess(h, fixed)
        return jnp.where(slope > 0, h - value / slope, h)

    h = lax.fori_loop(0, _STEPS, newton, jnp.maximum(right, 0.0))
    _, slope = excess(h, fixed)
    value, _ = excess(lax.stop_gradient(h), m)
    # one more step, whose derivative by m is that of the root
    return h - jnp.where(slope > 0, value / jnp.where(slope > 0, slope, 1.0), 0.0)
