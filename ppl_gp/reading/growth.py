"""Growing the data: a model traced with N rows and with a few rows more. What grows is the data's.

Abstract traces only: nothing is computed and nothing compiled, unless the model looks at values
while it is traced; arrays with repeated rows then stand in for shapes.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.gp import bare_shape, hidden_axes, unwrap
from ppl_gp.reading.arguments import Leaves, argument_of, is_array
from ppl_gp.reading.digest import own_density
from ppl_gp.reading.roles import (
    is_factor,
    is_gp,
    is_missing_part,
    is_observed,
)
from ppl_gp.reading.tracing import bare_trace

MAX_TRIALS = 200  # sets of arguments that are tried as the data's
MAX_TOGETHER = 40  # sets of arguments that are tried as tables together
ARGUMENT, SITE = "argument ", "site "  # what names of `named_trace` begin with
_SORTED = 8  # arguments up to which all sets are listed, the likeliest first
Sizes = tuple[int | np.integer, int | np.integer]
Tied = dict[tuple[str, int], tuple[str, int]]  # (path, axis) to what stands for its length


class Axes(NamedTuple):
    """What is the data's, by name: axes of sites as `tracing.annotated` counts them, plates, axes
    of arguments by path.
    """

    sites: dict[str, int]
    plates: tuple[str, ...]
    rows: dict[str, int]


class Site(NamedTuple):
    """Of one sample site."""

    shape: tuple[int, ...]  # without masks and `to_event`
    event: tuple[int, ...]
    hidden: int
    frames: tuple[tuple[str, int], ...]  # (plate, axis in `shape`, negative)
    matches: bool  # whether value, parameters and `scale` have shapes that fit together
    is_gp: bool
    observed: bool


class Look(NamedTuple):
    """What one trace shows: sample sites, plates with their whole and their subsampled size, the
    shapes of all values.
    """

    sites: dict[str, Site]
    plates: dict[str, Sizes]
    values: dict[str, Any]  # of unobserved sites and `numpyro.param`s


def lengths(leaves: Leaves) -> list[int]:
    """Candidates for N: leading lengths in the first argument, the commonest first."""
    inputs = [x for p, x in leaves.arrays.items() if argument_of(p) == leaves.inputs and x.shape]
    first = [x.shape[0] for x in inputs]
    return sorted(dict.fromkeys(first), key=lambda n: -first.count(n))


def look_at(model, leaves: Leaves, grown: dict[str, tuple[int, int]]) -> Look:
    """One trace, with `grown` {path: (axis, further rows)}."""
    arrays = leaves.arrays
    shapes = {p: _longer(x, *grown.get(p, (0, 0))) for p, x in arrays.items()}
    seen = []

    def trace(values):
        seen.append(_seen(bare_trace(model, *leaves.replaced(values))))

    try:
        jax.eval_shape(trace, shapes)
    except jax.errors.JAXTypeError:  # the model looks at values
        trace({p: _repeat(x, *grown.get(p, (0, 0))) for p, x in arrays.items()})
    return seen[-1]


def named_trace(model, leaves: Leaves, base: Look, arrays) -> tuple[dict, Callable]:
    """({name: shape} of these arguments' arrays and of the random values of `base`, the function
    from such values to the sample sites of a trace).
    """
    dynamic, static = eqx.partition(base.values, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    named = {ARGUMENT + p: _longer(x, 0, 0) for p, x in arrays.items()}

    def at(named) -> dict:
        values = eqx.combine({k: named[SITE + k] for k in dynamic}, static)
        args, kwargs = leaves.replaced({p: named[ARGUMENT + p] for p in arrays})
        trace = bare_trace(model, args, kwargs, values, values)
        return {k: s for k, s in trace.items() if s["type"] == "sample"}

    return named | {SITE + k: x for k, x in dynamic.items()}, at


def _longer(x, axis, more):
    shape = tuple(n + more * (i == axis) for i, n in enumerate(x.shape))
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype))


def _repeat(x, axis, more):
    rows = jnp.minimum(jnp.arange(x.shape[axis] + more), x.shape[axis] - 1) if more else None
    return jnp.take(x, rows, axis) if more else x


def _seen(trace) -> Look:
    sites = {k: _site(s) for k, s in trace.items() if s["type"] == "sample"}
    plates = {k: _sizes(k, *s["args"]) for k, s in trace.items() if s["type"] == "plate"}
    free = {k: s["value"] for k, s in trace.items() if _is_free(k, s, trace)}
    return Look(sites, plates, jax.tree.map(_shape_of, free))


def _sizes(name: str, size, part) -> Sizes:
    """Of a plate and of what it subsamples."""
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
    )


def _matches(site) -> bool:
    scale, batch = np.shape(site["scale"]), site["fn"].batch_shape  # () of None
    pairs = zip(scale[::-1], batch[::-1], strict=False)
    scaled = len(scale) <= len(batch) and all(n in (1, m) for n, m in pairs)
    fits = jax.eval_shape(lambda: own_density(site["fn"], site["value"])) is not None
    free = not is_observed(site) or is_factor(site)
    return scaled and fits and (free or jnp.shape(site["value"]) == tuple(site["fn"].shape()))


def grow(
    model,
    leaves: Leaves,
    base: Look,
    num: int,
    options: frozenset[str] = frozenset(),
    tied: Tied | None = None,
) -> Axes | None:
    """The axes where the data are `num` rows, or `None` where no longer data can be traced.

    What has to grow is a GP site; the observations where no GP can (one GP at places that rows look
    up, f[place], or at inducing inputs).

    One row broadcasts against any number, so that the data grow without an array of one entry tells
    nothing of it: g of u[g] would pass for an option. Of one row every array that can grow with it
    is the data's, but for those that bring latent values along and reach no row by their own size
    (centres, a table of levels), and `options`, that kernels are computed from beside their inputs
    (length scales). `tied`: axes that are proved to be of one length grow together or not at all.
    """
    more = _unused(leaves, base, num)

    @lru_cache
    def trial(paths: tuple[tuple[str, int], ...]) -> Look | None:
        try:
            look = look_at(model, leaves, {p: (axis, more) for p, axis in paths})
        except Exception:  # noqa: BLE001 - arrays that do not fit together raise whatever the model's functions raise
            return None
        pairs = ((s, look.sites[k]) for k, s in base.sites.items() if k in look.sites)
        return None if any(s.matches and not there.matches for s, there in pairs) else look

    gps = tuple(k for k, s in base.sites.items() if s.is_gp)
    for growing in dict.fromkeys((gps or tuple(base.sites), _observations(base))):
        for paths in itertools.islice(_candidates(leaves, num), MAX_TRIALS):
            look = trial(tuple(paths.items()))
            if look is None or not _data_grow(base, look, growing):
                continue
            for dropped in _droppable(leaves, paths, tied or {}):
                if not dropped <= paths.keys():
                    continue
                fewer = {p: a for p, a in paths.items() if p not in dropped}
                without = trial(tuple(fewer.items()))
                if without is None:
                    continue
                if num == 1 and not dropped <= options:
                    alone = trial(tuple((p, paths[p]) for p in paths if p in dropped))
                    if _reaches_rows(base, look, without, alone):
                        continue
                # A table that happens to have N rows: the data can grow without it.
                table = num > 1 and all(argument_of(p) != leaves.inputs for p in dropped)
                if _data_grow(base, without, growing) or (
                    table and _data_grow(base, without, _observations(base))
                ):
                    paths, look = fewer, without
            return _axes(base, look, paths)
    return None


def _observations(base: Look) -> tuple[str, ...]:
    return tuple(k for k, s in base.sites.items() if s.observed)


def _unused(leaves: Leaves, base: Look, num: int) -> int:
    """Further rows such that their number is no other size of the model."""
    shapes = [x.shape for x in (*leaves.arrays.values(), *base.sites.values())]
    taken = {1, *itertools.chain(*shapes, *base.plates.values())}
    return next(more for more in itertools.count(1) if num + more not in taken)


def _candidates(leaves: Leaves, num: int) -> Iterator[dict[str, int]]:
    """{path: axis} of arguments that may grow together: the inputs alone, then all with N rows,
    then fewer or other axes.
    """
    inputs, options = {}, {}
    for path, x in leaves.arrays.items():
        axes = [i for i, n in enumerate(x.shape) if n == num]
        if argument_of(path) == leaves.inputs and axes[:1] == [0]:
            inputs[path] = 0
        if axes:
            options[path] = [*axes, None]
    if num > 1:  # one row's other arrays broadcast, and would pass for options
        yield inputs
    choices = itertools.product(*(range(len(o)) for o in options.values()))
    for choice in sorted(choices, key=sum) if len(options) <= _SORTED else choices:
        picked = {p: o[i] for (p, o), i in zip(options.items(), choice, strict=True)}
        yield {p: a for p, a in picked.items() if a is not None}


def _droppable(leaves: Leaves, paths: dict[str, int], tied: Tied) -> Iterator[frozenset[str]]:
    """Arguments that may be tables: each with what it is tied to, then several beside the inputs
    and y (means and standard deviations of levels, that a site alone brings together).
    """
    groups: dict = {}
    for axis in paths.items():
        groups.setdefault(tied.get(axis, axis), set()).add(axis[0])
    yield from map(frozenset, groups.values())
    given = {p for p in paths if argument_of(p) in (leaves.inputs, "y")}
    others = [g for g in groups.values() if not g & given]
    sets = itertools.chain.from_iterable(
        itertools.combinations(others, n) for n in range(2, len(others) + 1)
    )
    yield from (frozenset().union(*g) for g in itertools.islice(sets, MAX_TOGETHER))


def _reaches_rows(base: Look, look: Look, without: Look, alone: Look | None) -> bool:
    """Of one row, whether an array is the data's: no latent sizes come along with it, or grown
    alone it makes the observations grow (effects of rows, that an array of groups has the size of).
    """
    if _shapes(look) == _shapes(without):
        return True
    return alone is None or _data_grow(base, alone, _observations(base))


def _shapes(look: Look) -> list[tuple[int, ...]]:
    """Of all latent values and parameters."""
    return [x.shape for x in jax.tree.leaves(look.values) if hasattr(x, "shape")]


def _data_grow(base: Look, look: Look, growing: tuple[str, ...]) -> bool:
    """Whether one of the sites grew, or a plate that subsamples."""
    grew = [k for k in growing if k in look.sites and _grown_axes(base.sites[k], look.sites[k])]
    plates = ((size, part, look.plates.get(k)) for k, (size, part) in base.plates.items())
    subsampled = [n for n, part, there in plates if part < n and there and there[0] != n]
    return bool(grew or subsampled)


def _grown_axes(small: Site, large: Site) -> list[int]:
    """Axes of shape and event that grew, negative ones of the shape, others of the event."""
    if len(small.shape) != len(large.shape):
        return []
    shapes = enumerate(zip(small.shape, large.shape, strict=True), -len(small.shape))
    events = enumerate(zip(small.event, large.event, strict=False))
    return [i for i, (a, b) in (*shapes, *events) if a != b]


def _axes(base: Look, look: Look, paths: dict[str, int]) -> Axes:
    plates = tuple(k for k, sizes in base.plates.items() if look.plates.get(k, sizes) != sizes)
    axes = {}
    for name, small in base.sites.items():
        if name not in look.sites:
            continue
        if small.is_gp:
            axes |= {name: 0} if 0 in _grown_axes(small, look.sites[name]) else {}
            continue
        framed = list(
            dict.fromkeys(axis for plate, axis in small.frames if plate in plates)
        )  # a plate may be entered twice
        grown = [axis for axis in _grown_axes(small, look.sites[name]) if axis < 0]
        found = framed or grown
        if len(found) == 1:
            axes[name] = found[0] + small.hidden
    return Axes(axes, plates, paths)
