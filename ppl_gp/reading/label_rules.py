"""How the operations of a jaxpr act on labelled axes (`labels.py`): one method per kind, one table.
One that is on no list counts as computed from all that enters it, of kind "unknown".
"""

import math
from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.reading.labels import NOT_NEGATIVE, PAIRS, Cause, Labels, Seen
from ppl_gp.reading.walk import NONLINEAR, Walk
from ppl_gp.reading.walk import shape_of as _shape

_AS_IT_IS = {"convert_element_type", "stop_gradient", "copy", "copy_p", "reduce_precision"}
_ELEMENTWISE = NONLINEAR | _AS_IT_IS
_ELEMENTWISE |= frozenset(
    """
    add add_any sub mul div neg select_n real imag conj complex eq_to le_to lt_to population_count
    clz shift_left shift_right_logical shift_right_arithmetic bitcast_convert_type
    """.split()
)
# What they make of equal entries depends on how many there are.
_COUNTING = {*"reduce_sum reduce_prod reduce_xor dot_general scatter-add scatter-mul".split()}
_DRAWS = ("random_", "threefry", "philox", "rng_")  # other entries at other places
# An index is followed through these: JAX writes one as where(i < 0, i + N, i), with columns.
_KEEP_NUMBERS = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "concatenate", "gather"}
_KEEP_NUMBERS |= {"lt", "select_n", "add", "eq", *_AS_IT_IS}


