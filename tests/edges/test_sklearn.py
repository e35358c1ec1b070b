"""`pg.sklearn`: against scikit-learn's own Gaussian processes, against `pg.fit`, and by
scikit-learn's checks of estimators.
"""

import functools
import importlib
import pickle
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import small_fits
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import cross_val_score

import ppl_gp as pg
from ppl_gp.infer.fit import stopwatch
from ppl_gp.sklearn import GPClassifier, GPRegressor
from ppl_gp.sklearn.estimators import _joint, binary, regression

ROOT = Path(__file__).parents[2]
HYPER = {"lengthscale": 1.2, "variance": 2.0}
NOISE = 0.3
FIXED = pg.Laplace(hyper=pg.Fixed(HYPER))
FIXED_NOISE = pg.Laplace(hyper=pg.Fixed({**HYPER, "noise_scale": NOISE}))
KERNEL = ConstantKernel(HYPER["variance"]) * RBF(HYPER["lengthscale"])
LABELS = np.array(["no", "yes"])


def data(seed=0, num=24):
    """X (num, 2), y in {"no", "yes"} and numbers (num,)."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num, 2))
    numbers = 3.0 + np.sin(2 * X[:, 0]) + X[:, 1] + NOISE * rng.normal(size=num)
    return X, LABELS[(numbers > 3.0).astype(int)], numbers


X_NEW = data(9, 7)[0]


@pytest.fixture(scope="module")
def classifier():
    X, labels, _ = data()
    return GPClassifier(method=FIXED, random_state=0).fit(X, labels)


@pytest.fixture(scope="module")
def regressor():
    X, _, y = data()
    return GPRegressor(method=FIXED_NOISE).fit(X, y)


def test_classifier_is_that_of_scikit_learn(classifier):
    """The same Laplace approximation. Both stop Newton's method by a tolerance of their own, theirs
    at a change of 1e-10 of the evidence; our jitter is 1e-8 of the variance or less. Their
    probabilities are a sum of five error functions that stands for the logistic one, to 1e-3.
    """
    X, labels, _ = data()
    theirs = GaussianProcessClassifier(KERNEL, optimizer=None).fit(X, labels)
    assert classifier.log_evidence_ == pytest.approx(
        theirs.log_marginal_likelihood_value_, abs=1e-5
    )
    assert list(classifier.classes_) == list(theirs.classes_) == list(LABELS)
    probs = classifier.predict_proba(X_NEW)
    np.testing.assert_allclose(probs, theirs.predict_proba(X_NEW), atol=2e-3)
    assert np.array_equal(classifier.predict(X_NEW), theirs.predict(X_NEW))


def test_what_a_classifier_says_fits_together(classifier):
    X, labels, _ = data()
    probs = classifier.predict_proba(X_NEW)
    np.testing.assert_allclose(probs[:, 1], classifier.fit_result_.predict(X_NEW).probs, rtol=1e-12)
    np.testing.assert_allclose(probs.sum(1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(np.exp(classifier.predict_log_proba(X_NEW)), probs, rtol=1e-12)
    odds = classifier.decision_function(X_NEW)
    np.testing.assert_allclose(odds, np.log(probs[:, 1] / probs[:, 0]), rtol=1e-10)
    assert len(set(classifier.predict(X_NEW))) == 2
    assert np.array_equal(classifier.predict(X_NEW), LABELS[(odds > 0).astype(int)])
    told = np.mean(classifier.predict(X_NEW) == data(9, 7)[1])
    assert classifier.score(X_NEW, data(9, 7)[1]) == told
    assert {k: v.item() for k, v in classifier.hyper_.items()} == HYPER


def test_regressor_is_that_of_scikit_learn(regressor):
    """Exact Gaussian algebra in both, ours with a jitter of at most 1e-8 of the variance."""
    X, _, y = data()
    kernel = KERNEL + WhiteKernel(NOISE**2)
    theirs = GaussianProcessRegressor(kernel, optimizer=None, alpha=0.0).fit(X, y - y.mean())
    assert regressor.log_evidence_ == pytest.approx(theirs.log_marginal_likelihood_value_, abs=1e-5)
    mean, std = regressor.predict(X_NEW, return_std=True)
    their_mean, their_std = theirs.predict(X_NEW, return_std=True)
    np.testing.assert_allclose(mean, their_mean + y.mean(), atol=1e-6)
    np.testing.assert_allclose(std, their_std, atol=1e-6)
    found = regressor.predict(X_NEW, return_cov=True)
    np.testing.assert_allclose(found[1], theirs.predict(X_NEW, return_cov=True)[1], atol=1e-6)
    assert np.array_equal(found[0], mean) and np.array_equal(regressor.predict(X_NEW), mean)


def test_one_compilation_for_equal_folds():
    """Their priors' parameters differ: they are arguments of the model. A second cross-validation,
    of other data, compiles nothing at all, predictions and scores included.
    """
    model = GPClassifier(method=FIXED)
    counts = []
    for seed in (1, 2):
        X, labels, _ = data(seed, 18)
        with stopwatch() as watch:
            scores = cross_val_score(model, X, labels, cv=3, error_score="raise")
        counts.append(watch["compilations"])
        assert len(scores) == 3 and min(scores) > 0.5
    assert counts[0] > 0 and counts[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GPClassifier, GPRegressor])
def test_folds_after_the_first_compile_nothing(kind):
    """With hyperparameters to find, under the priors of each fold."""
    X, labels, y = data(3, 18)
    model, folds = kind(method=pg.Laplace()), np.arange(18) % 3
    for fold in range(3):
        train, test = folds != fold, folds == fold
        target = labels if kind is GPClassifier else y
        with stopwatch() as watch:
            fitted = clone(model).fit(X[train], target[train])
            fitted.score(X[test], target[test])
        assert (watch["compilations"] == 0) == (fold > 0)


def test_an_interrupted_fit_is_told(monkeypatch):
    """A fold of a cross-validation was scored where Ctrl-C had left it."""
    from ppl_gp.infer.hyper import map as search

    steps, real = [], search.advance

    def stopping(*args):
        steps.append(1)
        if len(steps) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(search, "advance", stopping)
    X, _, y = data()
    with pytest.warns(UserWarning, match=r"GPRegressor.fit\(\): Ctrl-C ended the search"):
        GPRegressor().fit(X, y)


def test_parameters_are_kept_and_settings_of_the_method_have_names():
    method = pg.SVGP(num_inducing=7)
    model = GPClassifier(small_fits.classifier, method, {"link": "probit"}, 3)
    copied = clone(model)
    assert copied.method == method and copied.model is small_fits.classifier
    params = model.get_params()
    assert params["method"] is method and params["method__num_inducing"] == 7
    assert params["method__hyper__restarts"] == 1
    own = {"model", "method", "arguments", "random_state", "kernel", "ard"}
    assert set(model.get_params(deep=False)) == own
    changes = {"method__hyper__restarts": 2, "method__hyper": pg.MAP(tol=1e-2), "random_state": 4}
    copied.set_params(**changes, method__num_inducing=9)
    assert copied.method == pg.SVGP(num_inducing=9, hyper=pg.MAP(restarts=2, tol=1e-2))
    assert copied.random_state == 4 and method.num_inducing == 7
    assert clone(copied).set_params(method=FIXED).method is FIXED


def test_unknown_settings_and_few_classes_are_typed_errors():
    model = GPClassifier(method=pg.Laplace())
    with pytest.raises(pg.DataError, match=r"method__damping=.*no such setting.*max_steps"):
        model.set_params(method__damping=0.5)
    with pytest.raises(pg.DataError, match="has 'none'|has none"):
        GPClassifier().set_params(method__tol=0.5)
    with pytest.raises(ValueError, match="colour"):
        model.set_params(colour=1)
    with pytest.raises(pg.DataError, match="one class, \\['no'\\]"):
        model.fit(np.eye(3), ["no"] * 3)
    told = r"y has the 3 classes \['a', 'b', 'c'\], and the model observes two.*categorical"
    with pytest.raises(pg.DataError, match=told):
        GPClassifier(small_fits.classifier, FIXED).fit(
            data()[0], np.array(list("abc"))[np.arange(24) % 3]
        )


def test_the_default_method_follows_the_number_of_rows():
    found = {}
    for kind, classes in ((GPClassifier, 2), (GPClassifier, 3), (GPRegressor, 0)):
        model = kind()
        model.classes_ = np.arange(classes)
        found[kind, classes] = [type(model._method_for(num)) for num in (1000, 1001)]
    assert list(found.values()) == [[pg.EP, pg.SVGP], [pg.Laplace, pg.SVGP], [pg.Laplace, pg.SVGP]]


def test_a_pickle_predicts_the_same(classifier, regressor):
    for fitted in (classifier, regressor):
        again = pickle.loads(pickle.dumps(fitted))
        assert np.array_equal(again.predict(X_NEW), fitted.predict(X_NEW))
        assert again.log_evidence_ == fitted.log_evidence_ and again.method == fitted.method
        assert again.fit_result_.kwargs.keys().isdisjoint({"y"})  # no observations in it
    again = pickle.loads(pickle.dumps(classifier))
    assert np.array_equal(again.predict_proba(X_NEW), classifier.predict_proba(X_NEW))


def test_a_model_without_a_name_of_its_own_is_not_pickled(classifier):
    def inner(X, y=None):
        return binary(X, y, lengthscale_prior=(1.0, 1.0))

    for model in (inner, functools.partial(inner), lambda X, y=None: inner(X, y)):
        other = GPClassifier()
        vars(other).update({**vars(classifier), "model_": model})
        with pytest.raises(pg.StoreError, match="top level of a module"):
            pickle.dumps(other)
    assert pickle.dumps(GPClassifier(functools.partial(small_fits.classifier, link="probit")))


def test_scikit_learn_is_optional(monkeypatch):
    """Nothing of it is imported by `import ppl_gp`; without it, the error says what to install."""
    code = "import sys, ppl_gp; sys.exit('sklearn' in sys.modules or hasattr(ppl_gp, 'none_such'))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    monkeypatch.setitem(sys.modules, "sklearn.utils.validation", None)
    monkeypatch.delitem(sys.modules, "ppl_gp.sklearn")
    monkeypatch.delattr(pg, "sklearn")
    with pytest.raises(pg.MissingPackageError, match=r"pip install 'ppl-gp\[sklearn\]'"):
        _ = pg.sklearn
    with pytest.raises(ImportError):
        importlib.import_module("ppl_gp.sklearn")


def test_a_mixture_has_the_covariance_of_its_draws():
    rng = np.random.default_rng(0)
    mean, root = rng.normal(size=(3, 2)), np.tril(rng.normal(size=(3, 2, 2)) + 2 * np.eye(2))
    weights = np.array([0.2, 0.5, 0.3])
    found = _joint(
        dist.MixtureSameFamily(
            dist.Categorical(jnp.asarray(weights)), dist.MultivariateNormal(mean, scale_tril=root)
        )
    )
    second = sum(
        w * (L @ L.T + np.outer(m, m)) for w, m, L in zip(weights, mean, root, strict=True)
    )
    np.testing.assert_allclose(found, second - np.outer(weights @ mean, weights @ mean), rtol=1e-10)


def test_both_classes_are_in_the_reference():
    page = (ROOT / "docs" / "api" / "sklearn.md").read_text()
    found = re.findall(r"^::: ppl_gp\.sklearn\.(\w+)$", page, re.MULTILINE)
    assert sorted(found) == sorted(pg.sklearn.__all__)


def test_a_covariance_of_y_is_refused_of_other_models(regressor):
    other = GPRegressor()
    vars(other).update({**vars(regressor), "model_": small_fits.classifier})
    with pytest.raises(pg.ModelError, match="default model of numbers.*sample_y"):
        other.predict(X_NEW, return_cov=True)
    with pytest.raises(pg.DataError, match="one of them"):
        regressor.predict(X_NEW, return_std=True, return_cov=True)
    assert regressor.model_ is regression


def _named_otherwise(X, target=None):
    pass


def _with_options(X, y=None, scale=1.0, offset=0.0):
    pass


@pytest.mark.parametrize(
    ("model", "arguments", "match"),
    [
        (_with_options, {"scal": 1.0}, r"\['scal'\] are no arguments .* \['scale', 'offset'\]"),
        (_with_options, {"y": 1.0}, r"\['y'\] are no arguments"),
        (_with_options, [1.0], r"arguments=\[1.0\]\): give \{name: value\}"),
        (None, {"nois": 1.0}, r"\['nois'\] are no arguments"),
        ("model", None, "model='model'.: give a function"),
        (_named_otherwise, None, r"\['X', 'target'\], and the observations reach it as `y`"),
    ],
)
def test_what_a_model_does_not_take_is_named(model, arguments, match):
    X, _, y = data()
    with pytest.raises(pg.DataError, match=match):
        GPRegressor(model, arguments=arguments).fit(X, y)


def _offset(X, y=None, offset=0.0):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(w + offset, 1.0), obs=y)


def test_an_argument_of_rows_is_refused_with_the_remedy_of_an_estimator():
    X, _, y = data()
    assert GPRegressor(_offset, pg.Laplace(), {"offset": 1.0}).fit(X, y).predict(X[:2]).shape == (
        2,
    )
    with pytest.raises(pg.DataError, match=r"\['offset'\] have one entry per row .* column of X"):
        GPRegressor(_offset, pg.Laplace(), {"offset": np.ones(len(X))}).fit(X, y)


def ard(X, y=None):
    """What `GPRegressor(**OPTIONS)` declares of `COUNTS`."""
    lengthscale = numpyro.sample("lengthscale", pg.priors.lengthscale(data()[0], ard=True))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    kernel = pg.kernels.Matern52(variance, lengthscale)
    f = numpyro.sample("f", pg.GP(kernel, X, mean=np.log(COUNTS.mean())))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


COUNTS = np.random.default_rng(0).poisson(np.exp(data()[2] / 2.0))
OPTIONS = {"kernel": "Matern52", "ard": True, "likelihood": "poisson"}


def test_options_of_the_default_model_declare_it():
    """Counts, a kernel by name and a length scale for each column, as by hand; through a pickle."""
    X = data()[0]
    hyper = {"lengthscale": np.array([0.7, 1.5]), "variance": 0.8}
    method = pg.Laplace(hyper=pg.Fixed(hyper))
    ours = GPRegressor(method=method, **OPTIONS).fit(X, COUNTS)
    by_hand = pg.fit(ard, method, 0, X, y=COUNTS)
    assert ours.log_evidence_ == pytest.approx(by_hand.log_evidence, abs=1e-9)
    mean = np.asarray(by_hand.predict(X_NEW).mean)
    np.testing.assert_allclose(ours.predict(X_NEW), mean, rtol=1e-9)
    np.testing.assert_allclose(pickle.loads(pickle.dumps(ours)).predict(X_NEW), mean, rtol=1e-9)
    assert {**ours.get_params(), **OPTIONS} == ours.get_params()


@pytest.mark.parametrize("likelihood", ["gaussian", "poisson", "negative_binomial"])
def test_a_weight_is_a_number_of_equal_rows(likelihood):
    """Rows of weight 2 are two rows, of weight 0 none: of numbers at a given noise, as a weight
    says nothing of the noise there. The priors' data and the mean of f are weighted too.
    """
    X, _, numbers = data()
    y = numbers if likelihood == "gaussian" else COUNTS
    weights = np.arange(len(y)) % 3
    scale = {"gaussian": {"noise_scale": NOISE}, "negative_binomial": {"concentration": 2.0}}
    method = pg.Laplace(hyper=pg.Fixed({**HYPER, **scale.get(likelihood, {})}))
    one = GPRegressor(method=method, likelihood=likelihood)
    repeated = clone(one).fit(np.repeat(X, weights, 0), np.repeat(y, weights))
    weighted = clone(one).fit(X, y, sample_weight=weights)
    if likelihood != "gaussian":
        assert weighted.log_evidence_ == pytest.approx(repeated.log_evidence_, abs=1e-4)
    found, wanted = weighted.fit_result_.kwargs, repeated.fit_result_.kwargs
    for name in ("lengthscale_prior", "variance_prior", "noise_prior", "location"):
        np.testing.assert_allclose(np.asarray(found[name]), np.asarray(wanted[name]), rtol=1e-9)
    ours, theirs = (fit.predict(X_NEW, return_std=True) for fit in (weighted, repeated))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert weighted.sample_y(X_NEW, 3).shape == (len(X_NEW), 3)


@pytest.mark.parametrize("likelihood", ["gaussian", "student_t"])
def test_a_weight_divides_the_variance_of_the_noise(likelihood):
    X, _, y = data()
    at = lambda noise: pg.Laplace(hyper=pg.Fixed({**HYPER, "noise_scale": noise}))  # noqa: E731
    weighted = GPRegressor(method=at(NOISE), likelihood=likelihood)
    weighted.fit(X, y, sample_weight=np.full(len(y), 4.0))
    std, covariance = (weighted.predict(X_NEW, **{f"return_{k}": True})[1] for k in ("std", "cov"))
    np.testing.assert_allclose(np.diag(covariance), std**2, rtol=1e-9)
    less = GPRegressor(method=at(NOISE / 2), likelihood=likelihood).fit(X, y)
    assert weighted.log_evidence_ == pytest.approx(less.log_evidence_, abs=1e-8)
    np.testing.assert_allclose(weighted.predict(X_NEW), less.predict(X_NEW), rtol=1e-8)
    # a new observation has the weight 1
    apart = [e.predict(X_NEW, return_std=True)[1] ** 2 for e in (weighted, less)]
    factor = 1.0 if likelihood == "gaussian" else 2.0  # a t of 4 degrees has twice its scale^2
    np.testing.assert_allclose(apart[0] - apart[1], 0.75 * factor * NOISE**2, rtol=1e-6)


def test_a_classifier_takes_weights_and_a_kernel():
    X, labels, _ = data()
    weights = np.arange(len(labels)) % 3
    one = GPClassifier(method=FIXED, kernel="Matern32")
    repeated = clone(one).fit(np.repeat(X, weights, 0), np.repeat(labels, weights))
    weighted = clone(one).fit(X, labels, sample_weight=weights)
    wanted = repeated.predict_proba(X_NEW)
    np.testing.assert_allclose(weighted.predict_proba(X_NEW), wanted, atol=1e-5)
    plain = clone(one).set_params(kernel="RBF").fit(X, labels, sample_weight=weights)
    assert np.abs(plain.predict_proba(X_NEW) - wanted).max() > 1e-3


def test_what_is_for_the_default_model_is_refused_beside_another():
    X, labels, numbers = data()
    with pytest.raises(pg.DataError, match="'Matern'.*give one of"):
        GPRegressor(kernel="Matern").fit(X, numbers)
    with pytest.raises(pg.DataError, match="likelihood='gamma'.*give one of"):
        GPRegressor(likelihood="gamma").fit(X, numbers)
    with pytest.raises(pg.DataError, match=r"\['ard', 'likelihood'\] are for the default model"):
        GPRegressor(model=ard, ard=True, likelihood="poisson").fit(X, COUNTS)
    with pytest.raises(pg.DataError, match=r"arguments=.*\['kernel'\] are options"):
        GPRegressor(arguments={"kernel": "Matern52"}).fit(X, numbers)
    with pytest.raises(pg.DataError, match="ard='no'"):
        GPRegressor(ard="no").fit(X, numbers)
    with pytest.raises(pg.DataError, match="kernel=.*model with your own"):
        GPRegressor(kernel=pg.kernels.RBF()).fit(X, numbers)
    with pytest.raises(pg.DataError, match="in rows of positive weight"):
        GPClassifier().fit(X, labels, sample_weight=(labels == "no").astype(float))
    with pytest.raises(pg.DataError, match="sample_weight.*handlers.scale"):
        GPClassifier(model=ard).fit(X, labels, sample_weight=np.ones(len(X)))
    with pytest.raises(pg.DataError, match="y has values from 0 to 0"):
        GPRegressor(likelihood="poisson").fit(X, np.zeros(len(X)))
    with pytest.raises(pg.DataError, match="support"):
        GPRegressor(likelihood="poisson").fit(X, np.abs(numbers))
    with pytest.raises(ValueError, match="Negative values"):
        GPRegressor().fit(X, numbers, sample_weight=-np.ones(len(X)))


def by_ward(X, y=None):
    u = numpyro.sample("u", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(u[X[:, 1].astype(int)] + X[:, 0], NOISE), obs=y)


def test_a_users_model_takes_columns_of_text():
    """The labels reach it as `pg.fit` hands them over, in folds and in a pickle too."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(4)
    ward, age = np.array(["west", "north", "south"] * 8), rng.normal(size=24)
    y = age + (ward == "west") + NOISE * rng.normal(size=24)
    frame = pandas.DataFrame({"age": age, "ward": ward})
    regressor = GPRegressor(by_ward, pg.Laplace(hyper=pg.Fixed({})))
    found, same = regressor.fit(frame, y), pg.fit(by_ward, regressor.method, 0, frame, y=y)
    assert found.log_evidence_ == pytest.approx(same.log_evidence, abs=1e-10)
    new = frame.iloc[[0, 2]]
    np.testing.assert_allclose(found.predict(new), same.predict(new).mean, rtol=1e-10)
    np.testing.assert_allclose(pickle.loads(pickle.dumps(found)).predict(new), found.predict(new))
    assert np.all(np.isfinite(cross_val_score(clone(found), frame, y, cv=2)))
    with pytest.raises(pg.DataError, match=r"'ward', has \['east'\]"):
        found.predict(new.assign(ward="east"))
    for estimator in (GPRegressor(), GPClassifier()):
        with pytest.raises(pg.DataError, match=r"columns \['ward'\] of X are text.*OneHotEncoder"):
            estimator.fit(frame, y > 0)


