"""What the bounds share: log densities of whole sites, each with its own `scale` handler, and
effect handlers (what is drawn anew in each copy of a particle, and what jointly).
"""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, random
from numpyro.distributions import constraints
from numpyro.primitives import Messenger

from ppl_gp.deep.layers import draw_copy
from ppl_gp.deep.structure import Structure
from ppl_gp.infer.hyper.autoguides import log_q
from ppl_gp.model.opened import Bones
from ppl_gp.sparse.process import draw_with_inducing
from ppl_gp.sparse.site import SparseMarginals
from ppl_gp.wrappers import unwrap


def scaled(site, log_prob):
    """With the site's own `scale`."""
    return log_prob if site["scale"] is None else site["scale"] * log_prob


def held(fn):
    """A distribution whose own parameters get no gradient. That of log q has mean zero, and what is
    left vanishes draw by draw where q is exact (Roeder, Wu & Duvenaud 2017); not inside a log over
    several draws.

    The mean is zero only if the support does not move with the parameters. A `Uniform`, or a
    `Delta` whose density is a Jacobian, stays as it is.
    """
    base = unwrap(fn)
    while type(base) is dist.TransformedDistribution and not jax.tree.leaves(base.transforms):
        base = unwrap(base.base_dist)
    support = getattr(type(base), "support", None)
    is_fixed = isinstance(support, constraints.Constraint) and not isinstance(support, property)
    arrays, bones = Bones.of(fn)
    return bones.with_arrays(lax.stop_gradient(arrays)) if is_fixed else fn


def auxiliary(drawn, trace, of=lambda fn: fn):
    """log q of what the guide alone draws, such as the joint vector of `AutoMultivariateNormal`,
    nats; `of` the distributions, `held` for one.
    """
    sites = [
        s
        for k, s in drawn.items()
        if s["type"] == "sample" and not s["is_observed"] and k not in trace
    ]
    # a flow's draws come with terms of their own, which are not apart from its parameters
    sites = [s if s.get("intermediates") else s | {"fn": of(s["fn"])} for s in sites]
    return sum([jnp.sum(scaled(s, log_q(s))) for s in sites], jnp.zeros(()))


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
