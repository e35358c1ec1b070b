"""Fits of `SVGP`, `CollapsedSVGP`: look, prepare, run the steps, sum the bound over all data."""

import dataclasses
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
from ppl_gp.infer.batches import as_batch, repeated
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.hyper.map import warn_if_weakly_known
from ppl_gp.infer.hyper.restarts import FEW as FEW_VALUES
from ppl_gp.infer.maximised import require_bounded, require_no_maximised_effects
from ppl_gp.infer.svgp.final_bound import errors_of, judged, result_of
from ppl_gp.infer.svgp.look import Subject, look_at
from ppl_gp.infer.svgp.prepare import prepare, with_other_points
from ppl_gp.infer.svgp.problem import Problem, hyper_at
from ppl_gp.infer.svgp.run import Checkpoints, LongRun, chunk_size, identity
from ppl_gp.infer.svgp.start import Begun, other_length_scales
from ppl_gp.infer.svgp.step import Reached, State, advance, begin, best_sites, climb
from ppl_gp.kept import FromInducing
from ppl_gp.quick import quick_jit
from ppl_gp.reading.roles import require_no_subsampling, roles
from ppl_gp.results.fit import Fit
from ppl_gp.runtime import unless_stopped, verb
from ppl_gp.settings import MAP, Sample
from ppl_gp.sparse.bound import Batch, priors_at, require_gaussian
from ppl_gp.sparse.svgp import SVGP, CollapsedSVGP, SparseMethod

STEP = 0.1  # of differences in unconstrained values
# nats: above these the end of a run over all data is none
STEEP = 0.1  # gradient of the hyperparameters
# nats per datum that more inducing variables may add, from which a warning says so
FEW = 1e-2
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
    subject = look_at(method, model, args, kwargs, int(seed))
    begun = _begun(method, subject, key_start, int(seed))
    run = subject.model, subject.data, subject.source.num_data, rng_key
    checkpoints = method.checkpoint and Checkpoints(method.checkpoint, identity(method, *run))
    ended = LongRun(begun, key_run, checkpoints, progress).go()
    told: dict = {"bad_batch": ended.message, "stream_error": ended.cause}
    told["checkpoint_error"] = checkpoints and checkpoints.error
    if ended.message:  # a bad batch would be met again in the sum over all data
        return make_fit(begun, ended, None, told, key_end)
    problem, shallow = begun.problem, subject.structure.is_shallow
    exact = problem.guide is None and shallow and not problem.noisy
    plain = not callable(problem.learning) and begun.spread.mesh is None
    settled = partial(_settled, begun, ended.state, key_end) if exact and plain else None
    return _judged_fit(begun, ended, told, key_end, settled)


@run_method.register
def _fit_collapsed(method: CollapsedSVGP, model, rng_key, args, kwargs, progress) -> Fit:
    (key_start, _, key), seed = _keys(rng_key)
    subject = look_at(method, model, args, kwargs, int(seed))
    _require_collapsible(subject)
    begun = _begun(method, subject, key_start, int(seed))
    batch, problem = begun.batch(key), begun.problem

    def climbed(state: State) -> Reached:
        frees = [state.free, *other_length_scales(begun, state.free)]
        return climb(problem, frees, state.variational.variables, batch, method.tol, progress)

    def again() -> Reached | None:
        other = with_other_points(begun, runs[0].state)
        return None if other is None else climbed(other.state)

    runs = [climbed(begun.state)]
    if runs[0].result is Result.converged:
        second, _ = unless_stopped(again, None)
        runs += [] if second is None else [second]
    reached = max(runs, key=lambda run: max(run.bounds[-1:], default=-np.inf))
    if verb.ended:  # what a second climb would have reached is not known
        reached = reached._replace(result=Result.interrupted)
    variables = reached.state.variational.variables

    def settled(free: dict) -> float:
        best, log_p = best_sites(problem, free, variables, batch)
        return float(best.bound + log_p)

    return _judged_fit(begun, reached, {}, key, settled)


def _begun(method: SparseMethod, subject: Subject, key, seed: int) -> Begun:
    """A run before its first step, whose hyperparameters can be points where they are to be."""
    if isinstance(method.hyper, MAP):
        name, known = f"{type(method).__name__}(hyper=MAP())", method.hyper.maximise
        points = [k for k in subject.names if k not in known]
        require_bounded(subject.trace, subject.model.reading, name, points)
        require_no_maximised_effects(subject.model, *subject.data, name, known)
    return prepare(method, subject, key, seed)


def _judged_fit(begun: Begun, ended: Reached, told: dict, key, settled: Callable | None) -> Fit:
    """The fit, and warnings of what a run has left: the steps are whole, and only what would be
    said of them may be missing. `settled`: the objective at unconstrained values of the
    hyperparameters, at the best q(u) there, where that is known.
    """
    (ended, bound, judgement), _ = unless_stopped(
        lambda: _judgement(begun, ended, key), (ended._replace(result=Result.interrupted), None, {})
    )
    fit = make_fit(begun, ended, bound, told | judgement, key)
    if settled is None:
        _tell_unsettled(fit)
    else:
        unless_stopped(lambda: _tell_end(fit, begun.subject, ended.state.free, settled), None)
    return fit


