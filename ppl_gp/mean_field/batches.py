"""`MeanField(batch_size=...)` and streams: read a first batch, prove its blocks, run the steps, sum
the bound over all data.

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
from ppl_gp.infer.batches import Source, as_batch, first_rows, source_of, usable
from ppl_gp.infer.probes import first_trace
from ppl_gp.infer.sources import ArraySource, Rows
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp.final_bound import mean_and_error, over_passes
from ppl_gp.infer.svgp.run import Checkpoints, identity
from ppl_gp.mean_field import stochastic
from ppl_gp.mean_field.family import Family
from ppl_gp.mean_field.log_joint import log_joint_of
from ppl_gp.mean_field.structure import Structure, find_structure, number_of, start_of
from ppl_gp.mean_field.sweep import caution_of
from ppl_gp.quick import FEW_DATA, quick_jit
from ppl_gp.reading.reading import declare
from ppl_gp.reading.roles import require_no_subsampling, roles
from ppl_gp.runtime import Stage, interruptible, unless_stopped


class Found(NamedTuple):
    """What a fit is made of; `key`: for draws of q."""

    model: Any
    args: tuple
    kwargs: dict
    trace: dict
    key: Any
    q: list[Family]
    bound: float | None
    result: Result
    stats: dict


class Problem(NamedTuple):
    """The blocks as they begin, the batches, and the proof of all rows."""

    structure: Structure
    source: Source
    proof: stochastic.RowsProof
    few: bool  # rows, so that compiling is most of the work

    def at(self, rows: Rows) -> Structure:
        """The structure of a batch, its rows weighted."""
        batch, joint = as_batch(rows, random.key(0)), self.structure.joint
        joint = joint._replace(args=batch.args, kwargs=batch.kwargs, weights=batch.weights)
        return self.structure._replace(joint=joint)

    def with_rows(self, q: list[Family], num: int | None = None) -> list[Family]:
        """q with a start of the local factors of `num` rows (`None`: as many as the first's)."""
        begin = self.structure.blocks
        local = {
            j: begin[j] if num is None else stochastic.of_rows(begin[j], axis, num)
            for j, axis in self.structure.local
        }
        return stochastic.with_blocks(q, local)

    def require_conjugate(self, rows: Rows, q: list[Family]) -> None:
        """As `RowsProof.require`, of a batch and q with its rows' factors."""
        start = self.with_rows(self.structure.blocks, len(rows.weights))
        self.proof.require(self.at(rows).joint, start, q)

    def compiled(self, function: Any) -> Callable:
        return function if self.few else function.full


class Reached(NamedTuple):
    """q, the bound before every step by its batch (nats), and why there is no further step."""

    q: list[Family]
    bounds: np.ndarray
    result: Result | None = None
    message: str | None = None
    cause: Exception | None = None  # raised inside the stream


class Run(NamedTuple):
    """Steps of `method`, a `MeanField`; with checkpoints nothing is lost."""

    problem: Problem
    method: Any
    checkpoints: Checkpoints | None

    def from_start(self, q: list[Family], progress: bool) -> Reached:
        """From q, or from the newest checkpoint."""
        reached, shared = Reached(q, np.zeros(0)), self.problem.structure.shared()
        if self.checkpoints is not None:
            kept, bounds = self.checkpoints.restore([q[j] for j in shared])
            kept = dict(zip(shared, kept, strict=True))
            reached = Reached(stochastic.with_blocks(q, kept), bounds)
        stages = self._stages(reached)
        reached, _ = interruptible(stages, "MeanField", self.method.max_steps, progress)
        self._save(reached, True)
        return reached

    def _save(self, reached: Reached, last: bool = False) -> None:
        if self.checkpoints is not None:
            kept = [reached.q[j] for j in self.problem.structure.shared()]
            self.checkpoints.save(kept, reached.bounds, len(reached.bounds), last)

    def _stages(self, reached: Reached) -> Iterator[Stage[Reached]]:
        """Step by step, up to a batch that cannot be used; batches read once are proved here."""
        done, most = len(reached.bounds), self.method.max_steps
        yield Stage(reached, done, "compiling", keep=done > 0)
        for rows in islice(usable(self.problem.source, done), most - done):
            if not isinstance(rows, Rows):
                yield Stage(reached._replace(**rows), len(reached.bounds))
                return
            if not self.problem.source.restarts:
                self.problem.require_conjugate(rows, self.problem.with_rows(reached.q))
            reached = self._advanced(reached, rows)
            yield Stage(reached, len(reached.bounds), f"bound {reached.bounds[-1:].sum():.2f}")
            if reached.result is not None:
                return
            self._save(reached)
        if len(reached.bounds) < most:
            yield Stage(reached._replace(result=Result.stream_ended), len(reached.bounds))

    def _advanced(self, reached: Reached, rows: Rows) -> Reached:
        problem, done = self.problem, len(reached.bounds)
        q, rate = problem.with_rows(reached.q), jnp.asarray(self.method.rate(done))
        q, value = problem.compiled(_step)(problem.at(rows), q, rate)
        if not np.isfinite(value):  # what was reached before is kept
            told = f"the bound is {float(value)} at step {done}"
            return reached._replace(result=Result.nonfinite, message=told)
        return Reached(q, np.append(reached.bounds, float(value)))


_step, _shared = quick_jit(stochastic.step), quick_jit(stochastic.shared_step)
_rest = quick_jit(stochastic.shared_bound)


@quick_jit
def _rows(structure: Structure, q: list[Family]):
    q = stochastic.at_local_optimum(structure, q)
    return q, stochastic.rows_bound(structure, q)


_MOST_DRAWN = 2 * 10**8  # numbers that draws of the rows' latents may hold


def fit_by_steps(method: Any, model, rng_key, args, kwargs, progress) -> Found:
    """By `method`, a `MeanField`; `NotPointwiseError` if rows depend on each other."""
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
    model.reading.require_apart("MeanField(batch_size=None)")
    trace = first_trace(model, batch.args, batch.kwargs)
    require_no_subsampling(trace, "MeanField()")
    joint = log_joint_of(model, trace, batch.args, batch.kwargs, others=True)
    _require_shared(method, trace)
    found = find_structure(joint, trace, method.factors, method.bounds)
    structure = stochastic.split(found, trace)
    _require_room(method, structure, source)
    proof, few = stochastic.RowsProof(structure, source.axes), (source.batch_size or 0) <= FEW_DATA
    problem = Problem(structure, source, proof, few)
    is_stream = isinstance(source, StreamSource)
    args, kwargs = (batch.args, batch.kwargs) if is_stream else (args, kwargs)
    checkpoints = method.checkpoint and Checkpoints(
        method.checkpoint, identity(method, model, (args, kwargs), source.num_data, rng_key)
    )
    q = start_of(method.init, structure, trace, keys[1])
    # blocks in no row begin at their maximum given the first batch's rows, so that labels count
    q = _shared(problem.at(first), q, 1.0)
    reached = Run(problem, method, checkpoints).from_start(q, progress)
    summed = partial(over_all_data, problem, first, reached.q)
    # without factors in rows, q is whole before the sum
    unsummed = reached.q, (None, None)
    q, (value, spread) = summed() if structure.local else unless_stopped(summed, unsummed)[0]
    wrong = {"bad_batch": reached.message, "stream_error": reached.cause}
    wrong |= {"checkpoint_error": checkpoints and checkpoints.error, "log_evidence_se": spread}
    result, stats = reached.result or Result.completed, _stats(problem, reached.bounds, wrong)
    if value is not None and not np.isfinite(value):
        result, stats = Result.nonfinite, stats | caution_of(q)
    return Found(model, args, kwargs, trace, keys[0], q, value, result, stats)


def _stats(problem: Problem, bounds, wrong: dict) -> dict:
    """Figures of a run, and what went wrong on the way."""
    return {
        "bounds": bounds,
        "steps": len(bounds),
        "batch_size": int(problem.source.batch_size or 0),
        "num_data": problem.source.num_data,
        "local_bounds": list(problem.structure.joint.bounded),
        **{k: v for k, v in wrong.items() if v is not None},
        **problem.source.kept,
    }


def _require_shared(method: Any, trace: dict) -> None:
    if local := sorted(set(method.init or {}) & set(roles(trace).local_latents)):
        raise DataError(
            f"MeanField(init=...): {local} are per datum, and with batches each begins anew; "
            "give values of the other sites."
        )


def _require_room(method: Any, structure: Structure, source: Source) -> None:
    """Draws of what is per datum are kept for all rows of arrays."""
    rows = 0 if isinstance(source, StreamSource) else len(structure.local) * source.num_data
    if rows * method.num_draws > _MOST_DRAWN:
        raise DataError(
            f"MeanField(num_draws={method.num_draws}) would keep that many draws of {rows} latents "
            f"of rows; give num_draws of at most {max(1, _MOST_DRAWN // rows)}, or a Stream, which "
            "keeps those of its first batch."
        )


def over_all_data(
    problem: Problem, first: Rows, q: list[Family]
) -> tuple[list[Family], tuple[float | None, float | None]]:
    """(q with the rows' own factors, of all rows or of a stream's first batch; the bound over all
    data and its standard error, nats, `None` for a stream that cannot be read again).
    `NotConjugateError` where rows are not what the proof has of the first batch.
    """
    source, found, at_once = problem.source, [], problem.compiled(_rows)

    def sum_of(sweep: Iterable[Rows]) -> np.ndarray:
        values = [float(_rest(problem.at(first), q))]
        for rows in sweep:
            rows = source.unpadded(rows) if isinstance(source, StreamSource) else rows
            here, value = at_once(problem.at(rows), problem.with_rows(q, len(rows.weights)))
            if np.isfinite(value):
                problem.require_conjugate(rows, here)
            values.append(float(value))
            if isinstance(source, ArraySource) or not found:
                found.append(here)
        return np.array(values)

    if isinstance(source, ArraySource):
        bound = mean_and_error([sum_of(source.sweep(source.batch_size))])
        num = source.num_data  # rows behind them are padding
    else:
        if not source.restarts:
            sum_of([first])
        bound, num = over_passes(source, False, sum_of), None
    local = problem.structure.local
    whole = {j: stochastic.joined([h[j] for h in found], axis, num) for j, axis in local}
    return stochastic.with_blocks(q, whole), bound
