"""Predictive densities under mean field: exact over q where its factors stand apart, of draws
elsewhere, against closed forms of scipy and against draws.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import stats
from scipy.special import logsumexp

import ppl_gp as pg
from models.linear_regression import linear_regression
from models.mixture import mixture

RNG = np.random.default_rng(5)
ROWS = np.concatenate([RNG.normal(-2, 0.7, (14, 2)), RNG.normal(2, 1.0, (16, 2))])
NEW = np.concatenate([ROWS[::6] + 0.3, [[0.0, 0.0], [40.0, -30.0]]])
MILLION = 1_000_000


def counts(X, y=None):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(rate * X[:, 0]), obs=y)


@pytest.mark.one_case
@pytest.mark.parametrize("exposed", [True, False])
def test_counts_are_negative_binomial(exposed):
    """rate ~ Gamma(2 + sum y, 1 + sum x), and y* a Poisson of rate x*."""
    X = RNG.uniform(0.5, 2.0, (9, 1)) if exposed else np.ones((9, 1))
    y, new, at = RNG.poisson(3.0 * X[:, 0]), np.array([[0.3], [1.0], [7.0]]), np.array([0, 4, 50])
    fit = pg.fit(counts, pg.MeanField(num_draws=2), 0, X, y=y)
    found, error = fit.log_density(new, at, with_error=True)
    a, b = 2.0 + y.sum(), 1.0 + X.sum()
    exact = stats.nbinom(a, b / (b + new[:, 0])).logpmf(at)
    np.testing.assert_allclose(found, exact, rtol=1e-10, atol=1e-10)
    assert np.all(np.asarray(error) == 0.0)


def own_rates(e, y=None):
    b = numpyro.sample("b", dist.Gamma(1.0, 1.0))
    with numpyro.plate("data", e.shape[0]):
        rate = numpyro.sample("rate", dist.Gamma(2.0, b))
        numpyro.sample("y", dist.Poisson(rate * e), obs=y)


def test_leaving_out_rows_with_latents_of_their_own_points_to_held_out_rows():
    """Each latent follows its row: 4.3 nats, of which the warning suggested a tenth."""
    rng = np.random.default_rng(4)
    e = rng.uniform(0.5, 4.0, 25)
    y, b = rng.poisson(e * rng.gamma(2, 1, 25)), np.linspace(1e-3, 12.0, 4000)
    log_p = stats.nbinom.logpmf(y[:, None], 2, b / (b + e[:, None]))
    without = [
        logsumexp(np.delete(log_p, [] if i is None else i, 0).sum(0) - b)
        for i in [None, *range(25)]
    ]
    exact = without[0] - np.array(without[1:])
    with pytest.warns(UserWarning, match=r"each row by its own \['rate'\].*log_density") as said:
        found = pg.fit(own_rates, pg.MeanField(), 0, e, y=y).loo()
    assert "NUTS" not in str(said[0].message) and "lacking" not in str(said[0].message)
    assert found.elpd - exact.sum() > 3.0
    held = pg.fit(own_rates, pg.MeanField(), 0, e[1:], y=y[1:]).log_density(e[:1], y[:1])
    assert held[0] == pytest.approx(exact[0], abs=0.02)


@pytest.fixture(scope="module")
def fit():
    return pg.fit(mixture, pg.MeanField(), 0, ROWS, num_components=3, concentration=0.7)


def student(fit):
    """(weights, [Student-t of each component]): PRML (10.81), (10.82)."""
    (pair,) = [q for q in fit.blocks if len(q.sites) == 2]
    nu, beta = np.asarray(pair.df), np.asarray(pair.strength)
    m, rate = np.asarray(pair.linear) / beta[:, None], np.asarray(pair.rate)
    free = nu + 1.0 - m.shape[1]
    shapes = rate * ((1.0 + beta) / (free * beta))[:, None, None]
    alpha = np.asarray(fit.sites["weights"].concentration)
    return alpha / alpha.sum(), [
        stats.multivariate_t(*x) for x in zip(m, shapes, free, strict=True)
    ]


@pytest.mark.slow
def test_a_mixture_is_one_of_student_t(fit):
    found, error = fit.log_density(NEW, with_error=True)
    weights, components = student(fit)
    terms = np.stack([t.logpdf(NEW) for t in components], 1)
    np.testing.assert_allclose(found, logsumexp(np.log(weights) + terms, axis=1), atol=1e-9)
    assert np.all(np.asarray(error) == 0.0)
    one_by_one = [fit.log_density(NEW[i : i + 1])[0] for i in range(len(NEW))]
    np.testing.assert_allclose(found, one_by_one, atol=1e-10)


@pytest.mark.slow
def test_a_million_draws_are_of_that_density(fit):
    """New rows drawn through q's weights, means and precisions, by NumPy: their shares below
    thresholds along a direction are those of the Student-t mixture's distribution function.
    """
    q = {k: v for b in fit.blocks for k, v in b.draw(random.key(1), MILLION // 10).items()}
    rng = np.random.default_rng(0)
    weights, mean, precision = (np.asarray(q[k]) for k in ("weights", "mean", "precision"))
    each = np.repeat(np.arange(len(weights)), 10)
    z = (rng.random((MILLION, 1)) > np.cumsum(weights, 1)[each]).sum(1).clip(max=2)
    root = np.linalg.cholesky(np.linalg.inv(precision))[each, z]
    x = mean[each, z] + np.einsum("nij,nj->ni", root, rng.normal(size=(MILLION, 2)))
    a, points = np.array([0.6, -0.8]), np.array([-3.0, -1.0, 0.0, 0.5, 2.0])
    shares, components = student(fit)
    exact = sum(
        w * stats.t(t.df, a @ t.loc, np.sqrt(a @ t.shape @ a)).cdf(points)
        for w, t in zip(shares, components, strict=True)
    )
    below = x @ a <= points[:, None]
    blocks = below.reshape(len(points), -1, 10).mean(-1)  # rows of one draw of q are dependent
    error = blocks.std(1) / np.sqrt(blocks.shape[1])
    np.testing.assert_array_less(np.abs(below.mean(1) - exact), 4.5 * error)
    assert np.all(error < 1e-3)


@pytest.mark.slow
def test_a_saved_mixture_has_the_same_density(fit, tmp_path):
    loaded = pg.load(fit.save(tmp_path / "mixture.zip"), mixture)
    np.testing.assert_allclose(loaded.log_density(NEW), fit.log_density(NEW), rtol=1e-12)


@pytest.mark.slow
def test_a_comparison_tells_of_label_switching(fit):
    table = pg.compare({"mean field": fit}, NEW)
    assert table.table[0]["error"] is None
    np.testing.assert_allclose(table.table[0]["log_density"], np.mean(fit.log_density(NEW)))
    text = " ".join(str(table).split())
    assert "Label switching" in text and "plate 'components': 3! orders" in text


def lines(X, y=None):
    """Each datum is of one of two lines, with noise of its own."""
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    with numpyro.plate("lines", 2):
        tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0 / jnp.sqrt(tau)))
    with numpyro.plate("data", X.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(share))
        numpyro.sample("y", dist.Normal(slope[z] * X[:, 0], 1.0 / jnp.sqrt(tau[z])), obs=y)


@pytest.mark.slow
def test_normal_gamma_factors_give_student_t():
    X = RNG.uniform(-1, 1, (24, 1))
    y = np.where(np.arange(24) % 2, 2.0, -2.0) * X[:, 0] + 0.2 * RNG.normal(size=24)
    fit = pg.fit(lines, pg.MeanField(num_draws=10), 0, X, y=y)
    (pair,) = [q for q in fit.blocks if len(q.sites) == 2]
    a, b, P = (np.asarray(x) for x in (pair.shape, pair.rate, pair.P[:, 0, 0]))
    m, share = np.asarray(pair.linear)[:, 0] / P, float(fit.sites["share"].mean)
    new, at = np.array([[0.0], [0.7], [-3.0]]), np.array([0.1, 1.0, 2.0])
    scale = np.sqrt(b / a * (1.0 + new**2 / P))
    terms = stats.t(2.0 * a, m * new, scale).logpdf(at[:, None])
    exact = logsumexp(np.log([1.0 - share, share]) + terms, axis=1)
    np.testing.assert_allclose(fit.log_density(new, at), exact, atol=1e-9)


@pytest.mark.slow
def test_where_two_factors_meet_in_a_density_q_is_drawn():
    """N(x w, 1 / tau) with q(w) q(tau): nothing exact is claimed."""
    X = RNG.normal(size=(12, 2))
    y = X @ [1.0, -1.0] + 0.3 * RNG.normal(size=12)
    fit = pg.fit(linear_regression, pg.MeanField(), 0, X, y=y)
    found, error = fit.log_density(X[:3], y[:3], with_error=True)
    w, tau = np.asarray(fit.hyper["weights"]), np.asarray(fit.hyper["tau"])
    terms = stats.norm.logpdf(y[:3], w @ X[:3].T, 1.0 / np.sqrt(tau)[:, None])
    np.testing.assert_allclose(found, logsumexp(terms, 0) - np.log(len(w)), atol=1e-10)
    assert np.all(error > 0.0)


def labelled(X, y=None):
    with numpyro.plate("columns", 2):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


@pytest.mark.slow
def test_behind_a_local_bound_q_is_drawn():
    X = RNG.normal(size=(15, 2))
    y = (X[:, 0] + 0.5 * RNG.normal(size=15) > 0).astype(int)
    fit = pg.fit(labelled, pg.MeanField(), 0, X, y=y)
    found, error = fit.log_density(X[:3], np.array([1, 0, 1]), with_error=True)
    eta = np.asarray(fit.hyper["w"]) @ X[:3].T * np.array([1, -1, 1])
    by_hand = np.log(np.mean(1.0 / (1.0 + np.exp(-eta)), 0))
    np.testing.assert_allclose(found, by_hand, atol=1e-10)
    assert np.all(error > 0.0)
    jax.clear_caches()


@pytest.mark.one_case
@pytest.mark.parametrize("num", [1, 3])
def test_a_variance_that_does_not_exist_is_told(num):
    """2 a = 2 (0.3 + N / 2) degrees of freedom: 1.6 of one datum, 3.6 of three."""

    def model(X, y=None):
        tau = numpyro.sample("tau", dist.Gamma(0.3, 1.0))
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0 / jnp.sqrt(tau)))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1.0 / jnp.sqrt(tau)), obs=y)

    x = np.arange(float(num))
    fit = pg.fit(model, pg.MeanField(num_draws=20), 0, x, y=np.sin(x))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = fit.predict(x)
    assert any("at most two degrees of freedom" in str(w.message) for w in told) == (num == 1)
    assert (found.mean_error is None) == (num == 3)


def test_quantiles_do_not_need_a_variance():
    """An inverse gamma of shape 1.5 has none, and the summary's quantiles were infinite."""

    def model(X, y=None):
        s2 = numpyro.sample("s2", dist.InverseGamma(0.5, 0.5))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(X, jnp.sqrt(s2)), obs=y)

    fit = pg.fit(model, pg.MeanField(), 0, np.zeros(2), y=np.array([0.5, -0.3]))
    row = fit.summary().loc["s2"]
    expected = stats.invgamma(1.5, scale=0.67).ppf([0.05, 0.95])
    np.testing.assert_allclose(row[["5 %", "95 %"]].astype(float), expected, rtol=1e-6)
