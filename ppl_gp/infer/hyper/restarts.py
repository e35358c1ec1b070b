"""One step of every restart of a MAP estimate: optimistix's BFGS on log evidence + log prior.

Each step makes one evaluation of the log evidence a restart, and starts the inner iteration from
the pseudo-likelihood of the last accepted one. The solver is told values and gradients instead of
calling the function, so that the evaluation, nine tenths of what there is to compile, is compiled
once and serves the optimum's last solution too.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jax import lax
from jaxtyping import Array

from ppl_gp.errors import Result
from ppl_gp.infer.chains import over_leading_axis
from ppl_gp.infer.hyper.point import Setting
from ppl_gp.infer.hyper.space import Space, at_bounds, log_prior, starts
from ppl_gp.local.method import Solution, first_sites, log_evidence
from ppl_gp.local.natural import Positive, PseudoLikelihood, as_general
from ppl_gp.quick import FEW_DATA, entry, quick_jit, zeros_of

FLAT = 1e-2  # gradient, nats, from which on a step that gains nothing counts as the end
# loss where the density cannot be evaluated: finite, so that the line search backs off
UNUSABLE = 1e10
FEW = 8  # unconstrained values up to which the curvature at the end is looked at
_STEP = 5e-3  # of its differences


class Ascent(eqx.Module):
    """What the restarts climb: log evidence + log prior of a model under a local method."""

    setting: Setting
    space: Space
    jacobian: bool = eqx.field(default=False, static=True)  # a density of unconstrained values

    def log_posterior(self, free, init: PseudoLikelihood):
        """(log evidence + log prior, (log evidence, Solution)), from warm sites."""
        hyper = self.space.constrain(free)
        model, method, args, kwargs = self.setting
        value, solution = log_evidence(method, self.setting.factors(hyper), init)
        total = value + log_prior(model, args, kwargs, hyper)
        if self.jacobian:
            total = total + self.space.log_jacobian(free)
        return total, (value, solution)


class Evaluation(NamedTuple):
    """At a point: the loss and its gradient, nats, the log evidence and its solution."""

    loss: Array
    slopes: dict
    value: Array
    solution: Solution


class Run(NamedTuple):
    """One restart. `solver` holds the arrays of optimistix's state."""

    point: dict
    asked: dict  # where the solver wants the next evaluation
    solver: Any
    sites: PseudoLikelihood
    scale: Array
    loss: Array
    slope: Array  # largest entry of the gradient, nats
    steps: Array
    done: Array


def is_flat(slope, loss, num: int):
    """Whether a gradient, nats, is that of a maximum: below `FLAT`, or hidden by rounding."""
    return slope < jnp.maximum(FLAT, jnp.sqrt(num * _rounding(loss, num)))


def _rounding(loss, num: int):
    """Of the loss, nats: its N terms, each of order one, may cancel (measured: 1 to 20 eps each).
    A gradient gains slope^2 / 2 over a curvature of order N, so rounding hides one of sqrt(N) this.
    """
    return 30.0 * jnp.finfo(jnp.asarray(loss).dtype).eps * (num + jnp.abs(loss))


def _solver():
    # Its own stopping rule is never the first to fire: `_done` looks at the gradient in nats.
    return optx.BFGS(rtol=1e-9, atol=1e-9)


def _fresh(point, sites: PseudoLikelihood):
    """A new solver state at a point, split into arrays and static parts."""
    loss = jax.ShapeDtypeStruct((), sites.nat1.dtype)
    state = _solver().init(_told, point, (point, loss, point, sites), {}, loss, sites, frozenset())
    return eqx.partition(state, eqx.is_array)


def _told(at, evaluated):
    """A loss that is known at one point, with its gradient: the solver looks nowhere else."""
    point, loss, slopes, sites = evaluated
    steps = jax.tree.map(lambda g, x, y: jnp.sum(g * (x - y)), slopes, at, point)
    return loss + sum(jax.tree.leaves(steps)), sites


def _begin(point, sites: PseudoLikelihood) -> Run:
    arrays, _ = _fresh(point, sites)
    one = jnp.ones(())
    inf = jnp.inf * one  # of a definite type, as after a step, or a second program is compiled
    return Run(point, point, arrays, sites, one, inf, inf, jnp.int32(0), jnp.zeros((), bool))


def _step(r: Run, at: Evaluation, tol) -> Run:
    """Tell the solver the answer; it says where to look next."""
    _, static = _fresh(r.point, r.sites)
    slopes = jax.tree.map(lambda g: g / r.scale, at.slopes)
    evaluated = r.asked, at.loss / r.scale, slopes, at.solution.sites
    state = eqx.combine(r.solver, static)
    point, state, sites = _solver().step(_told, r.point, evaluated, {}, state, frozenset())
    gradient = state.f_info.grad
    norm = optx.two_norm(gradient)
    loss, slope = r.scale * state.f_info.f, r.scale * optx.max_norm(gradient)
    gain, hidden = r.loss - loss, _rounding(loss, num := r.sites.nat1.shape[-1])
    flat = jnp.where(gain > 0, is_flat(slope, loss, num), slope < jnp.sqrt(num * hidden))
    flat &= gain < jnp.maximum(1e-10 * (1.0 + jnp.abs(loss)), hidden)
    away = jax.tree.map(lambda a, b: (a - b) / (1.0 + jnp.abs(b)), state.y_eval, point)
    stuck = optx.max_norm(away) < jnp.finfo(loss.dtype).eps  # no shorter step is one
    hopeless = (r.steps == 0) & ~(loss < UNUSABLE)  # nowhere to back off to
    done = (slope < tol) | flat | stuck | state.terminate | hopeless
    solver, _ = eqx.partition(state, eqx.is_array)
    usable = jnp.all(jnp.isfinite(sites.nat1)) & jnp.all(jnp.isfinite(sites.nat2))
    sites = jax.tree.map(lambda a, b: jnp.where(usable, a, b), sites, r.sites)
    told = Run(point, state.y_eval, solver, sites, r.scale, loss, slope, r.steps + 1, done)
    # after the first evaluation again, the loss scaled so that the first step is shorter than one
    restarted, _ = _fresh(r.point, r.sites)
    first = told._replace(point=r.point, asked=r.point, solver=restarted, scale=1.0 + norm)
    return jax.tree.map(lambda a, b: jnp.where((r.steps == 0) & ~done, a, b), first, told)


