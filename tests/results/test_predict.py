"""Prediction against integrals by SciPy, closed forms and mixtures computed one draw at a time."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from often import some
from scipy import integrate, special, stats
from small_fits import HYPER, NUM_NEW, classification, classifier, made_fit
from toy_models import one_gp

import ppl_gp as pg
from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import unwrap
from ppl_gp.infer.fit import stopwatch
from ppl_gp.results.query.query import Integration, query_at

X, Y, X_NEW = classification()


def gaussian_integral(function, mean, sd):
    """E[function(f)], f ~ N(mean, sd^2), by adaptive quadrature in pieces, with the edge near zero
    resolved.
    """
    low, high = mean - 12 * sd, mean + 12 * sd
    edges = np.unique(
        np.clip(np.r_[np.linspace(low, high, 25), -30, -5, -1, 0, 1, 5, 30], low, high)
    )

    def integrand(f):
        return function(f) * stats.norm.pdf(f, mean, sd)

    return sum(
        integrate.quad(integrand, a, b, epsabs=1e-14)[0]
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    )


def expectations(function, fit_prediction):
    means, sds = np.asarray(fit_prediction.f_mean), np.sqrt(np.asarray(fit_prediction.f_variance))
    return np.array([gaussian_integral(function, m, s) for m, s in zip(means, sds, strict=True)])


# -------------------- one Gaussian f, quadrature


@pytest.mark.one_case
@pytest.mark.parametrize("link", ["logit", "probit"])
@pytest.mark.parametrize("sd", [1.0, 30.0])
def test_class_probability_is_the_integral_of_the_models_own_likelihood(link, sd):
    fit = made_fit(classifier, {"lengthscale": 1.0, "variance": sd**2}, X, y=Y, link=link)
    p = fit.predict(X_NEW)
    assert p.mean.shape == p.variance.shape == p.probs.shape == (NUM_NEW,)
    truth = expectations(special.expit if link == "logit" else special.ndtr, p)
    np.testing.assert_allclose(p.probs, truth, atol=1e-9)
    np.testing.assert_allclose(p.mean, truth, atol=1e-9)
    np.testing.assert_allclose(p.variance, truth * (1 - truth), atol=1e-9)
    ones = np.ones(NUM_NEW, int)
    np.testing.assert_allclose(fit.log_density(X_NEW, ones), np.log(truth), atol=1e-8)
    np.testing.assert_allclose(np.exp(fit.log_density(X_NEW, 0 * ones)), 1 - truth, atol=1e-9)


def test_latent_moments_are_those_of_the_posterior_process():
    fit = made_fit(classifier, HYPER, X, y=Y)
    p, process = fit.predict(X_NEW), fit.posterior(X_NEW)
    np.testing.assert_allclose(p.f_mean, process.mean, rtol=1e-12)
    np.testing.assert_allclose(p.f_variance, process.variance, rtol=1e-12)


def test_remembered_link_gives_the_closed_form():
    fit = made_fit(classifier, HYPER, X, y=Y, link="probit")
    p = fit.predict(X_NEW)
    closed = stats.norm.cdf(p.f_mean / np.sqrt(1 + p.f_variance))  # R&W 3.82
    np.testing.assert_allclose(p.probs, closed, atol=1e-12)
    # ... and can be given anew.
    assert np.max(np.abs(fit.predict(X_NEW, link="logit").probs - closed)) > 1e-3


def toy(likelihood, **hyper):
    return made_fit(one_gp, {**HYPER, "s": 0.7, **hyper}, X, likelihood=likelihood)


def test_gaussian_and_poisson_moments():
    p = toy("gaussian").predict(X_NEW)
    np.testing.assert_allclose(p.mean, p.f_mean, rtol=1e-11)
    np.testing.assert_allclose(p.variance, p.f_variance + 0.7**2, rtol=1e-11)
    assert p.probs is None
    # y = exp(f) overdispersed: log-normal moments, E[y] + Var[exp f].
    p = toy("poisson", variance=9.0).predict(X_NEW)
    m, v = np.asarray(p.f_mean), np.asarray(p.f_variance)
    rate = np.exp(m + v / 2)
    np.testing.assert_allclose(p.mean, rate, rtol=1e-10)
    np.testing.assert_allclose(p.variance, rate + np.expm1(v) * rate**2, rtol=1e-10)


def test_moments_that_a_distribution_lacks():
    def cauchy(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        numpyro.sample("y", dist.Cauchy(f, 1.0), obs=y)

    p = made_fit(cauchy, {}, X).predict(X_NEW)
    assert np.all(np.isnan(p.mean)) and np.all(np.isfinite(p.f_mean))


@pytest.mark.slow
def test_gaussian_and_student_log_density():
    y = np.linspace(-2, 2, NUM_NEW)
    fit = toy("gaussian")
    p = fit.predict(X_NEW)
    exact = stats.norm.logpdf(y, p.f_mean, np.sqrt(p.f_variance + 0.7**2))
    np.testing.assert_allclose(fit.log_density(X_NEW, y), exact, rtol=1e-10)
    fit = toy("student_t")
    p = fit.predict(X_NEW)
    exact = [
        np.log(gaussian_integral(lambda f, t=t: stats.t.pdf(t, 3.0, f, 0.7), m, s))
        for t, m, s in zip(y, np.asarray(p.f_mean), np.sqrt(p.f_variance), strict=True)
    ]
    np.testing.assert_allclose(fit.log_density(X_NEW, y), exact, rtol=1e-9)


def test_probabilities_over_a_finite_support():
    p = toy("binomial").predict(X_NEW)
    assert p.probs.shape == (NUM_NEW, 6)
    truth = np.stack(
        [expectations(lambda f, k=k: stats.binom.pmf(k, 5, special.expit(f)), p) for k in range(6)],
        1,
    )
    np.testing.assert_allclose(p.probs, truth, atol=1e-11)
    np.testing.assert_allclose(p.mean, truth @ np.arange(6), rtol=1e-10)
    np.testing.assert_allclose(
        p.variance, truth @ np.arange(6) ** 2 - (truth @ np.arange(6)) ** 2, rtol=1e-9
    )


@pytest.mark.slow
def test_ordinal_probabilities_have_their_closed_form():
    cutpoints = np.array([-1.0, 0.2, 1.5])

    def ordinal(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", pg.observations.OrdinalProbit(f, jnp.asarray(cutpoints)), obs=y)

    p = made_fit(ordinal, {}, X).predict(X_NEW)
    z = (cutpoints - np.asarray(p.f_mean)[:, None]) / np.sqrt(1 + np.asarray(p.f_variance))[:, None]
    exact = np.diff(stats.norm.cdf(z), prepend=0.0, append=1.0)
    np.testing.assert_allclose(p.probs, exact, atol=1e-12)


def two_outputs(X, y=None, z=None):
    """Two observed sites on one function: counts, and two repeated measurements a datum, under a
    scale handler.
    """
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]), numpyro.handlers.scale(scale=3.0):
        numpyro.sample("y", dist.Bernoulli(logits=2 * f), obs=y)
        with numpyro.plate("repeat", 2):
            numpyro.sample("z", dist.Normal(f, jnp.array([[0.5], [1.0]])), obs=z)


def test_several_observed_sites_share_the_integral_over_f():
    fit = made_fit(two_outputs, {}, X)
    p = fit.predict(X_NEW)
    assert p.f_mean.shape == p.probs["y"].shape == (NUM_NEW,) and p.probs["z"] is None
    np.testing.assert_allclose(p.mean["z"], np.stack([p.f_mean] * 2), rtol=1e-11)
    np.testing.assert_allclose(
        p.variance["z"], p.f_variance + np.array([[0.25], [1.0]]), rtol=1e-11
    )
    y, z = np.arange(NUM_NEW) % 2, np.stack([np.linspace(-1, 1, NUM_NEW)] * 2) + [[0.1], [-0.3]]

    def likelihood(f, n):
        bernoulli = special.expit((2 * y[n] - 1) * 2 * f)
        return bernoulli * stats.norm.pdf(z[0, n], f, 0.5) * stats.norm.pdf(z[1, n], f, 1.0)

    m, s = np.asarray(p.f_mean), np.sqrt(p.f_variance)
    exact = [
        np.log(gaussian_integral(lambda f, n=n: likelihood(f, n), m[n], s[n]))
        for n in range(NUM_NEW)
    ]
    np.testing.assert_allclose(fit.log_density(X_NEW, y, z=z), exact, rtol=1e-9)


def test_a_likelihood_written_as_a_factor_predicts_f_alone():
    def factor(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.factor("y", -0.5 * f**2 if y is None else dist.Normal(f, 0.5).log_prob(y))

    fit = made_fit(factor, {}, X, y=X[:, 0])
    p = fit.predict(X_NEW)
    assert (
        p.mean is None and p.variance is None and p.probs is None and p.f_mean.shape == (NUM_NEW,)
    )
    exact = stats.norm.logpdf(X_NEW[:, 0], p.f_mean, np.sqrt(p.f_variance + 0.25))
    np.testing.assert_allclose(fit.log_density(X_NEW, X_NEW[:, 0]), exact, rtol=1e-10)
    assert fit.sample(0, X_NEW, 2).y is None


# -------------------- mixtures over draws


def one_draw(fit, s):
    """The fit that has draw s alone."""
    return dataclasses.replace(fit, draws=fit.draws.part(slice(s, s + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["laplace_sample", "nuts"], "laplace_sample"))
def test_sampled_fits_predict_the_mixture_over_all_draws(small_fit, name):
    fit = small_fit(name)
    mixed, y = fit.predict(X_NEW), np.arange(NUM_NEW) % 2
    each = [one_draw(fit, s) for s in range(50)]
    parts = [f.predict(X_NEW) for f in each]
    means, variances = (np.array([getattr(p, a) for p in parts]) for a in ("f_mean", "f_variance"))
    np.testing.assert_allclose(mixed.f_mean, means.mean(0), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(mixed.f_variance, variances.mean(0) + means.var(0), rtol=1e-9)
    probs = np.array([p.probs for p in parts])
    np.testing.assert_allclose(mixed.probs, probs.mean(0), rtol=1e-9)
    np.testing.assert_allclose(mixed.variance, probs.mean(0) * (1 - probs.mean(0)), rtol=1e-9)
    densities = np.array([f.log_density(X_NEW, y) for f in each])
    np.testing.assert_allclose(
        fit.log_density(X_NEW, y), special.logsumexp(densities, 0) - np.log(50), rtol=1e-9
    )
    assert np.std(means, 0).max() > 0.05  # the draws do differ


def test_draws_of_f_are_conditioned_on_exactly():
    fit = made_fit(classifier, HYPER, X, num_draws=3, y=Y)
    means, variances = [], []
    for s in range(3):
        kernel = pg.kernels.RBF(*(fit.hyper[k][s] for k in ("variance", "lengthscale")))
        K = np.asarray(kernel(X, X)) + 1e-8 * float(fit.hyper["variance"][s]) * np.eye(len(X))
        k = np.asarray(kernel(X, X_NEW))
        means.append(k.T @ np.linalg.solve(K, fit.latent["f"].mean[s]))
        variances.append(float(fit.hyper["variance"][s]) - np.sum(k * np.linalg.solve(K, k), 0))
    p = fit.predict(X_NEW)
    scale = np.abs(means).max()
    np.testing.assert_allclose(p.f_mean, np.mean(means, 0), atol=1e-7 * scale)
    np.testing.assert_allclose(p.f_variance, np.mean(variances, 0) + np.var(means, 0), rtol=1e-6)


# -------------------- several functions


def additive(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X[:, :1]))
    with numpyro.plate("functions", 2):
        g = numpyro.sample("g", pg.GP(pg.kernels.RBF(0.5, 2.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + g[0] - 2 * g[1], 0.3), obs=y)


def exact_mixture(fit, weights):
    """Mean and variance of y = sum of weights x functions + noise 0.3, from the conditionals of
    each posterior draw.
    """
    case = query_at(fit, X_NEW, (), {})
    means, variances = [], []

    @eqx.filter_jit
    def conditionals(case, draw):
        new = case.trace(draw, {})
        return {k: c.marginals(unwrap(new[k]["fn"])) for k, c in case.conditionals(draw).items()}

    for s in range(case.draws.num):
        given = conditionals(case, case.draws.at(s))
        means.append(sum(w @ jnp.atleast_2d(given[k].mean) for k, w in weights.items()))
        variances.append(
            sum(w**2 @ jnp.atleast_2d(given[k].variance) for k, w in weights.items()) + 0.09
        )
    return np.mean(means, 0), np.mean(variances, 0) + np.var(means, 0)


@pytest.mark.slow
def test_the_error_of_a_log_density_is_its_scatter_over_sets_of_draws():
    """Draws of the posterior are themselves few: their part of the error is told, also where
    quadrature does the rest.
    """
    found = [
        made_fit(classifier, HYPER, X, y=Y, num_draws=20, seed=s).log_density(
            X_NEW, np.ones(NUM_NEW, int), with_error=True
        )
        for s in range(40)
    ]
    values, errors = (np.stack(x) for x in zip(*found, strict=True))
    ratio = np.sqrt(np.mean(errors**2, 0)) / np.std(values, 0, ddof=1)
    assert np.all(ratio > 0.6) and np.all(ratio < 1.6) and np.min(errors) > 0.0


@pytest.mark.slow
def test_a_log_density_that_rests_on_few_draws_is_warned_of():
    fit = made_fit(additive, {}, X, num_draws=4)
    with pytest.warns(UserWarning, match=r"row\(s\) \[0.*very few draws"):
        fit.log_density(X_NEW, np.full(NUM_NEW, 40.0))


@pytest.mark.slow
def test_several_gp_sites_and_several_functions_at_a_site():
    fit = made_fit(additive, {}, X, num_draws=4)
    assert query_at(fit, X_NEW, (), {}).integration is Integration.functions
    p = fit.predict(X_NEW)
    assert p.f_mean["f"].shape == (NUM_NEW,) and p.f_variance["g"].shape == (2, NUM_NEW)
    mean, variance = exact_mixture(fit, {"f": np.array([1.0]), "g": np.array([1.0, -2.0])})
    np.testing.assert_allclose(p.mean, mean, atol=1e-6)
    np.testing.assert_allclose(p.variance, variance, rtol=1e-6)
    assert p.mean_error is None
    density, error = one_draw(fit, 0).log_density(X_NEW, mean, with_error=True)
    assert (
        density.shape == error.shape == (NUM_NEW,)
        and np.all(np.isfinite(density))
        and np.all(error < 2e-2)
    )
    draws = fit.sample(0, X_NEW, 6)
    assert draws.f["g"].shape == (6, 2, NUM_NEW) and draws.y.shape == (6, NUM_NEW)


def chained(X, y=None):
    """A GP fed by a GP, and a local latent a datum."""
    h = numpyro.sample("h", pg.GP(pg.kernels.RBF(1.0, 1.0), X, mean=lambda X: X[:, 0]))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), h))
    with numpyro.plate("data", X.shape[0]):
        extra = numpyro.sample("extra", dist.Normal(0.0, 2.0))
        numpyro.sample("y", dist.Normal(f + extra, 0.5), obs=y)


@pytest.mark.slow
def test_a_gp_fed_by_a_gp_and_local_latents_are_drawn_at_the_new_inputs():
    # as many as in training, where the local latents' shape alone would not give them away
    num_new = len(X)
    X_new = np.resize(X_NEW, (num_new, 2))
    fit = made_fit(chained, {"extra": np.ones(len(X))}, X, num_draws=5)
    p = fit.predict(X_new)
    # The local latents' prior, not their training values: variance 4 + 0.25 on top of f's, mean
    # zero.
    np.testing.assert_allclose(p.variance, p.f_variance["f"] + 4.25, rtol=0.25)
    assert np.all(np.abs(p.mean - p.f_mean["f"]) < 5 * np.sqrt(p.variance / 1000))
    assert p.f_variance["f"].shape == (num_new,) and fit.sample(1, X_new, 3).f["h"].shape == (
        3,
        num_new,
    )
    # The layer below has its prior mean, x_1, where data are far away.
    np.testing.assert_allclose(
        fit.predict(X_new + 100.0).f_mean["h"], X_new[:, 0] + 100.0, atol=1e-6
    )
    with pytest.raises(ModelError, match="fed by another .*fit.predict"):
        fit.posterior(X_new)


FIRST, SECOND = np.array([0, 2, 3]), np.array([1, 0, 2])
WHICH = {"first": FIRST, "second": SECOND}


def compared(X, first, second, y=None):
    """Each row sees two values of f, at rows of X that are not its own."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", first.shape[0]):
        numpyro.sample("y", dist.Normal(f[first] - f[second], 0.1), obs=y)


