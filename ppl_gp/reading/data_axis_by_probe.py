"""Where the data cannot be traced at another length: the axes along which the likelihood's terms
move with f.

Moving f in some rows, by finite steps, moves the terms of the same rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import bare, hidden_axes, unwrap
from ppl_gp.reading.arguments import Leaves, argument_of
from ppl_gp.reading.growth import Axes, Look, Site
from ppl_gp.reading.missing_observations import require_dtype
from ppl_gp.reading.roles import is_gp, is_observed
from ppl_gp.reading.tracing import bare_trace

_MOVES = 3  # random halves of the rows


def by_moving(model, leaves: Leaves, base: Look) -> Axes:
    """Where the data cannot be traced at another length: the axes along which terms move with f."""
    gps = {k: s for k, s in base.sites.items() if s.is_gp}
    lengths = {s.event[0] for s in gps.values()}
    axes: dict[str, int] = {}
    if len(lengths) == 1:
        (num,) = lengths
        moved = _moved(model, leaves, gps, num)
        for name, site in base.sites.items():
            of_terms = None if moved is None else _moving_axis(site, moved.get(name), num)
            axis = _only_axis(name, site, num) if moved is None else of_terms
            if axis is not None and not site.is_gp:
                axes[name] = axis
    if not gps:
        axes = _of_the_only_plate(leaves, base)
    frames = ((p, where, axis) for k, axis in axes.items() for p, where in base.sites[k].frames)
    plates = {p for p, where, axis in frames if where == axis}
    for name, site in base.sites.items():
        where = [a for p, a in site.frames if p in plates]
        if where and not site.is_gp and name not in axes:
            axes[name] = where[0]
    axes |= {k: 0 for k in gps}
    counted = {k: a + base.sites[k].hidden for k, a in axes.items()}
    rows = {
        p: x.shape.index(num) for p, x in leaves.arrays.items() for num in lengths if num in x.shape
    }
    return Axes(counted, tuple(sorted(plates)), rows)


def _of_the_only_plate(leaves: Leaves, base: Look) -> dict[str, int]:
    """{observed site: axis} of a model without a GP: the plate that subsamples, else the one of as
    many members as the inputs have rows, else the only one; none where two are such plates.
    """
    frames = {p for s in base.sites.values() if s.observed for p, _ in s.frames}
    inputs = [x for p, x in leaves.arrays.items() if argument_of(p) == leaves.inputs and x.shape]
    sizes = {p: base.plates.get(p, (0, 0)) for p in frames}
    subsampling = {p for p, (size, part) in sizes.items() if size != part}
    given = {p for p, (size, _) in sizes.items() if size in {x.shape[0] for x in inputs}}
    data = next((found for found in (subsampling, given, frames) if found), set())
    if len(data) != 1:
        return {}
    return {k: a for k, s in base.sites.items() if s.observed for p, a in s.frames if p in data}


def _moved(model, leaves: Leaves, gps: dict[str, Site], num: int) -> dict[str, list] | None:
    """{observed site: [(rows of f that were moved, entries that moved)]}; `None` under a trace,
    where no value can be looked at.
    """
    rng, found = np.random.default_rng(0), {}
    try:
        with jax.ensure_compile_time_eval():
            for _ in range(_MOVES):
                rows = rng.permutation(num) < max(1, num // 2)
                f, step = (
                    {k: rng.normal(size=(*s.shape, num)) for k, s in gps.items()} for _ in range(2)
                )
                here, there = (
                    _terms(bare_trace(model, *leaves.replaced({}), latent=values), leaves)
                    for values in (_float(f), _float({k: f[k] + rows * step[k] for k in f}))
                )
                for name, term in here.items():
                    same = (term == there[name]) | (jnp.isnan(term) & jnp.isnan(there[name]))
                    found.setdefault(name, []).append((rows, np.asarray(~same)))
    except jax.errors.JAXTypeError:
        return None
    return found


def _only_axis(name: str, site: Site, num: int) -> int | None:
    """The one axis of N entries, a plate's before others."""
    framed = {axis for _, axis in site.frames if site.shape[axis] == num}
    found = framed or {i - len(site.shape) for i, n in enumerate(site.shape) if n == num}
    if len(found) > 1:
        raise ModelError(
            f"several axes of site '{name}', of shape {site.shape}, have {num} entries, and which "
            "one is the data's cannot be seen under a trace of a model that holds arrays of its "
            "own; pass them as arguments."
        )
    return next(iter(found), None)


