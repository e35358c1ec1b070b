"""The linear predictors of a function, read off its jaxpr: the fewest arrays, affine in z, through
which alone it sees z.

A model sees its Gaussian sites z = (f, beta, u ...) through eta = f + X beta + u[group], say: a cut
of the graph of its operations. Among the arrays that are affine in z (`reading.affine`, a proof)
and hold one entry per datum, the smallest cut is found by maximal flow, each array counting as
many as it has functions a datum; of equal ones the nearest to the outputs, offsets included. The
sign of one function, or a known factor of a sum, counts as the link's.

Cost: one trace, O(E V) for the cut of a graph of V arrays and E operations, in Python; nothing is
computed.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from ppl_gp.reading.affine import Dependence, of_equation
from ppl_gp.reading.predictor.single_lookup import OneEach, followed, steps_of

_SUMS = {"add", "add_any", "sub"}
_CALLS = {"pjit", "jit", "closed_call", "core_call", "remat", "checkpoint"}


class Predictors(NamedTuple):
    """A function of (z, rest) with its cut. `places`: of the predictors among the arrays of the
    flat jaxpr, which are the same for any number of rows above one.
    """

    closed: ClosedJaxpr
    num_z: int  # leaves of z, the first inputs
    places: tuple[int, ...]
    tree: Any  # of the function's outputs

    @property
    def arrays(self) -> list:
        """The predictors, variables of `closed`."""
        everything = _variables(self.closed.jaxpr)
        return [everything[i] for i in self.places]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the predictors."""
        return tuple(v.aval.shape for v in self.arrays)

    @property
    def size(self) -> int:
        """Arrays of the flat jaxpr."""
        return len(_variables(self.closed.jaxpr))

    def at(self, z, rest) -> list[jax.Array]:
        """The predictors, affine in z."""
        given = dict(zip(self.closed.jaxpr.invars, jax.tree.leaves((z, rest)), strict=True))
        return evaluated(self.closed, given, self.arrays)

    def looked_up(self, z, rest) -> list[tuple[jax.Array, tuple, tuple[int, ...], list]]:
        """[(indices (..., D), the sizes (D,) of what they look up, places of the inputs of the flat
        jaxpr that they are computed from, the indices that count from the end where they are
        negative)] of every gather from something that depends on z.
        """
        jaxpr, how = self.closed.jaxpr, dependences(self.closed.jaxpr, self.num_z)
        gathers = [e for e in jaxpr.eqns if e.primitive.name == "gather" and e.invars[0] in how]
        gathers = [e for e in gathers if not isinstance(e.invars[1], Literal)]
        given = dict(zip(jaxpr.invars, jax.tree.leaves((z, rest)), strict=True))
        into = _inputs_of(jaxpr)
        found = []
        for e in gathers:
            axes = e.params["dimension_numbers"].start_index_map
            sizes = tuple(e.invars[0].aval.shape[i] for i in axes)
            wanted = [e.invars[1], *_wrapped(jaxpr, e.invars[1])]
            indices, *signed = evaluated(self.closed, given, wanted)
            found.append((indices, sizes, tuple(sorted(into[e.invars[1]])), signed))
        return found

    def one_each(self, z, rest, leaf: int) -> list[OneEach | None]:
        """What each entry of the predictors sees of one leaf of z, where that is proved to be one
        entry at most.
        """
        jaxpr = self.closed.jaxpr
        source, given = (
            jaxpr.invars[leaf],
            dict(zip(jaxpr.invars, jax.tree.leaves((z, rest)), strict=True)),
        )
        return [self.seen_by(source, given, wanted) for wanted in self.arrays]

    def seen_by(self, source, given: dict, wanted) -> OneEach | None:
        """What each entry of the variable `wanted` sees of the variable `source`; `given`: values
        of inputs.
        """
        known = [*given, *self.closed.jaxpr.constvars]
        steps = steps_of(needed(self.closed.jaxpr, known, [wanted]), source)
        if steps is None:
            return None
        depending = {source, *(v for step in steps for v in step.equation.outvars)}
        if wanted not in depending:
            shape = wanted.aval
            return OneEach(jnp.zeros(shape.shape, jnp.int32), jnp.zeros(shape.shape, shape.dtype))
        inputs = {v for s in steps for v in s.equation.invars if not isinstance(v, Literal)}
        others = [v for v in inputs if v not in depending]
        values = dict(zip(others, evaluated(self.closed, given, others), strict=True))
        return followed(steps, source, values)[wanted]

    def below(self, etas, rest):
        """The function's outputs with the predictors given."""
        jaxpr = self.closed.jaxpr
        first, etas = _firsts(jaxpr, lambda i: None), dict(zip(self.arrays, etas, strict=True))
        given = {v: etas[first[v]] for v in _variables(jaxpr) if first[v] in etas}
        given |= dict(zip(jaxpr.invars[self.num_z :], jax.tree.leaves(rest), strict=True))
        return jax.tree.unflatten(self.tree, evaluated(self.closed, given, jaxpr.outvars))


