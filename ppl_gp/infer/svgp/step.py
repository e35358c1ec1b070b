"""One step of sparse variational training, compiled: natural gradients for q(u), an optax optimiser
for everything else. At the end the steps of `CollapsedSVGP`: L-BFGS on Titsias' bound plus the log
prior.

Both gradients come from one forward and one reverse pass. A step that gives something that is not
finite, or that loses over all data what no optimiser's step explains, is not made: the run goes
back to the last good state, shortens its steps, and counts it.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random
from jaxtyping import Array, Float, Int

from ppl_gp.errors import Result
from ppl_gp.infer.svgp.problem import Problem, hyper_at, is_trained, objective
from ppl_gp.quick import full_jit, quick_jit
from ppl_gp.runtime import Stage, interruptible
from ppl_gp.sparse.bound import Batch, Terms, Variational, collapsed
from ppl_gp.sparse.families import Family, NaturalGaussian, Nudge

GROWTH = 1.1  # of shortened steps, after each that is made
CHUNK = 5  # steps of L-BFGS
_PATIENT = 3  # chunks without a gain after which the run is over
MARGIN = 1.0  # nats by which another start has to be better after a chunk


class Last(eqx.Module):
    """The last good state, and the natural-gradient target found there."""

    free: dict
    variational: Variational
    target: dict[str, NaturalGaussian]
    loss: Float[Array, ""]
    allowed: Float[Array, ""]  # nats that the step from here may lose


class State(eqx.Module):
    """Everything a run needs to go on."""

    free: dict
    variational: Variational
    optimiser: Any
    last: Last
    step: Int[Array, ""]
    shrink: Float[Array, ""]  # factor on the natural-gradient step, below 1 after failures
    failures: Int[Array, ""]  # in a row
    failed: Int[Array, ""]  # in all
    halved: Int[Array, ""]  # natural-gradient steps shortened to stay positive definite
    slope: Float[Array, ""]  # the steepest derivative in a trained hyperparameter, nats a unit
    q_gap: Float[Array, ""]  # what a whole step of q(u) is expected to gain there, nats


class Reached(NamedTuple):
    """A state, the objective before every step that led to it (nats), and where there is no further
    step, how the run ended and what is wrong with the next batch.
    """

    state: State
    bounds: np.ndarray
    result: Result | None = None
    message: str | None = None
    cause: Exception | None = None  # raised inside the stream


@quick_jit
def folded(key, numbers) -> Array:
    """A key for each number."""
    return jax.vmap(lambda i: random.fold_in(key, i))(numbers)


@quick_jit
def begin(problem: Problem, free, variational: Variational) -> State:
    """The state before the first step."""
    trained, _ = eqx.partition((free, variational), is_trained(problem, free, variational))
    zero, one = jnp.zeros((), jnp.int32), jnp.ones(())
    target = {k: q for k, q in variational.q.items() if isinstance(q, NaturalGaussian)}
    last = Last(free, variational, target, jnp.asarray(jnp.inf), jnp.zeros(()))
    counts: dict = dict.fromkeys(("step", "failures", "failed", "halved"), zero)
    levels: dict = dict.fromkeys(("slope", "q_gap"), jnp.zeros(()))
    seen = problem.optax(zero).init(trained)
    state = State(free, variational, seen, last, shrink=one, **counts, **levels)
    # Without weak types, which the first step would lose: the second chunk would be compiled anew.
    return jax.tree.map(lambda x: jnp.array(x, x.dtype) if eqx.is_array(x) else x, state)


def step(problem: Problem, state: State, batch: Batch) -> tuple[State, Float[Array, ""]]:
    """(state, objective): bound plus log prior of the hyperparameters, nats, before the step."""
    spec = is_trained(problem, state.free, state.variational)
    trained, held = eqx.partition((state.free, state.variational), spec)

    def loss(trained, nudge):
        free, variational = eqx.combine(trained, held)
        value, t = objective(problem, free, variational, batch, nudge)
        return -value, t

    (value, t), (gradient, toward) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        trained, nudges(state.variational.q)
    )
    reached = jax.tree.leaves((value, gradient, toward))
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in reached]))
    change = value - state.last.loss
    failed = ~finite
    optimised = _optimised(problem, state, spec, gradient)
    if toward and not problem.noisy:
        failed = failed | (change > state.last.allowed)
        # q(u) is still on its way: what is steep here is not steep where it arrives
        away = jnp.abs(change) > problem.num_data
        here = state.free, state.variational, state.optimiser
        waiting = Optimised(*here, optimised.slope, optimised.q_gap, jnp.zeros(()))
        optimised = _choose(away, waiting, optimised)
    new = _advance(problem, state, optimised, jax.tree.map(jnp.negative, toward), t, value)
    return _choose(failed, _retreat(problem, state), new), -value


class Optimised(NamedTuple):
    """What the optimiser trains after its update, its state, how steep it was in hyperparameters
    and in q, and the nats that such a step may lose.
    """

    free: dict
    variational: Variational
    optimiser: Any
    slope: Float[Array, ""]
    q_gap: Float[Array, ""]
    allowed: Float[Array, ""]


def _advance(
    problem: Problem, state: State, optimised: Optimised, toward, t: Terms, value
) -> State:
    sites = {k: q for k, q in state.variational.q.items() if isinstance(q, NaturalGaussian)}
    target = {k: q.target(t.q[k], toward[k], t.kl_weights[k]) for k, q in sites.items()}
    moved, halved = blend_all(sites, target, problem.natural_rate(state.step) * state.shrink)
    # of a batch that is some of the data a step's gain is that batch's
    told = [] if problem.noisy else list(sites)
    gaps = [sites[k].expected_gain(t.q[k], target[k], t.kl_weights[k]) for k in told]
    loss_allowed = optimised.allowed + 1e-9 * (1.0 + jnp.abs(value))
    return dataclasses.replace(
        state,
        free=optimised.free,
        variational=optimised.variational._replace(q={**optimised.variational.q, **moved}),
        optimiser=optimised.optimiser,
        last=Last(state.free, state.variational, target, value, loss_allowed),
        step=state.step + 1,
        shrink=jnp.minimum(1.0, GROWTH * state.shrink),
        failures=jnp.zeros_like(state.failures),
        halved=state.halved + halved,
        slope=optimised.slope,
        q_gap=sum(gaps, optimised.q_gap),
    )


def _optimised(problem: Problem, state: State, spec, gradient) -> Optimised:
    """An update by the optimiser. In the warm-up only q(u) and q(h) move, and what the optimiser
    has seen there is forgotten at its end. Derivatives and steps of inducing variables are in their
    `units`, so that the scale of the inputs changes nothing. No derivative counts for more than a
    nat a datum: under q(u) = p(u) a bound of counts can be -1e15, and Adam, which remembers a
    thousand squares, would not move for the rest of the run.
    """
    trained, held = eqx.partition((state.free, state.variational), spec)
    num_data = problem.num_data
    optimiser, warm_up = problem.optax(state.step), problem.warm_up
    seen = _choose(state.step == warm_up, optimiser.init(trained), state.optimiser)
    gradient = _in_units(problem.units, gradient)
    bounded = jax.tree.map(lambda g: jnp.clip(g, -num_data, num_data), gradient)
    updates: Any
    updates, seen = optimiser.update(bounded, seen, trained)
    free, variational = updates
    hold = jnp.where(state.step < warm_up, 0.0, 1.0)
    free, variables = jax.tree.map(lambda u: hold * u, (free, variational.variables))
    updates = free, variational._replace(variables=variables)
    if not problem.noisy:
        updates = jax.tree.map(lambda u: state.shrink * u, updates)
    moved = eqx.combine(eqx.apply_updates(trained, _in_units(problem.units, updates)), held)
    # half a squared gradient bounds the gain where the curvature is that of the KL, 1, and more
    q_gap = 0.5 * sum([jnp.sum(g**2) for g in jax.tree.leaves(gradient[1].q)], jnp.zeros(()))
    allowed = _allowed(gradient, updates, num_data)
    return Optimised(*moved, seen, _largest(gradient[0]), q_gap, allowed)


def _in_units(units, tree):
    """A gradient or an update with that of inducing variables times their units."""
    free, variational = tree
    variables = jax.tree.map(lambda x, unit: x * unit, variational.variables, units)
    return free, variational._replace(variables=variables)


def _allowed(gradient, updates, num_data) -> Array:
    """Nats that an optimiser's step may lose: what it expects to gain, and to second order, as the
    square of its longest entry, a hundred times what a curvature of 1 a datum explains.
    """
    products = jax.tree.leaves(jax.tree.map(lambda g, u: jnp.sum(g * u), gradient, updates))
    first = jnp.abs(sum(products, jnp.zeros(())))
    return 2.0 * first + 100.0 * num_data * _largest(updates) ** 2


def _largest(tree) -> Array:
    return jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(tree)] or [0.0]))


def _retreat(problem: Problem, state: State) -> State:
    """Back to the last good state, half as far along the natural gradient."""
    last, shrink = state.last, 0.5 * state.shrink
    rate = problem.natural_rate(state.step) * shrink
    moved, halved = blend_all(last.variational.q, last.target, rate)
    return dataclasses.replace(
        state,
        free=last.free,
        variational=last.variational._replace(q={**last.variational.q, **moved}),
        step=state.step + 1,
        shrink=shrink,
        failures=state.failures + 1,
        failed=state.failed + 1,
        halved=state.halved + halved,
    )


def _choose(first: Array, a, b):
    return jax.tree.map(lambda x, y: jnp.where(first, x, y) if eqx.is_array(x) else x, a, b)


@full_jit
def advance(
    problem: Problem, state: State, constant: Batch, varying: Batch
) -> tuple[State, Float[Array, "k"]]:
    """As many steps as `varying` holds, and the objective before each (see `batches.stack`)."""
    return lax.scan(lambda s, batch: step(problem, s, eqx.combine(batch, constant)), state, varying)


MAX_HALVINGS = 10


def nudges(q: dict[str, Family]) -> dict[str, Nudge]:
    """Zero nudges for the sites that natural gradients train."""
    return {k: one.nudge() for k, one in q.items() if isinstance(one, NaturalGaussian)}


def blend_all(here: dict, target: dict[str, NaturalGaussian], rate):
    """Natural-gradient steps to positive-definite precisions, and how many were shortened."""
    moved, halved = {}, jnp.zeros((), jnp.int32)
    for name in target:
        moved[name], shortened = _within_cone(here[name], target[name], rate)
        halved = halved + shortened
    return moved, halved


def _within_cone(here: NaturalGaussian, target: NaturalGaussian, rate):
    """The step, halved until I + nat2 is positive definite: never for a log-concave likelihood."""

    def outside(state) -> Any:
        halvings, sites = state
        return ~sites.is_proper() & (halvings < MAX_HALVINGS)

    def halve(state):
        halvings, _ = state
        # The last try is no step at all.
        shorter = jnp.where(halvings + 1 == MAX_HALVINGS, 0.0, rate * 0.5 ** (halvings + 1.0))
        return halvings + 1, here.blended(target, shorter)

    first = (jnp.zeros((), jnp.int32), here.blended(target, jnp.asarray(rate, here.nat1.dtype)))
    halvings, sites = lax.while_loop(outside, halve, first)
    return sites, (halvings > 0).astype(jnp.int32)


class Climb(eqx.Module):
    """Unconstrained hyperparameters, inducing variables, and the state of the optimiser."""

    free: dict
    variables: Any
    optimiser: Any


def _solver():
    return optax.lbfgs(memory_size=20)


def _split(problem: Problem, free, variables):
    move = jax.tree.map(lambda x: problem.train_inducing and eqx.is_inexact_array(x), variables)
    trained, held = eqx.partition((free, variables), (jax.tree.map(lambda _: True, free), move))
    return (trained[0], jax.tree.map(jnp.divide, trained[1], problem.units)), held


def _join(problem: Problem, trained, held):
    """Undoes `_split`. L-BFGS moves inducing variables in their units: no scale of X matters."""
    free, variables = trained
    return eqx.combine((free, jax.tree.map(jnp.multiply, variables, problem.units)), held)


@full_jit
def _climb(problem: Problem, climb: Climb, batch: Batch) -> tuple[Climb, Float[Array, "k"]]:
    trained, held = _split(problem, climb.free, climb.variables)

    def value(trained):
        free, variables = _join(problem, trained, held)
        hyper, log_p = hyper_at(problem, free, batch)
        return -(collapsed(problem.model, hyper, variables, batch).bound + log_p)

    value_and_grad = optax.value_and_grad_from_state(value)

    def step(carry, _):
        trained, state = carry
        loss, gradient = value_and_grad(trained, state=state)
        known = {"value": loss, "grad": gradient, "value_fn": value}
        updates, state = _solver().update(gradient, state, trained, **known)
        moved = optax.apply_updates(trained, updates)
        usable = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(moved)]))
        moved = jax.tree.map(lambda a, b: jnp.where(usable, a, b), moved, trained)
        return (moved, state), jnp.negative(loss)

    (trained, state), bounds = lax.scan(step, (trained, climb.optimiser), None, length=CHUNK)
    free, variables = _join(problem, trained, held)
    return Climb(free, variables, state), bounds


@quick_jit
def best_sites(problem: Problem, free, variables, batch: Batch):
    """(the bound and the best q(u), the log prior of the hyperparameters)."""
    hyper, log_p = hyper_at(problem, free, batch)
    return collapsed(problem.model, hyper, variables, batch), log_p


def climb(
    problem: Problem, frees: Iterable[dict], variables, batch: Batch, tol: float, progress: bool
) -> Reached:
    """Maximise from the best of `frees` after one chunk of steps; ends where `_PATIENT` chunks gain
    less than `tol` nats together. Ctrl-C keeps what is reached.
    """

    def start(free):
        trained, _ = _split(problem, free, variables)
        return Climb(free, variables, _solver().init(trained) if jax.tree.leaves(trained) else None)

    first, *others = map(start, frees)
    moving = first.optimiser is not None
    stages = _stages(problem, first, others, batch, tol, problem.max_steps if moving else 0)
    (end, bounds), interrupted = interruptible(stages, "CollapsedSVGP", problem.max_steps, progress)
    ended = _ended(bounds, tol) or (Result.completed if moving else Result.converged)
    result = Result.interrupted if interrupted else ended
    best, _ = best_sites(problem, end.free, end.variables, batch)
    (name,) = variables
    if result is Result.converged and not np.isfinite(float(best.bound)):
        result = Result.nonfinite
    state = begin(problem, end.free, Variational(end.variables, {name: best.sites}))
    return Reached(state, bounds, result)


def _stages(
    problem: Problem, state: Climb, others: list, batch: Batch, tol: float, max_steps: int
) -> Iterator[Stage[tuple[Climb, np.ndarray]]]:
    """Chunks of steps: (where the climb is, the bounds so far)."""
    bounds = np.zeros(0)
    yield Stage((state, bounds), 0, keep=False)
    while len(bounds) < max_steps and _ended(bounds, tol) is None:
        state, new = _climb(problem, state, batch)
        for other in others if not len(bounds) else ():
            yield Stage((state, np.asarray(new)), CHUNK)  # Ctrl-C keeps the best of the starts
            moved, there = _climb(problem, other, batch)
            if there[-1] > new[-1] + MARGIN or not np.isfinite(new[-1]):
                state, new = moved, there
        bounds = np.concatenate([bounds, np.asarray(new)])
        yield Stage((state, bounds), len(bounds), f"bound {bounds[-1]:.3f}")


def _ended(bounds: np.ndarray, tol: float) -> Result | None:
    window = _PATIENT * CHUNK
    if len(bounds) and not np.isfinite(bounds[-1]):
        return Result.nonfinite
    if len(bounds) > window and bounds[-1] - bounds[-1 - window] < tol:
        return Result.converged
    return None
