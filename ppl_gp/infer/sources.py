"""Where minibatches come from: arrays in memory or on disk, the model's own subsampling plate, or a user's stream.

A source yields chunks of batches. Those from arrays are a function of (seed, step) alone, so that a run that was killed
goes on with exactly the batches that it would have had.
"""

import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_gp.errors import DataError


class Rows(NamedTuple):
    """A minibatch on the host: the model's arguments, weights (B,), given sites, and where its rows stand in the data, if known."""

    args: tuple
    kwargs: dict
    weights: np.ndarray
    given: dict
    rows: np.ndarray | None = None


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
        if not (callable(self.batches) or isinstance(self.batches, Iterable)):
            raise DataError(f"Stream({self.batches!r}): give an iterable of batches, or a function that returns one.")

    @property
    def restarts(self) -> bool:
        """Whether a second pass is possible: an iterator, such as a generator, is used up by the first."""
        return callable(self.batches) or not isinstance(self.batches, Iterator)

    def once(self) -> Iterator:
        """The batches of one pass."""
        return iter(self.batches() if callable(self.batches) else self.batches)


def bind(model, item, common: dict) -> tuple[tuple, dict]:
    """A stream's item as the model's (args, kwargs): the first argument positional, the others by name.

    `common`: arguments by name that all batches share.
    """
    signature = inspect.signature(model)
    if not isinstance(item, dict | tuple | list):
        raise DataError(f"a batch of the stream is of type {type(item).__name__}; give a tuple of the model's arguments "
                        f"{signature}, or a dictionary.")  # fmt: skip
    try:
        bound = signature.bind(**item, **common) if isinstance(item, dict) else signature.bind(*item, **common)
    except TypeError as error:
        raise DataError(f"a batch of the stream does not fit the model's arguments {signature}: {error}") from error
    if not bound.arguments:
        raise DataError("a batch of the stream is empty; give the inputs X, and the observations.")
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
        self.args, self.kwargs = jax.tree.map(self._indexable, (args, kwargs))
        self.batch_size = min(batch_size, self.num_data)
        self.steps_an_epoch = self.num_data // self.batch_size
        self._shuffled: tuple[int, np.ndarray] | None = None

    def _indexable(self, x):
        """NumPy's indexing: JAX would compile one gather a shape. On CPU this is a view, not a copy. Memory maps stay maps."""
        if self.plate is not None or isinstance(x, np.memmap) or not is_rows(x, self.num_data):
            return x
        return np.asarray(x)

    @property
    def whole(self) -> bool:
        """Whether a batch is all data, in their own order."""
        return self.batch_size == self.num_data

    @property
    def checked(self) -> bool:
        """Whether later batches are known to be finite: what is in memory was checked, a memory map is as it is read."""
        return self.whole or not any(isinstance(x, np.memmap) for x in jax.tree.leaves((self.args, self.kwargs)))

    def where(self, step: int, row: int) -> str:
        """Names a row of a batch, for messages."""
        return f"row {np.sort(self.indices(step))[row]} of the data"

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
            return Rows(self.args, self.kwargs, np.ones(len(rows)), {self.plate: rows}, rows)
        weights = np.full(len(rows), self.num_data / len(rows)) if weights is None else weights
        # Sorted rows are read from a memory map in one sweep; all of them need no copy.
        rows = np.sort(rows)
        chosen = slice(None) if self.whole and len(rows) == self.num_data else rows
        args, kwargs = take(self.args, self.kwargs, chosen, self.num_data)
        return Rows(args, kwargs, weights, {}, rows)

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


_INPUTS = "positional argument 0"


class StreamSource:
    """A user's stream of batches; a batch smaller than the first is padded with rows of weight zero.

    `common`: the model's arguments by name that the batches do not hold.
    """

    plate = None
    whole = False
    checked = False

    def __init__(self, stream: Stream, model, common: dict | None = None):
        self.stream, self.model, self.num_data, self.common = stream, model, stream.num_data, common or {}
        self.batch_size: int | None = None
        self._form: dict = {}  # {argument: its shape} of the first batch
        self._split: set = set()  # arguments that hold one entry a row
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

    def where(self, step: int, row: int) -> str:
        """Names a row of a batch, for messages."""
        return f"row {row} of the batch"

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
        (first,), kwargs = bind(self.model, item, self.common)
        num = np.shape(first)[0] if np.ndim(first) else 0
        self.batch_size = size = self.batch_size or num
        if not 0 < num <= size:
            raise DataError(f"a batch of the stream has {num} rows, and the first one {size}; give "
                            "batches of one size (the last may be smaller).")  # fmt: skip
        named = {k: _array(k, v, num) for k, v in {_INPUTS: first, **kwargs}.items()}
        if not self._form:
            self._split = {k for k, v in named.items() if is_rows(v, num) and k not in self.common}
        form = {k: (("rows", *np.shape(v)[1:]) if k in self._split else np.shape(v)) for k, v in named.items()}
        self._form = self._form or form
        if form != self._form or any(len(named[k]) != num for k in self._split):
            shapes = {k: np.shape(v) for k, v in named.items()}
            raise DataError(
                f"a batch of the stream has arguments of shapes {shapes}, and the first one had {self._form}."
            )
        rows = np.minimum(np.arange(size), num - 1)
        named = {k: v[rows] if k in self._split else v for k, v in named.items()}
        weights = np.where(np.arange(size) < num, self.num_data / num, 0.0)
        return Rows((named.pop(_INPUTS),), named, weights, {})

    def sweep(self, size: int) -> Iterator[Rows]:
        """One pass over the stream, each row with weight one. A stream without end is left after N rows."""
        seen = 0
        for item in self.stream.once():
            batch = self._rows(item)
            inside = (batch.weights > 0) & (seen + np.arange(len(batch.weights)) < self.num_data)
            yield batch._replace(weights=inside.astype(float))
            seen += int(np.sum(batch.weights > 0))
            if seen >= self.num_data:
                break
        if seen < self.num_data:
            warnings.warn(f"a pass of the stream has {seen} rows, and num_data={self.num_data}: the bound's factor N / B "
                          "is too large by as much.", stacklevel=2)  # fmt: skip


def _array(name, x, num):
    """An argument of a stream's batch as `arguments.as_array` has those of arrays; whether it is finite is told later."""
    if not (hasattr(x, "__array__") or (isinstance(x, list) and len(x) == num)):
        return x
    array = np.asarray(x)
    if array.dtype.kind not in "biuf" and not jax.dtypes.issubdtype(array.dtype, jax.numpy.floating):
        raise DataError(f"a batch of the stream has {array.dtype} entries in {name}; convert them to numbers.")
    return array.astype(int) if name == "y" and array.dtype == bool else array
