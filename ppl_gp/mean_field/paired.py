"""Factors of a mean and its precision together: normal-gamma and normal-Wishart."""

import math
from abc import abstractmethod

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from jaxtyping import Array, Float

from ppl_gp.mean_field.family import Nodes, by_element, lower, symmetric
from ppl_gp.mean_field.gaussian import LOG_2PI, reshaped
from ppl_gp.mean_field.positive import Gamma, Scaled, Wishart, from_triangle
from ppl_gp.numerics.linalg import inverse, log_det, root


class Pair(Scaled):
    """A precision w of each element, whose factor is `own`, and a mean m of D values, Gaussian
    given w. Sites: (m, w); `tail`: m's shape behind the batch.

    Coordinates: those of w, the centre of m, and what its covariance is made of at a w. Nodes:
    three of w, and for each 2 D of m.
    """

    tail: eqx.AbstractVar[tuple[int, ...]]
    linear: eqx.AbstractVar[Float[Array, "*batch D"]]

    @property
    @abstractmethod
    def own(self) -> Gamma | Wishart:
        """The factor of w."""

    @abstractmethod
    def around(self) -> tuple[Array, Array]:
        """(Centre of m (*batch, D), what `steps` wants)."""

    @abstractmethod
    def steps(self, w, spread, eps) -> Array:
        """A root of the covariance of m at w, times eps (num, *batch, D)."""

    @abstractmethod
    def log_precision(self, log_w) -> Array:
        """The log-determinant of the precision of m at log|w|, (*batch,)."""

    @abstractmethod
    def distance(self, w, apart) -> Array:
        """apart' Q apart, (*batch,), Q the precision of m at w."""

    @property
    def size(self) -> int:
        return self.linear.shape[-1]

    @property
    def harmony(self):
        return self.own.harmony

    def coordinates(self):
        """(E[w], E log|w|, centre, spread)."""
        return *self.own.coordinates(), *self.around()

    def gap(self, coordinates):
        return self.own.gap(coordinates[:2])

    def nodes_at(self, factors, weights, coordinates):
        mean_w, _, mean, spread = coordinates
        columns, num = self._columns(mean_w, spread), 2 * self.size
        m = [mean + sign * columns / jnp.sqrt(c)[..., None] for c in factors for sign in (1, -1)]
        of_w = self.own.nodes_at(factors, weights, (mean_w,)).values
        w = {k: jnp.repeat(x, num, 0) for k, x in of_w.items()}
        values = {self.sites[0]: self._shaped(jnp.concatenate(m)), **w}
        return Nodes(values, jnp.repeat(weights / num, num))

    def _columns(self, w, spread):
        """sqrt(D) times those of a root of the covariance of m, (D, *batch, D)."""
        eye = math.sqrt(self.size) * jnp.eye(self.size, dtype=self.linear.dtype)
        eye = eye.reshape(self.size, *(1 for _ in self.batch), self.size)
        return self.steps(w, spread, jnp.broadcast_to(eye, (self.size, *self.linear.shape)))

    def _shaped(self, m):
        return m.reshape(-1, *self.batch, *self.tail)

    def entropy(self):
        """H[w] + E[H[m | w]]."""
        log_precision = self.log_precision(self.own.coordinates()[1])
        return self.own.entropy() + 0.5 * jnp.sum(self.size * (1.0 + LOG_2PI) - log_precision)

    def log_prob(self, values):
        m, w = (values[k] for k in self.sites)
        log_w = log_det(w) if isinstance(self.own, Wishart) else jnp.log(w)
        distance = self.distance(w, m.reshape(self.linear.shape) - self.around()[0])
        normal = self.log_precision(log_w) - self.size * LOG_2PI - distance
        return self.own.log_prob(values) + 0.5 * jnp.sum(normal)

    def draw(self, key, num):
        key_w, key_m = random.split(key)
        w, (mean, spread) = self.own.draw(key_w, num), self.around()
        eps = random.normal(key_m, (num, *mean.shape), mean.dtype)
        return {self.sites[0]: self._shaped(mean + self.steps(w[self.sites[1]], spread, eps)), **w}

    def free(self, key, spread):
        mean_w, _, mean, about = self.coordinates()
        key_w, key_m = random.split(key)
        variance = jnp.mean(self._columns(mean_w, about) ** 2, 0)
        away = 3.0 * spread * jnp.sqrt(variance) * random.normal(key_m, mean.shape, mean.dtype)
        return jnp.concatenate(
            [self.own.free(key_w, spread), (mean + away).reshape(-1, self.size)], -1
        )

    def at(self, free):
        m = free[:, -self.size :].reshape(*self.batch, *self.tail)
        return {self.sites[0]: m, **self.own.at(free[:, : -self.size])}