def test_a_likelihood_that_sees_other_rows_is_predicted_from_joint_draws():
    fit = made_fit(compared, {}, X, num_draws=2, y=np.zeros(3), **WHICH)
    assert query_at(fit, X_NEW, (), WHICH).integration is Integration.joint_draws
    p = fit.predict(X_NEW, **WHICH)
    means, variances = [], []
    pairs = np.eye(NUM_NEW)[FIRST] - np.eye(NUM_NEW)[SECOND]
    for s in range(2):
        process = one_draw(fit, s).posterior(X_NEW, joint=True).component_distribution
        means.append(pairs @ process.mean[0])
        variances.append(np.diag(pairs @ process.covariance_matrix[0] @ pairs.T) + 0.01)
    variance = np.mean(variances, 0) + np.var(means, 0)
    assert np.all(np.abs(p.mean - np.mean(means, 0)) < 5 * np.sqrt(variance / 1000))
    np.testing.assert_allclose(p.variance, variance, rtol=0.25)


# -------------------- joint draws


def test_joint_draws_have_the_process_covariance():
    fit = made_fit(classifier, HYPER, X, y=Y)
    draws = fit.sample(random.key(1), X_NEW, 20_000)
    process = fit.posterior(X_NEW, joint=True)
    sd = np.sqrt(np.diag(process.covariance_matrix))
    assert np.all(np.abs(draws.f.mean(0) - process.mean) < 5 * sd / np.sqrt(20_000))
    np.testing.assert_allclose(
        np.cov(draws.f.T) / np.outer(sd, sd),
        process.covariance_matrix / np.outer(sd, sd),
        atol=0.04,
    )
    assert set(np.unique(draws.y)) == {0, 1}
    assert np.all(np.abs(draws.y.mean(0) - fit.predict(X_NEW).probs) < 5 * 0.5 / np.sqrt(20_000))
    np.testing.assert_array_equal(fit.sample(1, X_NEW, 20_000).f, draws.f)
    assert not np.array_equal(fit.sample(2, X_NEW, 20_000).f, draws.f)


