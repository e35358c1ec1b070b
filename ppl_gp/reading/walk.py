"""Following a jaxpr with one abstract value per variable.

What a primitive makes of its values is a table's (`Rules`); calls, branches and loops are followed
here, once for all tables. Nothing is computed and nothing compiled.
"""

import linecache
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from ppl_gp.errors import HERE

# Entry by entry the same number, in another place.
MOVES = {*"broadcast_in_dim reshape transpose slice squeeze expand_dims copy copy_p".split()}
# Calls that hold a jaxpr for each branch, or step.
LOOPS = frozenset({"scan", "while", "cond", "custom_linear_solve"})
# Entry by entry, and not linear.
NONLINEAR = frozenset(
    """
    exp exp2 log log2 log1p expm1 tanh logistic sqrt rsqrt cbrt pow integer_pow square abs sign max
    min floor ceil round erf erfc erf_inv lgamma digamma polygamma zeta igamma igammac
    igamma_grad_a random_gamma_grad regularized_incomplete_beta bessel_i0e bessel_i1e is_finite
    eq ne lt le gt ge and or not xor clamp nextafter atan2 sin cos tan asin acos atan sinh cosh
    asinh acosh atanh rem logaddexp
    """.split()
)


class Rules:
    """What a kind of abstract value is, and how equations act on it; here, of values of whole
    arrays, whatever their axes, with `none` that of a constant.

    A kind of value also has `primitive(equation, into)`, the outputs of an equation without a jaxpr
    of its own; `either(values)`, one of several, whichever: branches, and a carry before and after
    a step; and `chosen(by, value)`, one that depends on which branch was taken, or when a loop
    ended. `whole`: operations that count as one, whatever they call. `source`: what JAX keeps of
    the line of the equation that is followed; `at`: the identity of the call that it is inside of.
    """

    whole: frozenset[str] = frozenset()
    source: Any = None
    at: int | None = None
    none: Any

    def constant(self, array):
        """The value of an array that the function encloses."""
        return self.none

    def literal(self, literal):
        """The value of a number that is written into an equation."""
        return self.constant(literal.val)

    def entry(self, values: list) -> list:
        """What a step of a loop takes of arrays that it goes through."""
        return values

    def stacked(self, given: list, entries: list) -> list:
        """Arrays of what each step gave; `given`: the arrays that the loop goes through."""
        return entries

    def carried(self, value, equation, along: Sequence = ()):
        """What one step hands to the next, another value; `along`: arrays the loop goes through."""
        return value

    def rounds(self) -> Callable[[], None]:
        """What to call before each round of a loop."""
        return lambda: None

    def made(self, variables: Sequence, values: list) -> None:
        """What an equation gave, to be looked at."""


class Known:
    """A value that nothing followed enters, computed when it is asked for (an index, say)."""

    def __init__(self, make: Callable[[], Any]):
        self._make, self._value = make, None

    def __call__(self) -> Any:
        if self._make is not None:
            self._value, self._make = self._make(), None
        return self._value


def later(equation, operands: Sequence[Known]) -> list[Known]:
    """The outputs of an equation whose inputs are known."""

    def results():
        out = equation.primitive.bind(*[x() for x in operands], **equation.params)
        return out if equation.primitive.multiple_results else [out]

    every = Known(results)
    return [Known(lambda i=i: every()[i]) for i in range(len(equation.outvars))]


