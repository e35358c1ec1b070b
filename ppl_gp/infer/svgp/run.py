"""Running many compiled steps: chunks of batches, progress, checkpoints, Ctrl-C and bad batches,
with nothing lost.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.errors import Result
from ppl_gp.infer.batches import as_batch, is_finite, stack, where_not_finite
from ppl_gp.infer.loop import Stage, interruptible
from ppl_gp.infer.sources import ArraySource, Rows
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp.checkpoint import Checkpoints
from ppl_gp.infer.svgp.devices import Placement
from ppl_gp.infer.svgp.problem import Problem
from ppl_gp.infer.svgp.step import State, advance, advance_whole

CHUNK = 20
# other starts are tried for a chunk, in runs of at least so many chunks; one goes on where it gains
# so many nats per datum and, as q(u) lags behind in minibatches, so many per inducing variable, on
# average over the last steps of the chunk
TRIED, MARGIN, LAG, LAST = 20, 1e-2, 0.2, 5
RACE, LONG = 0.13, 1000  # part of a long run after which another start is compared
FLAT = 1e-2  # gradient of the hyperparameters, nats, below which a run may have converged
NO_GAP = 1e-4  # likewise, what a step of q(u) still expects to gain, nats
MAX_FAILURES = 20  # failed steps in a row after which a run is over


class Ended(NamedTuple):
    """The last state, how the run ended, the objective before each step (nats), what went wrong."""

    state: State
    result: Result
    bounds: np.ndarray
    message: str | None
    cause: Exception | None = None


class Failure(NamedTuple):
    """A batch that cannot be used: how the run ends, and what is wrong."""

    result: Result
    message: str | None
    cause: Exception | None = None  # raised inside the stream


class Reached(NamedTuple):
    """A state, the objective before every step that led to it, and why there is no further one."""

    state: State
    bounds: np.ndarray
    failure: Failure | None = None


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
    other: Callable[[State], State | None]  # another start, given what this one has reached
    elsewhere: Callable[[], Iterable[State]]  # starts that are compared in the first steps

    def go(self, state: State) -> Ended:
        """Run to the end, or to an interruption, from `state` or the newest checkpoint."""
        stages = self._stages(self._restored(state))
        reached, interrupted = interruptible(
            stages, "SVGP", self.problem.plan.max_steps, self.progress
        )
        self._save(reached, last=True)
        result = Result.interrupted if interrupted else self._result(reached)
        _, message, cause = reached.failure or Failure(result, None)
        return Ended(self.placement.local(reached.state), result, reached.bounds, message, cause)

    def _restored(self, state: State) -> Reached:
        if self.checkpoints is None:
            return Reached(state, np.zeros(0))
        restored, bounds = self.checkpoints.restore(state)
        return Reached(self.placement.replicated(restored), bounds)

    def _save(self, reached: Reached, last: bool = False) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save(reached.state, reached.bounds, len(reached.bounds), last=last)

    def _stages(self, reached: Reached) -> Iterator[Stage[Reached]]:
        """Chunks of steps, up to the end or a batch that cannot be used."""
        yield Stage(reached, len(reached.bounds), "compiling", keep=len(reached.bounds) > 0)
        # A finished run that is started again ends where it did.
        for chunk in self._chunks(len(reached.bounds)) if self._ended(reached) is None else ():
            if isinstance(chunk, Failure):
                yield Stage(reached._replace(failure=chunk), len(reached.bounds))
                return
            first = len(reached.bounds) == 0
            reached = (self._first if first else self._advance)(reached, chunk)
            if len(reached.bounds) == race_at(self.problem.plan.max_steps):
                reached = self._raced(reached)
            yield Stage(reached, len(reached.bounds), f"bound {reached.bounds[-1]:.2f}")
            self._save(reached)
            if self._ended(reached) is not None:
                return

    def _first(self, reached: Reached, chunk: "list[Rows]") -> Reached:
        """The first steps of the best start: no step leaves a lower optimum, such as one where
        noise explains all because length scales started too long.
        """
        best, variables = self._advance(reached, chunk), reached.state.variational.variables
        margin = MARGIN * self.source.num_data + LAG * sum(v.num for v in variables.values())
        if self.problem.plan.max_steps < TRIED * len(chunk):
            return best
        for start in self.elsewhere():
            new = self._advance(Reached(self.placement.replicated(start), np.zeros(0)), chunk)
            best = new if _level(new) > _level(best) + margin else best
        return best

    def _raced(self, reached: Reached) -> Reached:
        """This, or what another start reaches in as many steps."""
        start = self.other(self.placement.local(reached.state))
        if start is None:
            return reached
        other = Reached(self.placement.replicated(start), np.zeros(0))
        for chunk in self._chunks(0):
            if isinstance(chunk, Failure):
                return reached
            other = self._advance(other, chunk)
            if len(other.bounds) == len(reached.bounds):
                break
        return max(reached, other, key=lambda run: np.mean(run.bounds[-CHUNK:]))

    def _advance(self, reached: Reached, chunk: "list[Rows]") -> Reached:
        """What is reached after some more steps."""
        state, done = reached.state, len(reached.bounds)
        keys = jax.vmap(lambda s: random.fold_in(self.key, s))(jnp.arange(done, done + len(chunk)))
        if self.source.whole:
            batch = self.placement.batch(as_batch(chunk[0], keys[0]))
            state, new = advance_whole(self.problem, state, batch, keys)
        else:
            constant, stacked = stack(chunk, keys)
            state, new = advance(self.problem, state, constant, self.placement.stacked(stacked))
        return Reached(state, np.concatenate([reached.bounds, np.asarray(new)]))

    def _chunks(self, done: int) -> "Iterator[list[Rows] | Failure]":
        """Lists of batches, all but the last of one length; for one that cannot be used, why."""
        max_steps = self.problem.plan.max_steps
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
        """Batches up to the first that cannot be used: a bad file does not end hours of work."""
        chunk = []
        try:
            for batch in islice(batches, wanted):
                if not self.source.checked and not is_finite(batch):
                    where = where_not_finite(batch, done + len(chunk), self.source)
                    return chunk, Failure(Result.nonfinite, where)
                chunk.append(batch)
        except Exception as error:
            told = f"batch {done + len(chunk)} (counted from 0): {type(error).__name__}: {error}"
            return chunk, Failure(Result.stream_ended, told, error)
        return chunk, None

    def _result(self, reached: Reached) -> Result:
        if reached.failure is not None:
            return reached.failure.result
        all_made = len(reached.bounds) >= self.problem.plan.max_steps
        return self._ended(reached) or (Result.completed if all_made else Result.stream_ended)

    def _ended(self, reached: Reached) -> Result | None:
        state, bounds = reached.state, reached.bounds
        if int(state.failures) >= MAX_FAILURES:
            # Steps that gain nothing at any length are the end, but on a slope; values that are not
            # finite are a failure.
            if not np.isfinite(bounds[-MAX_FAILURES:]).all():
                return Result.nonfinite
            return Result.converged if is_settled(state) else Result.max_steps
        plan, window = self.problem.plan, self.patience
        if len(bounds) <= plan.warm_up:
            return None
        if not plan.noisy and len(bounds) > 10 and np.all(np.isfinite(bounds[-11:])):
            # An optimiser that is stuck gains nothing either; its gradient tells.
            if np.ptp(bounds[-11:]) < self.tol and is_settled(state):
                return Result.converged
        if window is not None and len(bounds) >= 2 * window + plan.warm_up:
            # A step that failed says nothing about the others.
            finite = np.where(np.isfinite(bounds[-2 * window :]), bounds[-2 * window :], np.nan)
            before, recent = (
                np.nanmean(half) if np.isfinite(half).any() else np.nan
                for half in np.split(finite, 2)
            )
            if recent <= before:
                settled = plan.noisy or is_settled(state)
                return Result.converged if settled else Result.completed
        return None


def _level(run: Reached) -> float:
    """The objective that a run has reached, nats: the last steps of one chunk."""
    level = float(np.mean(run.bounds[-LAST:]))
    return level if np.isfinite(level) else -np.inf


def is_settled(state: State) -> bool:
    """Whether nothing is left to gain at a state, of all data: a short step tells nothing."""
    return float(state.slope) < FLAT and float(state.q_gap) < NO_GAP


def race_at(max_steps: int) -> int:
    """Steps after which another start may be tried: whole chunks, none of a short run."""
    chunk = chunk_size(max_steps)
    return chunk * int(RACE * max_steps / chunk) if max_steps >= LONG else 0


def chunk_size(max_steps: int) -> int:
    """Steps a chunk, of which one length is compiled. Without a divisor near `CHUNK` the last steps
    are made one by one.

    A function of `max_steps` alone: a resumed run makes the same chunks.
    """
    divisor = next(n for n in range(min(CHUNK, max_steps), 0, -1) if max_steps % n == 0)
    return divisor if 2 * divisor >= min(CHUNK, max_steps) else CHUNK
