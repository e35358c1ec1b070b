"""Effects that are not integrated: sites of several values that the observations depend on in
addition to the functions, and of which `MAP` would make points; and whether a joint density has a
maximum.

It is a rule by role, whatever their prior is. The mode of D values is not their posterior, so `fit`
warns. If their scale is unknown, the mode is far from it or does not exist: tau became .99 instead
of .4 for tau u[g] with Student's t.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from ppl_gp.errors import ModelError, warn
from ppl_gp.gp import unwrap
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.reading.predictor.sites import gaussian
from ppl_gp.reading.reading import Reading
from ppl_gp.reading.roles import roles

_STEP = 0.3  # of a scale: far more than rounding, and a positive value stays positive
_close = partial(jnp.allclose, rtol=1e-4, equal_nan=True)  # of arrays that a move leaves alone


def effects(seen: Callable, trace: dict, sites: list[str], functions: list[str]) -> list[str]:
    """Those of the sites that are effects and not hyperparameters of the likelihood: Gaussian ones,
    and others that move an array that the functions move too, where the functions are zero or not.

    `seen`: (values of some latents) -> arrays that the scored observations are computed from, and
    the functions' prior means, with the others at the values of the trace. The noise of a group
    and cut points are not effects.
    """
    others = [k for k in sites if not gaussian(trace[k]["fn"])]
    if not others:
        return sites
    flow = flows(seen, {k: trace[k]["value"] for k in (*others, *functions)})
    shared = [frozenset() if on.isdisjoint(functions) else on for on in flow]
    rest = [k for k in sites if k not in set(others).difference(*shared)]

    def moves(site, held):
        x = trace[site]["value"]
        left = _same(seen, {**held, site: x}, {**held, site: _moved(x)}, _close)
        return any(site in on and not a for on, a in zip(shared, left, strict=True))

    with jax.ensure_compile_time_eval():
        zero, away = _places(trace, functions)
        return [k for k in rest if k not in others or moves(k, zero) or moves(k, away)]


def _places(trace: dict, functions: list[str]) -> tuple[dict, dict]:
    """Values of the functions: zero, and generic ones that roots, logarithms and probabilities of
    exist, where what multiplies the functions acts too.
    """
    draw, at = np.random.default_rng(0).uniform, {k: trace[k]["value"] for k in functions}
    away = {k: jnp.asarray(draw(0.2, 0.8, x.shape), x.dtype) for k, x in at.items()}
    return {k: jnp.zeros_like(x) for k, x in at.items()}, away


def warn_if_points(
    seen: Callable,
    trace: dict,
    reading: Reading,
    sites: list[str],
    functions: list[str],
    named: tuple[str, ...],
    method: str,
) -> None:
    """Raise `ModelError` for effects whose scale is unknown; warn of others. `named`: sites that
    `integrate=` may name. At most twelve evaluations of the model for each hyperparameter.
    """
    require_bounded(trace, reading, method, sites, integrated=functions)
    of_priors, told = unknown_behind(trace, reading.variance), {}
    for site in sites:
        fn, why = trace[site]["fn"], "no linear predictor holds it"
        if not gaussian(fn):
            why = f"its prior, {type(unwrap(fn)).__name__}, is not Gaussian"
        remedy = f"It cannot be integrated, as {why}. Use "
        if site in named:
            remedy = (
                "With them a datum depends on more functions than without; a local method with "
                f"integrate={named!r} integrates them with the others. Or use "
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
        told.setdefault(remedy, []).append(site)
    for remedy, some in told.items():
        size = sum(np.size(trace[k]["value"]) for k in some)
        warn(
            f"{method} maximises {', '.join(map(repr, some))} ({size} values) with the "
            "hyperparameters: points, which the evidence and the variances of predictions take as "
            "known (where tried, 2 values of 50 rows: evidence 4.7 nats too high, variances down "
            f"to 0.78 of the right ones). {remedy}; "
            f"hyper=MAP(maximise={tuple(some)!r}) says that you know."
        )


def _is_bounded(fn) -> bool:
    """Whether a site has a scale of its own whatever multiplies it, as shares have."""
    where = unwrap(fn).support
    while hasattr(where, "base_constraint"):
        where = where.base_constraint
    ends = hasattr(where, "lower_bound") and hasattr(where, "upper_bound")
    return ends or where is constraints.simplex


def _scales(seen: Callable, trace: dict, site: str, functions: list[str]) -> list[str]:
    """The hyperparameters that act on something that is seen through this site alone: moving them
    moves nothing of it where the site is zero, and something where it is one. Where the functions
    are not zero, twice the one and half the other also have to be the same: the amplitude of a
    kernel that a model writes out does not multiply its length scales.
    """
    hidden = {*roles(trace).hyper, *roles(trace).params} - {site, *functions}
    value = {k: x for k in hidden if is_floating(x := trace[k]["value"])}
    acting = frozenset().union(*flows(seen, value))

    same = partial(_same, seen)

    def scales(k, held, anyhow):
        full = partial(jnp.full_like, trace[site]["value"])
        zero, one, half = ({**held, site: full(x)} for x in (0.0, 1.0, 0.5))
        moved, twice = ({k: jax.tree.map(by, value[k])} for by in (_moved, lambda x: 2.0 * x))
        found = same(zero, zero | moved), same(one, one | moved), same(one, half | twice, _close)
        return any(a and not b and (c or anyhow) for a, b, c in zip(*found, strict=True))

    with jax.ensure_compile_time_eval():
        zero, away = _places(trace, functions)
        return [k for k in sorted(acting) if scales(k, zero, True) or scales(k, away, False)]


def _moved(x):
    return x + _STEP * (1.0 + jnp.abs(x))


def is_floating(tree) -> bool:
    """Whether all arrays of a value are of floating point."""
    return all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in jax.tree.leaves(tree))


def flows(function: Callable, values: dict) -> list[frozenset]:
    """For each array of function(values), the names of the values that it is computed from."""
    found = sources(function, values)
    return jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, frozenset))


def _same(seen: Callable, a: dict, b: dict, how: Callable = jnp.array_equal) -> list[bool]:
    found = (jax.tree.leaves(seen(x)) for x in (a, b))
    return [bool(how(*pair)) for pair in zip(*found, strict=True)]


def require_bounded(
    trace: dict,
    reading: Reading,
    method: str,
    points: Sequence[str] | None = None,
    held: Sequence[str] | None = None,
    integrated: Sequence[str] = (),
) -> None:
    """Raise `ModelError` where a joint maximum need not exist: a site whose spread is itself
    unknown, a group effect say.

    `points`: the sites that are maximised over, where others have a distribution. `held`: sites
    whose values are given, if all others are maximised together and none can be sampled alone.
    `integrated`: sites of a trace that are not maximised.

    p(u | tau) p(tau) has no upper bound as tau falls and u goes to its location, whatever the data
    say, unless p(tau) vanishes there faster than tau^-D grows: D values of u. Which one it is, is
    not proved.
    """
    sites = roles(trace).hyper if points is None else points
    for site, by in unknown_behind(trace, reading.spread).items():
        if site in sites and (by := [k for k in by if k not in (held or ())]):
            raise ModelError(
                f"site '{site}' has a spread that is computed from {by}: {method} would maximise "
                "both together, and nothing says that their joint density has a maximum (it grows "
                f"without bound as the spread falls to zero and '{site}' to its centre, unless the "
                "spread's prior vanishes there fast enough). "
                + f"Integrate it, integrate=(..., '{site}'), if the data depend on it through a "
                "linear predictor. "
                * gaussian(trace[site]["fn"])
                + f"Use {remedies(trace, reading, integrated, drawn=held is None)}."
            )


def remedies(
    trace: dict,
    reading: Reading,
    integrated: Sequence[str],
    scales: Sequence[str] = (),
    drawn: bool = True,
) -> str:
    """What to use, as code that runs. Values are of all that is not integrated, or without a GP of
    spreads, and of `scales`, alone: then all else has a joint mode.
    """
    found, local = roles(trace), "a local method with hyper=Sample(), or " if drawn else ""
    fns = [unwrap(trace[k]["fn"]) for k in found.gps]
    own = [
        f.kernel
        for f in fns
        if isinstance(f, PredictorGP) and not f.kernel.model.priors(f.kernel, f.X)
    ]
    if len(own) < len(fns) or found.params:
        names = [k for k in (*found.hyper, *found.params) if k not in integrated]
        return f"NUTS(), or {local}{_fixed(names)}"
    readings = (reading, *(k.model.source.reading for k in own))
    spreads = (x for r in readings for by in unknown_behind(trace, r.spread).values() for x in by)
    held = f", {_fixed(names)}" if (names := sorted({*scales, *spreads})) else ""
    return f"NUTS(), or {local}Laplace(integrate=(){held})"


def _fixed(names: Iterable[str]) -> str:
    return f"hyper=Fixed({{{', '.join(f'{k!r}: ...' for k in names)}}})"


def unknown_behind(trace: dict, pairs: Iterable[tuple]) -> dict[str, list[str]]:
    """{site: the hyperparameters and params among the sites that it is computed from}, of
    `reading.spread` or `reading.variance`; sites without any are left out.
    """
    unknown = {*roles(trace).hyper, *roles(trace).params}
    return {k: by for k, sites in pairs if (by := sorted(unknown.intersection(sites)))}


def perhaps_unbounded(trace: dict, reading: Reading) -> str | None:
    """What to say where a maximum was not found and may not exist: a variance that is unknown."""
    wide, hyper = unknown_behind(trace, reading.variance), roles(trace).hyper
    told = [f"'{k}' has a variance that is computed from {wide[k]}" for k in wide if k in hyper]
    if not told:
        return None
    return (
        f"a maximum may not exist: {', '.join(told)}; integrate them by NUTS() or hyper=Sample(), "
        "or hold them by hyper=Fixed({...})"
    )
