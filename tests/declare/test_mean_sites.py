"""GPs whose prior mean is computed from other integrated sites: their posterior process is that of
f, mean and all.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

RNG = np.random.default_rng(61)
N = 12
X = np.sort(RNG.uniform(0.0, 5.0, N))
Y = 2.0 + 0.5 * X + 0.5 * RNG.normal(size=N)
NEW = np.array([0.5, 2.0, 6.0])


def about_a_level(X, y=None):
    level = numpyro.sample("level", dist.Normal(1.0, 10.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X, mean=level))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.4), obs=y)


def about_a_line(X, y=None):
    """A level that is Gaussian about another one, a slope, in a mean of one's own."""
    top = numpyro.sample("top", dist.Normal(1.0, 3.0))
    level = numpyro.sample("level", dist.Normal(top, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 0.5).expand([1]).to_event(1))
    mean = lambda X: level + jnp.reshape(X, -1) * slope[0]  # noqa: E731
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X, mean=mean))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.4), obs=y)


def seen_twice(X, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 10.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X, mean=level))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + 0.5 * level, 0.4), obs=y)


def rbf(a, b):
    return np.exp(-0.5 * (a[:, None] - b) ** 2)


COVARIANCES = {
    about_a_level: lambda a, b: rbf(a, b) + 100.0,
    about_a_line: lambda a, b: rbf(a, b) + 13.0 + 0.25 * np.outer(a, b),
}


@pytest.mark.one_case
@pytest.mark.parametrize("method", [pg.Laplace(), pg.EP()], ids=["laplace", "ep"])
@pytest.mark.parametrize("model", COVARIANCES, ids=lambda m: m.__name__)
def test_the_process_is_that_of_the_function(model, method):
    k = COVARIANCES[model]
    fit = pg.fit(model, method, 0, X, y=Y)
    C = k(X, X) + (0.16 + 1e-8) * np.eye(N)
    mean = 1.0 + k(NEW, X) @ np.linalg.solve(C, Y - 1.0)
    covariance = k(NEW, NEW) - k(NEW, X) @ np.linalg.solve(C, k(X, NEW))
    np.testing.assert_allclose(fit.posterior(NEW).mean, mean, atol=1e-7)
    np.testing.assert_allclose(fit.posterior(NEW).variance, np.diag(covariance), atol=2e-7)
    joint = fit.posterior(NEW, joint=True)
    np.testing.assert_allclose(joint.covariance_matrix, covariance, atol=2e-7)
    np.testing.assert_allclose(fit.predict(NEW).f_mean, mean, atol=1e-7)


def test_where_there_is_no_such_process_it_is_refused():
    fit = pg.fit(seen_twice, pg.Laplace(), 0, X, y=Y)
    with pytest.raises(pg.ModelError, match=r"'f' is no process.*\['level'\]"):
        fit.posterior(NEW)
    assert np.all(np.isfinite(fit.predict(NEW).f_mean))
