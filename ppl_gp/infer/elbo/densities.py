"""Log densities of whole sites, each with the `scale` handler that it stands in."""

import jax
import jax.numpy as jnp
from jax import lax

from ppl_gp.infer.hyper.autoguides import log_q


def scaled(site, log_prob):
    """With the site's own `scale`."""
    return log_prob if site["scale"] is None else site["scale"] * log_prob


def held(fn):
    """A distribution whose own parameters get no gradient. That of log q has mean zero, and what is
    left vanishes draw by draw where q is exact (Roeder, Wu & Duvenaud 2017); not inside a log over
    several draws.
    """
    return jax.tree.map(lax.stop_gradient, fn)


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
