"""The parts of a linear predictor eta = offset + sum_k A_k z_k of R functions per datum: what one
site adds at n rows. A is never formed: columns of L are pushed through the model's own operations.

A site that belongs to no datum (coefficients, groups, a GP at a table of places) is a `Table`, F =
A L with C = L L^T, by `Columns`, or by `Levels` if each row is proved to depend on one unknown. A
GP at the data's inputs is `Weighted`; effects with one value per datum are `Own`.

The proof that each entry of an array sees at most one entry of z (value = constant + weight
z[index]) is read off the jaxpr: moves of entries (a gather by group, a reshape, a where whose
condition does not depend on z) move index and weight alike, and products with what does not depend
on z change the weight. Whatever else meets z is no proof.
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int

from ppl_gp.gp import GP, unwrap
from ppl_gp.numerics.blocks import diagonal_of
from ppl_gp.reading.predictor.predictor import root_of
from ppl_gp.reading.walk import LOOPS, MOVES, Known, Rules, Walk, later

_MOVES = MOVES | {"rev", "gather", "dynamic_slice"}


class OneEach(NamedTuple):
    """What entries of an array see of z: weight z[index], z flat; weight 0 if nothing."""

    index: Int[Array, "..."]
    weight: Float[Array, "..."]


def entries_seen(function: Callable, z):
    """The arrays that `function` makes of the array z, a tree, each replaced by what its entries
    see of z, or by `None` where they are not proved to see one at most.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(z)
    places = jnp.reshape(jnp.arange(z.size, dtype=jnp.int32), z.shape)
    found = Walk(_Entries()).closed(closed, [OneEach(places, jnp.ones_like(z))])
    leaves, structure = jax.tree.flatten(shapes)
    pairs = zip(found, leaves, strict=True)
    seen = [_nothing(x) if isinstance(v, Known) else v for v, x in pairs]
    return jax.tree.unflatten(structure, seen)


class _Entries(Rules):
    """Values are `OneEach`; `Known` where they do not depend on z; else `None`, no proof."""

    whole = LOOPS

    def constant(self, array) -> Known:
        return Known(lambda: array)

    def primitive(self, equation, into: list) -> list:
        if all(isinstance(x, Known) for x in into):
            return later(equation, into)
        proved = all(x is not None for x in into)
        return [_followed(equation, into) if proved else None] * len(equation.outvars)


def _followed(equation, into: list) -> OneEach | None:
    """Of the one output of an equation, some of whose inputs depend on z."""
    name, which = equation.primitive.name, [isinstance(x, OneEach) for x in into]
    x = into[which.index(True)]
    to = equation.params.get("new_dtype")
    if name == "convert_element_type" and jnp.issubdtype(to, jnp.floating):
        return x._replace(weight=x.weight.astype(to))
    # a `where` whose condition does not depend on z, and chooses for each entry
    chooses = not which[0] and len({v.aval.shape for v in equation.invars}) == 1
    if name == "concatenate" or (name == "select_n" and chooses):
        return _together(equation, into)
    if sum(which) > 1:
        return None
    if name == "optimization_barrier" and len(into) == 1:
        return x
    if name in _MOVES and which[0]:
        return _bound(equation, [x, *into[1:]])
    factor = _factor(name, which, into)
    keeps = equation.outvars[0].aval.shape == jnp.shape(x.weight)
    return x._replace(weight=x.weight * factor) if keeps and factor is not None else None


def _factor(name: str, which: list[bool], into: list):
    """By what the weight changes where one operand depends on z; `None` where that is not known."""
    if name in ("add", "add_any", "sub", "neg"):
        return -1.0 if name == "neg" or (name == "sub" and which[1]) else 1.0
    if name == "mul":
        return into[which.index(False)]()
    return 1.0 / into[1]() if name == "div" and which[0] else None


def _together(equation, into: list) -> OneEach:
    """Of cases, or pieces, that do not all depend on z."""
    cases = zip(into, equation.invars, strict=True)
    known = 1 if equation.primitive.name == "select_n" else 0  # the condition
    parts = [_nothing(v.aval) if isinstance(x, Known) else x for x, v in cases]
    return _bound(equation, [*into[:known], *parts[known:]])


def _bound(equation, into: list) -> OneEach:
    """An operation applied to indices and to weights alike."""
    values = [[x() if isinstance(x, Known) else x[i] for x in into] for i in range(2)]
    return OneEach(*(equation.primitive.bind(*own, **equation.params) for own in values))


def _nothing(x) -> OneEach:
    """Of an array of this shape and type."""
    return OneEach(jnp.zeros(x.shape, jnp.int32), jnp.zeros(x.shape, x.dtype))


class Part(eqx.Module):
    """What one site adds to the R functions of the predictor at n rows: A c at its own mean c, and
    a covariance. Rows of matrices are (function, row), functions outermost.
    """

    mean: Float[Array, "R n"]

    @abstractmethod
    def cross(self, other: Any) -> Float[Array, "Rn Rm"]:
        """Covariances with the same part at other rows."""

    @abstractmethod
    def blocks(self) -> Float[Array, "R R n"]:
        """Covariances within a row, without `jitter`."""

    def diag(self) -> Float[Array, "Rn"]:
        """Variances, without `jitter`."""
        return diagonal_of(self.blocks())

    def jitter(self) -> Float[Array, "R R n"]:
        """Covariances that a row shares with no other row, not even one of the same arguments."""
        R, n = self.mean.shape
        return jnp.zeros((R, R, n), self.mean.dtype)