def predictors(
    function: Callable, z, rest, data_axis: Callable, apart: frozenset[int] = frozenset()
) -> Predictors | None:
    """The smallest cut of `function(z, rest)`, or `None` where there is none: where z enters a
    loop, say, or a kernel.

    `data_axis(i)`: the axis of the data of the i-th array of the flat jaxpr (its inputs, then what
    its operations give, in order), or `None`. `apart`: leaves of (z, rest), by their numbers, that
    no predictor may be computed from: observations, which there are none of at new rows.
    """
    whole = at_places(function, z, rest, ())
    found = _smallest_cut(whole.closed.jaxpr, whole.num_z, data_axis, apart)
    return None if found is None else whole._replace(places=found)


def at_places(function: Callable, z, rest, places: tuple[int, ...]) -> Predictors:
    """The predictors whose places are known, of the function at another number of rows, say."""
    closed, shape = jax.make_jaxpr(_flat(function, z, rest), return_shape=True)(z, rest)
    return Predictors(closed, len(jax.tree.leaves(z)), places, jax.tree.structure(shape))


def entries_seen(function: Callable, z) -> dict[str, OneEach | None]:
    """What each entry of the arrays `function(z)`, {name: array}, sees of the array z, where that
    is proved to be one entry at most.
    """
    whole = at_places(lambda z, rest: function(z), z, (), ())
    (source,), given = whole.closed.jaxpr.invars, {whole.closed.jaxpr.invars[0]: z}
    names = jax.tree.unflatten(whole.tree, range(len(whole.closed.jaxpr.outvars)))
    wanted = {k: whole.closed.jaxpr.outvars[i] for k, i in names.items()}
    return {
        # a number that was written into the model depends on nothing, and is of no use here
        k: None if isinstance(v, Literal) else whole.seen_by(source, given, v)
        for k, v in wanted.items()
    }


def flat_shapes(function: Callable, z, rest) -> list[tuple[int, ...]]:
    """Shapes of the arrays of the flat jaxpr, in order: two of them, for two numbers of rows, tell
    which axes are the data's.
    """
    jaxpr = jax.make_jaxpr(_flat(function, z, rest))(z, rest).jaxpr
    return [v.aval.shape for v in _variables(jaxpr)]


