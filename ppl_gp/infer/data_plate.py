"""Which plates are the data's in a model that may have no GP site, and which latents stand one a datum."""

import jax
import jax.numpy as jnp

from ppl_gp.errors import ModelError
from ppl_gp.tracing import Roles, is_observed, roles


def of_the_data(trace: dict, args: tuple, apart: bool) -> tuple[Roles, frozenset[str], int]:
    """(roles, names of the data's plates, B). A latent in another plate, such as one of outputs, is a hyperparameter.

    The data's plate is the one that subsamples, else the one of as many rows as the first argument has, else the only one.
    `apart`: the terms of the data must be told from each other, as importance weights ask; of a sum alone any order of plates will
    do. `ModelError` without a plate, and where two plates have as many rows as each other and latents stand in one of them.
    """
    found = roles(trace)
    frames = {f for s in trace.values() if is_observed(s) for f in s["cond_indep_stack"]}
    num = _rows(trace, frames, args)
    plates = frozenset(f.name for f in frames if f.size == num)
    inside = {k: {f.dim for f in trace[k]["cond_indep_stack"] if f.name in plates} for k in found.local_latents}
    dims = {f.dim for f in frames if f.size == num}
    torn = [k for k, d in inside.items() if d and d != dims]
    if apart and torn:
        raise ModelError(
            f"latents {torn} stand in one of the plates {sorted(plates)}, which all have {num} members: which of them holds the data "
            "cannot be seen. Give another number of rows, or take num_importance=1."
        )
    local = tuple(k for k in found.local_latents if inside[k])
    hyper = (*found.hyper, *(k for k in found.local_latents if not inside[k]))
    return found._replace(local_latents=local, hyper=hyper), plates, num


def _rows(trace: dict, frames, args: tuple) -> int:
    sizes = {f.size for f in frames}
    if not sizes:
        raise ModelError(
            "the model observes nothing in a plate; declare numpyro.plate('data', N) around what is observed."
        )
    subsampling = {f.size for f in frames if f.name in trace and _subsamples(trace[f.name])}
    arrays = [x for x in jax.tree.leaves(args[:1]) if jnp.ndim(x)]
    given = {arrays[0].shape[0]} if arrays else set()
    for known in (subsampling, given & sizes, sizes):
        if len(known) == 1:
            return known.pop()
    raise ModelError(
        f"what is observed stands in plates of {sorted(sizes)} members, and none of them has as many as the first argument has rows "
        f"({sorted(given)}): give the inputs, one row a datum, as the first argument."
    )


def _subsamples(plate) -> bool:
    size, subsample = plate["args"]
    return subsample not in (None, size)
