"""How the operations of a jaxpr act on labelled axes (`labels.py`): one method per kind, one table.

An operation that is on no list counts as computed from everything that enters it, of kind
"unknown".
"""

import math
from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.reading.labels import NOT_NEGATIVE, Labels, Seen
from ppl_gp.reading.walk import NONLINEAR, Walk

_AS_IT_IS = {"convert_element_type", "stop_gradient", "copy", "copy_p", "reduce_precision"}
_ELEMENTWISE = (
    NONLINEAR
    | _AS_IT_IS
    | frozenset(
        """
    add add_any sub mul div neg select_n real imag conj complex eq_to le_to lt_to population_count
    clz shift_left shift_right_logical shift_right_arithmetic
    """.split()
    )
)
_DRAWS = ("random_", "threefry", "philox", "rng_")  # other entries at other places
# An index is followed through these: JAX writes one as where(i < 0, i + N, i), with columns.
_KEEP_NUMBERS = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "concatenate", "gather"}
_KEEP_NUMBERS |= {"lt", "select_n", "add", "eq", *_AS_IT_IS}


class LabelRules(Labels):
    """The table of a walk (`walk.Rules`) for `Seen`."""

    whole: frozenset[str] = frozenset()

    def primitive(self, equation, into: list[Seen]) -> list[Seen]:
        """By the name of the operation."""
        name, shapes = equation.primitive.name, [_shape(v) for v in equation.outvars]
        if name == "iota":
            return [self.numbers(shapes[0], equation.params["dimension"])]
        if name.startswith(_DRAWS) and name not in _ELEMENTWISE:
            return [self.by_number(s, name, range(len(s))) for s in shapes]
        if name == "lt" and _is_false(*equation.invars):  # of an index that is written down
            return [Seen((None,) * len(shapes[0]), number=NOT_NEGATIVE)]
        if all(v.is_plain for v in into):
            return [Seen((None,) * len(s), free=any(v.free for v in into)) for s in shapes]
        if name not in _KEEP_NUMBERS:
            into = [self.entered(v) for v in into]
        return self._rule(name, equation.params)(self, equation, into)

    def _rule(self, name: str, params):
        if name in _ELEMENTWISE:
            return LabelRules._elementwise
        if name.startswith("reduce_") and "axes" in params:
            return LabelRules._reduced
        if name.startswith("cum") and "axis" in params:
            return LabelRules._cumulated
        return _RULES.get(name, LabelRules._unknown)

    def _made(self, e, into, axes, lost=(), kind: str = "mixes") -> list[Seen]:
        out = self.merged(into, axes, lost, e.primitive.name, kind)
        return [out] * len(e.outvars)

    def _unknown(self, e, into):
        """Of one entry within a loop over entries it sees that one."""
        lost = [a for v in into for a in v.axes]
        return [
            self.merged(into, (None,) * len(_shape(v)), lost, e.primitive.name, "unknown")
            for v in e.outvars
        ]

    # Entry by entry.

    def _elementwise(self, e, into):
        name = e.primitive.name
        if name in _AS_IT_IS or (name == "select_n" and into[0].number == NOT_NEGATIVE):
            return [into[0 if name in _AS_IT_IS else 1]]
        if name == "lt" and into[0].number is not None and _is_zero(e.invars[1]):
            (out,) = self._met(e, [v._replace(number=None) for v in into])
            return [out._replace(number=NOT_NEGATIVE)]
        if name == "add" and _is_zero(e.invars[1]):
            return [into[0]]
        if name == "eq" and all(isinstance(v.number, int) for v in into):
            # n on one axis is n on the other: a diagonal of a square matrix
            self.join(v.axes[v.number] for v in into)
        return self._met(e, [self.entered(v) for v in into])

    def _met(self, e, into):
        """The one entry of a shorter axis is seen by all."""
        shape = _shape(e.outvars[0])
        whole = [
            (v.axes, _shape(a))
            for v, a in zip(into, e.invars, strict=True)
            if len(v.axes) == len(shape)
        ]
        axes = [self.join(own[i] for own, s in whole if s[i] == n) for i, n in enumerate(shape)]
        lost = [own[i] for own, s in whole for i, n in enumerate(shape) if s[i] != n]
        return self._made(e, into, axes, lost)

    # Moves.

    def _moved(self, e, v: Seen, to: Mapping, lost=()):
        """Axes in other places. Numbers whose own axis is lost are values like others."""
        number = to.get(v.number) if isinstance(v.number, int) else None
        v = v._replace(number=None) if number is not None else self.entered(v)
        axes: list = [None] * len(_shape(e.outvars[0]))
        for i, j in to.items():
            axes[j] = v.axes[i]
        (out,) = self._made(e, [v], axes, lost)
        return [out._replace(number=number)]

    def _broadcast(self, e, into):
        v, before, after = into[0], _shape(e.invars[0]), _shape(e.outvars[0])
        to = dict(enumerate(e.params["broadcast_dimensions"]))
        stretched = [i for i, j in to.items() if before[i] != after[j]]
        kept = {i: j for i, j in to.items() if i not in stretched}
        return self._moved(e, v, kept, [v.axes[i] for i in stretched])

    def _transposed(self, e, into):
        return self._moved(e, into[0], {i: j for j, i in enumerate(e.params["permutation"])})

    def _reshaped(self, e, into):
        to = _places(_shape(e.invars[0]), _shape(e.outvars[0]), e)
        return self._moved(e, into[0], to, [a for i, a in enumerate(into[0].axes) if i not in to])

    # Along some axes.

    def _reduced(self, e, into):
        gone, axes = e.params["axes"], self._joined(into)
        kept = [a for i, a in enumerate(axes) if i not in gone]
        return self._made(e, into, kept, [axes[i] for i in gone])

    def _cumulated(self, e, into):
        return self._made(e, into, into[0].axes, [into[0].axes[e.params["axis"]]])

    def _sorted(self, e, into):
        return self._along(e, self._joined(into), into, [e.params["dimension"]])

    def _largest(self, e, into):
        last = len(into[0].axes) - 1  # where JAX has no choice
        return self._along(e, into[0].axes, into, [e.params.get("axis", last)])

    def _reversed(self, e, into):
        return self._along(e, into[0].axes, into, e.params["dimensions"])

    def _split(self, e, into):
        return self._along(e, into[0].axes, into, [e.params["axis"]])

    def _padded(self, e, into):
        edges = enumerate(e.params["padding_config"])
        return self._along(e, into[0].axes, into, [i for i, c in edges if tuple(c) != (0, 0, 0)])

    def _sliced(self, e, into):
        p, shape = e.params, _shape(e.invars[0])
        steps = p["strides"] or (1,) * len(shape)
        parts = zip(p["start_indices"], p["limit_indices"], steps, strict=True)
        whole = [(0, n, 1) for n in shape]
        changed = [i for i, (a, b) in enumerate(zip(parts, whole, strict=True)) if a != b]
        return self._along(e, into[0].axes, into, changed)

    def _dynamic_slice(self, e, into):
        sizes = zip(e.params["slice_sizes"], _shape(e.invars[0]), strict=True)
        changed = [i for i, (part, n) in enumerate(sizes) if part != n]
        return self._along(e, into[0].axes, into, changed)

    def _dynamic_update(self, e, into):
        sizes = zip(_shape(e.invars[1]), _shape(e.invars[0]), strict=True)
        changed = [i for i, (part, n) in enumerate(sizes) if part != n]
        own = [into[1].axes[i] for i in changed]
        return self._along(e, self._joined(into[:2], changed), into, changed, own)

    def _joined(self, into, without: Collection = ()):
        pairs = enumerate(zip(*(v.axes for v in into), strict=True))
        return [a[0] if i in without else self.join(a) for i, a in pairs]

    def _along(self, e, axes, into, changed, lost=()):
        """Entries of these axes are others, at other places; the rest stay where they are."""
        kept = [None if i in changed else a for i, a in enumerate(axes)]
        return self._made(e, into, kept, [*(axes[i] for i in changed), *lost])

    def _concatenated(self, e, into):
        """Columns of an index, each with its numbers; or values one after another."""
        d, shapes = int(e.params["dimension"]), [_shape(v) for v in e.invars]
        numbers = [v.number if isinstance(v.number, int) and v.number != d else None for v in into]
        if not (d == len(shapes[0]) - 1 and all(s[d] == 1 for s in shapes) and any_of(numbers)):
            numbers = [None] * len(into)
        pairs = zip(into, numbers, strict=True)
        into = [self.entered(v) if n is None else v._replace(number=None) for v, n in pairs]
        axes = self._joined(into, without=[d])
        axes[d] = None
        (out,) = self._made(e, into, axes, [v.axes[d] for v in into])
        return [out._replace(number=tuple(numbers) if any_of(numbers) else None)]

    def _stacked(self, e, into):
        """One after another along a new axis."""
        axes = self._joined(into)
        axes.insert(e.params["axis"], None)
        return self._made(e, into, axes)

    def _unstacked(self, e, into):
        """Each entry of an axis by itself."""
        axes = list(into[0].axes)
        lost = axes.pop(e.params["axis"])
        return self._made(e, into, axes, [lost])

    def _tiled(self, e, into):
        return self._along(
            e, into[0].axes, into, [i for i, n in enumerate(e.params["reps"]) if n != 1]
        )

    # Several operands.

    def _contracted(self, e, into):
        (summed, batch), (left, right) = e.params["dimension_numbers"], (v.axes for v in into)
        lost = [self.join((left[i], right[j])) for i, j in zip(*summed, strict=True)]
        both = [self.join((left[i], right[j])) for i, j in zip(*batch, strict=True)]
        free = [
            a
            for axes, c, b in zip((left, right), summed, batch, strict=True)
            for i, a in enumerate(axes)
            if i not in (*c, *b)
        ]
        return self._made(e, into, [*both, *free], lost)

    def _gathered(self, e, into):
        """Looked up. An index that is the row's own number looks up the row."""
        d, (source, index, *rest) = e.params["dimension_numbers"], into
        before, rows = _shape(e.invars[0]), _shape(e.invars[1])[:-1]
        columns = _columns(index.number, len(d.start_index_map))
        own = {
            o: n
            for o, n in zip(d.start_index_map, columns, strict=True)
            if n is not None and rows[n] == before[o] and e.params["slice_sizes"][o] == 1
        }
        all_own = len(own) == len([n for n in columns if n is not None])
        index = index._replace(number=None) if all_own else self.entered(index)
        return self._looked_up(e, self.entered(source), index, rest, own)

    def _looked_up(self, e, source, index, rest, own: Mapping):
        d, before = e.params["dimension_numbers"], _shape(e.invars[0])
        batch = [i for i in range(len(_shape(e.outvars[0]))) if i not in d.offset_dims]
        axes = {i: index.axes[j] for j, i in enumerate(batch)}
        batching = zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True)
        meets = {**dict(batching), **own}  # axes of the source that are the index's
        offset, lost = iter(d.offset_dims), [index.axes[-1]]
        for o, label in enumerate(source.axes):
            inside = o not in (*d.collapsed_slice_dims, *d.operand_batching_dims)
            at = next(offset) if inside else None
            if o in meets:
                axes[batch[meets[o]]] = self.join((axes[batch[meets[o]]], label))
            elif at is not None and e.params["slice_sizes"][o] == before[o]:
                axes[at] = label
            else:
                lost.append(label)
        shape = range(len(_shape(e.outvars[0])))
        return self._made(e, [source, index, *rest], [axes.get(i) for i in shape], lost)

    def _scattered(self, e, into):
        """Into entries that an index says; a window's axes stay as they are."""
        d, (source, index, new) = e.params["dimension_numbers"], into
        before, part = _shape(e.invars[0]), _shape(e.invars[2])
        outside = [*d.inserted_window_dims, *d.operand_batching_dims]
        inside = [o for o in range(len(before)) if o not in outside]
        places = [i for i in range(len(part)) if i not in d.update_window_dims]
        batching = zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True)
        meets = dict(zip(inside, d.update_window_dims, strict=True))
        meets |= {o: places[i] for o, i in batching}
        whole = {o: i for o, i in meets.items() if part[i] == before[o]}
        axes = list(source.axes)
        for o, i in whole.items():
            axes[o] = self.join((axes[o], new.axes[i]))
        for o, i in zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True):
            axes[o] = self.join((axes[o], index.axes[i]))
        lost = [a for o, a in enumerate(axes) if o not in whole]
        lost += [a for i, a in enumerate(new.axes) if i not in whole.values()]
        batch = d.scatter_indices_batching_dims
        lost += [a for i, a in enumerate(index.axes) if i not in batch]
        return self._made(e, into, axes, lost)

    def _solved(self, e, into):
        """Rows of the right side meet those of the matrix."""
        (a, b), left = into, e.params["left_side"]
        batch = [self.join(x) for x in zip(a.axes[:-2], b.axes[:-2], strict=True)]
        label = self.join((*a.axes[-2:], b.axes[-2 if left else -1]))
        last = [label, b.axes[-1]] if left else [b.axes[-2], label]
        return self._made(e, into, [*batch, *last], [label])

    def _factorised(self, e, into):
        """A matrix, or one for each entry of the axes before its two."""
        *batch, i, j = into[0].axes
        return [
            self.merged(
                into,
                [*batch, *[None] * (len(_shape(v)) - len(batch))],
                (i, j),
                e.primitive.name,
            )
            for v in e.outvars
        ]


