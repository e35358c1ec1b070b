"""Models that check their own arguments: nothing runs them on values that nobody gave."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.core import Tracer
from numpyro import handlers

import ppl_gp as pg

N, SCALE = 24, 1.5
RNG = np.random.default_rng(0)
X = np.linspace(0.0, 4.0, N)[:, None]
GROUP = np.arange(N) % 4
WEIGHT, EXPOSURE, SD = (RNG.uniform(0.5, 2.0, N) for _ in range(3))
Y = np.sin(X[:, 0]) + np.log(EXPOSURE) + 0.3 * RNG.normal(size=N)


def checked(X, group, weight, exposure, sd, y=None):
    for x in (weight, exposure, sd):
        if not isinstance(x, Tracer) and not np.all(np.asarray(x) > 0.1):
            raise ValueError("an argument is not positive")
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, SCALE), X))
    with numpyro.plate("groups", 4):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0))
    # numpyro's own check of a scale raises as well
    with numpyro.plate("data", X.shape[0]), handlers.scale(scale=weight):
        eta = f + u[group] + jnp.log(exposure)
        numpyro.sample("y", dist.Normal(eta, sd, validate_args=True), obs=y)


def exact():
    """log p(y) where every row counts `WEIGHT` times, by dense algebra."""
    K = np.exp(-0.5 * (X - X.T) ** 2 / SCALE**2) + (GROUP[:, None] == GROUP)
    noise = SD**2 / WEIGHT
    r, log_sd = Y - np.log(EXPOSURE), np.log(SD)
    # w log N(y; eta, sd) = log N(y; eta, sd / sqrt(w)) + this
    rest = np.sum(-WEIGHT * (0.5 * np.log(2 * np.pi) + log_sd) + 0.5 * np.log(2 * np.pi * noise))
    C = K + np.diag(noise)
    log_det = np.linalg.slogdet(C)[1]
    return -0.5 * (r @ np.linalg.solve(C, r) + log_det + N * np.log(2 * np.pi)) + rest


METHODS = {
    "SVGP": (pg.SVGP(num_inducing=12, max_steps=40), 1e-2),
    "minibatches": (pg.SVGP(num_inducing=12, max_steps=400, batch_size=8), 1.0),
    "Laplace": (pg.Laplace(), 1e-4),
    "VI": pytest.param((pg.VI(), 1e-4), marks=pytest.mark.slow),
}


@pytest.fixture(params=METHODS.values(), ids=METHODS, scope="module")
def fitted(request):
    method, atol = request.param
    arguments = (X, GROUP, WEIGHT, EXPOSURE, SD)
    return pg.fit(checked, method, 0, *arguments, y=Y), atol


@pytest.mark.filterwarnings("ignore:.*inducing")
def test_models_that_check_their_arguments_fit(fitted):
    fit, atol = fitted
    assert abs(fit.log_evidence - exact()) < atol


def test_models_that_check_their_arguments_answer(fitted, tmp_path):
    """New rows, the posterior of f alone, and a fit from a file, which holds no observations."""
    fit, _ = fitted
    new = (X[:3] + 0.1, GROUP[:3], WEIGHT[:3], EXPOSURE[:3], SD[:3])
    fit.save(tmp_path / "a.fit")
    for each in (fit, pg.load(tmp_path / "a.fit", checked)):
        prediction, f = each.predict(*new), each.posterior(new[0])
        parts = each.components(*new)
        both = parts["f"].mean + parts["u"].mean + np.log(EXPOSURE[:3])
        np.testing.assert_allclose(prediction.f_mean, both, atol=1e-6)
        np.testing.assert_allclose(f.mean, parts["f"].mean, atol=1e-6)