class Walk:
    """Follows jaxprs by one table of rules."""

    def __init__(self, rules: Any):  # `Rules`
        self.rules = rules
        self._inside, self._outer = 0, 0  # functions that are called, and where

    def follow(
        self, jaxpr, consts: Sequence, given: Sequence, wanted: Sequence[bool] | None = None
    ) -> list:
        """The values of a jaxpr's outputs; None in place of those that are not wanted."""
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *given], strict=True))
        asked = [True] * len(jaxpr.outvars) if wanted is None else wanted
        equations, used = needed(jaxpr, [v for v, w in zip(jaxpr.outvars, asked, strict=True) if w])

        def of(v) -> Any:
            return self.rules.literal(v) if isinstance(v, Literal) else known.get(v)

        for equation in equations:
            if not self._inside:
                self.rules.source, self._outer = equation.source_info, id(equation)
            asked = [v in used for v in equation.outvars]
            out = self.step(equation, [of(v) for v in equation.invars], asked)
            self.rules.made(equation.outvars, out)
            known.update(zip(equation.outvars, out, strict=True))
        return [of(v) for v in jaxpr.outvars]

    def closed(self, closed, given: Sequence) -> list:
        """As `follow`, of a jaxpr with its constants."""
        return self.follow(closed.jaxpr, [self.rules.constant(c) for c in closed.consts], given)

    def step(self, equation, into: list, wanted: Sequence[bool] | None = None) -> list:
        """What the rules say of the values that one equation gives."""
        own = {"scan": self._scan, "while": self._while, "cond": self._cond}
        own["custom_linear_solve"] = self._linear_solve
        name, inner = equation.primitive.name, called(equation)
        if name not in self.rules.whole and name in own:
            return own[name](equation, into)
        if name in self.rules.whole or inner is None:
            return self.rules.primitive(equation, into)
        return self._call(inner, into, wanted)

    def _call(self, inner, into: list, wanted: Sequence[bool] | None) -> list:
        """A cause inside has the line of this call: JAX keeps that of the first caller."""
        consts = [self.rules.constant(c) for c in getattr(inner, "consts", ())]
        self._inside += 1
        self.rules.at = self._outer
        try:
            return self.follow(getattr(inner, "jaxpr", inner), consts, into, wanted)
        finally:
            self._inside -= 1
            self.rules.at = self._outer if self._inside else None

    def _scan(self, equation, into: list) -> list:
        closed, num = equation.params["jaxpr"], _scanned(equation)
        consts, carry, arrays = into[: num[0]], into[num[0] : num[1]], into[num[1] :]
        entries, inner = self.rules.entry(arrays), closed.jaxpr
        pairs = zip(inner.invars[num[0] :], inner.outvars[: len(carry)], strict=False)
        stays = [before is after for before, after in pairs]

        def step(carry):
            out = self.closed(closed, [*consts, *carry, *entries])
            pairs = zip(out, stays, strict=False)
            after = [v if s else self.rules.carried(v, equation, arrays) for v, s in pairs]
            return after, out[len(carry) :]

        carry, out = self._settled(step, carry)
        return [*carry, *self.rules.stacked(arrays, out)]

    def _while(self, equation, into: list) -> list:
        """What asks whether to go on chooses between a step and none."""
        p, num = equation.params, equation.params["cond_nconsts"]
        asked, consts = into[:num], into[num : num + p["body_nconsts"]]

        def step(carry):
            (goes_on,) = self.closed(p["cond_jaxpr"], [*asked, *carry])
            out = self.closed(p["body_jaxpr"], [*consts, *carry])
            after = (self.rules.chosen(goes_on, v) for v in out)
            return [self.rules.carried(v, equation) for v in after], None

        return self._settled(step, into[num + p["body_nconsts"] :])[0]

    def _settled(self, step: Callable, carry: list) -> tuple[list, Any]:
        """(the carry, what else a step gives), after rounds until the carry stays as it is."""
        begin = self.rules.rounds()
        while True:
            begin()
            after, others = step(carry)
            joined = [self.rules.either(pair) for pair in zip(carry, after, strict=True)]
            if joined == carry:
                return carry, others
            carry = joined

    def _cond(self, equation, into: list) -> list:
        by, *rest = into
        branches = (self.closed(b, rest) for b in equation.params["branches"])
        joined = map(self.rules.either, zip(*branches, strict=True))
        return [self.rules.chosen(by, value) for value in joined]

    def _linear_solve(self, equation, into: list) -> list:
        p = equation.params
        before, num = p["const_lengths"], len(equation.outvars)
        start = before.matvec + before.vecmat
        return self.closed(p["jaxprs"].solve, [*into[start : start + before.solve], *into[-num:]])


def called(equation):
    """The jaxpr that an equation calls with its own inputs, or None."""
    params = equation.params
    inner = next((params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in params), None)
    if (jaxpr := getattr(inner, "jaxpr", inner)) is None or not hasattr(jaxpr, "eqns"):
        return None
    # those of `lax.reduce` are two numbers
    inside, outside = ([shape_of(v) for v in x.invars] for x in (jaxpr, equation))
    return inner if inside == outside else None


def shape_of(v) -> tuple[int, ...]:
    """Of a variable or a literal."""
    return getattr(v.aval, "shape", ())


