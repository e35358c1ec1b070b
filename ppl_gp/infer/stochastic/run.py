"""Mean field on batches: what is climbed, where batches come from, and many steps with progress,
checkpoints, Ctrl-C and bad batches, with nothing lost.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Array

from ppl_gp.conjugate.conjugacy import somewhere
from ppl_gp.conjugate.family import Family, Values
from ppl_gp.conjugate.log_joint import LogJoint
from ppl_gp.conjugate.stochastic import RowsProof, Split, of_rows, step
from ppl_gp.errors import NotPointwiseError, Result
from ppl_gp.infer.batches import Source, as_batch, is_finite, where_not_finite
from ppl_gp.infer.loop import Stage, interruptible
from ppl_gp.infer.sources import Rows, take
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp.checkpoint import Checkpoints
from ppl_gp.quick import quick_jit


class Problem(NamedTuple):
    """The log joint of any batch, its parts, the batches, and starts of local factors."""

    joint: LogJoint
    parts: Split
    source: Source
    begin: list[Family]  # all blocks; of those in no row only their places count
    few: bool  # rows, so that compiling is most of the work

    def at(self, rows: Rows) -> LogJoint:
        """The log joint of a batch, its rows weighted."""
        batch = as_batch(rows, random.key(0))
        return self.joint._replace(args=batch.args, kwargs=batch.kwargs, weights=batch.weights)

    def with_rows(self, q: list[Family], num: int | None = None) -> list[Family]:
        """q with a start of the local factors of `num` rows (`None`: as many as the first's)."""
        local = {
            j: self.begin[j] if num is None else of_rows(self.begin[j], axis, num)
            for j, axis in self.parts.local
        }
        return [local.get(j, q[j]) for j in range(len(q))]

    def require_conjugate(self, proof: RowsProof, rows: Rows, q: list[Family]) -> None:
        """As `RowsProof.require`, of a batch and q with its rows' factors."""
        batch = as_batch(rows, random.key(0))
        start = self.with_rows(self.begin, len(rows.weights))
        proof.require(batch.args, batch.kwargs, start, q)

    def compiled(self, function: Any) -> Callable:
        """As it is worth."""
        return function if self.few else function.full


def require_rows_apart(problem: Problem, first: Rows) -> None:
    """Raise `NotPointwiseError` if densities depend on which rows, or how many, are in a batch:
    rows drawn anew, with repetitions, as many and half as many, have to keep theirs.
    """
    joint, num = problem.at(first), len(first.weights)
    values = dict(somewhere(problem.begin, random.key(4)))
    before = _by_row(joint, values)
    rng = np.random.default_rng(3)
    for size in sorted({num, -(-num // 2)}, reverse=True):
        rows = rng.integers(0, num, size)
        for name, after in _of_these(problem, first, values, rows).items():
            x = np.asarray(before[name])
            _require_same(name, x[rows] if x.ndim else x, np.asarray(after))


def _of_these(problem: Problem, first: Rows, values: Values, rows: np.ndarray) -> dict[str, Array]:
    own = dict(values)
    for j, axis in problem.parts.local:
        for site in problem.begin[j].sites:
            own[site] = jnp.take(own[site], rows, axis)
    args, kwargs = take(first.args, first.kwargs, rows, problem.source.axes)
    some = first._replace(args=args, kwargs=kwargs, weights=np.ones(len(rows)))
    return _by_row(problem.at(some), own)


def _require_same(name: str, before: np.ndarray, after: np.ndarray) -> None:
    scale = max(np.max(np.abs(before), initial=0.0), np.finfo(before.dtype).tiny)
    if not np.all(np.abs(before - after) <= 1e-8 * scale):
        raise NotPointwiseError(
            f"batches would read wrong rows: the density of '{name}' depends on which other rows, "
            "or how many, are in a datum's batch. An array that has as many rows as there are data "
            "and is none of them (a table that is looked up), x[order], a mean over the rows, or "
            "x.shape[0] does that. Take all rows, MeanField(batch_size=None), or compute what "
            "depends on all rows before the fit."
        )


@quick_jit
def _by_row(joint: LogJoint, values) -> dict[str, Array]:
    """{term: its log density, (B,) where it has an entry per row}."""
    plain, axes, found = joint._replace(weights=None), dict(joint.axes), {}
    for name in joint.terms:
        x = plain.term(name, values)
        if name in axes:
            x = jnp.moveaxis(x, axes[name], 0)
            x = jnp.sum(x.reshape(len(x), -1), 1)
        found[name] = x if name in axes else jnp.sum(x)
    return found


class Reached(NamedTuple):
    """q, the bound before every step by its batch (nats), and why there is no further step."""

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
    reached, _ = interruptible(stages, "MeanField", max_steps, progress)
    if checkpoints is not None:
        checkpoints.save([reached.q[j] for j in shared], reached.bounds, len(reached.bounds), True)
    result = reached.result or Result.completed
    wrong = {"bad_batch": reached.message, "stream_error": reached.cause}
    return reached.q, reached.bounds, result, wrong


def _with(q: list[Family], which: list[int], values: list[Family]) -> list[Family]:
    new = dict(zip(which, values, strict=True))
    return [new.get(j, q[j]) for j in range(len(q))]


def _stages(problem: Problem, reached: Reached, rate, max_steps: int, checkpoints, proof):
    """One step after another, up to a batch that cannot be used."""
    shared, done = problem.parts.shared(reached.q), len(reached.bounds)
    yield Stage(reached, done, "compiling", keep=done > 0)
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
