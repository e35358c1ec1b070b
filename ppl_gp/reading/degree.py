"""The degree of a function as a polynomial, proved on its jaxpr: no value is looked at, so that no
kink is missed.
"""

import math

import jax
from jax.extend import core

# The highest degree of the arguments is the result's.
_LINEAR = frozenset(
    """
    add add_any sub neg broadcast_in_dim reshape transpose reduce_sum cumsum squeeze expand_dims
    slice concatenate stack copy rev pad split tile reduce_precision
    """.split()
)
_PRODUCTS = {"mul", "dot_general"}
# The first argument counts, if the others do not depend on x.
_INDEXING = {"div", "gather", "dynamic_slice"}
# The first and the third count, if the second, the places, does not depend on x.
_SCATTERS = {"scatter", "scatter-add", "scatter-sub"}
# The first argument must not depend on x.
_CHOICES = {"select_n"}


def degree(function, x) -> float:
    """An upper bound of the degree of `function` in the entries of x; infinity where nothing is
    proved.

    For fixed other arguments, of any values. Sums, products, indexing and choices by what does not
    depend on x are followed; whatever else sees x (`min`, `abs`, `exp`, a loop) counts as infinite.
    One trace, no evaluation.
    """
    closed = jax.make_jaxpr(function)(x)
    return max(_outputs(closed.jaxpr, [1.0] * len(closed.jaxpr.invars)), default=0.0)


def _outputs(jaxpr, inputs) -> list[float]:
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(v):
        return 0.0 if isinstance(v, core.Literal) else known.get(v, 0.0)

    for equation in jaxpr.eqns:
        found = _of_equation(equation, [of(v) for v in equation.invars])
        known.update(zip(equation.outvars, found, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _of_equation(equation, d: list[float]) -> list[float]:
    num, name = len(equation.outvars), equation.primitive.name
    if not any(d):
        return [0.0] * num
    if name == "cond":
        branches = [_outputs(b.jaxpr, d[1:]) for b in equation.params["branches"]]
        return [math.inf] * num if d[0] else [max(x) for x in zip(*branches, strict=True)]
    if (inner := _called(equation, len(d))) is not None:
        return _outputs(inner, d)
    return [_of_primitive(name, equation, d)] * num


def _of_primitive(name: str, equation, d: list[float]) -> float:
    """Of a primitive that some argument of positive degree enters."""
    rest = max(d[1:], default=0.0)
    if name in _LINEAR:
        return max(d)
    if name in _PRODUCTS:
        return sum(d)
    if name in _INDEXING and not rest:
        return d[0]
    if name in _SCATTERS and not d[1]:
        return max(d)
    if name == "triangular_solve" and not d[0]:
        return d[1]
    if name in _CHOICES and not d[0]:
        return rest
    if name == "convert_element_type" and jax.numpy.issubdtype(
        equation.params["new_dtype"], jax.numpy.inexact
    ):
        return d[0]
    return math.inf if rest else d[0] * _exponent(name, equation)


def _exponent(name: str, equation) -> float:
    """Of a power with a whole, constant exponent that is not negative."""
    if name == "square":
        return 2.0
    power = equation.params.get("y") if name == "integer_pow" else None
    if name == "pow" and isinstance(equation.invars[1], core.Literal):
        power = float(equation.invars[1].val)
    return (
        float(power) if power is not None and power >= 0 and float(power).is_integer() else math.inf
    )


def _called(equation, num: int):
    """The jaxpr of a function that is called, with these very arguments."""
    if equation.primitive.name in ("while", "scan"):
        return None
    inner = [
        equation.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in equation.params
    ]
    jaxprs = [getattr(j, "jaxpr", j) for j in inner]
    return next((j for j in jaxprs if len(j.invars) == num), None)
