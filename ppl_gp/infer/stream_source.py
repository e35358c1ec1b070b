"""Minibatches from a user's stream: one form for all batches, the last one padded."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import jax
import numpy as np

from ppl_gp.errors import DataError, warn
from ppl_gp.frames.names import Names, arrays
from ppl_gp.infer.sources import Rows, Stream, bind, num_rows, row_axes, take
from ppl_gp.model.arguments import argument_names, wide

_INPUTS = "positional argument 0"


class StreamSource:
    """A user's stream of batches; one smaller than the first is padded with rows of weight zero.

    Every row counts ceil(N / B) times, as often as a pass has batches, so that the bounds of a pass
    average to that of all data. `common`: the model's arguments by name that the batches do not
    have. `names`: columns and labels of the first batch, which the others have to share.
    """

    plate = None
    whole = False
    checked = False

    def __init__(self, stream: Stream, model, common: dict | None = None):
        self.stream, self.model, self.num_data = stream, model, stream.num_data
        self.common = common or {}
        self.batch_size: int | None = None
        self._form: Any = None  # the shapes of the first batch's arguments, rows left out
        self.axes: Any = None
        self._peeked: list = []
        self._names: Names | None = None
        self._told = self.goes_on = False  # batches follow behind `num_data` rows
        self.swept = 0  # rows of the last sweep

    @property
    def names(self) -> Names:
        """Columns and labels; rows are a batch's own."""
        return (self._names or Names()).without_rows()

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
        """Batches from a step on, earlier ones dropped; ends with a stream of one pass."""
        seen = 0
        while True:
            before, place, rows = seen, _Place(self.num_data), 0
            for item in self._pass():
                seen += 1
                if seen <= step:
                    place.rows = None
                    continue
                self._require_last(place.short)
                batch = self._rows(item)
                place.move(int(np.sum(batch.weights > 0)), len(batch.weights))
                rows += int(np.sum(batch.weights > 0))
                yield batch
            if self.stream.restarts and before >= step and rows:
                self._tell_of_other_number(rows)
            if not self.stream.restarts or seen == before:
                return

    def _require_last(self, short: int | None) -> None:
        """A smaller batch before others: a pass has more batches then than its rows count for."""
        if short is not None:
            raise DataError(
                f"a batch of the stream has {short} rows, the first one {self.batch_size}, and "
                "another one follows: rows would count too little. Give batches of one size; the "
                "last of a pass may be smaller."
            )

    def _rows(self, item) -> Rows:
        args, kwargs = self._plain(*bind(self.model, item, self.common))
        args = tuple(_arrays(_INPUTS, a, None) for a in args)
        num = num_rows(args) or 0
        kwargs = {k: _arrays(k, v, num) for k, v in kwargs.items()}
        self.batch_size = size = self.batch_size or num
        if not 0 < num <= size:
            raise DataError(
                f"a batch of the stream has {num} rows, and the first one {size}; give "
                "batches of one size (the last may be smaller)."
            )
        self._require_form(args, kwargs, num)
        args, kwargs = take(args, kwargs, np.minimum(np.arange(size), num - 1), self.axes)
        weights = np.where(np.arange(size) < num, float(math.ceil(self.num_data / size)), 0.0)
        return Rows(args, kwargs, weights, {})

    def _plain(self, args, kwargs) -> tuple[tuple, dict]:
        """Frames and labelled arrays as arrays, a label as the same integer in every batch."""
        order = argument_names(self.model, len(args))
        aligned = (order[0], "y")
        if self._names is not None:
            args, kwargs, _ = self._names.again(order, args, kwargs, aligned)
            return args, kwargs
        args, kwargs, self._names = arrays(order, args, kwargs)
        self._names.require_same_rows(aligned)
        return args, kwargs

    def _require_form(self, args, kwargs, num) -> None:
        if self.axes is None:
            split = {k: v for k, v in kwargs.items() if k not in self.common}
            positional, named = row_axes(args, split, num)
            self.axes = (
                positional,
                {k: named.get(k, jax.tree.map(lambda _: None, v)) for k, v in kwargs.items()},
            )
        told = {_INPUTS: args[0], **kwargs}
        shapes = {k: jax.tree.map(np.shape, v) for k, v in told.items()}
        try:
            form = jax.tree.map(lambda x, a: _form(x, a, num), (args, kwargs), self.axes)
        except ValueError:  # other arguments, or another container
            form = None
        self._form = self._form or (form, shapes)
        if form != self._form[0]:
            raise DataError(
                f"a batch of the stream has arguments of shapes {shapes}, and the first one had "
                f"{self._form[1]}."
            )

    def passes(self, anew: bool) -> Iterator[Iterator[Rows]]:
        """Sweeps: each goes on behind the last if batches follow, else begins `anew`, or ends."""
        items: Any = ()
        for i in itertools.count():
            ahead = list(itertools.islice(items, 1))
            self.goes_on = bool(ahead)
            self._told |= self.goes_on  # what is left may be less than a pass
            if i and not (ahead or anew):
                return
            whole = itertools.chain(ahead, items) if ahead else self.stream.whole()
            items = () if isinstance(whole, Sized) else iter(whole)
            yield self.sweep(0, items or whole)

    def sweep(self, size: int, items: Iterable | None = None) -> Iterator[Rows]:
        """One pass, of N rows at most, over the stream or `items`, each row with weight one."""
        self.swept = seen = 0
        items = self.stream.whole() if items is None else items
        for item in items:
            batch = self._rows(item)
            inside = (batch.weights > 0) & (seen + np.arange(len(batch.weights)) < self.num_data)
            if seen < self.num_data:
                yield batch._replace(weights=inside.astype(float))
            self.swept = seen = seen + int(np.sum(batch.weights > 0))
            if seen >= self.num_data and not isinstance(items, Sized):
                return
        if self.stream.restarts:  # else it is what training left
            self._tell_of_other_number(seen)

    def _tell_of_other_number(self, rows: int) -> None:
        """Warn, once, of a pass that has another number of rows than was said."""
        if rows == self.num_data or self._told:
            return
        self._told, size = True, self.batch_size or rows
        counts, right = math.ceil(self.num_data / size), math.ceil(rows / size)
        warn(
            f"a pass of the stream has {rows} rows, and num_data={self.num_data}: in steps each "
            f"row counts {counts} times where {right} would be right, so that the data weigh "
            f"{counts / right:.3g} times what they should, and the bound is of the first "
            f"{min(rows, self.num_data)} rows. Give num_data={rows}."
        )


