"""Proof that each entry of an array sees at most one entry of z, and which: value = constant +
weight z[index].

Read off the jaxpr as `reading.affine` is: moves of entries (a gather by group, a reshape, a where
whose condition does not depend on z) move index and weight alike, and products with what does not
depend on z change the weight. Whatever else meets z is no proof.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ppl_gp.reading.walk import Known, Rules, Walk, later

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


def entries_seen(function: Callable, z):
    """The arrays that `function` makes of the array z, a tree, each replaced by what its entries
    see of z, or by `None` where they are not proved to see one at most.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(z)
    places = jnp.reshape(jnp.arange(z.size, dtype=jnp.int32), z.shape)
    found = Walk(_Entries()).closed(closed, [OneEach(places, jnp.ones_like(z))])
    leaves, structure = jax.tree.flatten(shapes)
    pairs = zip(found, leaves, strict=True)
    return jax.tree.unflatten(
        structure, [_nothing(x) if isinstance(v, Known) else v for v, x in pairs]
    )


class _Entries(Rules):
    """Values are `OneEach`; `Known` where they do not depend on z; else `None`, no proof."""

    whole = frozenset({"scan", "while", "cond", "custom_linear_solve"})

    def constant(self, array) -> Known:
        return Known(lambda: array)

    def primitive(self, equation, into: list) -> list:
        if all(isinstance(x, Known) for x in into):
            return later(equation, into)
        proved = all(x is not None for x in into)
        return [_followed(equation, into) if proved else None] * len(equation.outvars)


def _followed(equation, into: list) -> OneEach | None:
    """Of the one output of an equation, some of whose inputs depend on z."""
    name, which = equation.primitive.name, [isinstance(x, OneEach) for x in into]
    x = into[which.index(True)]
    to = equation.params.get("new_dtype")
    if name == "convert_element_type" and jnp.issubdtype(to, jnp.floating):
        return x._replace(weight=x.weight.astype(to))
    if name == "concatenate" or (name == "select_n" and _is_choice(equation, which)):
        return _together(equation, into)
    if sum(which) > 1:
        return None
    if name in _SAME and len(into) == 1:
        return x
    if name in _MOVES and which[0]:
        return _bound(equation, [x, *into[1:]])
    factor = _factor(name, which, into)
    keeps = equation.outvars[0].aval.shape == jnp.shape(x.weight)
    return x._replace(weight=x.weight * factor) if keeps and factor is not None else None


def _is_choice(equation, which: list[bool]) -> bool:
    """Whether the condition of a `where` does not depend on z, and chooses for each entry."""
    return not which[0] and len({v.aval.shape for v in equation.invars}) == 1


def _factor(name: str, which: list[bool], into: list):
    """By what the weight changes where one operand depends on z; `None` where that is not known."""
    if name in ("add", "add_any", "sub", "neg"):
        return -1.0 if name == "neg" or (name == "sub" and which[1]) else 1.0
    if name == "mul":
        return into[which.index(False)]()
    return 1.0 / into[1]() if name == "div" and which[0] else None


def _together(equation, into: list) -> OneEach:
    """Of cases, or pieces, that do not all depend on z."""
    cases = zip(into, equation.invars, strict=True)
    known = 1 if equation.primitive.name == "select_n" else 0  # the condition
    parts = [_nothing(v.aval) if isinstance(x, Known) else x for x, v in cases]
    return _bound(equation, [*into[:known], *parts[known:]])


def _bound(equation, into: list) -> OneEach:
    """An operation applied to indices and to weights alike."""
    values = [[x() if isinstance(x, Known) else x[i] for x in into] for i in range(2)]
    return OneEach(*(equation.primitive.bind(*own, **equation.params) for own in values))


def _nothing(x) -> OneEach:
    """Of an array of this shape and type."""
    return OneEach(jnp.zeros(x.shape, jnp.int32), jnp.zeros(x.shape, x.dtype))
