"""`CollapsedSVGP`: L-BFGS on Titsias' bound plus the log prior, all data in a step."""

from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.errors import Result
from ppl_gp.infer.svgp.problem import Problem, hyper_at
from ppl_gp.infer.svgp.step import Reached, begin
from ppl_gp.quick import full_jit, quick_jit
from ppl_gp.runtime import Stage, interruptible
from ppl_gp.sparse.bound import Batch, Variational, collapsed

CHUNK = 5
_PATIENT = 3  # chunks without a gain after which the run is over
MARGIN = 1.0  # nats by which another start has to be better after a chunk


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

    first = trained, climb.optimiser
    (trained, state), bounds = lax.scan(step, first, None, length=CHUNK)
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
    label = "CollapsedSVGP"
    (end, bounds), interrupted = interruptible(stages, label, problem.max_steps, progress)
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