class NormalGamma(Pair):
    """w ~ Gamma(shape, rate) and m | w ~ N(mean, (w P)^-1) of D values, for each element; t = (w,
    log w, w m, w m m'). O(D^3) an element.
    """

    tail: tuple[int, ...] = eqx.field(static=True)
    shape: Float[Array, "*batch"]
    rate: Float[Array, "*batch"]
    linear: Float[Array, "*batch D"]  # P mean
    P: Float[Array, "*batch D D"]

    @property
    def own(self):
        return Gamma(self.sites[1:], self.batch, False, self.shape, self.rate)

    def around(self):
        """(mean, P^-1)."""
        C = inverse(self.P)
        return jnp.einsum("...ij,...j->...i", C, self.linear), C

    def steps(self, w, spread, eps):
        return jnp.einsum("...ij,n...j->n...i", root(spread), eps) / jnp.sqrt(w)[..., None]

    def log_precision(self, log_w):
        return self.size * log_w + log_det(self.P)

    def distance(self, w, apart):
        return w * jnp.einsum("...i,...ij,...j->...", apart, self.P, apart)

    def natural(self, coordinates, gradient):
        """By the chain rule from the coordinates to E[t]."""
        mean_w, _, mean, _ = coordinates
        by_w, by_log, by_mean, by_C = gradient
        P = -2.0 * symmetric(by_C)
        pulled = jnp.einsum("...ij,...j->...i", P, mean)
        linear = by_mean / mean_w[..., None] + pulled  # coefficient of w m
        by_w = by_w - jnp.sum(linear * mean, -1) + 0.5 * jnp.sum(mean * pulled, -1)
        return self.at_eta((by_log + 1.0 - 0.5 * self.size, -by_w, linear, P))

    def eta(self):
        """(shape, rate + mean' P mean / 2, P mean, P): the second is minus the coefficient of w."""
        return self.shape, self.rate + _half_square(self.linear, self.P), self.linear, self.P

    def at_eta(self, eta):
        shape, by_w, linear, P = eta
        rate = by_w - _half_square(linear, P)
        return NormalGamma(self.sites, self.batch, self.tail, shape, rate, linear, P)

    def distributions(self):
        """Student-t (`MultivariateStudentT` of several values) and `Gamma`."""
        mean, C = self.around()
        scale = C * (self.rate / self.shape)[..., None, None]
        student: dist.Distribution = (
            dist.StudentT(2.0 * self.shape, mean[..., 0], jnp.sqrt(scale[..., 0, 0]))
            if self.tail == ()
            else reshaped(dist.MultivariateStudentT(2.0 * self.shape, mean, root(scale)), self.tail)
        )
        return {self.sites[0]: student, **self.own.distributions()}

    def expectations(self, coordinates):
        """E[w m m'] = E[w] mean mean' + P^-1."""
        mean_w, log_w, mean, C = coordinates
        moved = mean_w[..., None] * mean
        square = C + moved[..., :, None] * mean[..., None, :]
        return by_element(self.batch, jnp.stack([mean_w, log_w], -1), moved, lower(square))

    def statistics(self, row):
        w, m = jnp.exp(row[0]), row[1:]
        return jnp.concatenate([jnp.stack([w, row[0]]), w * m, w * lower(jnp.outer(m, m))])

    def with_inverse(self, row):
        """(w, 1 / w, m, m m', w m, w m m')."""
        w, m = jnp.exp(row[0]), row[1:]
        both = jnp.concatenate([m, lower(jnp.outer(m, m))])
        return jnp.concatenate([jnp.stack([w, 1.0 / w]), both, w * both])