def _settled(begun: Begun, end: State, key, free: dict) -> float:
    """The objective at `free` after a chunk of steps in which q(u) alone moves."""
    problem = begun.problem
    held = dataclasses.replace(problem, learning=jnp.zeros_like(problem.learning))
    steps = repeated(begun.batch(None), random.split(key, chunk_size(problem.max_steps)))
    return float(advance(held, begin(held, free, end.variational), *steps)[1][-1])


def _judgement(begun: Begun, ended: Reached, key) -> tuple[Reached, float | None, dict]:
    """(the run with its result, the bound over all data, what `stats` say of it)."""
    try:
        bound, error = judged(begun, ended.state, key)
    except DataError as error:  # the steps are kept
        told = {"bad_batch": f"in the sum over all data: {error}", "stream_error": error}
        return ended._replace(result=Result.stream_ended), None, told
    told = {"log_evidence_se": error}
    if bound is not None and np.isfinite(bound):
        told |= errors_of(begun, ended.state, key)
    return ended._replace(result=result_of(begun, ended, bound, key)), bound, told


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
    sds = back(jnp.asarray(1.0 / np.sqrt(held)))
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
            f"{type(fit.method).__name__}(): more inducing variables could raise log_evidence by "
            f"up to {short:.2g} nats at these hyperparameters, {100 * short / num:.2g} per 100 "
            f"rows. Give {asked}, and see what it gains."
        )
    return unsettled or short_of_points


@quick_jit
def _keys(key):
    """Three keys, and a number for what the host draws."""
    keys = random.split(key, 3)
    return tuple(keys), random.randint(keys[0], (), 0, 2**31 - 1)


def _require_collapsible(subject: Subject) -> None:
    require_no_subsampling(subject.trace, "CollapsedSVGP")
    if not (structure := subject.structure).is_shallow:
        raise ModelError(
            "CollapsedSVGP() needs one latent function at given inputs, and the model has latents "
            f"{list(structure.latents)} and inner layers {list(structure.inner)}; give SVGP()."
        )
    hyper = {k: subject.trace[k]["value"] for k in subject.names}
    require_gaussian(subject.model, hyper, as_batch(subject.first, random.key(0)))


def make_fit(begun: Begun, ended: Reached, bound: float | None, told: dict, key) -> Fit:
    """The fit; `told`: what else its `stats` say, where that is not `None`."""
    assert ended.result is not None  # it has ended
    problem, subject, state = begun.problem, begun.subject, ended.state
    hyper, kept, raised = _kept(problem, state, begun.batch(key), key)
    on_disk = lambda x: isinstance(x, np.memmap) or not isinstance(x, np.ndarray)  # noqa: E731
    args, kwargs = jax.tree.map(lambda x: x if on_disk(x) else jnp.asarray(x), subject.data)
    stats = _stats(begun, ended) | {
        "num_inducing": max(q.mean.shape[-1] for q in kept.values()),
        "jitter_raised": float(raised),
    }
    return Fit(
        model=subject.model,
        method=begun.method,
        args=args,
        kwargs=kwargs,
        draws=Draws.equal(hyper, kept) if problem.draws_hyper else Draws.one(hyper, kept),
        log_evidence=bound,
        result=ended.result,
        stats=stats | {k: v for k, v in told.items() if v is not None},
        sampled=problem.draws_hyper,
        local=eqx.combine(state.variational.latents, problem.frozen),
        names=subject.source.names,
    )


def _stats(begun: Begun, ended: Reached) -> dict:
    source, state, problem = begun.subject.source, ended.state, begun.problem
    stats = {
        "steps": len(ended.bounds),
        "bounds": ended.bounds,
        "batch_size": int(source.batch_size or 0),
        "num_data": source.num_data,
        "failed_steps": int(state.failed),
        "shortened_steps": int(state.halved),
    }
    if ended.result in (Result.converged, Result.completed):
        whole = stats["steps"] >= problem.max_steps
        made = "all steps made" if whole else "the bound stopped rising"
        settled = ended.result is Result.converged and not problem.noisy
        stats["ended"] = "no step would gain" if settled else made
    if not problem.noisy and isinstance(begun.method, SVGP):  # L-BFGS tells neither
        stats["q_gap"] = float(state.q_gap)
        if problem.names and problem.guide is None:
            stats["map_gradient"] = float(state.slope)
    return stats | source.kept


@quick_jit
def _kept(problem: Problem, state: State, batch: Batch, key) -> tuple[dict, dict, jax.Array]:
    """(hyperparameters, {GP site: q(u)}, variance added to K_uu), with an axis of draws if any."""

    def one(key):
        hyper, _ = hyper_at(problem, state.free, batch._replace(key=key))
        kept, raised = {}, jnp.zeros(())
        for name, prior in priors_at(problem.model, batch, hyper).items():
            variables = state.variational.variables[name]
            q = state.variational.q[name].whitened()
            kept[name] = FromInducing(inducing=variables, mean=q.mean, reduction=q.reduction)
            raised = jnp.maximum(raised, variables.root(prior).added)
        return hyper, kept, raised

    if not problem.draws_hyper:
        hyper, kept, raised = one(key)
        return hyper, jax.tree.map(lambda x: x[None] if eqx.is_array(x) else x, kept), raised
    hyper, kept, raised = lax.map(one, random.split(key, GUIDE_DRAWS))
    return hyper, kept, jnp.max(raised)
