"""Running many compiled steps, with progress, checkpoints (a run's arrays in one file, of which no
reader ever sees half), Ctrl-C and bad batches.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import Result, StoreError, warn
from ppl_gp.infer.batches import Source, as_batch, repeated, stack, usable
from ppl_gp.infer.sources import Rows
from ppl_gp.infer.svgp.prepare import with_other_points
from ppl_gp.infer.svgp.problem import Problem
from ppl_gp.infer.svgp.start import Begun, starts_elsewhere
from ppl_gp.infer.svgp.step import Reached, State, advance, folded
from ppl_gp.reading.fingerprint import digest, fingerprint
from ppl_gp.results.store.archive import read_archive, write_archive
from ppl_gp.results.store.save import qualified_name
from ppl_gp.runtime import Stage, interruptible
from ppl_gp.sparse.expectation import Expectation
from ppl_gp.sparse.svgp import Checkpoint, Layers, Training

FORMAT, FORMAT_VERSION = "ppl_gp.checkpoint", 5


class _OtherRun(StoreError):
    """A checkpoint that is whole, and of another run: none that is older is looked for."""


class Checkpoints:
    """The checkpoints of one run, whose state is any tree. `identity` says what run it is."""

    def __init__(self, config: Checkpoint, identity: dict):
        self.config, self.identity = config, identity
        self.folder = Path(config.folder)
        self.saved, self.error = 0, None
        self.files: list[Path] = []  # of this run, in the order of their steps

    def save(self, state: Any, bounds: np.ndarray, step: int, last: bool = False) -> None:
        """Write a checkpoint if one is due. A full disk ends no run: it warns, `error` says so."""
        if step == self.saved or not (last or step - self.saved >= self.config.every):
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"step-{step:09d}.ckpt"
            arrays = {**_arrays(jax.tree.leaves(state)), "bounds": bounds}
            write_archive(path, FORMAT, FORMAT_VERSION, self.identity, arrays)
            self.saved, self.error = step, None
            self.files = [*self.files, path][-self.config.keep :]
            # those of an earlier run (resume=False) too, which the next start would take for ours
            for old in set(self._files()) - set(self.files):
                if old.is_file():
                    old.unlink(missing_ok=True)
        except OSError as error:
            self.error = f"step {step}: {error}"
            warn(f"cannot write a checkpoint to {self.folder}: {error}. The run goes on.")

    def restore(self, state: Any) -> tuple[Any, np.ndarray]:
        """(state, bounds so far) of the newest checkpoint that can be read, with a warning that
        names those that cannot; `state` as it is where there is none. Raises `StoreError` where it
        belongs to another model, method, data or version, or none can be read.
        """
        for half_written in self.folder.glob(".step-*.ckpt.*"):  # by a run that was killed
            half_written.unlink(missing_ok=True)
        files, self.files = self._files() if self.config.resume else [], []
        if not files:
            return state, np.zeros(0)
        leaves, structure = jax.tree.flatten(state)
        path, arrays = self._newest(files, leaves)
        self.files = files[: files.index(path) + 1]
        restored = [
            jnp.asarray(arrays[f"leaf-{i}"]) if eqx.is_array(x) else x for i, x in enumerate(leaves)
        ]
        self.saved = len(arrays["bounds"])
        return jax.tree.unflatten(structure, restored), arrays["bounds"]

    def _newest(self, files: list[Path], leaves) -> tuple[Path, dict]:
        damaged: list[str] = []
        for path in reversed(files):
            try:
                check = functools.partial(self._require_same, _arrays(leaves))
                _, arrays = read_archive(path, FORMAT, FORMAT_VERSION, check)
            except _OtherRun:
                raise
            except StoreError as error:
                damaged.append(str(error))
            else:
                if damaged:
                    warn(
                        f"{' '.join(damaged)} The run goes on from {path}, at step "
                        f"{len(arrays['bounds'])}, with the numbers that it would have had."
                    )
                return path, arrays
        raise StoreError(f"{damaged[0]} {_REMEDY}")

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.ckpt"))

    def _require_same(self, own: dict, header: dict) -> None:
        if other := {k: (header.get(k), v) for k, v in self.identity.items() if header.get(k) != v}:
            told = "; ".join(f"{k} was {a!r} and is {b!r}" for k, (a, b) in other.items())
            raise _OtherRun(f"belongs to another run: {told}. {_REMEDY}")
        found = {k: claim[:2] for k, claim in header["arrays"].items() if k != "bounds"}
        wanted = {k: [x.dtype.str, list(x.shape)] for k, x in own.items()}
        for k in sorted({*found, *wanted}):
            if found.get(k) != wanted.get(k):
                raise StoreError(
                    f"is of another state: array '{k}' is {found.get(k)}, and should be "
                    f"{wanted.get(k)}."
                )


_REMEDY = "Give another folder, delete this one, or pass Checkpoint(..., resume=False)."


def _arrays(leaves) -> dict[str, np.ndarray]:
    return {f"leaf-{i}": np.asarray(x) for i, x in enumerate(leaves) if eqx.is_array(x)}


def identity(method: Any, model: Callable, data: tuple, num_data: int, key) -> dict:
    """What run a checkpoint belongs to: the model's code and all that it reads, the settings,
    `data` (of a stream the first batch), the key; by contents, never by address, so that it is the
    same in every process. Schedules count by their values at some steps as well.
    """
    parts = [vars(v) if isinstance(v, _PARTS) else {k: v} for k, v in vars(method).items()]
    settings = {k: v for p in parts for k, v in p.items() if k not in ("checkpoint", "devices")}
    steps = np.linspace(0, method.max_steps, 7).astype(int)
    schedules = {k: v for k, v in settings.items() if k in _SCHEDULES and callable(v)}
    rates = {k: [float(cast(Callable, v)(s)) for s in steps] for k, v in schedules.items()}
    return {
        "model": f"{_name(model)} {fingerprint(model)}",
        "method": ", ".join(f"{k}={_told(v)}" for k, v in settings.items())
        + (f", {rates}" if rates else ""),
        "num_data": num_data,
        "data": digest(data),
        "key": np.asarray(jax.random.key_data(key)).tolist(),
    }


_SCHEDULES = ("learning_rate", "natural_rate")
_PARTS = Training, Layers, Expectation  # of `SVGP`, whose options are named one by one


def _name(function) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return qualified_name(function)


def _told(value) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return f"{_name(value) if callable(value) else type(value).__name__} {digest(value)}"


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
        return reached._replace(state=self.begun.spread.local(reached.state), result=result)

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
            reached = (self._advance if len(reached.bounds) else self._first)(reached, chunk)
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
        if (start := with_other_points(self.begun, self.begun.spread.local(reached.state))) is None:
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
        keys = folded(self.key, np.arange(done, done + len(chunk)))
        if self.source.whole:
            constant, varying = repeated(self.begun.spread.batch(as_batch(chunk[0], None)), keys)
        else:
            constant, stacked = stack(chunk, keys)
            varying = self.begun.spread.batch(stacked, axis=1)
        state, new = advance(self.problem, state, constant, varying)
        return Reached(state, np.concatenate([reached.bounds, np.asarray(new)]))

    def _chunks(self, done: int) -> Iterator[list[Rows] | dict]:
        """Lists of batches, all but the last of one length; or what `usable` says of a bad one."""
        max_steps, chunk = self.problem.max_steps, []
        for rows in islice(usable(self.source, done, self.begun.subject.levels), max_steps - done):
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
            # no gain at any length is the end, but on a slope; values not finite are a failure
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
                return Result.converged if problem.noisy or is_settled(state) else Result.completed
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
