"""Passing a batch through the layers: inner GP sites are drawn, outer ones leave their moments for the likelihood."""

from typing import NamedTuple

from jax import random
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.primitives import Messenger

from ppl_gp.deep.copies import draw_copy, draw_rows
from ppl_gp.deep.structure import Structure
from ppl_gp.gp import unwrap
from ppl_gp.sparse.process import SparseProcess
from ppl_gp.tracing import is_gp


class Moments(NamedTuple):
    """Mean and variance of f at the rows of a batch."""

    mean: Float[Array, "*F B"]
    variance: Float[Array, "*F B"]


class _Draw(Messenger):
    """Gives GP sites values of q(f) at the inputs that they have in this run."""

    def __init__(self, fn, processes: dict[str, SparseProcess], of: Structure, key, axis: str | None, drawn):
        self.processes, self.of, self.key, self.axis, self.drawn = processes, of, key, axis, drawn
        self.moments: dict[str, Moments] = {}
        super().__init__(fn)

    def process_message(self, msg):
        """Draw an inner site; note the moments of an outer one, and set it to its mean."""
        if msg["type"] != "sample" or msg["value"] is not None or not is_gp(msg):
            return
        name, new = msg["name"], unwrap(msg["fn"])
        process, key = self.processes[name], random.fold_in(self.key, self.of.gps.index(name))
        if name not in self.drawn:
            self.moments[name] = Moments(*process.marginals(new))
            msg["value"] = self.moments[name].mean
        elif self.axis is not None and name in self.of.varying:
            msg["value"] = draw_copy(process, new, key, self.axis)
        else:
            # At the same inputs all copies have the same f, and the same key gives it.
            msg["value"] = draw_rows(process, new, key)


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
    with handlers.block():
        seeded = handlers.substitute(handlers.seed(model, random.key(0)), data=given)
        layers = _Draw(seeded, processes, of, key, axis, of.inner if drawn is None else drawn)
        return Passed(handlers.trace(layers).get_trace(*args, **kwargs), layers.moments)
