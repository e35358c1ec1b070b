"""The same declared models under SVGP, NumPyro's own SVI and SparseNUTS: predictions, trees, files,
errors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import small_fits
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.reparam import LocScaleReparam

import ppl_gp as pg
from ppl_gp.sparse.expectation import Expectation, expected_log_lik

FIXED = pg.Fixed(small_fits.HYPER)
SHORT = {"num_warmup": 60, "num_samples": 40, "num_chains": 2}


def heteroscedastic(X, y=None):
    """Two latent functions: mean and log scale."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(2.0, 1.0), X))
    g = numpyro.sample("g", pg.GP(pg.kernels.RBF(0.5, 2.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


def softmax(X, y=None):
    """Three functions at one site."""
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(2.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


def counts(X, y=None):
    """Poisson with an exponential link: expectations are steep."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, 1.0), X, mean=1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def robust(X, y=None):
    """Student-t noise: not log-concave."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(2.0, f, 0.2), obs=y)


@functools.cache
def data():
    return small_fits.classification()


@functools.cache
def fitted(name):
    X, y, _ = data()
    rng = np.random.default_rng(0)
    match name:
        case "svgp":
            return pg.fit(small_fits.classifier, pg.SVGP(num_inducing=10, max_steps=100), 0, X, y=y)
        case "normal":
            method = pg.SVGP(num_inducing=10, max_steps=600, hyper=AutoNormal)
            return pg.fit(small_fits.classifier, method, 0, X, y=y)
        case "nuts":
            return pg.fit(
                small_fits.classifier,
                pg.SparseNUTS(num_inducing=25, **SHORT),
                0,
                X,
                y=y,
                throw=False,
            )
        case "heteroscedastic":
            return pg.fit(
                heteroscedastic, pg.SVGP(num_inducing=10, max_steps=100), 0, X, y=np.sin(X[:, 0])
            )
        case "softmax":
            labels = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)
            return pg.fit(softmax, pg.SVGP(num_inducing=10, max_steps=100), 0, X, y=labels)
        case "counts":
            return pg.fit(
                counts,
                pg.SVGP(num_inducing=10, max_steps=100),
                0,
                X,
                y=rng.poisson(np.exp(1 + X[:, 0])),
            )


KINDS = ("svgp", "normal", "nuts", "heteroscedastic", "softmax", "counts")


@pytest.mark.one_case
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_fit_predicts_draws_saves_and_converts(name, tmp_path):
    fit, (X, _, X_new) = fitted(name), data()
    prediction = fit.predict(X_new)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(prediction))
    assert all(np.all(v > 0) for v in jax.tree.leaves(prediction.f_variance))
    draws = fit.sample(1, X_new, 6)
    assert all(x.shape[0] == 6 and x.shape[-1] == len(X_new) for x in jax.tree.leaves(draws.f))
    y_new = draws.y[0]
    assert fit.log_density(X_new, y_new).shape == (len(X_new),)
    again = pg.load(fit.save(tmp_path / "a.fit"), fit.model).predict(X_new)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(prediction), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-10)
    tree = fit.to_datatree(num_draws=20)
    assert {"posterior", "log_likelihood", "observed_data"} <= set(tree.children)
    assert tree.posterior["f"].dims[:2] == ("chain", "draw") and tree.posterior["f"].shape[
        -1
    ] == len(X)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["svgp", "nuts"])
def test_draws_of_f_have_the_predicted_moments(name):
    fit, (_, _, X_new) = fitted(name), data()
    f = np.asarray(fit.sample(2, X_new, 4000).f)
    prediction = fit.predict(X_new)
    sd = np.sqrt(prediction.f_variance)
    num = 4000 if name == "svgp" else 80
    np.testing.assert_allclose(
        f.mean(0), prediction.f_mean, atol=5 * float(sd.max()) / np.sqrt(num)
    )
    np.testing.assert_allclose(f.std(0), sd, rtol=0.1)


