"""What predictions and log densities share: moments of f at new inputs, averages over draws, and
how finely integrals are taken.
"""

import math
from typing import Any

from jax import random

from ppl_gp.draws import Draws
from ppl_gp.gp import unwrap
from ppl_gp.reading.tracing import run
from ppl_gp.results.integrals.integration import Integration
from ppl_gp.results.integrals.several import Effort
from ppl_gp.results.query.mixture import JointMoments, Moments, mixture
from ppl_gp.results.query.query import Query, drawn_trace

# by "many draws": what a mixture averages away need not be resolved
NODES = {True: 192, False: 384}
MIN_DRAWS = 1000  # Monte Carlo draws in all
LATENT_DRAWS = 4000  # of latents, which are weighted

LAYER_NODES = 32  # of each of at least 1000 draws of the last layer's inputs
# draws of the hyperparameters from which several functions at each are integrated with fewer nodes
MANY = 30
SEVERAL_NODES = {True: 64, False: 192}


def num_nodes(query: Query) -> int:
    return NODES[query.draws.num > 1]


def effort_of(query: Query, num_draws: int) -> Effort:
    """For several functions at each draw of the hyperparameters."""
    many = query.draws.num >= MANY
    return Effort(SEVERAL_NODES[many], many, repeats(query, num_draws))


def repeats(query: Query, num_draws: int) -> int:
    """Draws of f, and of what lies below, a posterior draw."""
    return math.ceil(num_draws / query.draws.num)


def marginals(query: Query, draw: Draws) -> Moments:
    """f at the new inputs of the one GP site."""
    return all_marginals(query, draw)[query.site]  # pyright: ignore[reportArgumentType, reportReturnType]


def all_marginals(query: Query, draw: Draws) -> dict[str, Moments | JointMoments]:
    """f at the new inputs of every GP site, none of which depends on another."""
    new = query.trace(draw, {})
    return {k: c.marginals(unwrap(new[k]["fn"])) for k, c in query.conditionals(draw).items()}


def below_outer(query: Query, trace) -> dict:
    """Everything of a run that the last layer and the likelihood are given: hyperparameters,
    latents, inner layers.
    """
    known = (*query.draws.hyper, *query.layout.local_latents, *query.layout.inner)
    return {k: trace[k]["value"] for k in known if k in trace}


def trace_above(query: Query, below: dict, f, **observations) -> dict:
    """The model given what lies below the outer GP sites: f is their one function, or {site:
    values}.
    """
    values = f if isinstance(f, dict) else {query.site: f}
    return run(query.model, query.new_args, {**query.new_kwargs, **observations}, below, values)


def average(
    query: Query,
    integration: Integration,
    quantity,
    num_draws: int,
    finish=lambda x: x,
    **observations,
):
    """Mix quantity(trace, moments of f) over draws of f at the new inputs, several a posterior draw
    if those are few.

    `finish`: of what was mixed within one posterior draw.
    """
    joint = integration is Integration.joint_draws

    def component(draw, keys):
        conditionals = query.conditionals(draw)
        # once for all draws of f
        known = all_marginals(query, draw) if integration is Integration.functions else None
        how: dict[str, Any] = {"joint": joint, "marginals": known, **observations}

        given_f = lambda key: quantity(*drawn_trace(query, draw, conditionals, key, **how))  # noqa: E731
        return finish(mixture(given_f, keys))

    return query.mixture(component, keys_of(query, num_draws))


def keys_of(query: Query, num_draws: int):
    return random.split(random.key(0), (query.draws.num, repeats(query, num_draws)))