class _Place:
    """How far a pass (of `num_data` rows, if without end) has come: `rows`, unknown after dropped
    batches, and those of a smaller batch, which has to be the last.
    """

    def __init__(self, num_data: int):
        self.num_data = num_data
        self.rows: int | None = 0
        self.short: int | None = None

    def move(self, num: int, size: int) -> None:
        """Behind a batch of `num` rows, where the first had `size`."""
        ends = self.rows is None or (self.rows + num) % self.num_data == 0
        self.short = num if num < size and not ends else None
        if num < size and self.rows is None:
            self.rows = 0
        elif self.rows is not None:
            self.rows += num


def _form(x, axis, num):
    """A shape with the axis of rows named; another one where the rows are not `num`."""
    return tuple("rows" if i == axis and n == num else n for i, n in enumerate(np.shape(x)))


def _arrays(name, x, num):
    """As `_array`, of a container's parts too."""
    if isinstance(x, dict):
        return {k: _arrays(name, v, num) for k, v in x.items()}
    return tuple(_arrays(name, v, num) for v in x) if isinstance(x, tuple) else _array(name, x, num)


def _array(name, x, num):
    """An argument of a stream's batch, as `arguments.as_array`; it need not be finite."""
    if not (hasattr(x, "__array__") or (isinstance(x, list) and num in (None, len(x)))):
        return x
    array = np.asarray(x)
    if array.dtype.kind not in "biuf" and not jax.dtypes.issubdtype(
        array.dtype, jax.numpy.floating
    ):
        raise DataError(
            f"a batch of the stream has {array.dtype} entries in {name}; convert them to numbers."
        )
    truth = name == "y" and array.dtype == bool
    return array.astype(int if truth else wide(array.dtype), copy=False)
