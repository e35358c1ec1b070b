"""Which functions an array is computed from, entry by entry, and which of them meet in a nonlinear
operation.

Read off the jaxpr, whatever the values: a proof, not a probe. Every intermediate entry carries the
set of functions that it was computed from. Sums, differences and multiples unite the sets of their
operands; any other operation also couples all functions of the set. A sum of terms that no coupling
connects is additive: the integral of its exponential over independent functions is a product. What
is not known (loops, sorting ...) mixes and couples all that enters it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.reading.walk import LOOPS, MOVES, NONLINEAR, Known, Rules, Walk, later, shape_of

_LINEAR = {"add", "sub", "neg", "add_any", "copy", "copy_p", "stop_gradient", "real"}
# `mul` and `div` are linear where one factor, or the numerator alone, depends on the functions
_ENTRY_BY_ENTRY = _LINEAR | NONLINEAR | {"mul", "div", "select_n", "convert_element_type"}
_BY_INDEX = {"gather", "dynamic_slice"}
_MOVES = MOVES | _BY_INDEX | {"rev", "concatenate", "stack"}
_REDUCTIONS = {f"reduce_{how}" for how in ("sum", "max", "min", "and", "or", "prod")}
_REDUCTIONS |= {"argmax", "argmin"}


class Dependence(NamedTuple):
    """`on` (F, *shape), per output: if an entry sees a function; `coupled` (F, F): which meet."""

    on: list[np.ndarray]
    coupled: np.ndarray


def dependence(function: Callable, num: int, like) -> Dependence:
    """Of the arrays (a pytree) that `function` makes from rows, (F, M): `num` functions F, `like`
    an array of that shape. One trace; nothing is compiled but moves of small sets. F bytes for each
    entry of an intermediate array.
    """
    closed = jax.make_jaxpr(function)(like)
    reader = _Reader(num)
    own = np.eye(num, dtype=bool)[:, :, None]
    with jax.ensure_compile_time_eval():  # sets are numbers, also while something else is traced
        out = Walk(reader).closed(closed, [np.broadcast_to(own, (num, *jnp.shape(like)))])
    pairs = zip(out, closed.jaxpr.outvars, strict=True)
    on = [x if _is_set(x) else np.zeros((num, *shape_of(v)), bool) for x, v in pairs]
    return Dependence(on, reader.coupled)


class _Reader(Rules):
    """Sets as booleans (F, *shape); gathers `coupled` as it goes. A loop mixes what enters it."""

    whole = LOOPS

    def __init__(self, num: int):
        self.num, self.coupled = num, np.eye(num, dtype=bool)

    def constant(self, array) -> Known:
        return Known(lambda: array)

    def primitive(self, equation, operands: list) -> list:
        """Sets of the outputs; `Known` where no function enters."""
        if not any(map(_is_set, operands)):
            return later(equation, operands)
        name, shapes = equation.primitive.name, [shape_of(v) for v in equation.outvars]
        if name in _MOVES and (moved := _moved(equation, operands)) is not None:
            return [moved]
        if name in _REDUCTIONS:
            united = np.any(operands[0], axis=tuple(a + 1 for a in equation.params["axes"]))
            return [united if name == "reduce_sum" else self._couple(united)]
        if name == "dot_general" and sum(map(_is_set, operands)) == 1:
            return [_product(equation, operands)]
        if name in _ENTRY_BY_ENTRY:
            united = self._union(operands, shapes[0])
            return [united if _is_linear(equation, operands) else self._couple(united)]
        sets = [np.any(np.reshape(x, (self.num, -1)), -1) for x in operands if _is_set(x)]
        everything = self._couple(self._union(sets, ()))
        return [self._union([everything], shape) for shape in shapes]

    def _union(self, operands, shape) -> np.ndarray:
        """Of the sets of operands that broadcast to a shape."""
        out = np.zeros((self.num, *shape), bool)
        for x in operands:
            if _is_set(x):
                out |= np.reshape(x, (self.num, *[1] * (len(shape) - x.ndim + 1), *x.shape[1:]))
        return out

    def _couple(self, sets: np.ndarray) -> np.ndarray:
        """The sets as they are, after their functions have been noted as coupled."""
        flat = np.reshape(sets, (self.num, -1))
        for column in np.unique(flat[:, np.sum(flat, 0) > 1], axis=1).T:
            self.coupled |= np.outer(column, column)
        return sets


def _moved(equation, operands) -> np.ndarray | None:
    """Entries moved as values are; `None` where an index is computed from a function."""
    by_index = equation.primitive.name in _BY_INDEX
    if by_index and any(map(_is_set, operands[1:])):
        return None
    params = dict(equation.params)
    if "fill_value" in params:
        params["fill_value"] = 0

    def value(x, v):
        if _is_set(x):
            return jnp.asarray(x, jnp.uint8)
        return x() if by_index else jnp.zeros(shape_of(v), jnp.uint8)

    axes = [0 if _is_set(x) else None for x in operands]
    move = jax.vmap(lambda *values: equation.primitive.bind(*values, **params), axes)
    return np.asarray(move(*map(value, operands, equation.invars))) > 0


def _product(equation, operands) -> np.ndarray:
    """A sum of multiples of the operand that depends on functions, whatever the other is."""
    side = 0 if _is_set(operands[0]) else 1
    (summed, batch), x = equation.params["dimension_numbers"], operands[side]
    rest = [i for i in range(x.ndim - 1) if i not in summed[side]]
    kept = [rest.index(i) for i in batch[side]]
    free = [i for i in range(len(rest)) if i not in kept]
    united = np.any(x, axis=tuple(a + 1 for a in summed[side]))
    united = np.transpose(united, [0, *(i + 1 for i in (*kept, *free))])
    shape = shape_of(equation.outvars[0])
    first = united.ndim if side == 0 else 1 + len(kept)  # of the other operand's axes
    others = range(first, first + 1 + len(shape) - united.ndim)
    return np.broadcast_to(np.expand_dims(united, tuple(others)), (len(x), *shape))


def _is_set(x) -> bool:
    return isinstance(x, np.ndarray)


def _is_linear(equation, operands) -> bool:
    name, sets = equation.primitive.name, [_is_set(x) for x in operands]
    if name == "mul":
        return sum(sets) == 1
    if name == "div":
        return not sets[1]
    if name == "select_n":
        return not sets[0]
    if name == "convert_element_type":
        dtypes = [v.aval.dtype for v in (*equation.invars, *equation.outvars)]
        return all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return name in _LINEAR
