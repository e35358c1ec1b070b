"""Fitting by `SVGP`: choose inducing variables, run the steps, sum the bound over all data, make a
`Fit`.
"""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from ppl_gp.deep.importance import Sampling, require_separate
from ppl_gp.deep.latents import Amortised, Free
from ppl_gp.deep.structure import Structure
from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, ModelError, Result
from ppl_gp.hyperparameters import MAP, Sample
from ppl_gp.infer.batches import as_batch
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.hyper.autoguides import guide_name
from ppl_gp.infer.hyper.guide import HyperGuide, is_point
from ppl_gp.infer.probes import require_bounded
from ppl_gp.infer.sources import num_rows
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp.checkpoint import Checkpoints, identity
from ppl_gp.infer.svgp.collapsed import climb
from ppl_gp.infer.svgp.devices import placement
from ppl_gp.infer.svgp.final_bound import judged, nodes_error, result_of
from ppl_gp.infer.svgp.look import Subject, look_at, site_inputs, uses_inputs
from ppl_gp.infer.svgp.objective import hyper_at
from ppl_gp.infer.svgp.problem import Plan, Problem, Rates
from ppl_gp.infer.svgp.run import Ended, LongRun
from ppl_gp.infer.svgp.start import (
    initial_latents,
    initial_point,
    initial_variational,
    of_site,
    units,
)
from ppl_gp.infer.svgp.step import State, begin
from ppl_gp.kept import FromInducing
from ppl_gp.model.tracing import roles, run
from ppl_gp.quick import quick_jit
from ppl_gp.results.fit import Fit
from ppl_gp.sparse.bound import Batch, priors_at
from ppl_gp.sparse.collapsed import require_gaussian
from ppl_gp.sparse.expectation import Expectation
from ppl_gp.sparse.svgp import SVGP

GUIDE_DRAWS = 100  # draws of the hyperparameters that a fit with an autoguide keeps


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
        method = _on_all_data(method, args)
    subject = look_at(method, model, args, kwargs, seed)
    if method.collapsed:
        _require_collapsible(subject)
    if isinstance(method.hyper, MAP):
        require_bounded(subject.trace, subject.model.reading, "SVGP(hyper=MAP())")
    problem, state = prepare(method, subject, key_start, seed)
    if method.collapsed:
        return _fit_collapsed(method, subject, problem, state, progress, key_end)
    spread = placement(method.devices, subject.source.batch_size)
    checkpoints = (
        None
        if method.checkpoint is None
        else Checkpoints(method.checkpoint, _identity(method, subject, rng_key))
    )
    long_run = LongRun(
        problem, subject.source, key_run, method.tol, method.patience, spread, checkpoints, progress
    )
    ended = long_run.go(spread.replicated(state))
    told: dict = {"bad_batch": ended.message, "checkpoint_error": checkpoints and checkpoints.error}
    if ended.message:  # a bad batch would be met again in the sum over all data
        return _make_fit(method, subject, problem, ended, None, told, key_end)
    bound, told["log_evidence_se"] = judged(problem, ended.state, subject, spread, key_end)
    if bound is not None and np.isfinite(bound):
        told["expectation_error"] = nodes_error(problem, ended.state, subject, key_end)
    states = (state, ended.state)
    result = result_of(ended.result, ended.bounds, bound, problem, states, subject, spread, key_end)
    return _make_fit(method, subject, problem, ended._replace(result=result), bound, told, key_end)


@quick_jit
def _keys(key):
    """Three keys, and a number for what the host draws."""
    keys = random.split(key, 3)
    return tuple(keys), random.randint(keys[0], (), 0, 2**31 - 1)


@quick_jit
def _hyper_at(problem: Problem, free, batch: Batch) -> dict:
    return hyper_at(problem, free, batch)[0]


def _on_all_data(method: SVGP, args) -> SVGP:
    if (num := num_rows(args)) is None:
        raise DataError("SVGP(collapsed=True) takes all data in every step; give arrays.")
    return dataclasses.replace(method, batch_size=num)


