"""The `Fit` of a run of `SVGP`: what is kept of q(f) at its last state, and the run's `stats`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from ppl_gp.draws import Draws
from ppl_gp.errors import Result
from ppl_gp.frames.names import Names
from ppl_gp.infer.batches import as_batch
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp.look import Subject
from ppl_gp.infer.svgp.objective import hyper_at
from ppl_gp.infer.svgp.problem import Problem
from ppl_gp.infer.svgp.run import Ended
from ppl_gp.infer.svgp.step import State
from ppl_gp.kept import FromInducing
from ppl_gp.quick import quick_jit
from ppl_gp.results.fit import Fit
from ppl_gp.sparse.bound import Batch, priors_at
from ppl_gp.sparse.svgp import SVGP

GUIDE_DRAWS = 100  # draws of the hyperparameters that a fit with an autoguide keeps


def make_fit(
    method: SVGP, subject: Subject, problem: Problem, ended: Ended, bound, told: dict, key
) -> Fit:
    """The fit; `told`: what else its `stats` say, where that is not `None`."""
    state, sampled = ended.state, problem.plan.draws_hyper
    hyper, kept, raised = _kept(problem, state, as_batch(subject.first, key), key)
    args, kwargs = jax.tree.map(_on_device, subject.data)
    stats = _stats(problem, subject, ended) | {
        "num_inducing": max(q.mean.shape[-1] for q in kept.values()),
        "jitter_raised": float(raised),
    }
    return Fit(
        model=subject.model,
        method=method,
        args=args,
        kwargs=kwargs,
        draws=Draws.equal(hyper, kept) if sampled else Draws.one(hyper, kept),
        log_evidence=bound,
        result=ended.result,
        stats=stats | {k: v for k, v in told.items() if v is not None},
        sampled=sampled,
        local=eqx.combine(state.variational.latents, problem.frozen),
        names=subject.source.names if isinstance(subject.source, StreamSource) else Names(),
    )


def _stats(problem: Problem, subject: Subject, ended: Ended) -> dict:
    source, state, plan = subject.source, ended.state, problem.plan
    stats = {
        "steps": len(ended.bounds),
        "bounds": ended.bounds,
        "batch_size": int(source.batch_size or 0),
        "num_data": source.num_data,
        "failed_steps": int(state.failed),
        "shortened_steps": int(state.halved),
    }
    if ended.result in (Result.converged, Result.completed):
        made = "all steps made" if stats["steps"] >= plan.max_steps else "the bound stopped rising"
        settled = ended.result is Result.converged and not plan.noisy
        stats["ended"] = "no step would gain" if settled else made
    if not plan.noisy:
        stats["q_gap"] = float(state.q_gap)
    if plan.names and plan.guide is None and not plan.noisy:
        stats["map_gradient"] = float(state.slope)
    # what is kept of the data: `loo` and `to_datatree` know no others
    return stats | ({"first_batch_only": True} if isinstance(source, StreamSource) else {})


def _on_device(x):
    return jnp.asarray(x) if isinstance(x, np.ndarray) and not isinstance(x, np.memmap) else x


@quick_jit
def _kept(problem: Problem, state: State, batch: Batch, key) -> tuple[dict, dict, jax.Array]:
    """(hyperparameters, {GP site: q(u)}, variance added to K_uu) with the leading axis of draws
    where there are any.
    """

    def one(key):
        hyper, _ = hyper_at(problem, state.free, batch._replace(key=key))
        kept, raised = {}, jnp.zeros(())
        for name, prior in priors_at(problem.plan.model, batch, hyper).items():
            variables = state.variational.variables[name]
            q = state.variational.q[name].whitened()
            kept[name] = FromInducing(inducing=variables, mean=q.mean, reduction=q.reduction)
            raised = jnp.maximum(raised, variables.root(prior).added)
        return hyper, kept, raised

    if not problem.plan.draws_hyper:
        hyper, kept, raised = one(key)
        return hyper, jax.tree.map(lambda x: x[None] if eqx.is_array(x) else x, kept), raised
    hyper, kept, raised = lax.map(one, random.split(key, GUIDE_DRAWS))
    return hyper, kept, jnp.max(raised)
