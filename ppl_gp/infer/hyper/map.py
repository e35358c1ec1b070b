"""`hyper=MAP()`: the mode of log evidence + log prior, the best of all restarts.

The loop over steps stays in Python: it shows progress, and Ctrl-C ends it with the best point so
far. `restarts.py` is one step of all restarts, compiled.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ppl_gp.errors import DataError, Result, warn
from ppl_gp.gp import unwrap
from ppl_gp.infer.hyper.point import LocalProblem, Point, fit_at, infer_hyper, point_at
from ppl_gp.infer.hyper.restarts import (
    FLAT,
    UNUSABLE,
    Ascent,
    Run,
    advance,
    asked_for,
    constrained,
    plainly,
    spreads,
    start,
)
from ppl_gp.infer.hyper.space import fixed_values, space, support
from ppl_gp.infer.maximised import require_bounded, unknown_behind
from ppl_gp.quick import entry, quick_jit
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.fingerprint import by_shapes
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.reading.reading import Reading
from ppl_gp.reading.roles import cannot_be_drawn, roles
from ppl_gp.reading.tracing import run
from ppl_gp.results.fit import Fit
from ppl_gp.runtime import Stage, interruptible, unless_stopped, verb
from ppl_gp.settings import MAP, Grid

_AGAIN = 8  # starts where none of those that were asked for has a value
# sd of a logarithm from which on a hyperparameter is weakly known. Length scales and variances of
# GPs have up to 1.6 (noise, 20 binary rows); with .97, a scale's effects have .67 of their true sds
WEAK, WEAK_SCALE = 2.0, 0.9
AT_END = 7.0  # from here on a small value is where the search stopped on its way to the end
_POWERS = 3  # of ten, by which other starts differ
_FELL = 1e-3  # of where the search began: what has fallen so far is named


@infer_hyper.register
def _fit_map(hyper: MAP, problem: LocalProblem) -> Fit:
    label = f"{type(problem.method).__name__}(hyper=MAP())"
    points = [k for k in problem.found.hyper if k not in hyper.maximise]
    require_bounded(problem.trace, problem.model.reading, label, points)
    if not problem.names:
        return fit_at(problem, point_at(problem, {}))
    _, best = maximise(hyper, problem)
    unbounded = _perhaps_unbounded(problem.trace, problem.model.reading)
    cautions = [x for x in (best.stats.get("caution"), unbounded) if x]
    if best.result is not Result.converged and cautions:
        best = best._replace(stats={**best.stats, "caution": "; and ".join(cautions)})
    if hyper.restarts == 1 and hyper.init is None and (hint := _one_start(problem)):
        best = best._replace(stats={**best.stats, "hint": hint})
    return fit_at(problem, best)


def _one_start(problem: LocalProblem) -> str | None:
    """What to say of one start where a period or several length scales are unknown; a warning."""
    values = {k: problem.trace[k]["value"] for k in problem.names}
    periods, _, scales = behind_kernels(problem.model, problem.args, problem.kwargs, values)
    if not (periods or scales):
        return None
    what = f"{periods} is a period" if periods else f"{scales} are length scales of several columns"
    hint = (
        f"MAP(): {what}, whose likelihood often has several modes, and the search had one start. "
        "Another mode may be better by any number of nats: compare stats['log_posterior'] with "
        "that of hyper=MAP(restarts=8)."
    )
    if periods:
        warn(hint)
    return hint


def maximise(
    config: MAP | Grid, problem: LocalProblem, jacobian: bool = False
) -> tuple[Ascent, Point]:
    """Run all restarts to convergence and keep the best: (what was climbed, the point).
    `interrupted` and `max_steps` keep the best point so far. `jacobian`: the maximum in
    unconstrained coordinates. How the best one has ended counts; the others' ends are in `stats`.
    """
    where = space(problem.trace, problem.model, problem.args, problem.kwargs)
    ascent = Ascent(problem.setting, where, jacobian)
    given = None if config.init is None else fixed_values(config, where)
    label = f"{type(problem.method).__name__} MAP"

    def climbed(begun: Run, again) -> tuple[Run, tuple[Point, Callable]]:
        stages = _stages(ascent, begun, config, again)
        runs, _ = interruptible(stages, label, config.max_steps, problem.progress)
        return runs, _best(ascent, begun.point, runs, problem.trace)

    begun = start(ascent, problem.rng_key, config.restarts, given)
    _require_inside(begun, config)
    drawn = not any(cannot_be_drawn(problem.trace[k]) for k in where.names)
    again = (lambda: start(ascent, problem.rng_key, _AGAIN, None)) if drawn else None
    runs, best = climbed(begun, again)
    look = partial(_elsewhere, ascent, begun.point, runs, config, problem)
    there = None if verb.ended else unless_stopped(look, None)[0]
    if there is not None:
        _, found = climbed(start(ascent, problem.rng_key, 1, there), None)
        best = max(best, found, key=lambda one: one[0].stats["log_posterior"])
    point, tell = best
    tell(point)  # of the point that stays alone
    return ascent, point


def _elsewhere(
    ascent: Ascent, begun: dict, runs: Run, config: MAP | Grid, problem: LocalProblem
) -> dict | None:
    """Hyperparameters of the best start with other length scales, if it is above what the search
    has reached: no step leaves a mode where noise explains all. One evaluation each.
    """
    if config.init is not None:
        return None
    hyper, *_ = constrained(ascent, runs._replace(point=begun), np.asarray(0))
    losses, first = np.asarray(runs.loss), jax.tree.map(lambda x: np.asarray(x)[0], begun)
    best, found = int(np.argmin(losses)), None
    others, least = jnp.asarray(np.arange(len(losses)) != best), losses[best] - FLAT
    for free in other_scales(first, problem.model, problem.args, problem.kwargs, hyper):
        moved = jax.tree.map(np.array, runs.point)  # on the host
        jax.tree.map(lambda x, new: x.__setitem__(best, new), moved, free)
        asked = jax.tree.map(jnp.asarray, moved)
        there = plainly(ascent, runs._replace(asked=asked, done=others))
        if (loss := np.asarray(there.loss)[best]) < least:
            found, least = asked, loss
    if found is None:
        return None
    return constrained(ascent, runs._replace(point=found), np.asarray(best))[0]


def _stages(ascent: Ascent, runs: Run, config: MAP | Grid, again) -> Iterator[Stage[Run]]:
    """Steps of all restarts until every one has ended; `again`: where no start has a value."""
    yield Stage(runs, 0)
    tol = np.asarray(config.tol, float)
    for step in range(config.max_steps):
        runs, at = asked_for(ascent, runs)
        runs = advance(runs, at, tol)
        if step == 0 and again is not None and not np.any(np.asarray(runs.loss) < UNUSABLE):
            runs = again()
            continue
        yield Stage(runs, step + 1, f"log posterior {-np.min(np.asarray(runs.loss)):.3f}")
        if np.all(np.asarray(runs.done)):
            return


def _best(ascent: Ascent, begun: dict, runs: Run, trace: dict) -> tuple[Point, Callable]:
    """(The best of the restarts, solved once more at its point; what tells of it); `begun`: where
    they began.
    """
    losses = np.asarray(runs.loss)
    best = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
    hyper, bounds, flat = constrained(ascent, runs, np.asarray(best))
    others = jnp.asarray(np.arange(len(losses)) != best)
    _, last = asked_for(ascent, runs._replace(asked=runs.point, done=others))
    _, slopes, value, solution = entry(last, best)
    stats = {
        "map_steps": int(np.asarray(runs.steps)[best]),
        "map_gradient": float(np.asarray(runs.slope)[best]),
        "log_posterior": -float(losses[best]),
        "restart_log_posteriors": -losses,
        "restart_steps": np.asarray(runs.steps),
        "restart_ended": np.asarray(runs.done),
        "at_bound": [k for k, hit in bounds.items() if bool(hit)],
    }
    result = Result.interrupted if verb.ended else _result(runs, best, bool(flat))
    if result in (Result.max_steps, Result.nonfinite):
        first, *_ = constrained(ascent, runs._replace(point=begun), np.asarray(best))
        if caution := vanishing(trace, first, hyper, slopes):
            stats["caution"] = caution
        elif result is Result.max_steps:
            stats["caution"] = stopped(stats, slopes)
    tell = partial(_tell, ascent, runs, best, slopes, trace)
    return Point(hyper, result, stats, value, solution), tell


def _tell(ascent: Ascent, runs: Run, best: int, slopes: dict, trace: dict, point: Point) -> None:
    """A warning of what the data hardly determine, where a search under priors has converged."""
    if point.result is Result.converged and not (ascent.jacobian or roles(trace).params):
        where = ascent.space
        sds, _ = unless_stopped(lambda: spreads(ascent, runs, best, slopes), None)
        warn_if_weakly_known(where.model, where.args, where.kwargs, trace, point.hyper, sds)


def warn_if_weakly_known(model, args, kwargs, trace: dict, hyper: dict, sds: dict | None) -> None:
    """A warning where `weakly_known` has something to say."""
    scales = _scales_of_effects(model, args, kwargs, hyper) if sds else frozenset()
    if text := weakly_known(trace, hyper, sds or {}, scales):
        warn(text)


@by_shapes
def _scales_of_effects(model, args, kwargs, hyper: dict) -> frozenset:
    """The hyperparameters that covariances of integrated effects, no GPs, are computed from."""

    def covariances(hyper):
        there = run(model, args, kwargs, hyper)
        fn: Any = unwrap(there[roles(there).gps[0]]["fn"])
        if not isinstance(fn, PredictorGP):
            return []
        gps, parts = fn.behind.priors(), fn.kernel.at(fn.X).parts
        return [x.blocks() + x.jitter() for k, x in parts.items() if k not in gps]

    return frozenset().union(*sources(covariances, hyper))


def _result(runs: Run, best: int, flat: bool) -> Result:
    if not np.asarray(runs.loss)[best] < UNUSABLE:
        return Result.nonfinite
    return Result.converged if np.asarray(runs.done)[best] and flat else Result.max_steps


def _require_inside(runs: Run, config: MAP | Grid) -> None:
    """The ends of a support are infinitely far away."""
    finite = jax.tree.map(lambda x: bool(np.all(np.isfinite(np.asarray(x)[0]))), runs.point)
    edge = [k for k, x in finite.items() if not jax.tree.all(x)]
    if config.init is not None and edge:
        raise DataError(
            f"{type(config).__name__}(init=...) has {edge} on the edge of the support, where no "
            "step starts; give values inside."
        )


def vanishing(trace: dict, before: dict, after: dict, slopes: dict) -> str | None:
    """What to say of a search that has not converged, where a site fell toward the lower end of its
    support and the log posterior still rises that way; else `None`. `before`, `after`: {site:
    value} where it began and ended; `slopes`: of the negative log posterior, unconstrained, at the
    latter.
    """
    told = []
    for name in before:
        if (end := lower_end(support(trace[name]))) is not None:
            leaves = [jax.tree.leaves(x[name]) for x in (before, after, slopes)]
            for began, ended, slope in zip(*leaves, strict=True):
                told += _fallen(name, began, ended, np.asarray(end, float), slope)
    if not told:
        return None
    return (
        f"{' and '.join(told)}, and the log posterior still rises as it falls: more steps only "
        "follow it. Data without noise do this to the scale of the noise. Give it a prior whose "
        "density is zero at its lower end (dist.LogNormal, dist.InverseGamma), a floor (1e-3 + "
        "noise, in units of y), or a value, hyper=Fixed({...})"
    )


def stopped(stats: dict, slopes: dict) -> str:
    """Where a search that has not converged stopped."""
    steepest = {k: max(np.max(np.abs(x)) for x in jax.tree.leaves(v)) for k, v in slopes.items()}
    name = max(steepest, key=steepest.__getitem__)
    at = stats["at_bound"]
    edge = f", with {at} at an end of the declared interval" if at else ""
    return (
        f"the search stopped where the log posterior still changes by {steepest[name]:.1g} nats "
        f"per unit of the unconstrained '{name}'{edge}. If a scale is at zero, give it a prior "
        "away from zero (dist.LogNormal) or hold it, hyper=Fixed({...}); else try MAP(restarts=8)"
    )


def _fallen(name: str, began, ended, end, slope) -> list[str]:
    """The first entry of a site that fell to its lower end, in words, where there is one."""
    began, ended = (np.ravel(np.asarray(x, float) - end) for x in (began, ended))
    slope = np.ravel(np.asarray(slope, float))
    falls = np.flatnonzero((ended < _FELL * began) & (slope > FLAT))
    return [f"'{name}' fell from {began[i]:.1g} to {ended[i]:.1g}" for i in falls[:1]]


def weakly_known(trace: dict, hyper: dict, sds: dict, scales: frozenset) -> str | None:
    """What to say of a positive hyperparameter whose posterior is wide compared with its distance
    from the lower end of its support; `sds`: of the unconstrained values; `scales`: of effects.
    """
    ends = {k: end for k in sds if (end := lower_end(support(trace[k]))) is not None}
    found = []
    for name, end in ends.items():
        limit = WEAK_SCALE if name in scales else WEAK
        for value, ratio in zip(*map(jax.tree.leaves, (hyper[name], sds[name])), strict=True):
            value, ratio = np.ravel(np.asarray(value) - np.asarray(end)), np.ravel(ratio)
            most = ratio.argmax()
            found.append((ratio[most] / limit, ratio[most], value[most], name))
    excess, ratio, value, name = max(found, default=(0.0, 0.0, 0.0, ""))
    if not excess > 1.0:
        return None
    end = ends[name]
    at_end = ratio > AT_END and value < 0.1 * np.max(np.asarray(trace[name]["value"]) - end)
    where = f"{value:.1g}, with a posterior sd {min(ratio, 999.0):.2g} times that"
    where = f"its mode is at {np.min(end):.3g}, the end of its support" if at_end else where
    small = ", so that its effects' sds are too small: 0.002 to 0.87 of the right ones where tried"
    return (
        f"MAP(): the data hardly determine '{name}': {where}. MAP takes it as "
        f"known{small * (name in scales)}. Integrate it by hyper=Grid() in Laplace(), EP() or VI()."
    )


def lower_end(where: Any):
    """Of a support that has no upper one, where each entry has its own coordinate."""
    while hasattr(where, "base_constraint"):
        where = where.base_constraint
    return None if hasattr(where, "upper_bound") else getattr(where, "lower_bound", None)


@by_shapes
def behind_kernels(model, args, kwargs, values: dict) -> tuple[list[str], ...]:
    """Names behind kernels' (periods, length scales, those of several columns). Abstract."""

    def tuned(values):
        trace = run(model, args, kwargs, values)
        fns = [unwrap(trace[name]["fn"]) for name in roles(trace).gps]
        kernels = [p.kernel for fn in fns for p in _priors(fn)]
        parts = jax.tree.leaves(kernels, is_leaf=lambda k: hasattr(k, "lengthscale"))
        scales = [k.lengthscale for k in parts if hasattr(k, "lengthscale")]
        several = [x for x in scales if np.size(x) > 1]
        return [k.period for k in parts if hasattr(k, "period")], scales, several

    periods, scales, several = sources(tuned, values)
    return tuple(sorted(frozenset().union(*x)) for x in (periods, scales, several))


