"""Latents of rows whose prior is computed from a function: NUTS over inducing variables, scores,
draws and predictions against dense Gaussian algebra.
"""

import functools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

RNG = np.random.default_rng(0)
N, S, T = 8, 0.4, 0.3  # rows, the sd of a latent given f, the noise
X = np.linspace(0.0, 3.0, N)
K = np.exp(-0.5 * (X[:, None] - X) ** 2 / 0.64)
Y = RNG.multivariate_normal(np.zeros(N), K + 0.25 * np.eye(N))
X_NEW, Y_NEW = np.array([0.4, 1.7, 3.5, 5.0]), np.array([0.3, -1.0, 1.5, 2.0])
FREE = {"layers": pg.Layers(latents=pg.Free()), "hyper": pg.Fixed({})}


def declared(prior, also=0.0):
    """The prior of h is about `prior(f, x, at)`, and y sees h + also * f."""

    def model(x, at=None, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.8), x))
        with numpyro.plate("data", x.shape[0]):
            h = numpyro.sample("h", dist.Normal(prior(f, x, at), S))
            numpyro.sample("y", dist.Normal(h + also * f, T), obs=y)

    return model


ABOUT_F = declared(lambda f, x, at: f)
SEEN_TOO = declared(lambda f, x, at: f, 1.0)


@pytest.mark.parametrize(("model", "times"), [(ABOUT_F, 1.0), (SEEN_TOO, 2.0)], ids=["h", "h+f"])
def test_nuts_over_inducing_variables_has_the_prior_of_a_latent_at_the_draw_of_f(model, times):
    """It raised StopIteration, and had p(h | f) at the prior mean of f: then f kept its prior sd of
    1 where y sees h alone.
    """
    method = pg.SparseNUTS(inducing=X, num_warmup=300, num_samples=500)
    fit = pg.fit(model, method, 0, X, y=Y, throw=False)
    C = times**2 * K + (S**2 + T**2) * np.eye(N)
    for found, with_y, own in (
        (fit.posterior(X), times * K, K),
        (fit.hyper["h"], times * K + S**2 * np.eye(N), K + S**2 * np.eye(N)),
    ):
        mean = with_y @ np.linalg.solve(C, Y)
        sd = np.sqrt(np.diag(own - with_y @ np.linalg.solve(C, with_y)))
        draws = isinstance(found, np.ndarray | jnp.ndarray)
        means, variances = (
            (np.mean(found, 0), np.var(found, 0)) if draws else (found.mean, found.variance)
        )
        # of 1000 draws some 300 are effective
        assert np.abs((means - mean) / sd).max() < 0.3
        assert np.abs(np.sqrt(variances) / sd - 1.0).max() < 0.2


@functools.cache
def fitted(model):
    return pg.fit(model, pg.SVGP(inducing=X, max_steps=60, **FREE), 0, X, y=Y, throw=False)


def test_scores_and_draws_of_new_latents_have_f_in_their_prior():
    """The prior of h* was taken at the prior mean of f: 6 nats off, and means by 2 sds."""
    fit = fitted(ABOUT_F)
    f = fit.posterior(X_NEW)
    mean, variance = np.asarray(f.mean), np.asarray(f.variance) + S**2
    found, error = fit.log_density(X_NEW, Y_NEW, with_error=True)
    truth = dist.Normal(mean, np.sqrt(variance + T**2)).log_prob(Y_NEW)
    assert np.all(np.abs(found - truth) < 4.0 * error) and np.all(error < 0.1)
    drawn = fit.infer_latents(1, X_NEW, Y_NEW, num_samples=2000, num_proposals=4000)
    h, precision = np.asarray(drawn.draws["h"]), 1.0 / variance + 1.0 / T**2
    exact = (mean / variance + Y_NEW / T**2) / precision
    standard_error = 1.0 / np.sqrt(precision * np.minimum(drawn.ess, 2000))
    assert np.all(np.abs(h.mean(0) - exact) < 5.0 * standard_error)
    np.testing.assert_allclose(h.std(0), 1.0 / np.sqrt(precision), rtol=0.25)


def test_predictions_have_one_f_in_a_latent_and_beside_it():
    """f was integrated once more, apart from the f of h*: a variance of 2 v for 4 v."""
    fit = fitted(SEEN_TOO)
    f = fit.posterior(X_NEW)
    mean, variance = 2.0 * np.asarray(f.mean), 4.0 * np.asarray(f.variance) + S**2 + T**2
    found = fit.predict(X_NEW)
    np.testing.assert_allclose(found.variance, variance, rtol=0.2)  # of some 1000 draws
    assert np.all(np.abs(found.mean - mean) < 5.0 * np.sqrt(variance / 1000))
    score, error = fit.log_density(X_NEW, Y_NEW, with_error=True)
    truth = dist.Normal(mean, np.sqrt(variance)).log_prob(Y_NEW)
    assert np.all(np.abs(score - truth) < 4.0 * error) and np.all(error < 0.1)


ELSEWHERE = {
    "mean": lambda f, x, at: f - f.mean(),
    "index": lambda f, x, at: f[at],
    "difference": lambda f, x, at: f[at] - f,
}


@pytest.mark.parametrize("prior", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_latent_that_sees_f_of_other_rows_is_refused(prior):
    """Each row of f was drawn on its own, and minibatches had other rows."""
    with pytest.raises(pg.NotPointwiseError, match=r"prior of site \['h'\].*line .*NUTS"):
        pg.fit(declared(prior), pg.SVGP(**FREE), 0, X, np.arange(N)[::-1], y=Y)


def test_a_latent_that_sees_f_of_a_table_is_refused_and_its_remedy_runs():
    at, places = np.arange(N) % 4, np.linspace(0.0, 3.0, 4)

    def model(x, at, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.8), x))
        with numpyro.plate("data", at.shape[0]):
            h = numpyro.sample("h", dist.Normal(f[at] - jnp.mean(f), S))
            numpyro.sample("y", dist.Normal(h, T), obs=y)

    method = pg.SVGP(num_inducing=4, max_steps=3, **FREE)
    with pytest.raises(pg.NotPointwiseError, match=r"prior of site \['h'\].*pass X\[index\]"):
        pg.fit(model, method, 0, places, at, y=Y)
    centred = declared(lambda f, x, at: f + x - x.mean())  # of the data alone
    for own in (ABOUT_F, centred):
        assert np.isfinite(pg.fit(own, method, 0, places[at], y=Y, throw=False).log_evidence)
