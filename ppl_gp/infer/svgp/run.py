"""Running many compiled steps, with progress, checkpoints, Ctrl-C and bad batches."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.errors import Result
from ppl_gp.infer.batches import Source, as_batch, repeated, stack, usable
from ppl_gp.infer.loop import Stage, interruptible
from ppl_gp.infer.sources import Rows
from ppl_gp.infer.svgp.checkpoint import Checkpoints
from ppl_gp.infer.svgp.prepare import with_other_points
from ppl_gp.infer.svgp.problem import Problem
from ppl_gp.infer.svgp.start import Begun, starts_elsewhere
from ppl_gp.infer.svgp.step import Reached, State, advance

CHUNK = 20
# other starts are tried for a chunk, in runs of at least so many chunks; one goes on where it gains
# so many nats per datum and, as q(u) lags behind in minibatches, so many per inducing variable, on
# average over the last steps of the chunk
TRIED, MARGIN, LAG, LAST = 20, 1e-2, 0.2, 5
RACE, LONG = 0.13, 1000  # part of a long run after which another start is compared
FLAT = 1e-2  # gradient of the hyperparameters, nats, below which a run may have converged
NO_GAP = 1e-4  # likewise, what a step of q(u) still expects to gain, nats
MAX_FAILURES = 20  # failed steps in a row after which a run is over


class LongRun(NamedTuple):
    """Everything about a run but where it stands."""

    begun: Begun
    key: Any
    checkpoints: Checkpoints | None
    progress: bool

    @property
    def problem(self) -> Problem:
        return self.begun.problem

    @property
    def source(self) -> Source:
        return self.begun.subject.source

    def go(self) -> Reached:
        """Run to the end, or to an interruption, from the start or the newest checkpoint."""
        stages, max_steps = self._stages(self._restored()), self.problem.max_steps
        reached, interrupted = interruptible(stages, "SVGP", max_steps, self.progress)
        self._save(reached, last=True)
        result = Result.interrupted if interrupted else self._result(reached)
        state = self.begun.spread.local(reached.state)
        return reached._replace(state=state, result=result)

    def _from(self, state: State) -> Reached:
        return Reached(self.begun.spread.replicated(state), np.zeros(0))

    def _restored(self) -> Reached:
        start = self._from(self.begun.state)
        if self.checkpoints is None:
            return start
        restored, bounds = self.checkpoints.restore(start.state)
        return Reached(self.begun.spread.replicated(restored), bounds)

    def _save(self, reached: Reached, last: bool = False) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save(reached.state, reached.bounds, len(reached.bounds), last=last)

    def _stages(self, reached: Reached) -> Iterator[Stage[Reached]]:
        """Chunks of steps, up to the end or a batch that cannot be used."""
        yield Stage(reached, len(reached.bounds), "compiling", keep=len(reached.bounds) > 0)
        # A finished run that is started again ends where it did.
        for chunk in self._chunks(len(reached.bounds)) if self._ended(reached) is None else ():
            if isinstance(chunk, dict):
                yield Stage(reached._replace(**chunk), len(reached.bounds))
                return
            first = len(reached.bounds) == 0
            reached = (self._first if first else self._advance)(reached, chunk)
            if len(reached.bounds) == race_at(self.problem.max_steps):
                reached = self._raced(reached)
            yield Stage(reached, len(reached.bounds), f"bound {reached.bounds[-1]:.2f}")
            self._save(reached)
            if self._ended(reached) is not None:
                return

    def _first(self, reached: Reached, chunk: list[Rows]) -> Reached:
        """The first steps of the best start: no step leaves a lower optimum, such as one where
        noise explains all because length scales started too long.
        """
        best, variables = self._advance(reached, chunk), reached.state.variational.variables
        margin = MARGIN * self.source.num_data + LAG * sum(v.num for v in variables.values())
        if self.problem.max_steps < TRIED * len(chunk):
            return best
        for start in starts_elsewhere(self.begun):
            new = self._advance(self._from(start), chunk)
            best = new if _level(new) > _level(best) + margin else best
        return best

    def _raced(self, reached: Reached) -> Reached:
        """This, or what another start reaches in as many steps."""
        start = with_other_points(self.begun, self.begun.spread.local(reached.state))
        if start is None:
            return reached
        other = self._from(start.state)
        for chunk in self._chunks(0):
            if isinstance(chunk, dict):
                return reached
            other = self._advance(other, chunk)
            if len(other.bounds) == len(reached.bounds):
                break
        return max(reached, other, key=lambda run: np.mean(run.bounds[-CHUNK:]))

    def _advance(self, reached: Reached, chunk: list[Rows]) -> Reached:
        """What is reached after some more steps."""
        state, done = reached.state, len(reached.bounds)
        keys = jax.vmap(lambda s: random.fold_in(self.key, s))(jnp.arange(done, done + len(chunk)))
        if self.source.whole:
            batch = self.begun.spread.batch(as_batch(chunk[0], None))
            constant, varying = repeated(batch, keys)
        else:
            constant, stacked = stack(chunk, keys)
            varying = self.begun.spread.batch(stacked, axis=1)
        state, new = advance(self.problem, state, constant, varying)
        return Reached(state, np.concatenate([reached.bounds, np.asarray(new)]))

    def _chunks(self, done: int) -> Iterator[list[Rows] | dict]:
        """Lists of batches, all but the last of one length; or what `usable` says of a bad one."""
        max_steps, chunk = self.problem.max_steps, []
        for rows in islice(usable(self.source, done), max_steps - done):
            chunk.append(rows)
            if isinstance(rows, dict):
                break
            if len(chunk) == chunk_size(max_steps):
                yield chunk
                chunk = []
        yield from (x if isinstance(x, dict) else [x] for x in chunk)

    def _result(self, reached: Reached) -> Result:
        all_made = len(reached.bounds) >= self.problem.max_steps
        ended = Result.completed if all_made else Result.stream_ended
        return reached.result or self._ended(reached) or ended

    def _ended(self, reached: Reached) -> Result | None:
        state, bounds = reached.state, reached.bounds
        if int(state.failures) >= MAX_FAILURES:
            # Steps that gain nothing at any length are the end, but on a slope; values that are not
            # finite are a failure.
            if not np.isfinite(bounds[-MAX_FAILURES:]).all():
                return Result.nonfinite
            return Result.converged if is_settled(state) else Result.max_steps
        problem, window = self.problem, self.begun.method.patience
        if len(bounds) <= problem.warm_up:
            return None
        if not problem.noisy and len(bounds) > 10 and np.all(np.isfinite(bounds[-11:])):
            # An optimiser that is stuck gains nothing either; its gradient tells.
            if np.ptp(bounds[-11:]) < self.begun.method.tol and is_settled(state):
                return Result.converged
        if window is not None and len(bounds) >= 2 * window + problem.warm_up:
            # A step that failed says nothing about the others.
            finite = np.where(np.isfinite(bounds[-2 * window :]), bounds[-2 * window :], np.nan)
            halves = np.split(finite, 2)
            before, recent = (np.nanmean(x) if np.isfinite(x).any() else np.nan for x in halves)
            if recent <= before:
                settled = problem.noisy or is_settled(state)
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
    """Steps a chunk, of which one length is compiled: without a divisor near `CHUNK` the last steps
    are made one by one. A function of `max_steps` alone: a resumed run makes the same chunks.
    """
    divisor = next(n for n in range(min(CHUNK, max_steps), 0, -1) if max_steps % n == 0)
    return divisor if 2 * divisor >= min(CHUNK, max_steps) else CHUNK
