"""Passing a batch through the layers: inner GP sites are drawn, outer ones leave their moments for the likelihood."""

from typing import NamedTuple

from jax import random
from jaxtyping import Array, Float
from numpyro import handlers

from ppl_gp.deep.copies import draw_copy, draw_rows
from ppl_gp.deep.structure import Structure
from ppl_gp.gp import GP
from ppl_gp.sparse.process import SparseProcess
from ppl_gp.tracing import set_gps


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
    model, args, kwargs, given: dict, processes: dict[str, SparseProcess], of: Structure, key, axis=None, drawn=None
) -> Passed:
    """Run the model with hyperparameters and latents given. O(M^2 B) a GP site.

    `drawn`: the GP sites to draw, by default the inner ones. `axis`: the mapped axis of copies, over which draws are joint.
    """
    drawn, moments = of.inner if drawn is None else drawn, {}

    def value(name, new: GP):
        process, own = processes[name], random.fold_in(key, of.gps.index(name))
        if name not in drawn:
            moments[name] = Moments(*process.marginals(new))
            return moments[name].mean
        if axis is not None and name in of.varying:
            return draw_copy(process, new, own, axis)
        return draw_rows(process, new, own)  # at the same inputs all copies have the same f, and the same key gives it

    with handlers.block():
        seeded = handlers.substitute(handlers.seed(model, random.key(0)), data=given)
        return Passed(handlers.trace(set_gps(seeded, value)).get_trace(*args, **kwargs), moments)