@pytest.mark.slow
def test_minibatches_of_the_tree_beyond_the_joint_limit_have_the_right_marginals(monkeypatch):
    from ppl_gp import kept

    fit = fitted("svgp")
    monkeypatch.setattr(kept, "MAX_JOINT", 5)
    jax.clear_caches()
    f = fit.to_datatree(num_draws=4000).posterior["f"].values[0]
    moments = fit.predict(fit.args[0])
    np.testing.assert_allclose(f.mean(0), moments.f_mean, atol=0.15)
    np.testing.assert_allclose(f.std(0), np.sqrt(moments.f_variance), rtol=0.08)
    jax.clear_caches()


@pytest.mark.slow
def test_a_comparison_takes_sparse_fits():
    X, y, X_new = data()
    vi = pg.fit(small_fits.classifier, pg.VI(hyper=FIXED), 0, X, y=y)
    table = pg.compare(
        {"svgp": fitted("svgp"), "vi": vi, "nuts": fitted("nuts")}, X_new, np.ones(len(X_new), int)
    ).table
    assert table[0]["elpd_loo"] is not None and table[0]["mean_distance"] is None
    compared = pg.compare(
        {"svgp": fitted("svgp"), "vi": vi}, X_new, np.ones(len(X_new), int), reference="vi"
    ).table
    assert 0 <= compared[0]["mean_distance"] < 5


@pytest.mark.slow
def test_numpyro_svi_reaches_the_bound_that_svgp_reaches():
    X, y, _ = data()
    model = handlers.condition(
        small_fits.classifier, {k: jnp.asarray(v) for k, v in small_fits.HYPER.items()}
    )
    guide = pg.guide(model, {"f": pg.SparsePosterior(X[:10], train_inducing=False)})
    svi = SVI(
        model, guide, optax.adam(optax.cosine_decay_schedule(0.05, 1500)), TraceMeanField_ELBO()
    )
    result = svi.run(jax.random.key(0), 1500, jnp.asarray(X), y=jnp.asarray(y), progress_bar=False)
    ours = pg.fit(
        small_fits.classifier,
        pg.SVGP(inducing=X[:10], hyper=FIXED, train_inducing=False),
        0,
        X,
        y=y,
    )
    constants = sum(dist.LogNormal(0.0, 1.0).log_prob(v) for v in small_fits.HYPER.values())
    losses = np.asarray(result.losses[-300:])
    assert (
        abs(losses.mean() + ours.log_evidence + constants) < 4 * losses.std() / np.sqrt(300) + 0.01
    )
    assert set(result.params) == {"f_loc", "f_scale_tril"}


@pytest.mark.slow
@pytest.mark.parametrize("hyper", ["delta", AutoNormal])
def test_a_guide_trains_hyperparameters_without_the_full_covariance(hyper):
    X, y, _ = data()
    options = {} if hyper == "delta" else {"hyper": hyper}
    guide = pg.guide(small_fits.classifier, {"f": pg.SparsePosterior(X[:6])}, **options)
    svi = SVI(small_fits.classifier, guide, optax.adam(0.02), TraceMeanField_ELBO())
    many = jnp.zeros((3000, 2)), jnp.zeros(3000, int)
    state = svi.init(jax.random.key(0), many[0], y=many[1])
    assert (
        "3000x3000"
        not in jax.jit(lambda s: svi.update(s, many[0], y=many[1])).lower(state).as_text()
    )
    guide = pg.guide(small_fits.classifier, {"f": pg.SparsePosterior(X[:6])}, **options)
    svi = SVI(small_fits.classifier, guide, optax.adam(0.02), TraceMeanField_ELBO())
    result = svi.run(jax.random.key(0), 50, jnp.asarray(X), y=jnp.asarray(y), progress_bar=False)
    assert result.losses[-10:].mean() < result.losses[:10].mean() and "f_Z" in result.params


def test_the_kl_rule_fires_and_monte_carlo_in_its_place_is_refused():
    X, y, _ = data()
    guide = pg.guide(small_fits.classifier, {"f": pg.SparsePosterior(X[:6])})
    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        guide(jnp.asarray(X), y=jnp.asarray(y))
    q, p = trace["f"]["fn"], pg.GP(pg.kernels.RBF(1.0, 1.0), X)
    assert kl_divergence(q, p) == q.kl == 0.0  # q(u) starts at the prior
    svi = SVI(small_fits.classifier, guide, optax.adam(0.01), Trace_ELBO())
    with pytest.raises(pg.ModelError, match="TraceMeanField_ELBO"):
        svi.run(jax.random.key(0), 2, jnp.asarray(X), y=jnp.asarray(y), progress_bar=False)


