"""Models without a GP by `NUTS`, under every verb: against conjugate formulas and NumPyro's own
predictions from the same draws.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import Predictive
from scipy.stats import multivariate_normal, norm

import ppl_gp as pg

N, NOISE, SCALE = 24, 0.4, 1.5
rng = np.random.default_rng(0)
X, NEW = rng.normal(size=(N, 2)), rng.normal(size=(5, 2))
Y = X @ [1.0, -0.5] + NOISE * rng.normal(size=N)
LABELS, COUNTS = (Y > 0).astype(int), rng.poisson(1.5, N)


def linear(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, SCALE).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, NOISE), obs=y)


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def with_row_effects(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(0.5))
    with numpyro.plate("data", X.shape[0]):
        e = numpyro.sample("e", dist.Normal(0.0, s))
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w + e)), obs=y)


@pytest.fixture(scope="module")
def fits():
    """{name: fit}."""
    method = pg.NUTS(400, 1500, 1)
    return {
        "linear": pg.fit(linear, method, 0, X, y=Y),
        "logistic": pg.fit(logistic, pg.NUTS(200, 300, 1), 0, X, y=LABELS, throw=False),
        "row effects": pg.fit(with_row_effects, pg.NUTS(200, 300, 1), 0, X, y=COUNTS, throw=False),
    }


def _exact(train, y):
    """(mean, covariance) of w."""
    S = np.linalg.inv(np.eye(2) / SCALE**2 + train.T @ train / NOISE**2)
    return S @ train.T @ y / NOISE**2, S


@pytest.mark.slow
def test_answers_are_the_conjugate_ones(fits):
    fit, (m, S) = fits["linear"], _exact(X, Y)
    found, variance = fit.predict(NEW), np.einsum("ni,ij,nj->n", NEW, S, NEW)
    assert found.f_mean is None and found.mean.shape == (5,)
    ess = fit.stats["ess"]
    np.testing.assert_array_less(np.abs(found.mean - NEW @ m), 5.0 * np.sqrt(variance / ess))
    np.testing.assert_allclose(found.variance, variance + NOISE**2, rtol=0.05)
    scores, error = fit.log_density(NEW, np.zeros(5), with_error=True)
    exact = norm(NEW @ m, np.sqrt(variance + NOISE**2)).logpdf(0.0)
    np.testing.assert_array_less(np.abs(scores - exact), 5.0 * error + 1e-3)
    assert np.all(error < 0.1)


@pytest.mark.slow
def test_leave_one_out_is_that_of_refits(fits):
    exact = []
    for n in range(N):
        m, S = _exact(np.delete(X, n, 0), np.delete(Y, n))
        exact.append(norm(X[n] @ m, np.sqrt(X[n] @ S @ X[n] + NOISE**2)).logpdf(Y[n]))
    np.testing.assert_allclose(fits["linear"].loo().elpd, np.sum(exact), atol=0.5)


@pytest.mark.slow
def test_predictions_are_mixtures_over_the_draws(fits):
    fit = fits["logistic"]
    w = np.asarray(fit.hyper["w"])
    p = 1.0 / (1.0 + np.exp(-NEW @ w.T))
    found = fit.predict(NEW)
    np.testing.assert_allclose(found.probs, p.mean(1), rtol=1e-10)
    np.testing.assert_allclose(found.variance, p.mean(1) * (1 - p.mean(1)), rtol=1e-10)
    scores = fit.log_density(NEW, np.array([1, 0, 1, 0, 1]))
    chosen = np.where(np.array([1, 0, 1, 0, 1])[:, None] == 1, p, 1 - p)
    np.testing.assert_allclose(scores, np.log(chosen.mean(1)), rtol=1e-10)


def test_new_rows_have_effects_of_their_own(fits):
    """E[y*] = E[exp(x w + s^2 / 2)] over the draws, whatever the training rows' effects were."""
    fit = fits["row effects"]
    w, s = (np.asarray(fit.hyper[k]) for k in "ws")
    assert set(fit.hyper) == {"w", "s", "e"} and fit.hyper["e"].shape == (300, N)
    found = fit.predict(NEW)
    expected = np.exp(NEW @ w.T + 0.5 * s**2).mean(1)
    np.testing.assert_array_less(np.abs(found.mean - expected), 5.0 * found.mean_error)
    assert np.all(found.mean_error < 0.2 * expected)
    scores, error = fit.log_density(NEW, np.arange(5), with_error=True)
    assert np.all(np.isfinite(scores)) and np.all(error < 0.5)