def test_draws_of_a_sampled_fit_come_from_all_posterior_draws():
    fit = made_fit(classifier, HYPER, X, num_draws=4, y=Y)
    kept = jax.tree.map(lambda f: f * 0 + 100.0 * jnp.arange(4)[:, None], fit.latent)
    far = dataclasses.replace(fit, draws=Draws.equal(fit.hyper, kept))
    at_training = np.round(np.asarray(far.sample(0, X, 10).f[:, 0]) / 100.0)
    assert sorted(np.bincount(at_training.astype(int))) == [2, 2, 3, 3]
    assert np.round(np.asarray(far.sample(0, X, 2).f[:, 0]) / 100.0).tolist() == [0.0, 2.0]


# -------------------- the cheap probability


def test_mackay_approximation_is_prml_4_153():
    fit = made_fit(two_logits, {}, X, y=Y)
    p = fit.predict(X_NEW, link_approximation="mackay")
    m, v = 0.3 + 2 * p.f_mean, 4 * p.f_variance
    expected = special.expit(m / np.sqrt(1 + np.pi * v / 8))
    np.testing.assert_allclose(p.probs, expected, rtol=1e-12)
    np.testing.assert_allclose(p.variance, expected * (1 - expected), rtol=1e-12)
    exact = fit.predict(X_NEW).probs
    assert 1e-6 < np.max(np.abs(p.probs - exact)) < 0.02


