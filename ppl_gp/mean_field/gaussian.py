"""Gaussian factors: one site's elements apart, or the values of one or more sites together."""

import math
from itertools import accumulate

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from jaxtyping import Array, Float

from ppl_gp.mean_field.affinity import quadratic_in
from ppl_gp.mean_field.family import Family, Nodes, Rule, Values, by_element, lower, symmetric
from ppl_gp.numerics.linalg import inverse, log_det, root

LOG_2PI = math.log(2.0 * math.pi)


class Gaussian(Family):
    """N(m, P^-1) of D values, for each element of `batch`; t = (z, z z').

    `shapes`: the sites' shapes behind the batch; what D counts, one site after another. Nodes: m
    +- sqrt(D) times a column of the covariance's root, 2 D of them. O(D^3) an element.
    """

    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    linear: Float[Array, "*batch D"]  # P m
    precision: Float[Array, "*batch D D"]

    @property
    def size(self) -> int:
        return self.linear.shape[-1]

    def coordinates(self):
        covariance = inverse(self.precision)
        return jnp.einsum("...ij,...j->...i", covariance, self.linear), covariance

    def nodes(self, coordinates):
        mean, covariance = coordinates
        columns = jnp.moveaxis(root(covariance), -1, 0) * math.sqrt(self.size)
        return Nodes.equal(self.apart(jnp.concatenate([mean + columns, mean - columns])))

    def natural(self, coordinates, gradient):
        """P = -2 dL/dS, P m + dL/dm at the old m (Opper & Archambeau 2009, eq. 3, 4)."""
        mean, _ = coordinates
        by_mean, by_covariance = gradient
        precision = -2.0 * symmetric(by_covariance)
        return self.at_eta((by_mean + jnp.einsum("...ij,...j->...i", precision, mean), precision))

    def is_affine(self, function, statistics_of, key):
        """As quadratic in the values, whose statistics these are."""
        return quadratic_in(lambda values: list(function(values)), self, key)

    def entropy(self):
        """(D (1 + log 2 pi) - log |P|) / 2."""
        elements = math.prod(self.batch) * self.size
        return 0.5 * (elements * (1.0 + LOG_2PI) - jnp.sum(log_det(self.precision)))

    def distributions(self):
        """`Normal` for single values, `MultivariateNormal` for vectors, else `Reshaped`."""
        mean, covariance = self.coordinates()
        found = {}
        for site, shape, part in self._parts():
            m, S = mean[..., part], covariance[..., part, part]
            if shape == ():
                found[site] = dist.Normal(m[..., 0], jnp.sqrt(S[..., 0, 0]))
            else:
                found[site] = reshaped(dist.MultivariateNormal(m, S), shape)
        return found

    def log_prob(self, values):
        mean, _ = self.coordinates()
        apart = self.together(values) - mean
        distance = jnp.einsum("...i,...ij,...j->...", apart, self.precision, apart)
        return 0.5 * jnp.sum(log_det(self.precision) - self.size * LOG_2PI - distance)

    def draw(self, key, num):
        mean, covariance = self.coordinates()
        eps = random.normal(key, (num, *mean.shape), mean.dtype)
        return self.apart(mean + jnp.einsum("...ij,n...j->n...i", root(covariance), eps))

    def free(self, key, spread):
        """Standard deviations of q, times `spread`, about its mean."""
        mean, covariance = self.coordinates()
        scale = jnp.sqrt(jnp.diagonal(covariance, axis1=-2, axis2=-1))
        z = mean + spread * scale * random.normal(key, mean.shape, mean.dtype)
        return z.reshape(-1, self.size)

    def at(self, free):
        return self.apart(free.reshape(*self.batch, self.size))

    def statistics(self, row):
        return jnp.concatenate([row, jnp.outer(row, row)[jnp.tril_indices(len(row))]])

    def expectations(self, coordinates):
        mean, covariance = coordinates
        square = covariance + mean[..., :, None] * mean[..., None, :]
        return by_element(self.batch, mean, lower(square))

    def moment_rules(self):
        """(z, z z') of the elements apart, and of all values together."""
        together = (self.whole(),) if self.batch and len(self.sites) == 1 else ()
        return tuple(Rule(q, Gaussian.statistics, Family.own_nodes) for q in (self, *together))

    def whole(self) -> "Gaussian":
        """The same q of one site as one Gaussian of all elements' values. O((E D)^2) memory."""
        P = self.precision.reshape(-1, self.size, self.size)
        blocks = jnp.einsum("eij,ef->eifj", P, jnp.eye(len(P), dtype=P.dtype))
        n = len(P) * self.size
        shapes = ((*self.batch, *self.shapes[0]),)
        return Gaussian(self.sites, (), shapes, self.linear.reshape(n), blocks.reshape(n, n))

    def apart(self, z: Array) -> Values:
        """{site: value} of (..., batch, D)."""
        lead = z.shape[:-1]
        return {k: z[..., part].reshape(*lead, *shape) for k, shape, part in self._parts()}

    def _parts(self) -> list[tuple[str, tuple[int, ...], slice]]:
        """(site, its shape, where its values stand among the D)."""
        ends = [*accumulate(math.prod(shape) for shape in self.shapes)]
        return list(zip(self.sites, self.shapes, map(slice, [0, *ends[:-1]], ends), strict=True))

    def together(self, values: Values) -> Array:
        """(batch, D) of {site: value}."""
        return jnp.concatenate([jnp.reshape(values[k], (*self.batch, -1)) for k in self.sites], -1)


def reshaped(flat: dist.Distribution, shape: tuple[int, ...]) -> dist.Distribution:
    """A distribution of vectors as that of a site of this shape."""
    transform = dist.transforms.ReshapeTransform(shape, flat.event_shape)
    return flat if len(shape) == 1 else Reshaped(flat, transform)


class Reshaped(dist.TransformedDistribution):
    """A distribution of the flattened values of an array with several axes, (K, D)."""

    @property
    def mean(self):
        """(..., K, D)."""
        return jnp.reshape(self.base_dist.mean, self.shape())

    @property
    def variance(self):
        """(..., K, D)."""
        return jnp.reshape(self.base_dist.variance, self.shape())

    @property
    def covariance_matrix(self):
        """(..., K D, K D), of the flattened values; of a Student-t the scale's, as NumPyro's is."""
        return self.base_dist.covariance_matrix  # pyright: ignore[reportAttributeAccessIssue]


def gaussian(sites, batch, shapes, mean, variance) -> Gaussian:
    """With independent values."""
    precision = jax.vmap(jnp.diag)(1.0 / variance.reshape(-1, variance.shape[-1]))
    precision = precision.reshape(*variance.shape, variance.shape[-1])
    return Gaussian(tuple(sites), tuple(batch), tuple(shapes), mean / variance, precision)