def test_draws_are_those_of_numpyro(fits):
    fit = fits["linear"]
    drawn = fit.sample(0, NEW, 3000)
    assert drawn.f is None and drawn.y.shape == (3000, 5)
    again = Predictive(linear, {"w": fit.hyper["w"]})(random.key(1), NEW)["y"]
    error = 5.0 * np.sqrt(2.0 * np.var(again, 0) / 1500)
    np.testing.assert_array_less(np.abs(drawn.y.mean(0) - again.mean(0)), error)


def test_trees_files_and_tables(fits, tmp_path):
    fit = fits["linear"]
    tree = fit.to_datatree()
    assert tree.posterior["w"].shape == (1, 1500, 2) and tree.log_likelihood["y"].shape[-1] == N
    loaded = pg.load(fit.save(tmp_path / "fit.ppl"), linear)
    np.testing.assert_allclose(loaded.predict(NEW).mean, fit.predict(NEW).mean, rtol=1e-12)
    found = pg.compare({"nuts": fit}, NEW, np.zeros(5)).table[0]
    np.testing.assert_allclose(found["log_density"], np.mean(fit.log_density(NEW, np.zeros(5))))
    with pytest.raises(pg.ModelError, match="no GP site"):
        _ = fit.posterior


@pytest.mark.slow
def test_laplace_and_draws_of_one_model_in_one_table(fits):
    """Laplace integrates w, exactly here, and NUTS draws it."""
    exact = pg.fit(linear, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=Y)
    rows = pg.compare({"laplace": exact, "nuts": fits["linear"]}, NEW, np.zeros(5)).table
    assert rows[0]["mean_distance"] < 0.2 and rows[0]["sd_distance"] < 0.1


@pytest.mark.slow
def test_check_names_what_fits():
    told = {i.name: i for i in pg.check(logistic, X, y=LABELS).items}
    assert "NUTS" in told["methods"].message and "'w'" in told["predictor"].message


