"""Leave-one-out of sparse fits against the exact number, by importance sampling from the prior."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm

import ppl_gp as pg
from ppl_gp.kept import FromInducing
from ppl_gp.sparse.process import draws_with_inducing

N, C = 8, 3
X = np.linspace(-2.0, 2.0, N)[:, None]
METHOD = pg.SVGP(inducing=X, train_inducing=False, hyper=pg.Fixed({}), max_steps=200)
Y = np.array([0, 0, 1, 0, 1, 2, 2, 1])


def softmax(X, y=None):
    with numpyro.plate("classes", C):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(2.0, 0.8), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


def outputs(X, y=None):
    """Three functions, a Gaussian each: q is the posterior itself."""
    with numpyro.plate("outputs", C):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(2.0, 0.8), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f.T, 2.0).to_event(1), obs=y)


def prior_draws(num):
    K = np.asarray(pg.kernels.RBF(2.0, 0.8)(X, X)) + 1e-8 * np.eye(N)
    return np.random.default_rng(5).normal(size=(num, C, N)) @ np.linalg.cholesky(K).T


def exact_loo(log_lik):
    """log p(y) - log p(y_-n) from log p(y_n | f), (S, N), at draws of the prior."""
    total = log_lik.sum(1)
    return logsumexp(total) - logsumexp(total[:, None] - log_lik, 0)


@pytest.mark.slow
def test_softmax():
    """Each class has its own q(f): the weights put back what that leaves out."""
    f = prior_draws(400_000)
    exact = exact_loo((f - logsumexp(f, 1, keepdims=True))[:, Y, np.arange(N)])
    loo = pg.fit(softmax, METHOD, 0, X, y=Y).loo()
    np.testing.assert_allclose(loo.elpd_i.values, exact, atol=0.12)
    assert abs(loo.elpd - exact.sum()) < 0.25


@pytest.mark.slow
def test_outputs_of_gaussian_noise():
    """Here the weights correct nothing, and leaving out a row of all three outputs is a Gaussian
    conditional.
    """
    y = np.sin(X + np.arange(C)) + 2.0 * np.random.default_rng(2).normal(size=(N, C))
    A = np.asarray(pg.kernels.RBF(2.0, 0.8)(X, X)) + (1e-8 + 4.0) * np.eye(N)
    inverse = np.linalg.inv(A)
    variance = 1.0 / np.diag(inverse)  # R&W 5.10-5.12
    residual = (inverse @ y) * variance[:, None]
    exact = np.sum(
        -0.5 * np.log(2 * np.pi * variance)[:, None] - 0.5 * residual**2 / variance[:, None], 1
    )
    fit = pg.fit(outputs, METHOD, 0, X, y=y)
    loo = fit.loo()
    good = loo.pareto_k.values < loo.good_k
    np.testing.assert_allclose(loo.elpd_i.values[good], exact[good], atol=0.15)
    assert good.sum() >= 6


WEIGHTS = np.array([0.5, 2.0, 0.4, 0.3, 0.3, 0.5, 2.0, 0.2])


def weighed(X, w, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.8), X))
    with numpyro.plate("data", X.shape[0]), numpyro.handlers.scale(scale=w):
        numpyro.sample("y", dist.Normal(f, 1.2), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [METHOD, pg.NUTS(200, 1000, 2), pg.Laplace()], ids=["svgp", "nuts", "laplace"]
)
def test_a_weighed_datum_is_left_out_whole_and_scored_once(method):
    y = np.sin(2.0 * X[:, 0]) + 0.6 * np.random.default_rng(2).normal(size=N)
    K = np.asarray(pg.kernels.RBF(1.0, 0.8)(X, X))
    exact = []
    for n in range(N):
        rest = np.arange(N) != n
        S = K[np.ix_(rest, rest)] + np.diag(1.44 / WEIGHTS[rest])
        gain = np.linalg.solve(S, K[rest, n])
        exact.append(norm.logpdf(y[n], gain @ y[rest], np.sqrt(1.0 - gain @ K[rest, n] + 1.44)))
    loo = pg.fit(weighed, method, 0, X, WEIGHTS, y=y).loo()
    if loo.pareto_k is not None:
        assert loo.pareto_k.max() < 0.7  # or the estimate claims nothing
    np.testing.assert_allclose(loo.elpd_i.values, exact, atol=0.1)


def sized(X, w, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.7))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, 0.8), X))
    with numpyro.plate("data", X.shape[0]), numpyro.handlers.scale(scale=w):
        numpyro.sample("y", dist.Normal(f, 1.2), obs=y)


@pytest.mark.slow
def test_weighed_data_and_sampled_hyperparameters():
    """p(y_n | y_-n) = sum over a grid of p(y_n | y_-n, theta) p(theta | y_-n)."""
    y = np.sin(2.0 * X[:, 0]) + 0.6 * np.random.default_rng(2).normal(size=N)
    K, grid = np.asarray(pg.kernels.RBF(1.0, 0.8)(X, X)), np.exp(np.linspace(-3.5, 3.5, 400))
    log_score, log_posterior = np.zeros((2, N, grid.size))
    for j, v in enumerate(grid):
        for n in range(N):
            rest = np.arange(N) != n
            S = v * K[np.ix_(rest, rest)] + np.diag(1.44 / WEIGHTS[rest])
            gain = np.linalg.solve(S, v * K[rest, n])
            spread = np.sqrt(v - gain @ (v * K[rest, n]) + 1.44)
            log_score[n, j] = norm.logpdf(y[n], gain @ y[rest], spread)
            log_posterior[n, j] = -0.5 * np.log(v) ** 2 / 0.49 + multivariate_normal(
                np.zeros(N - 1), S
            ).logpdf(y[rest])
    log_posterior -= logsumexp(log_posterior, 1, keepdims=True)
    exact = logsumexp(log_score + log_posterior, 1)
    method = pg.Laplace(hyper=pg.Sample(num_warmup=200, num_samples=1000, num_chains=1))
    fit = pg.fit(sized, method, 0, X, WEIGHTS, y=y)
    np.testing.assert_allclose(fit.loo().elpd_i.values, exact, atol=0.02)

    # Draws on a grid, weighed by their posterior: the same sum, without an error of sampling.
    some = grid[::8]
    fits = [
        pg.fit(sized, pg.Laplace(hyper=pg.Fixed({"variance": v})), 0, X, WEIGHTS, y=y) for v in some
    ]
    whole = [
        multivariate_normal(np.zeros(N), v * K + np.diag(1.44 / WEIGHTS)).logpdf(y) for v in some
    ]
    log_w = jnp.asarray(-0.5 * np.log(some) ** 2 / 0.49 + np.array(whole))
    draws = jax.tree.map(lambda *x: jnp.concatenate(x), *[f.draws for f in fits])
    draws = type(draws)(draws.hyper, {}, draws.kept, jax.nn.log_softmax(log_w))
    weighed = dataclasses.replace(fit, draws=draws)
    np.testing.assert_allclose(weighed.loo().elpd_i.values, exact, atol=1e-3)


MANY = np.random.default_rng(3).uniform(-3.0, 3.0, (150, 1))
COINS = (np.random.default_rng(4).uniform(size=150) < 0.5).astype(int)
FEW = {"inducing": np.linspace(-3.0, 3.0, 8)[:, None], "train_inducing": False}


@pytest.mark.slow
def test_a_q_that_no_weights_correct_is_told():
    """Of several functions, which have no cavities."""

    def narrow(X, y=None):
        with numpyro.plate("parts", 2):
            f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.5, 0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=3.0 * (f[0] + f[1])), obs=y)

    method = pg.SVGP(**FEW, hyper=pg.Fixed({}), max_steps=60)
    fit = pg.fit(narrow, method, 0, MANY, y=COINS, throw=False)
    with pytest.warns(UserWarning, match="could not be corrected by weights.*log_density"):
        assert fit.loo().warning


@pytest.mark.slow
def test_layers_are_told_what_their_loo_may_be_off_by(recwarn):
    """Truth by importance weights of 60 000 prior draws of g, f integrated: 1.70 nats."""
    rng = np.random.default_rng(13)
    rng.normal(size=24)
    x, noise = np.sort(rng.uniform(-2, 2, 14)), rng.normal(size=14)

    def layers(X, y=None):
        with numpyro.plate("units", 1):
            g = numpyro.sample("g", pg.GP(pg.kernels.RBF(0.5, 1.0), X, mean=pg.means.Identity()))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.7), g.T))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    fit = pg.fit(layers, pg.SVGP(), 0, x[:, None], y=np.tanh(3 * x) + 0.2 * noise)
    recwarn.clear()
    found = fit.loo()
    (told,) = [str(w.message) for w in recwarn]
    nats = float(re.search(r"none of the (\S+) nats", told)[1])
    assert found.elpd < 1.7 - 5.0 and 0.5 < (1.7 - found.elpd) / nats < 1.5
    assert f"{np.sum(found.pareto_k.values > found.good_k)} of 14 rows" in told


@pytest.mark.slow
def test_a_sparse_q_far_from_the_posterior_leaves_out_as_its_refits_do():
    """Weights cannot make it the posterior, as every k-hat says; its own leave-one-out is known."""

    def narrow(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(9.0, 0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=3.0 * f), obs=y)

    method = pg.SVGP(**FEW, hyper=pg.Fixed({}), max_steps=200)
    loo = pg.fit(narrow, method, 0, MANY, y=COINS, throw=False).loo()
    assert np.min(loo.pareto_k.values) > loo.good_k
    for n in (0, 40, 80, 120):
        rest = np.arange(150) != n
        fit = pg.fit(narrow, method, 0, MANY[rest], y=COINS[rest], throw=False)
        want = fit.log_density(MANY[n : n + 1], COINS[n : n + 1])[0]
        assert loo.elpd_i.values[n] == pytest.approx(float(want), abs=0.02)


def test_draws_with_inducing_variables_carry_the_ratio_of_prior_and_posterior():
    """E_q[p(u) / q(u)] = 1, and weighted draws of f have the prior's moments."""
    prior, points = pg.GP(pg.kernels.RBF(2.0, 0.8), jnp.asarray(X)), pg.Points(jnp.asarray(X[::3]))
    q = FromInducing(inducing=points, mean=0.3 * jnp.ones((2, 3)), reduction=jnp.full((2, 3), 0.2))
    f, log_ratio = draws_with_inducing(q.process(prior), prior, jax.random.key(0), 200_000)
    w = np.exp(np.asarray(log_ratio))
    ess = w.sum() ** 2 / (w**2).sum()
    assert ess > 10_000 and abs(w.mean() - 1.0) < 5.0 * np.sqrt(w.var() / w.size)
    found = np.einsum("s,scn,scm->nm", w, f, f) / w.sum() / 2
    np.testing.assert_allclose(found, np.asarray(prior.covariance_matrix), atol=10.0 / np.sqrt(ess))