def other_scales(free: dict, model, args, kwargs, hyper: dict) -> Iterator[dict]:
    """Unconstrained points with other length scales than those of `free`, whose values are `hyper`:
    by powers of ten up to a thousandth and a thousand times those, and as far around the standard
    deviation of each column of the kernels' inputs.
    """
    if not (scales := behind_kernels(model, args, kwargs, hyper)[1]):
        return
    ratios = np.concatenate([np.ravel(x) for x in _spreads_in_scales(model, args, kwargs, hyper)])
    middles = {0, *np.round(np.log10(ratios[ratios > 0])).astype(int).tolist()}
    powers = {m + p for m in middles for p in range(-_POWERS, _POWERS + 1)} - {0}
    for power in sorted(powers):
        # unconstrained values are logarithms of positive ones
        yield {k: x + power * math.log(10.0) if k in scales else x for k, x in free.items()}


@quick_jit
def _spreads_in_scales(model, args, kwargs, hyper: dict) -> list[Array]:
    """Standard deviations of the columns that kernels' length scales are of, in these."""
    trace, found = run(model, args, kwargs, hyper), [jnp.zeros(0)]
    for prior in (p for name in roles(trace).gps for p in _priors(unwrap(trace[name]["fn"]))):
        spread = jnp.std(jnp.reshape(prior.X, (len(prior.X), -1)), 0)
        for k in jax.tree.leaves(prior.kernel, is_leaf=lambda k: hasattr(k, "lengthscale")):
            scale = jnp.ravel(jnp.asarray(getattr(k, "lengthscale", ())))
            dims = getattr(k, "active_dims", None) or range(len(spread))
            # a periodic kernel's is a pure number; a user's may be of other inputs
            if not hasattr(k, "period") and scale.size in (1, len(dims)):
                found.append(spread[jnp.asarray([*dims], int)] / scale)
    return found


def _priors(fn: Any) -> list:
    return list(fn.behind.priors().values()) if isinstance(fn, PredictorGP) else [fn]


def _perhaps_unbounded(trace: dict, reading: Reading) -> str | None:
    """What to say where a maximum was not found and may not exist: a variance that is unknown."""
    wide, hyper = unknown_behind(trace, reading.variance), roles(trace).hyper
    told = [f"'{k}' has a variance that is computed from {wide[k]}" for k in wide if k in hyper]
    if not told:
        return None
    return (
        f"a maximum may not exist: {', '.join(told)}; integrate them by NUTS() or hyper=Sample(), "
        "or hold them by hyper=Fixed({...})"
    )
