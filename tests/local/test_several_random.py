"""Three hundred random problems of several functions a datum: how many converge, and how far from
the truth, by draws of the prior. One compilation a family and method serves all of them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

import ppl_gp as pg
from ppl_gp.errors import Result

N, DRAWS = 5, 200_000


def _functions(X, variance, lengthscale, num):
    with numpyro.plate("functions", num):
        return numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X, jitter=1e-6))


def three_classes(X, variance, lengthscale, shift, y=None):
    f = _functions(X, variance, lengthscale, 3)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T + shift), obs=y)


def noisy(X, variance, lengthscale, shift, y=None):
    f = _functions(X, variance, lengthscale, 2)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f[0] + shift[0], jnp.exp(0.5 * f[1] - 0.5)), obs=y)


def overdispersed(X, variance, lengthscale, shift, y=None):
    f = _functions(X, variance, lengthscale, 2)
    with numpyro.plate("data", X.shape[0]):
        counts = dist.NegativeBinomial2(jnp.exp(f[0] + shift[0]), jnp.exp(1.0 + 0.5 * f[1]))
        numpyro.sample("y", counts, obs=y)


FAMILIES = {f.__name__: f for f in (three_classes, noisy, overdispersed)}
# {(family, method): nats that it may be off by, of five data}: measured, times 1.25
WORST = {
    ("three_classes", "Laplace"): 0.4,
    ("three_classes", "VI"): 0.19,
    ("three_classes", "EP"): 0.035,
    ("noisy", "Laplace"): 10.0,  # a fifth of a nat to four, and two problems of seven and eight
    ("noisy", "VI"): 4.1,
    ("noisy", "EP"): 0.15,  # where its integrals are not told to be off: 95 of 100
    ("overdispersed", "Laplace"): 0.68,
    ("overdispersed", "VI"): 0.46,
    ("overdispersed", "EP"): 0.035,
}
MEDIAN = {  # the same of the typical problem
    ("three_classes", "Laplace"): 0.07,
    ("three_classes", "VI"): 0.0095,
    ("three_classes", "EP"): 0.005,
    ("noisy", "Laplace"): 0.5,
    ("noisy", "VI"): 0.55,
    ("noisy", "EP"): 0.027,
    ("overdispersed", "Laplace"): 0.055,
    ("overdispersed", "VI"): 0.019,
    ("overdispersed", "EP"): 0.005,
}


class Given(NamedTuple):
    """log p(y | functions of `unknowns` standard normal variables)."""

    unknowns: int
    log_lik: Callable


def of_all_functions(model, X, variance, lengthscale, shift, y) -> Given:
    factors = pg.read(model, X, variance, lengthscale, shift, y=y)
    L, mean = factors.prior.scale_tril, jnp.ravel(factors.prior.mean)  # offsets included
    return Given(len(L), lambda w: jnp.sum(factors.log_lik(mean + L @ w)))


def of_the_noise(model, X, variance, lengthscale, shift, y) -> Given:
    """`noisy` with its first function integrated exactly: draws of y's noise alone judge well."""
    K = pg.kernels.RBF(variance, lengthscale)(X, X) + 1e-6 * variance * jnp.eye(N)
    L = jnp.linalg.cholesky(K)

    def log_lik(w):
        noise = jnp.exp(L @ w - 1.0)
        return dist.MultivariateNormal(shift[0], K + jnp.diag(noise)).log_prob(y)

    return Given(N, log_lik)


LIKELIHOOD = {"noisy": of_the_noise}


def _problem(model, seed):
    rng = np.random.default_rng(seed)
    X = jnp.asarray(rng.normal(size=(N, 2)))
    variance, lengthscale = np.exp(rng.normal(0.0, 0.8)), np.exp(rng.normal(0.0, 0.5))
    given = (jnp.asarray(variance), jnp.asarray(lengthscale), jnp.asarray(rng.normal(size=3)))
    draw = numpyro.infer.Predictive(model, num_samples=1)(random.key(seed), X, *given)
    return X, *given, draw["y"][0]


@functools.cache
def judged_problems(family):
    """[(problem, its log evidence, the error of that)]: the same of every method."""
    model = FAMILIES[family]

    @jax.jit
    def truth(X, variance, lengthscale, shift, y, key):
        given = LIKELIHOOD.get(family, of_all_functions)(model, X, variance, lengthscale, shift, y)
        white = random.normal(key, (DRAWS, given.unknowns))
        log_p = jax.lax.map(given.log_lik, white, batch_size=1000)
        log_z = jax.nn.logsumexp(log_p) - jnp.log(DRAWS)
        return log_z, jnp.std(jnp.exp(log_p - log_z)) / DRAWS**0.5

    problems = [_problem(model, seed) for seed in range(100)]
    truths = [truth(*p, random.key(seed)) for seed, p in enumerate(problems)]
    return [(p, *map(float, t)) for p, t in zip(problems, truths, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [pg.Laplace(), pg.VI(), pg.EP()], ids=lambda m: type(m).__name__)
def test_random_problems_converge_near_the_truth(family, method):
    model, name = FAMILIES[family], type(method).__name__

    @jax.jit
    def fitted(X, variance, lengthscale, shift, y):
        factors = pg.read(model, X, variance, lengthscale, shift, y=y)
        value, solution = pg.log_evidence(method, factors)
        return value, solution.code, solution.quadrature_error

    codes, gaps = [], []
    # the told error is cautious: of 19 problems above .01 a rule of 31 nodes moves only the four
    # that are above .1 by more than .008
    limit = 0.1 if (family, name) == ("noisy", "EP") else 1e-2
    for problem, exact, error in judged_problems(family):
        value, code, told = fitted(*problem)
        codes.append(Result.from_code(code) is Result.converged)
        if codes[-1] and error < 0.05 and (told is None or float(told) < limit):
            gaps.append(float(value) - exact)
            assert name != "VI" or gaps[-1] < 4 * error  # a bound
    assert np.mean(codes) >= 0.98
    assert len(gaps) >= 95
    assert np.max(np.abs(gaps)) < WORST[family, name], (min(gaps), max(gaps))
    assert np.median(np.abs(gaps)) < MEDIAN[family, name]