def test_priors_that_a_user_gives_need_no_data():
    given = {"lengthscale_prior": (3.0, 3.0), "variance_prior": (0.0, 1.0)}
    given |= {"noise_prior": (-1.0, 1.0), "location": 5.0}
    X, y = np.linspace(0.0, 1.0, 8)[:, None], np.full(8, 5.0)
    for inputs, values in ((X, y), (0.0 * X, np.arange(8.0))):
        with pytest.raises(pg.DataError, match="are equal; give your own prior"):
            GPRegressor().fit(inputs, values)
        found = GPRegressor(arguments=given).fit(inputs, values)
        assert np.all(np.isfinite(found.predict(inputs)))
    with pytest.raises(pg.DataError, match="y has values from -1 to 6; counts are 0, 1, 2"):
        GPRegressor(likelihood="poisson").fit(X, np.arange(8) - 1)


def test_weights_of_a_users_model_are_its_own():
    """Predictions were made with weights of one."""

    def model(X, y=None, weights=1.0):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1 * weights), obs=y)

    x = np.linspace(0.0, 3.0, 8)[:, None]
    fixed = pg.Laplace(hyper=pg.Fixed({}))
    found = GPRegressor(model, fixed, arguments={"weights": 10.0}).fit(x, np.sin(x[:, 0]))
    sd = found.predict(x, return_std=True)[1]
    np.testing.assert_allclose(sd, found.fit_result_.predict(x).sd)
    assert np.all(sd > 1.0)


def test_observations_keep_their_digits_beside_inputs_in_single_precision():
    """They were rounded to quarters here."""
    x = np.linspace(0.0, 5.0, 12)[:, None]
    y = 2_459_000.0 + 0.1 * np.sin(x[:, 0])
    single = GPRegressor().fit(x.astype(np.float32), y)
    np.testing.assert_allclose(single.predict(x.astype(np.float32)), y, atol=0.03)
