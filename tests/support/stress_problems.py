"""Random problems for the stress test of the local methods: every likelihood, three sizes, up to 20
inputs, sd of f 0.3 to 30.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import expit, ndtr

SIZES = (20, 60, 200)
COLUMNS = 20
NAMES = (
    "logit",
    "probit",
    "poisson",
    "negative_binomial",
    "gaussian",
    "student_t",
    "binomial",
    "beta",
    "gamma",
)


class Problem(NamedTuple):
    """Unused input columns are zero, so that problems of one size and likelihood share a compiled
    function.
    """

    seed: int
    likelihood: str
    dims: int
    sd: float
    X: np.ndarray
    y: np.ndarray
    hyper: dict


def problem(seed: int) -> Problem:
    """Problem number `seed`. Labels come from a draw of the prior, or (every third) from another,
    rougher function.
    """
    rng = np.random.default_rng([seed, 2024])
    name, n = NAMES[seed % len(NAMES)], SIZES[(seed // len(NAMES)) % len(SIZES)]
    dims = int(rng.integers(1, COLUMNS + 1))
    sd = float(np.exp(rng.uniform(np.log(0.3), np.log(30.0))))
    lengthscale = float(np.exp(rng.uniform(np.log(0.2), np.log(5.0))) * np.sqrt(dims))
    s = float(np.exp(rng.uniform(np.log(0.3), np.log(5.0))))
    X = np.zeros((n, COLUMNS))
    X[:, :dims] = rng.normal(size=(n, dims))
    truth = lengthscale if seed % 3 else 0.3 * lengthscale
    y = _observe(name, sd * _draw(X, truth, rng), s, rng)
    return Problem(
        seed, name, dims, sd, X, y, {"variance": sd**2, "lengthscale": lengthscale, "s": s}
    )


def _draw(X, lengthscale, rng):
    squared = np.sum((X[:, None] - X[None]) ** 2, -1)
    K = np.exp(-0.5 * squared / lengthscale**2) + 1e-6 * np.eye(len(X))
    return np.linalg.cholesky(K) @ rng.normal(size=len(X))


def _observe(name, f, s, rng):
    rate, tame = np.exp(np.clip(f, -20, 6)), np.clip(f, -6, 6)
    draw = {
        "logit": lambda: (rng.uniform(size=f.size) < expit(f)).astype(float),
        "probit": lambda: (rng.uniform(size=f.size) < ndtr(f)).astype(float),
        "poisson": lambda: rng.poisson(rate).astype(float),
        "negative_binomial": lambda: rng.poisson(rate * rng.gamma(s, 1.0 / s, f.size)).astype(
            float
        ),
        "gaussian": lambda: f + s * rng.normal(size=f.size),
        "student_t": lambda: f + s * rng.standard_t(4.0, size=f.size),
        "binomial": lambda: rng.binomial(5, expit(f)).astype(float),
        "beta": lambda: np.clip(rng.beta(s * expit(tame), s * expit(-tame)), 1e-9, 1 - 1e-9),
        "gamma": lambda: np.maximum(rng.gamma(s, np.exp(np.clip(f, -20, 20)) / s), 1e-30),
    }
    return draw[name]()
