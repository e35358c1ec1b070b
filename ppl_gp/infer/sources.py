"""Where minibatches come from: arrays in memory or on disk, the model's own subsampling plate, or a user's stream.

A source yields chunks of batches. Those from arrays are a function of (seed, step) alone, so that a run that was killed
goes on with exactly the batches that it would have had.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_gp.errors import DataError


class Rows(NamedTuple):
    """A minibatch on the host: the model's arguments, weights (B,), and the indices it came from, if any."""

    args: tuple
    kwargs: dict
    weights: np.ndarray
    given: dict


@dataclass(frozen=True)
class Stream:
    """Batches for data that do not fit in memory: `pg.fit(model, SVGP(), key, Stream(batches, num_data=N))`.

    `batches`: an iterable, or a function that returns one for each epoch. Each batch is a tuple of the model's positional
    arguments (`(X, y)` for `model(X, y=None)`), or a dictionary by argument name. `num_data` is N, for the bound's factor N / B.
    """

    batches: Iterable | Callable[[], Iterable]
    num_data: int

    def __post_init__(self):
        if self.num_data < 1:
            raise DataError(f"Stream(num_data={self.num_data}): give the number of rows of one pass.")

    @property
    def restarts(self) -> bool:
        """Whether a second pass is possible: an iterator, such as a generator, is used up by the first."""
        return callable(self.batches) or not isinstance(self.batches, Iterator)

    def once(self) -> Iterator:
        """The batches of one pass."""
        return iter(self.batches() if callable(self.batches) else self.batches)


def bind(model, item) -> tuple[tuple, dict]:
    """A stream's item as the model's (args, kwargs): the first argument positional, the others by name."""
    signature = inspect.signature(model)
    try:
        bound = signature.bind(**item) if isinstance(item, dict) else signature.bind(*item)
    except TypeError as error:
        raise DataError(f"a batch of the stream does not fit the model's arguments {signature}: {error}") from error
    (first, *others) = bound.arguments.items()
    return (first[1],), dict(others)


def is_rows(value: Any, num: int) -> bool:
    """Whether an argument is an array with one entry a datum."""
    return hasattr(value, "shape") and len(value.shape) > 0 and value.shape[0] == num


def take(args: tuple, kwargs: dict, rows, num: int) -> tuple[tuple, dict]:
    """The arguments at some rows: every array with N rows is indexed, anything else is kept."""

    def at(x):
        return np.asarray(x[rows]) if is_rows(x, num) else x

    return tuple(at(a) for a in args), {k: at(v) for k, v in kwargs.items()}


