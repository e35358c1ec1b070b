"""Mean field on batches: what is climbed, where batches come from, and whether rows stand alone."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Array

from ppl_gp.conjugate.conjugacy import somewhere
from ppl_gp.conjugate.family import Family, Values
from ppl_gp.conjugate.log_joint import LogJoint
from ppl_gp.conjugate.other_rows import RowsProof
from ppl_gp.conjugate.stochastic import Split, of_rows
from ppl_gp.errors import DataError, NotPointwiseError
from ppl_gp.infer.batches import as_batch, is_finite, where_not_finite
from ppl_gp.infer.sources import ArraySource, Rows, Stream, num_rows, take
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.model.arguments import Leaves
from ppl_gp.quick import quick_jit

Source = ArraySource | StreamSource


class Problem(NamedTuple):
    """What is climbed: the log joint of any batch, its parts, where batches come from, and local
    factors of a batch's rows to begin each with.
    """

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
        """q with the local factors that a batch of `num` rows (`None`: of the first's) begins
        with.
        """
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


def source_of(model, batch_size: int | None, args, kwargs, seed: int) -> Source:
    """Batches of a stream, or of arrays. `DataError` where rows cannot be told."""
    if args and isinstance(args[0], Stream):
        if len(args) > 1:
            raise DataError(
                "a Stream is the only positional argument: its batches hold the model's arguments."
            )
        return StreamSource(args[0], model, kwargs)
    num = num_rows(args)
    if num is None:
        raise DataError(
            f"MeanField(batch_size={batch_size}) needs inputs as the first positional argument: an "
            "array with one row per datum, or a Stream."
        )
    size = cast(int, batch_size)
    if not model.reading.grows and size < num:
        raise DataError(
            f"MeanField(batch_size={size}) needs every array with one entry per datum as an "
            "argument of the model, which holds arrays of its own (in a closure, a partial or a "
            "global); pass them, or take all rows, batch_size=None."
        )
    axes = model.reading.axes_of(Leaves(model, args, kwargs))
    return ArraySource(args, kwargs, size, seed, axes=axes)


def first_rows(source: Source) -> Rows:
    """The first batch, which has to be finite."""
    first = source.peek() if isinstance(source, StreamSource) else source.rows(source.indices(0))
    if not is_finite(first):
        raise DataError(f"{where_not_finite(first, 0, source)}.")
    return first


def require_rows_apart(problem: Problem, first: Rows) -> None:
    """Raise `NotPointwiseError` where a row's densities depend on which rows its batch holds or on
    how many, or a density of no row on the batch: rows are drawn anew, with repetitions, as many
    and half as many, and have to keep theirs.
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