def _require_collapsible(subject: Subject) -> None:
    if subject.source.plate is not None:
        raise ModelError(
            "SVGP(collapsed=True) takes all data in every step, and plate "
            f"'{subject.source.plate}' subsamples; leave subsample_size out of the model, or "
            "`collapsed`."
        )
    if not subject.structure.is_shallow:
        of = subject.structure
        raise ModelError(
            "SVGP(collapsed=True) needs one latent function at given inputs, and the model has "
            f"latents {list(of.latents)} and inner layers {list(of.inner)}; leave `collapsed` out."
        )
    hyper = {k: subject.trace[k]["value"] for k in subject.names}
    require_gaussian(subject.model, hyper, as_batch(subject.first, random.key(0)))


def _fit_collapsed(method, subject: Subject, problem: Problem, state: State, progress, key) -> Fit:
    batch = as_batch(subject.first, key)
    reached = climb(problem, state.free, state.variational.variables, batch, method.tol, progress)
    end = begin(problem, reached.free, reached.variational)
    bound, _ = judged(problem, end, subject, placement(None, None), key)
    result = Result.nonfinite if bound is None or not np.isfinite(bound) else reached.result
    return _make_fit(
        method, subject, problem, Ended(end, result, reached.bounds, None), bound, {}, key
    )


def prepare(method: SVGP, subject: Subject, key, seed: int) -> tuple[Problem, State]:
    """The static and fixed parts of a run, and its state before the first step. O(M^3 + N M^2) for
    the inducing points.
    """
    batch = as_batch(subject.first, key)
    guide, fixed, free = None, {}, {}
    # a `numpyro.param` has no prior: always a point
    if is_point(method.hyper) or not roles(subject.trace).hyper:
        config = method.hyper if is_point(method.hyper) else MAP()
        fixed, free = initial_point(
            config, subject.model, subject.trace, subject.names, key, batch.args, batch.kwargs
        )
    else:
        guide = HyperGuide(subject.model, method.hyper, batch.args, batch.kwargs)
        require_bounded(
            subject.trace,
            subject.model.reading,
            f"SVGP(hyper={guide_name(method.hyper)})",
            guide.held,
        )
        free = guide.initial
        # Draws of the hyperparameters share one q(v): sites are held in whitened coordinates.
        method = dataclasses.replace(method, dual_bound=False)
    plan = _plan(method, subject, guide, subject.names if guide else tuple(free))
    rates = _rates(method, subject.structure)
    hyper = _hyper_at(Problem(plan, rates, fixed, None, {}), free, batch)
    trace = run(subject.model, batch.args, batch.kwargs, {**hyper, **batch.given})
    inputs = site_inputs(subject, hyper, seed)
    variational = initial_variational(method, trace, subject.structure, inputs, seed)
    scale = {
        k: units(v, inputs[k]) if method.train_inducing else _none(v)
        for k, v in variational.variables.items()
    }
    latents, frozen = eqx.partition(_latents(method, subject, trace, batch, key), eqx.is_array)
    problem = Problem(plan, rates, fixed, scale, frozen)
    return problem, begin(problem, free, variational._replace(latents=latents))


def _latents(method: SVGP, subject: Subject, trace, batch: Batch, key) -> dict:
    """{latent site: q(h)}."""
    found = {}
    for i, name in enumerate(subject.structure.latents):
        config = of_site(method.latents, name, "latents") or Amortised()
        if isinstance(config, Free) and isinstance(subject.source, StreamSource):
            raise DataError(
                "Free() keeps one q(h) for each row of arrays; a Stream needs an encoder, "
                "Amortised()."
            )
        found[name] = initial_latents(
            config,
            trace[name],
            random.fold_in(key, i),
            subject.source.num_data,
            batch.args,
            batch.kwargs,
            uses_inputs(subject.model, batch),
        )
    return found


def _none(variables):
    return jax.tree.map(lambda _: None, variables)


def _plan(method: SVGP, subject: Subject, guide, names) -> Plan:
    whole, sampling = subject.source.whole, _sampling(method, subject.structure)
    expectation = method.expectation._replace(additive=subject.additive)
    exact = subject.structure.is_shallow and not _is_drawn(expectation, _num_functions(subject))
    return Plan(
        model=subject.model,
        expectation=expectation,
        structure=subject.structure,
        sampling=sampling,
        guide=guide,
        names=names,
        train_inducing=method.train_inducing,
        whole=whole,
        drawn=(guide is not None and guide.draws) or not exact,
        schedule=_if_callable(method.learning_rate),
        natural_schedule=_if_callable(method.natural_rate),
        optimiser=method.optimiser,
        max_steps=method.max_steps,
        warm_up=method.warm_up,
    )


