"""The linear predictors of a model: what its observed sites see of its Gaussian sites z.

Each Gaussian site is its mean plus an innovation, z = mean + L w with w independent standard normal
variables, so that a site whose mean is affine in another (group effects about a level that is
Gaussian too) is one more affine operation. The observed sites see the innovations through the
smallest cut of the jaxpr (`reading.predictor.cut`).

A distribution is Gaussian if its class is in the table below, or if it is a Gaussian transformed by
what is proved to be affine (`reading.dependence`): `ZeroSumNormal`, `CirculantNormal`,
`GaussianStateSpace`, and those that a user composes.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions.transforms import ComposeTransform
from numpyro.primitives import Messenger

from ppl_gp.errors import LISTED, ModelError
from ppl_gp.gp import GP, unwrap
from ppl_gp.kernels.pairs import unused
from ppl_gp.reading.dependence import Dependence, dependence
from ppl_gp.reading.digest import Bones
from ppl_gp.reading.labels import Cause
from ppl_gp.reading.predictor.cut import Predictors, at_places
from ppl_gp.reading.predictor.skeleton import Skeleton
from ppl_gp.reading.reading import Declared
from ppl_gp.reading.roles import Roles, is_observed
from ppl_gp.reading.tracing import run
from ppl_gp.reading.walk import line_of

Root = Callable[[Array], Array]


def _by_factor(fn) -> Root:
    """By the lower factor of a covariance."""
    return lambda white: jnp.einsum("...ij,...j->...i", fn.scale_tril, white)


def _of_matrix(fn) -> Root:
    columns = jnp.swapaxes(fn.scale_tril_column, -2, -1)
    return lambda white: fn.scale_tril_row @ white @ columns


# class -> (distribution) -> (white, in the shape of the site, -> L white)
_ROOTS: dict[type, Callable[[Any], Root]] = {
    GP: lambda fn: lambda white: white @ fn.scale_tril.T,
    dist.Normal: lambda fn: lambda white: jnp.broadcast_to(fn.scale, jnp.shape(white)) * white,
    dist.MultivariateNormal: _by_factor,
    dist.LowRankMultivariateNormal: _by_factor,
    dist.MatrixNormal: _of_matrix,
    # z_t = z_{t-1} + scale w_t: sums of steps, O(T)
    dist.GaussianRandomWalk: lambda fn: (
        lambda white: jnp.cumsum(jnp.expand_dims(fn.scale, -1) * white, -1)
    ),
    # precision tau (D - rho W) of areas with adjacency W. O(A^3) for A areas
    dist.CAR: lambda fn: _by_factor(dist.MultivariateNormal(precision_matrix=fn.precision_matrix)),
}


def gaussian(fn: Any) -> bool:
    """Whether a distribution is known to be Gaussian, through NumPyro's wrappers. Abstract."""
    inner = unwrap(fn)
    if kind := next((k for k in _ROOTS if isinstance(inner, k)), None):
        return kind is GP or type(inner).log_prob is kind.log_prob  # a user's class may differ
    if not isinstance(inner, dist.TransformedDistribution):
        return False
    kind = next(k for k in type(inner).__mro__ if k.__module__.startswith("numpyro."))
    if type(inner).log_prob is not kind.log_prob:
        return False
    base: Any = inner.base_dist
    if not gaussian(base) or math.prod(base.shape()) > math.prod(inner.shape()):
        return False
    return dependence(_map_of(inner), jnp.zeros(base.shape())) == (Dependence.affine,)


def _map_of(fn: dist.TransformedDistribution) -> ComposeTransform:
    return ComposeTransform(list(fn.transforms))


def mean_of(fn: Any) -> Array:
    """The mean of a Gaussian, in a shape that broadcasts to that of the site."""
    inner = unwrap(fn)
    if not isinstance(inner, dist.TransformedDistribution):
        return inner.mean
    base = inner.base_dist
    return jnp.asarray(_map_of(inner)(jnp.broadcast_to(mean_of(base), base.shape())))


def spread_of(fn: Any) -> list:
    """What a Gaussian is computed from beside its mean."""
    inner = unwrap(fn)
    if isinstance(inner, GP):
        return [inner.X, inner.kernel(inner.X, inner.X), inner.variance]
    return [_root(inner)(jnp.ones(inner.shape()))]