class LabelRules(Labels):
    """The table of a walk (`walk.Rules`) for `Seen`."""

    whole: frozenset[str] = frozenset()

    def primitive(self, equation, into: list[Seen]) -> list[Seen]:
        name, shapes = equation.primitive.name, [_shape(v) for v in equation.outvars]
        if name == "iota":
            return [self.numbers(shapes[0], equation.params["dimension"])]
        if name.startswith(_DRAWS) and name not in _ELEMENTWISE:
            drawn = [self.by_number(s, name, range(len(s))) for s in shapes]
            into = [self.entered(v) for v in into]  # a key, and of a gamma its shape
            every = [a for v in into for a in v.axes]
            return [self.merged([v, *into], v.axes, every, name, "unknown") for v in drawn]
        if name == "lt" and _is_false(*equation.invars):  # of an index that is written down
            return [Seen((None,) * len(shapes[0]), number=NOT_NEGATIVE)]
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

    def _mapped(self, e, into, places, lost=(), unequal: Collection[int] = ()) -> list[Seen]:
        """`places`: for each operand {axis: the output's axis that it ends as}. Axes that end as
        one meet, and along those that end nowhere, or are `lost`, an entry sees others. `unequal`:
        axes of the output whose entries differ, whatever enters.
        """
        axes: list[list] = [[] for _ in _shape(e.outvars[0])]
        gone, counts = list(lost), e.primitive.name in _COUNTING
        counted = []
        for x, v, to in zip(e.invars, into, places, strict=True):
            for i, label in enumerate(v.axes):
                (axes[to[i]] if i in to else gone).append(label)
                counted += [(x, i)] * (counts and label is None and i not in to)
        # those of what was repeated are equal, and what has lost an axis is elsewhere
        differs = e.primitive.name != "broadcast_in_dim" and any(a is not None for a in gone)
        unequal = [i for i, met in enumerate(axes) if i in unequal or (differs and not met)]
        out, *_ = self._made(e, into, map(self.join, axes), gone, unequal)
        cause = self.cause("count", e.primitive.name)
        lengths = {(self.length(*place), False): cause for place in counted}
        return [out._replace(across={**lengths, **out.across})] * len(e.outvars)

    def _made(self, e, into, axes, lost=(), unequal: Collection[int] = ()) -> list[Seen]:
        """`unequal`: axes along which entries differ, also where they have no label yet."""
        out = self.merged(into, axes, lost, e.primitive.name)
        return [self._unlike(out, _shape(e.outvars[0]), unequal, e)] * len(e.outvars)

    def _unlike(self, v: Seen, shape, axes: Collection[int], e, kind: str = "") -> Seen:
        """With labels for those of these axes that have none."""
        own = {i: self.new() for i in axes if v.axes[i] is None and shape[i] > 1}
        # what no argument enters goes by number
        by_number = all(c.kind in ("number", "count") for c in v.across.values())
        cause = self.cause(kind or ("number" if by_number else "mixes"), e.primitive.name)
        across = {**{(a, v.free): cause for a in own.values()}, **v.across}
        return v._replace(axes=tuple(own.get(i, a) for i, a in enumerate(v.axes)), across=across)

    def _unknown(self, e, into):
        """Of one entry within a loop over entries it sees that one."""
        pairs = zip(e.invars, into, strict=True)
        axes = [(x, i, a) for x, v in pairs for i, a in enumerate(v.axes)]
        lost, found = [self.length(x, i) if a is None else a for x, i, a in axes], []
        for shape in map(_shape, e.outvars):
            out = self.merged(into, (None,) * len(shape), lost, e.primitive.name, "unknown")
            found.append(self._unlike(out, shape, range(len(shape)), e, "unknown"))
        return found

    # Axes in their places.

    def _aligned(self, e, into):
        """Axis by axis; those of another length, and those that `_NAMED` says, end nowhere."""
        named = _NAMED[e.primitive.name](e) if e.primitive.name in _NAMED else ()
        unequal = named if e.primitive.name in _FILLED else ()
        pairs = (zip(_shape(v), _shape(e.outvars[0]), strict=False) for v in e.invars)
        alike = ([n == m for n, m in shapes] for shapes in pairs)
        places = [{i: i for i, same in enumerate(x) if same and i not in named} for x in alike]
        return self._mapped(e, into, places, (), unequal)

    def _elementwise(self, e, into):
        name = e.primitive.name
        if name in _AS_IT_IS or (name == "select_n" and into[0].number == NOT_NEGATIVE):
            own = into[0 if name in _AS_IT_IS else 1]
            is_short = e.outvars[0].aval.dtype.itemsize < 4  # where n is another number, or true
            return [self.entered(own) if is_short else own]
        if name == "lt" and _is_number(into[0].number) and _is_zero(e.invars[1]):
            (out,) = self._aligned(e, [v._replace(number=None) for v in into])
            return [out._replace(number=NOT_NEGATIVE)]
        if name == "add" and _is_zero(e.invars[1]):
            return [into[0]]
        if name == "eq" and all(isinstance(v.number, int) for v in into):
            # n on one axis is n on the other: a diagonal of a square matrix
            self.join(v.axes[v.number] for v in into)
        (out,) = self._aligned(e, [self.entered(v) for v in into])
        if name != "integer_pow":
            return [out]
        steps = {(self.length(e, -1), False): self.cause("count", name)}
        return [out._replace(across={**steps, **out.across})]

    def _cumulated(self, e, into):
        axis = e.params["axis"]
        return self._made(e, into, into[0].axes, [into[0].axes[axis]], [axis])

    # In other places.

    def _moved(self, e, v: Seen, to: Mapping):
        """Numbers whose own axis is lost are values like others."""
        number = to.get(v.number) if isinstance(v.number, int) else None
        v = v._replace(number=None) if number is not None else self.entered(v)
        (out,) = self._mapped(e, [v], [to])
        return [out._replace(number=number)]

    def _broadcast(self, e, into):
        before, after = _shape(e.invars[0]), _shape(e.outvars[0])
        to = enumerate(e.params["broadcast_dimensions"])
        return self._moved(e, into[0], {i: j for i, j in to if before[i] == after[j]})

    def _transposed(self, e, into):
        return self._moved(e, into[0], {i: j for j, i in enumerate(e.params["permutation"])})

    def _reshaped(self, e, into):
        return self._moved(e, into[0], _places(_shape(e.invars[0]), _shape(e.outvars[0]), e))

    def _reduced(self, e, into):
        """Without some axes: their entries together, or (`unstack`) each by itself."""
        gone = e.params["axes"] if "axes" in e.params else (e.params["axis"],)
        kept = [i for i in range(len(into[0].axes)) if i not in gone]
        return self._mapped(e, into, [{i: j for j, i in enumerate(kept)}] * len(into))

    def _concatenated(self, e, into):
        """Columns of an index, each with its numbers; or values one after another."""
        d, shapes = int(e.params["dimension"]), [_shape(v) for v in e.invars]
        numbers = [v.number if isinstance(v.number, int) and v.number != d else None for v in into]
        if d != len(shapes[0]) - 1 or any(s[d] != 1 for s in shapes):
            numbers = [None] * len(into)
        pairs = zip(into, numbers, strict=True)
        into = [self.entered(v) if n is None else v._replace(number=None) for v, n in pairs]
        places = {i: i for i in range(len(shapes[0])) if i != d}
        (out,) = self._mapped(e, into, [places] * len(into), (), [d])
        return [out._replace(number=None if {*numbers} == {None} else tuple(numbers))]

    def _stacked(self, e, into):
        """One after another along a new axis."""
        new = e.params["axis"]
        places = {i: i + (i >= new) for i in range(len(into[0].axes))}
        return self._mapped(e, into, [places] * len(into), (), [new])

    # Several operands.

    def _contracted(self, e, into):
        (summed, batch), (left, right) = e.params["dimension_numbers"], (v.axes for v in into)
        for i, j in zip(*summed, strict=True):
            self.join((left[i], right[j]))
        places = [{i: at for at, i in enumerate(own)} for own in batch]
        at = len(batch[0])
        for own, to, gone in zip((left, right), places, summed, strict=True):
            free = [i for i in range(len(own)) if i not in to and i not in gone]
            to.update({i: at + n for n, i in enumerate(free)})
            at += len(free)
        return self._mapped(e, into, places)

    def _gathered(self, e, into):
        """Looked up. An index that is the row's own number looks up the row."""
        d, (source, index, *rest) = e.params["dimension_numbers"], into
        before, rows = _shape(e.invars[0]), _shape(e.invars[1])[:-1]
        columns = index.number  # for each one the axis of which it is the number, or None
        if not isinstance(columns, tuple):
            columns = (columns if len(d.start_index_map) == 1 else None,) * len(d.start_index_map)
        own: dict = {}
        for o, n in zip(d.start_index_map, columns, strict=True):
            # of A[n, n] one is the row: the other entry is looked up by number
            found = n is not None and n not in own.values() and rows[n] == before[o]
            own |= {o: n} if found and e.params["slice_sizes"][o] == 1 else {}
        all_own = len(own) == len([n for n in columns if n is not None])
        index = index._replace(number=None) if all_own else self.entered(index)
        return self._looked_up(e, [self.entered(source), index, *rest], own)

    def _looked_up(self, e, into, own: Mapping):
        """`own`: axes of the source that are the index's."""
        d, before = e.params["dimension_numbers"], _shape(e.invars[0])
        batch = [i for i in range(len(_shape(e.outvars[0]))) if i not in d.offset_dims]
        batching = zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True)
        of_source = {o: batch[j] for o, j in (*batching, *own.items())}
        inside = [o for o in range(len(before)) if o not in d.collapsed_slice_dims]
        inside = [o for o in inside if o not in d.operand_batching_dims]
        for o, at in zip(inside, d.offset_dims, strict=True):
            if e.params["slice_sizes"][o] == before[o]:
                of_source.setdefault(o, at)
        return self._mapped(e, into, [of_source, dict(enumerate(batch)), *[{}] * len(into[2:])])

    def _scattered(self, e, into):
        """Into entries that an index says; a window's axes stay as they are."""
        d, before, part = e.params["dimension_numbers"], _shape(e.invars[0]), _shape(e.invars[2])
        outside = [*d.inserted_window_dims, *d.operand_batching_dims]
        inside = [o for o in range(len(before)) if o not in outside]
        places = [i for i in range(len(part)) if i not in d.update_window_dims]
        batching = zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True)
        of_index = {i: o for o, i in batching}
        of_part = dict(zip(d.update_window_dims, inside, strict=True))
        of_part |= {places[i]: o for i, o in of_index.items()}
        of_part = {i: o for i, o in of_part.items() if part[i] == before[o]}
        unequal = [o for o in range(len(before)) if o not in of_part.values()]
        lost = [into[0].axes[o] for o in unequal]
        places = [{o: o for o in range(len(before))}, of_index, of_part]
        return self._mapped(e, into, places, lost, unequal)

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
        found = []
        for shape in map(_shape, e.outvars):
            axes = [*batch, *[None] * (len(shape) - len(batch))]
            out = self.merged(into, axes, (i, j), e.primitive.name)
            found.append(self._unlike(out, shape, range(len(batch), len(shape)), e))
        return found


