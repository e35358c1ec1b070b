"""`MeanField(batch_size=...)` and streams: look at a first batch, prove its blocks, run the steps,
sum the bound over all data, make a `Fit`.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from jax import random

from ppl_gp.conjugate.family import Family
from ppl_gp.conjugate.log_joint import LogJoint
from ppl_gp.conjugate.stochastic import (
    RowsProof,
    Split,
    at_local_optimum,
    joined,
    rows_bound,
    shared_bound,
    shared_step,
    split,
)
from ppl_gp.conjugate.structure import find_structure
from ppl_gp.errors import DataError, Result
from ppl_gp.infer.batches import as_batch, first_rows, source_of
from ppl_gp.infer.loop import unless_stopped
from ppl_gp.infer.mean_field_parts import caution_of, fit_of, log_joint_of, number_of, start_of
from ppl_gp.infer.probes.observed import first_trace
from ppl_gp.infer.sources import ArraySource, Rows
from ppl_gp.infer.stochastic.run import Problem, require_rows_apart, run
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp.checkpoint import Checkpoints, identity
from ppl_gp.infer.svgp.final_bound import mean_and_error, over_passes
from ppl_gp.model.declared import declare
from ppl_gp.model.roles import require_no_subsampling, roles
from ppl_gp.quick import FEW_DATA, quick_jit
from ppl_gp.results.fit import Fit

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
    require_rows_apart(problem, first)
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
