"""`MeanField(batch_size=...)` and streams: read a first batch, prove its blocks, run the steps, sum
the bound over all data, make a `Fit`.

The run of many steps shows progress and survives Ctrl-C and bad batches; with a checkpoint nothing
is lost.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.errors import DataError, Result
from ppl_gp.infer.batches import (
    Source,
    as_batch,
    first_rows,
    is_finite,
    source_of,
    where_not_finite,
)
from ppl_gp.infer.loop import Stage, interruptible, unless_stopped
from ppl_gp.infer.probes.observed import first_trace
from ppl_gp.infer.sources import ArraySource, Rows
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp.checkpoint import Checkpoints, identity
from ppl_gp.infer.svgp.final_bound import mean_and_error, over_passes
from ppl_gp.mean_field.assembly import (
    caution_of,
    fit_of,
    log_joint_of,
    number_of,
    start_of,
)
from ppl_gp.mean_field.family import Family
from ppl_gp.mean_field.log_joint import LogJoint
from ppl_gp.mean_field.stochastic import (
    RowsProof,
    Split,
    at_local_optimum,
    joined,
    of_rows,
    rows_bound,
    shared_bound,
    shared_step,
    split,
    step,
)
from ppl_gp.mean_field.structure import find_structure
from ppl_gp.quick import FEW_DATA, quick_jit
from ppl_gp.reading.declared import declare
from ppl_gp.reading.roles import require_no_subsampling, roles
from ppl_gp.results.fit import Fit


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


_MOST_DRAWN = 2 * 10**8  # numbers that draws of the rows' latents may hold


def fit_by_steps(method: Any, model, rng_key, args, kwargs, progress) -> Fit:
    """The fit by `method`, a `MeanField`; `NotPointwiseError` if rows depend on each other."""
    if method.restarts > 1:
        raise DataError(
            f"MeanField(restarts={method.restarts}) climbs from several starts on all data; with "
            "batches there is one. Fit with several keys, and keep the best log_evidence."
        )
    keys = random.split(rng_key, 2)
    size = lambda _: method.batch_size  # noqa: E731
    source = source_of("MeanField", size, model, args, kwargs, number_of(keys[0]))
    first = first_rows(source)
    batch = as_batch(first, keys[0])
    model = declare(model, batch.args, batch.kwargs)
    trace = first_trace(model, batch.args, batch.kwargs)
    require_no_subsampling(trace, "MeanField()")
    joint = log_joint_of(model, trace, batch.args, batch.kwargs, others=True)
    _require_shared(method, trace)
    structure = find_structure(joint, trace, method.factors, method.bounds)
    joint, parts = split(structure, trace)
    few = (source.batch_size or 0) <= FEW_DATA
    problem = Problem(joint, parts, source, structure.blocks, few)
    model.reading.require_apart("MeanField(batch_size=None)")
    _require_room(method, problem)
    is_stream = isinstance(source, StreamSource)
    args, kwargs = (batch.args, batch.kwargs) if is_stream else (args, kwargs)
    checkpoints = method.checkpoint and Checkpoints(
        method.checkpoint, identity(method, model, (args, kwargs), source.num_data, rng_key)
    )
    proof = RowsProof(structure, problem.begin, source.axes)
    q = start_of(method.init, structure, trace, keys[1])
    # Blocks in no row are at their maximum given how the first batch's rows begin: labels of a
    # start would be lost else.
    q = _shared(problem.at(first), problem.parts, q)
    q, bounds, result, wrong = run(
        problem, q, method.rate, method.max_steps, checkpoints, progress, proof
    )
    summed = partial(over_all_data, problem, first, q, proof)
    # without factors in rows, q is whole before the sum
    q, (value, spread) = summed() if parts.local else unless_stopped(summed, (q, (None, None)))[0]
    wrong |= {"checkpoint_error": checkpoints and checkpoints.error, "log_evidence_se": spread}
    stats = _stats(problem, bounds, wrong)
    if value is not None and not np.isfinite(value):
        result, stats = Result.nonfinite, stats | caution_of(q)
    return fit_of(method, model, args, kwargs, trace, keys[0], q, value, (result, stats))


def _stats(problem: Problem, bounds, wrong: dict) -> dict:
    """Figures of a run, and what went wrong on the way."""
    return {
        "bounds": bounds,
        "steps": len(bounds),
        "batch_size": int(problem.source.batch_size or 0),
        "num_data": problem.source.num_data,
        "local_bounds": list(problem.joint.bounded),
        **{k: v for k, v in wrong.items() if v is not None},
        **(problem.source.kept if isinstance(problem.source, StreamSource) else {}),
    }


def _require_shared(method: Any, trace: dict) -> None:
    local = sorted(set(method.init or {}) & set(roles(trace).local_latents))
    if local:
        raise DataError(
            f"MeanField(init=...): {local} stand one a datum, and with batches each begins anew; "
            "give values of the other sites."
        )


def _require_room(method: Any, problem: Problem) -> None:
    """Draws of what stands one a datum are kept for all rows of arrays."""
    if isinstance(problem.source, StreamSource):
        return
    rows = len(problem.parts.local) * problem.source.num_data
    if rows * method.num_draws > _MOST_DRAWN:
        raise DataError(
            f"MeanField(num_draws={method.num_draws}) would keep that many draws of {rows} latents "
            f"of rows; give num_draws of at most {max(1, _MOST_DRAWN // rows)}, or a Stream, which "
            "keeps those of its first batch."
        )


@quick_jit
def _shared(joint: LogJoint, parts: Split, q: list[Family]) -> list[Family]:
    return shared_step(joint, parts, q, 1.0)


@quick_jit
def _rows(joint: LogJoint, parts: Split, q: list[Family]):
    q = at_local_optimum(joint, parts, q)
    return q, rows_bound(joint, parts, q)


_rest = quick_jit(shared_bound)


def over_all_data(
    problem: Problem, first: Rows, q: list[Family], proof: RowsProof
) -> tuple[list[Family], tuple[float | None, float | None]]:
    """(q with the rows' own factors, of all rows or of a stream's first batch; the bound over all
    data and its standard error, nats, `None` for a stream that cannot be read again).
    `NotConjugateError` where rows are not what `proof` has of the first batch.
    """
    source, found, at_once = problem.source, [], problem.compiled(_rows)

    def sum_of(sweep: Iterable[Rows]) -> np.ndarray:
        values = [float(_rest(problem.at(first), problem.parts, q))]
        for rows in sweep:
            rows = source.unpadded(rows) if isinstance(source, StreamSource) else rows
            begin = problem.with_rows(q, len(rows.weights))
            here, value = at_once(problem.at(rows), problem.parts, begin)
            if np.isfinite(value):
                problem.require_conjugate(proof, rows, here)
            values.append(float(value))
            keep = isinstance(source, ArraySource) or not found
            found.extend([here] if keep else [])
        return np.array(values)

    if isinstance(source, ArraySource):
        bound = mean_and_error([sum_of(_all_rows(source))])
    else:
        if not source.stream.restarts:
            sum_of([first])
        bound = over_passes(source, False, sum_of)
    locals_ = {j: joined([h[j] for h in found], axis) for j, axis in problem.parts.local}
    return [locals_.get(j, q[j]) for j in range(len(q))], bound


def _all_rows(source: ArraySource) -> Iterator[Rows]:
    """All rows once, each with weight one."""
    for i in range(0, source.num_data, source.batch_size):
        rows = np.arange(i, min(i + source.batch_size, source.num_data))
        yield source.rows(rows, np.ones(len(rows)))
