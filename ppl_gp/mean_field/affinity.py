"""Proofs, at values far apart, that a function of a family's sites is affine in statistics, or
quadratic.

With g(theta) the function at unconstrained coordinates theta, affine means dg/dtheta = J(theta)' c
with one c at every theta, and g(theta) - g(theta') = c . (t(theta) - t(theta')). Elements of a
plate move together and have a c each, so that a function which couples two elements fails as well.
"""

import jax
import jax.numpy as jnp
from jax import lax, random

# Anywhere, and about a fitted q: how far values lie apart, of a Gaussian in its standard deviations
# (a clip far out is seen); and what is tolerated of the largest contribution, where false conjugacy
# is an error of order one, and about q, where contributions are small, and rounding is not.
SPREADS = (0.3, 1.0, 3.0, 6.0), (0.03, 0.1, 0.3, 1.0)
SCALES = (1e-3, 1.0, 1e2, 1e4, 1e6), (0.5, 1.0, 1.0, 1.0, 2.0)
TOLERANCE = 1e-8, 1e-5
_AT_ONCE = 20


def _weights(values: list, key) -> list:
    """Of a term's entries, whose values at some points are (points, ...), about one over the
    largest: none is close to zero, or an entry would be left out of their sum.
    """
    sizes = [jnp.max(jnp.abs(x), 0) for x in values]
    keys = random.split(key, len(sizes))
    return [
        random.uniform(k, x.shape, minval=0.5, maxval=1.5) / jnp.where(x > 0, x, 1.0)
        for k, x in zip(keys, sizes, strict=True)
    ]


def evened(entries, points: list[dict], key):
    """The terms (terms,) as random sums of their entries, each scaled by its values at `points`."""
    weights = _weights([jnp.stack(x) for x in zip(*map(entries, points), strict=True)], key)

    def terms(values: dict):
        return jnp.stack([jnp.sum(w * x) for w, x in zip(weights, entries(values), strict=True)])

    return terms