@pytest.mark.slow
def test_approximate_draws_sites_from_any_posterior_process():
    X, y, X_new = data()
    vi = pg.fit(small_fits.classifier, pg.VI(hyper=FIXED), 0, X, y=y)
    for fit in (fitted("svgp"), vi):
        model = handlers.condition(
            pg.approximate(small_fits.classifier, {"f": fit.posterior}), fit.hyper
        )
        draws = Predictive(model, num_samples=3000)(jax.random.key(0), jnp.asarray(X_new))
        prediction = fit.predict(X_new)
        sd = np.sqrt(prediction.f_variance)
        assert np.all(np.abs(draws["f"].mean(0) - prediction.f_mean) < 5 * sd / np.sqrt(3000))
        assert np.all(np.abs(draws["y"].mean(0) - prediction.probs) < 5 * 0.5 / np.sqrt(3000))
    with pytest.raises(pg.DataError, match="does not have"):
        Predictive(pg.approximate(small_fits.classifier, {"g": vi.posterior}), num_samples=1)(
            jax.random.key(0), X_new
        )


def test_approximate_refuses_what_was_integrated_beside_a_gp():
    """The level was drawn from its prior again: the mean of y was 14 times too large."""
    X, counts = np.linspace(0.0, 4.0, 6), np.array([5, 6, 8, 7, 6, 5])

    def curve(X):
        return numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 3.0))
        f = curve(X)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(level + f)), obs=y)

    q = pg.fit(model, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=counts).posterior
    with pytest.raises(pg.ModelError, match=r"integrated \['level'\] together with 'f'"):
        handlers.seed(pg.approximate(model, {"f": q}), 0)(X)
    for allowed in (curve, handlers.condition(model, {"level": 1.8})):
        handlers.seed(pg.approximate(allowed, {"f": q}), 0)(X)
    turned = handlers.reparam(model, config={"level": LocScaleReparam(0.0)})
    with pytest.raises(pg.ModelError, match=r"integrated \['level'\] together"):
        handlers.seed(pg.approximate(turned, {"f": q}), 0)(X)


@pytest.mark.slow
def test_sparse_nuts_with_all_inputs_agrees_with_nuts():
    X, y, X_new = data()
    exact = pg.fit(
        small_fits.classifier, pg.NUTS(num_warmup=300, num_samples=1500, num_chains=1), 0, X, y=y
    )
    sparse = pg.SparseNUTS(inducing=X, num_warmup=300, num_samples=1500, num_chains=1)
    sparse = pg.fit(small_fits.classifier, sparse, 1, X, y=y)
    assert sparse.result == "converged" and min(exact.stats["ess"], sparse.stats["ess"]) > 150
    a, b = exact.predict(X_new), sparse.predict(X_new)
    # Means of 150 or more effective draws: four standard errors of a difference are 0.46 standard
    # deviations.
    assert np.max(np.abs(a.f_mean - b.f_mean) / np.sqrt(a.f_variance)) < 0.46
    for name in ("lengthscale", "variance"):
        ours, theirs = (np.log(np.asarray(f.hyper[name])) for f in (sparse, exact))
        assert abs(ours.mean() - theirs.mean()) < 0.46 * theirs.std(), name


def test_cubature_and_draws_are_the_expectation():
    """E log N(y; f, exp g) = -log(2 pi) / 2 - E g - (y - m_f)^2 + v_f) exp(-2 m_g + 2 v_g) / 2."""
    mean = {"f": jnp.array([0.3, -1.0]), "g": jnp.array([0.1, -0.5])}
    variance = {"f": jnp.array([0.5, 0.1]), "g": jnp.array([0.2, 0.05])}
    y = jnp.array([0.0, 1.0])

    def log_lik(f):
        return dist.Normal(f["f"], jnp.exp(f["g"])).log_prob(y)

    square = (y - mean["f"]) ** 2 + variance["f"]
    exact = (
        -0.5 * jnp.log(2 * jnp.pi)
        - mean["g"]
        - 0.5 * square * jnp.exp(-2 * mean["g"] + 2 * variance["g"])
    )
    key = jax.random.key(0)
    np.testing.assert_allclose(
        expected_log_lik(log_lik, mean, variance, Expectation(), key), exact, rtol=1e-8
    )
    draws = expected_log_lik(log_lik, mean, variance, Expectation(num_draws=100_000), key)
    np.testing.assert_allclose(draws, exact, rtol=0.02)