def _flat(function, z, rest):
    """The function with what it calls written out."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(z, rest)
    tree = jax.tree.structure(shape)

    def flat(z, rest):
        return jax.tree.unflatten(tree, _entered(closed, jax.tree.leaves((z, rest))))

    return flat


def _variables(jaxpr) -> list:
    return [*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)]


def evaluated(closed: ClosedJaxpr, given: dict, wanted) -> list:
    """The variables `wanted` from those `given`; nothing else is computed."""
    jaxpr = closed.jaxpr
    known = [v for v in jaxpr.constvars if v not in given]
    equations = needed(jaxpr, {*given, *known}, wanted)
    part = jaxpr.replace(invars=list(given), eqns=equations, outvars=list(wanted))
    return jaxpr_as_fun(ClosedJaxpr(part, closed.consts))(*given.values())


def _entered(closed: ClosedJaxpr, inputs) -> list:
    """A jaxpr evaluated with the calls in it entered, so that tracing it writes them out."""
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*inputs, *closed.consts), strict=True))

    def value(v):
        return v.val if isinstance(v, Literal) else values[v]

    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.primitive.name in _CALLS and isinstance(inner, ClosedJaxpr):
            out = _entered(inner, [value(v) for v in equation.invars])
        else:
            out = _alone(jaxpr, equation, value)
        values |= dict(zip(equation.outvars, out, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _alone(jaxpr, equation, value: Callable) -> list:
    """The outputs of one equation."""
    used = {v: value(v) for v in equation.invars if not isinstance(v, Literal)}
    part = jaxpr.replace(constvars=[], invars=list(used), eqns=[equation], outvars=equation.outvars)
    return jaxpr_as_fun(ClosedJaxpr(part, []))(*used.values())


def _firsts(jaxpr, data_axis: Callable) -> dict:
    """{variable: the first one that is computed as it is}: what a model writes twice is one.

    `data_axis(i)` tells apart what is equal by a coincidence of sizes.
    """
    place = {v: i for i, v in enumerate(_variables(jaxpr))}
    found, before = {v: v for v in (*jaxpr.invars, *jaxpr.constvars)}, {}

    def told(v):
        return (str(v.val), str(v.aval)) if isinstance(v, Literal) else found[v]

    for equation in jaxpr.eqns:
        into = tuple(told(v) for v in equation.invars)
        for i, v in enumerate(equation.outvars):
            what = (equation.primitive, str(equation.params), into, i, data_axis(place[v]))
            found[v] = before.setdefault(what, v)
    return found


def needed(jaxpr, known, wanted) -> list:
    """The equations between what is known and what is wanted, in order."""
    missing, found = {v for v in wanted if not isinstance(v, Literal) and v not in known}, []
    for equation in reversed(jaxpr.eqns):
        if missing.isdisjoint(equation.outvars):
            continue
        found.append(equation)
        inputs = (v for v in equation.invars if not isinstance(v, Literal))
        missing |= {v for v in inputs if v not in known}
    return found[::-1]


def _smallest_cut(jaxpr, num_z: int, data_axis, apart: frozenset[int]):
    """The places of the smallest cut between z and the outputs; `None` where none is finite."""
    how, first = dependences(jaxpr, num_z), _firsts(jaxpr, data_axis)
    place = {v: i for i, v in enumerate(_variables(jaxpr))}
    order, inputs = [v for v in place if v in how and first[v] is v], _inputs_of(jaxpr)
    room = {v: _room(v, how[v], data_axis(place[v])) for v in order}
    room |= {v: UNBOUNDED for v in order if not apart.isdisjoint(inputs[v])}
    graph = Flow(order, room)
    for equation in jaxpr.eqns:
        into = {first[x] for x in equation.invars if not isinstance(x, Literal) and x in how}
        for w in equation.outvars:
            if w in how and first[w] is w:
                for v in into:
                    graph.join(v, w)
    sources = [v for v in jaxpr.invars[:num_z] if v in how]
    sinks = {first[v] for v in jaxpr.outvars if not isinstance(v, Literal) and v in how}
    found = graph.cut(sources, sinks)
    if found is None:
        return None
    alone = lambda v: _room(v, how[v], data_axis(place[v])) == 1.0  # noqa: E731
    own = (_unscaled(jaxpr, v, how, first) if alone(v) else v for v in found)
    return tuple(place[v] for v in own)


def _unscaled(jaxpr, variable, how: dict, first: dict):
    """What a predictor is a known multiple of: the negated array of a negative, and the sum of a
    number times a sum.

    All ways from z lead through it where they lead through the predictor, which sees nothing else
    of z.
    """
    made = {v: e for e in jaxpr.eqns for v in e.outvars}

    def behind(v):
        return next(first[x] for x in made[v].invars if not isinstance(x, Literal) and x in how)

    while variable in made and made[variable].primitive.name == "neg":
        variable = behind(variable)
    scaled = variable
    while scaled in made and _is_known_multiple(made[scaled]):
        scaled = behind(scaled)
    is_sum = scaled in made and made[scaled].primitive.name in _SUMS
    return scaled if is_sum else variable


def _is_known_multiple(equation) -> bool:
    name, factors = equation.primitive.name, [isinstance(v, Literal) for v in equation.invars]
    return name == "neg" or (name == "mul" and any(factors)) or (name == "div" and factors[1])


def dependences(jaxpr, num_z: int) -> dict:
    """{variable: how it depends on z}."""
    known = {v: Dependence.affine for v in jaxpr.invars[:num_z]}

    def of(variable):
        if isinstance(variable, Literal):
            return Dependence.constant
        return known.get(variable, Dependence.constant)

    for equation in jaxpr.eqns:
        found = of_equation(equation, [of(v) for v in equation.invars])
        known |= dict(zip(equation.outvars, found, strict=True))
    return {v: d for v, d in known.items() if d > Dependence.constant}


def _wrapped(jaxpr, index) -> list:
    """The variables x of where(x < 0, x + size, x), JAX's own, on the way to an index."""
    made = {v: (e.primitive.name, e.invars[0]) for e in jaxpr.eqns for v in e.outvars if e.invars}
    by = lambda v, name, x: not isinstance(v, Literal) and made.get(v) == (name, x)  # noqa: E731
    steps = (e for e in needed(jaxpr, jaxpr.constvars, [index]) if e.primitive.name == "select_n")
    choices = (e.invars[:3] for e in steps if not isinstance(e.invars[1], Literal))
    return [x for sign, x, moved in choices if by(sign, "lt", x) and by(moved, "add", x)]