def acting_by_row(model: Callable, leaves: Leaves, axes: Axes) -> dict[str, int]:
    """{path: axis} of further arrays of N entries whose rows move the terms and inputs of the same
    rows, and of no others.

    Growing cannot see them: an array that is indexed by row numbers, y[rows], need not have more
    entries (JAX clamps indices). A table that is looked up moves other rows than its own once the
    rows have changed places, and with them what they look up.
    """
    num = next((leaves.arrays[p].shape[a] for p, a in axes.rows.items()), 0)
    others = {
        p: x.shape.index(num)
        for p, x in leaves.arrays.items()
        if p not in axes.rows and num in x.shape
    }
    try:
        with jax.ensure_compile_time_eval():
            return {
                p: a
                for p, a in others.items()
                if num > 1
                and _moves_its_rows(model, leaves, axes, p, a, num)
                and _moves_its_rows(model, leaves, axes, p, a, num, turned=1)
            }
    except (jax.errors.JAXTypeError, FloatingPointError):
        return {}


def _moves_its_rows(
    model, leaves: Leaves, axes: Axes, path: str, axis: int, num: int, turned: int = 0
) -> bool:
    """With the data's rows in their order, or `turned` places on."""
    rng, x = np.random.default_rng(1), jnp.asarray(leaves.arrays[path])
    given = {p: jnp.roll(jnp.asarray(leaves.arrays[p]), turned, a) for p, a in axes.rows.items()}

    def terms(moved):
        args, kwargs = leaves.replaced({**given, path: moved})
        return _by_row(bare_trace(model, args, kwargs), axes, leaves, num)

    here, found = terms(x), False
    for _ in range(_MOVES):
        rows = rng.permutation(num) < max(1, num // 2)
        source = np.where(rows, rng.permutation(num), np.arange(num))
        try:
            there = terms(jnp.take(x, source, axis))
        except (DataError, ValueError, FloatingPointError):
            return False  # of the rows of a covariance matrix nothing is one in another order
        parts = [_differs(a, there[k], num) for k, a in here.items() if k in there]
        moved = np.any(parts or [np.zeros(num, bool)], 0)
        if np.any(moved & ~rows):
            return False
        found |= bool(moved.any())
    return found


def _by_row(trace, axes: Axes, leaves: Leaves, num: int) -> dict[str, np.ndarray]:
    """{site: (N, ...)}: inputs of GP sites, log-probabilities of what is observed."""
    gps = {k: s for k, s in trace.items() if is_gp(s) and k in axes.sites}
    found = {k: np.asarray(unwrap(s["fn"]).X) for k, s in gps.items()}
    for name, terms in _terms(trace, leaves).items():
        if name in axes.sites:
            found[name] = np.moveaxis(
                np.asarray(terms), axes.sites[name] - hidden_axes(trace[name]["fn"]), 0
            )
    return {k: x for k, x in found.items() if len(x) == num}


def _differs(a, b, num: int):
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.any(np.reshape(~same, (num, -1)), 1)


def _float(values):
    return {k: jnp.asarray(v, jnp.result_type(float)) for k, v in values.items()}


def _terms(trace, leaves: Leaves) -> dict:
    observed = {k: s for k, s in trace.items() if is_observed(s)}
    fitting = {k: s for k, s in observed.items() if jnp.shape(s["value"]) == tuple(s["fn"].shape())}
    for name, site in fitting.items():
        require_dtype(name, site, leaves)
    return {k: bare(s["fn"]).log_prob(s["value"]) for k, s in fitting.items()}


def _moving_axis(site: Site, moved: list | None, num: int) -> int | None:
    """The axis along which entries moved in the rows in which f did."""
    if not moved:
        return None
    found = [
        i - len(site.shape)
        for i, n in enumerate(site.shape)
        if n == num and all(_follows(i, *m) for m in moved)
    ]
    # several only where there is one datum, and then all sums are the same
    return found[-1] if found else None


def _follows(axis: int, rows, entries) -> bool:
    along = np.any(entries, tuple(i for i in range(entries.ndim) if i != axis))
    return bool(along.any() and not np.any(along & ~rows))
