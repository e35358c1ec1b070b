"""Gaussian sites that the rows see by broadcasting alone: y ~ Normal(theta, 1) in a plate of y.

Against exact evidences, the clutter problem of Minka (2001) with the numbers of Infer.NET's tests,
and the same models with `theta * jnp.ones(N)`.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import multivariate_normal

import ppl_gp as pg

X = np.linspace(0.0, 3.0, 12)
Y = 2.0 + np.random.default_rng(0).normal(size=12)
POINTS = np.array([0.1, 2.3])
COUNTS = np.random.default_rng(1).poisson(3.0, 12)


def normal(X, y=None):
    theta = numpyro.sample("theta", dist.Normal(0.5, 10.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(theta, 0.7), obs=y)


def clutter(y=None, num=2):
    """Minka's: theta plus noise of variance 1, or noise of variance 10 about 0."""
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    which = dist.Categorical(probs=jnp.array([0.5, 0.5]))
    parts = [dist.Normal(theta, 1.0), dist.Normal(0.0, jnp.sqrt(10.0))]
    with numpyro.plate("data", num if y is None else y.shape[0]):
        numpyro.sample("y", dist.MixtureGeneral(which, parts), obs=y)


def counts(X, y=None, ones=False):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    theta = theta * jnp.ones(X.shape[0]) if ones else theta
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(theta)), obs=y)


def vectors(X, y=None, ones=False):
    """A mean in three dimensions, two of which share noise."""
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    theta = jnp.ones((X.shape[0], 1)) * theta if ones else theta
    covariance = jnp.array([[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 0.3]])
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.MultivariateNormal(theta, covariance), obs=y)


def noisy(X, y=None, ones=False):
    """A function, and the logarithm of its noise, with normal priors."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    a = numpyro.sample("a", dist.Normal(-1.0, 0.5))
    a = a * jnp.ones(X.shape[0]) if ones else a
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(a)), obs=y)


def test_a_common_mean_is_exact():
    fit = pg.fit(normal, pg.EP(), 0, X, y=Y)
    covariance = 0.49 * np.eye(12) + 100.0
    exact = multivariate_normal(np.full(12, 0.5), covariance).logpdf(Y)
    assert fit.log_evidence == pytest.approx(exact, abs=1e-8)
    gain = np.linalg.solve(covariance, np.full(12, 100.0))
    mean, variance = 0.5 + gain @ (Y - 0.5), 100.0 - gain.sum() * 100.0
    assert fit.sites["theta"].mean == pytest.approx(mean, abs=1e-8)
    assert fit.sites["theta"].variance == pytest.approx(variance, rel=1e-6)
    found = fit.predict(np.zeros(3))
    np.testing.assert_allclose(found.mean, mean, rtol=1e-8)
    np.testing.assert_allclose(found.variance, variance + 0.49, rtol=1e-8)


def test_clutter_is_that_of_infer_net():
    """EP on x = (0.1, 2.3): evidence -5.129415, mean 0.789960, variance 40.12628. The prediction is
    that of the mixture.
    """
    fit = pg.fit(clutter, pg.EP(), 0, POINTS)
    assert fit.log_evidence == pytest.approx(-5.129415, abs=1e-6)
    theta = fit.sites["theta"]
    assert theta.mean == pytest.approx(0.789960, abs=1e-6)
    assert theta.variance == pytest.approx(40.12628, abs=1e-5)


@pytest.mark.parametrize(
    ("model", "y", "method"),
    [(counts, COUNTS, pg.VI()), (vectors, Y[:, None] * [1.0, 0.5, -1.0], pg.EP())],
)
def test_it_is_that_of_a_column_of_ones(model, y, method):
    one = pg.fit(model, method, 0, X, y=y)
    ones = pg.fit(model, method, 0, X, y=y, ones=True)
    assert one.log_evidence == pytest.approx(ones.log_evidence, abs=1e-8)
    assert np.shape(one.sites["theta"].mean) == np.shape(ones.sites["theta"].mean)
    np.testing.assert_allclose(one.sites["theta"].mean, ones.sites["theta"].mean, rtol=1e-7)
    new = np.linspace(5.0, 6.0, 2)
    np.testing.assert_allclose(one.predict(new).mean, ones.predict(new).mean, rtol=1e-7)
    assert one.to_datatree()["posterior"]["theta"].shape[2:] == np.shape(ones.sites["theta"].mean)


def test_a_lone_scale_is_integrated_where_it_is_asked_for():
    """By default it is a hyperparameter, as it makes a datum see two functions. EP is .064 nats off
    quadrature here, with and without the column of ones.
    """
    y = np.sin(X) + 0.4 * np.random.default_rng(2).normal(size=12)
    kept = pg.fit(noisy, pg.EP(), 0, X, y=y)
    assert set(kept.hyper) == {"a"}
    fit = pg.fit(noisy, pg.EP(integrate=("a",)), 0, X, y=y)
    assert not fit.hyper
    ones = pg.fit(noisy, pg.EP(integrate=("a",)), 0, X, y=y, ones=True)
    assert fit.log_evidence == pytest.approx(ones.log_evidence, abs=1e-8)
    # by quadrature over a: evidence and mean of exact GP regressions
    grid = np.linspace(-3.0, 1.0, 401)
    K = np.exp(-0.5 * (X[:, None] - X) ** 2)
    each = [
        multivariate_normal(np.zeros(12), K + np.exp(2 * a) * np.eye(12)).logpdf(y) for a in grid
    ]
    log_p = np.array(each) - 0.5 * ((grid + 1.0) / 0.5) ** 2 - np.log(0.5 * np.sqrt(2 * np.pi))
    top = log_p.max()
    weights = np.exp(log_p - top)
    exact = top + np.log(np.trapezoid(weights, grid))
    mean = np.trapezoid(weights * grid, grid) / np.trapezoid(weights, grid)
    assert fit.log_evidence == pytest.approx(exact, abs=0.1)
    assert fit.sites["a"].mean == pytest.approx(mean, abs=0.05)


def test_check_lists_the_methods_that_take_it():
    listed = str(pg.check(counts, X, y=COUNTS))
    for method in ("EP", "VI", "Laplace"):
        assert method in listed.splitlines()[-1]


def test_what_needs_one_number_is_refused():
    """A model that stacks the value with others runs for no array of rows."""

    def stacked(X, y=None):
        theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        both = dist.Normal(jnp.stack([theta, jnp.zeros(())]), jnp.array([1.0, 3.0]))
        which = dist.Categorical(probs=jnp.array([0.5, 0.5]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.MixtureSameFamily(which, both), obs=y)

    def across(X, y=None):
        theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.sum(theta), 1.0), obs=y)

    for model in (stacked, across):
        with pytest.raises(pg.ModelError, match="no GP site"):
            pg.fit(model, pg.EP(), 0, X, y=Y)