def root_of(fn: Any) -> Root:
    """white -> L white, in the shape of the site `fn`, which may be expanded."""
    root, shape = _root(unwrap(fn)), fn.shape()
    return lambda white: jnp.broadcast_to(root(white), shape)


def _root(fn: Any) -> Root:
    if isinstance(fn, dist.TransformedDistribution):
        return _of_map(fn)
    return next(root(fn) for kind, root in _ROOTS.items() if isinstance(fn, kind))


def _of_map(fn: dist.TransformedDistribution) -> Root:
    """The slope of the map times the root of its base, which has as many variables as the site or
    fewer: what is left over counts for nothing.
    """
    base: Any = fn.base_dist
    event = base.shape()[len(fn.batch_shape) :]
    root, transform = _root(unwrap(base)), _map_of(fn)

    def pushed(white):
        lead = white.shape[: white.ndim - fn.event_dim]
        flat = jnp.reshape(white, (*lead, -1))[..., : math.prod(event)]
        step = root(jnp.reshape(flat, (*lead, *event)))
        return jax.jvp(transform, (jnp.zeros_like(step),), (step,))[1]

    return pushed


class innovate(Messenger):
    """Gives every site of `values` its mean plus the innovation there, those of a scan included:
    NumPyro takes entry t of what is given for step t. `rows`: {site: number of rows} of those that
    get their value once per row. `given`: the sites that have theirs.
    """

    def __init__(self, fn, values: Mapping[str, Any], rows: Mapping[str, int] | None = None):
        self.values, self.rows, self.given = values, rows or {}, set()
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "control_flow":
            msg["kwargs"]["substitute_stack"].append(("substitute", self._value))
        elif msg["type"] == "sample" and msg["value"] is None:
            msg["value"] = self._value(msg)

    def _value(self, site):
        if site["name"] not in self.values:
            return None
        self.given.add(site["name"])
        shape = site["fn"].shape()
        value = jnp.broadcast_to(mean_of(site["fn"]), shape) + self.values[site["name"]]
        num = self.rows.get(site["name"])
        return value if num is None else jnp.broadcast_to(value, (num, *shape))


class Rest(NamedTuple):
    """What stays when z moves: arrays."""

    arrays: dict[str, Any]  # of the arguments
    hyper: dict[str, Any]


class ObservedPart(NamedTuple):
    """An observed site behind the predictors."""

    fn: Any
    value: Any
    scale: Any
    frames: tuple  # its plates, outermost first


class Traced(NamedTuple):
    """A model as a function of its innovations. `axes`: of the data in each of the arrays that the
    predictors are. `static`: {observed site: what of it is no array}.
    """

    predictors: Predictors
    axes: tuple[int, ...]
    static: dict[str, Bones]

    def eta(self, e: dict, rest: Rest) -> jax.Array:
        """The predictors at innovations, (R, N)."""
        etas = self.predictors.at(e, rest)
        rows = [jnp.moveaxis(x, a, -1) for x, a in zip(etas, self.axes, strict=True)]
        return jnp.concatenate([jnp.reshape(x, (-1, x.shape[-1])) for x in rows])

    def observed(self, eta, rest: Rest) -> dict[str, ObservedPart]:
        """The observed sites with the predictors given, (R, N)."""
        etas, at = [], 0
        for v, axis in zip(self.predictors.arrays, self.axes, strict=True):
            shape = v.aval.shape
            moved = [n for i, n in enumerate(shape) if i != axis]
            size = math.prod(moved)
            part = jnp.reshape(eta[at : at + size], (*moved, shape[axis]))
            etas.append(jnp.moveaxis(part, -1, axis))
            at += size
        found = self.predictors.below(etas, rest)
        return {k: bones.with_arrays(found[k]) for k, bones in self.static.items()}


def is_gaussian(site: dict) -> bool:
    """Whether a site is unobserved and its distribution Gaussian."""
    return site["type"] == "sample" and not site["is_observed"] and gaussian(site["fn"])


class Cut(NamedTuple):
    """Where the predictors stand in the model's flat jaxpr, of `size` arrays, and the axis of the
    data in each; they are `functions` functions per datum in all. `coupled`: (observed site, kind
    of the cause, line of the model) for sites whose rows depend on other rows' entries.
    """

    places: tuple[int, ...]
    axes: tuple[int, ...]
    size: int
    functions: int
    coupled: tuple[tuple[str, str, str], ...]


