"""The abstract value of an array in a walk: what each of its axes is an axis of, and along which
axes an entry is computed from other entries than its own. Along an axis without a label all entries
are equal.

Axes of arguments and sites have labels. Labels that meet entry by entry, in a sum, a product, a
contraction, are one label: a proof, whatever the values are, of one length and one order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Cause(NamedTuple):
    """Why an entry sees others: the operation "mixes" them, goes by the row's "number" or by the
    "count" of rows, or is "unknown"; or there are entries for "pairs" of rows.
    """

    kind: str
    primitive: str
    source: Any  # what JAX keeps of the user's line; None of a constant


PAIRS = Cause("pairs", "site", None)


class Seen(NamedTuple):
    """Of one array. `across`: why an entry sees others along a label, of arguments alone or
    (`free`) of random values too. `each`: labels of which it is one entry, within a loop over them.
    `number`: the axis along which entry n is n; of an index of several columns a tuple, an axis or
    None for each column. `free`: whether it is computed from random values.
    """

    axes: tuple[int | None, ...]
    across: Mapping[tuple[int, bool], Cause] = {}
    each: frozenset[int] = frozenset()
    number: Any = None
    free: bool = False


NOT_NEGATIVE = "not negative"  # what `number` is of a comparison that is false everywhere


class Labels:
    """Groups of labels, and values as they are made and merged."""

    def __init__(self, counts: frozenset[int] = frozenset()):
        self.counts = counts  # identities of the numbers that change with that of rows
        self.source, self.at = None, None  # of the equation that is followed: the walk sets it
        self._above: list[int] = []
        self._next = 0
        self.places: set[tuple] = set()  # (`walk.changed`'s name of an axis, a label that it has)
        self.rows = self.new()

    def new(self) -> int:
        """A label of its own; in a further round of a loop the one of the round before."""
        if self._next == len(self._above):
            self._above.append(self._next)
        self._next += 1
        return self._next - 1

    def group(self, label: int) -> int:
        """What stands for all labels that have met this one."""
        while self._above[label] != label:
            self._above[label] = label = self._above[self._above[label]]
        return label

    def join(self, labels: Iterable[int | None]) -> int | None:
        """The one label of axes that meet."""
        known = sorted({self.group(a) for a in labels if a is not None})
        for other in known[1:]:
            self._above[other] = known[0]
        return known[0] if known else None

    def length(self, of: Any, axis: int) -> int:
        """A label for how many entries an axis without one has."""
        label = self.new()
        self.places.add(((self.at, id(of), axis), label))
        return label

    def made(self, variables: Sequence, values: list) -> None:
        """Keeps which axes have labels."""
        for v, seen in zip(variables, values, strict=True):
            every = enumerate(seen.axes if seen else ())
            self.places |= {((self.at, id(v), i), a) for i, a in every if a is not None}

    def cause(self, kind: str, primitive: str) -> Cause:
        """At the user's line."""
        return Cause(kind, primitive, self.source)

    def argument(self, shape: tuple[int, ...], free: bool) -> Seen:
        """An array that is given, or the random value of a site."""
        return Seen(tuple(self.new() for _ in shape), free=free)

    def literal(self, literal) -> Seen:
        """A number that changes with that of rows is computed from all of them."""
        return Seen((None,) * np.ndim(literal.val), self._counted(literal))

    def _counted(self, x) -> dict[tuple[int, bool], Cause]:
        return {(self.rows, False): self.cause("count", "number")} if id(x) in self.counts else {}

    def constant(self, array) -> Seen:
        """Along an axis of unequal entries a constant goes by number."""
        shape, counted = np.shape(array), self._counted(array)
        try:
            values = np.asarray(array)
        except Exception:  # noqa: BLE001 - a tracer or a key, whose values are not known
            return self.by_number(shape, "constant", range(len(shape)))
        long = [i for i, n in enumerate(shape) if n > 1]
        if len(long) == 1 and np.array_equal(values.ravel(), np.arange(values.size)):
            return self.numbers(shape, long[0])._replace(across=counted)
        varies = [i for i in long if np.any(np.take(values, [0], i) != values)]
        found = self.by_number(shape, "constant", varies)
        return found._replace(across={**found.across, **counted})

    def numbers(self, shape, axis: int) -> Seen:
        """Entry n is n."""
        axes = (self.new() if i == axis else None for i in range(len(shape)))
        return Seen(tuple(axes), number=axis)

    def by_number(self, shape, primitive: str, axes: Iterable[int]) -> Seen:
        """Other entries along some axes, and nothing says of what."""
        own = {i: self.new() for i in axes}
        cause = self.cause("number", primitive)
        along = tuple(own.get(i) for i in range(len(shape)))
        return Seen(along, {(a, False): cause for a in own.values()})

    def entered(self, v: Seen) -> Seen:
        """Numbers as values like others."""
        if v.number is None or v.number == NOT_NEGATIVE:
            return v._replace(number=None)
        which = v.number if isinstance(v.number, tuple) else (v.number,)
        cause = self.cause("number", "iota")
        own = (v.axes[i] for i in which if i is not None)
        labels = {(a, False): cause for a in own if a is not None}
        return v._replace(number=None, across={**labels, **v.across})

    def others(self, v: Seen) -> dict[int, Cause]:
        """{label along which an entry sees other random values: why}; also along one of two axes,
        as of f_i - f_j.
        """
        axes = [self.group(a) for a in v.axes if a is not None]
        twice = {a: PAIRS for a in axes if v.free and axes.count(a) > 1}
        return {**twice, **{self.group(a): c for (a, free), c in v.across.items() if free}}

    def merged(
        self,
        values: Sequence[Seen],
        axes: Iterable[int | None],
        lost: Iterable[int | None] = (),
        primitive: str = "",
        kind: str = "mixes",
    ) -> Seen:
        """What is computed from these values; an entry sees all along the labels that are lost."""
        across = {a: c for v in reversed(values) for a, c in v.across.items()}
        free = any(v.free for v in values)
        for a in lost:
            if a is not None and (a, free) not in across:
                across[a, free] = self.cause(kind, primitive)
        each = frozenset().union(*(v.each for v in values))
        return Seen(tuple(axes), across, each, None, free)

    # Branches and loops, as a walk asks for them.

    def rounds(self) -> Callable[[], None]:
        """What to call before each round of a loop: its labels are those of the first one, as
        otherwise each round would differ from the last by new ones.
        """
        first = self._next

        def begin() -> None:
            self._next = first

        return begin

    def either(self, values: Sequence[Seen]) -> Seen:
        """Entry by entry, with all that any of them sees."""
        values = [self.entered(v) for v in values]
        return self.merged(values, map(self.join, zip(*(v.axes for v in values), strict=True)))

    def chosen(self, by: Seen, value: Seen) -> Seen:
        """An entry sees what the choice does. Under `vmap` the first axes choose for themselves."""
        value, by, num = self.entered(value), self.entered(by), len(by.axes)
        first = map(self.join, zip(by.axes, value.axes[:num], strict=True))
        return self.merged([value, by], [*first, *value.axes[num:]])

    def entry(self, values: Sequence[Seen]) -> list[Seen]:
        """One entry along the first axis; these axes meet."""
        label = self.join(v.axes[0] for v in values)
        own = frozenset() if label is None else frozenset([label])
        return [v._replace(axes=v.axes[1:], each=v.each | own) for v in map(self.entered, values)]

    def stacked(self, given: Sequence[Seen], entries: Sequence[Seen]) -> list[Seen]:
        """The steps are in the order of the arrays that a loop goes through; without any, an entry
        goes by its step.
        """
        if (label := self.join(v.axes[0] for v in given)) is None:
            label = self.new()
            number = {(label, False): self.cause("number", "scan")}
            entries = [v._replace(across={**number, **v.across}) for v in entries]
        own = frozenset([self.group(label)])
        return [
            v._replace(axes=(label, *v.axes), each=frozenset(map(self.group, v.each)) - own)
            for v in map(self.entered, entries)
        ]

    def carried(self, value: Seen, equation, along: Sequence[Seen] = ()) -> Seen:
        """The next step sees the entry of the one before, or how many steps were before it."""
        value, label = self.entered(value), self.join(v.axes[0] for v in along)
        own = frozenset(a for a in value.each if self.group(a) == label)  # no outer loop's
        lost, kind = (own, "mixes") if own else ([label], "number")
        if lost == [None]:
            lost, kind = [self.length(equation, -1)], "count"
        out = self.merged([value], value.axes, lost, equation.primitive.name, kind)
        return out._replace(each=value.each - own)
