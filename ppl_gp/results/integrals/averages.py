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
from ppl_gp.results.query.query import Case, drawn_trace

# by "many draws": what a mixture averages away need not be resolved
NODES = {True: 192, False: 384}
MIN_DRAWS = 1000  # Monte Carlo draws in all
LATENT_DRAWS = 4000  # of latents, which are weighted

LAYER_NODES = 32  # of each of at least 1000 draws of the last layer's inputs
# draws of the hyperparameters from which several functions at each are integrated with fewer nodes
MANY = 30
SEVERAL_NODES = {True: 64, False: 192}


def num_nodes(case: Case) -> int:
    return NODES[case.draws.num > 1]


def effort_of(case: Case, num_draws: int) -> Effort:
    """For several functions at each draw of the hyperparameters."""
    many = case.draws.num >= MANY
    return Effort(SEVERAL_NODES[many], many, repeats(case, num_draws))


def repeats(case: Case, num_draws: int) -> int:
    """Draws of f, and of what lies below, a posterior draw."""
    return math.ceil(num_draws / case.draws.num)


def marginals(case: Case, draw: Draws) -> Moments:
    """f at the new inputs of the one GP site."""
    return all_marginals(case, draw)[case.site]  # pyright: ignore[reportArgumentType, reportReturnType]


def all_marginals(case: Case, draw: Draws) -> dict[str, Moments | JointMoments]:
    """f at the new inputs of every GP site, none of which depends on another."""
    new = case.trace(draw, {})
    return {k: c.marginals(unwrap(new[k]["fn"])) for k, c in case.conditionals(draw).items()}


def below_outer(case: Case, trace) -> dict:
    """Everything of a run that the last layer and the likelihood are given: hyperparameters,
    latents, inner layers.
    """
    known = (*case.draws.hyper, *case.layout.local_latents, *case.layout.inner)
    return {k: trace[k]["value"] for k in known if k in trace}


def trace_above(case: Case, below: dict, f, **observations) -> dict:
    """The model given what lies below the outer GP sites: f is their one function, or {site:
    values}.
    """
    values = f if isinstance(f, dict) else {case.site: f}
    return run(case.model, case.new_args, {**case.new_kwargs, **observations}, below, values)


def average(
    case: Case,
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
        conditionals = case.conditionals(draw)
        # once for all draws of f
        known = all_marginals(case, draw) if integration is Integration.functions else None
        how: dict[str, Any] = {"joint": joint, "marginals": known, **observations}

        given_f = lambda key: quantity(*drawn_trace(case, draw, conditionals, key, **how))  # noqa: E731
        return finish(mixture(given_f, keys))

    return case.mixture(component, keys_of(case, num_draws))


def keys_of(case: Case, num_draws: int):
    return random.split(random.key(0), (case.draws.num, repeats(case, num_draws)))
