"""The linear predictors of a function, read off its jaxpr: the fewest arrays, affine in z, through
which alone it sees z.

A model sees its Gaussian sites z = (f, beta, u ...) through eta = f + X beta + u[group], say: a cut
of the graph of its operations. Among the arrays that are affine in z (`reading.dependence`, a
proof) and hold one entry per datum, the smallest cut is found by maximal flow, each array counting
as many as it has functions a datum; of equal ones the nearest to the outputs, offsets included. The
sign of one function, or a known factor of a sum, counts as the link's. Rows are proved to see their
own entries alone (`reading.labels`), or the sites that see others are named.

Cost: one trace, and O(V^2 E) at worst for a graph of V arrays and E operations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from ppl_gp.reading.dependence import Affine, Dependence
from ppl_gp.reading.label_rules import LabelRules
from ppl_gp.reading.walk import Walk, needed

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
    coupled: tuple = ()  # why rows of each output see other rows' entries, or None, if some do

    @property
    def every(self) -> list:
        """The arrays of the flat jaxpr: its inputs, then what its operations give, in order."""
        return _variables(self.closed.jaxpr)

    @property
    def arrays(self) -> list:
        """The predictors, variables of `closed`."""
        return [self.every[i] for i in self.places]

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

    def below(self, etas, rest):
        """The function's outputs with the predictors given."""
        jaxpr = self.closed.jaxpr
        first, etas = _firsts(jaxpr, lambda i: None), dict(zip(self.arrays, etas, strict=True))
        given = {v: etas[first[v]] for v in _variables(jaxpr) if first[v] in etas}
        given |= dict(zip(jaxpr.invars[self.num_z :], jax.tree.leaves(rest), strict=True))
        return jax.tree.unflatten(self.tree, evaluated(self.closed, given, jaxpr.outvars))

    def smallest(
        self, data_axis: Callable, apart: frozenset[int] = frozenset()
    ) -> "Predictors | None":
        """The smallest cut, or `None` where there is none: where z enters a loop, say, or a kernel.

        `data_axis(i)`: the axis of the data of the i-th array, or `None`. `apart`: leaves of (z,
        rest), by their numbers, that no predictor may be computed from: observations, which new
        rows lack.
        """
        jaxpr = self.closed.jaxpr
        how, first = dependences(jaxpr, self.num_z), _firsts(jaxpr, data_axis)
        place = {v: i for i, v in enumerate(self.every)}
        order, inputs = [v for v in place if v in how and first[v] is v], _inputs_of(jaxpr)
        room = {v: _room(v, how[v], data_axis(place[v])) for v in order}
        room |= {v: None for v in order if not apart.isdisjoint(inputs[v])}
        edges = [
            (first[v], w)
            for equation in jaxpr.eqns
            for w in equation.outvars
            for v in equation.invars
            if w in room and not isinstance(v, Literal) and v in how
        ]
        sources = [v for v in jaxpr.invars[: self.num_z] if v in how]
        sinks = {first[v] for v in jaxpr.outvars if not isinstance(v, Literal) and v in how}
        found = least = _least(room, edges, sources, sinks)
        while found and (mixed := self._mixed(found, first, data_axis)[0]):
            room |= dict.fromkeys(mixed)
            found = _least(room, edges, sources, sinks)
        coupled = () if found else self._mixed(least or [], first, data_axis)[1]
        if (found := found or least) is None:
            return None
        own = (_unscaled(jaxpr, v, how, first) if room[v] == 1 else v for v in found)
        return self._replace(places=tuple(place[v] for v in own), coupled=coupled)

    def _mixed(self, found: list, first: dict, data_axis: Callable) -> tuple[list, tuple]:
        """(the arrays of a cut of which an output's row sees other rows' entries, `coupled`)."""
        inputs, labels, every = self.closed.jaxpr.invars, LabelRules(), self.every
        own = {v: labels.argument(v.aval.shape, free=True) for v in found}
        given = {v: labels.argument(v.aval.shape, free=False) for v in inputs}
        given |= {v: own[first[v]] for v in every if first[v] in own}
        part = _part(self.closed, list(given), self.closed.jaxpr.outvars)
        out = map(labels.entered, Walk(labels).closed(part, [*given.values()]))
        rows = {v: labels.group(x.axes[data_axis(every.index(v))]) for v, x in own.items()}
        seen = [*map(labels.others, out)]
        crossed = {a for x in seen for a in x if a in rows.values()}
        coupled = (next((c for a, c in x.items() if a in crossed), None) for x in seen)
        return [v for v, a in rows.items() if a in crossed], tuple(coupled)


