"""Observations at new inputs, checked before they are scored."""

import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.gp import unwrap
from ppl_gp.model.arguments import as_arrays
from ppl_gp.model.forgotten import require_dtype
from ppl_gp.model.roles import is_factor, is_observed
from ppl_gp.quick import full_jit
from ppl_gp.results.query.by_names import observed_argument
from ppl_gp.results.query.query import Case
from ppl_gp.wrappers import mask_of


def observations_at(case: Case, y_new) -> dict:
    """{argument: y_new} as an array. Raises `DataError`: NaN, not the observed site's shape or
    dtype, outside its support.
    """
    observations = {observed_argument(case.model): as_arrays((), {"y": y_new})[1]["y"]}
    try:
        checked = _inside(case, observations)
    except (KeyError, IndexError, AttributeError) as error:
        raise DataError(
            f"y_new does not hold what the model observes ({error!r}); give it in the form of the "
            "training y."
        ) from error
    for name, (inside, value) in checked.items():
        if not bool(jnp.all(inside)):
            bad = np.asarray(value)[~np.asarray(inside)].ravel()[:3].tolist()
            raise DataError(
                f"y_new: site '{name}' observes {bad}, outside its support; give observations "
                "coded as in training."
            )
    return observations


@full_jit
def _inside(case: Case, observations: dict) -> dict:
    trace = case.trace(case.draws.at(0), {}, **observations)
    return {
        k: _check(k, site, case.layout.num)
        for k, site in trace.items()
        if is_observed(site) and not is_factor(site)
    }


def _check(name, site, num):
    fn, value = site["fn"], site["value"]
    if jnp.shape(value) != tuple(fn.shape()):
        raise DataError(
            f"y_new has shape {jnp.shape(value)} and X_new {num} row(s): site '{name}' observes "
            f"shape {jnp.shape(value)}, and its distribution has {tuple(fn.shape())} there; give "
            "one observation per row."
        )
    require_dtype(name, site, "y_new")
    core = unwrap(fn)
    inside = jnp.broadcast_to(
        core.support(value), jnp.shape(value)[: jnp.ndim(value) - core.event_dim]
    )
    return inside | ~mask_of(fn), value
