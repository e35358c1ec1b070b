"""Proof that each entry of an array sees at most one entry of z, and which: value = constant +
weight z[index].

Read off the jaxpr as `reading.affine` is: moves of entries (a gather by group, a reshape, a where
whose condition does not depend on z) move index and weight alike, and products with what does not
depend on z change the weight. Whatever else meets z is no proof.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import Array, Float, Int

_MOVES = frozenset(
    "broadcast_in_dim reshape transpose slice squeeze expand_dims rev gather dynamic_slice".split()
)
_SAME = frozenset("copy copy_p optimization_barrier".split())


class OneEach(NamedTuple):
    """What each entry of an array sees of z: weight z[index], z flat. A weight is zero where it
    sees nothing.
    """

    index: Int[Array, "..."]
    weight: Float[Array, "..."]


class Step(NamedTuple):
    """An equation that can be followed: `apply(parts, values)` of its inputs, each `OneEach` where
    it depends on z, else its value.
    """

    equation: Any
    apply: Callable


def steps_of(equations, source) -> list[Step] | None:
    """How the equations carry what depends on the variable `source`; `None` where one is not on the
    list.
    """
    depending, found = {source}, []
    for equation in equations:
        which = [not isinstance(v, Literal) and v in depending for v in equation.invars]
        if not any(which):
            continue
        if (apply := _rule(equation, which)) is None:
            return None
        found.append(Step(equation, apply))
        depending.update(equation.outvars)
    return found


def followed(steps: list[Step], source, values: dict) -> dict:
    """{variable: `OneEach`} along the steps; `values`: of what does not depend on z."""
    num = source.aval.size
    known = {
        source: OneEach(
            jnp.reshape(jnp.arange(num, dtype=jnp.int32), source.aval.shape),
            jnp.ones(source.aval.shape, source.aval.dtype),
        )
    }
    for equation, apply in steps:
        inputs = [
            v.val if isinstance(v, Literal) else known.get(v, values.get(v))
            for v in equation.invars
        ]
        known[equation.outvars[0]] = apply(inputs)
    return known


def _rule(equation, which: list[bool]) -> Callable | None:
    name, one = equation.primitive.name, sum(which) == 1
    shapes = {v.aval.shape for v in equation.invars}
    if name in _MOVES and one and which[0]:
        return lambda inputs: _moved(equation, inputs)
    if name in _SAME and one:
        return lambda inputs: inputs[0]
    to = equation.params.get("new_dtype")
    if name == "convert_element_type" and jnp.issubdtype(to, jnp.floating):
        return lambda inputs: inputs[0]._replace(weight=inputs[0].weight.astype(to))
    if name == "neg":
        return lambda inputs: _weighed(inputs[0], -1.0)
    keeps = equation.outvars[0].aval.shape == equation.invars[which.index(True)].aval.shape
    if name in ("add", "sub", "add_any") and one and keeps:
        sign = -1.0 if name == "sub" and which[1] else 1.0
        return lambda inputs: _weighed(inputs[which.index(True)], sign)
    if name == "mul" and one and keeps:
        return lambda inputs: _weighed(inputs[which.index(True)], inputs[which.index(False)])
    if name == "div" and which == [True, False] and keeps:
        return lambda inputs: _weighed(inputs[0], 1.0 / inputs[1])
    if name == "select_n" and not which[0] and len(shapes) == 1:
        return lambda inputs: _chosen(equation, inputs)
    if name == "concatenate":
        return lambda inputs: _joined(equation, inputs)
    return None


def _weighed(x: OneEach, by) -> OneEach:
    return OneEach(x.index, x.weight * by)


def _bound(equation, *inputs):
    return equation.primitive.bind(*inputs, **equation.params)


def _moved(equation, inputs) -> OneEach:
    x, *rest = inputs
    return OneEach(*(_bound(equation, part, *rest) for part in x))


def _nothing(x, like) -> OneEach:
    return OneEach(jnp.zeros(jnp.shape(x), jnp.int32), jnp.zeros(jnp.shape(x), like))


def _chosen(equation, inputs) -> OneEach:
    condition, *cases = inputs
    dtype = equation.outvars[0].aval.dtype
    cases = [x if isinstance(x, OneEach) else _nothing(x, dtype) for x in cases]
    return OneEach(*(_bound(equation, condition, *parts) for parts in zip(*cases, strict=True)))


def _joined(equation, inputs) -> OneEach:
    dtype = equation.outvars[0].aval.dtype
    pieces = [x if isinstance(x, OneEach) else _nothing(x, dtype) for x in inputs]
    return OneEach(*(_bound(equation, *parts) for parts in zip(*pieces, strict=True)))
