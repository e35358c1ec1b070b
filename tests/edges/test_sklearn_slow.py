"""`pg.sklearn` in scikit-learn's machinery: its checks of estimators, pipelines, searches, threads;
and the models that the estimators take by default.
"""

import joblib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import (
    parametrize_with_checks,
)

import ppl_gp as pg
from models.classification import binary
from models.multiclass import multiclass
from ppl_gp.sklearn import GPClassifier, GPRegressor

pytestmark = pytest.mark.slow
CHEAP = pg.Laplace(hyper=pg.MAP(tol=1e-2))


def data(seed=0, num=60, num_classes=2):
    """X (num, 2) in units of their own, classes and numbers (num,) of one smooth function."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num, 2))
    f = np.sin(2 * X[:, 0]) + X[:, 1]
    edges = np.quantile(f, np.arange(1, num_classes) / num_classes)
    return X * [100.0, 0.01], np.searchsorted(edges, f), f + 0.1 * rng.normal(size=num)


def counts(X, y=None, rate=1.0):
    """Poisson counts, with a column of X as their exposure."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X[:, :1]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(rate * X[:, 1] * np.e**f), obs=y)


def searched(estimator):
    """A weight divides the variance of the noise and says nothing of it: a search among noises ends
    elsewhere than that of equal rows, which have the same y without any noise.
    """
    regressor = isinstance(estimator, GPRegressor)
    return {EQUIVALENCE: "weights are no repeated rows"} if regressor else {}


EQUIVALENCE = "check_sample_weight_equivalence_on_dense_data"


@parametrize_with_checks(
    [GPClassifier(method=CHEAP), GPRegressor(method=CHEAP)], expected_failed_checks=searched
)
def test_estimator_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_default_classifier(num_classes):
    """Of rows in one unit, found by default models, priors and methods."""
    X, y, _ = data(0, 90, num_classes)
    model = make_pipeline(StandardScaler(), GPClassifier()).fit(X[:60], y[:60])
    assert model.score(X[60:], y[60:]) > 0.8
    fitted = model[-1]
    assert type(fitted.fit_result_.method) is (pg.EP if num_classes == 2 else pg.Laplace)
    alpha, beta = fitted.fit_result_.kwargs["lengthscale_prior"]
    prior = pg.priors.lengthscale(model[0].transform(X[:60]))
    assert (alpha, beta) == pytest.approx((prior.concentration, prior.rate))
    assert model.predict_proba(X[60:]).shape == (30, num_classes)


def test_default_regressor_is_covariant():
    """R^2, and in other units of y the same numbers in these units: its priors know the data."""
    X, _, y = data()
    X = StandardScaler().fit_transform(X)
    one = GPRegressor().fit(X[:40], y[:40])
    assert one.score(X[40:], y[40:]) > 0.9
    two = GPRegressor().fit(X[:40], 1000.0 * y[:40] - 7e4)
    mean, std = one.predict(X[40:], return_std=True)
    others = two.predict(X[40:], return_std=True)
    # the search ends within its tolerance of one maximum
    np.testing.assert_allclose(others[0], 1000.0 * mean - 7e4, rtol=1e-5, atol=1.0)
    np.testing.assert_allclose(others[1], 1000.0 * std, rtol=1e-2)
    found = one.predict(X[40:], return_std=True, quantiles=(0.16, 0.84))[2]
    assert found.shape == (20, 2)
    np.testing.assert_allclose(np.diff(found)[:, 0] / 2, 0.99446 * std, rtol=1e-3)
    draws = one.sample_y(X[40:], 4000, random_state=1)
    assert draws.shape == (20, 4000)
    np.testing.assert_allclose(draws.mean(1), mean, atol=5 * std.max() / np.sqrt(4000))
    covariance = one.predict(X[40:], return_cov=True)[1]
    np.testing.assert_allclose(np.cov(draws), covariance, atol=6 * std.max() ** 2 / np.sqrt(4000))


