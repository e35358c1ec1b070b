"""The linear predictors of a model: what its observed sites see of its Gaussian sites z.

Each Gaussian site is written as its mean plus an innovation e, so that a site whose mean is affine
in another (group effects about a level that is Gaussian too) is one more affine operation. What the
observed sites are computed from e through is the smallest cut of the jaxpr
(`reading.predictor.cut`).
"""

import itertools
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.primitives import Messenger

from ppl_gp.errors import LISTED, ModelError
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.digest import Bones
from ppl_gp.reading.predictor.cut import (
    Predictors,
    at_places,
    flat_shapes,
    predictors,
)
from ppl_gp.reading.predictor.single_lookup import OneEach
from ppl_gp.reading.predictor.sites import gaussian, mean_of
from ppl_gp.reading.predictor.skeleton import Skeleton
from ppl_gp.reading.roles import is_observed
from ppl_gp.reading.tracing import run


class innovate(Messenger):
    """Gives every site of `values` its mean plus the innovation there."""

    def __init__(self, fn, values: Mapping[str, Any]):
        self.values = values
        super().__init__(fn)

    def process_message(self, msg):
        """Set the value."""
        if msg["type"] == "sample" and msg["name"] in self.values and msg["value"] is None:
            mean = jnp.broadcast_to(mean_of(msg["fn"]), msg["fn"].shape())
            msg["value"] = mean + self.values[msg["name"]]


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


def observed_part(site: dict) -> ObservedPart:
    """Of a site of a trace."""
    frames = tuple(site["cond_indep_stack"])
    return ObservedPart(site["fn"], site["value"], site["scale"], frames)


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

    def one_each(self, site: str, e: dict, rest: Rest) -> OneEach | None:
        """What each row of a single function sees of a site's innovations, (N,), where that is
        proved to be one entry.
        """
        if len(self.axes) != 1 or math.prod(shape := self.predictors.shapes[0]) != max(shape):
            return None
        (found,) = self.predictors.one_each(e, rest, sorted(e).index(site))
        return None if found is None else OneEach(*(jnp.ravel(x) for x in found))

    def observed(self, eta, rest: Rest) -> dict[str, ObservedPart]:
        """The observed sites with the predictors given, (R, N)."""
        etas, at = [], 0
        for shape, axis in zip(self.predictors.shapes, self.axes, strict=True):
            moved = [n for i, n in enumerate(shape) if i != axis]
            size = math.prod(moved)
            part = jnp.reshape(eta[at : at + size], (*moved, shape[axis]))
            etas.append(jnp.moveaxis(part, -1, axis))
            at += size
        found = self.predictors.below(etas, rest)
        return {k: bones.with_arrays(found[k]) for k, bones in self.static.items()}


def is_gaussian(site: dict) -> bool:
    """Whether a site is unobserved and its distribution Gaussian."""
    hidden = site["type"] == "sample" and not site["is_observed"]
    return hidden and gaussian(site["fn"])


def seeing(model: Callable, skeleton: Skeleton) -> tuple[Callable, dict[str, Bones]]:
    """(the function (e, rest) -> arrays of the observed sites, what else they consist of, which is
    there once the function was traced).
    """
    held: dict[str, Bones] = {}

    def arrays(e, rest: Rest):
        trace = traced_at(model, skeleton, e, rest)
        parts = {k: observed_part(s) for k, s in trace.items() if is_observed(s)}
        split = {k: Bones.of(part) for k, part in parts.items()}
        held.update({k: bones for k, (_, bones) in split.items()})
        return {k: found for k, (found, _) in split.items()}

    return arrays, held


def traced_at(model: Callable, skeleton: Skeleton, e: dict, rest: Rest) -> dict:
    """The model's trace at innovations."""
    return run(innovate(model, e), *skeleton.arguments(rest.arrays), rest.hyper)


def innovations(model: Callable, skeleton: Skeleton, rest: Rest, sites) -> dict:
    """{site: `ShapeDtypeStruct` of its value}."""

    def values(rest):
        trace = run(model, *skeleton.arguments(rest.arrays), rest.hyper)
        return {k: jnp.zeros(trace[k]["fn"].shape()) for k in sites}

    return jax.eval_shape(values, rest)


class Cut(NamedTuple):
    """Where the predictors stand in the model's flat jaxpr, of `size` arrays, and the axis of the
    data in each; they are `functions` functions a datum in all.
    """

    places: tuple[int, ...]
    axes: tuple[int, ...]
    size: int
    functions: int


