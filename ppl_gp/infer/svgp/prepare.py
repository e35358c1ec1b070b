"""A run of `SVGP` before its first step: what it does not change, and its first state."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.deep.bound import require_separate
from ppl_gp.deep.latents import Amortised, Free
from ppl_gp.deep.structure import Structure
from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP
from ppl_gp.infer.batches import as_batch
from ppl_gp.infer.hyper.autoguides import HyperGuide, guide_name
from ppl_gp.infer.maximised import require_bounded
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp import start
from ppl_gp.infer.svgp.final_bound import errors_of
from ppl_gp.infer.svgp.look import Subject, site_inputs, uses_inputs
from ppl_gp.infer.svgp.problem import Problem, hyper_at, placement
from ppl_gp.infer.svgp.start import Begun
from ppl_gp.infer.svgp.step import State, begin
from ppl_gp.quick import quick_jit
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.factors import JointLogLikelihood
from ppl_gp.reading.roles import roles
from ppl_gp.reading.tracing import run_at_once
from ppl_gp.settings import MAP, Fixed
from ppl_gp.sparse.bound import Batch, Variational
from ppl_gp.sparse.expectation import averaged, expected_log_lik, split_effects
from ppl_gp.sparse.families import Family
from ppl_gp.sparse.process import num_values, prior_moments
from ppl_gp.sparse.svgp import Layers, SparseMethod

SOME = 1e-3  # nats per datum that more inducing variables may add, from which others are tried


def prepare(method: SparseMethod, subject: Subject, key, seed: int) -> Begun:
    """A run before its first step. O(M^3 + N M^2) for the inducing points."""
    batch = as_batch(subject.first, key)
    guide, fixed, free = _start_of_hyper(method, subject, batch, key)
    # units and q(h) follow from the inputs that the hyperparameters give
    problem = _problem(method, subject, guide, fixed, subject.names if guide else tuple(free))
    hyper = _hyper_at(problem, free, batch)
    trace = run_at_once(subject.model, batch.args, batch.kwargs, {**hyper, **batch.given})
    inputs = site_inputs(subject, hyper, seed)
    structure, moves = subject.structure, bool(free)
    variational = start.initial_variational(method, trace, structure, inputs, seed, moves)
    scale = {
        k: start.units(v, inputs[k], structure.is_shallow)
        if method.train_inducing
        else jax.tree.map(lambda _: None, v)
        for k, v in variational.variables.items()
    }
    latents, frozen = eqx.partition(_latents(method, subject, trace, batch, key), eqx.is_array)
    problem = dataclasses.replace(problem, units=scale, frozen=frozen)
    variational = started(problem, trace, hyper, variational._replace(latents=latents), batch)
    state, spread = begin(problem, free, variational), placement(method.devices, subject.source)
    return Begun(problem, state, subject, method, spread, key, seed)


def with_other_points(begun: Begun, reached: State) -> Begun | None:
    """Where more inducing points would help: the start with "farthest" in place of "greedy"."""
    method, source = begun.method, begun.subject.source
    number = max(v.num for v in reached.variational.variables.values())
    greedy = isinstance(method.inducing, str) and method.inducing == "greedy"
    if not greedy or isinstance(source, StreamSource) or number < method.num_inducing:
        return None
    missing = errors_of(begun, reached, begun.key, told=False).get("inducing_gap") or 0.0
    if not missing > SOME * source.num_data or not reached.free:
        return None
    other = dataclasses.replace(method, inducing="farthest")
    return prepare(other, begun.subject, begun.key, begun.seed)


def _start_of_hyper(
    method: SparseMethod, subject: Subject, batch: Batch, key
) -> tuple[HyperGuide | None, dict, dict]:
    """(a guide where hyperparameters have one; the fixed ones; what is trained, unconstrained)."""
    is_point = isinstance(method.hyper, MAP | Fixed)
    # a `numpyro.param` has no prior: always a point
    if is_point or not roles(subject.trace).hyper:
        return None, *start.initial_point(method.hyper if is_point else MAP(), subject, batch, key)
    guide = HyperGuide(subject.model, method.hyper, batch.args, batch.kwargs)
    told = f"SVGP(hyper={guide_name(method.hyper)})"
    require_bounded(subject.trace, subject.model.reading, told, guide.held)
    return guide, {}, guide.initial


@quick_jit
def _hyper_at(problem: Problem, free, batch: Batch) -> dict:
    return hyper_at(problem, free, batch)[0]


def _latents(method: SparseMethod, subject: Subject, trace, batch: Batch, key) -> dict:
    """{latent site: q(h)}."""
    found, model, num_data = {}, subject.model, subject.source.num_data
    for i, name in enumerate(subject.structure.latents):
        config = start.of_site(method.layers.latents, name, "latents") or Amortised()
        if isinstance(config, Free) and isinstance(subject.source, StreamSource):
            raise DataError(
                "Free() keeps one q(h) for each row of arrays; a Stream needs an encoder, "
                "Amortised()."
            )
        own = trace[name], random.fold_in(key, i), num_data
        inputs = model.reading.inputs_of_rows(Leaves(model, batch.args, batch.kwargs))
        whole = batch, uses_inputs(model, batch), inputs, model.reading.along("y")
        found[name] = start.initial_latents(config, *own, *whole)
    return found


def _problem(method: SparseMethod, subject: Subject, guide, fixed: dict, names) -> Problem:
    """Without units and q(h)."""
    structure, training = subject.structure, method.training
    expectation = dataclasses.replace(method.expectation, additive=subject.additive)
    fns = (subject.trace[k]["fn"] for k in structure.outer)
    functions = sum(math.prod(fn.shape()[:-1]) for fn in fns)  # that a datum depends on
    exact = structure.is_shallow and expectation.num_draws is None
    exact = exact and (expectation.additive or expectation.nodes(functions) is not None)
    # Faster, hyperparameters of inner layers run away before their q(u) has learnt to use them.
    learning = 0.03 if structure.inner else 0.05
    return Problem(
        model=subject.model,
        expectation=expectation,
        structure=structure,
        layers=_layers(method, structure),
        beta=jnp.asarray(method.layers.beta, float),
        guide=guide,
        names=names,
        train_inducing=method.train_inducing,
        whole=subject.source.whole,
        drawn=(guide is not None and guide.draws) or not exact,
        learning=_rate(learning if method.learning_rate is None else method.learning_rate),
        natural=_rate(training.natural_rate),
        optimiser=training.optimiser,
        num_data=jnp.asarray(subject.source.num_data, float),
        max_steps=method.max_steps,
        warm_up=training.warm_up,
        fixed=fixed,
        units=None,
        frozen={},
    )


def _rate(rate):
    """A number as an array, so that another one compiles nothing anew."""
    return rate if callable(rate) or rate is None else jnp.asarray(rate, float)


def _layers(method: SparseMethod, structure: Structure) -> Layers:
    """Without what has arrays of its own."""
    if (copies := method.layers.num_importance) > 1 and not structure.latents:
        raise ModelError(
            f"Layers(num_importance={copies}): the model has no per-datum latent, so "
            "there is nothing to weight; num_paths averages several draws through the layers."
        )
    require_separate(method.layers, structure, "Layers")
    return dataclasses.replace(method.layers, latents=None, beta=1.0)


# Standard deviations, in those of the prior. Where f is certain at the prior mean the next step is
# that of Newton's method there.
WIDTHS = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3)


def started(
    problem: Problem, trace: dict, hyper: dict, variational: Variational, batch: Batch
) -> Variational:
    """q(u) as wide as the best of `WIDTHS` on a first batch; as the prior unless another gains more
    than a nat a datum. O(B), the likelihood at six times its nodes. Of layers and latents as it is.
    Under q(u) = p(u) a prior of standard deviation 8 gives E[exp(f)] = 1e14: a first step from
    there, of q(u) or of a hyperparameter, is no step at all.
    """
    if not problem.structure.is_shallow:
        return variational
    priors, shapes = start.priors_of(trace, variational.q)
    num = sum(num_values(priors[k], s, variational.variables[k].num) for k, s in shapes.items())
    q = _narrowed(problem, {**hyper, **batch.given}, priors, shapes, num, variational.q, batch)
    return variational._replace(q=q)


@quick_jit
def _narrowed(
    problem: Problem, given: dict, priors: dict[str, GP], shapes: dict, num: int, q: dict, batch
) -> dict[str, Family]:
    widths, weights = map(jnp.asarray, (WIDTHS, batch.weights))
    joint = JointLogLikelihood(problem.model, batch.num, given, batch.args, batch.kwargs)
    priors, own = split_effects(priors)
    log_lik = averaged(joint, own)
    moments = {k: prior_moments(p, shapes[k]) for k, p in priors.items()}
    mean, variance = ({k: x[i] for k, x in moments.items()} for i in (0, 1))

    def expected(width) -> Float[Array, ""]:
        narrow = jax.tree.map(lambda v: width**2 * v, variance)
        terms = expected_log_lik(log_lik, mean, narrow, problem.expectation, batch.key)
        return jnp.sum(jnp.where(weights > 0, weights * terms, 0.0))

    # KL[N(0, s^2) || N(0, 1)] of every whitened variable
    bounds: Array = lax.map(expected, widths) - num * (0.5 * (widths**2 - 1.0) - jnp.log(widths))
    bounds = jnp.where(jnp.isfinite(bounds), bounds, -jnp.inf)
    best = jnp.argmax(bounds)
    width = jnp.where(bounds[best] - bounds[0] > problem.num_data, widths[best], 1.0)
    return {k: one.narrowed(width) for k, one in q.items()}
