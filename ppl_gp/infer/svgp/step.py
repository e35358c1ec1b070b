"""One step of sparse variational training, compiled: natural gradients for q(u), an optax optimiser
for everything else.

Both gradients come from one forward and one reverse pass. A step that gives something that is not
finite is not made: the run goes back to the last good state with a shorter natural-gradient step,
and counts it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from ppl_gp.deep.bound import Sampling, terms
from ppl_gp.deep.structure import Structure
from ppl_gp.infer.hyper.guide import HyperGuide
from ppl_gp.infer.hyper.space import Space, log_prior
from ppl_gp.numerics.linalg import add_diagonal
from ppl_gp.quick import quick_jit
from ppl_gp.sparse.bound import (
    Batch,
    Terms,
    Variational,
    blend,
    natural_target,
    nudges,
    quadrature_gap,
)
from ppl_gp.sparse.expectation import Expectation
from ppl_gp.sparse.families import Sites
from ppl_gp.sparse.root import positive_definite

MAX_HALVINGS = 10
# of the natural-gradient step on minibatches: 0.1, decaying to a tenth of that
FIRST_RATE, LAST_SHARE = 0.1, 0.1


@dataclass(frozen=True)
class Plan:
    """What is static about a run: hashable, so that the compiled step is found again by the next
    fit.
    """

    model: Callable
    expectation: Expectation
    structure: Structure
    sampling: Sampling
    guide: HyperGuide | None
    names: tuple[str, ...]  # hyperparameters that are trained or drawn
    train_inducing: bool
    whole: bool  # every batch is all data
    drawn: bool  # the bound of a batch is an estimate by draws
    schedule: Callable | None  # step -> learning rate, where the user gave one
    natural_schedule: Callable | None  # step -> size of the natural-gradient step, likewise
    optimiser: Callable | None
    max_steps: int
    warm_up: int

    @property
    def draws_hyper(self) -> bool:
        """Whether hyperparameters have a distribution."""
        return self.guide is not None and self.guide.draws

    @property
    def noisy(self) -> bool:
        """Whether the bound of a step is an estimate."""
        return self.drawn or not self.whole


class Rates(NamedTuple):
    """The numbers that a step is made with. Arrays, so that another value of one compiles nothing
    anew.
    """

    learning: Any  # before its decay
    natural: Any  # `None`: as `Problem.natural_rate` chooses
    beta: Any


class Problem(eqx.Module):
    """The plan and the arrays that a run does not change: rates, fixed hyperparameters, units of
    the inducing variables.
    """

    plan: Plan = eqx.field(static=True)
    rates: Rates
    fixed: dict
    units: Any  # of the structure of the trained inducing variables
    # {latent site: what of q(h) is no array, such as an encoder's activation functions}
    frozen: dict

    def bound(
        self, hyper: dict, variational: Variational, batch: Batch, nudge: dict | None = None
    ) -> Terms:
        """The terms of the bound on a batch."""
        plan, sampling = self.plan, self.plan.sampling._replace(beta=self.rates.beta)
        whole = variational._replace(latents=eqx.combine(variational.latents, self.frozen))
        return terms(
            plan.model, plan.expectation, sampling, plan.structure, hyper, whole, batch, nudge
        )

    def learning_rate(self, step):
        """Of the optimiser: a number decays by a cosine to a hundredth."""
        if self.plan.schedule is not None:
            return self.plan.schedule(step)
        return self.rates.learning * optax.cosine_decay_schedule(
            1.0, self.plan.max_steps, alpha=0.01
        )(step)

    def natural_rate(self, step):
        """Size of the natural-gradient step."""
        if self.plan.natural_schedule is not None:
            return self.plan.natural_schedule(step)
        if self.rates.natural is None and self.plan.noisy:
            return FIRST_RATE * LAST_SHARE ** (step / self.plan.max_steps)
        return jnp.asarray(1.0) if self.rates.natural is None else self.rates.natural

    def optax(self) -> optax.GradientTransformation:
        """The optimiser of everything but natural-gradient sites."""
        return (self.plan.optimiser or optax.adam)(self.learning_rate)


class Last(eqx.Module):
    """The last good state, and the natural-gradient target found there."""

    free: dict
    variational: Variational
    target: dict[str, Sites]
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


def hyper_at(problem: Problem, free, batch: Batch):
    """(hyperparameters, log prior - log q of them)."""
    plan = problem.plan
    if plan.guide is None:
        where = Space(
            plan.model,
            tuple(plan.names),
            batch.args,
            batch.kwargs,
            {**problem.fixed, **batch.given},
        )
        hyper = {**problem.fixed, **where.constrain(free)}
        extra = jnp.zeros(())
    else:
        hyper, log_q = plan.guide.draw(
            free, jax.random.fold_in(batch.key, 1), batch.args, batch.kwargs
        )
        hyper, extra = {**problem.fixed, **hyper}, -log_q
    return hyper, log_prior(plan.model, batch.args, batch.kwargs, {**hyper, **batch.given}) + extra


def is_trained(plan: Plan, free, variational: Variational):
    """A tree of booleans like (free, variational): what the optimiser trains."""

    def mark(tree, yes):
        return jax.tree.map(lambda x: yes and eqx.is_inexact_array(x), tree)

    q = {k: mark(v, not isinstance(v, Sites)) for k, v in variational.q.items()}
    variables = mark(variational.variables, plan.train_inducing)
    return mark(free, True), Variational(variables, q, mark(variational.latents, True))


def begin(problem: Problem, free, variational: Variational) -> State:
    """The state before the first step."""
    trained, _ = eqx.partition((free, variational), is_trained(problem.plan, free, variational))
    zero, one = jnp.zeros((), jnp.int32), jnp.ones(())
    target = {k: q for k, q in variational.q.items() if isinstance(q, Sites)}
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
        hyper, log_p = hyper_at(problem, free, batch)
        t = problem.bound(hyper, variational, batch, nudge)
        return -(t.bound + log_p), t

    (value, t), (gradient, toward) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        trained, nudges(state.variational)
    )
    finite = jnp.isfinite(value) & _all_finite((gradient, toward))
    slack = 1e-9 * (1.0 + jnp.abs(state.last.loss))
    # Natural gradients alone, on all data, never lower the bound but by a step that is too long.
    monotone = not plan.noisy and not jax.tree.leaves(trained)
    fell = (value > state.last.loss + slack) if monotone else jnp.zeros((), bool)
    failed = ~finite | fell
    new = _advance(problem, state, spec, gradient, jax.tree.map(jnp.negative, toward), t, value)
    return _choose(failed, _retreat(problem, state), new), -value


def _advance(problem, state: State, spec, gradient, toward, t: Terms, value) -> State:
    plan = problem.plan
    trained, held = eqx.partition((state.free, state.variational), spec)
    updates, optimiser = problem.optax().update(gradient, state.optimiser, trained)
    free_updates, variational_updates = updates
    variables = jax.tree.map(lambda u, unit: u * unit, variational_updates.variables, problem.units)
    hold = jnp.where(state.step < plan.warm_up, 0.0, 1.0)
    free_updates, variables = jax.tree.map(lambda u: hold * u, (free_updates, variables))
    updates = (free_updates, variational_updates._replace(variables=variables))
    free, variational = eqx.combine(eqx.apply_updates(trained, updates), held)
    sites = {k: q for k, q in state.variational.q.items() if isinstance(q, Sites)}
    target = {
        k: _based(natural_target(t.q[k], toward[k], t.kl_weights[k]), q, t.roots[k])
        for k, q in sites.items()
    }
    here = {k: _based(q.carried(t.roots[k]), q, t.roots[k]) for k, q in sites.items()}
    rate = problem.natural_rate(state.step) * state.shrink
    moved, halved = _blend_all(here, target, rate)
    variational = variational._replace(q={**variational.q, **moved})
    last = Last(
        state.free, state.variational._replace(q={**state.variational.q, **here}), target, value
    )
    shrink = jnp.minimum(1.0, (1.1 if plan.noisy else 2.0) * state.shrink)
    return State(
        free,
        variational,
        optimiser,
        last,
        state.step + 1,
        shrink,
        jnp.zeros_like(state.failures),
        state.failed,
        state.halved + halved,
    )


def _based(sites: Sites, before: Sites, root) -> Sites:
    """Remember the root, where the bound carries sites from one root to the next."""
    return Sites(sites.nat1, sites.nat2, None if before.base is None else lax.stop_gradient(root.L))


def _retreat(problem: Problem, state: State) -> State:
    """Back to the last good state, half as far along the natural gradient."""
    last, shrink = state.last, 0.5 * state.shrink
    rate = problem.natural_rate(state.step) * shrink
    here = {k: last.variational.q[k] for k in last.target}
    moved, halved = _blend_all(here, last.target, rate)
    variational = last.variational._replace(q={**last.variational.q, **moved})
    return State(
        last.free,
        variational,
        state.optimiser,
        last,
        state.step + 1,
        shrink,
        state.failures + 1,
        state.failed + 1,
        state.halved + halved,
    )


def _blend_all(here: dict, target: dict, rate):
    """Natural-gradient steps that stay in the cone of positive-definite precisions, and how many
    were shortened.
    """
    moved, halved = {}, jnp.zeros((), jnp.int32)
    for name in target:
        moved[name], shortened = _within_cone(here[name], target[name], rate)
        halved = halved + shortened
    return moved, halved


def _within_cone(here: Sites, target: Sites, rate):
    """The step, halved until I + nat2 is positive definite: always at once where the likelihood is
    log-concave.
    """

    def outside(state):
        halvings, sites = state
        precisions = jnp.reshape(sites.nat2, (-1, *sites.nat2.shape[-2:]))
        inside = jnp.all(
            lax.map(lambda nat2: positive_definite(add_diagonal(nat2, 1.0)), precisions)
        )
        return ~inside & (halvings < MAX_HALVINGS)

    def halve(state):
        halvings, _ = state
        # The last try is no step at all.
        shorter = jnp.where(halvings + 1 == MAX_HALVINGS, 0.0, rate * 0.5 ** (halvings + 1.0))
        return halvings + 1, blend(here, target, shorter)

    first = (jnp.zeros((), jnp.int32), blend(here, target, jnp.asarray(rate, here.nat1.dtype)))
    halvings, sites = lax.while_loop(outside, halve, first)
    return sites, (halvings > 0).astype(jnp.int32)


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


@quick_jit
def expectation_gap(
    problem: Problem, state: State, batch: Batch
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """By how much the nodes of one batch's expectations are off, nats: (sum, of absolute values).
    For one layer, at one setting.
    """
    hyper, _ = hyper_at(problem, state.free, batch)
    return quadrature_gap(
        problem.plan.model, problem.plan.expectation, hyper, state.variational, batch
    )


@quick_jit
def bound_terms(
    problem: Problem, state: State, batch: Batch
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(weighted expectation, the bound's other terms) of one batch, nats, for sums over all
    data.
    """
    hyper, log_p = hyper_at(problem, state.free, batch)
    t = problem.bound(hyper, state.variational, batch)
    return t.expected, t.shared - t.kl + _without_points(problem.plan, hyper, log_p, batch)


def _without_points(plan: Plan, hyper: dict, log_p, batch: Batch):
    """Of a distribution over hyperparameters its KL counts; a point is judged at its value, without
    the prior.
    """
    if plan.guide is None or not plan.guide.draws:
        return 0.0
    return log_p - log_prior(
        plan.model, batch.args, batch.kwargs, {**hyper, **batch.given}, plan.guide.held
    )
