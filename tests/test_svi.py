"""`SVI`: NumPyro's guides behind the same verb, against a conjugate model."""

import functools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import RenyiELBO
from numpyro.infer.autoguide import AutoDAIS, AutoDelta, AutoMultivariateNormal, AutoNormal
from scipy.stats import multivariate_normal

import ppl_gp as pg

N, NOISE = 20, 0.5
rng = np.random.default_rng(0)
X = rng.normal(size=(N, 2))
X[:, 1] += X[:, 0]  # w is correlated in the posterior
Y = X @ [0.7, -0.4] + NOISE * rng.normal(size=N)
EVIDENCE = multivariate_normal(np.zeros(N), X @ X.T + NOISE**2 * np.eye(N)).logpdf(Y)
S = np.linalg.inv(np.eye(2) + X.T @ X / NOISE**2)
MEAN = S @ X.T @ Y / NOISE**2


def linear(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, NOISE), obs=y)


def own_guide(X, y=None):
    """The posterior itself, but for its mean."""
    centre = numpyro.param("centre", jnp.zeros(2))
    numpyro.sample("w", dist.MultivariateNormal(centre, jnp.asarray(S)))


@pytest.fixture(scope="module")
def whole():
    method = pg.SVI(guide=AutoMultivariateNormal, num_steps=3000, num_draws=4000)
    return pg.fit(linear, method, 0, X, y=Y)


@pytest.mark.slow
def test_a_full_gaussian_reaches_the_posterior(whole):
    error = 4.0 * whole.stats["log_evidence_se"]
    assert EVIDENCE - 0.1 - error < whole.log_evidence < EVIDENCE + error
    w = np.asarray(whole.hyper["w"])
    sd = np.sqrt(np.diag(S))
    np.testing.assert_array_less(np.abs(w.mean(0) - MEAN), 0.15 * sd)
    np.testing.assert_allclose(w.std(0), sd, rtol=0.15)
    assert whole.result == "completed" and whole.stats["losses"].shape == (3000,)


def test_what_a_factorised_guide_loses():
    """KL[q || p] of the best factorised Gaussian: -log(1 - rho^2) / 2 in two dimensions."""
    method = pg.SVI(guide=functools.partial(AutoNormal, init_scale=0.05), num_steps=3000)
    fit = pg.fit(linear, method, 0, X, y=Y)
    P = np.linalg.inv(S)
    lost = 0.5 * np.log(P[0, 0] * P[1, 1] / np.linalg.det(P))
    assert fit.log_evidence == pytest.approx(
        EVIDENCE - lost, abs=0.05 + 4.0 * fit.stats["log_evidence_se"]
    )
    np.testing.assert_allclose(fit.hyper["w"].std(0), np.diag(P) ** -0.5, rtol=0.15)


def test_a_guide_of_ones_own():
    fit = pg.fit(linear, pg.SVI(guide=own_guide, num_steps=1500), 0, X, y=Y)
    assert fit.log_evidence == pytest.approx(EVIDENCE, abs=0.05 + 4 * fit.stats["log_evidence_se"])
    np.testing.assert_allclose(np.cov(fit.hyper["w"].T), S, atol=0.15 * S.max())


@pytest.mark.slow
def test_every_verb_answers(whole, tmp_path):
    NEW = X[:4] + 0.1
    found = whole.predict(NEW)
    np.testing.assert_allclose(found.mean, NEW @ np.asarray(whole.hyper["w"]).mean(0), rtol=1e-8)
    loaded = pg.load(whole.save(tmp_path / "fit.ppl"), linear)
    np.testing.assert_allclose(loaded.predict(NEW).mean, found.mean, rtol=1e-12)
    assert whole.to_datatree().posterior["w"].shape == (1, 4000, 2)
    with pytest.warns(UserWarning, match="taken for the posterior's"):
        whole.loo()
    exact = pg.fit(linear, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=Y)
    odds = pg.compare_models({"a": whole, "b": exact}, mixed=True).table[0]["log_odds"]
    assert odds == pytest.approx(min(0.0, whole.log_evidence - EVIDENCE), abs=1e-6)
    table = pg.compare({"svi": whole, "exact": exact}, NEW, np.zeros(4), reference="exact").table
    assert table[0]["mean_distance"] < 0.2 and table[0]["sd_distance"] < 0.2


def test_a_point_has_no_bound():
    fit = pg.fit(linear, pg.SVI(guide=AutoDelta, num_steps=2000), 0, X, y=Y)
    assert fit.log_evidence is None
    np.testing.assert_allclose(fit.hyper["w"].mean(0), MEAN, atol=0.02)


