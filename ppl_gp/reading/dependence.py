"""What is computed from what, read off a function's jaxpr: a proof of independence, whatever the
values are. Whether a function's course depends on the values that it is given: comparisons, clips,
absolute values, roundings. And what each site of a model is computed from, by one abstract trace.

A function that decides nothing is analytic where it is finite, and a few values far apart tell what
it is, unless it is nearly flat at all of them (a narrow bump); of one that does, what holds there
says nothing about the values between.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, mask_of, unwrap
from ppl_gp.kernels.pairs import square_fault
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.digest import arrays_of, own_density, own_kinds
from ppl_gp.reading.tracing import ARGUMENT, SITE, Look, kernel_beside, named_trace
from ppl_gp.reading.walk import Rules, Walk, jaxprs_of


def depends(function, x) -> bool:
    """Whether any output of `function` is computed from x."""
    return any(jax.tree.leaves(reached(function, x)))


def reached(function, x):
    """The outputs of `function` with each array replaced by whether it sees x. Tracers are fine."""
    return jax.tree.map(
        bool,
        sources(lambda named: function(named["x"]), {"x": x}),
        is_leaf=lambda s: isinstance(s, frozenset),
    )


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

    whole = frozenset({"scan", "while", "cond", "custom_linear_solve"})
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
