"""Proof that a function is affine, or a polynomial, read off its jaxpr: values at a few points
prove nothing (min(f, 2) looks straight below 2).

Between the argument and an output only operations that are linear in what depends on the argument,
or products of it, are allowed; whatever is not on the list counts as curved. So a proof is a proof,
and its failure says nothing: the caller takes the general way.
"""

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ppl_gp.reading.walk import MOVES, Rules, Walk


class Dependence(IntEnum):
    """How a value depends on the argument."""

    constant = 0
    affine = 1
    exponential = 2  # c exp(affine), c a constant
    unknown = 3


_MOVES = MOVES | {"tile", "unstack", "optimization_barrier"}
# Linear in all operands together.
_LINEAR = _MOVES | frozenset(
    """
    add sub add_any neg concatenate stack split fft complex real imag conj pad rev reduce_sum
    cumsum reduce_precision
    """.split()
)
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}
# {operation: the operands that it is linear in, if no other depends on the argument}
_IN_SOME = {"div": {0}, "gather": {0}, "dynamic_slice": {0}, "triangular_solve": {1}}
_IN_SOME |= {"scatter": {0, 2}, "scatter-add": {0, 2}, "scatter-sub": {0, 2}}


def dependence(function: Callable, x: jax.Array) -> tuple[Dependence, ...]:
    """How each output array of `function` (leaves in order) depends on x. Decided while tracing: x,
    and what the function encloses, may be tracers. One trace, nothing is computed.
    """
    return tuple(_walked(Affine(), function, x, Dependence.affine))


def _walked(rules, function: Callable, x, own) -> list:
    """What a walk with these rules says of the outputs; `own`: the value of x."""
    closed = jax.make_jaxpr(function)(x)
    return Walk(rules).closed(closed, [own] * len(closed.jaxpr.invars))


def bend(function: Callable, x) -> tuple[str, Any] | None:
    """(the first operation that is not proved affine in x, its source info); None if all are."""
    rules = Affine()
    _walked(rules, function, x, Dependence.affine)
    return rules.first


def degree(function: Callable, x) -> float:
    """An upper bound of the degree of `function` in the entries of x, infinity where nothing is
    proved; for other arguments of any values. One trace, no evaluation.
    """
    return max(_walked(_Degrees(), function, x, 1.0), default=0.0)


def _is_linear(equation, depending: list[int]) -> bool:
    """In the operands that depend on the argument, together."""
    name = equation.primitive.name
    if name == "convert_element_type":
        return jnp.issubdtype(equation.params["new_dtype"], jnp.inexact)
    if name == "select_n":  # the choice itself must not depend on the argument
        return depending[0] > 0
    alone = name in _PRODUCTS and len(depending) == 1
    return name in _LINEAR or alone or _IN_SOME.get(name, set()).issuperset(depending)


class _Proof(Rules):
    """Of numbers, 0 for what does not depend on the argument."""

    # a custom derivative need not be the function's slope
    whole = frozenset({"custom_jvp_call", "custom_vjp_call"})
    most: Any
    of: Callable[..., Any]  # (equation, into, depending) -> of one that the argument enters
    first: tuple[str, Any] | None = None  # operation that is not affine, and its source

    def either(self, values: Sequence):
        return max(values)

    def chosen(self, by, value):
        """Of a choice that must not depend on the argument."""
        return self.most if by else value

    def primitive(self, equation, into):
        depending = [i for i, d in enumerate(into) if d]
        found = self.of(equation, into, depending) if depending else self.none
        if found > Dependence.affine and self.first is None:
            self.first = equation.primitive.name, self.source
        return [found] * len(equation.outvars)


class Affine(_Proof):
    """The rules of a walk for `Dependence`."""

    none, most = Dependence.constant, Dependence.unknown

    def either(self, values: Sequence[Dependence]) -> Dependence:
        """A constant is no exponential times a constant."""
        known = set(values)
        is_mixed = Dependence.exponential in known and len(known) > 1
        return Dependence.unknown if is_mixed else max(values)

    def of(self, equation, into, depending) -> Dependence:
        name, highest = equation.primitive.name, max(into)
        if name == "exp" and highest is Dependence.affine:
            return Dependence.exponential
        if highest is Dependence.exponential:
            first = name in ("div", "gather", "dynamic_slice") and depending == [0]
            kept = name in _MOVES or first or (name == "mul" and len(depending) == 1)
            return highest if kept else Dependence.unknown
        one = name == "integer_pow" and equation.params["y"] == 1
        return highest if one or _is_linear(equation, depending) else Dependence.unknown


class _Degrees(_Proof):
    none, most = 0.0, math.inf

    def carried(self, value, equation, along: Sequence = ()):
        """More than linear, and a step more would be more."""
        return value if value <= 1.0 else math.inf

    def of(self, equation, into, depending) -> float:
        if _is_linear(equation, depending):
            return max(into)
        if equation.primitive.name in _PRODUCTS:
            return sum(into)
        return into[0] * _exponent(equation) if depending == [0] else math.inf


def _exponent(equation) -> float:
    """Of a power with a whole, constant exponent that is not negative."""
    name, power = equation.primitive.name, None
    if name in ("square", "integer_pow"):
        power = equation.params.get("y", 2)
    if name == "pow" and isinstance(equation.invars[1], Literal):
        power = float(equation.invars[1].val)
    return float(power) if power is not None and power >= 0 and power == int(power) else math.inf
