"""The proof, at values far apart, that a term's log density is affine in a block's statistics.

With g(theta) = log p at unconstrained coordinates theta, affine means dg/dtheta = J(theta)' c with
one c at every theta, and g(theta) - g(theta') = c . (t(theta) - t(theta')). Elements of a plate
move together and have a c each, so that a term which couples two elements fails as well.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.conjugate.discrete import Discrete
from ppl_gp.conjugate.family import Family, Values
from ppl_gp.conjugate.gaussian import Gaussian
from ppl_gp.conjugate.log_joint import LogJoint
from ppl_gp.quick import quick_jit

_SPREADS = (0.3, 1.0, 3.0, 6.0)
_SCALES = (1e-3, 1.0, 1e2, 1e4, 1e6)  # of a Gaussian: a clip far out is seen
_SURROUNDINGS = 3
_TOLERANCE = 1e-8  # of the largest contribution: false conjugacy is an error of order one


def conjugate_terms(
    joint: LogJoint, names: tuple[str, ...], family: Family, all_sites: list[Family], seed: int = 0
) -> np.ndarray:
    """(terms,): whether each is affine in the statistics of `family`, the other sites anywhere in
    the supports of `all_sites`.

    Some twenty gradients of the terms; O(d T^2) an element for T statistics of d values.
    """
    keys = random.split(random.key(seed), _SURROUNDINGS)
    check = _gaussian if isinstance(family, Gaussian) else _general
    found = [check(joint, names, family, somewhere(all_sites, key), key) for key in keys]
    return np.all(jax.device_get(found), 0)


@quick_jit
def somewhere(families: list[Family], key) -> Values:
    """Values of every site, far apart."""
    found: Values = {}
    for family, k in zip(families, random.split(key, len(families)), strict=True):
        found |= family.somewhere(k)
    return found


@quick_jit
def _general(joint: LogJoint, names, family: Family, around: Values, key):
    def log_p(own: Values):
        return joint.sums(names, {**around, **own})

    return affine_in(log_p, family, family.statistics, key)


def affine_in(function, family: Family, statistics_of, key):
    """(terms,): whether function(values of the family's sites), (terms,), is affine in
    `statistics_of`(unconstrained coordinates of an element), with a coefficient an element.
    """
    key_own = random.fold_in(key, 1)
    first = family.free(key_own, 0.0)
    T = statistics_of(first[0]).shape[0]
    num = 3 + -(-T // first.shape[1])  # equations: at least two more points than unknowns need
    spreads = jnp.asarray([_SPREADS[i % len(_SPREADS)] for i in range(num)])
    keys = random.split(key_own, num)
    theta = jax.vmap(family.free)(keys, spreads)  # (points, E, d)

    def at(theta):
        return function(family.at(theta))

    values = jax.vmap(at)(theta)  # (points, terms)
    slopes = jax.vmap(jax.jacrev(at))(theta)  # (points, terms, E, d)
    statistics = jax.vmap(jax.vmap(statistics_of))(theta)  # (points, E, T)
    jacobians = jax.vmap(jax.vmap(jax.jacfwd(statistics_of)))(theta)  # (points, E, T, d)
    return jax.vmap(lambda g, G: _fits(g, G, statistics, jacobians), in_axes=1)(values, slopes)


def _fits(values, slopes, statistics, jacobians):
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
        return c, jnp.all(jnp.abs(rows @ c - right) <= _TOLERANCE * most)

    c, explained = jax.vmap(of_element, in_axes=(1, 1))(slopes, jacobians)
    parts = jnp.sum(c * statistics, (1, 2))
    scale = jnp.max(jnp.abs(values)) + jnp.max(jnp.sum(jnp.abs(c * statistics), (1, 2)))
    level = jnp.abs((values - values[0]) - (parts - parts[0])) <= _TOLERANCE * scale
    finite = jnp.all(jnp.isfinite(values)) & jnp.all(jnp.isfinite(slopes))
    return finite & jnp.all(explained) & jnp.all(level)


@quick_jit
def _gaussian(joint: LogJoint, names, family: Gaussian, around: Values, key):
    def log_p(own: Values):
        return joint.sums(names, {**around, **own})

    return quadratic_in(log_p, family, key)


def quadratic_in(function, family: Gaussian, key):
    """(terms,): whether function(values of the family's sites), (terms,), is quadratic, and its
    Hessian has no entry between two elements of the batch.
    """

    def log_p(z):
        return function(family.at(z))

    def at_scale(scale, key):
        keys = random.split(key, 4)
        z, other = (family.free(k, scale) for k in keys[:2])
        v = other - family.free(keys[1], 0.0)
        apart = v * random.normal(keys[2], (len(v), 1), v.dtype)
        points = jnp.stack([z - v, z, z + v, z + 2.0 * v, z + apart])
        g, G = jax.vmap(lambda x: (log_p(x), jax.jacrev(log_p)(x)))(points)
        most = jnp.max(jnp.abs(G), 0)  # (terms, E, D)
        limit = _TOLERANCE * most + 1e-12 * jnp.max(most, (-1, -2), keepdims=True)
        bent = jnp.abs(G[0] - 2.0 * G[1] + G[2]) + jnp.abs(G[1] - 2.0 * G[2] + G[3])
        ratio = jnp.sum(apart * v, 1, keepdims=True) / jnp.sum(v * v, 1, keepdims=True)
        coupled = jnp.abs((G[4] - G[1]) - ratio * (G[2] - G[1]))
        affine = jnp.all(bent <= limit, (-1, -2)) & jnp.all(
            coupled <= limit * (1.0 + jnp.abs(ratio)), (-1, -2)
        )
        rise = 0.5 * jnp.sum(v * (G[1] + G[2]), (-1, -2))
        size = jnp.max(jnp.abs(g), 0) + jnp.sum(jnp.abs(v) * most, (-1, -2))
        level = jnp.abs(g[2] - g[1] - rise) <= _TOLERANCE * size
        return affine & level & jnp.all(jnp.isfinite(g), 0)

    keys = random.split(random.fold_in(key, 1), len(_SCALES))
    return jnp.all(jax.vmap(at_scale)(jnp.asarray(_SCALES), keys), 0)


def coupled_rows(
    joint: LogJoint, name: str, family: Discrete, all_sites: list[Family]
) -> str | None:
    """Why a term does not see the elements of a discrete site one by one, or `None`: its entry n at
    random categories must be that with all elements at the category of n.
    """
    around = somewhere(all_sites, random.key(0))
    shape = jax.eval_shape(lambda v: joint.term(name, v), around).shape
    if len(shape) < len(family.batch) or not _holds(shape, family.batch):
        return "it stands outside its plate"
    if not bool(_rows_apart(joint, name, family, around, random.key(1))):
        return "one of its entries sees several elements"
    return None


def _holds(shape, batch) -> bool:
    tail = shape[len(shape) - len(batch) :] if batch else ()
    return tuple(tail) == tuple(batch)


@quick_jit
def _rows_apart(joint, name, family: Discrete, around: Values, key):
    every = family.nodes(family.coordinates()).values[family.sites[0]]
    table = jax.vmap(lambda z: joint.term(name, {**around, family.sites[0]: z}))(every)

    def agrees(key):
        k = random.randint(key, family.batch, 0, len(family.categories))
        z = jnp.asarray(family.categories)[k]
        found = joint.term(name, {**around, family.sites[0]: z})
        wanted = jnp.take_along_axis(table, jnp.broadcast_to(k, table.shape[1:])[None], 0)[0]
        size = 1.0 + jnp.abs(wanted)
        return jnp.all((found == wanted) | (jnp.abs(found - wanted) <= _TOLERANCE * size))

    return jnp.all(jax.vmap(agrees)(random.split(key, 4)))