@quick_jit
def start(problem: Ascent, rng_key, num_restarts: int, init):
    """The state of every restart before its first step; the first restart begins at `init`."""
    first = None if init is None else problem.space.unconstrain(init)
    if first is not None and num_restarts == 1:
        points = jax.tree.map(lambda x: x[None], first)
    else:
        points = starts(problem.space, rng_key, num_restarts)
    if first is not None:
        points = jax.tree.map(lambda all, x: all.at[0].set(x), points, first)
    hyper = problem.space.constrain(jax.tree.map(lambda x: x[0], points))
    sites = first_sites(problem.setting.method, problem.setting.factors(hyper))
    return jax.vmap(lambda p: _begin(p, sites))(points)


@quick_jit
def evaluate(problem: Ascent, points, sites: PseudoLikelihood, skipped) -> Evaluation:
    """One evaluation for every restart that is not skipped."""

    def evaluated(point, init):
        both = jax.value_and_grad(problem.log_posterior, has_aux=True)
        (total, (value, solution)), slopes = both(point, init)
        solved = jnp.isfinite(total) & (solution.code == Result.converged.code)
        slopes = jax.tree.map(lambda g: jnp.where(solved, -g, 0.0), slopes)
        return Evaluation(jnp.where(solved, jnp.negative(total), UNUSABLE), slopes, value, solution)

    def one(entry):
        *at, skip = entry
        nothing = zeros_of(evaluated, *at)
        return lax.cond(skip, lambda: nothing, lambda: evaluated(*at))

    if len(skipped) == 1:  # and is wanted, or the caller would not ask
        alone = evaluated(*jax.tree.map(lambda x: x[0], (points, sites)))
        return jax.tree.map(lambda x: x[None], alone)
    return over_leading_axis(one, (points, sites, skipped))


def asked_for(problem: Ascent, runs: Run) -> tuple[Run, Evaluation]:
    """Evaluations where the solver asks for them. Forms for likelihoods that are not log-concave,
    and rescues, are compiled when an evaluation has failed without them.
    """
    at = plainly(problem, runs)
    solved = np.asarray(at.solution.code) == Result.converged.code
    if isinstance(runs.sites, Positive) and not np.all(solved | np.asarray(runs.done)):
        runs = as_general(runs)
        at = plainly(problem, runs)
    return runs, at


def plainly(problem: Ascent, runs: Run) -> Evaluation:
    """Evaluations without rescues: one that fails is `UNUSABLE`."""
    compiled = evaluate if runs.sites.nat1.shape[-1] <= FEW_DATA else evaluate.full
    return compiled(problem, runs.asked, runs.sites, runs.done)


def spreads(problem: Ascent, runs: Run, best: int, slopes: dict) -> dict | None:
    """{site: standard deviations of its unconstrained values, flat}, of the curvature at the best
    point, by differences of `slopes`: one evaluation each, and nothing compiled. Huge where there
    is no curvature; `None` where an evaluation fails, or for more than `FEW`.
    """
    leaves, tree = jax.tree.flatten(jax.tree.map(np.array, runs.point))
    places = [(j, (best, *at)) for j, x in enumerate(leaves) for at in np.ndindex(x[best].shape)]
    if len(places) > FEW:
        return None
    H, others = np.zeros((len(places), len(places))), jnp.asarray(np.arange(len(runs.done)) != best)
    step = max(_STEP, float(jnp.finfo(leaves[0].dtype).eps) ** 0.25)
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])  # noqa: E731
    for i, (j, at) in enumerate(places):
        moved = [x.copy() for x in leaves]
        moved[j][at] += step
        asked = jax.tree.unflatten(tree, [jnp.asarray(x) for x in moved])
        _, there = asked_for(problem, runs._replace(asked=asked, done=others))
        if not np.asarray(there.loss)[best] < UNUSABLE:
            return None
        H[i] = (flat(entry(there.slopes, best)) - flat(slopes)) / step
    own, H = np.diag(H), 0.5 * (H + H.T)
    if np.linalg.eigvalsh(H)[0] > 0:
        sds = np.sqrt(np.diag(np.linalg.inv(H)))
    else:
        sds = 1.0 / np.sqrt(np.maximum(own, 1e-300))
    return jax.tree.unflatten(tree, np.split(sds, np.cumsum([x[best].size for x in leaves])[:-1]))


@quick_jit
def advance(runs: Run, at: Evaluation, tol) -> Run:
    """A step of every restart that has not ended."""

    def one(run, at):
        return jax.tree.map(lambda a, b: jnp.where(run.done, a, b), run, _step(run, at, tol))

    return jax.vmap(one)(runs, at)


@quick_jit
def constrained(problem: Ascent, runs: Run, best):
    """Of one restart: (hyperparameters, those at an end of their interval, `is_flat`)."""
    hyper = problem.space.constrain(jax.tree.map(lambda x: x[best], runs.point))
    flat = is_flat(runs.slope[best], runs.loss[best], runs.sites.nat1.shape[-1])
    return hyper, at_bounds(problem.space, hyper), flat
