"""What predictions and log densities share: how finely integrals are taken, and averages over
draws.
"""

import math
from collections.abc import Callable

from jax import random

from ppl_gp.reading.tracing import run
from ppl_gp.results.integrals.cubature import Effort
from ppl_gp.results.query.mixture import mixture
from ppl_gp.results.query.query import Query, drawn_runs

# by "many draws": what a mixture averages away need not be resolved
NODES = {True: 192, False: 384}
MIN_DRAWS = 1000  # Monte Carlo draws in all
LATENT_DRAWS = 4000  # of latents, which are weighted

OF_LAYERS = Effort(32, True, 32)  # at each of at least 1000 draws of the last layer's inputs
# draws of the hyperparameters from which several functions at each are integrated with fewer nodes
MANY = 30
SEVERAL_NODES = {True: 64, False: 192}


def num_nodes(query: Query) -> int:
    return NODES[query.draws.num > 1]


def effort_of(query: Query, num_draws: int = MIN_DRAWS) -> Effort:
    """For the functions at each draw of the hyperparameters."""
    many = query.draws.num >= MANY
    nodes = SEVERAL_NODES[many] if query.site is None else num_nodes(query)
    return Effort(nodes, many, repeats(query, num_draws))


def repeats(query: Query, num_draws: int) -> int:
    """Draws of f, and of what lies below, a posterior draw."""
    return math.ceil(num_draws / query.draws.num)


def above(query: Query, trace: dict) -> Callable:
    """{outer GP site: f} -> the model's trace, all that a run has below them given."""
    known = (*query.draws.hyper, *query.layout.local_latents, *query.layout.inner)
    below = {k: trace[k]["value"] for k in known if k in trace}
    return lambda f: run(query.model, query.new_args, query.new_kwargs, below, f)


def average(query: Query, quantity: Callable):
    """Mix quantity(trace, moments of f) over runs, several a posterior draw if those are few."""

    def component(draw, keys):
        run = drawn_runs(query, draw)
        return mixture(lambda key: quantity(*run(key)), keys)

    return query.mixture(component, keys_of(query, MIN_DRAWS))


def keys_of(query: Query, num_draws: int):
    return random.split(random.key(0), (query.draws.num, repeats(query, num_draws)))
