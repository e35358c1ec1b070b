"""MAP estimates of the hyperparameters: optimistix's BFGS on log evidence + log prior, all restarts in one compiled
step.

The loop over steps stays in Python: it shows progress, and Ctrl-C ends it with the best point so far. Each step
makes one evaluation of the log evidence a restart, and starts the inner iteration from the pseudo-likelihood of the
last accepted one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.errors import DataError, Result
from ppl_gp.factors import read
from ppl_gp.hyperparameters import MAP
from ppl_gp.infer.batching import over_leading_axis
from ppl_gp.infer.fixed import fixed_values
from ppl_gp.infer.progress import one_blas_thread, track
from ppl_gp.infer.space import Space, at_bounds, log_prior, starts
from ppl_gp.local.method import LocalMethod, log_evidence
from ppl_gp.local.pseudo import Sites

_FLAT = 1e-2  # gradient, nats, from which on a step that gains nothing counts as the end
_UNUSABLE = 1e10  # loss where the density cannot be evaluated: finite, so that the line search backs off


class Optimum(NamedTuple):
    """The best restart: constrained hyperparameters, how it ended, the figures behind it, and a warm start there.

    `stats["at_bound"]`: sites whose optimum lies at an end of the interval that they are declared on: a maximum at the
    edge, where the gradient in the declared coordinates does not vanish.
    """

    hyper: dict
    result: Result
    stats: dict
    sites: Sites | None


class _Problem(eqx.Module):
    model: Callable = eqx.field(static=True)
    method: LocalMethod  # without the values of its `hyper`, which would compile anew
    space: Space
    args: tuple
    kwargs: dict

    def loss(self, free, given: tuple[Sites, Float[Array, ""]]):
        """(-(log evidence + log prior) / scale, sites) at an unconstrained point, from warm sites."""
        init, scale = given
        hyper = self.space.constrain(free)
        factors = read(self.model, *self.args, hyper=hyper, **self.kwargs)
        prior, log_lik = factors.prior, factors.log_lik
        value, solution = log_evidence(self.method, prior.covariance_matrix, prior.mean, log_lik, init)
        total = value + log_lik.shared() + log_prior(self.model, self.args, self.kwargs, hyper)
        solved = jnp.isfinite(total) & (solution.code == Result.converged.code)
        return jnp.where(solved, -total / scale, _UNUSABLE), solution.sites


class _Run(NamedTuple):
    """One restart. `solver` holds the arrays of optimistix's state."""

    point: dict
    solver: Any
    sites: Sites
    scale: Array
    loss: Array
    slope: Array  # largest entry of the gradient, nats
    steps: Array
    done: Array


def _solver():
    # Its own stopping rule is never the first to fire: `_done` looks at the gradient in nats.
    return optx.BFGS(rtol=1e-9, atol=1e-9)


def _fresh(problem: _Problem, point, sites, scale):
    """A new solver state at a point, split into arrays and static parts."""
    loss = jax.ShapeDtypeStruct((), sites.nat1.dtype)
    state = _solver().init(problem.loss, point, (sites, scale), {}, loss, sites, frozenset())
    return eqx.partition(state, eqx.is_array)


def _begin(problem: _Problem, point, num: int) -> _Run:
    flat = Sites(jnp.zeros(num), jnp.zeros(num))
    one, zero = jnp.ones(()), jnp.zeros(())
    arrays, _ = _fresh(problem, point, flat, one)
    return _Run(point, arrays, flat, one, zero + jnp.inf, zero + jnp.inf, jnp.int32(0), jnp.zeros((), bool))


def _step(problem: _Problem, r: _Run, tol) -> _Run:
    """Evaluate where the solver asks, tell it the answer."""
    _, static = _fresh(problem, r.point, r.sites, r.scale)
    given = (r.sites, r.scale)
    state = eqx.combine(r.solver, static)
    point, state, sites = _solver().step(problem.loss, r.point, given, {}, state, frozenset())
    gradient = state.f_info.grad
    norm = optx.two_norm(gradient)
    loss, slope = r.scale * state.f_info.f, r.scale * optx.max_norm(gradient)
    flat = (r.loss - loss < 1e-10 * (1.0 + jnp.abs(loss))) & (r.loss > loss) & (slope < _FLAT)
    hopeless = (r.steps == 0) & ~(loss < _UNUSABLE)  # nowhere to back off to
    done = (slope < tol) | flat | state.terminate | hopeless
    solver, _ = eqx.partition(state, eqx.is_array)
    told = _Run(point, solver, _finite_or(sites, r.sites), r.scale, loss, slope, r.steps + 1, done)
    # After the first evaluation, start again with the loss scaled so that the first step has length below one.
    scale = 1.0 + norm
    restarted, _ = _fresh(problem, r.point, r.sites, scale)
    first = told._replace(point=r.point, solver=restarted, scale=scale)
    return jax.tree.map(lambda a, b: jnp.where((r.steps == 0) & ~done, a, b), first, told)


