"""Where natural gradients of `SVGP` point, on all data and averaged over minibatches."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.infer.batches import as_batch
from ppl_gp.infer.svgp.look import look_at
from ppl_gp.infer.svgp.prepare import prepare
from ppl_gp.infer.svgp.problem import objective
from ppl_gp.infer.svgp.step import nudges
from ppl_gp.sparse.families import NaturalGaussian


def targets(method, model, args, size: int, **kwargs):
    """(of all data, the mean over every batch of `size` rows, each weighed N / size), at a q(u)
    that is neither the prior nor an optimum; as (nat1, nat2).
    """
    subject = look_at(method, model, args, kwargs, 0)
    problem, state, *_ = prepare(method, subject, random.key(0), 0)
    ((site, q),) = state.variational.q.items()
    rng, num = np.random.default_rng(5), len(q.nat1)
    root = 0.3 * rng.normal(size=(num, num))
    moved = NaturalGaussian(jnp.asarray(rng.normal(size=num)), jnp.asarray(root @ root.T))
    variational = state.variational._replace(q={site: moved})

    @eqx.filter_jit
    def target(batch):
        value = lambda nudge: objective(problem, state.free, variational, batch, nudge)  # noqa: E731
        gradient, t = jax.grad(value, has_aux=True)(nudges(variational.q))
        found = moved.target(t.q[site], gradient[site], jnp.ones(()))
        return found.nat1, found.nat2

    def averaged(size):
        batches = [as_batch(rows, random.key(0)) for rows in subject.source.sweep(size)]
        share = len(batches)
        parts = [target(b._replace(weights=share * b.weights)) for b in batches]
        return [np.mean([part[i] for part in parts], 0) for i in (0, 1)]

    return averaged(subject.source.num_data), averaged(size)