@pytest.mark.slow
def test_heteroscedastic_noise_is_found():
    rng = np.random.default_rng(2)
    X = rng.uniform(-3, 3, size=(150, 1))
    y = np.sin(X[:, 0]) + np.exp(0.6 * X[:, 0] - 1.5) * rng.normal(size=150)
    fit = pg.fit(heteroscedastic, pg.SVGP(num_inducing=15, max_steps=200), 0, X, y=y)
    g = fit.predict(np.array([[-2.0], [2.0]])).f_mean["g"]
    assert fit.result in ("converged", "completed")
    np.testing.assert_allclose(g, [0.6 * -2 - 1.5, 0.6 * 2 - 1.5], atol=0.5)


@pytest.mark.slow
def test_natural_gradients_stay_in_the_cone_where_the_likelihood_is_not_log_concave():
    X, _, _ = data()
    y = np.sin(X[:, 0])
    y[::5] += 8.0
    fit = pg.fit(
        robust,
        pg.SVGP(
            inducing=X,
            train_inducing=False,
            expectation=pg.Expectation(num_nodes=64),
            max_steps=200,
        ),
        0,
        X,
        y=y,
    )
    vi = pg.fit(robust, pg.VI(), 0, X, y=y)
    assert np.isfinite(fit.stats["bounds"]).all()
    assert fit.log_evidence > vi.log_evidence - 0.5


@pytest.mark.slow
def test_steep_expectations_settle():
    X, _, _ = data()
    y = np.random.default_rng(3).poisson(np.exp(4 + X[:, 0]))
    method = pg.SVGP(
        inducing=X,
        train_inducing=False,
        hyper=pg.Fixed({"variance": 4.0}),
        expectation=pg.Expectation(num_nodes=64),
        max_steps=400,
    )
    fit = pg.fit(counts, method, 0, X, y=y)
    vi = pg.fit(counts, pg.VI(hyper=pg.Fixed({"variance": 4.0})), 0, X, y=y)
    assert fit.result == "converged" and abs(fit.log_evidence - vi.log_evidence) < 1e-4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pg.SVGP(num_inducing=0), "num_inducing=0"),
        (lambda: pg.SVGP(training=pg.Training(covariance="band")), "covariance='band'"),
        (lambda: pg.SVGP(training=pg.Training(natural_rate=2.0)), "natural_rate=2.0"),
        (lambda: pg.SVGP(training=pg.Training(warm_up=-1)), "warm_up=-1"),
        (lambda: pg.SVGP(hyper=pg.MAP), "hyper=MAP"),
        (lambda: pg.SVGP(hyper=pg.Grid()), r"hyper=Grid.*MAP\(\).*AutoNormal.*Fixed"),
        (lambda: pg.CollapsedSVGP(hyper=AutoNormal), r"CollapsedSVGP\(hyper=.*give MAP\(\)"),
        (lambda: pg.CollapsedSVGP(num_inducing=0), r"CollapsedSVGP\(num_inducing=0"),
        (lambda: pg.SparsePosterior(np.zeros((3, 1)), covariance="decoupled"), "decoupled"),
        (lambda: pg.SparseNUTS(num_samples=0), "num_samples"),
        (lambda: pg.EP(num_nodes=1), r"EP\(num_nodes=1\).*at least 2"),
        (lambda: pg.VI(num_nodes=1), r"VI\(num_nodes=1\).*at least 2"),
        (lambda: pg.Checkpoint("x", every=0), "every"),
    ],
)
def test_configuration_outside_its_range_is_a_typed_error(make, words):
    with pytest.raises(pg.DataError, match=words):
        make()


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (pg.SVGP(inducing="nearest"), "nearest"),
        (pg.SVGP(inducing=np.zeros((4, 3))), "only the rows may differ"),
        (pg.SVGP(inducing=np.full((4, 2), np.nan)), "not finite"),
        (pg.SVGP(inducing={"g": "greedy"}), "none for the GP site 'f'"),
        (pg.SparseNUTS(inducing={"f": np.zeros((4, 2)), "h": "kmeans"}), r"entries for \['h'\]"),
        (pg.SVGP(hyper=pg.MAP(restarts=3)), "restarts=3"),
        (pg.SVGP(hyper=pg.MAP(max_steps=20, tol=0.01)), r"MAP\(max_steps=20, tol=0.01\)"),
        (pg.SVGP(hyper=pg.Sample()), "SparseNUTS"),
        (pg.SVGP(hyper=pg.Fixed({"lengthscale": 1.0})), "missing"),
        (pg.SVGP(hyper=pg.Fixed({"lengthscale": -1.0, "variance": 1.0})), "outside its support"),
    ],
)
def test_arguments_that_do_not_fit_are_typed_errors(method, words):
    X, y, _ = data()
    with pytest.raises(pg.PplGpError, match=words):
        pg.fit(small_fits.classifier, method, 0, X, y=y)