def affine_in(
    function, family, statistics_of, key, spreads=SPREADS[0], tolerance=TOLERANCE[0], many: int = 0
):
    """(terms,): whether function(values of the family's sites), (terms,), is affine in
    `statistics_of`(unconstrained coordinates of an element), with a coefficient an element; at
    `many` further values the function alone, without its slopes.
    """
    spreads, key_own = jnp.asarray(spreads), random.fold_in(key, 1)
    first = family.free(key_own, 0.0)
    T = statistics_of(first[0]).shape[0]
    num = 3 + -(-T // first.shape[1])  # equations: at least two more points than unknowns need
    spread = jnp.resize(spreads, (num,))
    keys = random.split(key_own, num)
    theta = jax.vmap(family.free)(keys, spread)  # (points, E, d)

    def at(theta):
        return function(family.at(theta))

    def known(theta):
        return at(theta), jax.vmap(statistics_of)(theta)

    values, statistics = jax.vmap(known)(theta)  # (points, terms), (points, E, T)
    slopes = jax.vmap(jax.jacrev(at))(theta)  # (points, terms, E, d)
    jacobians = jax.vmap(jax.vmap(jax.jacfwd(statistics_of)))(theta)  # (points, E, T, d)
    if many:
        further = jnp.resize(0.5 * spreads, (many,))  # rounding of 1 - p grows with distance
        keys = random.split(random.fold_in(key, 3), many)
        more = lax.map(lambda k: known(family.free(*k)), (keys, further), batch_size=_AT_ONCE)
        values = jnp.concatenate([values, more[0]])
        statistics = jnp.concatenate([statistics, more[1]])
    return jax.vmap(
        lambda g, G: _fits(g, G, statistics, jacobians, tolerance), in_axes=1, out_axes=0
    )(values, slopes)


def _fits(values, slopes, statistics, jacobians, tolerance):
    """Whether one c an element explains the slopes and the values."""

    def of_element(G, J):  # (points, d), (points, T, d)
        rows, right = jnp.swapaxes(J, 1, 2).reshape(-1, J.shape[1]), G.reshape(-1)
        size = jnp.max(jnp.abs(rows), 1)
        size = jnp.where(size > 0, size, 1.0)
        rows, right = rows / size[:, None], right / size
        columns = jnp.max(jnp.abs(rows), 0)
        columns = jnp.where(columns > 0, columns, 1.0)
        c = jnp.linalg.lstsq(rows / columns, right)[0] / columns
        most = jnp.max(jnp.abs(rows) @ jnp.abs(c) + jnp.abs(right))
        return c, jnp.all(jnp.abs(rows @ c - right) <= tolerance * most)

    c, explained = jax.vmap(of_element, in_axes=(1, 1))(slopes, jacobians)
    parts = jnp.sum(c * statistics, (1, 2))
    scale = jnp.max(jnp.abs(values)) + jnp.max(jnp.sum(jnp.abs(c * statistics), (1, 2)))
    level = jnp.abs((values - values[0]) - (parts - parts[0])) <= tolerance * scale
    finite = jnp.all(jnp.isfinite(values)) & jnp.all(jnp.isfinite(slopes))
    return finite & jnp.all(explained) & jnp.all(level)


def quadratic_in(entries, family, key, scales=SCALES[0], tolerance=TOLERANCE[0], many: int = 0):
    """(terms,): whether each of entries(values of the family's sites), a list of arrays, is
    quadratic, and its Hessian has no entry between two elements of the batch; along `many` further
    lines the values alone.
    """

    def at_scale(scale, key):
        keys = random.split(key, 4)
        z, other = (family.free(k, scale) for k in keys[:2])
        v = other - family.free(keys[1], 0.0)
        apart = v * random.normal(keys[2], (len(v), 1), v.dtype)
        points = jnp.stack([z - v, z, z + v, z + 2.0 * v, z + apart])
        terms = evened(entries, [family.at(x) for x in points], keys[3])

        def log_p(z):
            return terms(family.at(z))

        g, G = jax.vmap(lambda x: (log_p(x), jax.jacrev(log_p)(x)))(points)
        most = jnp.max(jnp.abs(G), 0)  # (terms, E, D)
        limit = tolerance * most + 1e-4 * tolerance * jnp.max(most, (-1, -2), keepdims=True)
        bent = jnp.abs(G[0] - 2.0 * G[1] + G[2]) + jnp.abs(G[1] - 2.0 * G[2] + G[3])
        ratio = jnp.sum(apart * v, 1, keepdims=True) / jnp.sum(v * v, 1, keepdims=True)
        coupled = jnp.abs((G[4] - G[1]) - ratio * (G[2] - G[1]))
        affine = jnp.all(bent <= limit, (-1, -2))
        affine &= jnp.all(coupled <= limit * (1.0 + jnp.abs(ratio)), (-1, -2))
        rise = 0.5 * jnp.sum(v * (G[1] + G[2]), (-1, -2))
        size = jnp.max(jnp.abs(g), 0) + jnp.sum(jnp.abs(v) * most, (-1, -2))
        level = jnp.abs(g[2] - g[1] - rise) <= tolerance * size
        return affine & level & jnp.all(jnp.isfinite(g), 0)

    def along(scale, key):
        """Third differences on a line, none of a quadratic."""
        z, other = (family.free(k, scale) for k in random.split(key))
        v = other - z
        points = jnp.stack([z, z + v / 3.0, z + v / 1.5, other])
        values = jax.vmap(lambda x: entries(family.at(x)))(points)
        sums = zip(_weights(values, key), values, strict=True)
        g = jnp.stack([jnp.sum((w * x).reshape(4, -1), 1) for w, x in sums], 1)
        bent = jnp.abs(g[0] - 3.0 * g[1] + 3.0 * g[2] - g[3])
        return bent <= tolerance * jnp.max(jnp.abs(g), 0)

    keys = random.split(random.fold_in(key, 1), len(scales))
    scales = jnp.asarray(scales)
    found = jnp.all(jax.vmap(at_scale)(scales, keys), 0)
    if many:
        keys = random.split(random.fold_in(key, 2), many)
        lines = (jnp.resize(scales[:3], (many,)), keys)
        found &= jnp.all(lax.map(lambda line: along(*line), lines, batch_size=_AT_ONCE), 0)
    return found
