"""Log evidence and gradient in yardsticks: one Cholesky factor and one n-column triangular solve by
SciPy.
"""

from typing import NamedTuple

import jax.numpy as jnp

import ppl_gp as pg
from tests.benchmarks.common import (
    Row,
    evidence_and_gradient,
    ratio,
    seconds,
    two_moons_like,
    yardstick,
)


class Size(NamedTuple):
    """Data, and timings of each method."""

    n: int
    repeats: int


FULL, TOY = Size(2000, 3), Size(20, 1)
METHODS = (
    ("Laplace, tolerance 1e-8", pg.Laplace(tol=1e-8), "at most 8"),
    ("EP, tolerance 1e-6", pg.EP(tol=1e-6), "at most 15"),
    ("VI, tolerance 1e-6", pg.VI(tol=1e-6), "none set"),
)


def rows(size: Size = FULL) -> list[Row]:
    """Ratios to the yardstick, measured in turn."""
    X, y = two_moons_like(size.n)
    theta = jnp.log(jnp.array([4.0, 1.0]))
    both = [evidence_and_gradient(method, X, y) for _, method, _ in METHODS]
    steps = [int(b(theta)[0][1].steps) for b in both]
    times = seconds(yardstick(size.n), *(lambda b=b: b(theta) for b in both), repeats=size.repeats)
    return [
        _row(name, size.n, ratio(t, times[0]), k, target)
        for (name, _, target), t, k in zip(METHODS, times[1:], steps, strict=True)
    ]


def _row(name: str, n: int, value: float, steps: int, target: str) -> Row:
    what = f"{name}: log evidence and gradient, n = {n}"
    return Row(what, f"{value:.1f} yardsticks ({steps} steps)", target, value, "yardsticks")
