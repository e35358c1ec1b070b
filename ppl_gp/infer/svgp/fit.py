"""Fitting by `SVGP`: choose inducing variables, run the steps, sum the bound over all data, make a
`Fit`.
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.flatten_util import ravel_pytree

from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, ModelError, Result, warn
from ppl_gp.frames.names import Names
from ppl_gp.hyperparameters import MAP, Sample
from ppl_gp.infer.batches import as_batch
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.hyper.map import warn_if_weakly_known
from ppl_gp.infer.hyper.restarts import FEW as FEW_VALUES
from ppl_gp.infer.loop import unless_stopped
from ppl_gp.infer.maximised import require_bounded, require_no_maximised_effects
from ppl_gp.infer.sources import num_rows
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp.checkpoint import Checkpoints, identity
from ppl_gp.infer.svgp.collapsed import best_sites, climb
from ppl_gp.infer.svgp.devices import Placement, placement
from ppl_gp.infer.svgp.final_bound import errors_of, judged, result_of
from ppl_gp.infer.svgp.look import Subject, look_at
from ppl_gp.infer.svgp.prepare import prepare
from ppl_gp.infer.svgp.problem import Problem, hyper_at
from ppl_gp.infer.svgp.run import Ended, LongRun, chunk_size
from ppl_gp.infer.svgp.start import other_length_scales, starts_elsewhere
from ppl_gp.infer.svgp.step import State, advance_whole, begin
from ppl_gp.kept import FromInducing
from ppl_gp.quick import quick_jit
from ppl_gp.reading.roles import roles
from ppl_gp.results.fit import Fit
from ppl_gp.runtime import verb
from ppl_gp.sparse.bound import Batch, priors_at, require_gaussian
from ppl_gp.sparse.svgp import SVGP

STEP = 0.1  # of differences in unconstrained values
# nats: above these the end of a run over all data is none
STEEP = 0.1  # gradient of the hyperparameters
# nats per datum that more inducing variables may add: from here other points are tried; a warning
SOME, FEW = 1e-3, 1e-2
GUIDE_DRAWS = 100  # draws of the hyperparameters that a fit with an autoguide keeps
WIDE_GAP = 1e-3  # what a whole step of q(u) expects to gain


@run_method.register
def _fit_sparse(method: SVGP, model, rng_key, args, kwargs, progress) -> Fit:
    if isinstance(method.hyper, Sample):
        raise DataError(
            "SVGP(hyper=Sample()): NUTS over inducing variables and hyperparameters together is "
            "SparseNUTS()."
        )
    (key_start, key_run, key_end), seed = _keys(rng_key)
    seed = int(seed)
    if method.collapsed:
        if num_rows(args) is None:
            raise DataError("SVGP(collapsed=True) takes all data in every step; give arrays.")
        method = dataclasses.replace(method, batch_size=sys.maxsize)
    subject = look_at(method, model, args, kwargs, seed)
    if method.collapsed:
        method = dataclasses.replace(method, batch_size=subject.source.num_data)
        _require_collapsible(subject)
    if isinstance(method.hyper, MAP):
        known = method.hyper.maximise
        points = [k for k in subject.names if k not in known]
        require_bounded(subject.trace, subject.model.reading, "SVGP(hyper=MAP())", points)
        require_no_maximised_effects(subject.model, *subject.data, "SVGP(hyper=MAP())", known)
    problem, state = prepare(method, subject, key_start, seed)
    if method.collapsed:
        return _fit_collapsed(method, subject, problem, state, progress, key_end, (key_start, seed))
    spread = placement(method.devices, subject.source.batch_size)
    checkpoints = _checkpoints(method, subject, rng_key)
    rest = (method.tol, method.patience, spread, checkpoints, progress)
    other = partial(_other, method, subject, problem, (key_start, seed))
    elsewhere = partial(starts_elsewhere, method, subject, problem, state)
    long_run = LongRun(problem, subject.source, key_run, *rest, other, elsewhere)
    ended = long_run.go(spread.replicated(state))
    told: dict = {"bad_batch": ended.message, "stream_error": ended.cause}
    told["checkpoint_error"] = checkpoints and checkpoints.error
    if ended.message:  # a bad batch would be met again in the sum over all data
        return make_fit(method, subject, problem, ended, None, told, key_end)
    # the steps are whole: only what would be said of them may be missing
    (ended, bound, judgement), _ = unless_stopped(
        lambda: _judgement(problem, subject, state, ended, spread, key_end),
        (ended._replace(result=Result.interrupted), None, {}),
    )
    fit = make_fit(method, subject, problem, ended, bound, told | judgement, key_end)
    exact = problem.plan.guide is None and subject.structure.is_shallow and not problem.plan.noisy
    plain = problem.rates.learning is not None and spread.mesh is None
    if exact and plain:
        settled = partial(_settled, problem, ended.state, as_batch(subject.first, key_end))
        unless_stopped(lambda: _tell_end(fit, subject, ended.state.free, settled), None)
    else:
        _tell_unsettled(fit)
    return fit


def _settled(problem: Problem, end: State, batch: Batch, free: dict) -> float:
    """The objective at `free` after a chunk of steps in which q(u) alone moves."""
    rates = problem.rates._replace(learning=jnp.zeros_like(problem.rates.learning))
    held = dataclasses.replace(problem, rates=rates)
    keys = random.split(batch.key, chunk_size(problem.plan.max_steps))
    return float(advance_whole(held, begin(held, free, end.variational), batch, keys)[1][-1])


def _other(
    method: SVGP, subject: Subject, problem: Problem, start: tuple, reached: State
) -> State | None:
    """Where more inducing points would help: the start with "farthest" in place of "greedy"."""
    number = max(v.num for v in reached.variational.variables.values())
    greedy = isinstance(method.inducing, str) and method.inducing == "greedy"
    if not greedy or isinstance(subject.source, StreamSource) or number < method.num_inducing:
        return None
    missing = errors_of(problem, reached, subject, start[0], told=False).get("inducing_gap") or 0.0
    if not missing > SOME * subject.source.num_data or not reached.free:
        return None
    return prepare(dataclasses.replace(method, inducing="farthest"), subject, *start)[1]


def _judgement(
    problem: Problem, subject: Subject, start: State, ended: Ended, spread: Placement, key
) -> tuple[Ended, float | None, dict]:
    """(the run with its result, the bound over all data, what `stats` say of it)."""
    bound, error = judged(problem, ended.state, subject, spread, key)
    told = {"log_evidence_se": error}
    if bound is not None and np.isfinite(bound):
        told |= errors_of(problem, ended.state, subject, key)
    states = (start, ended.state)
    result = result_of(ended.result, ended.bounds, bound, problem, states, subject, spread, key)
    return ended._replace(result=result), bound, told


def _tell_end(fit: Fit, subject: Subject, free: dict, settled: Callable[[dict], float]) -> None:
    """Warn where a run has not settled, else as a search under a local method does of what the data
    hardly determine. `settled`: the objective at unconstrained values, at the best q(u) there.
    """
    flat, back = ravel_pytree(free)
    ended = not _tell_unsettled(fit) and fit.result in (Result.converged, Result.completed)
    if not ended or roles(subject.trace).params or not 0 < flat.size <= FEW_VALUES:
        return
    at = lambda step: settled(back(flat + step))  # noqa: E731
    level, steps = settled(free), STEP * np.eye(flat.size)
    bends = np.array([2.0 * level - at(step) - at(-step) for step in steps]) / STEP**2
    # where a neighbour of a zero has no value, no curvature holds it
    held = np.maximum(np.where(np.isfinite(bends), bends, 0.0), 1e-300)
    sds = back(1.0 / np.sqrt(held))
    warn_if_weakly_known(subject.model, *subject.data, subject.trace, fit.hyper, sds)


def _tell_unsettled(fit: Fit) -> bool:
    """Warn where a run has ended and something is left to gain, by steps or by points; whether."""
    gradient, gap = fit.stats.get("map_gradient", 0.0), fit.stats.get("q_gap", 0.0)
    short, num = fit.stats.get("inducing_gap", 0.0), fit.stats["num_data"]
    told = []
    if gradient > STEEP:
        told.append(
            f"the objective still changes by {gradient:.2g} nats a unit of an unconstrained "
            "hyperparameter (a logarithm, where it is positive)"
        )
    if gap > WIDE_GAP:
        told.append(f"a whole step of q(u) still expects to gain {gap:.2g} nats")
    short_of_points = short > FEW * num and fit.result in (Result.completed, Result.converged)
    if unsettled := fit.result is Result.completed and bool(told):
        warn(
            f"SVGP(): after {fit.stats['steps']} steps, as planned, the fit has not settled: "
            f"{' and '.join(told)}. Give more steps or larger rates; where q(u) is much narrower "
            "than its prior, VI() on up to some thousand data."
        )
    elif short_of_points:
        ruled = isinstance(fit.method.inducing, str)
        asked = f"num_inducing={2 * fit.method.num_inducing}" if ruled else "more in inducing="
        few = ruled and fit.stats["num_inducing"] < fit.method.num_inducing  # every row is taken
        if ruled and fit.stats.get("first_batch_only"):
            asked = "" if few else f"{asked}, or "
            asked += "points of all the data in inducing= (these are of the first batches)"
        elif few:
            asked = "GP(..., jitter=) a smaller value, which costs this as every row is taken"
        warn(
            f"SVGP(): more inducing variables could raise log_evidence by up to {short:.2g} nats "
            f"at these hyperparameters, {100 * short / num:.2g} per 100 rows. Give {asked}, and "
            "see what it gains."
        )
    return unsettled or short_of_points


@quick_jit
def _keys(key):
    """Three keys, and a number for what the host draws."""
    keys = random.split(key, 3)
    return tuple(keys), random.randint(keys[0], (), 0, 2**31 - 1)


def _require_collapsible(subject: Subject) -> None:
    if subject.source.plate is not None:
        raise ModelError(
            "SVGP(collapsed=True) takes all data in every step, and plate "
            f"'{subject.source.plate}' subsamples; leave subsample_size out of the model, or "
            "`collapsed`."
        )
    if not subject.structure.is_shallow:
        structure = subject.structure
        raise ModelError(
            "SVGP(collapsed=True) needs one latent function at given inputs, and the model has "
            f"latents {list(structure.latents)} and inner layers {list(structure.inner)}; leave "
            "`collapsed` out."
        )
    hyper = {k: subject.trace[k]["value"] for k in subject.names}
    require_gaussian(subject.model, hyper, as_batch(subject.first, random.key(0)))


def _fit_collapsed(
    method, subject: Subject, problem: Problem, state: State, progress, key, start
) -> Fit:
    batch = as_batch(subject.first, key)

    def climbed(state: State):
        variables = state.variational.variables
        frees = [state.free, *other_length_scales(method, subject, problem, state.free)]
        reached = climb(problem, frees, variables, batch, method.tol, progress)
        return reached, begin(problem, reached.free, reached.variational)

    def judge():
        bound, _ = judged(problem, end, subject, placement(None, None), key)
        usable = bound is not None and np.isfinite(bound)
        return bound, errors_of(problem, end, subject, key) if usable else None

    def again():
        other = _other(method, subject, problem, start, runs[0][1])
        return None if other is None else climbed(other)

    runs = [climbed(state)]
    if runs[0][0].result is Result.converged:
        second, _ = unless_stopped(again, None)
        runs += [] if second is None else [second]
    reached, end = max(runs, key=lambda run: max(run[0].bounds[-1:], default=-np.inf))
    (bound, told), _ = unless_stopped(judge, (None, {}))
    # what a second climb would have reached is not known
    result = Result.interrupted if verb.ended else reached.result
    result, told = (Result.nonfinite, {}) if told is None else (result, told)
    ended = Ended(end, result, reached.bounds, None)
    fit = make_fit(method, subject, problem, ended, bound, told, key)
    for name in ("q_gap", "map_gradient"):  # of other steps than these
        fit.stats.pop(name, None)

    def settled(free: dict) -> float:
        best, log_p = best_sites(problem, free, reached.variational.variables, batch)
        return float(best.bound + log_p)

    unless_stopped(lambda: _tell_end(fit, subject, reached.free, settled), None)
    return fit


def _checkpoints(method: SVGP, subject: Subject, key) -> Checkpoints | None:
    if method.checkpoint is None:
        return None
    same = identity(method, subject.model, subject.data, subject.source.num_data, key)
    return Checkpoints(method.checkpoint, same)


def make_fit(
    method: SVGP, subject: Subject, problem: Problem, ended: Ended, bound, told: dict, key
) -> Fit:
    """The fit; `told`: what else its `stats` say, where that is not `None`."""
    state, sampled = ended.state, problem.plan.draws_hyper
    hyper, kept, raised = _kept(problem, state, as_batch(subject.first, key), key)
    on_disk = lambda x: isinstance(x, np.memmap) or not isinstance(x, np.ndarray)  # noqa: E731
    args, kwargs = jax.tree.map(lambda x: x if on_disk(x) else jnp.asarray(x), subject.data)
    stats = _stats(problem, subject, ended) | {
        "num_inducing": max(q.mean.shape[-1] for q in kept.values()),
        "jitter_raised": float(raised),
    }
    return Fit(
        model=subject.model,
        method=method,
        args=args,
        kwargs=kwargs,
        draws=Draws.equal(hyper, kept) if sampled else Draws.one(hyper, kept),
        log_evidence=bound,
        result=ended.result,
        stats=stats | {k: v for k, v in told.items() if v is not None},
        sampled=sampled,
        local=eqx.combine(state.variational.latents, problem.frozen),
        names=subject.source.names if isinstance(subject.source, StreamSource) else Names(),
    )


def _stats(problem: Problem, subject: Subject, ended: Ended) -> dict:
    source, state, plan = subject.source, ended.state, problem.plan
    stats = {
        "steps": len(ended.bounds),
        "bounds": ended.bounds,
        "batch_size": int(source.batch_size or 0),
        "num_data": source.num_data,
        "failed_steps": int(state.failed),
        "shortened_steps": int(state.halved),
    }
    if ended.result in (Result.converged, Result.completed):
        made = "all steps made" if stats["steps"] >= plan.max_steps else "the bound stopped rising"
        settled = ended.result is Result.converged and not plan.noisy
        stats["ended"] = "no step would gain" if settled else made
    if not plan.noisy:
        stats["q_gap"] = float(state.q_gap)
    if plan.names and plan.guide is None and not plan.noisy:
        stats["map_gradient"] = float(state.slope)
    return stats | (source.kept if isinstance(source, StreamSource) else {})


@quick_jit
def _kept(problem: Problem, state: State, batch: Batch, key) -> tuple[dict, dict, jax.Array]:
    """(hyperparameters, {GP site: q(u)}, variance added to K_uu) with the leading axis of draws
    where there are any.
    """

    def one(key):
        hyper, _ = hyper_at(problem, state.free, batch._replace(key=key))
        kept, raised = {}, jnp.zeros(())
        for name, prior in priors_at(problem.plan.model, batch, hyper).items():
            variables = state.variational.variables[name]
            q = state.variational.q[name].whitened()
            kept[name] = FromInducing(inducing=variables, mean=q.mean, reduction=q.reduction)
            raised = jnp.maximum(raised, variables.root(prior).added)
        return hyper, kept, raised

    if not problem.plan.draws_hyper:
        hyper, kept, raised = one(key)
        return hyper, jax.tree.map(lambda x: x[None] if eqx.is_array(x) else x, kept), raised
    hyper, kept, raised = lax.map(one, random.split(key, GUIDE_DRAWS))
    return hyper, kept, jnp.max(raised)
