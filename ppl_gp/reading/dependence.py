"""Proofs about a function, read off its jaxpr, whatever the values are: that it is affine or a
polynomial, what is computed from what, and whether its course depends on its values.

*Affine*: between the argument and an output only operations that are linear in what depends on the
argument, or products of it, are allowed; whatever is not on the list counts as curved. So a proof
is a proof, and its failure says nothing: the caller takes the general way. Values at a few points
prove nothing (min(f, 2) looks straight below 2).

*Course*: comparisons, clips, absolute values, roundings. A function that decides nothing is
analytic where it is finite, and a few values far apart tell what it is, unless it is nearly flat at
all of them (a narrow bump); of one that does, what holds there says nothing about the values
between.
"""

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, mask_of, unwrap
from ppl_gp.kernels.pairs import square_fault
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.digest import arrays_of, own_density, own_kinds
from ppl_gp.reading.tracing import ARGUMENT, SITE, Look, kernel_beside, named_trace
from ppl_gp.reading.walk import LOOPS, MOVES, Rules, Walk, jaxprs_of


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
    if (name := equation.primitive.name) == "convert_element_type":
        return jnp.issubdtype(equation.params["new_dtype"], jnp.inexact)
    if name == "select_n":  # the choice itself must not depend on the argument
        return depending[0] > 0
    if name == "scatter" and equation.params["update_jaxpr"] is not None:  # f.at[i].apply(g)
        return False
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


def depends(function, x) -> bool:
    """Whether any output of `function` is computed from x."""
    return any(jax.tree.leaves(reached(function, x)))


def reached(function, x):
    """The outputs of `function` with each array replaced by whether it sees x. Tracers are fine."""
    found = sources(lambda named: function(named["x"]), {"x": x})
    return jax.tree.map(bool, found, is_leaf=lambda s: isinstance(s, frozenset))


def sources(function, named: dict[str, Any]):
    """Outputs of `function(named)`, each array replaced by a frozenset of the names behind it."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(named)
    # as JAX sorts a dictionary's keys
    names = [name for name in sorted(named) for _ in jax.tree.leaves(named[name])]
    flow = Walk(_Sources()).closed(closed, [frozenset([name]) for name in names])
    return jax.tree.unflatten(jax.tree.structure(shapes), flow)


class _Sources(Rules):
    """a / (a / b) is b: so NumPyro has the mean of a negative binomial."""

    none = frozenset()

    def __init__(self):
        self._quotients: dict[int, tuple] = {}  # their numerators, what is behind denominators

    def either(self, values: Sequence[frozenset]) -> frozenset:
        return frozenset().union(*values)

    def chosen(self, by: frozenset, value: frozenset) -> frozenset:
        return by | value

    def primitive(self, equation, into: list[frozenset]) -> list[frozenset]:
        found = frozenset().union(*into)
        if equation.primitive.name == "div":
            above, below = equation.invars
            same, behind = self._quotients.get(id(below), (None, found))
            found = behind if same is above else found
            self._quotients[id(equation.outvars[0])] = above, into[1]
        return [found] * len(equation.outvars)


_DECIDING = {"lt", "le", "gt", "ge", "eq", "ne", "max", "min", "clamp", "abs", "sign"}
_DECIDING |= {"floor", "ceil", "round", "rem", "argmax", "argmin", "sort", "reduce_max"}
_DECIDING |= {"reduce_min", "cummax", "cummin", "cond", "while"}


def decides(function, x, rest) -> bool:
    """Whether any step of function(x, rest) that depends on x, and that the result depends on, is
    one whose course its values decide: of loops and branches every step. Nothing is computed.
    """
    closed, num = jax.make_jaxpr(function)(x, rest), len(jax.tree.leaves(x))
    rules = _Decisions()
    given = [frozenset(["x"] * (i < num)) for i in range(len(closed.jaxpr.invars))]
    Walk(rules).closed(closed, given)
    return rules.found


class _Decisions(_Sources):
    """`found`: whether such a step was met."""

    whole = LOOPS
    found = False

    def primitive(self, equation, into: list[frozenset]) -> list[frozenset]:
        self.found |= any(into) and _is_deciding(equation)
        return super().primitive(equation, into)


def num_entries(function, x, rest) -> int:
    """The entries that all steps of function(x, rest) compute, one at least: its cost, roughly."""
    return max(_entries(jax.make_jaxpr(function)(x, rest).jaxpr), 1)


def _entries(jaxpr) -> int:
    own = sum(math.prod(v.aval.shape) for e in jaxpr.eqns for v in e.outvars)
    return own + sum(_entries(inner) for e in jaxpr.eqns for inner in jaxprs_of(e))


def _is_deciding(equation) -> bool:
    name, into = equation.primitive.name, equation.invars
    if name in _DECIDING:
        return not (name in ("eq", "ne") and into[0] is into[1])  # x != x asks for NaN
    if name == "convert_element_type":
        kinds = [v.aval.dtype.kind for v in (into[0], equation.outvars[0])]
        return kinds[0] in "fc" and kinds[1] in "iub"
    return any(_is_deciding(e) for inner in jaxprs_of(equation) for e in inner.eqns)


# What spreads a distribution: where it is random itself, the density has no upper bound.
_SPREADS = """
    scale scale_tril covariance_matrix precision_matrix cov_factor cov_diag conditional_precision
