"""The linear predictors of a model: what its observed sites see of its Gaussian sites z.

Each Gaussian site is written as its mean plus an innovation e, so that a site whose mean is affine
in another (group effects about a level that is Gaussian too) is one more affine operation. What the
observed sites are computed from e through is the smallest cut of the jaxpr (`proofs.cut`).
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.primitives import Messenger

from ppl_gp.gp import GP
from ppl_gp.model.skeleton import Skeleton
from ppl_gp.model.tracing import is_observed, run
from ppl_gp.proofs.cut import Predictors, at_places, flat_shapes, predictors
from ppl_gp.wrappers import unwrap

GAUSSIAN = (GP, dist.Normal, dist.MultivariateNormal)


class innovate(Messenger):
    """Gives every site of `values` its mean plus the innovation there."""

    def __init__(self, fn, values: Mapping[str, Any]):
        self.values = values
        super().__init__(fn)

    def process_message(self, msg):
        """Set the value."""
        if msg["type"] == "sample" and msg["name"] in self.values and msg["value"] is None:
            mean = jnp.broadcast_to(unwrap(msg["fn"]).mean, msg["fn"].shape())
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


class Traced(NamedTuple):
    """A model as a function of its innovations. `static`: {observed site: what of it is no
    array}.
    """

    predictors: Predictors
    static: dict[str, ObservedPart]

    def eta(self, e: dict, rest: Rest) -> list[jax.Array]:
        """The predictors at innovations."""
        return self.predictors.at(e, rest)

    def observed(self, etas, rest: Rest) -> dict[str, ObservedPart]:
        """The observed sites with the predictors given."""
        found = self.predictors.below(etas, rest)
        return {k: eqx.combine(found[k], static) for k, static in self.static.items()}


def is_gaussian(site: dict) -> bool:
    """Whether a site is unobserved and its distribution Gaussian."""
    hidden = site["type"] == "sample" and not site["is_observed"]
    return hidden and isinstance(unwrap(site["fn"]), GAUSSIAN)


def seeing(model: Callable, skeleton: Skeleton) -> tuple[Callable, dict[str, ObservedPart]]:
    """(the function (e, rest) -> arrays of the observed sites, what else they consist of, which is
    there once the function was traced).
    """
    held: dict[str, ObservedPart] = {}

    def arrays(e, rest: Rest):
        trace = traced_at(model, skeleton, e, rest)
        parts = {
            k: ObservedPart(s["fn"], s["value"], s["scale"], tuple(s["cond_indep_stack"]))
            for k, s in trace.items()
            if is_observed(s)
        }
        dynamic, static = eqx.partition(parts, eqx.is_array)
        held.update(static)
        return dynamic

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


def traced(
    model: Callable,
    skeleton: Skeleton,
    sites: tuple[str, ...],
    places: tuple[int, ...] | None,
    rest: Rest,
) -> Traced | None:
    """The model as a function of innovations, at the number of rows of `rest`; abstract, and kept
    for the next call. `places`: of the predictors, or `None`, where they are to be found.
    """
    leaves, structure = jax.tree.flatten(shapes(rest))
    return _traced(model, skeleton, sites, places, structure, tuple(leaves))


@lru_cache(maxsize=256)
def _traced(model, skeleton: Skeleton, sites, places, structure, leaves) -> Traced | None:
    rest = jax.tree.unflatten(structure, leaves)
    e = innovations(model, skeleton, rest, sites)
    function, held = seeing(model, skeleton)
    if places is not None:
        return Traced(at_places(function, e, rest, places), held)
    longer = skeleton.longer(rest.arrays)
    more = Rest(longer, rest.hyper)
    short = flat_shapes(function, e, rest)
    long = flat_shapes(function, innovations(model, skeleton, more, sites), more)
    if len(short) != len(long):
        return None
    found = predictors(function, e, rest, lambda i: grown(short[i], long[i]))
    return None if found is None else Traced(found, held)


def grown(short: tuple[int, ...], long: tuple[int, ...]) -> int | None:
    """The axis in which two shapes differ."""
    return next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), None)


def shapes(tree):
    """A tree of arrays as shapes and types."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)
