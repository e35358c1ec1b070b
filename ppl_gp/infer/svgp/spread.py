"""Which hyperparameters the end of a run over all data hardly determines: the curvature there, by
the run's own compiled steps.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import random
from jax.flatten_util import ravel_pytree

from ppl_gp.errors import Result, warn
from ppl_gp.infer.hyper.map import lower_end, scales_of_effects, weakly_known
from ppl_gp.infer.hyper.restarts import FEW
from ppl_gp.infer.hyper.space import support
from ppl_gp.infer.svgp.look import Subject
from ppl_gp.infer.svgp.problem import Problem
from ppl_gp.infer.svgp.run import chunk_size
from ppl_gp.infer.svgp.step import State, advance_whole, begin
from ppl_gp.model.roles import roles
from ppl_gp.results.fit import Fit
from ppl_gp.sparse.bound import Batch

_STEP = 0.1  # of differences, in unconstrained values


def tell_weakly_known(fit: Fit, subject: Subject, free: dict, settled: Callable) -> None:
    """Warn as a search under a local method does. `settled`: the objective at unconstrained values,
    at the best q(u) there.
    """
    trace, ended = subject.trace, fit.result in (Result.converged, Result.completed)
    positive = {k: x for k, x in free.items() if lower_end(support(trace[k])) is not None}
    flat, back = ravel_pytree(positive)
    if not ended or roles(trace).params or not 0 < flat.size <= FEW:
        return
    at = lambda step: settled({**free, **back(flat + step)})  # noqa: E731
    level, steps = settled(free), _STEP * np.eye(flat.size)
    bends = np.array([2.0 * level - at(step) - at(-step) for step in steps]) / _STEP**2
    # where a neighbour of a zero has no value, no curvature holds it
    sds = back(1.0 / np.sqrt(np.maximum(np.where(np.isfinite(bends), bends, 0.0), 1e-300)))
    scales = scales_of_effects(subject.model, *subject.data, trace, fit.hyper)
    remedy = "Use Laplace(hyper=Grid()), which integrates it."
    if text := weakly_known(trace, fit.hyper, sds, scales, remedy):
        warn(text)


def by_steps(problem: Problem, end: State, batch: Batch) -> Callable[[dict], float]:
    """The objective after a chunk of steps in which q(u) alone moves."""
    rates = problem.rates._replace(learning=jnp.zeros_like(problem.rates.learning))
    held = dataclasses.replace(problem, rates=rates)
    keys = random.split(batch.key, chunk_size(problem.plan.max_steps))

    def settled(free: dict) -> float:
        start = begin(held, free, end.variational)
        return float(advance_whole(held, start, batch, keys)[1][-1])

    return settled