_RULES = {
    "broadcast_in_dim": LabelRules._broadcast,
    "transpose": LabelRules._transposed,
    "reshape": LabelRules._reshaped,
    "squeeze": LabelRules._reshaped,
    "expand_dims": LabelRules._reshaped,
    "argmax": LabelRules._reduced,
    "argmin": LabelRules._reduced,
    "sort": LabelRules._sorted,
    "top_k": LabelRules._largest,
    "concatenate": LabelRules._concatenated,
    "rev": LabelRules._reversed,
    "slice": LabelRules._sliced,
    "pad": LabelRules._padded,
    "split": LabelRules._split,
    "stack": LabelRules._stacked,
    "tile": LabelRules._tiled,
    "unstack": LabelRules._unstacked,
    "dynamic_slice": LabelRules._dynamic_slice,
    "dynamic_update_slice": LabelRules._dynamic_update,
    "dot_general": LabelRules._contracted,
    "gather": LabelRules._gathered,
    "triangular_solve": LabelRules._solved,
}
_RULES |= dict.fromkeys(("cholesky", "lu", "qr", "eigh", "svd"), LabelRules._factorised)
_RULES |= {
    f"scatter{end}": LabelRules._scattered for end in ("", "-add", "-sub", "-mul", "-min", "-max")
}


