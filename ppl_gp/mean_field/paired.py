"""Factors of a mean and its precision together: normal-gamma and normal-Wishart."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Float

from ppl_gp.mean_field.family import (
    Family,
    Nodes,
    by_element,
    lower,
    symmetric,
)
from ppl_gp.mean_field.gaussian import LOG_2PI
from ppl_gp.mean_field.positive import (
    expected_log_det,
    from_triangle,
    some_triangles,
    two_factors,
    wishart_entropy,
    wishart_log_prob,
)
from ppl_gp.numerics.roots import inverse, log_det, root


class NormalGamma(Family):
    """w ~ Gamma(shape, rate) and m | w ~ N(mean, (w P)^-1) of D values, for each element.

    t = (w, log w, w m, w m m'). Two nodes of w, and for each 2 D of m. Sites: (m, w); `tail`: m's
    shape behind the batch. O(D^3) an element.
    """

    sites: tuple[str, ...] = eqx.field(static=True)
    batch: tuple[int, ...] = eqx.field(static=True)
    tail: tuple[int, ...] = eqx.field(static=True)
    shape: Float[Array, "*batch"]
    rate: Float[Array, "*batch"]
    linear: Float[Array, "*batch D"]  # P mean
    P: Float[Array, "*batch D D"]

    @property
    def size(self) -> int:
        """D."""
        return self.linear.shape[-1]

    def coordinates(self):
        """(E[w], E[log w], mean, P^-1)."""
        C = inverse(self.P)
        mean = jnp.einsum("...ij,...j->...i", C, self.linear)
        return self.shape / self.rate, digamma(self.shape) - jnp.log(self.rate), mean, C

    def nodes(self, coordinates):
        """4 D."""
        mean_w, log_w, mean, C = coordinates
        return self._nodes(two_factors(jnp.log(mean_w) - log_w), mean_w, mean, C)

    def nodes_at(self, factors) -> Nodes:
        """4 D, at w of these factors of its mean, which are one on average."""
        mean_w, _, mean, C = self.coordinates()
        return self._nodes(factors, mean_w, mean, C)

    def _nodes(self, factors, mean_w, mean, C):
        columns = jnp.moveaxis(root(C), -1, 0) * math.sqrt(self.size)
        m, w = [], []
        for factor in factors:
            one = factor * mean_w
            away = columns / jnp.sqrt(one)[..., None]
            m += [mean + away, mean - away]
            w += [jnp.broadcast_to(one, (2 * self.size, *self.batch))]
        m, w = jnp.concatenate(m), jnp.concatenate(w)
        values = {self.sites[0]: m.reshape(-1, *self.batch, *self.tail), self.sites[1]: w}
        return Nodes(values, jnp.full(len(w), 1.0 / len(w), w.dtype))

    def natural(self, coordinates, gradient):
        """By the chain rule from the coordinates to E[t]."""
        mean_w, _, mean, _ = coordinates
        by_w, by_log, by_mean, by_C = gradient
        P = -2.0 * symmetric(by_C)
        pulled = jnp.einsum("...ij,...j->...i", P, mean)
        linear = by_mean / mean_w[..., None] + pulled  # coefficient of w m
        by_w = by_w - jnp.sum(linear * mean, -1) + 0.5 * jnp.sum(mean * pulled, -1)
        half = 0.5 * jnp.einsum("...i,...ij,...j->...", linear, inverse(P), linear)
        shape = by_log + 1.0 - 0.5 * self.size
        # rate b and mean c: -b - c' P c / 2 is the coefficient of w; linear stays P c
        return NormalGamma(self.sites, self.batch, self.tail, shape, -by_w - half, linear, P)

    def eta(self):
        """(shape, rate + mean' P mean / 2, P mean, P): minus the coefficient of w has the mean's
        square in it.
        """
        half = 0.5 * jnp.einsum("...i,...ij,...j->...", self.linear, inverse(self.P), self.linear)
        return self.shape, self.rate + half, self.linear, self.P

    def at_eta(self, eta):
        """By completing the square."""
        shape, by_w, linear, P = eta
        half = 0.5 * jnp.einsum("...i,...ij,...j->...", linear, inverse(P), linear)
        return NormalGamma(self.sites, self.batch, self.tail, shape, by_w - half, linear, P)

    def entropy(self):
        """H[w] + E[H[m | w]]."""
        a, (_, log_w, *_) = self.shape, self.coordinates()
        own = a - jnp.log(self.rate) + gammaln(a) + (1.0 - a) * digamma(a)
        normal = 0.5 * (self.size * (1.0 + LOG_2PI - log_w) - log_det(self.P))
        return jnp.sum(own + normal)

    def log_prob(self, values):
        """log q(w) + log q(m | w)."""
        m, w = values[self.sites[0]].reshape(*self.batch, self.size), values[self.sites[1]]
        _, _, mean, _ = self.coordinates()
        distance = jnp.einsum("...i,...ij,...j->...", m - mean, self.P, m - mean)
        normal = self.size * (jnp.log(w) - LOG_2PI) + log_det(self.P) - w * distance
        own = self.shape * jnp.log(self.rate) - gammaln(self.shape) - self.rate * w
        return jnp.sum(own + (self.shape - 1.0) * jnp.log(w) + 0.5 * normal)

    def distributions(self):
        """Student-t (`MultivariateStudentT` of several values) and `Gamma`."""
        _, _, mean, C = self.coordinates()
        scale = C * (self.rate / self.shape)[..., None, None]
        student: dist.Distribution = (
            dist.StudentT(2.0 * self.shape, mean[..., 0], jnp.sqrt(scale[..., 0, 0]))
            if self.tail == ()
            else dist.MultivariateStudentT(2.0 * self.shape, mean, root(scale))
        )
        return {self.sites[0]: student, self.sites[1]: dist.Gamma(self.shape, self.rate)}

    def draw(self, key, num):
        """w, then m."""
        key_w, key_m = random.split(key)
        w = random.gamma(key_w, self.shape, (num, *self.batch)) / self.rate
        _, _, mean, C = self.coordinates()
        eps = random.normal(key_m, (num, *mean.shape), mean.dtype) / jnp.sqrt(w)[..., None]
        m = mean + jnp.einsum("...ij,n...j->n...i", root(C), eps)
        return {self.sites[0]: m.reshape(num, *self.batch, *self.tail), self.sites[1]: w}

    def free(self, key, spread):
        """(log w, m)."""
        mean_w, _, mean, C = self.coordinates()
        key_w, key_m = random.split(key)
        log_w = jnp.log(mean_w)[..., None]
        scale = jnp.sqrt(jnp.diagonal(C, axis1=-2, axis2=-1) / mean_w[..., None])
        m = mean + 3.0 * spread * scale * random.normal(key_m, mean.shape, mean.dtype)
        log_w = log_w + spread * random.normal(key_w, log_w.shape, log_w.dtype)
        return jnp.concatenate([log_w, m], -1).reshape(-1, 1 + self.size)

    def at(self, free):
        """The sites' values."""
        m = free[:, 1:].reshape(*self.batch, *self.tail)
        return {self.sites[0]: m, self.sites[1]: jnp.exp(free[:, 0]).reshape(self.batch)}

    def expectations(self, coordinates):
        """E[w m m'] = E[w] mean mean' + P^-1."""
        mean_w, log_w, mean, C = coordinates
        moved = mean_w[..., None] * mean
        square = C + moved[..., :, None] * mean[..., None, :]
        own = jnp.stack([mean_w, log_w], -1)
        return by_element(self.batch, own, moved, lower(square))

    def statistics(self, row):
        """(w, log w, w m, w m m')."""
        w, m = jnp.exp(row[0]), row[1:]
        square = jnp.outer(m, m)[jnp.tril_indices(len(m))]
        return jnp.concatenate([jnp.stack([w, row[0]]), w * m, w * square])


class NormalWishart(Family):
    """W ~ Wishart(df, rate^-1) and m | W ~ N(mean, (strength W)^-1), for each element.

    t = (W, log|W|, W m, m' W m). Two nodes of W, and for each 2 D of m. Sites: (m, W). O(D^3) an
    element.
    """

    sites: tuple[str, ...] = eqx.field(static=True)
    batch: tuple[int, ...] = eqx.field(static=True)
    df: Float[Array, "*batch"]
    rate: Float[Array, "*batch D D"]
    strength: Float[Array, "*batch"]
    linear: Float[Array, "*batch D"]  # strength mean

    @property
    def size(self) -> int:
        """D."""
        return self.linear.shape[-1]

    def coordinates(self):
        """(E[W], E log|W|, mean, 1 / strength)."""
        mean_W = self.df[..., None, None] * inverse(self.rate)
        log_W = expected_log_det(self.df, self.rate)
        return mean_W, log_W, self.linear / self.strength[..., None], 1.0 / self.strength

    def nodes(self, coordinates):
        """4 D."""
        mean_W, log_W, mean, c = coordinates
        return self._nodes(two_factors((log_det(mean_W) - log_W) / self.size), mean_W, mean, c)

    def nodes_at(self, factors) -> Nodes:
        """4 D, at W of these factors of its mean, which are one on average."""
        mean_W, _, mean, c = self.coordinates()
        return self._nodes(factors, mean_W, mean, c)

    def _nodes(self, factors, mean_W, mean, c):
        m, W = [], []
        spread = root(inverse(mean_W) * (self.size * c)[..., None, None])
        columns = jnp.moveaxis(spread, -1, 0)
        for factor in factors:
            away = columns / jnp.sqrt(factor)[..., None]
            m += [mean + away, mean - away]
            one = factor[..., None, None] * mean_W
            W += [jnp.broadcast_to(one, (2 * self.size, *one.shape))]
        m, W = jnp.concatenate(m), jnp.concatenate(W)
        values = {self.sites[0]: m, self.sites[1]: W}
        return Nodes(values, jnp.full(len(m), 1.0 / len(m), m.dtype))

    def natural(self, coordinates, gradient):
        """By the chain rule from the coordinates to E[t]."""
        mean_W, _, mean, _ = coordinates
        by_W, by_log, by_mean, by_c = gradient
        strength = -2.0 * by_c / self.size
        solved = jnp.einsum("...ij,...j->...i", inverse(mean_W), by_mean)
        linear = solved + strength[..., None] * mean  # coefficient of W m
        outer = linear[..., :, None] * mean[..., None, :]
        square = mean[..., :, None] * mean[..., None, :]
        coefficient = by_W - outer + 0.5 * strength[..., None, None] * square
        rate = -2.0 * symmetric(coefficient) - _square(linear, strength)
        df = 2.0 * by_log + self.size
        return NormalWishart(self.sites, self.batch, df, rate, strength, linear)

    def eta(self):
        """(df, rate + strength mean mean', strength, strength mean)."""
        return self.df, self.rate + _square(self.linear, self.strength), self.strength, self.linear

    def at_eta(self, eta):
        """By completing the square."""
        df, by_W, strength, linear = eta
        rate = by_W - _square(linear, strength)
        return NormalWishart(self.sites, self.batch, df, rate, strength, linear)

    def entropy(self):
        """H[W] + E[H[m | W]]."""
        log_W = expected_log_det(self.df, self.rate)
        constant = self.size * (1.0 + LOG_2PI - jnp.log(self.strength))
        return jnp.sum(wishart_entropy(self.df, self.rate) + 0.5 * (constant - log_W))

    def log_prob(self, values):
        """log q(W) + log q(m | W)."""
        m, W = values[self.sites[0]], values[self.sites[1]]
        apart = m - self.linear / self.strength[..., None]
        distance = self.strength * jnp.einsum("...i,...ij,...j->...", apart, W, apart)
        normal = self.size * (jnp.log(self.strength) - LOG_2PI) + log_det(W) - distance
        return jnp.sum(wishart_log_prob(W, self.df, self.rate) + 0.5 * normal)

    def distributions(self):
        """`MultivariateStudentT` and `Wishart`."""
        _, _, mean, _ = self.coordinates()
        df = self.df - self.size + 1.0
        scale = root(self.rate / (self.strength * df)[..., None, None])
        return {
            self.sites[0]: dist.MultivariateStudentT(df, mean, scale),
            self.sites[1]: dist.Wishart(self.df, rate_matrix=self.rate),
        }

    def draw(self, key, num):
        """W, then m."""
        key_W, key_m = random.split(key)
        W = dist.Wishart(self.df, rate_matrix=self.rate).sample(key_W, (num,))
        _, _, mean, c = self.coordinates()
        spread = root(inverse(W) * c[..., None, None])
        eps = random.normal(key_m, (num, *mean.shape), mean.dtype)
        return {self.sites[0]: mean + jnp.einsum("...ij,...j->...i", spread, eps), self.sites[1]: W}

    def free(self, key, spread):
        """(root of W, m)."""
        mean_W, _, mean, c = self.coordinates()
        key_W, key_m = random.split(key)
        scale = jnp.sqrt(jnp.diagonal(inverse(mean_W), axis1=-2, axis2=-1) * c[..., None])
        m = mean + 3.0 * spread * scale * random.normal(key_m, mean.shape, mean.dtype)
        W = some_triangles(key_W, mean_W, 0.3 * spread)
        return jnp.concatenate([W, m.reshape(-1, self.size)], -1)

    def at(self, free):
        """The sites' values."""
        D = self.size
        W = jax.vmap(lambda row: from_triangle(row, D))(free[:, :-D])
        m = free[:, -D:].reshape(*self.batch, D)
        return {self.sites[0]: m, self.sites[1]: W.reshape(*self.batch, D, D)}

    def expectations(self, coordinates):
        """E[m' W m] = mean' E[W] mean + D / strength."""
        mean_W, log_W, mean, c = coordinates
        moved = jnp.einsum("...ij,...j->...i", mean_W, mean)
        square = jnp.sum(mean * moved, -1) + self.size * c
        rest = jnp.stack([log_W, square], -1)
        return by_element(self.batch, lower(mean_W), moved, rest)

    def statistics(self, row):
        """(W, log|W|, W m, m' W m)."""
        D = self.size
        W, m = from_triangle(row[:-D], D), row[-D:]
        log_det_W = 2.0 * jnp.sum(row[:D])
        moved = W @ m
        return jnp.concatenate([W[jnp.tril_indices(D)], moved, jnp.stack([log_det_W, m @ moved])])


def _square(linear, strength):
    """strength mean mean'."""
    return linear[..., :, None] * linear[..., None, :] / strength[..., None, None]
