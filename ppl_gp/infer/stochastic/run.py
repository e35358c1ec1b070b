"""Mean field on batches: many steps, progress, checkpoints, Ctrl-C and bad batches, with nothing
lost.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ppl_gp.conjugate.family import Family
from ppl_gp.conjugate.log_joint import LogJoint
from ppl_gp.conjugate.other_rows import RowsProof
from ppl_gp.conjugate.stochastic import Split, step
from ppl_gp.errors import Result
from ppl_gp.infer.batches import is_finite, where_not_finite
from ppl_gp.infer.loop import Stage, interruptible
from ppl_gp.infer.sources import Rows
from ppl_gp.infer.stochastic.problem import Problem, Source
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp.checkpoint import Checkpoints
from ppl_gp.quick import quick_jit


class Reached(NamedTuple):
    """q, the bound before every step as its batch estimates it (nats), and why there is no further
    step.
    """

    q: list[Family]
    bounds: np.ndarray
    result: Result | None = None
    message: str | None = None
    cause: Exception | None = None  # raised inside the stream


def run(
    problem: Problem,
    q: list[Family],
    rate: Callable[[int], float],
    max_steps: int,
    checkpoints: Checkpoints | None,
    progress: bool,
    proof: RowsProof,
) -> tuple[list[Family], np.ndarray, Result, dict]:
    """(q, the bounds, how it ended, what was wrong with a batch) from q, or from the newest
    checkpoint. Batches that are read but once are held to `proof` as they come.
    """
    shared = problem.parts.shared(q)
    reached = Reached(q, np.zeros(0))
    if checkpoints is not None:
        kept, bounds = checkpoints.restore([q[j] for j in shared])
        reached = Reached(_with(q, shared, kept), bounds)
    stages = _stages(problem, reached, rate, max_steps, checkpoints, proof)
    reached, interrupted = interruptible(stages, "MeanField", max_steps, progress)
    if checkpoints is not None:
        checkpoints.save([reached.q[j] for j in shared], reached.bounds, len(reached.bounds), True)
    result = Result.interrupted if interrupted else reached.result or Result.completed
    wrong = {"bad_batch": reached.message, "stream_error": reached.cause}
    return reached.q, reached.bounds, result, wrong


def _with(q: list[Family], which: list[int], values: list[Family]) -> list[Family]:
    new = dict(zip(which, values, strict=True))
    return [new.get(j, q[j]) for j in range(len(q))]


def _stages(problem: Problem, reached: Reached, rate, max_steps: int, checkpoints, proof):
    """One step after another, up to a batch that cannot be used."""
    shared, done = problem.parts.shared(reached.q), len(reached.bounds)
    yield Stage(reached, done, "compiling")
    for rows in islice(_batches(problem.source, done), max_steps - done):
        if not isinstance(rows, Rows):
            result, message, cause = rows
            ended = reached._replace(result=result, message=message, cause=cause)
            yield Stage(ended, len(reached.bounds))
            return
        if isinstance(problem.source, StreamSource) and not problem.source.stream.restarts:
            problem.require_conjugate(proof, rows, problem.with_rows(reached.q))
        reached = _advanced(problem, reached, rows, rate(len(reached.bounds)))
        yield Stage(reached, len(reached.bounds), f"bound {reached.bounds[-1:].sum():.2f}")
        if reached.result is not None:
            return
        if checkpoints is not None:
            checkpoints.save([reached.q[j] for j in shared], reached.bounds, len(reached.bounds))
    if len(reached.bounds) < max_steps:
        yield Stage(reached._replace(result=Result.stream_ended), len(reached.bounds))


def _batches(source: Source, done: int) -> Iterator[Rows | tuple]:
    """Batches from a step on; in place of one that cannot be used, how the run ends and why: hours
    of work do not end with somebody's file.
    """
    batches = source.batches(done)
    while True:
        try:
            rows = next(batches, None)
        except Exception as error:
            told = f"batch {done} (counted from 0): {type(error).__name__}: {error}"
            yield Result.stream_ended, told, error
            return
        if rows is None:
            return
        if not source.checked and not is_finite(rows):
            yield Result.nonfinite, where_not_finite(rows, done, source), None
            return
        yield rows
        done += 1


def _advanced(problem: Problem, reached: Reached, rows: Rows, rate: float) -> Reached:
    q, value = problem.compiled(_step)(
        problem.at(rows), problem.parts, problem.with_rows(reached.q), jnp.asarray(rate)
    )
    if not np.isfinite(value):  # what was reached before is kept
        told = f"the bound is {float(value)} at step {len(reached.bounds)}"
        return reached._replace(result=Result.nonfinite, message=told)
    return Reached(q, np.append(reached.bounds, float(value)))


@quick_jit
def _step(joint: LogJoint, parts: Split, q: list[Family], rate):
    return step(joint, parts, q, rate)
