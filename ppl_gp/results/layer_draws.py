"""Draws at the training inputs of a model with latents or layers: q(h), then f layer by layer, each
at what lies below it.
"""

from typing import cast

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro import handlers

from ppl_gp.draws import Draws
from ppl_gp.model.tracing import run, set_gps
from ppl_gp.quick import full_jit
from ppl_gp.sparse.inducing_draws import draw_given_inducing
from ppl_gp.sparse.process import SparseProcess


@full_jit
def draw_layers(
    model, draws: Draws, local: dict, args, kwargs, key, repeats: int
) -> tuple[dict, dict]:
    """({latent site: (S repeats, ...)}, {GP site: (S repeats, *F, N)}).

    u is drawn jointly, f given u row by row: every marginal is exact, and so is what a pointwise
    likelihood sees. O(N M) a draw.
    """

    def one(entry):
        draw, keys = entry
        return lax.map(lambda key: _draw(model, draw, local, args, kwargs, key), keys)

    keys = jnp.reshape(random.split(key, draws.num * repeats), (draws.num, repeats))
    found = lax.map(one, (draws, keys))
    return jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), found)


def _draw(model, draw: Draws, local, args, kwargs, key):
    sites = run(model, args, kwargs, draw.known)
    q = {k: guide.at(sites[k], None, args, kwargs) for k, guide in local.items()}
    h = {k: q[k].sample(random.fold_in(key, i)) for i, k in enumerate(q)}
    names = list(draw.kept)

    def value(name, prior):
        process = cast(SparseProcess, draw.kept[name].process(prior))
        return draw_given_inducing(
            process, prior, random.fold_in(key, len(h) + names.index(name)), 1
        )[0]

    with handlers.block():
        seeded = handlers.substitute(handlers.seed(model, random.key(0)), data={**draw.known, **h})
        trace = handlers.trace(set_gps(seeded, value)).get_trace(*args, **kwargs)
    return h, {k: trace[k]["value"] for k in names}
