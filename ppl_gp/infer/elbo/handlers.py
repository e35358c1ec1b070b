"""Effect handlers of one copy of a particle: what is drawn anew in each, what all share, and what
is drawn jointly.
"""

from jax import random
from numpyro.primitives import Messenger

from ppl_gp.deep.copies import draw_copy
from ppl_gp.deep.structure import Structure
from ppl_gp.gp import unwrap
from ppl_gp.sparse.inducing_draws import draw_with_inducing
from ppl_gp.sparse.site import SparseMarginals


class OfCopy(Messenger):
    """In copy k of K: latents of the data are drawn by a key of its own, q(f) jointly with its
    sisters, the rest as in all.
    """

    def __init__(self, fn, plates: frozenset[str], structure: Structure, k, axis: str | None):
        self.plates, self.structure, self.k, self.axis = plates, structure, k, axis
        super().__init__(fn)

    def process_message(self, msg):
        """Stands outside of the seed, which has given the site its key."""
        if msg["type"] != "sample" or msg["value"] is not None or self.axis is None:
            return
        key, fn = msg["kwargs"].get("rng_key"), unwrap(msg["fn"])
        if isinstance(fn, SparseMarginals):
            if msg["name"] in self.structure.varying:
                msg["value"] = draw_copy(fn.process, fn.prior, key, self.axis)
        elif any(frame.name in self.plates for frame in msg["cond_indep_stack"]):
            msg["kwargs"]["rng_key"] = random.fold_in(key, self.k)


class OverRows(Messenger):
    """Draws u ~ q(u), then f ~ p(f | u) jointly over all rows; keeps log p(u) - log q(u) of each GP
    site.
    """

    def __init__(self, fn):
        self.log_ratios: dict = {}
        super().__init__(fn)

    def process_message(self, msg):
        """Stands outside of the seed."""
        fn = unwrap(msg["fn"]) if msg["type"] == "sample" else None
        if isinstance(fn, SparseMarginals) and msg["value"] is None:
            msg["value"], self.log_ratios[msg["name"]] = draw_with_inducing(
                fn.process, fn.prior, msg["kwargs"]["rng_key"]
            )