def needed(jaxpr, wanted: Sequence, known: Collection = ()) -> tuple[list, set]:
    """(the equations that `wanted` variables are computed from, and `known` ones are not, in order,
    the variables that these use), without deterministic sites and NumPyro's checks of parameters.
    """

    def unknown(variables):
        return (v for v in variables if not isinstance(v, Literal) and v not in known)

    used, kept = set(unknown(wanted)), []
    for equation in reversed(jaxpr.eqns):
        if not used.isdisjoint(equation.outvars):
            kept.append(equation)
            used.update(unknown(equation.invars))
    return kept[::-1], used


def _scanned(equation) -> tuple[int, int]:
    """(where the carry begins, where it ends) among a scan's inputs. JAX counts them under other
    names in each version: what a step takes or gives one entry of has an axis more outside.
    """
    inner = equation.params["jaxpr"].jaxpr
    carries = len(inner.outvars) - _longer(equation.outvars, inner.outvars)
    end = len(inner.invars) - _longer(equation.invars, inner.invars)
    return end - carries, end


def _longer(outer, inner) -> int:
    return sum(a.aval.ndim == b.aval.ndim + 1 for a, b in zip(outer, inner, strict=True))


_STEPS = ("length", "y")  # of a loop, and of a whole power


def changed(a, b, at: int | None = None) -> tuple[set[int], set[tuple]]:
    """Of one jaxpr and another one of the same course: (identities of its numbers that differ,
    (`Rules.at`, identity of a variable, axis) of its axes that have another length, (.., of a loop
    or a power, -1) where it has another number of steps).
    """
    pairs = zip(getattr(a, "consts", ()), getattr(b, "consts", ()), strict=False)
    numbers, axes = {id(x) for x, y in pairs if _is_other(x, y)}, set()
    a, b = (getattr(j, "jaxpr", j) for j in (a, b))

    def grew(variables, others) -> None:
        for v, w in zip(variables, others, strict=False):
            shapes = enumerate(zip(shape_of(v), shape_of(w), strict=False))
            axes.update((at, id(v), i) for i, (n, m) in shapes if n != m)

    grew([*a.constvars, *a.invars], [*b.constvars, *b.invars])
    for one, other in zip(a.eqns, b.eqns, strict=False):
        if one.primitive is not other.primitive or len(one.invars) != len(other.invars):
            break
        for v, w in zip(one.invars, other.invars, strict=True):
            if isinstance(v, Literal) and isinstance(w, Literal) and _is_other(v.val, w.val):
                numbers.add(id(v))
        grew(one.outvars, other.outvars)
        if [one.params.get(k) for k in _STEPS] != [other.params.get(k) for k in _STEPS]:
            axes.add((at, id(one), -1))
        inside = at if one.primitive.name in LOOPS or called(one) is None else at or id(one)
        for pair in zip(jaxprs_of(one), jaxprs_of(other), strict=False):
            more = changed(*pair, inside)
            numbers, axes = numbers | more[0], axes | more[1]
    return numbers, axes


def _is_other(x, y) -> bool:
    """Of two arrays of one shape, or of arrays that hold one number each."""
    try:
        if np.shape(x) == np.shape(y):
            return x is not y and not np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)
        x, y = (np.ravel(np.asarray(v)) for v in (x, y))
    except Exception:  # noqa: BLE001 - tracers and keys have no values
        return False
    same = x.size and y.size and (x == x[0]).all() and (y == y[0]).all()
    return bool(same and x[0] != y[0])


def jaxprs_of(equation) -> list:
    """All that an equation calls, or goes through in a loop."""
    is_one = lambda x: hasattr(getattr(x, "jaxpr", x), "eqns")  # noqa: E731
    return [x for x in jax.tree.leaves([*equation.params.values()], is_leaf=is_one) if is_one(x)]


_ELSEWHERE = ("/site-packages/", HERE, "<frozen", "/lib/python")


def line_of(source: Any) -> str:
    """The user's line of an equation's `source_info`, as it stands; empty where it is not known."""
    for frame in getattr(getattr(source, "traceback", None), "frames", ()):
        name, line = frame.file_name, frame.line_num
        if not any(part in name for part in _ELSEWHERE):
            return f"{os.path.basename(name)}, line {line}: {linecache.getline(name, line).strip()}"
    return ""
