"""Where minibatches come from: arrays in memory or on disk, the model's own subsampling plate, or a
user's stream. Batches from arrays are a function of (seed, step) alone, so that a run that was
killed goes on with exactly the batches that it would have had.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast
from uuid import uuid4

import jax
import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.frames.names import Names
from ppl_gp.reading.arguments import wide
from ppl_gp.settings import require_whole
from ppl_gp.sparse.bound import Batch

Rows = Batch  # on the host, without a key


@dataclass(frozen=True)
class Stream:
    """Batches of data beyond memory, in place of arrays: `fit(model, SVGP(), key, Stream(...))`.

    Parameters
    ----------
    batches : iterable or callable
        The batches of a pass, or a function that returns them anew for each pass. A batch is a
        tuple of the model's positional arguments, `(X, y)` for `model(X, y=None)`, or a dictionary
        by argument name. No batch may have more rows than the first.
    num_data : int
        Number N of rows of one pass.

    Raises
    ------
    DataError
        For `num_data` below 1 or another type, and in `fit` for batches that do not match the
        model's arguments.

    Notes
    -----
    Each row counts N / (rows per batch) times, averaged over the passes so far, or over N rows of a
    stream without end. In the first pass it counts ceil(N / B) times, for B rows in the first
    batch. So the batches of a pass add up to all data, and batches drawn at random from all data do
    so on average. A warning appears if a pass ends at another number of rows.

    If two passes contain different rows, as random draws do, `log_evidence` is a mean over passes,
    and `stats["log_evidence_se"]` is its standard error. A generator object can be read only once.
    Pass the function that makes it instead.

    Examples
    --------
    >>> X, y = np.arange(12.0), np.arange(12.0)
    >>> def batches():
    ...     yield from zip(np.split(X, 3), np.split(y, 3))
    >>> pg.Stream(batches, num_data=12).restarts
    True
    """

    batches: Iterable | Callable[[], Iterable]
    num_data: int
    token: str = field(default_factory=lambda: uuid4().hex, init=False, repr=False, compare=False)

    def __post_init__(self):
        require_whole(self, "num_data")
        if not (callable(self.batches) or isinstance(self.batches, Iterable)):
            raise DataError(
                f"Stream({self.batches!r}): give an iterable of batches, or a function that "
                "returns one."
            )

    @property
    def restarts(self) -> bool:
        """Whether a second pass is possible. An iterator can be read only once."""
        return callable(self.batches) or not isinstance(self.batches, Iterator)

    def whole(self) -> Iterable:
        """The batches of one pass."""
        return self.batches() if callable(self.batches) else self.batches


def bind(model, item, common: dict) -> tuple[tuple, dict]:
    """A stream's item, and arguments by name that all share, as (args, kwargs), one positional."""
    signature = inspect.signature(model)
    if not isinstance(item, dict | tuple | list):
        raise DataError(
            f"a batch of the stream is of type {type(item).__name__}; give a tuple of the model's "
            f"arguments {signature}, or a dictionary."
        )
    try:
        args, named = ((), item) if isinstance(item, dict) else (item, {})
        bound = signature.bind(*args, **named, **common)
    except TypeError as error:
        raise DataError(
            f"a batch of the stream does not fit the model's arguments {signature}: {error}"
        ) from error
    if not bound.arguments:
        raise DataError("a batch of the stream is empty; give the inputs X, and the observations.")
    (first, *others) = bound.arguments.items()
    return (first[1],), dict(others)


def num_rows(args: tuple) -> int | None:
    """N: the entries of the first argument, or of the first array in it where it is a container."""
    arrays = [x for x in jax.tree.leaves(args[:1]) if len(getattr(x, "shape", ()))]
    return arrays[0].shape[0] if arrays else None


def row_axes(args: tuple, kwargs: dict, num: int) -> tuple[tuple, dict]:
    """Which axis of each array counts the data, `None` for what all data share: a tree like (args,
    kwargs). The first where it has N entries; of observations y without, the last: (P, N).
    """

    def axis(x, is_y=False):
        shape = tuple(getattr(x, "shape", ()))
        if shape and shape[0] == num:
            return 0
        return len(shape) - 1 if is_y and shape and shape[-1] == num else None

    return jax.tree.map(axis, args), {
        k: jax.tree.map(lambda x, k=k: axis(x, k == "y"), v) for k, v in kwargs.items()
    }


def take(args: tuple, kwargs: dict, rows, axes) -> tuple[tuple, dict]:
    """The arguments at some rows along their `row_axes`; what has none is kept."""

    def at(x, axis):
        if axis is None:
            return x
        found = np.asarray(x[(slice(None),) * axis + (rows,)])
        return found.astype(wide(found.dtype), copy=False)

    return jax.tree.map(at, (args, kwargs), axes)


