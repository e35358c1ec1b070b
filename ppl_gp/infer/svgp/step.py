"""One step of sparse variational training, compiled: natural gradients for q(u), an optax optimiser
for everything else.

Both gradients come from one forward and one reverse pass. A step that gives something that is not
finite is not made: the run goes back to the last good state with a shorter natural-gradient step,
and counts it.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ppl_gp.infer.svgp.objective import objective
from ppl_gp.infer.svgp.problem import Problem, is_trained
from ppl_gp.sparse.bound import Batch, Terms, Variational
from ppl_gp.sparse.families import NaturalGaussian
from ppl_gp.sparse.natural_gradient import blend_all, natural_target, nudges


class Last(eqx.Module):
    """The last good state, and the natural-gradient target found there."""

    free: dict
    variational: Variational
    target: dict[str, NaturalGaussian]
    loss: Float[Array, ""]


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


def begin(problem: Problem, free, variational: Variational) -> State:
    """The state before the first step."""
    trained, _ = eqx.partition((free, variational), is_trained(problem.plan, free, variational))
    zero, one = jnp.zeros((), jnp.int32), jnp.ones(())
    target = {k: q for k, q in variational.q.items() if isinstance(q, NaturalGaussian)}
    last = Last(free, variational, target, jnp.asarray(jnp.inf))
    state = State(
        free, variational, problem.optax().init(trained), last, zero, one, zero, zero, zero
    )
    # Without weak types, which the first step would lose: the second chunk would be compiled anew.
    return jax.tree.map(lambda x: jnp.array(x, x.dtype) if eqx.is_array(x) else x, state)


def step(problem: Problem, state: State, batch: Batch) -> tuple[State, Float[Array, ""]]:
    """(state, objective): the bound plus the log prior of the hyperparameters, nats, before the
    step.
    """
    plan = problem.plan
    spec = is_trained(plan, state.free, state.variational)
    trained, held = eqx.partition((state.free, state.variational), spec)

    def loss(trained, nudge):
        free, variational = eqx.combine(trained, held)
        value, t = objective(problem, free, variational, batch, nudge)
        return -value, t

    (value, t), (gradient, toward) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        trained, nudges(state.variational.q)
    )
    finite = jnp.isfinite(value) & _all_finite((gradient, toward))
    gradient = _bounded(gradient, jnp.sum(batch.weights))
    slack = 1e-9 * (1.0 + jnp.abs(state.last.loss))
    # Natural gradients alone, on all data, never lower the bound but by a step that is too long.
    monotone = not plan.noisy and not jax.tree.leaves(trained)
    fell = (value > state.last.loss + slack) if monotone else jnp.zeros((), bool)
    failed = ~finite | fell
    new = _advance(problem, state, spec, gradient, jax.tree.map(jnp.negative, toward), t, value)
    return _choose(failed, _retreat(problem, state), new), -value


def _bounded(gradient, num_data):
    """That of the hyperparameters, at most a nat a datum for a unit of each: under q(u) = p(u) the
    bound of counts can be -1e7, and Adam, which remembers a thousand squares, would not move for
    the rest of the run.
    """
    free, variational = gradient
    clipped = jax.tree.map(lambda g: jnp.clip(g, -num_data, num_data), free)
    return clipped, variational


def _advance(problem: Problem, state: State, spec, gradient, toward, t: Terms, value) -> State:
    free, variational, optimiser = _optimised(problem, state, spec, gradient)
    here, target = _natural(state, toward, t)
    rate = problem.natural_rate(state.step) * state.shrink
    moved, halved = blend_all(here, target, rate)
    # where a failed step comes back to: the sites at the root of this evaluation
    carried = state.variational._replace(q={**state.variational.q, **here})
    return State(
        free=free,
        variational=variational._replace(q={**variational.q, **moved}),
        optimiser=optimiser,
        last=Last(state.free, carried, target, value),
        step=state.step + 1,
        shrink=jnp.minimum(1.0, (1.1 if problem.plan.noisy else 2.0) * state.shrink),
        failures=jnp.zeros_like(state.failures),
        failed=state.failed,
        halved=state.halved + halved,
    )


def _optimised(problem: Problem, state: State, spec, gradient) -> tuple[Any, Variational, Any]:
    """(hyperparameters, variational parameters, the optimiser's state) after its update. In the
    warm-up only q(u) and q(h) move.
    """
    trained, held = eqx.partition((state.free, state.variational), spec)
    updates: Any
    updates, optimiser = problem.optax().update(gradient, state.optimiser, trained)
    free, variational = updates
    variables = jax.tree.map(lambda u, unit: u * unit, variational.variables, problem.units)
    hold = jnp.where(state.step < problem.plan.warm_up, 0.0, 1.0)
    free, variables = jax.tree.map(lambda u: hold * u, (free, variables))
    updates = free, variational._replace(variables=variables)
    return *eqx.combine(eqx.apply_updates(trained, updates), held), optimiser


def _natural(
    state: State, toward: dict, t: Terms
) -> tuple[dict[str, NaturalGaussian], dict[str, NaturalGaussian]]:
    """(the sites that natural gradients train, where those point), at this evaluation's roots."""
    sites = {k: q for k, q in state.variational.q.items() if isinstance(q, NaturalGaussian)}
    here = {k: _based(q.carried(t.roots[k]), q, t.roots[k]) for k, q in sites.items()}
    target = {
        k: _based(natural_target(t.q[k], toward[k], t.kl_weights[k]), q, t.roots[k])
        for k, q in sites.items()
    }
    return here, target


def _based(sites: NaturalGaussian, before: NaturalGaussian, root) -> NaturalGaussian:
    """Remember the root, where the bound carries sites from one root to the next."""
    return NaturalGaussian(
        sites.nat1, sites.nat2, None if before.base is None else lax.stop_gradient(root.L)
    )


def _retreat(problem: Problem, state: State) -> State:
    """Back to the last good state, half as far along the natural gradient."""
    last, shrink = state.last, 0.5 * state.shrink
    rate = problem.natural_rate(state.step) * shrink
    here = {k: last.variational.q[k] for k in last.target}
    moved, halved = blend_all(here, last.target, rate)
    return State(
        free=last.free,
        variational=last.variational._replace(q={**last.variational.q, **moved}),
        optimiser=state.optimiser,
        last=last,
        step=state.step + 1,
        shrink=shrink,
        failures=state.failures + 1,
        failed=state.failed + 1,
        halved=state.halved + halved,
    )


def _choose(first: Array, a, b):
    return jax.tree.map(lambda x, y: jnp.where(first, x, y) if eqx.is_array(x) else x, a, b)


def _all_finite(tree):
    return jnp.all(
        jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)] or [jnp.ones((), bool)])
    )


@eqx.filter_jit
def advance(
    problem: Problem, state: State, constant: Batch, varying: Batch
) -> tuple[State, Float[Array, "k"]]:
    """As many steps as `varying` holds along its leading axis, and the objective before each.

    `constant`: the parts of a batch that all share; each has `None` for the other's parts.
    """
    return lax.scan(lambda s, batch: step(problem, s, eqx.combine(batch, constant)), state, varying)


@eqx.filter_jit
def advance_whole(
    problem: Problem, state: State, batch: Batch, keys
) -> tuple[State, Float[Array, "k"]]:
    """As `advance`, with the same data in every batch."""
    return lax.scan(lambda s, key: step(problem, s, batch._replace(key=key)), state, keys)
