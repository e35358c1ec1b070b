"""Factors of probabilities: Dirichlet, and beta as the Dirichlet of two."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, random
from jax.nn import log_softmax, logsumexp
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Float

from ppl_gp.conjugate.family import Family, Nodes, Values

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
