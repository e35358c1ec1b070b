"""Effects that are not integrated: sites of several values that the observations depend on in
addition to the functions, and of which `MAP` would make points.

It is a rule by role, whatever their prior is. The mode of D values is not their posterior, so `fit`
warns. If their scale is unknown, the mode is far from it or does not exist: tau became .99 instead
of .4 for tau u[g] with Student's t.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from ppl_gp.errors import ModelError, warn
from ppl_gp.infer.probes.maximum import remedies, require_bounded, unknown_behind
from ppl_gp.model.gaussian_sites import gaussian
from ppl_gp.model.reading import Reading
from ppl_gp.model.roles import roles
from ppl_gp.proofs.dependence import sources
from ppl_gp.wrappers import unwrap

_STEP = 0.3  # of a scale: far more than rounding, and a positive value stays positive
_ROUNDED = 1e-4  # of an array that the moves of a value leave where it is


def effects(seen: Callable, trace: dict, sites: list[str], functions: list[str]) -> list[str]:
    """Those of the sites that are effects and not hyperparameters of the likelihood: Gaussian ones,
    and others that move, if the functions are zero, an array that the functions move too.

    `seen`: (values of some latents) -> arrays that the scored observations are computed from, and
    the functions' prior means, with the others at the values of the trace. The noise of a group,
    cut points and the amplitude of an output are not effects.
    """
    others = [k for k in sites if not gaussian(trace[k]["fn"])]
    if not others:
        return sites
    value = {k: trace[k]["value"] for k in (*others, *functions)}
    flow = flows(seen, value)
    shared = [i for i, names in enumerate(flow) if not names.isdisjoint(functions)]
    zero = {k: jnp.zeros_like(value[k]) for k in functions}

    def moves(site):
        if not any(site in flow[i] for i in shared):
            return False
        here, there = (
            jax.tree.leaves(seen({**zero, site: x})) for x in (value[site], _moved(value[site]))
        )
        return not all(bool(jnp.allclose(here[i], there[i], rtol=_ROUNDED)) for i in shared)

    with jax.ensure_compile_time_eval():
        return [k for k in sites if k not in others or moves(k)]


def tell_of_points(
    seen: Callable,
    trace: dict,
    reading: Reading,
    sites: list[str],
    functions: list[str],
    named: tuple[str, ...],
    method: str,
) -> None:
    """Raise `ModelError` for effects whose scale is unknown; warn of others. `named`: sites that
    `integrate=` may name. Four evaluations of the model for each hyperparameter.
    """
    require_bounded(trace, reading, method, sites, integrated=functions)
    of_priors = unknown_behind(trace, reading.variance)
    for site in sites:
        fn, why = trace[site]["fn"], "no linear predictor holds it"
        if not gaussian(fn):
            why = f"its prior, {type(unwrap(fn)).__name__}, is not Gaussian"
        remedy = f"It cannot be integrated, as {why}. Use "
        if site in named:
            remedy = (
                "With it a datum depends on more functions than without it; a local method with "
                f"integrate={named!r} integrates it with the others. Or use "
            )
        scales = [] if _is_bounded(fn) else _scales(seen, trace, site, functions)
        scales = scales or of_priors.get(site) or []
        remedy += remedies(trace, reading, functions, scales)
        if scales:
            raise ModelError(
                f"{method} would maximise site '{site}' together with {scales}, which multiply it, "
                f"far from their posterior. {remedy}; or say that it is to be maximised, "
                f"hyper=MAP(maximise=('{site}',))."
            )
        warn(
            f"{method} maximises '{site}' ({np.size(trace[site]['value'])} values) with the "
            "hyperparameters: it is a point, which the evidence and the variances of predictions "
            f"take as known. {remedy}; hyper=MAP(maximise=('{site}',)) says that you know.",
        )


def _is_bounded(fn) -> bool:
    """Whether a site has a scale of its own whatever multiplies it, as shares have."""
    where = unwrap(fn).support
    while hasattr(where, "base_constraint"):
        where = where.base_constraint
    ends = hasattr(where, "lower_bound") and hasattr(where, "upper_bound")
    return ends or where is constraints.simplex


def _scales(seen: Callable, trace: dict, site: str, functions: list[str]) -> list[str]:
    """The hyperparameters that act on something that is seen through this site alone: where the
    functions are zero, moving them moves nothing of it where the site is zero, and something where
    it is one.
    """
    found = roles(trace)
    points = [k for k in (*found.hyper, *found.params) if k not in functions]
    value = {k: trace[k]["value"] for k in points}
    held = {k: jnp.zeros_like(trace[k]["value"]) for k in functions}
    zero, one = ({**held, site: jnp.full_like(value[site], x)} for x in (0.0, 1.0))
    others = [k for k in value if k != site and is_floating(value[k])]
    flow = flows(lambda moved: seen({site: value[site], **moved}), {k: value[k] for k in others})
    acting = frozenset().union(*flow)

    def multiplies(k):
        moved = {k: jax.tree.map(_moved, value[k])}
        still, pushed = (
            [_same(*pair) for pair in _pairs(seen(at), seen({**at, **moved}))] for at in (zero, one)
        )
        return any(a and not b for a, b in zip(still, pushed, strict=True))

    with jax.ensure_compile_time_eval():
        return [k for k in sorted(acting.intersection(others)) if multiplies(k)]


def _moved(x):
    return x + _STEP * (1.0 + jnp.abs(x))


def is_floating(tree) -> bool:
    """Whether all arrays of a value are of floating point."""
    return all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in jax.tree.leaves(tree))


def flows(function: Callable, values: dict) -> list[frozenset]:
    """For each array of function(values), the names of the values that it is computed from."""
    found = sources(function, values)
    return jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, frozenset))


def _pairs(a, b):
    return zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)


def _same(a, b) -> bool:
    return all(bool(jnp.all(x == y)) for x, y in _pairs(a, b))
