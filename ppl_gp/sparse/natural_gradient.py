"""Natural gradients of q(v): read off the reverse pass of the bound, and a step towards where they
point that leaves q(v) a Gaussian. What a step is, is the family's (`natural_gaussian`).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from ppl_gp.sparse.families import Family
from ppl_gp.sparse.natural_gaussian import NaturalGaussian, Nudge

MAX_HALVINGS = 10


def nudges(q: dict[str, Family]) -> dict[str, Nudge]:
    """Zero nudges for the sites that natural gradients train."""
    return {k: one.nudge() for k, one in q.items() if isinstance(one, NaturalGaussian)}


def blend_all(here: dict, target: dict[str, NaturalGaussian], rate):
    """Natural-gradient steps that stay in the cone of positive-definite precisions, and how many
    were shortened.
    """
    moved, halved = {}, jnp.zeros((), jnp.int32)
    for name in target:
        moved[name], shortened = _within_cone(here[name], target[name], rate)
        halved = halved + shortened
    return moved, halved


def _within_cone(here: NaturalGaussian, target: NaturalGaussian, rate):
    """The step, halved until I + nat2 is positive definite: always at once where the likelihood is
    log-concave.
    """

    def outside(state) -> Any:
        halvings, sites = state
        return ~sites.is_proper() & (halvings < MAX_HALVINGS)

    def halve(state):
        halvings, _ = state
        # The last try is no step at all.
        shorter = jnp.where(halvings + 1 == MAX_HALVINGS, 0.0, rate * 0.5 ** (halvings + 1.0))
        return halvings + 1, here.blended(target, shorter)

    first = (jnp.zeros((), jnp.int32), here.blended(target, jnp.asarray(rate, here.nat1.dtype)))
    halvings, sites = lax.while_loop(outside, halve, first)
    return sites, (halvings > 0).astype(jnp.int32)