# {operation: the axes whose entries are others, of whatever length}
_NAMED: dict[str, Callable] = {
    "sort": lambda e: [e.params["dimension"]],
    # where JAX has no choice it is the last
    "top_k": lambda e: [e.params.get("axis", len(_shape(e.invars[0])) - 1)],
    "rev": lambda e: e.params["dimensions"],
    "split": lambda e: [e.params["axis"]],
    "pad": lambda e: [
        i for i, edge in enumerate(e.params["padding_config"]) if tuple(edge) != (0, 0, 0)
    ],
    "dynamic_update_slice": lambda e: [
        i for i, (n, m) in enumerate(zip(*map(_shape, e.invars[:2]), strict=True)) if n != m
    ],
}
_FILLED = ("pad", "dynamic_update_slice")  # with other entries
_RULES = {
    "broadcast_in_dim": LabelRules._broadcast,
    "transpose": LabelRules._transposed,
    "concatenate": LabelRules._concatenated,
    "stack": LabelRules._stacked,
    "dot_general": LabelRules._contracted,
    "gather": LabelRules._gathered,
    "triangular_solve": LabelRules._solved,
}
_RULES |= dict.fromkeys((*_NAMED, "slice", "tile", "dynamic_slice"), LabelRules._aligned)
_RULES |= dict.fromkeys(("reshape", "squeeze", "expand_dims"), LabelRules._reshaped)
_RULES |= dict.fromkeys(("argmax", "argmin", "unstack"), LabelRules._reduced)
_RULES |= dict.fromkeys(("cholesky", "lu", "qr", "eigh", "svd"), LabelRules._factorised)
_RULES |= {
    f"scatter{end}": LabelRules._scattered for end in ("", "-add", "-sub", "-mul", "-min", "-max")
}