def two_logits(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    numpyro.sample("y", dist.Bernoulli(logits=0.3 + 2 * f).to_event(1), obs=y)


def test_mackay_approximation_says_where_it_does_not_apply():
    with pytest.raises(DataError, match="link_approximation='probit'.*'mackay'"):
        made_fit(classifier, HYPER, X, y=Y).predict(X_NEW, link_approximation="probit")
    with pytest.raises(ModelError, match="logits affine in f"):
        made_fit(classifier, HYPER, X, y=Y, link="probit").predict(
            X_NEW, link_approximation="mackay"
        )

    def bent(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        numpyro.sample("y", dist.Bernoulli(logits=f**3), obs=y)

    with pytest.raises(ModelError, match="logits affine in f"):
        made_fit(bent, {}, X, y=Y).predict(X_NEW, link_approximation="mackay")

    def repeated(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("repeats", 3, dim=-2), numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    with pytest.raises(ModelError, match="one Bernoulli.* a row"):
        made_fit(repeated, {}, X, y=np.stack([Y] * 3)).predict(X_NEW, link_approximation="mackay")


# -------------------- arguments


@pytest.mark.parametrize(
    ("X_new", "message"),
    [
        (np.full((3, 2), np.nan), "X_new has nan at index"),
        (np.array([[0.0, np.inf]]), "X_new has inf at index"),
        (np.zeros((3, 3)), r"X_new has shape \(3, 3\), and the training inputs \(25, 2\)"),
        (np.zeros(3), r"X_new has shape \(3,\)"),
        (np.zeros((0, 2)), "at least one row"),
        (np.array([["a", "b"]]), "convert them to numbers"),
    ],
)
def test_bad_new_inputs(X_new, message):
    fit = made_fit(classifier, HYPER, X, y=Y)
    for call in (fit.predict, lambda x: fit.log_density(x, Y[:3]), lambda x: fit.sample(0, x, 2)):
        with pytest.raises(DataError, match=message):
            call(X_new)


def test_bad_observations_and_counts():
    fit = made_fit(classifier, HYPER, X, y=Y)
    with pytest.raises(DataError, match="site 'y' observes .*-1.*outside its support"):
        fit.log_density(X_NEW, 2 * (np.arange(NUM_NEW) % 2) - 1)
    with pytest.raises(DataError, match="y_new has shape \\(3,\\) and X_new 7"):
        fit.log_density(X_NEW, Y[:3])
    with pytest.raises(DataError, match="observes shape"):
        fit.log_density(X_NEW, np.zeros((NUM_NEW, 1)))
    with pytest.raises(DataError, match="argument 'y' has nan"):
        fit.log_density(X_NEW, np.full(NUM_NEW, np.nan))
    with pytest.raises(DataError, match="num_samples=0"):
        fit.sample(0, X_NEW, 0)
    with pytest.raises(DataError, match="array \\(7,\\).*other arguments after it"):
        fit.sample(0, X_NEW, np.ones(7))
    with pytest.raises(DataError, match="y is what is predicted"):
        fit.predict(X_NEW, y=np.zeros(NUM_NEW))


def shifted(X, offset, y=None, noise=None, flag=True, mask=None):
    """An array that shapes the likelihood, one that only masks it, and a flag."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    shift = offset if flag else -offset
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample(
            "y", dist.Normal(f + shift, 0.1 if noise is None else noise), obs=y, obs_mask=mask
        )


def test_arrays_are_given_again_and_other_arguments_remembered():
    offset, mask = np.full(len(X), 5.0), np.arange(len(X)) > 2
    fit = made_fit(
        shifted, {}, X, offset=offset, noise=np.full(len(X), 0.2), flag=False, y=X[:, 0], mask=mask
    )
    new = {"offset": np.full(NUM_NEW, 7.0), "noise": np.full(NUM_NEW, 0.3)}
    p = fit.predict(X_NEW, **new)
    np.testing.assert_allclose(p.mean, p.f_mean - 7.0, rtol=1e-11)
    np.testing.assert_allclose(p.variance, p.f_variance + 0.09, rtol=1e-9)
    np.testing.assert_allclose(
        fit.predict(X_NEW, new["offset"], noise=new["noise"], flag=True).mean,
        p.f_mean + 7.0,
        rtol=1e-11,
    )
    # The mask of training is no input: it may be left out, and where it is given it leaves rows out
    # of the score.
    score = fit.log_density(X_NEW, X_NEW[:, 0], **new)
    masked = fit.log_density(X_NEW, X_NEW[:, 0], **new, mask=np.arange(NUM_NEW) > 2)
    np.testing.assert_allclose(masked[:3], 0.0, atol=1e-12)
    np.testing.assert_allclose(masked[3:], score[3:], rtol=1e-10)
    np.testing.assert_allclose(
        fit.predict(X_NEW, **new, mask=np.arange(NUM_NEW) > 2).mean, p.mean, rtol=1e-12
    )
    for missing in ("offset", "noise"):
        with pytest.raises(DataError, match=f"predicting needs.*{missing}"):
            fit.predict(X_NEW, **{k: v for k, v in new.items() if k != missing})
    with pytest.raises(DataError, match="give one entry per row"):
        fit.predict(X_NEW, **{**new, "offset": np.zeros(4)})


def test_a_second_call_compiles_nothing(small_fit):
    for fit in (small_fit("ep"), small_fit("nuts")):
        y = np.arange(NUM_NEW) % 2

        def calls(shift, fit=fit, y=y):
            fit.predict(X_NEW + shift)
            fit.predict(X_NEW + shift, link_approximation="mackay")
            fit.log_density(X_NEW + shift, 1 - y if shift else y)
            fit.sample(int(shift), X_NEW + shift, 5)

        calls(0)
        with stopwatch() as watch:
            calls(1.0)
        assert watch["compilations"] == 0


def test_float32_is_kept_and_close_to_float64():
    fit = made_fit(classifier, HYPER, X, y=Y)
    exact = fit.predict(X_NEW)
    with jax.enable_x64(False):
        draws, args = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x, np.float32)), (fit.draws, fit.args)
        )
        single = dataclasses.replace(fit, draws=draws, args=args)
        p = single.predict(X_NEW)
        density, draws = (
            single.log_density(X_NEW, np.ones(NUM_NEW, int)),
            single.sample(0, X_NEW, 3),
        )
        assert p.f_mean.dtype == p.probs.dtype == density.dtype == draws.f.dtype == jnp.float32
        np.testing.assert_allclose(p.probs, exact.probs, atol=1e-4)
        np.testing.assert_allclose(density, np.log(exact.probs), atol=1e-3)
        assert np.all(np.isfinite(draws.f))