def at_places(function: Callable, z, rest, places: tuple[int, ...] = ()) -> Predictors:
    """The predictors whose places are known, of the function with what it calls written out."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(z, rest)
    flat = jax.make_jaxpr(lambda *x: _entered(closed, x))(*jax.tree.leaves((z, rest)))
    return Predictors(flat, len(jax.tree.leaves(z)), places, jax.tree.structure(shape))


def _variables(jaxpr) -> list:
    return [*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)]


def evaluated(closed: ClosedJaxpr, given: dict, wanted) -> list:
    """The variables `wanted` from those `given`; nothing else is computed."""
    return jaxpr_as_fun(_part(closed, list(given), wanted))(*given.values())


def _part(closed: ClosedJaxpr, given: list, wanted) -> ClosedJaxpr:
    jaxpr = closed.jaxpr
    equations, _ = needed(jaxpr, wanted, {*given, *jaxpr.constvars})
    part = jaxpr.replace(invars=given, eqns=equations, outvars=list(wanted))
    return ClosedJaxpr(part, closed.consts)


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


def _unscaled(jaxpr, variable, how: dict, first: dict):
    """What a predictor is a known multiple of: the negated array of a negative, and the sum of a
    number times a sum. It cuts as well: the predictor sees nothing else of z.
    """
    made = {v: e for e in jaxpr.eqns for v in e.outvars}

    def behind(v):
        return next(first[x] for x in made[v].invars if not isinstance(x, Literal) and x in how)

    while variable in made and made[variable].primitive.name == "neg":
        variable = behind(variable)
    scaled = variable
    while scaled in made and _is_known_multiple(made[scaled]):
        scaled = behind(scaled)
    return scaled if scaled in made and made[scaled].primitive.name in _SUMS else variable


def _is_known_multiple(equation) -> bool:
    name, factors = equation.primitive.name, [isinstance(v, Literal) for v in equation.invars]
    return name == "neg" or (name == "mul" and any(factors)) or (name == "div" and factors[1])


def dependences(jaxpr, num_z: int) -> dict:
    """{variable: how it depends on z}."""
    known, walk = {v: Dependence.affine for v in jaxpr.invars[:num_z]}, Walk(Affine())

    def of(variable):
        if isinstance(variable, Literal):
            return Dependence.constant
        return known.get(variable, Dependence.constant)

    for equation in jaxpr.eqns:
        found = walk.step(equation, [of(v) for v in equation.invars])
        known |= dict(zip(equation.outvars, found, strict=True))
    return {v: d for v, d in known.items() if d > Dependence.constant}


def _wrapped(jaxpr, index) -> list:
    """The variables x of where(x < 0, x + size, x), JAX's own, on the way to an index."""
    made = {v: (e.primitive.name, e.invars[0]) for e in jaxpr.eqns for v in e.outvars if e.invars}
    by = lambda v, name, x: not isinstance(v, Literal) and made.get(v) == (name, x)  # noqa: E731
    steps = (e for e in needed(jaxpr, [index])[0] if e.primitive.name == "select_n")
    choices = (e.invars[:3] for e in steps if not isinstance(e.invars[1], Literal))
    return [x for sign, x, moved in choices if by(sign, "lt", x) and by(moved, "add", x)]


def _inputs_of(jaxpr) -> dict:
    """{variable: places of the inputs that it is computed from}."""
    found = {v: {i} for i, v in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        into = [found.get(v, set()) for v in equation.invars if not isinstance(v, Literal)]
        found |= dict.fromkeys(equation.outvars, set().union(*into))
    return found


def _room(variable, how: Dependence, axis: int | None) -> int | None:
    """Functions a datum of an array that may be a predictor; `None` of another one."""
    aval = variable.aval
    is_affine = how is Dependence.affine and jnp.issubdtype(aval.dtype, jnp.floating)
    may_be = is_affine and axis is not None and 0 not in aval.shape
    return aval.size // aval.shape[axis] if may_be else None


def _least(room: dict, edges, sources, sinks) -> list | None:
    """The arrays of the smallest cut nearest to the sinks, by maximal flow (Dinic 1970): an array
    is an entry and an exit, and lets as much through as it has room; `None` where none is finite.
    """
    entry = {v: 2 * i for i, v in enumerate(room)}
    start, z, end = (2 * len(room) + i for i in range(3))
    endless = min(1 + sum(n for n in room.values() if n is not None), np.iinfo(np.int32).max)
    flows = {(v, v + 1): min(room[x] or endless, endless) for x, v in entry.items()}
    beyond = [(entry[v] + 1, entry[w]) for v, w in edges]
    beyond += [(start, z), *((z, entry[v]) for v in sources), *((entry[v] + 1, end) for v in sinks)]
    flows |= dict.fromkeys(beyond, endless)
    size = 2 * len(room) + 3
    rows, columns = np.transpose(list(flows))
    graph = csr_array((np.array([*flows.values()], np.int32), (rows, columns)), (size, size))
    found = maximum_flow(graph, start, end)
    if found.flow_value >= endless:
        return None
    left = csr_array(graph - found.flow).T.tocsr()
    left.eliminate_zeros()
    behind = {*breadth_first_order(left, end, return_predecessors=False).tolist()}
    return [v for v, i in entry.items() if i not in behind and i + 1 in behind]
