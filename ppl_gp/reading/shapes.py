"""What one trace of a model shows: the shapes of its sites, plates and values.

Abstract: nothing is computed and nothing compiled, unless the model looks at values while it is
traced.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.gp import GP, bare, bare_shape, hidden_axes, mask_of, unwrap
from ppl_gp.reading.arguments import Leaves, is_array
from ppl_gp.reading.digest import own_density
from ppl_gp.reading.roles import is_factor, is_gp, is_missing_part, is_observed
from ppl_gp.reading.tracing import bare_trace

ARGUMENT, SITE = "argument ", "site "  # what names of `named_trace` begin with
Sizes = tuple[int | np.integer, int | np.integer]


class Site(NamedTuple):
    """Of one sample site."""

    shape: tuple[int, ...]  # without masks and `to_event`
    event: tuple[int, ...]
    hidden: int
    frames: tuple[tuple[str, int], ...]  # (plate, axis in `shape`, negative)
    matches: bool  # whether value, parameters and `scale` have shapes that fit together
    is_gp: bool
    observed: bool
    is_factor: bool


class Look(NamedTuple):
    """What one trace shows: sample sites, plates with their whole and their subsampled size, the
    shapes of all values.
    """

    sites: dict[str, Site]
    plates: dict[str, Sizes]
    values: dict[str, Any]  # of unobserved sites and `numpyro.param`s


def look_at(model, leaves: Leaves, shapes: dict[str, jax.ShapeDtypeStruct] | None = None) -> Look:
    """One trace, with arguments of other `shapes` {path: shape}."""
    arrays = leaves.arrays
    abstract = {p: like(x) for p, x in arrays.items()} | (shapes or {})
    seen = []

    def trace(values):
        seen.append(_seen(bare_trace(model, *leaves.replaced(values))))

    try:
        jax.eval_shape(trace, abstract)
    except jax.errors.JAXTypeError:  # the model looks at values
        if shapes:
            raise
        trace(arrays)
    return seen[-1]


def like(x) -> jax.ShapeDtypeStruct:
    """The shape of an array, of the type that JAX gives it."""
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))


def named_trace(model, leaves: Leaves, base: Look, arrays) -> tuple[dict, Callable]:
    """({name: shape} of these arguments' arrays and of the random values of `base`, the function
    from such values to the sample sites of a trace).
    """
    dynamic, static = eqx.partition(base.values, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    named = {ARGUMENT + p: like(x) for p, x in arrays.items()}

    def at(named) -> dict:
        values = eqx.combine({k: named[SITE + k] for k in dynamic}, static)
        args, kwargs = leaves.replaced({p: named[ARGUMENT + p] for p in arrays})
        trace = bare_trace(model, args, kwargs, values, values)
        return {k: s for k, s in trace.items() if s["type"] == "sample"}

    return named | {SITE + k: x for k, x in dynamic.items()}, at


def _seen(trace) -> Look:
    sites = {k: _site(s) for k, s in trace.items() if s["type"] == "sample"}
    plates = {k: _sizes(k, *s["args"]) for k, s in trace.items() if s["type"] == "plate"}
    free = {k: s["value"] for k, s in trace.items() if _is_free(k, s, trace)}
    return Look(sites, plates, jax.tree.map(_shape_of, free))


def _sizes(name: str, size, part) -> Sizes:
    if bad := [n for n in (size, part) if not isinstance(n, int | np.integer | None)]:
        raise DataError(
            f"plate '{name}' has the size {bad[0]!r}, and sizes are options of a model, which its "
            "arrays have: give a Python integer, int(num_groups)."
        )
    return size, part or size


def _is_free(name, site, trace) -> bool:
    if site["type"] != "sample":
        return site["type"] == "param"
    return not (site["is_observed"] or is_missing_part(name, trace))


def _shape_of(x):
    is_number = is_array(x) or isinstance(x, float | int)
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) if is_number else x


def _site(site) -> Site:
    fn = site["fn"]
    hidden = hidden_axes(fn)
    frames = tuple((f.name, f.dim - hidden) for f in site["cond_indep_stack"])
    return Site(
        bare_shape(fn),
        tuple(unwrap(fn).event_shape),
        hidden,
        frames,
        _matches(site),
        is_gp(site),
        is_observed(site),
        is_factor(site),
    )


def _matches(site) -> bool:
    scaled = _fits(np.shape(site["scale"]), site["fn"].batch_shape)  # () of None
    fits = jax.eval_shape(lambda: own_density(site["fn"], site["value"])) is not None
    free = not is_observed(site) or is_factor(site)
    return scaled and fits and (free or jnp.shape(site["value"]) == tuple(site["fn"].shape()))


def unused_length(leaves: Leaves, base: Look, num: int) -> int:
    """Further rows such that their number is no other size of the model."""
    shapes = [x.shape for x in (*leaves.arrays.values(), *base.sites.values())]
    taken = {1, *itertools.chain(*shapes, *base.plates.values())}
    return next(more for more in itertools.count(1) if num + more not in taken)


def parts_of(site: dict) -> tuple[list, list, list]:
    """Arrays that say what a site sees: the terms of its density, or a GP's inputs and mean; its
    kernel at inputs that are computed from nothing; masks and scales.
    """
    fn = unwrap(site["fn"])
    if isinstance(fn, GP):
        mean = jnp.broadcast_to(fn.mean, (*jnp.shape(fn.mean)[:-1], fn.X.shape[0]))
        return [fn.X, mean], [kernel_beside(fn)], []
    terms, scale = _terms(bare(site["fn"]), site["value"]), site["scale"]
    around = [mask_of(site["fn"])]
    if scale is not None:
        around.append(jnp.reshape(scale, (*jnp.shape(scale), *[1] * hidden_axes(site["fn"]))))
    fitting = [x for x in around if _fits(x.shape, terms.shape)]
    return [terms], [], [jnp.broadcast_to(x, terms.shape) for x in fitting]


def _terms(fn, value):
    """Values of a type or a shape that a density does not take are refused later, by name."""
    if jnp.shape(value) != tuple(fn.shape()):
        value = jnp.zeros(fn.shape(), jnp.result_type(value))
    try:
        return fn.log_prob(value)
    except TypeError:
        return fn.log_prob(jnp.asarray(value).astype(int))


def _fits(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    pairs = zip(shape[::-1], to[::-1], strict=False)
    return len(shape) <= len(to) and all(n in (1, m) for n, m in pairs)


def kernel_beside(fn: GP):
    """The kernel at two rows that are computed from nothing, so that no number in it is that of
    rows; at as many as the inputs have where a kernel takes no others.
    """
    C = jnp.zeros((2, *fn.X.shape[1:]), fn.X.dtype)
    try:
        return fn.kernel(C, C)
    except Exception:  # noqa: BLE001 - whatever a user's kernel raises
        C = jnp.zeros(fn.X.shape, fn.X.dtype)
        return fn.kernel(C, C)
