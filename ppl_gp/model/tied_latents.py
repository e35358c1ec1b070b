"""Latents that stand one a datum and know each other: a path drawn by `scan`, a random walk over
the rows. Those at other rows are not drawn anew, row by row, from the prior.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.model.arguments import Leaves
from ppl_gp.model.growth import look_at
from ppl_gp.model.tracing import run
from ppl_gp.quick import quick_jit
from ppl_gp.wrappers import bare, bare_shape

_ROUNDINGS = 1e4


def tied_latents(
    model, args: tuple, kwargs: dict, known: Mapping, latents: tuple[str, ...]
) -> list[str]:
    """Those of `latents`, sites with an entry a datum, whose prior at a row sees other rows' of
    them: where the values at half of the rows are others, the densities of the rest have to stay.

    A site whose axis of the data is inside an event that is no product of entries counts as one.
    `known`: {site: value} of everything, at one draw. Two runs of the model, O(N).
    """
    trace = run(model, args, kwargs, known, known)
    axes = {k: trace[k]["data_axis"] for k in latents if trace[k]["data_axis"] is not None}
    places = {k: axis + len(trace[k]["fn"].batch_shape) for k, axis in axes.items()}
    joint = [k for k in axes if places[k] >= len(bare_shape(trace[k]["fn"]))]
    apart = tuple(k for k in axes if k not in joint)
    if not apart:
        return joint
    num = {k: np.shape(trace[k]["value"])[places[k]] for k in apart}
    moves = {k: np.random.default_rng(0).permutation(n) < (n + 1) // 2 for k, n in num.items()}
    other = _moved(model, args, kwargs, dict(known), apart, places, moves)
    here, there = (_by_row(model, args, kwargs, x, apart, places) for x in (dict(known), other))
    return joint + [k for k in apart if _differ(here[k], there[k], ~moves[k])]


def grown_whole(model, args: tuple, kwargs: dict) -> frozenset[str]:
    """Sites that have more entries where there is a row more, and no axis of the data: a random
    walk over the rows, whose entries are one event. One abstract trace.
    """
    reading, leaves = model.reading, Leaves(model, args, kwargs)
    if not reading.grows or not reading.rows:
        return frozenset()
    more = {p: (axis, 1) for p, axis in reading.rows if p in leaves.arrays}
    here, there = look_at(model, leaves, {}).sites, look_at(model, leaves, more).sites
    known = {k for k, _ in reading.axes}
    sizes = lambda s: (s.shape, s.event)  # noqa: E731
    grown = {k for k in here if k in there and sizes(here[k]) != sizes(there[k])}
    return frozenset(grown - known)


@quick_jit
def _moved(model, args, kwargs, known: dict, names, places, moves) -> dict:
    """Values that differ at the rows that move: drawn anew from the prior there."""
    trace = run(model, args, kwargs, known, known)
    found = dict(known)
    for i, k in enumerate(names):
        drawn = trace[k]["fn"].sample(random.key(i))
        shape = [1] * drawn.ndim
        shape[places[k]] = -1
        found[k] = jnp.where(moves[k].reshape(shape), drawn, known[k])
    return found


@quick_jit
def _by_row(model, args, kwargs, values: dict, names, places) -> dict:
    """{site: its log densities, (N, ...)}."""
    trace = run(model, args, kwargs, values, values)
    return {
        k: jnp.moveaxis(bare(trace[k]["fn"]).log_prob(trace[k]["value"]), places[k], 0)
        for k in names
    }


def _differ(a, b, rows) -> bool:
    a, b = np.asarray(a)[rows], np.asarray(b)[rows]
    limit = _ROUNDINGS * np.finfo(a.dtype).eps * (1.0 + np.abs(a))
    return not np.all((np.abs(a - b) <= limit) | (a == b) | (np.isnan(a) & np.isnan(b)))
