"""A linear predictor as the parts that its sites add, and how they are found: A is never formed,
columns of L are pushed through the model's own operations.
"""

import functools
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from jaxtyping import Array, Float

from ppl_gp.gp import GP
from ppl_gp.model.gaussian_sites import root_of
from ppl_gp.model.predictor_parts import Columns, Levels, Own, Part, Table, Weighted
from ppl_gp.proofs.cut import entries_seen
from ppl_gp.proofs.one_each import OneEach
from ppl_gp.wrappers import unwrap

FEW_LEVELS = 16  # unknowns of a site below which its columns are as fast as what each row sees


class Loadings(eqx.Module):
    """A predictor at n rows, by what it is made of."""

    offset: Float[Array, "R n"]
    parts: dict[str, Part]

    def first_row(self) -> "Loadings":
        """Of the first row alone."""
        return Loadings(self.offset[:, :1], {k: p.first_row() for k, p in self.parts.items()})

    def without_own(self) -> "Loadings":
        """Without effects that stand one a datum, but for their means."""
        own = {k: p for k, p in self.parts.items() if isinstance(p, Own)}
        left = {k: p for k, p in self.parts.items() if k not in own}
        return Loadings(self.offset + sum(p.mean for p in own.values()), left)

    @property
    def mean(self) -> Float[Array, "R n"]:
        return sum([p.mean for p in self.parts.values()], self.offset)

    def jitter(self) -> Float[Array, "R R n"]:
        return added([p.jitter() for p in self.parts.values()])

    def diag(self) -> Float[Array, "Rn"]:
        return added([p.diag() for p in self.parts.values()])

    def blocks(self) -> Float[Array, "R R n"]:
        """Covariances within a row, `jitter` included."""
        return added([p.blocks() + p.jitter() for p in self.parts.values()])

    def cross(self, other: "Loadings") -> Float[Array, "Rn Rm"]:
        return added([p.cross(other.parts[k]) for k, p in self.parts.items()])


def added(terms: list[Array]) -> Array:
    """The sum of one array or more."""
    return functools.reduce(jnp.add, terms)


def loadings(
    eta: Callable, fns: dict, centres: dict, axes: dict[str, int], one_each: Callable
) -> Loadings:
    """Of a predictor `eta({site: innovation}) -> (R, n)`, affine.

    `fns`: {site: distribution at these rows}. `centres`: the sites' own means, where the other
    sites are zero. `axes`: {site with one entry per datum: the axis of the data in its value, from
    the right}. `one_each(site)`: what each row sees of it, where that is one entry, else `None`.
    """
    zero = {k: jnp.zeros(fn.shape()) for k, fn in fns.items()}

    def pushed(site):
        """A e of one site's innovations e."""
        return lambda e: jax.jvp(lambda x: eta({**zero, site: x}), (zero[site],), (e,))[1]

    def part(site, fn):
        seen = one_each(site) if site not in axes and _has_scales(fn) else None
        return _part(fn, pushed(site), centres[site], axes.get(site), seen)

    parts = {k: part(k, fn) for k, fn in fns.items()}
    return Loadings(eta(zero) - sum(p.mean for p in parts.values()), parts)


def _has_scales(fn) -> bool:
    """Whether a Gaussian site's entries are independent, and enough that it matters."""
    return isinstance(unwrap(fn), dist.Normal) and math.prod(fn.shape()) >= FEW_LEVELS


def _part(fn, pushed: Callable, centre, axis: int | None, seen: OneEach | None) -> Part:
    centre = jnp.asarray(centre, jnp.result_type(float))  # Normal(0, 1) has integers
    mean, root = pushed(jnp.broadcast_to(centre, fn.shape())), root_of(fn)
    if seen is not None:
        return _levels(mean, seen, fn)
    if axis is None:
        return Columns(mean, jnp.moveaxis(columns(fn, pushed), 0, -1))
    if isinstance(unwrap(fn), GP):
        return Weighted(mean, of_units(fn.shape(), axis, pushed), unwrap(fn))
    own = of_units(fn.shape(), axis, lambda e: pushed(root(e)))
    return Own(mean, jnp.einsum("apn,bpn->abn", own, own))


def of_units(shape, axis: int, pushed: Callable) -> Float[Array, "R P n"]:
    """What each unit of a site with one entry per datum gives, alone and alike in all rows."""
    units = list(shape)
    num = units.pop(axis)

    def alike(unit):
        rows = jnp.broadcast_to(unit[..., None], (*unit.shape, num))
        return jnp.moveaxis(rows, -1, axis)

    return jnp.moveaxis(jax.vmap(lambda b: pushed(alike(b)))(_basis(units)), 0, 1)


def rows_apart(eta: Callable, shapes: dict[str, tuple], axes: dict[str, int], key) -> Array:
    """Whether row n of the predictor sees row n alone of the sites with one entry per datum, (n,).

    A = diag(a) for a unit and a function if and only if A v = a v for a random v, with probability
    one.
    """
    zero = {k: jnp.zeros(shape) for k, shape in shapes.items()}
    found = []
    for i, (site, axis) in enumerate(axes.items()):
        v = random.normal(random.fold_in(key, i), shapes[site])
        pushed = lambda e, k=site: jax.jvp(lambda x: eta({**zero, k: x}), (zero[k],), (e,))[1]  # noqa: E731
        rows = jnp.reshape(jnp.moveaxis(v, axis, -1), (-1, v.shape[axis]))
        terms = of_units(v.shape, axis, pushed) * rows
        size = 1.0 + jnp.sum(jnp.abs(terms), 1)
        found.append(
            jnp.abs(pushed(v) - jnp.sum(terms, 1)) <= 1e3 * jnp.finfo(size.dtype).eps * size
        )
    return jnp.all(jnp.stack(found), (0, 1)) if found else jnp.ones((), bool)


def columns(fn, pushed: Callable):
    """(U, ...): `pushed` at the innovations L e_1, ..., L e_U of a site."""
    root = root_of(fn)
    return jax.vmap(lambda b: pushed(root(b)))(_basis(fn.shape()))


def loads_behind(values: Callable, fn, zero) -> dict[str, Table]:
    """What stands between w, z = c + L w, and each array of `values(innovations of z)`, which are
    affine: a row an entry.

    Where each entry is proved to see one of a site of independent entries, by that one. O(entries).
    """
    seen = entries_seen(values, zero) if _has_scales(fn) else {}
    rest = {k for k in jax.eval_shape(values, zero) if seen.get(k) is None}
    slope = lambda e: jax.jvp(lambda x: {k: values(x)[k] for k in rest}, (zero,), (e,))[1]  # noqa: E731
    dense = columns(fn, slope) if rest else {}
    flat = {k: jnp.reshape(D, (len(D), -1)).T[None] for k, D in dense.items()}
    found: dict[str, Table] = {k: Columns(jnp.zeros(D.shape[:2]), D) for k, D in flat.items()}
    for k, one in seen.items():
        if one is not None:
            found[k] = _levels(jnp.zeros((1, one.index.size)), one, fn)
    return found


def _levels(mean, seen: OneEach, fn) -> Levels:
    index, weight = jnp.ravel(seen.index), jnp.ravel(seen.weight)
    scale = jnp.ravel(jnp.broadcast_to(unwrap(fn).scale, fn.shape()))
    return Levels(mean, index, weight * scale[index], scale.size)


def _basis(shape):
    """One unit after another, (U, *shape)."""
    return jnp.reshape(jnp.eye(math.prod(shape)), (-1, *shape))