def test_three_classes_are_those_of_the_declared_model():
    """One length scale in both columns: the same prior and likelihood in other words."""
    X, y, _ = data(1, 40, 3)
    X = StandardScaler().fit_transform(X)
    hyper = {"lengthscale": 1.3, "variance": 2.0}
    ours = GPClassifier(method=pg.Laplace(hyper=pg.Fixed(hyper))).fit(X, y)
    hyper = {"lengthscale": np.full(2, 1.3), "variance": 2.0}
    fit = pg.fit(multiclass, pg.Laplace(hyper=pg.Fixed(hyper)), 0, X, y=y)
    assert ours.log_evidence_ == pytest.approx(fit.log_evidence, abs=1e-7)
    np.testing.assert_allclose(ours.predict_proba(X[:9]), fit.predict(X[:9]).probs, atol=1e-7)
    given = GPClassifier(multiclass, fit.method, {"num_classes": 4}).fit(X, y)
    with pytest.raises(pg.ModelError, match="4 outcomes, and y has 3 classes"):
        given.predict(X[:9])


def test_a_declared_model_of_counts_with_arguments(tmp_path):
    rng = np.random.default_rng(0)
    X = np.stack([rng.uniform(-2, 2, 40), rng.uniform(1, 20, 40)], 1)
    y = rng.poisson(0.5 * X[:, 1] * np.exp(np.sin(X[:, 0])))
    method = pg.Laplace(hyper=pg.Fixed({"lengthscale": 1.0}))
    model = GPRegressor(counts, method, {"rate": 0.5}).fit(X, y)
    direct = pg.fit(counts, method, 0, X, y=y, rate=0.5)
    assert model.log_evidence_ == pytest.approx(direct.log_evidence, abs=1e-8)
    mean, quantiles = model.predict(X, quantiles=(0.1, 0.9))
    np.testing.assert_allclose(mean, direct.predict(X).mean, rtol=1e-6)
    assert 0.7 < np.mean((quantiles[:, 0] <= y) & (y <= quantiles[:, 1])) <= 1.0
    assert model.score(X, y) > 0.7
    joblib.dump(model, tmp_path / "model.joblib")
    assert np.array_equal(joblib.load(tmp_path / "model.joblib").predict(X), mean)
    with pytest.raises(pg.ModelError, match="probabilities of outcomes"):
        GPClassifier(counts, method).fit(X, (y > 3).astype(int)).predict(X)


def test_a_search_over_methods_and_their_settings():
    X, y, _ = data(2, 45)
    pipeline = make_pipeline(StandardScaler(), GPClassifier(binary, None, {"ard": False}, 0))
    grid = [
        {"gpclassifier__method": [CHEAP, pg.EP(hyper=pg.MAP(tol=1e-2))]},
        {
            "gpclassifier__method": [pg.SVGP(max_steps=60)],
            "gpclassifier__method__num_inducing": [2, 12],
        },
    ]
    search = GridSearchCV(pipeline, grid, cv=3, scoring="neg_log_loss", error_score="raise")
    search.fit(X, y)
    found = search.cv_results_["mean_test_score"]
    # two inducing variables are too few; EP's probabilities are no worse than Laplace's
    assert found[2] < found[3] and found[1] > found[0] - 0.02
    assert search.best_score_ == found.max() and search.score(X, y) > -0.6


def test_folds_in_threads_are_those_one_after_the_other():
    X, y, _ = data(4, 45)
    X, model = StandardScaler().fit_transform(X), GPClassifier(method=CHEAP, random_state=0)
    alone = cross_val_score(model, X, y, cv=3, scoring="neg_log_loss")
    with joblib.parallel_config(backend="threading"):
        threads = cross_val_score(model, X, y, cv=3, scoring="neg_log_loss", n_jobs=3)
    assert np.array_equal(alone, threads) and np.all(alone > np.log(0.5))


def test_sampled_hyperparameters():
    """A mixture over draws: no one evidence, and a wider band than at one value."""
    X, _, y = data(5, 25)
    X = StandardScaler().fit_transform(X)
    settings = pg.Sample(num_warmup=100, num_samples=100)
    model = GPRegressor(method=pg.Laplace(hyper=settings), random_state=0).fit(X, y)
    assert model.log_evidence_ is None and model.hyper_["lengthscale"].shape == (100,)
    mean, covariance = model.predict(X[:5] + 0.3, return_cov=True)
    std = model.predict(X[:5] + 0.3, return_std=True)[1]
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), std, rtol=1e-6)
    assert np.all(np.linalg.eigvalsh(covariance) > 0)
    draws = model.sample_y(X[:5] + 0.3, 4000)
    np.testing.assert_allclose(np.cov(draws), covariance, atol=0.15 * covariance.max())