class ArraySource:
    """Arrays with N rows (in memory, or NumPy memory maps), shuffled in each epoch, which leaves
    out a random remainder, so that batches are uniform draws and bounds unbiased. `axes`: as
    `row_axes`, the default.
    """

    restarts = True
    names = Names()
    kept: dict = {}  # what `stats` say of the data

    def __init__(
        self,
        args: tuple,
        kwargs: dict,
        batch_size: int,
        seed: int,
        plate: str | None = None,
        num_data=None,
        axes=None,
    ):
        self.seed, self.plate = seed, plate
        self.num_data: int = num_data or cast(int, num_rows(args))
        # A model that subsamples is given all data in every step.
        self.axes = row_axes(args, kwargs, -1 if plate else self.num_data) if axes is None else axes
        # for NumPy's indexing: JAX would compile one gather per shape; memory maps stay maps
        same = lambda x, axis: axis is None or isinstance(x, np.memmap)  # noqa: E731
        indexable = lambda x, axis: x if same(x, axis) else np.asarray(x)  # noqa: E731
        self.args, self.kwargs = jax.tree.map(indexable, (args, kwargs), self.axes)
        self.batch_size = min(batch_size, self.num_data)
        self.steps_an_epoch = self.num_data // self.batch_size
        self._shuffled: tuple[int, np.ndarray] | None = None

    @property
    def whole(self) -> bool:
        """Whether a batch is all data, in their own order."""
        return self.batch_size == self.num_data

    @property
    def checked(self) -> bool:
        """Whether later batches are known to be finite; memory maps are as they are read."""
        leaves = jax.tree.leaves((self.args, self.kwargs))
        return self.whole or not any(isinstance(x, np.memmap) for x in leaves)

    def where(self, step: int, row: int) -> str:
        """Names a row of a batch, for messages."""
        return f"row {np.sort(self.indices(step))[row]} of the data"

    def indices(self, step: int) -> np.ndarray:
        """Rows of the batch of a step, (B,)."""
        if self.whole:
            return np.arange(self.num_data)
        epoch, position = divmod(step, self.steps_an_epoch)
        if self._shuffled is None or self._shuffled[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self._shuffled = (epoch, rng.permutation(self.num_data))
        start = position * self.batch_size
        return self._shuffled[1][start : start + self.batch_size]

    def peek(self) -> Rows:
        """The first batch."""
        return self.rows(self.indices(0))

    def batches(self, step: int) -> Iterator[Rows]:
        """Batches from a step on, for ever."""
        while True:
            yield self.rows(self.indices(step))
            step += 1

    def rows(self, rows: np.ndarray, weights=None) -> Rows:
        """The batch of these rows, weighted N / B unless told."""
        if self.plate is not None:  # the model subsamples, and scales, itself
            return Rows(self.args, self.kwargs, np.ones(len(rows)), None, {self.plate: rows}, rows)
        weights = np.full(len(rows), self.num_data / len(rows)) if weights is None else weights
        # Sorted rows are read from a memory map in one sweep; all of them need no copy.
        rows = np.sort(rows)
        chosen = slice(None) if self.whole and len(rows) == self.num_data else rows
        args, kwargs = take(self.args, self.kwargs, chosen, self.axes)
        return Rows(args, kwargs, weights, None, {}, rows)

    def sweep(self, size: int) -> Iterator[Rows]:
        """All data once, in order, in batches of one shape; rows of weight zero pad the last."""
        size = min(size, self.num_data) if self.plate is None else self.batch_size
        for i in range(math.ceil(self.num_data / size)):
            rows = np.arange(i * size, (i + 1) * size)
            inside = rows < self.num_data
            if self.plate is not None:
                # the plate scales by N / B, so every batch counts B / N: no shorter remainder
                if not inside.all():
                    rows = np.arange(self.num_data - size, self.num_data)
                batch = self.rows(rows)
                yield batch._replace(weights=np.where(rows >= i * size, size / self.num_data, 0.0))
            else:
                yield self.rows(np.minimum(rows, self.num_data - 1), inside.astype(float))

    def some(self, num: int) -> Rows:
        """Up to `num` rows at even distances, so that they represent sorted data too, each with
        weight one. A model that subsamples by itself takes as many as its plate does.
        """
        num = min(num, self.num_data) if self.plate is None else self.batch_size
        rows = self.rows(np.linspace(0, self.num_data - 1, num).astype(int), np.ones(num))
        each = 1.0 if self.plate is None else num / self.num_data
        return rows._replace(weights=np.full(num, each))