def _is_drawn(how: Expectation, num_functions: int) -> bool:
    return how.num_draws is not None or (not how.additive and how.nodes(num_functions) is None)


def _num_functions(subject: Subject) -> int:
    """That the likelihood of a datum sees."""
    return sum(math.prod(subject.trace[k]["fn"].shape()[:-1]) for k in subject.structure.outer)


def _if_callable(rate):
    return rate if callable(rate) else None


def _rates(method: SVGP, of: Structure) -> Rates:
    # Faster, hyperparameters of inner layers run away before their q(u) has learnt to use them.
    learning = (
        (0.03 if of.inner else 0.05) if method.learning_rate is None else method.learning_rate
    )
    numbers = (learning, method.natural_rate, method.beta)
    return Rates(*(None if callable(x) or x is None else jnp.asarray(x, float) for x in numbers))


def _sampling(method: SVGP, of: Structure) -> Sampling:
    if method.num_importance > 1 and not of.latents:
        raise ModelError(
            f"SVGP(num_importance={method.num_importance}): the model has no latent that stands "
            "one a datum, so there is nothing to weight; num_paths averages several draws "
            "through the layers."
        )
    sampling = Sampling(
        method.num_importance, method.num_paths, method.expected_last, method.doubly_reparameterised
    )
    require_separate(sampling, of, "SVGP")
    return sampling


def _identity(method: SVGP, subject: Subject, key) -> dict:
    source = subject.source
    data = (
        (subject.first.args, subject.first.kwargs)
        if isinstance(source, StreamSource)
        else (source.args, source.kwargs)
    )
    return identity(method, subject.model, data, source.num_data, key)


def _make_fit(
    method, subject: Subject, problem: Problem, ended: Ended, bound, told: dict, key
) -> Fit:
    state = ended.state
    hyper, kept, raised = _kept(problem, state, as_batch(subject.first, key), key)
    sampled = problem.plan.draws_hyper
    source = subject.source
    stats = {
        "steps": len(ended.bounds),
        "bounds": ended.bounds,
        "batch_size": int(source.batch_size or 0),
        "num_data": source.num_data,
        "num_inducing": max(q.mean.shape[-1] for q in kept.values()),
        "failed_steps": int(state.failed),
        "shortened_steps": int(state.halved),
        "jitter_raised": float(raised),
    }
    stats |= {k: v for k, v in told.items() if v is not None}
    # what is kept of the data: `loo` and `to_datatree` know no others
    if isinstance(source, StreamSource):
        stats["first_batch_only"] = True
    args, kwargs = (
        (subject.first.args, subject.first.kwargs)
        if isinstance(source, StreamSource)
        else (source.args, source.kwargs)
    )
    args, kwargs = jax.tree.map(_on_device, (args, kwargs))
    draws = Draws.equal(hyper, kept) if sampled else Draws.one(hyper, kept)
    local = eqx.combine(state.variational.latents, problem.frozen)
    return Fit(
        model=subject.model,
        method=method,
        args=args,
        kwargs=kwargs,
        draws=draws,
        log_evidence=bound,
        result=ended.result,
        stats=stats,
        sampled=sampled,
        local=local,
    )


def _on_device(x):
    return jnp.asarray(x) if isinstance(x, np.ndarray) and not isinstance(x, np.memmap) else x


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
            root = variables.root(prior)
            q = state.variational.q[name].whitened(root, variables, prior)
            kept[name] = FromInducing(
                inducing=variables, mean=q.mean, reduction=q.reduction, basis=q.basis
            )
            raised = jnp.maximum(raised, root.added)
        return hyper, kept, raised

    if not problem.plan.draws_hyper:
        hyper, kept, raised = one(key)
        return hyper, jax.tree.map(lambda x: x[None] if eqx.is_array(x) else x, kept), raised
    hyper, kept, raised = lax.map(one, random.split(key, GUIDE_DRAWS))
    return hyper, kept, jnp.max(raised)
