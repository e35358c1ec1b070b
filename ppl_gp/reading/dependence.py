"""What is computed from what, read off a function's jaxpr: a proof of independence, whatever the
values are; and whether a function's course depends on the values that it is given: comparisons,
clips, absolute values, roundings.

A function that decides nothing is analytic where it is finite, and a few values far apart tell what
it is, unless it is nearly flat at all of them (a narrow bump); of one that does, what holds there
says nothing about the values between.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax

from ppl_gp.reading.walk import Rules, Walk, jaxprs_of


def depends(function, x) -> bool:
    """Whether any output of `function` is computed from x."""
    return any(jax.tree.leaves(reached(function, x)))


def reached(function, x):
    """The outputs of `function` with each array replaced by whether it is computed from x. Tracers
    are fine.
    """
    return jax.tree.map(
        bool,
        sources(lambda named: function(named["x"]), {"x": x}),
        is_leaf=lambda s: isinstance(s, frozenset),
    )


def sources(function, named: dict[str, Any]):
    """The outputs of `function(named)` with each array replaced by the names in `named`, a
    frozenset, that it is computed from.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(named)
    # as JAX sorts a dictionary's keys
    names = [name for name in sorted(named) for _ in jax.tree.leaves(named[name])]
    flow = Walk(_Sources()).closed(closed, [frozenset([name]) for name in names])
    return jax.tree.unflatten(jax.tree.structure(shapes), flow)


class _Sources(Rules):
    none = frozenset()

    def either(self, values: Sequence[frozenset]) -> frozenset:
        return frozenset().union(*values)

    def chosen(self, by: frozenset, value: frozenset) -> frozenset:
        return by | value

    def primitive(self, equation, into: list[frozenset]) -> list[frozenset]:
        return [frozenset().union(*into)] * len(equation.outvars)


_DECIDING = {"lt", "le", "gt", "ge", "eq", "ne", "max", "min", "clamp", "abs", "sign"}
_DECIDING |= {"floor", "ceil", "round", "rem", "argmax", "argmin", "sort", "reduce_max"}
_DECIDING |= {"reduce_min", "cummax", "cummin", "cond", "while"}


def decides(function, x, rest) -> bool:
    """Whether any step of function(x, rest) that depends on x, and that the result depends on, is
    one whose course its values decide. Of loops and branches every step counts. Abstract: nothing
    is computed.
    """
    closed, num = jax.make_jaxpr(function)(x, rest), len(jax.tree.leaves(x))
    rules = _Decisions()
    given = [frozenset(["x"] * (i < num)) for i in range(len(closed.jaxpr.invars))]
    Walk(rules).closed(closed, given)
    return rules.found


class _Decisions(_Sources):
    """`found`: whether such a step was met."""

    whole = frozenset({"scan", "while", "cond", "custom_linear_solve"})
    found = False

    def primitive(self, equation, into: list[frozenset]) -> list[frozenset]:
        self.found |= any(into) and _is_deciding(equation)
        return super().primitive(equation, into)


def num_entries(function, x, rest) -> int:
    """The entries that all steps of function(x, rest) compute, one at least: its cost, roughly."""
    return max(_entries(jax.make_jaxpr(function)(x, rest).jaxpr), 1)


def _entries(jaxpr) -> int:
    own = sum(math.prod(v.aval.shape) for e in jaxpr.eqns for v in e.outvars)
    return own + sum(_entries(inner) for e in jaxpr.eqns for inner in jaxprs_of(e))


def _is_deciding(equation) -> bool:
    name, into = equation.primitive.name, equation.invars
    if name in _DECIDING:
        return not (name in ("eq", "ne") and into[0] is into[1])  # x != x asks for NaN
    if name == "convert_element_type":
        kinds = [v.aval.dtype.kind for v in (into[0], equation.outvars[0])]
        return kinds[0] in "fc" and kinds[1] in "iub"
    return any(_is_deciding(e) for inner in jaxprs_of(equation) for e in inner.eqns)
