"""Log evidence and gradient in yardsticks (one Cholesky factor and one n-column triangular solve by SciPy), n =
2000."""

import jax.numpy as jnp

import ppl_gp as pg
from tests.benchmarks.common import Row, evidence_and_gradient, ratio, seconds, two_moons_like, yardstick

N = 2000
METHODS = (
    ("Laplace, tolerance 1e-8", pg.Laplace(tol=1e-8), "at most 8"),
    ("EP, tolerance 1e-6", pg.EP(tol=1e-6), "at most 15"),
    ("VI, tolerance 1e-6", pg.VI(tol=1e-6), "none set"),
)


def rows(repeats: int = 3) -> list[Row]:
    """Ratios to the yardstick, measured in turn."""
    X, y = two_moons_like(N)
    theta = jnp.log(jnp.array([4.0, 1.0]))
    both = [evidence_and_gradient(method, X, y) for _, method, _ in METHODS]
    steps = [int(b(theta)[0][1].steps) for b in both]
    times = seconds(yardstick(N), *(lambda b=b: b(theta) for b in both), repeats=repeats)
    return [
        Row(f"{name}: log evidence and gradient, n = {N}", f"{ratio(t, times[0]):.1f} yardsticks ({k} steps)", target)
        for (name, _, target), t, k in zip(METHODS, times[1:], steps, strict=True)
    ]