""".split()
_ONE_EACH = (
    " All units of a plate share one kernel. For a length scale of each unit, declare a site for "
    "each, f = jnp.stack([numpyro.sample(f'f{i}', pg.GP(pg.kernels.RBF(1.0, lengthscale[i]), X)) "
    "for i in range(num_units)]), and look up f[unit, jnp.arange(X.shape[0])]."
)


class Sources(NamedTuple):
    """What something is computed from: paths of arguments, names of sites."""

    arguments: frozenset[str]
    sites: frozenset[str]


class Sees(NamedTuple):
    """What a sample site's distribution is computed from, its spread, its masks and scales, a GP's
    kernel beside its inputs, its variance where it tells it, and the density of a user's class.
    """

    fn: Sources
    spread: Sources
    around: Sources
    kernel: Sources
    variance: Sources
    density: Sources


def graph(model: Callable, leaves: Leaves, base: Look) -> dict[str, Sees]:
    """Of each sample site. One abstract trace."""
    named, trace_at = named_trace(model, leaves, base, leaves.arrays)
    sites: dict[str, dict] = {}

    def parts(named):
        sites.update(trace_at(named))
        return {k: _parts(s) for k, s in sites.items()}

    flow = jax.tree.map(_told, sources(parts, named), is_leaf=lambda x: isinstance(x, list))
    found = {k: Sees(*told) for k, told in flow.items()}
    for k, seen in found.items():
        _require_attributes(k, sites[k]["fn"], seen)
    return found


def _parts(site) -> tuple[list, ...]:
    """Arrays of a site's distribution, its spread, what stands around it, a GP's kernel at constant
    inputs, its variance, and the density of a user's class.
    """
    fn = unwrap(site["fn"])
    if isinstance(fn, GP):
        _require_matrix(site["name"], fn, bool(site["fn"].batch_shape))
    # A kernel or a mean may be any callable: what it is computed from shows in its values alone.
    own = [fn.X, fn.kernel(fn.X, fn.X), fn.mean] if isinstance(fn, GP) else fn
    around = [mask_of(site["fn"]), site["scale"]]
    kernel = kernel_beside(fn) if isinstance(fn, GP) else []
    density = own_density(fn, site["value"])
    parts = (own, _spread(fn), around, kernel, _variance(fn), density)
    return tuple(arrays_of(part) for part in parts)


def _require_attributes(name: str, fn, seen: Sees) -> None:
    """Raise `ModelError` where a density is computed from what its distribution does not keep."""
    hidden = {*seen.density.sites, *seen.density.arguments} - {*seen.fn.sites, *seen.fn.arguments}
    if hidden:
        kind = own_kinds(fn)[0].__name__
        raise ModelError(
            f"log_prob of {kind}, the distribution of site '{name}', depends on "
            f"{sorted(hidden)} through a function or an object that encloses arrays. Keep each "
            f"array as an attribute, for example self.loc = loc in {kind}.__init__, also in a "
            "list, a dictionary or a registered pytree, but not in another object."
        )


def _require_matrix(name: str, prior: GP, is_in_plate: bool) -> None:
    """Here, where a kernel is called for the first time."""
    if (fault := square_fault(prior.kernel, prior.X)) is not None:
        raise ModelError(
            f"the kernel of GP site '{name}' gives no covariance matrix at its inputs of shape "
            f"{prior.X.shape}: {fault}. A kernel is k(X1, X2) -> (N1, N2), one entry a pair of "
            f"rows.{_ONE_EACH if is_in_plate else ''}"
        )


def _spread(fn) -> list:
    """Parameters that say how wide a distribution is, also beneath transformations (log-normal)."""
    of_mixture = getattr(fn, "component_distribution", None)
    inner = [getattr(fn, "base_dist", None), of_mixture, *getattr(fn, "transforms", ())]
    inner += getattr(fn, "component_distributions", ())
    own = [_attribute(fn, name) for name in _SPREADS] if not isinstance(fn, GP) else []
    return own + [x for part in inner if part is not None for x in _spread(part)]


def _attribute(fn, name: str):
    """`None` also where NumPyro cannot compute it (the precision of a low-rank normal)."""
    try:
        return getattr(fn, name, None)
    except (NotImplementedError, TypeError, ValueError, ArithmeticError):
        return None


def _variance(fn):
    """Of a distribution that has one and is no GP: what it is computed from says what widens a
    Gamma or a Beta, too. Of numbers alone it may divide by zero: `InverseGamma(1.0, 1.0)`.
    """
    found = None if isinstance(fn, GP) else _attribute(fn, "variance")
    return fn if found is None and own_kinds(fn) else found


def _told(flow: list[frozenset]) -> Sources:
    names = frozenset().union(*flow)
    arguments = frozenset(n.removeprefix(ARGUMENT) for n in names if n.startswith(ARGUMENT))
    return Sources(arguments, frozenset(n.removeprefix(SITE) for n in names if n.startswith(SITE)))
