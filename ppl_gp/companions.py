"""Whether a row of a model sees other rows' arguments, as where inputs are standardised inside of it."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.arguments import Leaves
from ppl_gp.declared import Declared
from ppl_gp.gp import unwrap
from ppl_gp.tracing import data_axis, is_gp, is_observed, run
from ppl_gp.wrappers import bare, bare_shape

_ROUNDINGS = 1e3


def mixing_sites(model: Declared, args: tuple, kwargs: dict, hyper: Mapping, f: Mapping) -> list[str]:
    """Sites whose row n changes with other rows' arguments: GP sites by their inputs, observed sites by their log density.

    A random half of the rows takes the arguments of one row of the other half, which may not notice. Predictions of such a model
    depend on which rows are asked for together, and minibatches see other inputs than all data do. O(N).
    """
    leaves, rng = Leaves(model, args, kwargs), np.random.default_rng(0)
    rows = {p: leaves.arrays[p] for p, _ in model.reading.rows if p in leaves.arrays}
    num = next((x.shape[a] for p, a in model.reading.rows for x in [rows.get(p)] if x is not None), 0)
    if not model.reading.grows or num < 2 or any(x.shape[model.reading.axis_of(p)] != num for p, x in rows.items()):
        return []
    moves = rng.permutation(num) < (num + 1) // 2
    source = np.arange(num)
    source[moves] = np.flatnonzero(~moves)[0]
    moved = {p: jnp.take(jnp.asarray(x), source, model.reading.axis_of(p)) for p, x in rows.items()}
    known = [{k: x for k, x in values.items() if _is_finite(x)} for values in (hyper, f)]  # a fit may have failed
    before, after = (_by_row(run(model, *leaves.replaced(v), *known)) for v in ({}, moved))
    return [k for k in before if k in after and _differ(before[k][~moves], after[k][~moves])]


def _is_finite(value) -> bool:
    return all(bool(np.all(np.isfinite(x))) for x in jax.tree.leaves(value))


def _by_row(trace: dict) -> dict[str, np.ndarray]:
    """{site: (N, ...)}."""
    found = {k: np.asarray(unwrap(s["fn"]).X) for k, s in trace.items() if is_gp(s) and s["data_axis"] is not None}
    for name, site in trace.items():
        if is_observed(site) and (axis := data_axis(site, len(bare_shape(site["fn"])))) is not None:
            found[name] = np.moveaxis(np.asarray(bare(site["fn"]).log_prob(site["value"])), axis, 0)
    return found


def _differ(a, b) -> bool:
    close = np.abs(a - b) <= _ROUNDINGS * np.finfo(a.dtype).eps * (1.0 + np.abs(a))
    return not np.all(close | (a == b) | (np.isnan(a) & np.isnan(b)))
