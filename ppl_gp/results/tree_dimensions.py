"""What the variables of a tree and the rows of the training data are called, and their dimensions:
plates by name, else `<variable>_dim_<i>`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.frames.opened import ArrayNames
from ppl_gp.gp import bare_shape, mask_of
from ppl_gp.reading.arguments import Leaves, argument_names
from ppl_gp.reading.reading import Declared
from ppl_gp.reading.roles import data_axis, data_plates, is_factor
from ppl_gp.reading.tracing import run
from ppl_gp.results.record import Record

# no chains, no draws
DATA = ("observed_data", "constant_data", "predictions_constant_data", "point_estimates")


class Part(NamedTuple):
    """Groups in which a name is one variable: those of sites, or those of arguments, as an argument
    may be called as a site. {group: {variable: array}}, {variable: dimensions after chain and
    draw}, {variable: names of its rows and columns}.
    """

    groups: dict[str, dict]
    dims: dict[str, list[str]]
    named: dict[str, ArrayNames]

    def dotted(self) -> "Part":
        """Under names that a tree can hold."""
        dims = {k: [dots(d) for d in own] for k, own in self.dims.items()}
        groups = {group: dotted(values) for group, values in self.groups.items() if values}
        return Part(groups, dotted(dims), dotted(self.named))


def scored_names(trace: dict) -> list[str]:
    """The sites of a trace that score data: those that observe, and factors that see data."""
    return [k for k, site in trace.items() if site["type"] == "sample" and site["is_scored"]]


def rows_that_count(site: dict) -> tuple[int, np.ndarray] | None:
    """(axis of the data without `to_event`, which rows have an entry that no mask leaves out,
    (N,)) of a site that scores data; `None` where one event holds all of them.
    """
    shape = bare_shape(site["fn"])
    if (axis := data_axis(site, len(shape))) is None:
        return None
    counts = np.broadcast_to(np.asarray(mask_of(site["fn"])), shape)
    by_row = np.moveaxis(counts, axis, 0).reshape(shape[axis], -1)
    return axis % len(shape), np.any(by_row, 1)


def data_plate(trace: dict) -> str | None:
    """The name of the data's plate, if there is one; of several the first."""
    plates = data_plates(trace)
    sites = [s for s in trace.values() if s["type"] == "sample"]
    frames = (f.name for s in sites for f in s["cond_indep_stack"])
    return next((name for name in frames if name in plates), None)


def site_dimensions(name: str, site: dict, plate: str | None) -> list[str]:
    """Of a site of a trace; `plate`: the name of the axis of the data."""
    shape, batch = site["fn"].shape(), len(site["fn"].batch_shape)
    dims = [f"{name}_dim_{i}" for i in range(len(shape))]
    # also where `to_event`, or a GP, took the axis for an event
    if plate and site["data_axis"] is not None:
        dims[batch + site["data_axis"]] = plate
    for frame in site["cond_indep_stack"]:
        dims[batch + frame.dim] = frame.name
    return dims if not is_factor(site) else dims[:batch]


def deterministic_dimensions(
    fit: Record, shapes: Mapping[str, tuple], plate: str | None
) -> dict[str, list[str]]:
    """{deterministic site: dimensions} of sites of these shapes. The axis of the data is the one
    that is longer where the model is run with a row more: O(N).
    """
    grown = _with_a_row_more(fit) if shapes and plate and fit.model.reading.grows else {}
    found = {}
    for k, shape in shapes.items():
        lengths = enumerate(zip(*grown.get(k, (shape, shape)), strict=True))
        found[k] = [plate if plate and n < m else f"{k}_dim_{i}" for i, (n, m) in lengths]
    return found


def _with_a_row_more(fit: Record) -> dict[str, tuple]:
    """{deterministic site: (its shape in training, and with the first row again at the end)}."""
    model, hyper = fit.source, fit.draws.at(0).hyper
    leaves, axes = Leaves(model, fit.args, fit.kwargs), model.reading.row_axes
    own = {p: x for p, x in leaves.arrays.items() if p in axes}
    first = {p: jnp.take(x, jnp.arange(1), axes[p]) for p, x in own.items()}
    more = {p: jnp.concatenate([x, first[p]], axes[p]) for p, x in own.items()}
    before, after = (run(model, *leaves.replaced(x), hyper) for x in (own, more))
    known = [k for k, s in before.items() if s["type"] == "deterministic"]
    return {k: (jnp.shape(before[k]["value"]), jnp.shape(after[k]["value"])) for k in known}


def inputs_of(
    model: Declared, args: tuple, kwargs: dict, plate: str | None
) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """({path: array}, {path: dimensions}) of the arrays that distributions are computed from."""
    reading, arrays, dims = model.reading, {}, {}
    for path, value in Leaves(model, args, kwargs).arrays.items():
        if path in reading.shaping and np.ndim(value) > 0:
            arrays[path] = np.asarray(value)
            dims[path] = [f"{path}_dim_{i}" for i in range(np.ndim(value))]
            if plate and (axis := reading.axis_of(path)) is not None:
                dims[path][axis] = plate
    return arrays, dims


def dotted(named: Mapping) -> dict:
    """The same under names that a tree can hold: a slash, which scopes put into the names of sites,
    is a way down a tree, and becomes a dot. Raises `DataError` where two would be one.
    """
    if len({dots(k) for k in named}) < len(named):
        raise DataError(f"two of {list(named)} are one name in a tree; rename a site of the model.")
    return {dots(k): v for k, v in named.items()}


def dots(name: str) -> str:
    """One of them; a site or plate called as a tree's own dimensions has an underscore behind."""
    name = name.replace("/", ".")
    return f"{name}_" if name in ("chain", "draw") else name


def without_clashes(sites: dict, inputs: dict) -> tuple[dict, dict]:
    """Both {variable: dimensions}, with `_dim` behind a dimension that is called as a variable,
    which xarray takes for its coordinate, and `_` behind an argument's that a site of its name has.
    """
    taken = {*sites, *inputs}
    free = lambda own: [f"{d}_dim" if d in taken else d for d in own]  # noqa: E731
    apart = lambda k, own: [f"{d}_" if d.startswith(f"{k}_dim_") else d for d in own]  # noqa: E731
    return (
        {k: free(own) for k, own in sites.items()},
        {k: free(apart(k, own) if k in sites else own) for k, own in inputs.items()},
    )


def row_names(fit: Record, num: int) -> tuple[str | int, ...]:
    """A name for each of `num` training rows: the labels of the inputs' rows where these tell them
    apart, else those of another argument with an entry per row, else their numbers.
    """
    by_row = fit.model.reading.row_axes
    for path in (argument_names(fit.model, 1)[0], *fit.names):
        rows = (path in fit.names and fit.names[path].rows) or ()
        if by_row.get(path) == 0 and len(rows) == len(set(rows)) == num:
            return rows
    return tuple(range(num))