class ArraySource:
    """Arrays with N rows (in memory, or NumPy memory maps), shuffled without replacement in each epoch.

    Where N is no multiple of the batch size, an epoch leaves out a random remainder: every batch is a uniform draw of
    rows, so that its bound is unbiased.
    """

    def __init__(self, args: tuple, kwargs: dict, batch_size: int, seed: int, plate: str | None = None, num_data=None):
        self.seed, self.plate = seed, plate
        self.num_data = num_data or args[0].shape[0]
        # NumPy's indexing: JAX would compile one gather a shape. On CPU this is a view, not a copy.
        self.args, self.kwargs = jax.tree.map(lambda x: np.asarray(x) if is_rows(x, self.num_data) else x, (args, kwargs))
        self.batch_size = min(batch_size, self.num_data)
        self.steps_an_epoch = self.num_data // self.batch_size
        self._shuffled: tuple[int, np.ndarray] | None = None

    @property
    def whole(self) -> bool:
        """Whether a batch is all data, in their own order."""
        return self.batch_size == self.num_data

    def indices(self, step: int) -> np.ndarray:
        """Rows of the batch of a step, (B,)."""
        if self.whole:
            return np.arange(self.num_data)
        epoch, position = divmod(step, self.steps_an_epoch)
        if self._shuffled is None or self._shuffled[0] != epoch:
            self._shuffled = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_data))
        start = position * self.batch_size
        return self._shuffled[1][start : start + self.batch_size]

    def batches(self, step: int) -> Iterator[Rows]:
        """Batches from a step on, for ever."""
        while True:
            yield self.rows(self.indices(step))
            step += 1

    def rows(self, rows: np.ndarray, weights=None) -> Rows:
        """The batch of these rows, weighted N / B unless told."""
        if self.plate is not None:  # the model subsamples, and scales, itself
            return Rows(self.args, self.kwargs, np.ones(len(rows)), {self.plate: rows})
        weights = np.full(len(rows), self.num_data / len(rows)) if weights is None else weights
        # Sorted rows are read from a memory map in one sweep.
        args, kwargs = take(self.args, self.kwargs, rows if self.whole else np.sort(rows), self.num_data)
        return Rows(args, kwargs, weights, {})

    def sweep(self, size: int) -> Iterator[Rows]:
        """All data once, in order, in batches of one shape; the last is padded with rows of weight zero."""
        size = min(size, self.num_data) if self.plate is None else self.batch_size
        for i in range(math.ceil(self.num_data / size)):
            rows = np.arange(i * size, (i + 1) * size)
            inside = rows < self.num_data
            if self.plate is not None:
                # The plate scales by N / B: every batch counts B / N of it; a remainder would be scaled otherwise.
                if not inside.all():
                    rows = np.arange(self.num_data - size, self.num_data)
                batch = self.rows(rows)
                yield batch._replace(weights=np.where(rows >= i * size, size / self.num_data, 0.0))
            else:
                yield self.rows(np.minimum(rows, self.num_data - 1), inside.astype(float))


class StreamSource:
    """A user's stream of batches; a batch smaller than the first is padded with rows of weight zero."""

    plate = None
    whole = False

    def __init__(self, stream: Stream, model):
        self.stream, self.model, self.num_data = stream, model, stream.num_data
        self.batch_size: int | None = None
        self._peeked: list = []

    def peek(self) -> Rows:
        """The first batch, which the first pass will meet again."""
        items = iter(self.stream.once())
        item = next(items, None)
        if item is None:
            raise DataError("the stream holds no batch.")
        if not self.stream.restarts:
            self._peeked = [item]
        return self._rows(item)

    def _pass(self) -> Iterator:
        peeked, self._peeked = self._peeked, []
        return itertools.chain(peeked, self.stream.once())

    def batches(self, step: int) -> Iterator[Rows]:
        """Batches from a step on: earlier ones are read and dropped; ends where the stream cannot be restarted."""
        seen = 0
        while True:
            before = seen
            for item in self._pass():
                seen += 1
                if seen > step:
                    yield self._rows(item)
            if not self.stream.restarts or seen == before:
                return

    def _rows(self, item) -> Rows:
        args, kwargs = bind(self.model, item)
        num = np.shape(args[0])[0]
        self.batch_size = self.batch_size or num
        if num > self.batch_size:
            raise DataError(f"a batch of the stream has {num} rows, more than the first one's {self.batch_size}; give "
                            "batches of one size (the last may be smaller).")  # fmt: skip
        rows = np.minimum(np.arange(self.batch_size), num - 1)
        args, kwargs = take(*_numpy(args, kwargs, num), rows, num)
        weights = np.where(np.arange(self.batch_size) < num, self.num_data / num, 0.0)
        return Rows(args, kwargs, weights, {})

    def sweep(self, size: int) -> Iterator[Rows]:
        """One pass over the stream, each row with weight one."""
        for item in self.stream.once():
            batch = self._rows(item)
            yield batch._replace(weights=(batch.weights > 0).astype(float))


def _numpy(args, kwargs, num):
    def array(x):
        return np.asarray(x) if np.ndim(x) and len(x) == num else x

    return tuple(array(a) for a in args), {k: array(v) for k, v in kwargs.items()}