def _inputs_of(jaxpr) -> dict:
    """{variable: places of the inputs that it is computed from}."""
    found = {v: {i} for i, v in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        into = [found.get(v, set()) for v in equation.invars if not isinstance(v, Literal)]
        found |= dict.fromkeys(equation.outvars, set().union(*into))
    return found


def _room(variable, how: Dependence, axis: int | None) -> float:
    """Functions a datum of an array that may be a predictor."""
    aval = variable.aval
    is_affine = how is Dependence.affine and jnp.issubdtype(aval.dtype, jnp.floating)
    if not is_affine or axis is None or 0 in aval.shape:
        return UNBOUNDED
    return float(aval.size // aval.shape[axis])


UNBOUNDED = float("inf")


class Flow:
    """Maximal flow through arrays, each of which lets as much through as it has room (Edmonds &
    Karp 1972); an array is an entry and an exit.
    """

    def __init__(self, order, room):
        self.order, self.left = order, {}
        for v in order:
            self._edge((v, 0), (v, 1), room[v])

    def _edge(self, a, b, capacity):
        self.left.setdefault(a, {})[b] = capacity
        self.left.setdefault(b, {}).setdefault(a, 0)

    def join(self, v, w):
        """w is computed from v."""
        self._edge((v, 1), (w, 0), UNBOUNDED)

    def cut(self, sources, sinks) -> list | None:
        """The arrays of the smallest cut nearest to the sinks."""
        for v in sources:
            self._edge("z", (v, 0), UNBOUNDED)
        for v in sinks:
            self._edge((v, 1), "out", UNBOUNDED)
        if "z" not in self.left or "out" not in self.left:
            return []
        while "out" in (before := self._reached()):
            if not self._push(before):
                return None
        behind = self._reaching()
        return [v for v in self.order if (v, 0) not in behind and (v, 1) in behind]

    def _reached(self) -> dict:
        """{node: the node before it} of what has room left from z."""
        before: dict[Any, Any] = {"z": None}
        front: deque[Any] = deque(["z"])
        while front:
            node = front.popleft()
            for other, room in self.left[node].items():
                if room > 0 and other not in before:
                    before[other] = node
                    front.append(other)
        return before

    def _reaching(self) -> set:
        """The nodes from which there is room left to the sinks."""
        found, front = {"out"}, deque(["out"])
        while front:
            node = front.popleft()
            for other in self.left[node]:  # every edge has its reverse
                if other not in found and self.left[other][node] > 0:
                    found.add(other)
                    front.append(other)
        return found

    def _push(self, before) -> bool:
        path, node = [], "out"
        while before[node] is not None:
            path.append((before[node], node))
            node = before[node]
        amount = min(self.left[a][b] for a, b in path)
        if amount == UNBOUNDED:
            return False
        for a, b in path:
            self.left[a][b] -= amount
            self.left[b][a] += amount
        return True
