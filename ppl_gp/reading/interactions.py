"""Which functions an array is computed from, entry by entry, and which of them meet in a nonlinear
operation.

Read off the jaxpr, whatever the values: a proof, not a probe. Every intermediate entry carries the
set of functions that it was computed from. Sums, differences and multiples unite the sets of their
operands; any other operation also couples all functions of the set. A sum of terms that are
connected through no coupling is additive: the integral of its exponential over independent
functions is a product. What is not known (loops, sorting ...) mixes and couples everything that
enters it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.reading.walk import NONLINEAR, Known, Rules, Walk, later

_WORD = 32  # functions a word of a set
_LINEAR = {"add", "sub", "neg", "add_any", "copy", "copy_p", "stop_gradient", "real"}
# `mul` and `div` are linear where one factor, or the numerator alone, depends on the functions
_ENTRY_BY_ENTRY = _LINEAR | NONLINEAR | {"mul", "div", "select_n", "convert_element_type"}
_MOVES = frozenset(
    """
    reshape transpose broadcast_in_dim squeeze slice rev expand_dims concatenate stack gather
    dynamic_slice
    """.split()
)
_REDUCTIONS = {f"reduce_{how}" for how in ("max", "min", "and", "or", "prod")} | {
    "argmax",
    "argmin",
}


class Dependence(NamedTuple):
    """`on`: for each output, (F, *shape), whether an entry is computed from a function; `coupled`
    (F, F): which functions meet.
    """

    on: list[np.ndarray]
    coupled: np.ndarray


def dependence(function: Callable, num: int, like) -> Dependence:
    """Of the arrays (a pytree) that `function` makes from rows, (F, M): `num` functions F, `like`
    an array of that shape.

    One trace of the function, nothing is compiled but moves of small sets. O(F / 32) words for each
    entry of an intermediate array.
    """
    closed = jax.make_jaxpr(function)(like)
    reader = _Reader(num)
    sets = np.broadcast_to(reader.singletons[:, :, None], (reader.words, *jnp.shape(like)))
    with jax.ensure_compile_time_eval():  # sets are numbers, also while something else is traced
        out = Walk(reader).closed(closed, [sets])
    shapes = [v.aval.shape for v in closed.jaxpr.outvars]
    return Dependence(
        [reader.unpacked(x, s) for x, s in zip(out, shapes, strict=True)], reader.coupled
    )


class _Reader(Rules):
    """The rules of a walk for sets; gathers `coupled` as it goes. A loop mixes what enters it."""

    whole = frozenset({"scan", "while", "cond", "custom_linear_solve"})

    def __init__(self, num: int):
        self.num, self.words = num, -(-num // _WORD)
        self.coupled = np.eye(num, dtype=bool)
        which = np.arange(num)
        self.singletons = np.zeros((self.words, num), np.uint32)
        self.singletons[which // _WORD, which] = np.uint32(1) << (which % _WORD).astype(np.uint32)

    def unpacked(self, x, shape) -> np.ndarray:
        """A value's sets as booleans, (F, *shape)."""
        x = np.zeros((self.words, *shape), np.uint32) if isinstance(x, Known) else x
        return np.stack(
            [(x[i // _WORD] >> np.uint32(i % _WORD)) & 1 for i in range(self.num)]
        ).astype(bool)

    def constant(self, array) -> Known:
        return Known(lambda: array)

    def primitive(self, equation, operands: list) -> list:
        """Sets of the outputs; `Known` where no function enters."""
        if not any(map(_is_set, operands)):
            return later(equation, operands)
        name, params = equation.primitive.name, equation.params
        shape = getattr(equation.outvars[0].aval, "shape", ())
        if name in _MOVES and (moved := self._moved(equation, operands)) is not None:
            return [moved]
        if name == "reduce_sum" or name in _REDUCTIONS:
            (x,) = operands
            united = np.bitwise_or.reduce(x, axis=tuple(a + 1 for a in params["axes"]))
            return [united if name == "reduce_sum" else self._couple(united)]
        if name == "dot_general" and sum(isinstance(x, np.ndarray) for x in operands) == 1:
            return [self._product(equation, operands)]
        if name in _ENTRY_BY_ENTRY:
            united = self._union(operands, shape)
            return [united if _is_linear(equation, operands) else self._couple(united)]
        sets = [
            np.bitwise_or.reduce(np.reshape(x, (self.words, -1)), -1)
            for x in operands
            if _is_set(x)
        ]
        shapes, everything = [v.aval.shape for v in equation.outvars], self._union(sets, ())
        everything = self._couple(everything)
        wide = [np.reshape(everything, (-1, *[1] * len(shape))) for shape in shapes]
        return [np.broadcast_to(x, (self.words, *s)) for x, s in zip(wide, shapes, strict=True)]

    def _union(self, operands, shape) -> np.ndarray:
        """Of the sets of operands that broadcast to a shape."""
        out = np.zeros((self.words, *shape), np.uint32)
        for x in operands:
            if _is_set(x):
                out |= np.reshape(x, (self.words, *[1] * (len(shape) - x.ndim + 1), *x.shape[1:]))
        return out

    def _moved(self, equation, operands) -> np.ndarray | None:
        """Entries moved as the operation moves values; `None` where it cannot be done (an index is
        computed from a function).
        """
        by_index = equation.primitive.name in ("gather", "dynamic_slice")
        if by_index and any(_is_set(x) for x in operands[1:]):
            return None
        params = dict(equation.params)
        if "fill_value" in params:
            params["fill_value"] = 0
        shapes = [v.aval.shape for v in equation.invars]

        def word(w):
            values = [
                jnp.asarray(x[w]) if _is_set(x) else x() if by_index else jnp.zeros(s, jnp.uint32)
                for x, s in zip(operands, shapes, strict=True)
            ]
            return np.asarray(equation.primitive.bind(*values, **params))

        return np.stack([word(w) for w in range(self.words)])

    def _product(self, equation, operands) -> np.ndarray:
        """A sum of multiples of the one operand that depends on functions, whatever the other's
        entries are.
        """
        side = 0 if _is_set(operands[0]) else 1
        (summed, batch), x = equation.params["dimension_numbers"], operands[side]
        rest = [i for i in range(x.ndim - 1) if i not in summed[side]]
        kept = [rest.index(i) for i in batch[side]]
        free = [i for i in range(len(rest)) if i not in kept]
        united = np.bitwise_or.reduce(x, axis=tuple(a + 1 for a in summed[side]))
        united = np.transpose(united, [0, *(i + 1 for i in (*kept, *free))])
        shape = equation.outvars[0].aval.shape
        first = united.ndim if side == 0 else 1 + len(kept)  # of the other operand's axes
        others = range(first, first + 1 + len(shape) - united.ndim)
        return np.broadcast_to(np.expand_dims(united, tuple(others)), (self.words, *shape))

    def _couple(self, sets: np.ndarray) -> np.ndarray:
        """The sets as they are, after their functions have been noted as coupled."""
        flat = np.reshape(sets, (self.words, -1))
        # more than one bit
        several = np.any(flat & (flat - (flat > 0)), 0) | (np.sum(flat > 0, 0) > 1)
        for column in np.unique(flat[:, several], axis=1).T:
            members = [
                i for i in range(self.num) if (column[i // _WORD] >> np.uint32(i % _WORD)) & 1
            ]
            self.coupled[np.ix_(members, members)] = True
        return sets


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
        return all(
            jnp.issubdtype(v.aval.dtype, jnp.floating)
            for v in (*equation.invars, *equation.outvars)
        )
    return name in _LINEAR