def is_entry_by_entry(function: Callable, x) -> bool:
    """Whether entry n of function(x), along its last axes, is proved to see entry n of x alone."""
    closed, labels = jax.make_jaxpr(function)(x), LabelRules()
    given = labels.argument(jnp.shape(x), free=True)
    (out,) = map(labels.entered, Walk(labels).closed(closed, [given]))
    own = [labels.group(a) for a in given.axes if a is not None]
    there = [None if a is None else labels.group(a) for a in out.axes[len(out.axes) - len(own) :]]
    meets = len(own) == len(there) and len(set(own)) == len(own)  # not x + x.T
    meets &= all(n == 1 or a == b for n, a, b in zip(jnp.shape(x), own, there, strict=False))
    several = {a for n, a in zip(jnp.shape(x), own, strict=False) if n > 1}
    return meets and {labels.group(a) for a, free in out.across if free}.isdisjoint(several)


def crossing(function: Callable, x, axis: int) -> Cause | None:
    """Why entry n of function(x), along its last axis, is not proved to see entry n of x along
    `axis` alone; `None` where it is.
    """
    closed, labels = jax.make_jaxpr(function)(x), LabelRules()
    given = labels.argument(jnp.shape(x), free=True)
    (out,) = map(labels.entered, Walk(labels).closed(closed, [given]))
    row, there = labels.join([given.axes[axis]]), [a and labels.group(a) for a in out.axes]
    lost = (c for (a, free), c in out.across.items() if free and labels.group(a) == row)
    return next(lost, PAIRS if row in there[:-1] else None)


def _is_number(number) -> bool:
    """Whether each column of an index, or the only one, is a number of rows."""
    return number is not None and None not in (number if isinstance(number, tuple) else [number])


def _is_zero(atom) -> bool:
    return hasattr(atom, "val") and np.ndim(atom.val) == 0 and bool(atom.val == 0)


def _is_false(left, right) -> bool:
    """Whether left < right is known to be false."""
    known = hasattr(left, "val") and hasattr(right, "val")
    return known and not np.any(np.less(left.val, right.val))


def _places(before, after, equation) -> dict[int, int]:
    """{axis: its place} of those that a reshape keeps: as long, and as many entries before it."""
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
