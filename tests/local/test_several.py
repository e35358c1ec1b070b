"""Several functions a datum: which of them meet, read off the jaxpr, and integrals over them
against closed forms and fine grids.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import stats
from scipy.special import logsumexp
from small_fits import made_fit

import ppl_gp as pg
from ppl_gp.draws import Moments
from ppl_gp.reading.interactions import dependence
from ppl_gp.results.compare.compare import Comparison, _same
from ppl_gp.results.integrals import cubature
from ppl_gp.results.predict import scores

F = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)))
COUNTS, WHICH = jnp.array([0.0, 1.0, 0.0, 3.0, 2.0]), jnp.array([0, 1, 2, 3, 0])
# {name: (log likelihood, groups of functions that it couples)}
LIKELIHOODS = {
    "outputs": (
        lambda f: dist.Normal(f.T, 0.1).to_event(1).log_prob(jnp.zeros((5, 4))),
        ({0}, {1}, {2}, {3}),
    ),
    "noise scale": (lambda f: dist.Normal(f[0], jnp.exp(f[1])).log_prob(0.3), ({0, 1}, {2}, {3})),
    # Additive for counts above zero, coupled at zero: what counts is what could be observed.
    "zero inflated": (
        lambda f: dist.ZeroInflatedPoisson(jnp.exp(-(f[0] ** 2)), jnp.exp(f[3])).log_prob(COUNTS),
        ({0, 3}, {1}, {2}),
    ),
    "softmax": (lambda f: dist.Categorical(logits=f.T).log_prob(WHICH), ({0, 1, 2, 3},)),
    "one output a row": (
        lambda f: dist.Normal(f[WHICH, jnp.arange(5)], 0.1).log_prob(0.0),
        ({0}, {1}, {2}, {3}),
    ),
    "sign": (
        lambda f: dist.Normal(jnp.where(f[2] > 0, f[1], -f[1]), 0.1).log_prob(0.0),
        ({0}, {1, 2}, {3}),
    ),
    "sum": (
        lambda f: dist.Normal(f[0] + f[1], 0.1).log_prob(0.0) + jnp.sin(f[2]),
        ({0, 1}, {2}, {3}),
    ),
}


@pytest.mark.parametrize(("log_lik", "groups"), LIKELIHOODS.values(), ids=LIKELIHOODS)
def test_coupled_functions_are_read_off_the_jaxpr(log_lik, groups):
    coupled = dependence(log_lik, 4, F).coupled
    assert all(
        coupled[i, j] == any({i, j} <= g for g in groups) for i in range(4) for j in range(4)
    )


def test_entries_know_their_functions_beyond_one_word():
    f = jnp.zeros((70, 2))
    (on,), coupled = dependence(lambda f: [jnp.tanh(f).T * 2.0], 70, f)
    assert np.array_equal(on.any(1), np.eye(70, dtype=bool)) and np.array_equal(
        coupled, np.eye(70, dtype=bool)
    )


def outputs(X, y=None, num=3):
    with numpyro.plate("units", num):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f.T, 0.1).to_event(1), obs=y)


@pytest.mark.slow
def test_outputs_with_a_function_each_are_exact():
    """The density of row n is a product over outputs at each draw, even where a thousand draws
    would miss it by tens of nats.
    """
    X, X_new = np.linspace(-2.0, 2.0, 12)[:, None], np.linspace(0.0, 6.0, 5)[:, None]
    fit = made_fit(outputs, {}, X, num_draws=2)
    Y = 3.0 * np.random.default_rng(1).normal(size=(5, 3))
    K, k = (np.asarray(pg.kernels.RBF(1.0, 1.0)(X, x)) for x in (X, X_new))
    K = K + 1e-8 * np.eye(12)
    mean = np.einsum("mn,spn->spm", np.linalg.solve(K, k).T, np.asarray(fit.latent["f"].mean))
    variance = 1.0 + 1e-8 - np.sum(k * np.linalg.solve(K, k), 0) + 0.01
    exact = logsumexp(stats.norm.logpdf(Y.T, mean, np.sqrt(variance)).sum(1), 0) - np.log(2)
    found, error = fit.log_density(X_new, Y, with_error=True)
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    of_draw = np.exp(stats.norm.logpdf(Y.T, mean, np.sqrt(variance)).sum(1) - exact)
    # nothing is drawn but the two draws
    np.testing.assert_allclose(error, np.std(of_draw, 0) / np.sqrt(2), atol=1e-6)
    p = fit.predict(X_new)
    np.testing.assert_allclose(p.mean, mean.mean(0).T, atol=1e-7)
    assert p.mean_error is None


def standard(num):
    """Independent functions of one datum, of mean 0 and variance 1."""
    return Moments(jnp.zeros((num, 1)), jnp.ones((num, 1)))


@pytest.mark.one_case
@pytest.mark.parametrize("y", [0.0, 3.0])
def test_two_coupled_functions_against_a_grid(y):
    """A noise scale that is a function: the ridge gets narrow where the noise is small, and the
    grid in f is refined with it.
    """
    log_g = lambda z: dist.Normal(z[0], jnp.exp(-1.0 + z[1])).log_prob(y)  # noqa: E731
    (found,), (error,) = cubature.log_integral(log_g, standard(2), cubature.Effort(0, False, 0))
    z = np.linspace(-9.0, 9.0, 20_001)
    # f is integrated in closed form
    given = stats.norm.logpdf(y, 0.0, np.sqrt(1.0 + np.exp(2.0 * (-1.0 + z))))
    exact = logsumexp(given + stats.norm.logpdf(z)) + np.log(z[1] - z[0])
    assert abs(found - exact) < 1e-5 and np.sqrt(error) < 1e-4


def test_more_functions_are_weighted_draws_with_an_honest_error():
    log_g = lambda z: dist.Normal(jnp.sum(z, 0), 0.1).log_prob(4.0)  # noqa: E731
    found, error = (
        np.asarray(x)[0]
        for x in cubature.log_integral(
            log_g, standard(5), cubature.Effort(0, False, 1000), random.key(0)
        )
    )
    exact = stats.norm.logpdf(4.0, 0.0, np.sqrt(5.01))
    assert abs(found - exact) < 4 * np.sqrt(error) and 0 < np.sqrt(error) < 0.1


def test_options_that_a_model_has_too_are_refused():
    def model(X, y=None, num_draws=3):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

    fit = made_fit(model, {}, F.T[:, :1])
    with pytest.raises(pg.DataError, match="num_draws.*its own options"):
        fit.log_density(np.zeros((2, 1)), np.zeros(2), num_draws=5)


def test_counts_are_scored_as_numbers():
    def trials(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Binomial(10, logits=f), obs=y)

    p = made_fit(trials, {}, F.T[:, :1]).predict(F.T[:3, :1])
    y = np.array([3, 9, 4])
    assert p.probs.shape == (3, 11)
    found = scores.error(p, y)
    assert (
        found.name == "RMSE"
        and abs(found.value - np.sqrt(np.mean((np.asarray(p.mean) - y) ** 2))) < 1e-12
    )
    assert scores.calibration(p, y).name == "coverage gap"
    with pytest.raises(pg.DataError, match=r"y_test has shape \(3, 1\)"):
        scores.error(p, y[:, None])


def test_arguments_that_are_trees_are_compared_by_their_leaves():
    a = {"u": np.arange(3.0), "v": (1, "x")}
    assert _same(a, {"u": np.arange(3.0), "v": (1, "x")})
    assert (
        not _same(a, {"u": np.arange(3.0) + 1.0, "v": (1, "x")})
        and not _same(a, np.arange(3.0))
        and not _same(a, None)
    )


@pytest.mark.parametrize(
    ("ess", "want"), [(100.0, 0.1), (0.5, None), (np.nan, None), (np.inf, None)]
)
def test_errors_of_a_reference_without_draws_enough_are_no_numbers(ess, want):
    fit = made_fit(outputs, {}, F.T[:, :1], num_draws=2)
    fit.stats["ess"] = ess
    assert Comparison(None, None, fits={"nuts": fit}).reference_error == want


@pytest.mark.parametrize("kind", ["poisson", "negative binomial"])
def test_outcomes_whose_samplers_loop_are_predicted(kind):
    """Draws of new outcomes stand in the trace that is differentiated twice. E[y] is a sum of two
    log-normal means, or one; counts whose rate is not known vary more than Poisson's.
    """

    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(0.5, 1.0), X))
        h = numpyro.sample("h", pg.GP(pg.kernels.RBF(0.5, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            fn = (
                dist.Poisson(jnp.exp(f) + jnp.exp(h))
                if kind == "poisson"
                else dist.NegativeBinomial2(jnp.exp(f), jnp.exp(h))
            )
            numpyro.sample("y", fn, obs=y)

    X, y = np.linspace(0.0, 3.0, 10), np.random.default_rng(1).poisson(3.0, 10)
    fit = pg.fit(model, pg.Laplace(), 0, X, y=y)
    found = fit.predict(X[:4] + 0.1)
    means = dict(zip(found.f_rows, np.exp(found.f_mean + 0.5 * found.f_variance), strict=True))
    wanted = means["f"] + means["h"] if kind == "poisson" else means["f"]
    np.testing.assert_allclose(found.mean, wanted, rtol=1e-4)
    assert np.all(found.variance > found.mean)
