"""Proof that a function is affine, read off its jaxpr: values at a few points prove nothing (min(f,
2) looks straight below 2).

Between the argument and an output only operations that are linear in what depends on the argument
are allowed; whatever is not on the list counts as curved. So a proof is a proof, and its failure
says nothing: the caller takes the general way.
"""

from collections.abc import Callable
from enum import IntEnum

import jax
import jax.numpy as jnp
from jax.extend.core import Literal


class Dependence(IntEnum):
    """How a value depends on the argument."""

    constant = 0
    affine = 1
    exponential = 2  # c exp(affine), c a constant
    unknown = 3


# Linear in all operands together.
_LINEAR = frozenset(
    """
    add sub add_any neg broadcast_in_dim reshape transpose slice squeeze expand_dims concatenate
    stack split fft complex real imag conj
    pad rev reduce_sum cumsum tile copy copy_p optimization_barrier
    """.split()
)
# Linear in the first and the third together, where the second, the places, does not depend.
_SCATTERS = {"scatter", "scatter-add", "scatter-sub"}
# Entry by entry the same number, in another place.
_MOVES = frozenset(
    """
    broadcast_in_dim reshape transpose slice squeeze expand_dims tile copy copy_p
    optimization_barrier
    """.split()
)
# linear in the first operand, where no other depends on the argument
_FIRST_ONLY = {"div", "gather", "dynamic_slice"}
_CALLS = {
    "pjit",
    "jit",
    "closed_call",
    "core_call",
    "remat",
    "remat2",
    "checkpoint",
}  # not custom_jvp: its tangent need not be its slope


def dependence(function: Callable, x: jax.Array) -> tuple[Dependence, ...]:
    """How each output array of `function` (leaves in order) depends on x.

    x, and whatever the function closes over, may be tracers: it is decided while tracing. Cost: one
    trace, nothing is computed.
    """
    closed = jax.make_jaxpr(function)(x)
    return _outputs(closed.jaxpr, [Dependence.affine] * len(closed.jaxpr.invars))


def _outputs(jaxpr, inputs) -> tuple[Dependence, ...]:
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variable):
        return (
            Dependence.constant
            if isinstance(variable, Literal)
            else known.get(variable, Dependence.constant)
        )

    for equation in jaxpr.eqns:
        found = of_equation(equation, [of(v) for v in equation.invars])
        known.update(zip(equation.outvars, found, strict=True))
    return tuple(of(v) for v in jaxpr.outvars)


def of_equation(equation, operands):
    """The dependence of the outputs of an equation of a jaxpr."""
    if max(operands, default=Dependence.constant) is Dependence.constant:
        return [Dependence.constant] * len(equation.outvars)
    name = equation.primitive.name
    if name in _CALLS:
        if (inner := _inner(equation.params)) is not None and len(inner.invars) == len(operands):
            return _outputs(inner, operands)
        return [Dependence.unknown] * len(equation.outvars)
    if name in _WITH_JAXPRS:
        return _WITH_JAXPRS[name](equation, operands)
    return [_of_primitive(name, operands, equation)] * len(equation.outvars)


def _of_scan(equation, operands):
    """A loop of a fixed number of steps: what its carry depends on, found by going round until it
    stays.
    """
    inner = equation.params["jaxpr"].jaxpr
    # JAX counts them under other names in each version: what a step takes or gives one entry of
    # has an axis more outside
    entries = _with_an_axis_less(equation.invars, inner.invars)
    carries = len(inner.outvars) - _with_an_axis_less(equation.outvars, inner.outvars)
    consts, given = len(inner.invars) - carries - entries, list(operands)
    while True:
        found = _outputs(inner, given)
        carry = [max(a, b) for a, b in zip(given[consts:], found[:carries], strict=False)]
        if carry == given[consts : consts + carries]:
            return list(found)
        given[consts : consts + carries] = carry


def _with_an_axis_less(outer, inner) -> int:
    return sum(a.aval.ndim == b.aval.ndim + 1 for a, b in zip(outer, inner, strict=True))


def _of_cond(equation, operands):
    """Branches, chosen by what must not depend on the argument."""
    branches = [_outputs(b.jaxpr, operands[1:]) for b in equation.params["branches"]]
    if operands[0] > Dependence.constant:
        return [Dependence.unknown] * len(branches[0])
    return [_either(kinds) for kinds in zip(*branches, strict=True)]


def _either(kinds) -> Dependence:
    """Of one of several, whichever: a constant is no exponential times a constant."""
    known = set(kinds)
    if Dependence.exponential in known and len(known) > 1:
        return Dependence.unknown
    return max(kinds)


def _of_linear_solve(equation, operands):
    """By the function that solves: factors that do not depend on the argument and triangular
    solves, say.
    """
    params = equation.params
    before, num = params["const_lengths"], len(params["jaxprs"].matvec.jaxpr.outvars)
    start = before.matvec + before.vecmat
    consts, right = operands[start : start + before.solve], operands[-num:]
    return list(_outputs(params["jaxprs"].solve.jaxpr, [*consts, *right]))


_WITH_JAXPRS = {"scan": _of_scan, "cond": _of_cond, "custom_linear_solve": _of_linear_solve}


def _of_primitive(name, operands, equation):
    depending = [i for i, d in enumerate(operands) if d > Dependence.constant]
    highest = max(operands)
    if name == "exp" and highest is Dependence.affine:
        return Dependence.exponential
    if highest is Dependence.exponential:
        alone = len(depending) == 1
        kept = (
            name in _MOVES
            or (name == "mul" and alone)
            or (name in _FIRST_ONLY and depending == [0])
        )
        return highest if kept else Dependence.unknown
    linear = (
        name in _LINEAR
        or (name in ("mul", "dot_general", "conv_general_dilated") and len(depending) == 1)
        or (name in _FIRST_ONLY and depending == [0])
        or (name in _SCATTERS and 1 not in depending)
        or (name == "triangular_solve" and depending == [1])
        or (name == "integer_pow" and equation.params["y"] == 1)
        # the choice itself must not depend on the argument
        or (name == "select_n" and depending[0] > 0)
        or (
            name == "convert_element_type"
            and jnp.issubdtype(equation.params["new_dtype"], jnp.inexact)
        )
    )
    return highest if linear else Dependence.unknown


def _inner(params):
    inner = next((params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in params), None)
    return getattr(inner, "jaxpr", inner)
