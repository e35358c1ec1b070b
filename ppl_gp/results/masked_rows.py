"""Rows that masks leave out of a tree's densities: a row without one has none to be left out."""

from typing import TYPE_CHECKING

import numpy as np

from ppl_gp.model.per_datum import data_axis
from ppl_gp.model.roles import is_factor
from ppl_gp.wrappers import bare_shape, mask_of

if TYPE_CHECKING:
    import xarray as xr


def without_masked_rows(tree: "xr.DataTree", scored: dict[str, dict]) -> "xr.DataTree":
    """The tree without these rows in its group `log_likelihood`, where they are the same ones of
    all observed sites: ArviZ's leave-one-out refuses a density that is 0 in every draw.

    `scored`: {variable: its site of the model's trace on the training data}.
    """
    found = {k: _left_out(site) for k, site in scored.items()}
    if "log_likelihood" not in tree.children or any(x is None for x in found.values()):
        return tree
    densities = tree["log_likelihood"].to_dataset()
    dims = {densities[k].dims[2 + axis] for k, (axis, _) in found.items()}  # pyright: ignore
    first, *others = [rows for _, rows in found.values()]  # pyright: ignore
    alike = len(dims) == 1 and all(np.array_equal(first, rows) for rows in others)
    if alike and np.any(first) and not np.all(first):
        kept = densities.isel({dims.pop(): np.flatnonzero(~first)})
        tree["log_likelihood"] = type(tree)(kept)
    return tree


def _left_out(site: dict) -> tuple[int, np.ndarray] | None:
    """(axis of the data, which rows have no entry that counts, (N,)); `None` of factors, and where
    one event holds all data.
    """
    if is_factor(site):
        return None
    shape = bare_shape(site["fn"])
    if (axis := data_axis(site, len(shape))) is None:
        return None
    counts = np.broadcast_to(np.asarray(mask_of(site["fn"])), shape)
    seen = np.moveaxis(counts, axis, 0).reshape(shape[axis], -1)
    return axis % len(shape), np.logical_not(np.any(seen, axis=1))
