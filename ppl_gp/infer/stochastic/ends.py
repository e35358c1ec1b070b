"""Mean field on batches: where a run begins and ends. The blocks in no row from the start's labels;
the bound over all data and the rows' own factors.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Array, Float

from ppl_gp.conjugate.family import Family
from ppl_gp.conjugate.log_joint import LogJoint
from ppl_gp.conjugate.other_rows import RowsProof
from ppl_gp.conjugate.stochastic import (
    Split,
    at_local_optimum,
    joined,
    rows_bound,
    shared_bound,
    shared_step,
)
from ppl_gp.infer.sources import ArraySource, Rows, take
from ppl_gp.infer.stochastic.problem import Problem
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.quick import quick_jit


@quick_jit
def _shared(joint: LogJoint, parts: Split, q: list[Family]) -> list[Family]:
    return shared_step(joint, parts, q, 1.0)


@quick_jit
def _rows(joint: LogJoint, parts: Split, q: list[Family]):
    q = at_local_optimum(joint, parts, q)
    return q, rows_bound(joint, parts, q)


@quick_jit
def _rest(joint: LogJoint, parts: Split, q: list[Family]) -> Float[Array, ""]:
    return shared_bound(joint, parts, q)


def shared_from(problem: Problem, first: Rows, q: list[Family]) -> list[Family]:
    """q with the blocks in no row at their maximum given how the first batch's rows begin: labels
    of a start would be lost else.
    """
    return _shared(problem.at(first), problem.parts, q)


def over_all_data(
    problem: Problem, first: Rows, q: list[Family], proof: RowsProof
) -> tuple[list[Family], float | None]:
    """(q with the rows' own factors, of all rows or of a stream's first batch; the bound over all
    data, nats, `None` for a stream that cannot be read again). `NotConjugateError` where rows are
    not what `proof` has of the first batch.
    """
    rest = float(_rest(problem.at(first), problem.parts, q))
    total, found, at_once = rest, [], problem.compiled(_rows)
    for rows in _all_rows(problem, first):
        begin = problem.with_rows(q, len(rows.weights))
        here, value = at_once(problem.at(rows), problem.parts, begin)
        if np.isfinite(value):
            problem.require_conjugate(proof, rows, here)
        total += float(value)
        keep = isinstance(problem.source, ArraySource) or not found
        found += [here] if keep else []
    locals_ = {j: joined([h[j] for h in found], axis) for j, axis in problem.parts.local}
    whole = [locals_.get(j, q[j]) for j in range(len(q))]
    source = problem.source
    unread = isinstance(source, StreamSource) and not source.stream.restarts
    return whole, None if unread else total


def _all_rows(problem: Problem, first: Rows) -> Iterator[Rows]:
    """All rows once, without padding, each with weight one; of a stream that cannot be read again
    the first batch.
    """
    source = problem.source
    if isinstance(source, ArraySource):
        for i in range(0, source.num_data, source.batch_size):
            rows = np.arange(i, min(i + source.batch_size, source.num_data))
            yield source.rows(rows, np.ones(len(rows)))
        return
    batches = source.sweep(0) if source.stream.restarts else [first]
    for rows in batches:
        yield _unpadded(rows, source)


def _unpadded(rows: Rows, source: StreamSource) -> Rows:
    inside = np.flatnonzero(rows.weights > 0)
    args, kwargs = take(rows.args, rows.kwargs, inside, source.axes)
    return rows._replace(args=args, kwargs=kwargs, weights=np.ones(len(inside)))