def test_a_loss_that_still_falls_is_told():
    quiet = functools.partial(AutoNormal, init_scale=0.01)
    with pytest.warns(UserWarning, match="still falls"):
        method = pg.SVI(guide=quiet, num_steps=300, learning_rate=0.001)
        pg.fit(linear, method, 0, X, y=Y)


def with_gp(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 1.0), obs=y)


def test_what_it_does_not_fit_is_refused():
    with pytest.raises(pg.ModelError, match="SVGP"):
        pg.fit(with_gp, pg.SVI(), 0, X, y=Y)
    for options, match in (
        ({"num_steps": 0}, "num_steps=0"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"guide": AutoDAIS}, "AutoDAIS"),
    ):
        with pytest.raises(pg.DataError, match=match):
            pg.SVI(**options)


@pytest.mark.slow
def test_a_kl_weight_of_the_loss_is_none_of_the_bound():
    """log p(y) is exact here: a bound is not above it, whatever the loss weighed."""
    fits = {
        beta: pg.fit(
            linear,
            pg.SVI(AutoMultivariateNormal, loss=pg.ELBO(beta=beta), num_steps=300),
            0,
            X,
            y=Y,
        )
        for beta in (1.0, 0.1)
    }
    exact = fits[1.0].log_evidence
    assert fits[0.1].log_evidence < exact - 0.1


def test_an_optimiser_that_is_not_optaxs_is_named():
    with pytest.raises(pg.DataError, match=r"optimiser=Adam.*optax.adam"):
        pg.SVI(optimiser=numpyro.optim.Adam(0.02))


def with_a_point(X, y=None):
    centre = numpyro.param("centre", jnp.zeros(2))
    numpyro.sample("w", dist.Delta(centre).to_event(1))


def with_another_site(X, y=None):
    own_guide(X, y)
    numpyro.sample("other", dist.Normal(0.0, 100.0))


def test_what_is_no_bound_is_no_evidence():
    point = pg.fit(linear, pg.SVI(with_a_point, num_steps=50), 0, X, y=Y)
    above = pg.SVI(own_guide, loss=RenyiELBO(alpha=-2.0, num_particles=2), num_steps=50)
    assert point.log_evidence is None and pg.fit(linear, above, 0, X, y=Y).log_evidence is None
    with pytest.raises(pg.ModelError, match=r"draws \['other'\], which are no latent sites"):
        pg.fit(linear, pg.SVI(with_another_site, num_steps=5), 0, X, y=Y)


def test_parameters_that_are_no_numbers_are_the_results_not_the_models_fault(tmp_path):
    fit = pg.fit(linear, pg.SVI(num_steps=60, learning_rate=1e308), 0, X, y=Y, throw=False)
    assert fit.result == "nonfinite"
    for ask in (
        lambda: fit.predict(X),
        lambda: fit.loo(),
        lambda: fit.symmetries,
        lambda: fit.save(tmp_path / "fit"),
    ):
        with pytest.raises(pg.FitError, match="ended as 'nonfinite', and what it has of"):
            ask()


def test_a_density_that_is_finite_nowhere_is_the_models():
    def nowhere(X, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.factor("bad", jnp.log(-jnp.abs(w)))

    with pytest.raises(pg.ModelError, match="not finite at any value"):
        pg.fit(nowhere, pg.SVI(num_steps=60, loss=numpyro.infer.Trace_ELBO()), 0, X, y=Y)


def test_a_point_of_a_model_with_deterministic_sites():
    """They are computed from the model's arguments."""

    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.deterministic("line", X[:, 0] * w)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(X[:, 0] * w, 1.0), obs=y)

    fit = pg.fit(model, pg.SVI(guide=AutoDelta, num_steps=60, num_draws=3), 0, X, y=Y)
    assert set(fit.hyper) == {"w"} and fit.hyper["w"].shape == (3,)


def test_leave_one_out_of_few_draws_is_refused():
    """By any method that keeps draws."""
    for method in (pg.SVI(num_steps=60, num_draws=20), pg.NUTS(20, 20, num_chains=1)):
        fit = pg.fit(linear, method, 0, X, y=Y, throw=False)
        with pytest.raises(pg.DataError, match="has 20; Pareto smoothing wants at least 21"):
            fit.loo()


def test_compare_says_why_there_is_no_sampled_evidence():
    fit = pg.fit(linear, pg.Laplace(integrate=()), 0, X, y=Y)
    (note,) = [x for x in pg.compare({"a": fit}, X, Y).notes["a"] if "importance" in x]
    assert "q is of all sites" in note and "importance_gain" in note and "were sampled" not in note