class Innovated(NamedTuple):
    """A declared model in which each of these Gaussian `sites` is its mean plus an innovation e.

    `lone`: those among them that rows see by broadcasting alone, y ~ Normal(theta, 1): the model
    gets them with one value per row, (N, *shape), which is an array that a predictor can be.
    """

    model: Declared
    skeleton: Skeleton
    sites: tuple[str, ...]
    lone: tuple[str, ...] = ()

    def trace(self, e: dict, rest: Rest) -> dict:
        """The model's trace at innovations."""
        num = self.skeleton.num_rows(rest.arrays) if self.lone else 0
        moved = innovate(self.model, e, dict.fromkeys(self.lone, num))
        trace = run(moved, *self.skeleton.arguments(rest.arrays), rest.hyper)
        if others := [k for k in e if k not in moved.given]:
            raise ModelError(
                f"site(s) {others} get their value from a handler inside of the model. Leave them "
                f"out of integrate=(...). {LISTED}"
            )
        return trace

    def innovations(self, rest: Rest) -> dict:
        """{site: `ShapeDtypeStruct` of its value}."""
        leaves, structure = jax.tree.flatten(shapes(rest))
        return _innovations(self, structure, tuple(leaves))

    def zero(self, rest: Rest) -> dict[str, jax.Array]:
        """{site: innovation}, of none."""
        return {k: jnp.zeros(x.shape, x.dtype) for k, x in self.innovations(rest).items()}

    def resized(self, rest: Rest, num: int) -> Rest:
        """Shapes and types for another number of rows."""
        return Rest(self.skeleton.resized(rest.arrays, num), shapes(rest.hyper))

    def observed(self, e: dict, rest: Rest) -> dict[str, ObservedPart]:
        """The observed sites at innovations."""
        sites = {k: s for k, s in self.trace(e, rest).items() if is_observed(s)}
        return {
            k: ObservedPart(s["fn"], s["value"], s["scale"], tuple(s["cond_indep_stack"]))
            for k, s in sites.items()
        }

    def few(self, rest: Rest) -> Rest:
        """Shapes and types of three rows; of twice as many as here if the model fails at three."""
        small = self.resized(rest, 3)
        try:
            self.innovations(small)
        except Exception:  # noqa: BLE001 - whatever a model raises that pads, or halves the rows
            return self.resized(rest, 2 * self.skeleton.num_rows(rest.arrays))
        return small

    def cut(self, rest: Rest) -> Cut | None:
        """The predictors of the sites, by two abstract traces for numbers of rows that are no other
        size of the model; the same for every number of rows above one. `None` where there are none,
        or where the model fails at those numbers.
        """
        few = self.few(rest)
        leaves, structure = jax.tree.flatten(few)
        try:
            return _cut(self, self.skeleton.num_rows(few.arrays), structure, tuple(leaves))
        except ModelError:
            raise
        except Exception:  # noqa: BLE001 - as above
            return None

    def at(self, rest: Rest) -> Traced:
        """The model as a function of innovations at the two or more rows of `rest`; abstract, and
        kept for the next call.

        Raises `ModelError` where the model's operations depend on the number of rows.
        """
        leaves, structure = jax.tree.flatten(shapes(rest))
        return _traced(self, structure, tuple(leaves))


@lru_cache(maxsize=256)
def _innovations(moved: Innovated, structure, leaves) -> dict:
    def values(rest):
        trace = moved.trace({}, rest)
        return {k: jnp.zeros(trace[k]["fn"].shape()) for k in moved.sites}

    return jax.eval_shape(values, jax.tree.unflatten(structure, leaves))