def test_bad_data_are_typed_errors():
    X, y, _ = data()
    for bad, words in ((X[:5], "shape"), (np.where(X > 2, np.nan, X), "nan")):
        with pytest.raises(pg.DataError, match=words):
            pg.fit(small_fits.classifier, pg.SVGP(num_inducing=5), 0, bad, y=y)
    with pytest.raises(pg.DataError, match="support"):
        pg.fit(small_fits.classifier, pg.SVGP(num_inducing=5), 0, X, y=2 * y - 1)


def test_models_that_svgp_cannot_fit_are_told_what_can():
    X, y, _ = data()

    def warped(X, y=None):
        g = numpyro.sample("g", pg.GP(pg.kernels.RBF(), X))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(jnp.exp(g[0])), X))
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    def coupled(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(), X))
        numpyro.sample("y", dist.Bernoulli(logits=jnp.cumsum(f)), obs=y)

    for model, error, words in (
        (warped, pg.ModelError, "may only feed another"),
        (coupled, pg.NotPointwiseError, "couples"),
    ):
        with pytest.raises(error, match=words):
            pg.fit(model, pg.SVGP(num_inducing=5), 0, X, y=y)


@pytest.mark.slow
def test_more_points_than_data_duplicates_and_singular_kernels_still_answer():
    X, y, _ = data()
    many = pg.fit(
        small_fits.classifier,
        pg.SVGP(num_inducing=500, hyper=FIXED, train_inducing=False),
        0,
        X,
        y=y,
    )
    assert many.stats["num_inducing"] == len(X)
    twice = np.concatenate([X[:8], X[:8]])
    double = pg.fit(
        small_fits.classifier, pg.SVGP(inducing=twice, hyper=FIXED, train_inducing=False), 0, X, y=y
    )
    once = pg.fit(
        small_fits.classifier, pg.SVGP(inducing=X[:8], hyper=FIXED, train_inducing=False), 0, X, y=y
    )
    assert abs(double.log_evidence - once.log_evidence) < 1e-4

    def linear(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.Linear(1.0), X))
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    singular = pg.fit(linear, pg.SVGP(inducing=X, train_inducing=False), 0, X, y=y)
    vi = pg.fit(linear, pg.VI(), 0, X, y=y)
    assert abs(singular.log_evidence - vi.log_evidence) < 1e-3


@pytest.mark.slow
def test_the_dimension_of_an_inducing_fit_is_what_was_asked_for():
    fit = fitted("svgp")
    assert isinstance(fit.inducing, pg.Points) and fit.inducing.Z.shape == (10, 2)
    assert set(fitted("heteroscedastic").inducing) == {"f", "g"}
    X, y, _ = data()
    with pytest.raises(pg.ModelError, match="no inducing variables"):
        _ = pg.fit(small_fits.classifier, pg.Laplace(hyper=FIXED), 0, X, y=y).inducing
