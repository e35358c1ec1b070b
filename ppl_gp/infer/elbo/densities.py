"""Log densities of whole sites, each with the `scale` handler that it stands in."""

import jax.numpy as jnp

from ppl_gp.infer.hyper.autoguides import log_q


def scaled(site, log_prob):
    """With the site's own `scale`."""
    return log_prob if site["scale"] is None else site["scale"] * log_prob


def auxiliary(drawn, trace):
    """log q of what the guide alone draws, such as the joint vector of `AutoMultivariateNormal`,
    nats.
    """
    sites = [
        s
        for k, s in drawn.items()
        if s["type"] == "sample" and not s["is_observed"] and k not in trace
    ]
    return sum([jnp.sum(scaled(s, log_q(s))) for s in sites], jnp.zeros(()))