def _finite_or(sites, fallback):
    usable = jnp.all(jnp.isfinite(sites.nat1)) & jnp.all(jnp.isfinite(sites.nat2))
    return jax.tree.map(lambda a, b: jnp.where(usable, a, b), sites, fallback)


@eqx.filter_jit
def _start(problem: _Problem, rng_key, num_restarts: int, init):
    points = None if init is not None and num_restarts == 1 else starts(problem.space, rng_key, num_restarts)
    if init is not None:
        first = jax.tree.map(lambda x: x[None], problem.space.unconstrain(init))
        points = first if points is None else jax.tree.map(lambda all, x: all.at[0].set(x[0]), points, first)
    hyper = problem.space.constrain(jax.tree.map(lambda x: x[0], points))
    num = read(problem.model, *problem.args, hyper=hyper, **problem.kwargs).log_lik.num
    return jax.vmap(lambda p: _begin(problem, p, num))(points)


@eqx.filter_jit
def _advance(problem: _Problem, runs: _Run, tol) -> _Run:
    """One evaluation for every restart that has not ended."""
    return over_leading_axis(lambda r: lax.cond(r.done, lambda r: r, lambda r: _step(problem, r, tol), r), runs)


@eqx.filter_jit
def _constrain(problem: _Problem, runs: _Run, best):
    hyper = problem.space.constrain(jax.tree.map(lambda x: x[best], runs.point))
    return hyper, at_bounds(problem.space, hyper)


def maximise(model, method: LocalMethod, config: MAP, sp: Space, rng_key, args, kwargs, *, progress: bool) -> Optimum:
    """Run all restarts to convergence and keep the best. `interrupted` and `max_steps` keep the best point so far.

    How the best one has ended counts; the others' ends are in `stats`.
    """
    problem = _Problem(model, method, sp, args, kwargs)
    runs = _start(problem, rng_key, config.restarts, _checked_init(config, sp))
    _require_inside(runs, config)
    tol, interrupted = jnp.asarray(config.tol), False
    with track(f"{type(method).__name__} MAP", config.max_steps, progress) as update, one_blas_thread():
        try:
            for step in range(config.max_steps):
                runs = jax.block_until_ready(_advance(problem, runs, tol))
                update(step + 1, f"log posterior {-float(jnp.min(runs.loss)):.3f}")
                if bool(jnp.all(runs.done)):
                    break
        except KeyboardInterrupt:
            interrupted = True
    losses = np.asarray(runs.loss)
    best = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
    hyper, bounds = _constrain(problem, runs, best)
    stats = {
        "map_steps": int(runs.steps[best]),
        "map_gradient": float(runs.slope[best]),
        "log_posterior": -float(losses[best]),
        "restart_log_posteriors": -losses,
        "restart_steps": np.asarray(runs.steps),
        "restart_ended": np.asarray(runs.done),
        "at_bound": [k for k, hit in bounds.items() if bool(hit)],
    }
    result = Result.interrupted if interrupted else _result(runs, best)
    return Optimum(hyper, result, stats, jax.tree.map(lambda x: x[best], runs.sites))


def _result(runs: _Run, best: int) -> Result:
    if not float(runs.loss[best]) < _UNUSABLE:
        return Result.nonfinite
    return Result.converged if bool(runs.done[best]) and float(runs.slope[best]) < _FLAT else Result.max_steps


def _checked_init(config: MAP, sp: Space):
    return None if config.init is None else fixed_values(config, sp.names, sp.model, sp.args, sp.kwargs)


def _require_inside(runs: _Run, config: MAP) -> None:
    """The ends of a support are infinitely far away."""
    edge = [k for k, x in runs.point.items() if not all(bool(jnp.all(jnp.isfinite(v[0]))) for v in jax.tree.leaves(x))]
    if config.init is not None and edge:
        raise DataError(
            f"MAP(init=...) has {edge} on the edge of the support, where no step starts; give values inside."
        )
