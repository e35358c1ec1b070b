"""What depends on what in a model: from which arguments and which other sites' values each site's
distribution, its spread, its masks and a GP's kernel are computed. Followed in the jaxpr of one
abstract trace.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, mask_of, unwrap
from ppl_gp.kernels.pairs import square_fault
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.digest import arrays_of, own_density, own_kinds
from ppl_gp.reading.roles import is_factor
from ppl_gp.reading.shapes import ARGUMENT, SITE, Look, named_trace

# What spreads a distribution: where it is random itself, the density has no upper bound.
_SPREADS = (
    "scale",
    "scale_tril",
    "covariance_matrix",
    "precision_matrix",
    "cov_factor",
    "cov_diag",
    "conditional_precision",
)
_ONE_EACH = (
    " All units of a plate share one kernel. For a length scale of each unit, declare a site for "
    "each, f = jnp.stack([numpyro.sample(f'f{i}', pg.GP(pg.kernels.RBF(1.0, lengthscale[i]), X)) "
    "for i in range(num_units)]), and look up f[unit, jnp.arange(X.shape[0])]."
)


class Seen(NamedTuple):
    """What something is computed from: paths of arguments, names of sites."""

    arguments: frozenset[str]
    sites: frozenset[str]


NOTHING = Seen(frozenset(), frozenset())


class Graph(NamedTuple):
    """{sample site: what its distribution, its spread, its masks and scales are computed from}; a
    factor is its own distribution.

    `kernels`: of GP sites, what the kernel is computed from beside the inputs. `variances`: where a
    distribution tells its variance.
    """

    distributions: dict[str, Seen]
    spreads: dict[str, Seen]
    around: dict[str, Seen]
    kernels: dict[str, Seen]
    variances: dict[str, Seen]

    @property
    def shaping(self) -> frozenset[str]:
        """Arguments that the distribution of some site, no factor among them, is computed from."""
        return frozenset().union(*(s.arguments for s in self.distributions.values()))


def graph(model: Callable, leaves: Leaves, base: Look) -> tuple[Graph, dict[str, Seen]]:
    """(the graph, {factor: what it sees}). One abstract trace.

    A model that looks at its arguments' values while it is traced is taken to compute every
    distribution from all of them but `y`.
    """
    with suppress(jax.errors.JAXTypeError):
        return _graph(model, leaves, base, leaves.arrays)
    found, factors = Graph({k: NOTHING for k in base.sites}, {}, {}, {}, {}), {}
    with suppress(jax.errors.JAXTypeError):
        found, factors = _graph(model, leaves, base, {})
    given = frozenset(p for p in leaves.arrays if p != "y")
    everything = {k: Seen(given, s.sites) for k, s in found.distributions.items()}
    return found._replace(distributions=everything), factors


def _graph(model, leaves: Leaves, base: Look, arrays: Mapping[str, Any]):
    named, trace_at = named_trace(model, leaves, base, arrays)
    sites: dict[str, dict] = {}

    def parts(named):
        sites.update(trace_at(named))
        return {k: _parts(s) for k, s in sites.items()}

    flow = jax.tree.map(_told, sources(parts, named), is_leaf=lambda x: isinstance(x, list))
    fn, spread, around, kernels, variances, densities = (
        {k: parts[i] for k, parts in flow.items()} for i in range(6)
    )
    _require_attributes(sites, fn, densities)
    factors = {k: seen for k, seen in fn.items() if is_factor(sites[k])}
    own = {k: seen for k, seen in fn.items() if k not in factors}
    return Graph(own, spread, around, kernels, variances), factors


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
    kernel = _kernel_beside_inputs(fn) if isinstance(fn, GP) else []
    density = own_density(fn, site["value"])
    parts = (own, _spread(fn), around, kernel, _variance(fn), density)
    return tuple(arrays_of(part) for part in parts)


def _require_attributes(sites: Mapping, seen: Mapping, densities: Mapping) -> None:
    """Raise `ModelError` where a density is computed from what its distribution does not keep."""
    for name, density in densities.items():
        hidden = {*density.sites, *density.arguments} - {*seen[name].sites, *seen[name].arguments}
        if hidden:
            kind = own_kinds(sites[name]["fn"])[0].__name__
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


def _kernel_beside_inputs(gp: GP):
    """k(C, C) at inputs C that are computed from nothing: those of the GP where they are numbers,
    or else a tracer of their shape.

    A kernel may look at the values of its inputs where it sees them, and refuse what nobody gave
    it.
    """
    C = gp.X if not isinstance(gp.X, Tracer) else jnp.zeros(gp.X.shape, gp.X.dtype)
    return gp.kernel(C, C)


def _spread(fn) -> list:
    """Parameters that say how wide a distribution is, also beneath a transformation such as a
    log-normal's.
    """
    inner = [getattr(fn, "base_dist", None), *getattr(fn, "transforms", ())]
    # of a mixture
    inner += [
        getattr(fn, "component_distribution", None),
        *getattr(fn, "component_distributions", ()),
    ]
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


def _told(flow: list[frozenset]) -> Seen:
    names = frozenset().union(*flow)
    arguments = frozenset(n.removeprefix(ARGUMENT) for n in names if n.startswith(ARGUMENT))
    return Seen(arguments, frozenset(n.removeprefix(SITE) for n in names if n.startswith(SITE)))
