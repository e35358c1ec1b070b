"""Minibatches from a user's stream: one form for all batches, the last one padded."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sized
from functools import partial
from typing import Any
from uuid import uuid4

import jax
import numpy as np

from ppl_gp.errors import DataError, warn
from ppl_gp.frames.names import Names, arrays
from ppl_gp.infer.sources import Rows, Stream, bind, num_rows, row_axes, take
from ppl_gp.reading.arguments import Leaves, argument_names, argument_of, wide
from ppl_gp.reading.reading import declare

_INPUTS = "positional argument 0"
MOST_LOOKED = 2000  # rows that stand for all, or are summed at once


class StreamSource:
    """A user's stream of batches; one smaller than the first is padded with rows of weight zero.
    `common`: the model's arguments by name that the batches do not have. `names`: columns and
    labels of the first batch, which the others have to share.
    """

    plate = None
    whole = False
    checked = False

    def __init__(self, stream: Stream, model, common: dict | None = None):
        self.stream, self.model, self.num_data = stream, model, stream.num_data
        self.restarts = stream.restarts
        self.common = common or {}
        self.batch_size: int | None = None
        self._form: Any = None  # the shapes of the first batch's arguments, rows left out
        self.axes: Any = None
        self._peeked: list = []  # items of an iterator, and what it raised
        self.grows = True  # whether the model takes any number of rows
        self.looked: Any = None  # some rows: of the first batches, then of the last sweep
        self._names: Names | None = None
        self._told = self.goes_on = False  # batches follow behind `num_data` rows
        self.swept = 0  # rows of the last sweep

    @property
    def names(self) -> Names:
        """Columns and labels; rows are a batch's own."""
        return (self._names or Names()).without_rows()

    @property
    def kept(self) -> dict:
        """What `stats` say of the data: a fit has no others, and which stream they are of; another
        fit of an iterator has other rows.
        """
        token = self.stream.token if self.restarts else uuid4().hex
        return {"first_batch_only": True, "stream": token}

    def peek(self) -> Rows:
        """The first batch, which the first pass will meet again."""
        if (item := next(iter(self.stream.whole()), None)) is None:
            raise DataError("the stream holds no batch.")
        if not self.restarts:
            self._peeked = [item]
        first = self._rows(item)
        self.args, self.kwargs = first.args, first.kwargs
        return first._replace(weights=first.weights * self.num_data / np.sum(first.weights))

    def some(self, num: int) -> Rows:
        """Rows that are representative: those that it has looked at, whatever `num`."""
        return self.looked

    def where(self, step: int, row: int) -> str:
        """Names a row of a batch, for messages."""
        return f"row {row} of the batch"

    def look(self, first: Rows, num: int) -> None:
        """Read the first batches, up to `num` rows or a pass of them, as `looked`; up to one that
        cannot be used, which the run will meet.
        """
        kept, found, num = list(self._peeked), [self.unpadded(first)], min(num, self.num_data)
        try:
            items = itertools.islice(itertools.chain(self._peeked, self.stream.whole()), 1, None)
            while self.grows and sum(len(r.weights) for r in found) < num:
                kept.append(next(items))
                found.append(self.unpadded(self._rows(kept[-1])))
        except StopIteration:
            pass
        except Exception as error:
            kept.append(error)
        self._peeked = [] if self.restarts else kept
        self._keep(found)

    def _keep(self, found: list[Rows]) -> None:
        """As `looked`; not those whose arguments beside the rows' are others."""
        shared = partial(jax.tree.map, _is_shared, _data(found[0]), self.axes)
        alike = [_data(r) for r in found if jax.tree.all(shared(_data(r)))]
        args, kwargs = jax.tree.map(_joined, alike[0], self.axes, *alike[1:])
        self.looked = Rows(args, kwargs, np.ones(self._num_rows(args, kwargs)), None)

    def unpadded(self, rows: Rows) -> Rows:
        """The rows of a batch that count, each with weight one."""
        inside = np.flatnonzero(rows.weights > 0)
        args, kwargs = take(*_data(rows), inside, self.axes)
        return rows._replace(args=args, kwargs=kwargs, weights=np.ones(len(inside)))

    def _pass(self) -> Iterator:
        peeked = iter(lambda: self._peeked.pop(0) if self._peeked else None, None)
        # `yield from` would close a generator that the next pass goes on with
        for item in itertools.chain(peeked, self.stream.whole()):
            if isinstance(item, Exception):
                raise item
            yield item

    def batches(self, step: int) -> Iterator[Rows]:
        """Batches from a step on, earlier ones dropped; ends with a stream of one pass. How often
        `each` row counts: see `Stream`.
        """
        seen, rows, each, end = 0, 0, 0.0, self.num_data
        while True:
            before, start = seen, rows
            for item in self._pass():
                batch = self._rows(item)
                seen, rows = seen + 1, rows + int(np.sum(batch.weights))
                if rows >= end:
                    each, end = self.num_data * seen / rows, rows + self.num_data
                each = each or float(math.ceil(self.num_data / rows))
                if seen > step:
                    yield batch._replace(weights=batch.weights * each)
            if not self.restarts or seen == before:
                return
            each, end = self.num_data * seen / rows, rows + self.num_data
            self._tell_of_other_number(rows - start)

    def _rows(self, item) -> Rows:
        args, kwargs = self._plain(*bind(self.model, item, self.common))
        args = tuple(_arrays(_INPUTS, a, None) for a in args)
        kwargs = {k: _arrays(k, v, num_rows(args) or 0) for k, v in kwargs.items()}
        if self.axes is None and num_rows(args) != 0:
            self.axes = self._row_axes(args, kwargs)
        num = 0 if self.axes is None else self._num_rows(args, kwargs)
        self.batch_size = size = self.batch_size or num
        if not 0 < num <= size:
            raise DataError(
                f"a batch of the stream has {num} rows, and the first one {size}; none may be "
                "empty or larger than the first."
            )
        self._require_form(args, kwargs, num)
        args, kwargs = take(args, kwargs, np.minimum(np.arange(size), num - 1), self.axes)
        return Rows(args, kwargs, (np.arange(size) < num).astype(float), None)

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

    def _row_axes(self, args, kwargs):
        """As the model reads its first batch; what all batches share has no rows."""
        leaves = Leaves(self.model, args, kwargs)
        reading = declare(self.model, args, kwargs).reading
        axes = {p: a for p, a in reading.row_axes.items() if argument_of(p) not in self.common}
        if reading.observed:
            return leaves.replaced(axes, others=None)
        return row_axes(args, kwargs, num_rows(args) or 0)  # y meets nothing there

    def _num_rows(self, args, kwargs) -> int:
        """Rows of a batch; 0 of one in another form."""
        try:
            sizes = jax.tree.map(
                lambda x, a: None if a is None else np.shape(x)[a], (args, kwargs), self.axes
            )
        except (IndexError, ValueError):
            return num_rows(args) or 0
        return next(iter(jax.tree.leaves(sizes)), num_rows(args) or 0)

    def _require_form(self, args, kwargs, num) -> None:
        shapes = {k: jax.tree.map(np.shape, v) for k, v in {_INPUTS: args[0], **kwargs}.items()}
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
            # what was peeked at may be left too
            begun = self.stream.whole() if self.restarts else self._pass()
            whole = itertools.chain(ahead, items) if ahead else begun
            items = () if isinstance(whole, Sized) else iter(whole)
            yield self.sweep(0, items or whole)

    def sweep(self, size: int, items: Iterable | None = None) -> Iterator[Rows]:
        """One pass, of N rows at most, over the stream or `items`, each row with weight one. Rows
        at even distances are `looked` at.
        """
        self.swept = seen = 0
        apart, found = -(-self.num_data // MOST_LOOKED), []
        items = self.stream.whole() if items is None else items
        for item in items:
            batch = self._rows(item)
            place = seen + np.arange(len(batch.weights))
            inside = (batch.weights > 0) & (place < self.num_data)
            if seen < self.num_data:
                if (some := inside & (place % apart == 0)).any():
                    found.append(self.unpadded(batch._replace(weights=some)))
                yield batch._replace(weights=inside.astype(float))
            self.swept = seen = seen + int(np.sum(batch.weights))
            if seen >= self.num_data and not isinstance(items, Sized):
                break
        else:
            if self.restarts:  # else it is what training left
                self._tell_of_other_number(seen)
        if found and self.grows:
            self._keep(found)

    def _tell_of_other_number(self, rows: int) -> None:
        """Warn, once, of a pass that has another number of rows than was said."""
        if rows == self.num_data or self._told:
            return
        self._told = True
        warn(
            f"a pass of the stream has {rows} rows, and num_data={self.num_data}. If these are all "
            f"rows, the data weigh {self.num_data / rows:.3g} times what they should in steps; "
            f"give num_data={rows}. If others are left out, as a last batch is dropped, keep them: "
            f"the bound is of {min(rows, self.num_data)} rows."
        )


def _data(rows: Rows) -> tuple:
    return rows.args, rows.kwargs


def _is_shared(x, axis, other) -> bool:
    return axis is not None or x is other or np.array_equal(x, other)


def _joined(x, axis, *others):
    return x if axis is None else np.concatenate([x, *others], axis)


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
    is_float = jax.dtypes.issubdtype(array.dtype, jax.numpy.floating)  # bfloat16 too
    if array.dtype.kind not in "biuf" and not is_float:
        raise DataError(
            f"a batch of the stream has {array.dtype} entries in {name}; convert them to numbers."
        )
    truth = name == "y" and array.dtype == bool
    return array.astype(int if truth else wide(array.dtype), copy=False)