def cut(model: Callable, skeleton: Skeleton, sites: tuple[str, ...], rest: Rest) -> Cut | None:
    """The predictors of `sites`, by two abstract traces for numbers of rows that are no other size
    of the model; the same for every number of rows above one. `None` where there are none.
    """
    few = Rest(skeleton.resized(rest.arrays, 2), shapes(rest.hyper))
    leaves, structure = jax.tree.flatten(few)
    return _cut(model, skeleton, sites, structure, tuple(leaves))


@lru_cache(maxsize=256)
def _cut(model, skeleton: Skeleton, sites, structure, leaves) -> Cut | None:
    few: Rest = jax.tree.unflatten(structure, leaves)
    function, _ = seeing(model, skeleton)
    short, long = (
        Rest(skeleton.resized(few.arrays, num), few.hyper)
        for num in _unlike(innovations(model, skeleton, few, sites), leaves)
    )
    e, longer = (innovations(model, skeleton, rest, sites) for rest in (short, long))
    at, beyond = flat_shapes(function, e, short), flat_shapes(function, longer, long)
    if len(at) != len(beyond):
        return None
    grown = lambda a, b: next((i for i, n in enumerate(a[: len(b)]) if n != b[i]), None)  # noqa: E731
    axes = [grown(a, b) for a, b in zip(at, beyond, strict=True)]
    found = predictors(function, e, short, axes.__getitem__, _observations(skeleton, e, short))
    if found is None or not found.places:
        return None
    where = tuple(axis for i in found.places if (axis := axes[i]) is not None)
    sizes = zip(found.places, where, strict=True)
    functions = sum(math.prod(at[i]) // at[i][axis] for i, axis in sizes)
    return Cut(found.places, where, len(at), functions)


def _observations(skeleton: Skeleton, e: dict, rest: Rest) -> frozenset[int]:
    """The leaves of (e, rest) with one entry per datum that a prediction is not given. A factor is
    computed from them, where an observed site's distribution is not: y - eta is no predictor.
    """
    rows = dict(skeleton.rows)
    numbered = enumerate(sorted(rest.arrays), len(jax.tree.leaves(e)))
    return frozenset(i for i, p in numbered if p in rows and p not in skeleton.columns)


def _unlike(e: dict, leaves) -> list[int]:
    """Two numbers above two that are no size of anything."""
    taken = {n for x in (*e.values(), *leaves) for n in x.shape}
    return list(itertools.islice((n for n in itertools.count(3) if n not in taken), 2))


def traced(model: Callable, skeleton: Skeleton, sites: tuple[str, ...], rest: Rest) -> Traced:
    """The model as a function of innovations at the two or more rows of `rest`; abstract, and kept
    for the next call.

    Raises `ModelError` where the model's operations depend on the number of rows.
    """
    leaves, structure = jax.tree.flatten(shapes(rest))
    return _traced(model, skeleton, sites, structure, tuple(leaves))


@lru_cache(maxsize=256)
def _traced(model, skeleton: Skeleton, sites, structure, leaves) -> Traced:
    rest: Rest = jax.tree.unflatten(structure, leaves)
    found = cut(model, skeleton, sites, rest)
    e = innovations(model, skeleton, rest, sites)
    function, held = seeing(model, skeleton)
    predictors = at_places(function, e, rest, found.places if found else ())
    if found is None or predictors.size != found.size:
        raise ModelError(
            f"the linear predictor of sites {list(sites)} is another one for "
            f"{skeleton.num_rows(rest.arrays)} rows than for others: the model computes by the "
            f"number of rows. Leave the sites out of integrate=(...). {LISTED}"
        )
    return Traced(predictors, found.axes, held)


def predictor_sources(model: Callable, skeleton: Skeleton, sites, rest: Rest) -> frozenset[str]:
    """Paths of the arrays that the predictors are computed from. Abstract."""
    few = Rest(skeleton.resized(rest.arrays, 2), shapes(rest.hyper))
    flat = traced(model, skeleton, tuple(sites), few)
    e = innovations(model, skeleton, few, sites)
    return sources(lambda arrays: flat.eta(e, few._replace(arrays=arrays)), few.arrays)


def shapes(tree):
    """A tree of arrays as shapes and types."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)
