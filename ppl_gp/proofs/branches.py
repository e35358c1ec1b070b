"""Whether a function's course depends on the values that it is given: comparisons, clips, absolute
values, roundings, read off its jaxpr.

A function that decides nothing is analytic where it is finite, and a few values far apart tell what
it is; of one that does, what holds there says nothing about the values between.
"""

import jax
import jax.extend
from jax.extend.core import Literal

from ppl_gp.proofs.dependence import called

_DECIDING = {"lt", "le", "gt", "ge", "eq", "ne", "max", "min", "clamp", "abs", "sign"}
_DECIDING |= {"floor", "ceil", "round", "rem", "argmax", "argmin", "sort", "reduce_max"}
_DECIDING |= {"reduce_min", "cummax", "cummin", "cond", "while"}


def decides(function, x, rest) -> bool:
    """Whether any step of function(x, rest) that depends on x is one whose course its values
    decide. Of loops and branches every step counts. Abstract: nothing is computed.
    """
    jaxpr = jax.make_jaxpr(function)(x, rest).jaxpr
    num = len(jax.tree.leaves(x))
    return _found(jaxpr, [i < num for i in range(len(jaxpr.invars))])[0]


def _found(jaxpr, given: list[bool]) -> tuple[bool, list[bool]]:
    """(whether there is such a step, which outputs depend on the given inputs)."""
    known = dict(zip(jaxpr.invars, given, strict=True))

    def of(variable) -> bool:
        return not isinstance(variable, Literal) and known.get(variable, False)

    found = False
    for equation in jaxpr.eqns:
        into = [of(v) for v in equation.invars]
        inner = called(equation)
        if inner is None:
            out = [any(into)] * len(equation.outvars)
            found |= any(into) and _is_deciding(equation)
        else:
            decided, out = _found(inner, into)
            found |= decided
        known.update(zip(equation.outvars, out, strict=True))
    return found, [of(v) for v in jaxpr.outvars]


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
