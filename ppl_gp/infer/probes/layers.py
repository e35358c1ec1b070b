"""The proof that row n of each layer, and of the likelihood, sees only row n of what lies below."""

import jax
import jax.numpy as jnp
from jax import random

from ppl_gp.deep.latents import latent_form
from ppl_gp.deep.structure import Structure
from ppl_gp.errors import LISTED, NotPointwiseError
from ppl_gp.gp import unwrap
from ppl_gp.infer.probes.joint import is_additive, probe_joint
from ppl_gp.model.factors import JointLogLikelihood
from ppl_gp.model.roles import is_gp
from ppl_gp.model.tracing import run
from ppl_gp.quick import quick_jit
from ppl_gp.sparse.bound import Batch


def probe_layers(model, structure: Structure, hyper: dict, trace: dict, batch: Batch) -> bool:
    """Prove that row n of everything sees only row n of the layers and latents before it, or raise
    `NotPointwiseError`.

    Returns whether the likelihood is additive over the outer functions (`is_additive`).
    """
    num = batch.weights.shape[0]
    below = {k: trace[k]["value"] for k in (*structure.latents, *structure.inner)}
    below = {
        k: v
        + random.normal(random.fold_in(random.key(9), i), jnp.shape(v)) * (k in structure.inner)
        for i, (k, v) in enumerate(below.items())
    }
    log_lik = JointLogLikelihood(model, num, {**hyper, **below}, batch.args, batch.kwargs)
    outer = {k: tuple(trace[k]["fn"].shape()) for k in structure.outer}
    probe_joint(log_lik, outer)
    if below and not bool(
        _rows_are_apart(model, structure, hyper, below, batch, _data_axes(trace, below, num))
    ):
        raise NotPointwiseError(
            f"a row of a layer of this model sees other rows of {list(below)} (a normalisation "
            f"over the data, say), so that minibatches would not be unbiased. {LISTED}"
        )
    return is_additive(log_lik, outer)


def _data_axes(trace, names, num) -> tuple:
    gps = {k: len(trace[k]["fn"].shape()) - 1 for k in names if is_gp(trace[k])}
    return tuple((k, gps[k] if k in gps else latent_form(trace[k], num)[0]) for k in names)


@quick_jit
def _rows_are_apart(model, structure: Structure, hyper, below, batch: Batch, axes):
    """Move a random half of the rows: inputs and likelihood of the others may not change."""
    num = batch.weights.shape[0]
    moves = random.bernoulli(random.key(10), 0.5, (num,))

    def seen(below):
        trace = run(model, batch.args, batch.kwargs, {**hyper, **below})
        flat = [jnp.reshape(unwrap(trace[k]["fn"]).X, (num, -1)) for k in structure.gps]
        log_lik = JointLogLikelihood(model, num, {**hyper, **below}, batch.args, batch.kwargs)
        outer = {k: jnp.zeros(trace[k]["fn"].shape()) for k in structure.outer}
        return jnp.concatenate([*flat, log_lik(outer)[:, None]], 1)

    directions = {
        k: jnp.moveaxis(jnp.moveaxis(jnp.ones_like(below[k]), a, -1) * moves, -1, a)
        for k, a in axes
    }
    change = jax.jvp(seen, (below,), (directions,))[1]
    return jnp.all(jnp.where(moves[:, None], 0.0, change) == 0.0)
