"""`to_datatree` of a fit with an integrated predictor: joint draws of its sites, which add up to
the predictor drawn and have the moments of `fit.sites` and `fit.components`.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

N, GROUPS, DRAWS = 30, 4, 4000
FIXED = pg.Fixed({"sd": 0.7})


def data():
    rng = np.random.default_rng(0)
    X, W = np.sort(rng.uniform(0, 6, N)), rng.normal(size=(N, 2))
    group = rng.integers(0, GROUPS, N)
    eta = np.sin(X) + W @ [0.5, -0.3] + 0.6 * rng.normal(size=GROUPS)[group]
    return X, W, group, eta + 0.3 * rng.normal(size=N)


def model(X, W, group, y=None, smooth=True):
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(level, sd))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X)) if smooth else 0.1 * X
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + W @ beta + u[group], 0.3), obs=y)


@pytest.fixture(scope="module", params=["dense", "inducing", "unknowns"])
def fit(request):
    X, W, group, y = data()
    sparse = pg.SVGP(hyper=FIXED, inducing=X[::2], train_inducing=False, max_steps=40)
    method = sparse if request.param == "inducing" else pg.Laplace(hyper=FIXED)
    return pg.fit(model, method, 0, X, W, group, y=y, smooth=request.param != "unknowns")


@pytest.fixture(scope="module")
def drawn(fit):
    return fit.to_datatree(num_draws=DRAWS).posterior


def _agrees(draws, normal):
    """Means to five, standard deviations to six of their own standard errors."""
    sd = np.sqrt(normal.variance)
    assert np.all(np.abs(draws.mean(0) - normal.mean) < 5 * sd / np.sqrt(DRAWS))
    assert np.all(np.abs(np.log(draws.std(0) / sd)) < 6 / np.sqrt(2 * DRAWS))


@pytest.mark.slow
def test_parts_add_up_to_the_predictor(fit, drawn):
    X, W, group, _ = data()
    beta, u = drawn["beta"].values[0], drawn["u"].values[0]
    f = drawn["f"].values[0] if "f" in drawn else 0.1 * X
    eta = drawn[fit.model.plan.name].values[0]
    np.testing.assert_allclose(f + beta @ W.T + u[:, group], eta, atol=1e-10)


@pytest.mark.slow
@pytest.mark.one_case
def test_draws_have_the_moments_of_the_answers_by_part(fit, drawn):
    X, W, group, _ = data()
    for name, normal in fit.sites.items():
        _agrees(drawn[name].values[0], normal)
    parts = fit.components(X, W, group)
    _agrees(drawn[fit.model.plan.name].values[0], parts["total"])
    if "f" in parts:
        _agrees(drawn["f"].values[0], parts["f"])


@pytest.mark.slow
def test_sites_are_drawn_jointly(fit, drawn):
    """The level and the groups' effects about it: their sum is known better than either."""
    level, u = drawn["level"].values[0], drawn["u"].values[0]
    assert np.corrcoef(level, u.mean(1))[0, 1] > 0.1


@pytest.mark.one_case
def test_dimensions_are_the_plates(drawn):
    assert drawn["u"].dims[2:] == ("groups",)
    assert drawn["beta"].dims[2:] == ("beta_dim_0",)
    if "f" in drawn:
        assert drawn["f"].dims[2:] == ("data",)


@pytest.mark.slow
def test_draws_of_hyperparameters_have_a_draw_of_the_parts_each():
    X, W, group, y = data()
    fit = pg.fit(model, pg.Laplace(hyper=pg.Grid()), 0, X, W, group, y=y)
    drawn = fit.to_datatree(num_draws=300).posterior
    assert drawn["u"].shape == (1, 300, GROUPS) and drawn["f"].shape == (1, 300, N)
    eta = drawn["f"].values[0] + drawn["beta"].values[0] @ W.T + drawn["u"].values[0][:, group]
    np.testing.assert_allclose(eta, drawn[fit.model.plan.name].values[0], atol=1e-10)
    # effects are narrow where their scale is small
    scale, spread = drawn["sd"].values[0], drawn["u"].values[0].std(1)
    assert np.corrcoef(np.log(scale), np.log(spread))[0, 1] > 0.1
    assert jnp.all(jnp.isfinite(eta))


def test_one_datum_has_sites_and_draws_of_them():
    """Beside an argument with an entry per row; a predictor is traced at two rows or more."""

    def model(X, seen, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.44, 1.0), X))
        b = numpyro.sample("b", dist.Normal(0.4, 0.6))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + b, 0.5).mask(seen), obs=y)

    arguments = np.array([0.7]), np.array([True])
    fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed({})), 0, *arguments, y=np.array([1.2]))
    gain = 0.36 / (1.44 + 0.36 + 0.25)
    mean, variance = 0.4 + gain * 0.8, 0.36 - gain * 0.36
    np.testing.assert_allclose(fit.sites["b"].mean, mean, rtol=1e-7)
    np.testing.assert_allclose(fit.sites["b"].variance, variance, rtol=1e-7)
    drawn = fit.to_datatree(num_draws=4000).posterior
    b, f = np.ravel(drawn["b"]), np.ravel(drawn["f"])
    assert abs(b.mean() - mean) < 4 * np.sqrt(variance / 4000)
    np.testing.assert_allclose(b.std(), np.sqrt(variance), rtol=0.06)
    np.testing.assert_allclose(f + b, np.ravel(drawn["eta"]), atol=1e-6)
