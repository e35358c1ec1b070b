"""Which axes are the data's, and whether a row of a model stands alone: read off one abstract trace
by the labels of axes (`labels.py`), and confirmed by another one with a few rows more.

The rows are the observations' own rows. What meets them entry by entry is the rows' as well; an
array that is only looked up is a table. What Python takes from a shape (the size of a plate, a
number) is no operation: the second trace shows what it made longer, and which numbers changed.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.primitives import Messenger

from ppl_gp.reading.arguments import Leaves, argument_of
from ppl_gp.reading.label_rules import LabelRules
from ppl_gp.reading.labels import PAIRS, Cause, Seen
from ppl_gp.reading.roles import is_missing_part
from ppl_gp.reading.tracing import (
    ARGUMENT,
    SITE,
    Look,
    like,
    look_at,
    named_trace,
    parts_of,
    unused_length,
)
from ppl_gp.reading.walk import Walk, changed


class Found(NamedTuple):
    """Of one site: `own`, the terms of its density, or a GP's inputs and mean; its kernel at inputs
    that are computed from nothing; masks and scales.
    """

    own: list[Seen]
    kernel: list[Seen]
    around: list[Seen]


class Rows(NamedTuple):
    """What `Reading` has under these names: {site: axis}, {path: axes}, {site: why it sees other
    rows}. `kernels`: GP sites whose kernel is computed from arrays with an entry per row. `around`:
    {(observed site, "mask" or "scale"): why}; `drawn`: {(site, what of it): why}.
    """

    axes: dict[str, int]
    plates: tuple[str, ...]
    rows: dict[str, tuple[int, ...]]
    mixing: dict[str, Cause]
    shared: dict[str, Cause]
    around: dict[tuple[str, str], Cause]
    coupled: dict[str, Cause]
    looked_up: tuple[str, ...]
    kernels: dict[str, Cause]
    whole: tuple[str, ...]
    grows: bool
    drawn: dict[tuple[str, str], Cause] = {}


class whole(Messenger):
    """Plates that subsample take all rows, in order."""

    def process_message(self, msg):
        if msg["type"] == "plate" and (size := msg["args"][0]) != msg["args"][1]:
            msg["args"], msg["value"] = (size, size), jnp.arange(size)


def rows_of(model: Callable, leaves: Leaves, base: Look, tables: Collection[str] = ()) -> Rows:
    """Three abstract traces beside the one of `base`; one or two more where rows are tied to others
    by their number alone, or where a plate subsamples; twice as many for one row.
    """
    subsampling = {k for k, (size, part) in base.plates.items() if size != part}
    reader, drawn = _Reader(model, leaves, base, tables), {}
    if subsampling:
        drawn = _of_batch(model, leaves, base, subsampling)
        with suppress(Exception):  # whatever the model raises that is given one batch of the rows
            reader = _Reader(whole(model), leaves, look_at(whole(model), leaves), tables)
    return reader.found(subsampling)._replace(drawn=drawn)


def _of_batch(model, leaves: Leaves, base: Look, plates: Collection[str]) -> dict:
    """What is computed from the rows that a plate draws together, or from their places in it."""
    like_index = {k: jax.ShapeDtypeStruct((base.plates[k][1],), int) for k in plates}
    reader = _Reader(model, leaves, base._replace(values=base.values | like_index), ())
    reader.walk()
    reader.labels.join((reader.labels.rows, *(v.axes[0] for k in plates for v in reader.values[k])))
    parts = {}
    for k in filter(reader._is_asked, reader.sites):
        parts[k, "inputs" if k in reader.gps else "density"] = reader.sites[k].own
        around = zip(("mask", "scale"), reader.sites[k].around, strict=False)
        parts |= {(k, what): [v] for what, v in around}
    return {k: c for k, v in parts.items() if (c := reader._cause(v)) is not None}


class _Reader:
    """One model at its training arguments; the user says that `tables` hold no rows."""

    def __init__(self, model, leaves: Leaves, base: Look, tables: Collection[str]):
        self.model, self.leaves, self.tables = model, leaves, tables
        self.arrays = {p: like(x) for p, x in leaves.arrays.items()}
        self.base = base
        self.jaxpr, self.structure = self.traced(self.arrays, self.base)
        self.counts: set[int] = set()
        self.grew: set[tuple] = set()  # axes that are longer where there are more rows

    def traced(self, arrays: Mapping, look: Look):
        """(the jaxpr from arguments and sites to what is read, the structure of that)."""
        named, trace_at = named_trace(self.model, self.leaves, look, arrays)

        def parts(named):
            return {k: parts_of(s) for k, s in trace_at(named).items()}

        closed, shapes = jax.make_jaxpr(parts, return_shape=True)(named)
        return closed, jax.tree.structure(shapes)

    def found(self, subsampling: Collection[str]) -> Rows:
        """All of it. A single row is read as the first of several: an operation along an axis of
        one entry does not show what it would mix.
        """
        self.walk()
        if (row := self.rows_label(subsampling)) is None:
            return Rows({}, (), {}, {}, {}, {}, {}, (), {}, (), False)
        if (grown := self.grown(row)) is None:
            return self.told(None)
        look, closed, arrays = grown
        if self._num_rows() == 1:
            self.base, self.jaxpr, self.arrays = look, closed, arrays
            return self.found(subsampling)
        self.confirm(look, closed)
        return self.told(look)

    def walk(self) -> None:
        """Label all axes: those of arguments and sites alike in each walk."""
        self.labels = labels = LabelRules(frozenset(self.counts))
        self.given = {p: labels.argument(x.shape, free=False) for p, x in self.arrays.items()}
        # a number that is inferred has no rows, unless there is one for each of them
        lengths = [x.shape[0] for x in self.arrays.values() if x.shape]
        numbers = sum(not x.shape for v in self.base.values.values() for x in jax.tree.leaves(v))
        each = 4 * numbers >= min(lengths, default=0)
        self.values = {
            k: [labels.argument(x.shape, free=bool(x.shape) or each) for x in jax.tree.leaves(v)]
            for k, v in self.base.values.items()
        }
        named = {ARGUMENT + p: [v] for p, v in self.given.items()}
        named |= {SITE + k: v for k, v in self.values.items()}
        flat = [x for _, parts in sorted(named.items()) for x in parts]
        out = Walk(labels).closed(self.jaxpr, flat)
        self.sites = {k: Found(*v) for k, v in jax.tree.unflatten(self.structure, out).items()}
        for v in self.sites.values():  # masks and scales stand before the densities
            for around in v.around:
                for pair in zip(around.axes, v.own[0].axes, strict=True):
                    labels.join(pair)
        for k in self.gps:
            X, mean = self.sites[k].own
            labels.join((X.axes[0], mean.axes[-1], *(v.axes[-1] for v in self.values.get(k, ()))))

    @property
    def gps(self) -> list[str]:
        """GP sites, also observed ones."""
        return [k for k, v in self.sites.items() if v.kernel]

    def groups(self, labels: Iterable[int | None]) -> set[int]:
        """What stands for these labels."""
        return {self.labels.group(a) for a in labels if a is not None}

    def is_row(self, label: int | None) -> bool:
        """Whether an axis is the data's."""
        return not self.groups([label]).isdisjoint(self.groups([self.labels.rows]))

    def rows_label(self, subsampling: Collection[str]) -> int | None:
        """The observations' own rows, those of the first argument before others; of nothing that
        is observed by rows, a GP's, or the first argument's.
        """
        first = [v.axes[0] for p, v in self.given.items() if self._is_first(p) and v.axes]
        gps = [v.axes[-1] for k in self.gps for v in self.values.get(k, ())]
        ends = self.groups(gps), self.groups(first)
        own = [a for k in self.sites if (a := self._own_rows(k, subsampling, ends)) is not None]
        if not (found := [a for a in own if a in ends[1]] or own or gps or first):
            return None
        self.labels.join((self.labels.rows, found[0]))
        return found[0]

    def _own_rows(self, name: str, subsampling, ends: tuple[set[int], ...]) -> int | None:
        """Of an observed site: a plate's that subsamples, the axis with the rows of a GP or of the
        first argument, its only plate's, the one as long as the inputs, its only one.
        """
        site = self.base.sites[name]
        if not site.observed or name in self.gps:
            return None
        axes = self.sites[name].own[0].axes
        if plates := [axes[a] for p, a in site.frames if p in subsampling]:
            return plates[0]
        inputs = {x.shape[0] for p, x in self.arrays.items() if self._is_first(p) and x.shape}
        alike = [axes[a] for _, a in site.frames if site.shape[a] in inputs]
        every, framed = self.groups(axes), self.groups(axes[a] for _, a in site.frames)
        known = (*(every & end for end in ends), framed, self.groups(alike), every)
        return next((min(found) for found in known if len(found) == 1), None)

    def _is_first(self, path: str) -> bool:
        return argument_of(path) == self.leaves.inputs

    # More rows.

    def _num_rows(self) -> int | None:
        axes = ((x, i) for p, x in self.arrays.items() for i in self._row_axes(p))
        return next((x.shape[i] for x, i in axes), None)

    def grown(self, row: int) -> tuple[Look, Any, dict] | None:
        """What a few rows more give, the jaxpr of it, and the arguments' shapes: of what meets the
        rows, of the first argument too, of all that have as many rows. The first where the values
        of sites that meet the rows grow as well, or else the first.
        """
        if (num := self._num_rows()) is None:
            return None
        group = self.labels.group
        alike = {
            p: group(a)
            for p, x in self.arrays.items()
            if x.shape[:1] == (num,) and argument_of(p) not in self.tables
            if (a := self.given[p].axes[0]) is not None
        }
        inputs = {a for p, a in alike.items() if self._is_first(p)}
        own, found = group(row), []
        sets = ({own}, {own, *inputs}, {own, *inputs, *alike.values()})
        # a design with so many rows of each level takes twice as many
        lengths = enumerate((unused_length(self.leaves, self.base, num), num))
        for (again, more), labels in product(lengths, dict.fromkeys(map(frozenset, sets))):
            if found and again:
                break
            arrays = {p: self._longer(p, labels, more) for p in self.arrays}
            if (given := self._look(arrays)) is not None:
                found.append((labels, *given, arrays))
                if self._values_grew(given[0]):
                    break
        if not found:
            return None
        labels, *rest = found[-1] if self._values_grew(found[-1][1]) else found[0]
        self.labels.join(labels)
        return tuple(rest)

    def _row_axes(self, path: str) -> tuple[int, ...]:
        return tuple(i for i, a in enumerate(self.given[path].axes) if self.is_row(a))

    def _longer(self, path: str, labels: Collection[int], more: int):
        x, axes = self.arrays[path], self.given[path].axes
        grows = (a is not None and self.labels.group(a) in labels for a in axes)
        shape = tuple(n + more * g for n, g in zip(x.shape, grows, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    def _look(self, arrays) -> tuple[Look, Any] | None:
        """What these arguments give, and the jaxpr of it; None where they do not fit together."""
        try:
            look = look_at(self.model, self.leaves, arrays)
        except Exception:  # noqa: BLE001 - whatever the model's functions raise
            return None
        pairs = ((s, look.sites.get(k)) for k, s in self.base.sites.items())
        pairs = [(s, t) for s, t in pairs if t is not None]
        fits = not any(s.matches and not t.matches for s, t in pairs)
        # one entry fits into a plate of any size
        frames = ((t, p, a) for _, t in pairs for p, a in t.frames if p in look.plates)  # no scan's
        fits &= all(t.shape[a] == look.plates[p][1] for t, p, a in frames)
        grew = any(
            (s.shape, s.event) != (t.shape, t.event) for s, t in pairs if s.observed or s.is_gp
        )
        if fits and grew:
            with suppress(Exception):  # of a kernel that holds an array of the rows, say
                return look, self.traced(arrays, look)[0]
        return None

    def _lengths(self, look: Look) -> Iterator[tuple]:
        """(label, length, length with more rows) of each axis of sites' values."""
        for name, seen in self.values.items():
            here, there = (jax.tree.leaves(v.values.get(name)) for v in (self.base, look))
            for v, a, b in zip(seen, here, there, strict=False):
                if len(a.shape) == len(b.shape):
                    yield from zip(v.axes, a.shape, b.shape, strict=True)

    def _values_grew(self, look: Look) -> bool:
        return not any(self.is_row(a) and n == m for a, n, m in self._lengths(look))

    def confirm(self, look: Look, closed) -> None:
        """What grew has an entry per row by its size, though it met none. And once more, where
        numbers in the model change with that of rows.
        """
        self.labels.join((self.labels.rows, *[a for a, n, m in self._lengths(look) if n != m]))
        self.counts, self.grew = changed(self.jaxpr, closed)
        if self.counts:
            every = (*self.given.values(), *(v for vs in self.values.values() for v in vs))
            rows = [a for v in every for a in v.axes if self.is_row(a)]
            self.walk()
            self.labels.join([self.labels.rows, *rows])

    # The answer.

    def told(self, look: Look | None) -> Rows:
        if look is not None:
            plates = tuple(k for k, s in self.base.plates.items() if look.plates.get(k, s) != s)
        else:
            plates = tuple(dict.fromkeys(self._framing()))
        framed = (k for k, s in self.base.sites.items() if any(p in plates for p, _ in s.frames))
        # other latents that no more rows can be traced of are effects of what there is
        known = {*framed, *filter(self._is_asked, self.sites)}
        asked = self.sites if look is not None else (k for k in self.sites if k in known)
        axes = {k: a for k in asked if (a := self._axis(k, plates, look)) is not None}
        # missing observations are drawn where they stand
        sites = {k: v for k, v in self.sites.items() if not is_missing_part(k, self.sites)}
        sees = {k: c for k, v in sites.items() if (c := self._cause(self._terms(v))) is not None}
        mixing = {k: c for k, c in sees.items() if k in axes}
        shared = {k: c for k, c in sees.items() if k not in axes}
        around = {
            (k, what): c
            for k in filter(self._is_asked, sites)
            for what, v in zip(("mask", "scale"), sites[k].around, strict=False)
            if (c := self._cause([v])) is not None
        }
        coupled = {k: c for k in self.sites if (c := self._coupling(k, k in axes)) is not None}
        looked = tuple(k for k in self.gps if k not in axes and self._is_seen(k))
        kernels = {k: c for k in self.gps if (c := self._kernel_cause(k)) is not None}
        own = {k: parts for k, parts in self.values.items() if k not in axes}
        whole = tuple(k for k, vs in own.items() if any(self.is_row(a) for v in vs for a in v.axes))
        rows = {p: a for p in self.given if (a := self._row_axes(p))}
        seen = mixing, shared, around, coupled, looked, kernels, whole
        return Rows(axes, plates, rows, *seen, look is not None)

    def _kernel_cause(self, name: str) -> Cause | None:
        """A kernel at inputs that are computed from nothing sees no row, nor an array of them."""
        (kernel,) = self.sites[name].kernel
        by_row = any(map(self.is_row, kernel.axes))
        return self._cause([kernel]) or (Cause("mixes", "kernel", None) if by_row else None)

    def _coupling(self, name: str, by_row: bool) -> Cause | None:
        """How the density of an observed site, or the inputs and the mean of a GP, see random
        values of other rows; without rows of its own, functions at all. How a latent with rows sees
        values of other rows, or of a function at other places.
        """
        found, asked = self.sites[name], self._is_asked(name)
        if asked and (by_row or name in self.gps):
            return self._cause([*self._terms(found), *found.around], free=True)
        (terms,), gps = found.own, [k for k in self.gps if k in self.values]
        ends = self.groups([self.labels.rows, *(self.values[k][0].axes[-1] for k in gps)])
        met = [c for (a, free), c in terms.across.items() if free and self.labels.group(a) in ends]
        seen = asked and terms.free and self.groups(terms.axes) & ends
        cause = next(iter(met), Cause("mixes", "site", None) if seen else None)
        return cause if asked or by_row else None

    def _terms(self, found: Found) -> list[Seen]:
        """What says of a site what it sees. Along a second axis of the rows, as f_i - f_j has, each
        term is one of another row.
        """
        if found.kernel or sum(map(self.is_row, found.own[0].axes)) < 2:
            return found.own
        (terms,) = found.own
        return [terms._replace(across={(self.labels.rows, terms.free): PAIRS, **terms.across})]

    def _is_seen(self, gp: str) -> bool:
        """Whether an observed site sees values of a GP."""
        ends = self.groups(v.axes[-1] for v in self.values.get(gp, ()))
        observed = (self.sites[k].own[0] for k, s in self.base.sites.items() if s.observed)
        met = (a for v in observed for a in (*v.axes, *(a for a, _ in v.across)))
        return not ends.isdisjoint(self.groups(met))

    def _is_asked(self, name: str) -> bool:
        return self.base.sites[name].observed or name in self.gps

    def _cause(self, parts: list[Seen], free: bool = False) -> Cause | None:
        found = [item for v in parts for item in v.across.items()]
        causes = [c for (a, is_free), c in found if self.is_row(a) and is_free >= free]
        if not free:  # how long an axis is that is no axis of the rows
            lengths = self.groups(a for place, a in self.labels.places if place in self.grew)
            long = (c for (a, _), c in found if not self.groups([a]).isdisjoint(lengths))
            causes += [c._replace(kind="count") for c in long]
        return min(causes, key=lambda c: _KINDS.index(c.kind), default=None)

    def _framing(self) -> Iterator[str]:
        """Plates of observed sites along the rows, where no longer data could be traced."""
        for name, site in self.base.sites.items():
            terms = self.sites[name].own[0].axes
            if site.observed and len(terms) == len(site.shape):
                yield from (p for p, a in site.frames if self.is_row(terms[a]))

    def _axis(self, name: str, plates, look: Look | None) -> int | None:
        """Of a GP where its inputs are rows; else the plate's, or one that met rows and grew."""
        site, found = self.base.sites[name], self.sites[name]
        if site.is_gp:
            return 0 if self.is_row(found.own[0].axes[0]) else None
        if found.kernel:
            return None
        framed = list(dict.fromkeys(a for p, a in site.frames if p in plates))
        if len(framed) == 1:
            return framed[0] + site.hidden
        terms, there = found.own[0].axes, look and look.sites.get(name)
        met = [i - len(terms) for i, a in enumerate(terms) if self.is_row(a)]
        if there and len(there.shape) == len(site.shape):
            met = [i for i in met if there.shape[i] != site.shape[i]]
        return met[0] + site.hidden if len(met) == 1 else None


# a message names the first of them that applies: a mean mixes rows, and also divides by N
_KINDS = ("pairs", "mixes", "unknown", "number", "count")