def positive(X, y=None):
    """No Gaussian site at all."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(rate * jnp.exp(X[:, 0])), obs=y)


@pytest.mark.slow
def test_every_method_that_check_names_fits_the_model():
    for model, y in ((positive, COUNTS), (logistic, LABELS)):
        checked = pg.check(model, X, y=y)
        assert checked.ok, str(checked)
        named = next(i.message for i in checked.items if i.name == "methods").split(", ")
        assert {"NUTS", "SVI", "MeanField"} <= set(named) and "EllipticalSlice" not in named
        for name in named:
            few = {"NUTS": {"num_warmup": 20, "num_samples": 20, "num_chains": 1}}
            few |= {"SVI": {"num_steps": 50}}
            method = getattr(pg, name)(**few.get(name, {}))
            fit = pg.fit(model, method, 0, X, y=y, throw=False)
            assert np.all(np.isfinite(fit.predict(NEW).mean))
    rate = pg.fit(positive, pg.NUTS(300, 1000, 1), 0, X, y=COUNTS).hyper["rate"]
    a, b = 2.0 + COUNTS.sum(), 1.0 + np.exp(X[:, 0]).sum()  # Gamma(a, b), exactly
    assert float(rate.mean()) == pytest.approx(a / b, rel=0.03)
    assert float(rate.std()) == pytest.approx(a**0.5 / b, rel=0.15)


def standardised(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    Z = (X - X.mean(0)) / X.std(0)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(Z @ w, NOISE), obs=y)


def nothing_random(X, y=None):
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X[:, 0], 1.0), obs=y)


def test_what_has_no_answer_is_refused():
    fit = pg.fit(standardised, pg.NUTS(50, 50, 1), 0, X, y=Y, throw=False)
    with pytest.raises(pg.ModelError, match="sees more than its own arguments"):
        fit.predict(NEW)
    with pytest.raises(pg.ModelError, match="no GP site"):
        pg.fit(nothing_random, pg.NUTS(50, 50, 1), 0, X, y=Y)


def one_event(X, y=None):
    """All rows in one event."""
    w = numpyro.sample("w", dist.Normal(0.0, SCALE).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(X @ w, NOISE).to_event(1), obs=y)


@pytest.mark.slow
def test_rows_in_one_event_are_rows():
    first, second = (
        pg.fit(model, pg.NUTS(100, 100, 1), 0, X, y=Y, throw=False) for model in (linear, one_event)
    )
    np.testing.assert_allclose(second.hyper["w"], first.hyper["w"], rtol=1e-6)
    np.testing.assert_allclose(second.predict(NEW).mean, first.predict(NEW).mean, rtol=1e-6)
    scores = [f.log_density(NEW, jnp.zeros(5)) for f in (first, second)]
    np.testing.assert_allclose(*scores, rtol=1e-6)
    jax.clear_caches()


def lone(x, y=None, ones=False):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(b * jnp.ones(y.shape[0]) if ones else b, 0.5), obs=y)


@pytest.mark.parametrize("method", [pg.EP(), pg.VI()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("ones", [False, True])
def test_a_level_that_all_rows_share_is_integrated(method, ones):
    x, y = np.zeros(4), np.arange(4.0)
    fit = pg.fit(lone, method, 0, x, y=y, ones=ones)
    truth = multivariate_normal(np.zeros(4), 1.0 + 0.25 * np.eye(4)).logpdf(y)
    assert fit.log_evidence == pytest.approx(truth, abs=1e-9)


def of_all_rows(x, y=None, seen="tanh of the mean"):
    """Of a predictor with equal entries, which say nothing of where they come from."""
    e = numpyro.sample("b", dist.Normal(0.0, 1.0)) * jnp.ones(x.shape[0])
    means = {
        "the mean": jnp.mean(e) + 0.0 * x,
        "tanh of the mean": jnp.tanh(jnp.mean(e)) + 0.0 * x,
        "the mean of tanh": jnp.mean(jnp.tanh(e)) + 0.0 * x,
        "others' tanh": jnp.tanh(e) + jnp.mean(jnp.tanh(e)),
        "sorted tanh": jnp.sort(jnp.tanh(e)),
    }
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(means[seen], 0.5), obs=y)


@pytest.mark.parametrize("method", [pg.EP(), pg.VI()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize(
    "seen", ["tanh of the mean", "the mean of tanh", "others' tanh", "sorted tanh"]
)
def test_rows_that_see_other_rows_of_a_predictor_are_refused(method, seen):
    with pytest.raises(pg.NotPointwiseError, match=r"of site \['y'\] couples values") as told:
        pg.fit(of_all_rows, method, 0, np.zeros(4), y=np.arange(4.0), seen=seen)
    assert "sorted" in seen or "(test_without_gp.py, line" in str(told.value)


def test_a_mean_over_the_rows_before_the_predictor_is_a_part_of_it():
    y = np.arange(4.0)
    fit = pg.fit(of_all_rows, pg.EP(), 0, np.zeros(4), y=y, seen="the mean")
    truth = multivariate_normal(np.zeros(4), 1.0 + 0.25 * np.eye(4)).logpdf(y)
    assert fit.log_evidence == pytest.approx(truth, abs=1e-9)


def test_without_a_predictor_the_sites_that_have_none_are_named():
    def model(x, y=None):
        b = numpyro.sample("b", dist.StudentT(4.0))
        with numpyro.plate("n", x.shape[0]):
            numpyro.sample("y", dist.Normal(b, 0.5), obs=y)

    with pytest.raises(pg.ModelError, match=r"none is Gaussian: 'b' \(StudentT\)"):
        pg.fit(model, pg.VI(), 0, np.zeros(4), y=np.arange(4.0))


def test_one_event_of_all_rows_has_no_predictions_and_says_so():
    def event(X, K, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.MultivariateNormal(X @ b, K), obs=y)

    X, K, y = np.random.default_rng(0).normal(size=(6, 2)), np.eye(6), np.arange(6.0)
    fit = pg.fit(event, pg.Laplace(), 0, X, K, y=y)
    truth = multivariate_normal(np.zeros(6), K + X @ X.T).logpdf(y)
    assert fit.log_evidence == pytest.approx(truth, abs=1e-9)
    with pytest.raises(pg.ModelError, match=r"predict: site\(s\) \['y'\] have no entry per row"):
        fit.predict(X, K)
    with pytest.raises(pg.ModelError, match=r"\['y'\] have no log density .* each is one event"):
        fit.log_density(X, y, K)


def padded(x, t):
    return t + jnp.concatenate([jnp.zeros(3), jnp.ones(x.shape[0] - 3)])


def halved(x, t):
    return t * jnp.repeat(jnp.array([1.0, 2.0]), x.shape[0] // 2)


def guarded(x, t):
    if x.shape[0] < 5:
        raise ValueError("five rows at least")
    return t * x


@pytest.mark.parametrize("mean", [padded, halved, guarded])
def test_a_model_that_fails_at_few_rows_is_read_at_more(mean):
    def model(x, y=None):
        t = numpyro.sample("t", dist.Normal(0.3, 1.2))
        with numpyro.plate("n", x.shape[0]):
            numpyro.sample("y", dist.Normal(mean(x, t), 0.6), obs=y)

    x, y = np.linspace(-1.0, 1.0, 8), np.arange(8.0) / 4.0
    first, second = (np.asarray(mean(x, t)) for t in (0.0, 1.0))
    slope = second - first
    K = 1.44 * np.outer(slope, slope) + 0.36 * np.eye(8)
    truth = multivariate_normal(first + 0.3 * slope, K).logpdf(y)
    assert pg.fit(model, pg.EP(), 0, x, y=y).log_evidence == pytest.approx(truth, abs=1e-9)
    found = {item.name: item.ok for item in pg.check(model, x, y=y).items}
    assert found["predictor"] and found["likelihood"]


def centred(x, group, y=None):
    with numpyro.plate("g", 3):
        u = numpyro.sample("u", dist.Normal(0.2, 1.1))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(u[group] - jnp.mean(u[group]), 0.6), obs=y)


def test_laplace_has_the_joint_mode_of_rows_that_see_others():
    x, group, y = np.zeros(6), np.arange(6) % 3, np.arange(6.0) / 4.0
    A = np.eye(3)[group] - np.mean(np.eye(3)[group], 0)
    truth = multivariate_normal(A @ np.full(3, 0.2), 1.21 * A @ A.T + 0.36 * np.eye(6)).logpdf(y)
    fit = pg.fit(centred, pg.Laplace(), 0, x, group, y=y)
    assert fit.log_evidence == pytest.approx(truth, abs=1e-8)
    with pytest.raises(pg.NotPointwiseError, match="other rows than its own"):
        pg.fit(centred, pg.EP(), 0, x, group, y=y)


@pytest.mark.parametrize("method", [pg.EP(), pg.Laplace(), pg.NUTS(5, 5, 1)], ids=str)
def test_observations_that_no_site_observes_are_missed(method):
    def model(x, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", x.shape[0]):
            numpyro.sample("y", dist.Normal(b, 0.5))

    with pytest.raises(pg.ModelError, match="observes nothing; .* write obs=y in their site"):
        pg.fit(model, method, 0, np.zeros(4), y=np.arange(4.0))


def test_what_is_offered_without_a_function_needs_none():
    def model(x, y=None):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("n", x.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.sum(u), 0.5), obs=y)

    x, y = np.zeros(4), np.arange(4.0)
    with pytest.raises(pg.ModelError, match=r"no linear predictor holds 'u'") as told:
        pg.fit(model, pg.EP(), 0, x, y=y)
    assert "Sample" not in str(told.value) and "maximise=" not in str(told.value)
    fit = pg.fit(model, pg.Laplace(integrate=()), 0, x, y=y)
    truth = multivariate_normal(np.zeros(4), 3.0 + 0.25 * np.eye(4)).logpdf(y)
    assert fit.log_evidence == pytest.approx(truth, abs=1e-8)


def test_draws_of_an_exact_posterior_are_no_reason_to_warn():
    fit = pg.fit(lone, pg.Laplace(), 0, np.zeros(8), y=np.linspace(0.0, 1.0, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isfinite(fit.loo().elpd)
