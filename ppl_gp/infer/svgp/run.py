"""Running many compiled steps: chunks of batches, progress, checkpoints, Ctrl-C and bad batches,
with nothing lost.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.errors import Result
from ppl_gp.infer.batches import as_batch, is_finite, stack, where_not_finite
from ppl_gp.infer.progress import one_blas_thread, track
from ppl_gp.infer.sources import ArraySource, Rows
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp.checkpoint import Checkpoints
from ppl_gp.infer.svgp.devices import Placement
from ppl_gp.infer.svgp.problem import Problem
from ppl_gp.infer.svgp.step import State, advance, advance_whole

CHUNK = 20
MAX_FAILURES = 20  # failed steps in a row after which a run is over


class Ended(NamedTuple):
    """The last state, how the run ended, the objective before every step (nats), and what went
    wrong.
    """

    state: State
    result: Result
    bounds: np.ndarray
    message: str | None


class Failure(NamedTuple):
    """A batch that cannot be used: how the run ends, and what is wrong."""

    result: Result
    message: str


class LongRun(NamedTuple):
    """Everything about a run but its state."""

    problem: Problem
    source: ArraySource | StreamSource
    key: Any
    tol: float
    patience: int | None
    placement: Placement
    checkpoints: Checkpoints | None
    progress: bool

    def go(self, state: State) -> Ended:
        """Run to the end, or to an interruption, from `state` or the newest checkpoint."""
        max_steps, bounds = self.problem.plan.max_steps, np.zeros(0)
        if self.checkpoints is not None:
            restored, bounds = self.checkpoints.restore(state)
            state = self.placement.replicated(restored)
        result, message = Result.completed, None
        with track("SVGP", max_steps, self.progress) as update, one_blas_thread():
            try:
                # A finished run that is started again ends where it did.
                ended = self._ended(state, bounds)
                update(len(bounds), "compiling")
                for chunk in self._chunks(len(bounds), max_steps) if ended is None else ():
                    if isinstance(chunk, Failure):
                        ended, message = chunk
                        break
                    # at once: Ctrl-C comes before or after it
                    state, bounds = self._advance(state, bounds, chunk)
                    update(len(bounds), f"bound {bounds[-1]:.2f}")
                    if self.checkpoints is not None:
                        self.checkpoints.save(state, bounds, len(bounds))
                    if (ended := self._ended(state, bounds)) is not None:
                        break
                result = ended or (
                    Result.completed if len(bounds) >= max_steps else Result.stream_ended
                )
            except KeyboardInterrupt:
                result = Result.interrupted
        if self.checkpoints is not None:
            self.checkpoints.save(state, bounds, len(bounds), last=True)
        return Ended(self.placement.local(state), result, bounds, message)

    def _advance(self, state, bounds, chunk: "list[Rows]"):
        """(state, objectives) after some more steps."""
        done = len(bounds)
        keys = jax.vmap(lambda s: random.fold_in(self.key, s))(jnp.arange(done, done + len(chunk)))
        if self.source.whole:
            batch = self.placement.batch(as_batch(chunk[0], keys[0]))
            state, new = advance_whole(self.problem, state, batch, keys)
        else:
            constant, stacked = stack(chunk, keys)
            state, new = advance(self.problem, state, constant, self.placement.stacked(stacked))
        return jax.block_until_ready(state), np.concatenate([bounds, np.asarray(new)])

    def _chunks(self, done: int, max_steps: int) -> "Iterator[list[Rows] | Failure]":
        """Lists of batches, of one length but at the end; in place of a batch that cannot be used,
        what is wrong.
        """
        size, batches = chunk_size(max_steps), self.source.batches(done)
        while done < max_steps:
            wanted = min(size, max_steps - done)
            chunk, failure = self._read(batches, wanted, done)
            yield from ([chunk] if len(chunk) == size else ([b] for b in chunk))
            if failure is not None:
                yield failure
            if len(chunk) < wanted:
                return
            done += len(chunk)

    def _read(self, batches, wanted: int, done: int) -> "tuple[list[Rows], Failure | None]":
        """Batches up to the first that cannot be used: hours of work do not end with somebody's
        file.
        """
        chunk = []
        try:
            for batch in islice(batches, wanted):
                if not self.source.checked and not is_finite(batch):
                    step = done + len(chunk)
                    return chunk, Failure(
                        Result.nonfinite, where_not_finite(batch, step, self.source)
                    )
                chunk.append(batch)
        except Exception as error:
            told = f"batch {done + len(chunk)} (counted from 0): {type(error).__name__}: {error}"
            return chunk, Failure(Result.stream_ended, told)
        return chunk, None

    def _ended(self, state: State, bounds) -> Result | None:
        if int(state.failures) >= MAX_FAILURES:
            # Steps that gain nothing at any length are the end; values that are not finite are a
            # failure.
            return (
                Result.converged if np.isfinite(bounds[-MAX_FAILURES:]).all() else Result.nonfinite
            )
        plan, window = self.problem.plan, self.patience
        if len(bounds) <= plan.warm_up:
            return None
        if not plan.noisy and len(bounds) > 10 and np.all(np.isfinite(bounds[-11:])):
            if np.ptp(bounds[-11:]) < self.tol:
                return Result.converged
        if window is not None and len(bounds) >= 2 * window + plan.warm_up:
            # A step that failed says nothing about the others.
            finite = np.where(np.isfinite(bounds[-2 * window :]), bounds[-2 * window :], np.nan)
            before, recent = (
                np.nanmean(half) if np.isfinite(half).any() else np.nan
                for half in np.split(finite, 2)
            )
            return Result.converged if recent <= before else None
        return None


def chunk_size(max_steps: int) -> int:
    """Steps a chunk, of which one length is compiled. Without a divisor near `CHUNK` the last steps
    are made one by one.

    A function of `max_steps` alone: a resumed run makes the same chunks.
    """
    divisor = next(n for n in range(min(CHUNK, max_steps), 0, -1) if max_steps % n == 0)
    return divisor if 2 * divisor >= min(CHUNK, max_steps) else CHUNK
