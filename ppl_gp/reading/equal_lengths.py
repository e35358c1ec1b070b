"""Which axes of a function's arguments must have one length, read off its jaxpr: they meet in a
sum, a product, a contraction. A proof: at another length of one of them alone the function raises.

What is not known (loops, sorting, a part of an axis) tells nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal

from ppl_gp.gp import GP, unwrap
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.dependence import called
from ppl_gp.reading.digest import arrays_of
from ppl_gp.reading.growth import (
    ARGUMENT,
    SITE,
    Look,
    named_trace,
)
from ppl_gp.reading.interactions import _ELEMENTWISE, _LINEAR, _MULTIPLES

Axis = tuple[str, int]  # (argument, its axis)
_EACH = _ELEMENTWISE | _LINEAR | _MULTIPLES | {"convert_element_type", "select_n"}
_RESHAPES = {"reshape", "squeeze", "expand_dims"}


class SameLength:
    """Groups of axes. What an array's axes are, is a tuple of an `Axis` or `None` for each."""

    def __init__(self):
        self._above: dict[Axis, Axis] = {}

    def group(self, axis: Axis) -> Axis:
        """What stands for all that have its length."""
        while axis in self._above:
            axis = self._above[axis]
        return axis

    def join(self, a: Axis | None, b: Axis | None) -> Axis | None:
        """They have one length."""
        if a is None or b is None:
            return a or b
        a, b = self.group(a), self.group(b)
        if a != b:
            self._above[a] = b
        return b

    def read(self, function: Callable, named: dict[str, Any]):
        """The outputs of `function(named)` with each array replaced by what its axes are, and None
        for each axis of one entry or of a length of its own. One trace.
        """
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(named)
        given = [x for name in sorted(named) for x in _own(name, named[name])]  # as JAX sorts keys
        out = self._follow(closed.jaxpr, given)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    def _follow(self, jaxpr, given: list[tuple]) -> list[tuple]:
        known = dict(zip(jaxpr.invars, given, strict=True))

        def of(v) -> tuple:
            nothing = (None,) * len(v.aval.shape)
            return nothing if isinstance(v, Literal) else known.get(v, nothing)

        for equation in jaxpr.eqns:
            into, inner = [of(v) for v in equation.invars], called(equation)
            if inner is not None:
                known.update(zip(equation.outvars, self._follow(inner, into), strict=True))
            elif len(equation.outvars) == 1:
                (out,) = equation.outvars
                known[out] = _without_ones(self._step(equation, into), out.aval.shape)
        return [of(v) for v in jaxpr.outvars]

    def _step(self, equation, into: list[tuple]) -> tuple | None:
        """The axes of what an equation computes; None where that is not known."""
        name, params = equation.primitive.name, equation.params
        shape = equation.outvars[0].aval.shape
        if name in _EACH:
            whole = [a for a in into if len(a) == len(shape)]  # others are numbers
            return tuple(self._all(axes) for axes in zip(*whole, strict=True))
        if name == "dot_general":
            return self._contracted(params["dimension_numbers"], *into)
        if name in _RESHAPES:
            return _reshaped(equation.invars[0].aval.shape, into[0], shape)
        if name == "broadcast_in_dim":
            at = dict(zip(params["broadcast_dimensions"], into[0], strict=True))
            return tuple(at.get(i) for i in range(len(shape)))
        if name == "transpose":
            return tuple(into[0][i] for i in params["permutation"])
        if name.startswith("reduce_") and "axes" in params:
            return tuple(a for i, a in enumerate(into[0]) if i not in params["axes"])
        if name == "gather":
            rows = iter(into[1][:-1])  # entries that are looked up, one an index
            slices = params["dimension_numbers"].offset_dims
            return tuple(None if i in slices else next(rows) for i in range(len(shape)))
        return None

    def _all(self, axes) -> Axis | None:
        found = None
        for axis in axes:
            found = self.join(found, axis)
        return found

    def _contracted(self, dimensions, left: tuple, right: tuple) -> tuple:
        (summed, batch) = dimensions
        for i, j in zip(*summed, strict=True):
            self.join(left[i], right[j])
        both = tuple(self.join(left[i], right[j]) for i, j in zip(*batch, strict=True))
        free = [
            tuple(a for i, a in enumerate(axes) if i not in (*summed[k], *batch[k]))
            for k, axes in enumerate((left, right))
        ]
        return (*both, *free[0], *free[1])


def _own(name: str, tree) -> list[tuple]:
    """Of an argument, or of each array of one that is a tree (a network)."""
    arrays = jax.tree.leaves(tree)
    names = [name] if len(arrays) == 1 else [f"{name}[{i}]" for i in range(len(arrays))]
    return [
        _without_ones(tuple((k, i) for i in range(len(x.shape))), x.shape)
        for k, x in zip(names, arrays, strict=True)
    ]


def _without_ones(axes: tuple | None, shape) -> tuple:
    """An axis of one entry fits any length."""
    axes = (None,) * len(shape) if axes is None else axes
    return tuple(a if n != 1 else None for a, n in zip(axes, shape, strict=True))


def _reshaped(before, axes: tuple, after) -> tuple | None:
    """Where only axes of one entry come or go."""
    kept = [(n, a) for n, a in zip(before, axes, strict=True) if n != 1]
    if [n for n, _ in kept] != [n for n in after if n != 1]:
        return None
    rest: Any = iter(a for _, a in kept)
    return tuple(next(rest) if n != 1 else None for n in after)


def tied(model, leaves: Leaves, base: Look) -> dict[Axis, Axis]:
    """{(path, axis): what stands for all of its length}, of arrays' axes of several entries. One
    abstract trace; nothing of a model that looks at values.
    """
    arrays = leaves.arrays
    named, trace_at = named_trace(model, leaves, base, arrays)

    def parts(named):
        sites = {k: unwrap(s["fn"]) for k, s in trace_at(named).items()}
        inputs = {k: fn.X for k, fn in sites.items() if isinstance(fn, GP)}
        rest = {k: fn for k, fn in sites.items() if not isinstance(fn, GP)}
        return inputs, arrays_of(rest)

    axes = SameLength()
    try:
        inputs, _ = axes.read(parts, named)
    except jax.errors.JAXTypeError:
        return {}
    for name, at in inputs.items():
        if SITE + name not in named:  # observed itself
            continue
        axes.join(at[0], (SITE + name, len(named[SITE + name].shape) - 1))
    return {
        (p, i): axes.group((ARGUMENT + p, i))
        for p, x in arrays.items()
        for i, n in enumerate(x.shape)
        if n > 1
    }
