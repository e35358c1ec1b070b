"""Log densities of whole sites, each with the `scale` handler that it stands in."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax
from numpyro.distributions import constraints

from ppl_gp.infer.hyper.autoguides import log_q
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
    return jax.tree.map(lax.stop_gradient, fn) if is_fixed else fn


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
