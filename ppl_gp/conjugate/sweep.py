"""Coordinate ascent: each block in turn to the maximum of the bound (Bishop 2006, eq. 10.9)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ppl_gp.conjugate.expected import Term, bound, expected
from ppl_gp.conjugate.family import Family, blend
from ppl_gp.conjugate.log_joint import LogJoint


def updated(joint: LogJoint, terms, q: list[Family], j: int, rate=1.0) -> Family:
    """Block j at the maximum of the bound given the others, or a step `rate` of the way to it in
    natural parameters. One gradient of the terms that see it.
    """
    coordinates: list[Any] = [f.coordinates() for f in q]
    own = [t for t in terms if j in t.blocks]

    def energy(c):
        here = [*coordinates[:j], c, *coordinates[j + 1 :]]
        return sum((expected(joint, t, q, here) for t in own), jnp.zeros(()))

    target = q[j].natural(coordinates[j], jax.grad(energy)(coordinates[j]))
    return target if isinstance(rate, float) and rate == 1.0 else blend(q[j], target, rate)


def sweep(joint: LogJoint, terms: tuple[Term, ...], q: list[Family]) -> list[Family]:
    """Every block once, in order; the bound never falls."""
    for j in range(len(q)):
        q = [*q[:j], updated(joint, terms, q, j), *q[j + 1 :]]
    return q


class Progress(eqx.Module):
    """Where one start stands: q, the bound (nats), its last gain, sweeps made, the bounds so
    far.
    """

    q: list[Family]
    bound: Array
    gain: Array
    sweeps: Array


def begin(q: list[Family]) -> Progress:
    """Before the first sweep. Of the types that a sweep gives, or the second chunk of sweeps would
    compile anew.
    """
    worst = jnp.full((), -jnp.inf, jnp.result_type(float))
    return Progress(q, worst, -worst, jnp.zeros((), int))


def is_open(state: Progress, tol: float) -> Array:
    """Whether the last sweep gained more than `tol`, and more than rounding."""
    rounding = 100.0 * jnp.finfo(state.bound.dtype).eps * jnp.abs(state.bound)
    still = state.gain > jnp.maximum(tol, jnp.where(jnp.isfinite(rounding), rounding, 0.0))
    return still & ~jnp.isnan(state.bound)


def climb(joint: LogJoint, terms, state: Progress, tol: float, num: int) -> tuple[Progress, Array]:
    """Up to `num` sweeps of one start, and their bounds, NaN behind the last."""

    def one(carry):
        now, bounds = carry
        q = sweep(joint, terms, now.q)
        value = bound(joint, terms, q)
        after = Progress(q, value, value - now.bound, now.sweeps + 1)
        return after, bounds.at[now.sweeps - state.sweeps].set(value)

    def going(carry):
        now, _ = carry
        return is_open(now, tol) & (now.sweeps - state.sweeps < num)

    return lax.while_loop(going, one, (state, jnp.full(num, jnp.nan)))
