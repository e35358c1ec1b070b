"""What a fit's names say in a tree: coordinates of dimensions, and the labels of integers."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ppl_gp.frames.table import ArrayNames
from ppl_gp.model.arguments import Leaves
from ppl_gp.model.roles import is_factor, is_observed
from ppl_gp.results.record import Record

if TYPE_CHECKING:
    import xarray as xr

TRAINING = ("constant_data", "observed_data", "posterior_predictive", "prior_predictive")
NEW = ("predictions", "predictions_constant_data")


def own_coordinates(named: Mapping[str, ArrayNames], dims: dict, sizes: dict[str, int]) -> dict:
    """{dimension: labels} of columns and rows that have names. `named`: {variable: names}; `dims`:
    {variable: dimensions}; `sizes`: {dimension: length}.
    """
    found: dict = {}
    for variable, names in named.items():
        own = dims.get(variable, ())
        if names.columns and len(own) > 1:
            found.setdefault(own[-1], list(names.columns))
        if names.rows and own:
            found.setdefault(own[0], list(names.rows))
    return {d: labels for d, labels in found.items() if sizes.get(d) == len(labels)}


def with_columns(
    inputs: dict, named: Mapping[str, ArrayNames], dims: dict
) -> tuple[dict, dict[str, ArrayNames], dict]:
    """(inputs, names, dimensions) with the columns of tables as variables of their own, before the
    tables: what ArviZ's pictures put along an axis. A name that something else has, or that a tree
    takes for a path, is left out.
    """
    taken = {*dims, *(d for own in dims.values() for d in own)}
    columns, labels, along = {}, {}, {}
    for path, names in named.items():
        if path not in inputs or not names.columns or np.ndim(inputs[path]) != 2:
            continue
        for j, column in enumerate(names.columns):
            if column and "/" not in column and column not in {*taken, *columns, ".", ".."}:
                columns[column] = inputs[path][:, j]
                labels[column] = ArrayNames((column,), (names.level(j),))
                along[column] = dims[path][:1]
    return {**columns, **inputs}, {**named, **labels}, {**dims, **along}


def with_levels(
    tree: "xr.DataTree", named: Mapping[str, ArrayNames], groups: Iterable[str]
) -> "xr.DataTree":
    """The tree with the attribute `levels` on variables of labels in these groups: a list of them,
    the integers being their places; of a frame, JSON of {column: list}.
    """
    for variable, names in named.items():
        if not any(names.levels):
            continue
        for group in groups:
            if group in tree.children and variable in tree[group].data_vars:
                tree[group][variable].attrs["levels"] = _told(names)
    return tree


def _told(names: ArrayNames) -> list[str] | str:
    if len(names.levels) == 1 and names.levels[0]:
        return list(names.levels[0])
    columns = names.columns or tuple(map(str, range(len(names.levels))))
    pairs = zip(columns, names.levels, strict=True)
    return json.dumps({k: labels for k, labels in pairs if labels})


def names_of_variables(fit: Record, trace: dict) -> dict[str, ArrayNames]:
    """{variable: its names}: an argument by its path, an observed site by the argument that it
    observes, which has the same values.
    """
    leaves = Leaves(fit.model, fit.args, fit.kwargs).arrays
    named = {p: names for p, names in fit.names.items() if p in leaves}
    found = dict(named)
    for k, site in trace.items():
        if is_observed(site) and not is_factor(site):
            same = (n for p, n in named.items() if _same(site["value"], leaves[p]))
            if (names := next(same, None)) is not None:
                found[k.removesuffix("_observed")] = names
    return found


def _same(a, b) -> bool:
    return a is b or (np.shape(a) == np.shape(b) and np.array_equal(np.asarray(a), np.asarray(b)))
