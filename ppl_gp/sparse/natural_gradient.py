"""Natural gradients of q(v): where they point, read off the reverse pass of the bound, and a step
towards there that leaves q(v) a Gaussian.

For sites, a step of size 1 lands on the maximum of the bound's linearisation; for a Gaussian
likelihood that is the optimum (Hensman, Fusi & Lawrence 2013; Khan & Lin 2017).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.numerics.linalg import add_diagonal
from ppl_gp.sparse.families import Family, NaturalGaussian, Whitened
from ppl_gp.sparse.root import positive_definite

MAX_HALVINGS = 10


class Nudge(NamedTuple):
    """Zeros added to q(v)'s mean and P before the expectation: the derivative in them is the
    natural gradient.
    """

    mean: Float[Array, "*F M"]
    reduction: Float[Array, "..."]


def nudges(q: dict[str, Family]) -> dict[str, Nudge]:
    """Zero nudges for the sites that natural gradients train."""
    sites = {k: one for k, one in q.items() if isinstance(one, NaturalGaussian)}
    return {k: Nudge(jnp.zeros_like(q.nat1), jnp.zeros_like(q.nat2)) for k, q in sites.items()}


def natural_target(q: Whitened, gradient: Nudge, weight) -> NaturalGaussian:
    """The sites that maximise the bound's linearisation: nat1 = (dE/dm + 2 (dE/dP) m) / weight,
    nat2 = 2 dE/dP / weight.

    P = I - S; `weight` of the KL, whose natural gradient is weight x (the sites).
    """
    share = (1.0 / jnp.asarray(weight)).astype(gradient.mean.dtype)
    P_bar = (
        share[..., None, None]
        * 0.5
        * (gradient.reduction + jnp.swapaxes(gradient.reduction, -1, -2))
    )
    nat1 = share[..., None] * gradient.mean + 2.0 * jnp.einsum("...ij,...j->...i", P_bar, q.mean)
    return NaturalGaussian(nat1, 2.0 * P_bar)


def expected_gain(q: Whitened, here: NaturalGaussian, target: NaturalGaussian, weight) -> Array:
    """What a whole step is expected to gain, nats, summed over functions: KL[q || target] to second
    order, r^T S r / 2 + tr((S D)^2) / 4 with D the step of nat2 and r = (the step of nat1) - D m.
    Zero at the optimum alone. O(M^3).
    """
    S = add_diagonal(-q.reduction, 1.0)
    D = target.nat2 - here.nat2
    r = target.nat1 - here.nat1 - jnp.einsum("...ij,...j->...i", D, q.mean)
    SD = S @ D
    ahead = jnp.einsum("...i,...ij,...j->...", r, S, r)
    turned = jnp.einsum("...ij,...ji->...", SD, SD)
    return jnp.sum(weight * (0.5 * ahead + 0.25 * turned))


def blend(old: NaturalGaussian, target: NaturalGaussian, rate) -> NaturalGaussian:
    """A natural-gradient step of size `rate` in (0, 1]."""
    nat1, nat2 = (
        (1.0 - rate) * a + rate * b for a, b in ((old.nat1, target.nat1), (old.nat2, target.nat2))
    )
    return NaturalGaussian(nat1, nat2, old.base)


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

    def outside(state):
        halvings, sites = state
        precisions = jnp.reshape(sites.nat2, (-1, *sites.nat2.shape[-2:]))
        inside = jnp.all(
            lax.map(lambda nat2: positive_definite(add_diagonal(nat2, 1.0)), precisions)
        )
        return ~inside & (halvings < MAX_HALVINGS)

    def halve(state):
        halvings, _ = state
        # The last try is no step at all.
        shorter = jnp.where(halvings + 1 == MAX_HALVINGS, 0.0, rate * 0.5 ** (halvings + 1.0))
        return halvings + 1, blend(here, target, shorter)

    first = (jnp.zeros((), jnp.int32), blend(here, target, jnp.asarray(rate, here.nat1.dtype)))
    halvings, sites = lax.while_loop(outside, halve, first)
    return sites, (halvings > 0).astype(jnp.int32)