def is_entry_by_entry(function: Callable, x) -> bool:
    """Whether entry n of the array function(x), along its last axes, is proved to be computed from
    entry n of the array x alone.
    """
    closed, labels = jax.make_jaxpr(function)(x), LabelRules()
    given = labels.argument(jnp.shape(x), free=True)
    (out,) = map(labels.entered, Walk(labels).closed(closed, [given]))
    own = [labels.group(a) for a in given.axes]
    there = [None if a is None else labels.group(a) for a in out.axes[len(out.axes) - len(own) :]]
    meets = len(own) == len(there) and len(set(own)) == len(own)  # not x + x.T
    meets &= all(n == 1 or a == b for n, a, b in zip(jnp.shape(x), own, there, strict=False))
    several = {a for n, a in zip(jnp.shape(x), own, strict=False) if n > 1}
    return meets and {labels.group(a) for a, free in out.across if free}.isdisjoint(several)


def _shape(v) -> tuple[int, ...]:
    return getattr(v.aval, "shape", ())


def any_of(numbers) -> bool:
    """Whether a column has numbers."""
    return any(n is not None for n in numbers)


def _is_zero(atom) -> bool:
    return hasattr(atom, "val") and np.ndim(atom.val) == 0 and bool(atom.val == 0)


def _is_false(left, right) -> bool:
    """Whether left < right is known to be false."""
    known = hasattr(left, "val") and hasattr(right, "val")
    return known and not np.any(np.less(left.val, right.val))


def _columns(number, num: int) -> tuple:
    """For each column of an index, the axis of which it is the number, or None."""
    return number if isinstance(number, tuple) else (number if num == 1 else None,) * num


def _places(before, after, equation) -> dict[int, int]:
    """{axis: its place} of those that a reshape leaves as they are: as many entries before them,
    and as many of their own.
    """
    if equation.primitive.name == "squeeze":
        gone = equation.params["dimensions"]
        return {i: j for j, i in enumerate(k for k in range(len(before)) if k not in gone)}
    places: dict[int, int] = {}
    for i, n in enumerate(before):
        ahead = math.prod(before[:i])
        free = (j for j, m in enumerate(after) if m == n and j not in places.values())
        at = next((j for j in free if math.prod(after[:j]) == ahead), None)
        places |= {} if at is None else {i: at}
    return places