class Table(Part):
    """F w, w ~ N(0, I), of unknowns that belong to no datum."""

    @property
    @abstractmethod
    def flat(self) -> Float[Array, "Rn U"]:
        """F."""

    @property
    def num_unknowns(self) -> int:
        """U."""
        return self.flat.shape[1]

    def cross(self, other):
        return self.flat @ other.flat.T


class Columns(Table):
    """F by its columns."""

    columns: Float[Array, "R n U"]

    @property
    def flat(self):
        return jnp.reshape(self.columns, (-1, self.columns.shape[-1]))

    def blocks(self):
        return jnp.einsum("anu,bnu->abn", self.columns, self.columns)


class Levels(Table):
    """F of one function, one entry per row: `weight[n]` times unknown `index[n]` of `num`."""

    index: Int[Array, "n"]
    weight: Float[Array, "n"]
    num: int = eqx.field(static=True)

    @property
    def flat(self):
        return (self.index[:, None] == jnp.arange(self.num)) * self.weight[:, None]

    @property
    def num_unknowns(self):
        return self.num

    def cross(self, other):
        if not isinstance(other, Levels):
            return self.flat @ other.flat.T
        same = self.index[:, None] == other.index
        return jnp.where(same, self.weight[:, None] * other.weight, 0.0)

    def blocks(self):
        return (self.weight**2)[None, None]


class Weighted(Part):
    """sum_p a_rpn f_p(x_n), f_p independent draws of one GP."""

    weights: Float[Array, "R P n"]
    prior: GP

    def cross(self, other):
        k = other.prior.kernel(self.prior.X, other.prior.X)
        if self.weights.shape[:2] == (1, 1):
            return self.weights[0, 0][:, None] * k * other.weights[0, 0]
        same = jnp.einsum("apn,bpm->anbm", self.weights, other.weights)
        rows, columns = (w.shape[0] * w.shape[2] for w in (self.weights, other.weights))
        return jnp.reshape(same * k[:, None, :], (rows, columns))

    def separate(self, other: "Weighted") -> Float[Array, "R n m"]:
        """Covariances of each function with itself, at these rows and at others."""
        k = self.prior.kernel(self.prior.X, other.prior.X)
        return jnp.einsum("rpn,rpm->rnm", self.weights, other.weights) * k

    def blocks(self):
        return self._same() * self.prior.kernel.diag(self.prior.X)

    def jitter(self):
        return self._same() * (self.prior.variance - self.prior.kernel.diag(self.prior.X))

    def _same(self):
        return jnp.einsum("apn,bpn->abn", self.weights, self.weights)


class Own(Part):
    """An effect of each datum."""

    covariance: Float[Array, "R R n"]

    def cross(self, other):
        return jnp.zeros((self.mean.size, other.mean.size), self.mean.dtype)

    def blocks(self):
        return jnp.zeros_like(self.covariance)

    def jitter(self):
        return self.covariance


FEW_LEVELS = 16  # unknowns of a site below which its columns are as fast as what each row sees


class Loadings(eqx.Module):
    """A predictor at n rows, by what it is made of."""

    offset: Float[Array, "R n"]
    parts: dict[str, Part]

    def without_own(self) -> "Loadings":
        """Without per-datum effects, but for their means."""
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


def loadings(eta: Callable, fns: dict, centres: dict, axes: dict[str, int]) -> Loadings:
    """Of a predictor `eta({site: innovation}) -> (R, n)`, affine, zero of sites that it is not
    given.

    `fns`: {site: distribution at these rows}. `centres`: the sites' own means, where the other
    sites are zero. `axes`: {site with one entry per datum: its axis of the data, from the right}.
    """
    offset = eta({})

    def part(site, fn):
        one, zero = lambda e: eta({site: e}), jnp.zeros(fn.shape())
        pushed = lambda e: jax.jvp(one, (zero,), (e,))[1]  # noqa: E731
        is_looked_up = site not in axes and len(offset) == 1 and _has_scales(fn)
        seen = entries_seen(one, zero) if is_looked_up else None
        return _part(fn, pushed, centres[site], axes.get(site), seen)

    parts = {k: part(k, fn) for k, fn in fns.items()}
    return Loadings(offset - sum(p.mean for p in parts.values()), parts)


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
        return jnp.moveaxis(jnp.broadcast_to(unit[..., None], (*unit.shape, num)), -1, axis)

    return jnp.moveaxis(jax.vmap(lambda b: pushed(alike(b)))(_basis(units)), 0, 1)


def columns(fn, pushed: Callable):
    """(U, ...): `pushed` at the innovations L e_1, ..., L e_U of a site."""
    return jax.vmap(lambda b: pushed(root_of(fn)(b)))(_basis(fn.shape()))


def factor_of(values: Callable, fn, zero) -> dict[str, Table]:
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
