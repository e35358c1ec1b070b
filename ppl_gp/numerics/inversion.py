"""Quantiles of many distributions at once, from their cumulative distribution functions."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_STEPS = 200
_BISECT_EVERY = 4  # regula falsi may creep where F is flat
_CLOSE = 0.4  # of the tolerance: no step ends nearer to an end of the bracket


class _Bracket(NamedTuple):
    """F(low) < p <= F(high), infinite where no such point was found yet; F - p there, halved where
    an end has stayed twice.
    """

    low: Float[Array, "..."]
    high: Float[Array, "..."]
    below: Float[Array, "..."]
    above: Float[Array, "..."]
    side: Int[Array, "..."]  # +1 where the last step moved `high`, -1 where `low`
    step: Float[Array, "..."]  # by which the bracket grows
    steps: Int[Array, ""]


def invert(
    F: Callable,
    p: Float[Array, "..."],
    start: Float[Array, "..."],
    scale: Float[Array, "..."],
    *,
    low: float = -float("inf"),
    integers: bool = False,
) -> Float[Array, "..."]:
    """The smallest x with F(x) >= p, elementwise, to about 1e-9 of `scale` or of |x|, whichever is
    larger; integers exactly.

    The bracket grows from `start` by doubled steps; inside, regula falsi by the Illinois rule
    (Dowell & Jarratt 1971), every fourth step a bisection. A step to where the bracket has an end
    already, as regula falsi makes once that end is the root to rounding, goes a little further in,
    and closes it (Brent 1973, chapter 4). `low`: a number below the support. F, nondecreasing, is
    evaluated once a step for all entries: 3 to 15 steps as a rule, 130 where F is flat at p, 200 at
    most.
    """
    shape = jnp.broadcast_shapes(jnp.shape(p), jnp.shape(start))
    p, start, scale = (jnp.broadcast_to(x, shape) for x in (p, start, scale))
    tol = 1.0 if integers else jnp.finfo(p.dtype).eps ** 0.6

    def unit(s):
        return 1.0 if integers else scale + jnp.abs(s.high)

    def running(s):
        return jnp.any(~((s.high - s.low) / unit(s) <= tol)) & (s.steps < _STEPS)

    def inside(x, s):
        least = jnp.minimum(_CLOSE * tol * unit(s), 0.5 * (s.high - s.low))
        return jnp.clip(x, s.low + least, s.high - least)

    def candidate(s):
        share = s.above / (s.above - s.below)
        share = jnp.where(s.steps % _BISECT_EVERY == _BISECT_EVERY - 1, 0.5, share)
        x = s.high - share * (s.high - s.low)
        x = x if integers else inside(x, s)
        x = jnp.where(jnp.isinf(s.low), s.high - s.step, x)
        x = jnp.where(jnp.isinf(s.high), s.low + s.step, x)
        x = jnp.where(s.steps == 0, start, x)
        return jnp.clip(jnp.floor(x), s.low + 1.0, s.high - 1.0) if integers else x

    def advance(s):
        x = candidate(s)
        new = _moved(s, x, F(x) - p)
        is_found = integers & (s.high - s.low <= 1.0)
        low, high = (jnp.where(is_found, a, b) for a, b in ((s.low, new.low), (s.high, new.high)))
        return new._replace(low=low, high=high)

    return lax.while_loop(running, advance, _first(p, scale, low)).high


def _first(p, scale, low: float) -> _Bracket:
    """Before any evaluation."""
    zero = jnp.zeros((), jnp.int32)
    ends = jnp.full(p.shape, low, p.dtype), jnp.full(p.shape, jnp.inf, p.dtype)
    return _Bracket(*ends, -p, 1.0 - p, jnp.zeros(p.shape, jnp.int32), scale, zero)


def _moved(s: _Bracket, x, value) -> _Bracket:
    """The bracket with an end at x, where F - p is `value`."""
    up = value >= 0
    side = jnp.where(up, 1, -1).astype(jnp.int32)
    half = jnp.where(side == s.side, 0.5, 1.0)
    return _Bracket(
        jnp.where(up, s.low, x),
        jnp.where(up, x, s.high),
        jnp.where(up, half * s.below, value),
        jnp.where(up, value, half * s.above),
        side,
        2.0 * s.step,
        s.steps + 1,
    )
