"""Every declared model runs as an ordinary NumPyro program, draws its own data, and is read by the
local methods.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from scipy.stats import multivariate_normal

import ppl_gp as pg
from models.classification import binary
from models.counts import coal_mining_like, event_times, poisson
from models.regression import regression
from models.robust import student_t

N = 12
X = np.stack([np.linspace(-2.0, 2.0, N), np.cos(np.arange(N))], 1)
BY_NAME = {
    "binary": (binary, {}),
    "probit": (binary, {"link": "probit"}),
    "regression": (regression, {}),
    "poisson": (poisson, {"exposure": np.linspace(0.5, 2.0, N)}),
    "student_t": (student_t, {}),
}
every_model = pytest.mark.parametrize("model, kwargs", BY_NAME.values(), ids=BY_NAME)
# Compiling a sampler takes seconds, and the probit differs from the logit in one site only.
SAMPLED = {k: v for k, v in BY_NAME.items() if k != "probit"}
sampled_models = pytest.mark.parametrize("model, kwargs", SAMPLED.values(), ids=SAMPLED)


def drawn(model, kwargs):
    """Observations drawn by the model itself."""
    return Predictive(model, num_samples=1)(random.key(3), X, **kwargs)["y"][0]


@pytest.mark.one_case
@every_model
def test_prior_predictive(model, kwargs):
    draws = Predictive(model, num_samples=4)(random.key(0), X, **kwargs)
    assert draws["y"].shape == draws["f"].shape == (4, N)
    assert draws["lengthscale"].shape == (4, 2)
    assert len(np.unique(np.asarray(draws["f"])[:, 0])) == 4


@pytest.mark.slow
@sampled_models
def test_plain_nuts(model, kwargs):
    mcmc = numpyro.infer.MCMC(
        numpyro.infer.NUTS(model), num_warmup=5, num_samples=5, progress_bar=False
    )
    mcmc.run(random.key(1), X, y=drawn(model, kwargs), **kwargs)
    assert np.all(np.isfinite(mcmc.get_samples()["f"]))


@pytest.mark.slow
@sampled_models
def test_svi(model, kwargs):
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), Trace_ELBO())
    result = svi.run(random.key(2), 3, X, y=drawn(model, kwargs), progress_bar=False, **kwargs)
    assert np.all(np.isfinite(result.losses))


@pytest.mark.slow
@pytest.mark.one_case
@every_model
def test_likelihood_is_pointwise(model, kwargs):
    """`read` finds one GP and N terms that sum to the model's own density of y given f."""
    y = drawn(model, kwargs)
    hyper = {
        k: v
        for k, v in Predictive(model, num_samples=1)(random.key(3), X, **kwargs).items()
        if k not in "yf"
    }
    hyper = {k: v[0] for k, v in hyper.items()}
    log_lik = pg.read(model, X, y=y, hyper=hyper, **kwargs).log_lik
    # not 0, where NumPyro's derivative of log Bernoulli(logits=0) is not the true one
    f = jnp.sin(1.0 + jnp.arange(N))
    slopes = jax.jacobian(log_lik)(f)
    assert np.all(np.asarray(slopes)[~np.eye(N, dtype=bool)] == 0)
    assert np.all(np.diag(slopes) != 0)
    total, _ = numpyro.infer.util.log_density(model, (X,), {"y": y, **kwargs}, {**hyper, "f": f})
    without, _ = numpyro.infer.util.log_density(
        model, (X,), {"y": drawn(model, kwargs), **kwargs}, {**hyper, "f": 0 * f}
    )
    prior = pg.read(model, X, y=y, hyper=hyper, **kwargs).prior
    zero = jnp.sum(log_lik(0 * f)) + prior.log_prob(0 * f)
    np.testing.assert_allclose(
        total - without, jnp.sum(log_lik(f)) + prior.log_prob(f) - zero, rtol=1e-9
    )


def test_unknown_link():
    with pytest.raises(ValueError, match="link='cauchit'"):
        binary(X, link="cauchit")


def test_regression_is_the_conjugate_twin():
    """Laplace's evidence is log N(y; 0, K + noise variance I), by SciPy."""
    y = np.sin(2.0 * X[:, 0])
    hyper = {"lengthscale": np.array([1.0, 2.0]), "variance": 1.3, "noise_scale": 0.2}
    fit = pg.fit(regression, pg.Laplace(hyper=pg.Fixed(hyper)), 0, X, y=y)
    K = np.asarray(pg.kernels.RBF(1.3, np.array([1.0, 2.0]))(X, X)) + 1.3e-8 * np.eye(N)
    exact = multivariate_normal.logpdf(y, np.zeros(N), K + 0.04 * np.eye(N))
    np.testing.assert_allclose(fit.log_evidence, exact, rtol=1e-10)


def test_coal_series():
    series = coal_mining_like(seed=0, num_bins=40)
    times = event_times(seed=0)
    assert np.all(np.diff(times) >= 0) and times[0] >= 1851.2 and times[-1] <= 1962.2
    assert series.y.sum() == len(times) and series.y.shape == (40,) and series.X.shape == (40, 1)
    np.testing.assert_allclose(series.exposure * 40, 111.0, rtol=1e-12)
    np.testing.assert_allclose([series.X.mean(), series.X.std()], [0.0, 1.0], atol=1e-12)
    assert np.array_equal(series.y, coal_mining_like(seed=0, num_bins=40).y)


def test_coal_rates():
    """Over many seeds, the events before and after the change have the declared Poisson means
    (within 4 s.e.).
    """
    before = np.array([np.searchsorted(event_times(seed), 1890.5) for seed in range(200)])
    after = np.array([len(event_times(seed)) for seed in range(200)]) - before
    for events, mean in ((before, 3.1 * 39.3), (after, 0.9 * 71.7)):
        assert abs(events.mean() - mean) < 4 * np.sqrt(mean / 200)
        assert abs(events.var() / mean - 1) < 4 * np.sqrt(2 / 200)


def in_units(scale):
    """(fit, its model, new inputs) of the same data, X in other units: priors made of X and y."""
    x = np.linspace(0.0, 1.0, 30)[:, None]
    y = 20.0 * np.sin(6.0 * x[:, 0]) + 2.0 * np.random.default_rng(1).normal(size=30)
    model = partial(
        regression,
        lengthscale_prior=pg.priors.lengthscale(scale * x, ard=True),
        variance_prior=pg.priors.variance(y),
        noise_prior=dist.LogNormal(np.log(0.3 * y.std()), 1.0),
    )
    fit = pg.fit(model, pg.Laplace(), 0, scale * x, y=y)
    return fit, model, scale * np.linspace(0.0, 1.3, 9)[:, None]


@pytest.mark.slow
def test_units_of_the_inputs_change_no_prediction_of_a_declared_model(tmp_path):
    (one, model, new), (other, _, far) = in_units(1.0), in_units(1000.0)
    found, moved = one.predict(new), other.predict(far)
    np.testing.assert_allclose(found.mean, moved.mean, atol=20.0 * 1e-3)
    np.testing.assert_allclose(found.variance, moved.variance, rtol=1e-3)
    one.save(tmp_path / "one.fit")
    again = pg.load(tmp_path / "one.fit", model).predict(new)
    np.testing.assert_allclose(again.mean, found.mean, rtol=1e-12)
