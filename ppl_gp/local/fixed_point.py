"""Damped fixed-point iteration with Anderson acceleration: the one loop behind EP, VI and the local
bound.

x <- x + step (g(x) - x); near the fixed point, g is extrapolated from the last iterates (Anderson
1965; Walker & Ni 2011, type II). A point is kept only where it can be evaluated and either the
residual does not grow (EP, which has no merit to climb) or the merit does not fall (VI, the local
bound). After a rejected point the memory is empty, and the step is halved if it was a plain one.
Each step evaluates g once. Fails by `max_steps`, or by `nonfinite` where the start, or no smaller
step, can be evaluated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from ppl_gp.errors import Result
from ppl_gp.numerics.lapack import cholesky
from ppl_gp.numerics.linalg import solve_factored

MEMORY = 5
SMALLEST_STEP = 1e-4
_ACCELERATE_BELOW = 1.0  # residual from which on extrapolation is tried
_GROWTH = 1.5  # by which a residual may grow in one accepted step


class Evaluation(NamedTuple):
    """g at a point: the target, weights for its residual, its size, the merit and byproducts."""

    target: Any
    weight: Any
    residual: Float[Array, ""]
    merit: Float[Array, ""]  # constant where there is none
    aux: Any


class FixedPoint(NamedTuple):
    """Where the iteration ended."""

    x: Any
    evaluation: Evaluation
    steps: Int[Array, ""]
    code: Int[Array, ""]


class _State(NamedTuple):
    x: Any
    at: Evaluation
    step: Float[Array, ""]
    points: Float[Array, "H P"]
    targets: Float[Array, "H P"]
    count: Int[Array, ""]
    steps: Int[Array, ""]
    stuck: Array


def fixed_point(
    evaluate: Callable[[Any], Evaluation],
    x: Any,
    first: Evaluation,
    *,
    tol: float,
    max_steps: int,
    damping: float | Float[Array, ""],
    project: Callable[[Any], Any] = lambda x: x,
) -> FixedPoint:
    """Iterate from x, whose evaluation is `first`, until the residual is below tol (or 1e3
    roundings); `project` takes a point to one that is allowed.
    """
    size, dtype = ravel_pytree(x)[0].size, first.residual.dtype
    memory, zero = jnp.zeros((MEMORY, size), dtype), jnp.zeros((), jnp.int32)
    tol, step = max(tol, 1e3 * float(jnp.finfo(dtype).eps)), jnp.asarray(damping, dtype)
    state = _State(x, first, step, memory, memory, zero, zero, jnp.zeros((), bool))

    def running(s):
        return (s.at.residual >= tol) & (s.steps < max_steps) & ~s.stuck

    def advance(s):
        candidate, extrapolated = _propose(s)
        candidate = project(candidate)
        return _accept(s, candidate, evaluate(candidate), extrapolated, damping, tol)

    end = lax.while_loop(running, advance, state)
    code = jnp.where(end.at.residual < tol, Result.converged.code, Result.max_steps.code)
    broken = end.stuck | ~jnp.isfinite(end.at.residual)
    return FixedPoint(end.x, end.at, end.steps, jnp.where(broken, Result.nonfinite.code, code))


def _propose(s: _State):
    x, unravel = ravel_pytree(s.x)
    g, weight = ravel_pytree(s.at.target)[0], ravel_pytree(s.at.weight)[0]
    ready = (s.count > 0) & (s.at.residual < _ACCELERATE_BELOW)
    extrapolated = _anderson(x, g, weight, s.points, s.targets, s.count)
    usable = ready & jnp.all(jnp.isfinite(extrapolated))
    return unravel(x + s.step * (jnp.where(usable, extrapolated, g) - x)), usable


def _anderson(x, g, weight, points, targets, count):
    """argmin_c |W (r - sum_j c_j (r - r_j))|, r = g - x; the mixture of targets it gives."""
    r = g - x
    used = (jnp.arange(MEMORY) < count)[:, None]
    dr = jnp.where(used, r - (targets - points), 0.0) * weight
    gram = dr @ dr.T
    ridge = 1e-12 * jnp.trace(gram) + jnp.finfo(x.dtype).tiny
    gram = gram + jnp.diag(jnp.where(used[:, 0], ridge, 1.0))
    c = solve_factored(cholesky(gram), dr @ (weight * r))
    return g - c @ jnp.where(used, g - targets, 0.0)


def _move(x, at: Evaluation):
    """Weighted, (P,), from x to its target."""
    return ravel_pytree(jax.tree.map(lambda w, g, x: w * (g - x), at.weight, at.target, x))[0]


def _accept(s: _State, candidate, at: Evaluation, extrapolated, damping, tol) -> _State:
    finite = jnp.isfinite(at.residual) & jnp.isfinite(at.merit)
    slack = (1e-9 + 32.0 * jnp.finfo(at.merit.dtype).eps) * (1.0 + jnp.abs(s.at.merit))
    shrinks = at.residual < jnp.maximum(_GROWTH * s.at.residual, tol)
    # The first point may start anywhere: whatever can be evaluated is an improvement on it.
    better = finite & (
        (at.merit >= s.at.merit - slack) & (shrinks | (at.merit > s.at.merit + slack))
        | (s.steps == 0)
    )
    # Steps that grow the same way leave a place where the residual is least: no fixed point, though
    # extrapolation leads back to it.
    away = (at.residual > s.at.residual) & (_move(s.x, s.at) @ _move(candidate, at) > 0)
    slot = s.count % MEMORY
    kept = _State(
        candidate,
        at,
        jnp.minimum(damping, 1.4 * s.step),
        s.points.at[slot].set(ravel_pytree(s.x)[0]),
        s.targets.at[slot].set(ravel_pytree(s.at.target)[0]),
        jnp.where(away, 0, s.count + 1),
        s.steps + 1,
        jnp.zeros((), bool),
    )
    step = jnp.where(extrapolated, 1.0, 0.5) * s.step
    # Below the smallest step: take any point that can be evaluated rather than stand still.
    forced = finite & (step < SMALLEST_STEP)
    rejected = s._replace(
        step=step, count=jnp.zeros_like(s.count), steps=s.steps + 1, stuck=step < SMALLEST_STEP
    )
    return jax.tree.map(lambda a, b: jnp.where(better | forced, a, b), kept, rejected)
