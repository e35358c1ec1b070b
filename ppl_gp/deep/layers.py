"""Passing a batch through the layers: inner GP sites are drawn, outer ones leave their moments for
the likelihood.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
from jax import random
from jaxtyping import Array, Float
from numpyro import handlers

from ppl_gp.deep.copies import draw_copy
from ppl_gp.deep.structure import Structure
from ppl_gp.gp import GP
from ppl_gp.model.tracing import annotated, set_gps
from ppl_gp.sparse.process import SparseProcess


class Moments(NamedTuple):
    """Mean and variance of f at the rows of a batch."""

    mean: Float[Array, "*F B"]
    variance: Float[Array, "*F B"]


class Passed(NamedTuple):
    """What one copy of a batch met on its way."""

    trace: dict
    moments: dict[str, Moments]  # of the GP sites that were not drawn

    def values(self, names) -> dict:
        """{site: value}."""
        return {k: self.trace[k]["value"] for k in names}


def pass_through(
    model,
    args,
    kwargs,
    given: dict,
    processes: dict[str, SparseProcess],
    structure: Structure,
    key,
    axis=None,
    drawn=None,
    known: Mapping[str, Moments] = MappingProxyType({}),
) -> Passed:
    """Run the model with hyperparameters and latents given. O(M^2 B) a GP site.

    `drawn`: the GP sites to draw, by default the inner ones. `axis`: the mapped axis of copies,
    over which draws are joint.
    `known`: moments of GP sites that stand at the data in every run.
    """
    drawn, moments = structure.inner if drawn is None else drawn, {}

    def value(name, new: GP):
        process, own = processes[name], random.fold_in(key, structure.gps.index(name))
        if axis is not None and name in structure.varying and name in drawn:
            return draw_copy(process, new, own, axis)
        f = known[name] if name in known else Moments(*process.marginals(new))
        # at the same inputs all copies have the same f, and the same key gives it
        if name in drawn:
            return f.mean + jnp.sqrt(f.variance) * random.normal(own, f.mean.shape, f.mean.dtype)
        moments[name] = f
        return f.mean

    with handlers.block():
        seeded = handlers.substitute(handlers.seed(model, random.key(0)), data=given)
        return Passed(
            annotated(handlers.trace(set_gps(seeded, value)).get_trace(*args, **kwargs), model),
            moments,
        )
