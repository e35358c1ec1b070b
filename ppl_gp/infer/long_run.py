"""Running many compiled steps: chunks of batches, progress, checkpoints, Ctrl-C and bad batches, with nothing lost."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.errors import Result
from ppl_gp.infer.checkpoint import Checkpoints
from ppl_gp.infer.placement import Placement
from ppl_gp.infer.progress import track
from ppl_gp.infer.sources import ArraySource, Rows, StreamSource
from ppl_gp.infer.training import Problem, State, advance, advance_whole
from ppl_gp.sparse.bound import Batch

CHUNK = 20
MAX_FAILURES = 20  # failed steps in a row after which a run is over


class Ended(NamedTuple):
    """The last state, how the run ended, the objective before every step (nats), and what went wrong."""

    state: State
    result: Result
    bounds: np.ndarray
    message: str | None


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
            state, bounds = self.checkpoints.restore(state)
        done, result, message = len(bounds), Result.completed, None
        feed = self._chunks(done, max_steps)
        with track("SVGP", max_steps, self.progress) as update:
            try:
                update(done, "compiling")
                for chunk in feed:
                    if isinstance(chunk, str):
                        result, message = Result.nonfinite, chunk
                        break
                    state, new = self._advance(state, chunk, done)
                    bounds = np.concatenate([bounds, np.asarray(new)])
                    done = len(bounds)
                    update(done, f"bound {bounds[-1]:.2f}")
                    if self.checkpoints is not None:
                        self.checkpoints.save(state, bounds, done)
                    if (ended := self._ended(state, bounds)) is not None:
                        result = ended
                        break
                else:
                    result = Result.completed if done >= max_steps else Result.stream_ended
            except KeyboardInterrupt:
                result = Result.interrupted
        if self.checkpoints is not None:
            self.checkpoints.save(state, bounds, done, last=True)
        return Ended(state, result, bounds, message)

    def _advance(self, state, chunk: "list[Rows]", done: int):
        keys = jax.vmap(lambda s: random.fold_in(self.key, s))(jnp.arange(done, done + len(chunk)))
        if self.source.whole:
            batch = self.placement.batch(as_batch(chunk[0], keys[0]))
            return jax.block_until_ready(advance_whole(self.problem, state, batch, keys))
        constant, stacked = stack(chunk, self.source, keys)
        return jax.block_until_ready(advance(self.problem, state, constant, self.placement.stacked(stacked)))

    def _chunks(self, done: int, max_steps: int) -> "Iterator[list[Rows] | str]":
        """Lists of batches, of one length; a message in place of a chunk with a value that is not finite."""
        size, batches = _chunk_size(max_steps - done), self.source.batches(done)
        while done < max_steps and (chunk := list(islice(batches, size))):
            bad = next((i for i, b in enumerate(chunk) if not is_finite(b)), None)
            good = chunk if bad is None else chunk[:bad]
            yield from ([good] if len(good) == size else ([b] for b in good))
            if bad is not None:
                yield where_not_finite(chunk[bad], done + bad)
            done += len(chunk)

    def _ended(self, state: State, bounds) -> Result | None:
        if int(state.failures) >= MAX_FAILURES:
            # Steps that gain nothing at any length are the end; values that are not finite are a failure.
            return Result.converged if np.isfinite(bounds[-MAX_FAILURES:]).all() else Result.nonfinite
        plan, window = self.problem.plan, self.patience
        if len(bounds) <= plan.warm_up:
            return None
        if not plan.noisy and len(bounds) > 10 and np.all(np.isfinite(bounds[-11:])):
            if np.ptp(bounds[-11:]) < self.tol:
                return Result.converged
        if window is not None and len(bounds) >= 2 * window + plan.warm_up:
            before, recent = np.mean(bounds[-2 * window : -window]), np.mean(bounds[-window:])
            return Result.converged if recent <= before else None
        return None


def _chunk_size(steps: int) -> int:
    """The largest divisor of the number of steps up to `CHUNK`: chunks of one length are compiled once."""
    return next((n for n in range(min(CHUNK, steps), 0, -1) if steps % n == 0), 1)


def as_batch(rows: Rows, key) -> Batch:
    """A batch on the device."""
    return Batch(*jax.tree.map(_device, (rows.args, rows.kwargs, rows.weights)), key, jax.tree.map(_device, rows.given))


def _device(x):
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def stack(chunk: list[Rows], source, keys) -> tuple[Batch, Batch]:
    """(what all batches share, what differs with a leading axis of batches), each with `None` for the other's parts."""
    shared = {id(x) for x in jax.tree.leaves((getattr(source, "args", ()), getattr(source, "kwargs", {})))}
    leaves = [jax.tree.flatten((b.args, b.kwargs)) for b in chunk]
    structure = leaves[0][1]
    columns = list(zip(*(leaf for leaf, _ in leaves), strict=True))
    constant = [c[0] if _is_shared(c[0], shared) else None for c in columns]
    stacked = [None if _is_shared(c[0], shared) else jnp.asarray(np.stack(c)) for c in columns]
    weights = jnp.asarray(np.stack([b.weights for b in chunk]))
    given = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *[b.given for b in chunk])
    none = jax.tree.map(lambda _: None, given)
    args, kwargs = jax.tree.unflatten(structure, constant)
    varying = Batch(*jax.tree.unflatten(structure, stacked), weights, keys, given)
    return Batch(args, kwargs, None, None, none), varying  # pyright: ignore[reportArgumentType]


def _is_shared(x, shared) -> bool:
    return id(x) in shared or not isinstance(x, np.ndarray)


def is_finite(rows: Rows) -> bool:
    """Whether every number of a batch that came from the host is finite."""
    return all(np.isfinite(x).all() for x in jax.tree.leaves((rows.args, rows.kwargs)) if _is_floats(x))


def _is_floats(x) -> bool:
    return isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating)


def where_not_finite(rows: Rows, step: int) -> str:
    """Names the batch, the argument and the entry."""
    named = {**{f"positional argument {i}": x for i, x in enumerate(rows.args)}, **rows.kwargs}
    for name, x in named.items():
        if _is_floats(x) and not np.isfinite(x).all():
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(x))[0])
            return f"batch {step} (counted from 0) has {x[where]} in {name} at index {where} of the batch; drop or impute the row"
    return f"batch {step} has a value that is not finite"


