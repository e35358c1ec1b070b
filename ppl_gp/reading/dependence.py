"""What is computed from what, read off a function's jaxpr: a proof of independence, whatever the
values are; and whether a function's course depends on the values that it is given: comparisons,
clips, absolute values, roundings.

A function that decides nothing is analytic where it is finite, and a few values far apart tell what
it is, unless it is nearly flat at all of them (a narrow bump); of one that does, what holds there
says nothing about the values between.
"""

import math
from typing import Any

import jax
import jax.extend
from jax.extend.core import Literal

# Primitives that call one jaxpr with their own inputs.
_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "checkpoint",
)


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
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(named)
    # as JAX sorts a dictionary's keys
    names = [name for name in sorted(named) for _ in jax.tree.leaves(named[name])]
    flow = _flow(jaxpr.jaxpr, [frozenset([name]) for name in names])
    return jax.tree.unflatten(jax.tree.structure(shapes), flow)


def _flow(jaxpr, given: list[frozenset]) -> list[frozenset]:
    """The sources of a jaxpr's outputs from those of its inputs. A called function is entered; a
    loop counts as a whole.
    """
    known = dict(zip(jaxpr.invars, given, strict=True))

    def of(variable) -> frozenset:
        return (
            frozenset()
            if isinstance(variable, jax.extend.core.Literal)
            else known.get(variable, frozenset())
        )

    for equation in jaxpr.eqns:
        into = [of(v) for v in equation.invars]
        inner = called(equation)
        out = (
            [frozenset().union(*into)] * len(equation.outvars)
            if inner is None
            else _flow(inner, into)
        )
        known.update(zip(equation.outvars, out, strict=True))
    return [of(v) for v in jaxpr.outvars]


def called(equation):
    """The jaxpr of a function that an equation calls with its own inputs, or `None`."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    if (
        equation.primitive.name not in _CALLS
        or inner is None
        or len(inner.invars) != len(equation.invars)
    ):
        return None
    return inner


_DECIDING = {"lt", "le", "gt", "ge", "eq", "ne", "max", "min", "clamp", "abs", "sign"}
_DECIDING |= {"floor", "ceil", "round", "rem", "argmax", "argmin", "sort", "reduce_max"}
_DECIDING |= {"reduce_min", "cummax", "cummin", "cond", "while"}


def decides(function, x, rest) -> bool:
    """Whether any step of function(x, rest) that depends on x, and that the result depends on, is
    one whose course its values decide. Of loops and branches every step counts. Abstract: nothing
    is computed.
    """
    jaxpr = jax.make_jaxpr(function)(x, rest).jaxpr
    num = len(jax.tree.leaves(x))
    given = [i < num for i in range(len(jaxpr.invars))]
    return _found(jaxpr, given, [True] * len(jaxpr.outvars))[0]


def num_entries(function, x, rest) -> int:
    """The entries that all steps of function(x, rest) compute, one at least: its cost, roughly."""
    return max(_entries(jax.make_jaxpr(function)(x, rest).jaxpr), 1)


def _entries(jaxpr) -> int:
    own = sum(math.prod(v.aval.shape) for e in jaxpr.eqns for v in e.outvars)
    return own + sum(_entries(inner) for e in jaxpr.eqns for inner in _inner(e))


def _found(jaxpr, given: list[bool], wanted: list[bool]) -> tuple[bool, list[bool]]:
    """(whether there is such a step on the way to the wanted outputs, which outputs depend on the
    given inputs).
    """
    known = dict(zip(jaxpr.invars, given, strict=True))
    used = _used(jaxpr, wanted)

    def of(variable) -> bool:
        return not _literal(variable) and known.get(variable, False)

    found = False
    for equation in jaxpr.eqns:
        into = [of(v) for v in equation.invars]
        inner = called(equation)
        if inner is None:
            out = [any(into)] * len(equation.outvars)
            found |= any(into) and _reaches(equation, used) and _is_deciding(equation)
        else:
            decided, out = _found(inner, into, [v in used for v in equation.outvars])
            found |= decided
        known.update(zip(equation.outvars, out, strict=True))
    return found, [of(v) for v in jaxpr.outvars]


def _used(jaxpr, wanted: list[bool]) -> set:
    """The variables that the wanted outputs are made of. NumPyro's checks of parameters, whose
    answers nothing uses under a transformation, are not among them.
    """
    used = {v for v, w in zip(jaxpr.outvars, wanted, strict=True) if w and not _literal(v)}
    for equation in reversed(jaxpr.eqns):
        if _reaches(equation, used):
            used |= {v for v in equation.invars if not _literal(v)}
    return used


def _reaches(equation, used: set) -> bool:
    return any(v in used for v in equation.outvars)


def _literal(variable) -> bool:
    return isinstance(variable, Literal)


def _is_deciding(equation) -> bool:
    name, into = equation.primitive.name, equation.invars
    if name in _DECIDING:
        return not (name in ("eq", "ne") and into[0] is into[1])  # x != x asks for NaN
    if name == "convert_element_type":
        kinds = [v.aval.dtype.kind for v in (into[0], equation.outvars[0])]
        return kinds[0] in "fc" and kinds[1] in "iub"
    return any(_is_deciding(e) for inner in _inner(equation) for e in inner.eqns)


def _inner(equation) -> list:
    """The jaxprs of a loop."""
    leaves = jax.tree.leaves(
        list(equation.params.values()),
        is_leaf=lambda x: isinstance(x, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr),
    )
    return [getattr(x, "jaxpr", x) for x in leaves if hasattr(getattr(x, "jaxpr", x), "eqns")]
