"""Draws at the training inputs of a model with latents or layers: q(h), then f layer by layer, each at what lies below it."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro import handlers

from ppl_gp.results.sparse_draws import draw_given_inducing
from ppl_gp.tracing import run, set_gps


@eqx.filter_jit
def draw_layers(model, hyper: dict, latent: dict, local: dict, args, kwargs, key, repeats: int) -> tuple[dict, dict]:
    """({latent site: (S repeats, ...)}, {GP site: (S repeats, *F, N)}).

    u is drawn jointly, f given u row by row: every marginal is exact, and so is what a pointwise likelihood sees. O(N M) a draw.
    """

    def one(entry):
        hyper, latent, keys = entry
        return lax.map(lambda key: _draw(model, hyper, latent, local, args, kwargs, key), keys)

    num = next(iter(latent.values())).num_draws
    keys = jnp.reshape(random.split(key, num * repeats), (num, repeats))
    draws = lax.map(one, (hyper, latent, keys))
    return jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), draws)


def _draw(model, hyper, latent, local, args, kwargs, key):
    sites = run(model, args, kwargs, hyper)
    q = {k: guide.at(sites[k], None, args, kwargs) for k, guide in local.items()}
    h = {k: q[k].sample(random.fold_in(key, i)) for i, k in enumerate(q)}
    names = list(latent)

    def value(name, prior):
        process = latent[name].process(prior)
        return draw_given_inducing(process, prior, random.fold_in(key, len(h) + names.index(name)), 1)[0]

    with handlers.block():
        seeded = handlers.substitute(handlers.seed(model, random.key(0)), data={**hyper, **h})
        trace = handlers.trace(set_gps(seeded, value)).get_trace(*args, **kwargs)
    return h, {k: trace[k]["value"] for k in names}