def _half_square(linear, P):
    """mean' P mean / 2."""
    return 0.5 * jnp.einsum("...i,...ij,...j->...", linear, inverse(P), linear)


class NormalWishart(Pair):
    """W ~ Wishart(df, rate^-1) and m | W ~ N(mean, (strength W)^-1), for each element; t = (W,
    log|W|, W m, m' W m). O(D^3) an element.
    """

    df: Float[Array, "*batch"]
    rate: Float[Array, "*batch D D"]
    strength: Float[Array, "*batch"]
    linear: Float[Array, "*batch D"]  # strength mean

    @property
    def tail(self):
        return (self.size,)

    @property
    def own(self):
        return Wishart(self.sites[1:], self.batch, False, self.df, self.rate)

    def around(self):
        """(mean, 1 / strength)."""
        return self.linear / self.strength[..., None], 1.0 / self.strength

    def steps(self, w, spread, eps):
        covariance = inverse(w) * spread[..., None, None]
        return jnp.einsum("...ij,...j->...i", root(covariance), eps)

    def log_precision(self, log_w):
        return self.size * jnp.log(self.strength) + log_w

    def distance(self, w, apart):
        return self.strength * jnp.einsum("...i,...ij,...j->...", apart, w, apart)

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
        df = 2.0 * by_log + self.size
        return self.at_eta((df, -2.0 * symmetric(coefficient), strength, linear))

    def eta(self):
        """(df, rate + strength mean mean', strength, strength mean)."""
        return self.df, self.rate + _square(self.linear, self.strength), self.strength, self.linear

    def at_eta(self, eta):
        df, by_W, strength, linear = eta
        rate = by_W - _square(linear, strength)
        return NormalWishart(self.sites, self.batch, df, rate, strength, linear)

    def distributions(self):
        """`MultivariateStudentT` and `Wishart`."""
        df = self.df - self.size + 1.0
        scale = root(self.rate / (self.strength * df)[..., None, None])
        student = dist.MultivariateStudentT(df, self.around()[0], scale)
        return {self.sites[0]: student, **self.own.distributions()}

    def expectations(self, coordinates):
        """E[m' W m] = mean' E[W] mean + D / strength."""
        mean_W, log_W, mean, c = coordinates
        moved = jnp.einsum("...ij,...j->...i", mean_W, mean)
        square = jnp.sum(mean * moved, -1) + self.size * c
        return by_element(self.batch, lower(mean_W), moved, jnp.stack([log_W, square], -1))

    def statistics(self, row):
        D = self.size
        W, m = from_triangle(row[:-D], D), row[-D:]
        moved = W @ m
        rest = jnp.stack([2.0 * jnp.sum(row[:D]), m @ moved])
        return jnp.concatenate([lower(W), moved, rest])

    def with_inverse(self, row):
        """(W, W^-1, m, m m', W m, m' W m)."""
        D = self.size
        W, m = from_triangle(row[:-D], D), row[-D:]
        moved = W @ m
        both = jnp.concatenate([m, lower(jnp.outer(m, m)), moved, (m @ moved)[None]])
        return jnp.concatenate([lower(W), lower(inverse(W)), both])


def _square(linear, strength):
    """strength mean mean'."""
    return linear[..., :, None] * linear[..., None, :] / strength[..., None, None]
