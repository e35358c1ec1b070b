"""The measuring tape: interleaved medians, the yardstick, and the data every benchmark shares."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import scipy.linalg

import ppl_gp as pg
from ppl_gp.local.method import log_evidence
from ppl_gp.reading.factors import read


class Row(NamedTuple):
    """One line of the table: what was measured, the figure as text, and the target the project set
    itself.

    `value` in `unit` is the number in the figure that the target is about, for the history; `None`
    where it was not had.
    """

    what: str
    figure: str
    target: str
    value: float | None = None
    unit: str = ""


def binary(X, y=None):
    """GP classification with an RBF kernel, logit."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def flat(X, y=None):
    """The same with improper flat priors, which scikit-learn's evidence maximisation corresponds
    to.
    """
    variance = numpyro.param("variance", 1.0, constraint=dist.constraints.positive)
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=dist.constraints.positive)
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def two_moons_like(n: int, seed: int = 0):
    """Two noisy half circles in the plane, (n, 2) and labels 0, 1."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    angle = rng.uniform(0, np.pi, n) + np.pi * y
    X = np.stack([np.cos(angle) + y, np.sin(angle) + 0.5 * y], 1) + 0.25 * rng.normal(size=(n, 2))
    return X, y


def seconds(*works: Callable, repeats: int = 5) -> list[list[float]]:
    """Wall seconds of each piece of work, all of them in turn, `repeats` times after one warm-up
    each.
    """
    for work in works:
        jax.block_until_ready(work())
    out = [[] for _ in works]
    for _ in range(repeats):
        for times, work in zip(out, works, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(work())
            times.append(time.perf_counter() - start)
    return out


def ratio(a: list[float], b: list[float]) -> float:
    """Median of the pairwise ratios a / b."""
    return float(np.median(np.array(a) / np.array(b)))


def yardstick(n: int) -> Callable:
    """One Cholesky factor and one triangular solve with n right-hand sides, by SciPy, at size n."""
    X, _ = two_moons_like(n)
    K = np.exp(-0.5 * ((X[:, None] - X[None]) ** 2).sum(-1)) + np.eye(n)

    def work():
        L = scipy.linalg.cholesky(K, lower=True, check_finite=False)
        return scipy.linalg.solve_triangular(L, K, lower=True, check_finite=False)

    return work


def evidence_and_gradient(method, X, y):
    """A compiled (log variance, log lengthscale) -> (log evidence, gradient), with the solution as
    auxiliary output.
    """

    @jax.jit
    def both(theta, X, y):
        def value(theta):
            hyper = {"variance": jax.numpy.exp(theta[0]), "lengthscale": jax.numpy.exp(theta[1])}
            factors = read(binary, X, y=y, hyper=hyper)
            return log_evidence(method, factors)

        return jax.value_and_grad(value, has_aux=True)(theta)

    X, y = jax.numpy.asarray(X), jax.numpy.asarray(y)
    return lambda theta: both(theta, X, y)