@lru_cache(maxsize=256)
def _cut(moved: Innovated, num: int, structure, leaves) -> Cut | None:
    few: Rest = jax.tree.unflatten(structure, leaves)
    function, _ = _seeing(moved)
    taken = {n for x in (*moved.innovations(few).values(), *leaves) for n in x.shape}
    # multiples of what it runs at, as some models halve their rows
    step = 1 if num == 3 else num
    short, long = (moved.resized(few, n * step) for n in unused({n // step for n in taken}))
    here, there = (at_places(function, moved.innovations(x), x) for x in (short, long))
    at, beyond = ([v.aval.shape for v in x.every] for x in (here, there))
    if len(at) != len(beyond):
        return None
    grown = [[i for i, n in enumerate(a) if (n,) != b[i : i + 1]] for a, b in zip(at, beyond)]  # noqa: B905
    axes = [found[0] if len(found) == 1 else None for found in grown]
    found = here.smallest(axes.__getitem__, _observations(moved.skeleton, here.num_z, short))
    if found is None or not found.places:
        return None
    where = tuple(axis for i in found.places if (axis := axes[i]) is not None)
    sizes = zip(found.places, where, strict=True)
    functions = sum(math.prod(at[i]) // at[i][axis] for i, axis in sizes)
    causes = jax.tree.unflatten(found.tree, found.coupled) if found.coupled else {}
    told = (
        (k, jax.tree.leaves(c, is_leaf=lambda x: isinstance(x, Cause))) for k, c in causes.items()
    )
    coupled = tuple((k, c[0].kind, line_of(c[0].source)) for k, c in told if c)
    return Cut(found.places, where, len(at), functions, coupled)


def _seeing(moved: Innovated) -> tuple[Callable, dict[str, Bones]]:
    """(function (e, rest) -> arrays of the observed sites, the rest of them once it is traced)."""
    held: dict[str, Bones] = {}

    def arrays(e, rest: Rest):
        split = {k: Bones.of(part) for k, part in moved.observed(e, rest).items()}
        held.update({k: bones for k, (_, bones) in split.items()})
        return {k: found for k, (found, _) in split.items()}

    return arrays, held


def _observations(skeleton: Skeleton, num_e: int, rest: Rest) -> frozenset[int]:
    """The leaves of (e, rest) with one entry per datum that a prediction is not given. A factor is
    computed from them, where an observed site's distribution is not: y - eta is no predictor.
    """
    rows = dict(skeleton.rows)
    numbered = enumerate(sorted(rest.arrays), num_e)
    return frozenset(i for i, p in numbered if p in rows and p not in skeleton.columns)


@lru_cache(maxsize=256)
def _traced(moved: Innovated, structure, leaves) -> Traced:
    rest: Rest = jax.tree.unflatten(structure, leaves)
    found, (function, held) = moved.cut(rest), _seeing(moved)
    predictors = at_places(function, moved.innovations(rest), rest, found.places if found else ())
    if found is None or len(predictors.every) != found.size:
        raise ModelError(
            f"the linear predictor of sites {list(moved.sites)} is another one for "
            f"{moved.skeleton.num_rows(rest.arrays)} rows than for others: the model computes by "
            "the row's number or that of rows. Pass what it makes of them as an argument with one "
            f"entry per row: f + late * b in place of f.at[12:].add(b). {LISTED}"
        )
    return Traced(predictors, found.axes, held)


def shapes(tree):
    """A tree of arrays as shapes and types."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def require_gp(found: Roles, trace: dict) -> None:
    """Raise `ModelError` for a model without a GP site that could be inferred."""
    if found.gps:
        return
    if observed := [k for k in found.observed if isinstance(unwrap(trace[k]["fn"]), GP)]:
        raise ModelError(
            f"the GP site '{observed[0]}' is observed itself, so that no function is left to "
            "infer. Leave f unobserved, f = numpyro.sample('f', pg.GP(kernel, X)), and observe "
            f"it with some noise in the data's plate: numpyro.sample('{observed[0]}', "
            "dist.Normal(f, 0.001), obs=y), or an unknown noise scale."
        )
    free = (*found.hyper, *found.local_latents)
    kinds = [f"'{k}' ({type(unwrap(trace[k]['fn'])).__name__})" for k in free]
    told = "the model has no GP site, numpyro.sample('f', pg.GP(kernel, X)), and no local method"
    if not any(is_gaussian(trace[k]) for k in free):
        raise ModelError(
            f"{told} integrates its other sites, as none is Gaussian: {', '.join(kinds)}. {LISTED}"
        )
    raise ModelError(
        f"{told} integrates {', '.join(kinds)}: no Gaussian site enters a linear predictor, an "
        "array with one entry per row, of which each row depends on its own and nothing else "
        "depends (no factor, no event of all rows). Write a level b that all rows share as b * "
        f"jnp.ones(y.shape[0]), or b * jnp.ones((y.shape[0], 1)) for rows of several entries. "
        f"{LISTED}"
    )
