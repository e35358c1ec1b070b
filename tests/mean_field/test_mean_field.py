"""Mean field by coordinate ascent: exact where it is, published bounds, scikit-learn's mixture, and
no false conjugacy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conjugate_families import NAMES, families
from jax import random
from scipy.special import gammaln, logsumexp, multigammaln
from scipy.stats import multivariate_t

import ppl_gp as pg
from models.factor_analysis import factor_analysis
from models.linear_regression import linear_regression
from models.mixture import mixture
from ppl_gp.mean_field.discrete import discrete
from ppl_gp.mean_field.paired import NormalGamma
from ppl_gp.mean_field.sweep import begin

TEN = np.random.RandomState(1).normal(5, 10, 10)  # BayesPy's quick start
RNG = np.random.default_rng(3)
ROWS = np.concatenate([RNG.normal(-2, 0.7, (18, 2)), RNG.normal(2, 1.0, (22, 2))])


def unknown_mean_and_precision(y=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1e3))
    tau = numpyro.sample("tau", dist.Gamma(1e-6, 1e-6))
    with numpyro.plate("data", 10):
        numpyro.sample("y", dist.Normal(mu, 1.0 / jnp.sqrt(tau)), obs=y)


def scaled_by_its_precision(y=None):
    """PRML 10.1.3."""
    tau = numpyro.sample("tau", dist.Gamma(2.0, 50.0))
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0 / jnp.sqrt(tau)))
    with numpyro.plate("data", 10):
        numpyro.sample("y", dist.Normal(mu, 1.0 / jnp.sqrt(tau)), obs=y)


def gauss_wishart(X, prior=2.0):
    D = X.shape[1]
    W = numpyro.sample("W", dist.Wishart(prior, rate_matrix=jnp.eye(D)))
    m = numpyro.sample("m", dist.MultivariateNormal(jnp.zeros(D), precision_matrix=W))
    with numpyro.plate("data", len(X)):
        numpyro.sample("x", dist.MultivariateNormal(m, precision_matrix=W), obs=X)


@pytest.mark.slow
def test_the_bounds_of_the_quick_start_are_those_of_another_program():
    """BayesPy 0.6.1: -60.20956, -58.20527, -58.20290, -58.20288."""
    fit = pg.fit(unknown_mean_and_precision, pg.MeanField(), 0, y=TEN)
    assert fit.result == "converged" and fit.factors == [["mu"], ["tau"]]
    published = [-60.20956, -58.20527, -58.20290, -58.20288]
    np.testing.assert_allclose(fit.stats["bounds"][:4], published, atol=5e-6)
    assert abs(fit.log_evidence + 58.20287498) < 1e-7


@pytest.mark.slow
def test_a_pair_is_exact_and_its_factors_are_below():
    """Exact evidence -42.4778489 and Gamma(7, 766.496748); factorised -42.5131375, q(mu) = N(3.66,
    precision .1004570), Gamma(7.5, 821.246515): computed by independent NumPy.
    """
    pair = pg.fit(scaled_by_its_precision, pg.MeanField(), 0, y=TEN)
    apart = pg.fit(scaled_by_its_precision, pg.MeanField(factors=[["mu"], ["tau"]]), 0, y=TEN)
    named = pg.fit(scaled_by_its_precision, pg.MeanField(factors=[["tau", "mu"]]), 0, y=TEN)
    assert pair.factors == named.factors == [["mu", "tau"]] and len(apart.factors) == 2
    np.testing.assert_allclose([pair.log_evidence, named.log_evidence], -42.4778489, atol=1e-7)
    np.testing.assert_allclose(apart.log_evidence, -42.5131375, atol=1e-7)
    tau, mu = apart.sites["tau"], apart.sites["mu"]
    np.testing.assert_allclose([tau.concentration, tau.rate], [7.5, 821.246515], rtol=1e-6)
    np.testing.assert_allclose([mu.mean, mu.variance], [3.6623555, 1 / 0.1004570], rtol=1e-6)
    np.testing.assert_allclose(pair.sites["tau"].rate, 766.496748, rtol=1e-8)


@pytest.mark.slow
def test_a_gauss_wishart_block_has_the_exact_evidence():
    N, D = ROWS.shape
    fit = pg.fit(gauss_wishart, pg.MeanField(), 0, ROWS)
    mean = ROWS.mean(0)
    scatter = (ROWS - mean).T @ (ROWS - mean)
    rate = np.eye(D) + scatter + N / (N + 1) * np.outer(mean, mean)
    exact = (
        -0.5 * N * D * np.log(np.pi)
        - 0.5 * D * np.log(N + 1)
        + multigammaln(0.5 * (2 + N), D)
        - multigammaln(1.0, D)
        - 0.5 * (2 + N) * np.linalg.slogdet(rate)[1]
    )
    np.testing.assert_allclose(fit.log_evidence, exact, atol=1e-8)
    np.testing.assert_allclose(fit.sites["W"].mean, (2 + N) * np.linalg.inv(rate), rtol=1e-8)


@pytest.mark.slow
def test_a_factorised_gaussian_has_the_precisions_of_the_joint():
    """Variances .5 and 1 against marginals 1.7857 and 3.5714; the bound .6364828 below."""
    L = np.linalg.cholesky([[2.0, 1.2], [1.2, 1.0]])

    def correlated(_):
        a = numpyro.sample("a", dist.ImproperUniform(dist.constraints.real, (), ()))
        b = numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), ()))
        white = jnp.asarray(L.T) @ jnp.stack([a, b])
        numpyro.sample("y", dist.Normal(white, 1.0).to_event(1), obs=jnp.zeros(2))

    apart = pg.fit(correlated, pg.MeanField(), 0, np.zeros(1))
    joint = pg.fit(correlated, pg.MeanField(factors=[["a", "b"]]), 0, np.zeros(1))
    np.testing.assert_allclose(
        [apart.sites["a"].variance, apart.sites["b"].variance], [0.5, 1.0], rtol=1e-8
    )
    np.testing.assert_allclose(joint.log_evidence - apart.log_evidence, 0.6364828, atol=1e-7)
    np.testing.assert_allclose(joint.sites["b"].variance, 3.5714286, rtol=1e-6)


@pytest.fixture(scope="module")
def mixed():
    start = np.zeros(len(ROWS), int)
    start[::3] = 1
    start[1::5] = 2
    fit = pg.fit(
        mixture, pg.MeanField(init={"z": start}, max_steps=2000), 0, ROWS, 3, concentration=0.5
    )
    return start, fit


@pytest.mark.slow
def test_a_mixture_is_that_of_scikit_learn_from_the_same_start(mixed):
    from sklearn.mixture import BayesianGaussianMixture

    start, fit = mixed
    other = BayesianGaussianMixture(
        n_components=3,
        tol=1e-14,
        reg_covar=0.0,
        max_iter=5000,
        weight_concentration_prior_type="dirichlet_distribution",
        weight_concentration_prior=0.5,
        mean_precision_prior=1.0,
        mean_prior=np.zeros(2),
        degrees_of_freedom_prior=2.0,
        covariance_prior=np.eye(2),
    )
    labels = np.clip(np.eye(3)[start], np.finfo(float).tiny, None)
    other._initialize_parameters = lambda X, *_, **__: other._initialize(X, labels)
    other.fit(ROWS)
    assert fit.result == "converged" and np.all(np.diff(fit.stats["bounds"]) > -1e-9)
    assert fit.factors == [["z"], ["weights"], ["mean", "precision"]]
    np.testing.assert_allclose(fit.sites["z"].probs, other.predict_proba(ROWS), atol=1e-6)
    np.testing.assert_allclose(fit.sites["mean"].loc, other.means_, atol=1e-6)
    np.testing.assert_allclose(
        fit.sites["weights"].concentration, other.weight_concentration_, atol=1e-6
    )


@pytest.mark.slow
def test_a_saved_mixture_is_the_same(mixed, tmp_path):
    _, fit = mixed
    loaded = pg.load(fit.save(tmp_path / "mixture.zip"), mixture)
    assert loaded.factors == fit.factors and loaded.log_evidence == fit.log_evidence
    assert np.array_equal(loaded.sites["z"].probs, fit.sites["z"].probs)
    assert np.array_equal(loaded.hyper["mean"], fit.hyper["mean"])


@pytest.mark.slow
def test_all_restarts_are_kept_and_the_best_is_the_fit():
    fit = pg.fit(mixture, pg.MeanField(restarts=3), 1, ROWS, num_components=2, concentration=0.5)
    assert len(fit.stats["restart_bounds"]) == 3
    assert fit.log_evidence == np.max(fit.stats["restart_bounds"])


def test_a_second_chunk_of_sweeps_has_the_types_of_the_first():
    """Or it is traced and compiled again, in every fit of more than ten sweeps."""
    state = begin([])
    assert not (state.bound.aval.weak_type or state.gain.aval.weak_type)
    assert state.bound.dtype == state.gain.dtype == jnp.float64


def logistic(x, y=None):
    alpha = numpyro.sample("alpha", dist.Gamma(1.0, 1.0))
    with numpyro.plate("columns", 2):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0 / jnp.sqrt(alpha)))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=w[0] + w[1] * x), obs=y)


@pytest.mark.slow
def test_logistic_regression_takes_the_local_bound_and_is_that_of_the_gp():
    """PRML 10.6.3 by its own equations (10.156 to 10.163, 10.177)."""
    x = RNG.normal(size=20)
    y = (x + RNG.normal(size=20) > 0).astype(int)
    fit = pg.fit(logistic, pg.MeanField(), 0, x, y=y)
    assert fit.stats["local_bounds"] == ["y"] and fit.sites["w"].event_shape == (2,)
    Phi, xi, b = np.stack([np.ones(20), x], 1), np.ones(20), 1.0
    for _ in range(2000):
        rate = np.tanh(xi / 2) / (4 * xi)
        S = np.linalg.inv(2.0 / b * np.eye(2) + 2 * Phi.T @ (rate[:, None] * Phi))
        m = S @ Phi.T @ (y - 0.5)
        second = S + np.outer(m, m)
        b = 1.0 + 0.5 * np.trace(second)
        xi = np.sqrt(np.einsum("ni,ij,nj->n", Phi, second, Phi))
    np.testing.assert_allclose(fit.sites["w"].mean, m, atol=1e-5)
    np.testing.assert_allclose(fit.sites["w"].covariance_matrix, S, atol=1e-5)
    np.testing.assert_allclose(fit.sites["alpha"].rate, b, rtol=1e-5)
    bound = (
        np.sum(-np.logaddexp(0, -xi) - xi / 2 + rate * xi**2)
        + 0.5 * m @ np.linalg.inv(S) @ m
        + 0.5 * np.linalg.slogdet(S)[1]
        + 0.5 * 2 * (-np.log(b))
    )  # less E[log p(w | alpha)] - E[log q], which q(alpha)'s terms complete:
    a = 2.0
    bound += gammaln(a) - a * np.log(b) + np.log(b) + np.trace(second) * a / b / 2
    assert abs(fit.log_evidence - bound) < 1e-4


def latent_gaussians(X, y=None, links=True):
    """Links of the user's own: a precision a * tau, a mean A [u, v], a variance as inverse
    gamma.
    """
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    v = numpyro.sample("v", dist.InverseGamma(3.0, 2.0))
    u = numpyro.sample("u", dist.Normal(0.0, jnp.sqrt(v)).expand([2]).to_event(1))
    c = numpyro.sample("c", dist.Normal(0.5, 2.0))
    with numpyro.plate("rows", len(X)):
        h = numpyro.sample("h", dist.Normal(c, 0.7))
        mean = X @ jnp.concatenate([u, c[None]]) + h
        numpyro.sample("y", dist.Normal(mean, 1.0 / jnp.sqrt(3.0 * tau)), obs=y)


@pytest.mark.slow
def test_links_of_the_user_are_integrated_exactly_and_the_bound_holds():
    """Against importance sampling with q as proposal: the bound is below, and is the mean of the
    log weights.
    """
    X = RNG.normal(size=(6, 3))
    y = X @ [1.0, -1.0, 0.3] + 0.4 * RNG.normal(size=6)
    fit = pg.fit(latent_gaussians, pg.MeanField(num_draws=4000), 0, X, y=y)
    assert np.all(np.diff(fit.stats["bounds"]) > -1e-9)
    assert fit.sites["h"].batch_shape == (6,) and fit.sites["u"].event_shape == (2,)
    draws = {**fit.draws.known}

    def log_joint(values):
        trace = numpyro.handlers.trace(
            numpyro.handlers.substitute(latent_gaussians, values)
        ).get_trace(X, y=y)
        return sum(
            jnp.sum(s["fn"].log_prob(s["value"]))
            for s in trace.values()
            if "fn" in s and s["type"] == "sample"
        )

    log_p = jax.vmap(log_joint)(draws)
    log_q = 0.0
    for name, q in fit.sites.items():
        term = q.log_prob(draws[name])
        log_q = log_q + term.reshape(len(log_p), -1).sum(-1)
    weights = np.asarray(log_p - log_q)
    error = weights.std() / np.sqrt(len(weights))
    assert abs(weights.mean() - fit.log_evidence) < 4 * error
    truth = np.log(np.mean(np.exp(weights - weights.max()))) + weights.max()
    assert fit.log_evidence < truth


@pytest.mark.slow
def test_a_gp_beside_gamma_noise():
    """At q(tau), q(f) is the exact posterior with the noise 1 / E[tau]; at q(f), q(tau) is
    closed.
    """
    X = np.sort(RNG.uniform(-2, 2, 12))
    y = np.sin(2 * X) + 0.2 * RNG.normal(size=12)

    def model(X, y=None):
        tau = numpyro.sample("tau", dist.Gamma(2.0, 0.1))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.7), X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 1.0 / jnp.sqrt(tau)), obs=y)

    fit = pg.fit(model, pg.MeanField(), 0, X, y=y)
    tau, f = fit.sites["tau"], fit.sites["f"]
    K = np.exp(-0.5 * (X[:, None] - X) ** 2 / 0.49)
    noise = np.eye(12) / float(tau.mean)
    np.testing.assert_allclose(f.mean, K @ np.linalg.solve(K + noise, y), atol=1e-4)
    residual = np.sum((y - f.mean) ** 2) + np.trace(f.covariance_matrix)
    np.testing.assert_allclose([tau.concentration, tau.rate], [8.0, 0.1 + residual / 2], rtol=1e-4)
    assert np.all(np.diff(fit.stats["bounds"]) > -1e-9)
    assert 0.0 < _evidence_over_the_noise(K, y) - fit.log_evidence < 0.5
    new = np.array([-2.5, 0.1, 30.0])
    found, across = fit.predict(new), np.exp(-0.5 * (new[:, None] - X) ** 2 / 0.49)
    exact = across @ np.linalg.solve(K + noise, y)
    variance = 1.0 - np.einsum("mn,nm->m", across, np.linalg.solve(K + noise, across.T))
    np.testing.assert_array_less(np.abs(found.f_mean - exact), 5.0 * np.sqrt(variance / 1000))
    np.testing.assert_allclose(found.f_variance, variance, rtol=0.25)
    assert np.all(np.isfinite(fit.log_density(new, np.zeros(3))))


def _evidence_over_the_noise(K, y):
    """log p(y): the sum over log tau of Gamma(2, 0.1) N(y; 0, K + I / tau)."""
    values, vectors = np.linalg.eigh(K)
    u = np.linspace(-8.0, 12.0, 4001)
    variance = np.maximum(values, 0.0) + np.exp(-u)[:, None]
    log_y = -0.5 * np.sum(np.log(2 * np.pi * variance) + (vectors.T @ y) ** 2 / variance, 1)
    log_prior = 2.0 * np.log(0.1) + 2.0 * u - 0.1 * np.exp(u)
    return logsumexp(log_y + log_prior) + np.log(u[1] - u[0])


@pytest.mark.parametrize("name", NAMES[:-1])
def test_nodes_have_the_statistics_of_q(name):
    """E[t] of a family is the derivative of its log-normaliser; here: the gradient of a random
    combination of statistics over nodes gives that combination back as natural parameters.
    """
    q = families(RNG)[name]
    c = q.coordinates()
    nodes = q.nodes(c)
    assert abs(float(jnp.sum(nodes.weights)) - 1.0) < 1e-12
    for value in nodes.values.values():
        assert np.all(np.isfinite(value))

    # log q itself is affine in t: its natural parameters must come back
    def energy(c):
        nodes = q.nodes(c)
        return jnp.sum(nodes.weights * jax.vmap(q.log_prob)(nodes.values))

    again = q.natural(c, jax.grad(energy)(c))
    for x, y in zip(jax.tree.leaves(q), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(energy(c), -q.entropy(), rtol=1e-9)  # H = -E[log q]
    if len(q.sites) == 1:
        ((site, d),) = q.distributions().items()
        z = q.random_values(random.key(2))
        np.testing.assert_allclose(q.log_prob(z), jnp.sum(d.log_prob(z[site])), rtol=1e-9)


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["normal-gamma", "normal-wishart"])
def test_pairs_have_the_entropy_and_the_moments_of_their_draws(name):
    q = families(RNG)[name]
    draws = q.draw(random.key(0), 40_000)
    for name, d in q.distributions().items():
        mean = np.mean(draws[name], 0)
        error = np.std(draws[name], 0) / 200.0
        assert np.all(np.abs(mean - d.mean) < 5.0 * error)


def test_labels_are_drawn_as_often_as_q_says_and_impossible_ones_never():
    probs = np.array(
        [[0.0, 0.2, 0.0, 0.8, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0], [1e-3, 0.0, 0.3, 0.3, 1.0]]
    )
    probs /= probs.sum(1, keepdims=True)
    categories = (-3, 0, 2, 5, 9)
    num = 100_000
    q = discrete(("z",), (3,), categories, jnp.asarray(probs))
    z = np.asarray(q.draw(random.key(0), num)["z"])
    assert z.shape == (num, 3) and set(np.unique(z)) <= set(categories)
    found = np.stack([np.mean(z == c, 0) for c in categories], 1)
    assert np.all(found[probs == 0.0] == 0.0)
    np.testing.assert_array_less(
        np.abs(found - probs), 5.0 * np.sqrt(probs * (1.0 - probs) / num) + 1e-300
    )
    assert abs(np.corrcoef(z[:, 0], z[:, 2])[0, 1]) < 5.0 / np.sqrt(num)  # elements are independent


def refused():
    """Models that are not conjugate, by what breaks them."""
    normal, gamma = dist.Normal(0.0, 1.0), dist.Gamma(2.0, 2.0)
    sample = numpyro.sample
    return {
        "probit": lambda y: sample(
            "y", dist.Bernoulli(jax.scipy.stats.norm.cdf(sample("w", normal))), obs=1
        ),
        "exponential link": lambda y: sample(
            "y", dist.Poisson(jnp.exp(sample("w", normal))), obs=2
        ),
        "cubic": lambda y: sample("y", dist.Normal(sample("w", normal) ** 3, 1.0), obs=0.3),
        "a little of a cube": lambda y: sample(
            "y", dist.Normal((w := sample("w", normal)) + 1e-6 * w**3, 1.0), obs=0.3
        ),
        "clip far out": lambda y: sample(
            "y", dist.Normal(jnp.clip(sample("w", normal), -1e3, 1e3), 1.0), obs=0.3
        ),
        "rounded": lambda y: sample("y", dist.Normal(jnp.round(sample("w", normal)), 1.0), obs=0.3),
        "absolute": lambda y: sample("y", dist.Normal(jnp.abs(sample("w", normal)), 1.0), obs=0.3),
        "student": lambda y: sample("y", dist.StudentT(3.0, sample("w", normal), 1.0), obs=0.3),
        "gamma as scale": lambda y: sample("y", dist.Normal(0.0, sample("w", gamma)), obs=0.3),
        "two precisions": lambda y: sample(
            "y", dist.Normal(0.0, (sample("w", gamma) + sample("v", gamma)) ** -0.5), obs=0.3
        ),
        "half normal": lambda y: sample(
            "y", dist.Normal(0.0, sample("w", dist.HalfNormal(1.0))), obs=0.3
        ),
        "cauchy": lambda y: sample("y", dist.Normal(sample("w", dist.Cauchy()), 1.0), obs=0.3),
        "shape of a gamma": lambda y: sample("y", dist.Gamma(sample("w", gamma), 1.0), obs=0.3),
        "beta's own": lambda y: sample("y", dist.Beta(sample("w", gamma), 2.0), obs=0.3),
        "laplace noise": lambda y: sample("y", dist.Laplace(sample("w", normal), 1.0), obs=0.3),
    }


@pytest.mark.parametrize("name", sorted(refused()))
def test_no_false_conjugacy(name):
    with pytest.raises(pg.NotConjugateError, match="'w'|'v'"):
        pg.fit(refused()[name], pg.MeanField(bounds=False), 0, np.zeros(1))


def test_discrete_sites_that_see_each_other_are_refused():
    def chain(x):
        with numpyro.plate("data", len(x)):
            z = numpyro.sample("z", dist.Bernoulli(0.3))
            before = jnp.concatenate([jnp.zeros(1), z[:-1]])
            numpyro.sample("x", dist.Normal(z + before, 1.0), obs=x)

    with pytest.raises(pg.NotConjugateError, match="element by element"):
        pg.fit(chain, pg.MeanField(), 0, TEN)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"restarts": 0}, "restarts=0"),
        ({"tol": 0.0}, "tol"),
        ({"factors": ["mu"]}, "lists of names"),
        ({"factors": [["mu", "sigma"]]}, r"factors.*\['sigma'\] are not latent sites"),
        ({"factors": [["mu"], ["mu"]]}, "two blocks"),
        ({"init": {"mu": np.zeros(3)}}, "shape"),
        ({"init": {"mu": 0.0, "nu": 1.0}}, r"init.*\['nu'\] are not latent sites"),
    ],
)
def test_bad_options_are_named(options, match):
    with pytest.raises(pg.DataError, match=match):
        pg.fit(unknown_mean_and_precision, pg.MeanField(**options), 0, y=TEN)


@pytest.mark.slow
def test_a_linear_regression_is_the_fixed_point_of_its_equations():
    """PRML 10.3 with q(tau) beside: (10.95) to (10.102)."""
    X = RNG.normal(size=(15, 3))
    y = X @ [1.0, 0.0, -2.0] + 0.5 * RNG.normal(size=15)
    fit = pg.fit(linear_regression, pg.MeanField(), 0, X, y=y)
    alpha = tau = 1.0
    for _ in range(500):
        S = np.linalg.inv(alpha * np.eye(3) + tau * X.T @ X)
        m = tau * S @ X.T @ y
        alpha = (1.0 + 1.5) / (1.0 + 0.5 * (m @ m + np.trace(S)))
        residual = np.sum((y - X @ m) ** 2) + np.trace(X @ S @ X.T)
        tau = (1.0 + 7.5) / (1.0 + 0.5 * residual)
    np.testing.assert_allclose(fit.sites["weights"].mean, m, rtol=1e-5)
    np.testing.assert_allclose(fit.sites["weights"].covariance_matrix, S, rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(fit.sites["tau"].mean, tau, rtol=1e-5)
    np.testing.assert_allclose(fit.predict(X[:4]).mean, X[:4] @ m, atol=0.1)


@pytest.mark.slow
def test_factors_of_rows_and_columns_are_apart():
    """Columns and rows are each independent given the other: Gaussians of K values, not of all."""
    X = RNG.normal(size=(9, 1)) * [1.0, -1.0, 0.5, 2.0] + 0.3 * RNG.normal(size=(9, 4))
    fit = pg.fit(factor_analysis, pg.MeanField(max_steps=3000), 0, X, num_factors=2, throw=False)
    assert fit.sites["loadings"].batch_shape == (4,) and fit.sites["h"].batch_shape == (9,)
    assert np.all(np.diff(fit.stats["bounds"]) > -1e-9)
    H, W, tau = (fit.sites[k] for k in ("h", "loadings", "tau"))
    P = np.eye(2) + np.einsum(
        "d,dij->ij", tau.mean, W.covariance_matrix + W.mean[:, :, None] * W.mean[:, None]
    )
    np.testing.assert_allclose(H.covariance_matrix[0], np.linalg.inv(P), rtol=1e-3)
    np.testing.assert_allclose(
        H.mean, X * np.asarray(tau.mean) @ np.asarray(W.mean) @ np.linalg.inv(P).T, atol=1e-3
    )


@pytest.mark.slow
def test_more_components_than_rows():
    few = pg.fit(mixture, pg.MeanField(), 0, ROWS[:4], num_components=6)
    assert few.result == "converged" and np.isfinite(few.log_evidence)


@pytest.mark.slow
def test_one_component_is_no_mixture():
    one = pg.fit(mixture, pg.MeanField(), 0, ROWS, num_components=1)
    exact = pg.fit(gauss_wishart, pg.MeanField(), 0, ROWS)
    np.testing.assert_allclose(one.log_evidence, exact.log_evidence, atol=1e-8)


@pytest.mark.slow
def test_a_site_of_several_axes_has_a_factor_of_its_own_shape():
    """Its moments and density are those of its draws, whatever the axes."""

    def model(X, group, y=None):
        W = numpyro.sample("W", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.sum(W[group] * X, -1), 1.0), obs=y)

    rng = np.random.default_rng(0)
    X, group = rng.normal(size=(20, 3)), np.arange(20) % 2
    y = rng.normal(size=20)
    fit = pg.fit(model, pg.MeanField(num_draws=10), 0, X, group, y=y)
    q = fit.sites["W"]
    assert q.event_shape == q.mean.shape == q.variance.shape == (2, 3)
    for k in range(2):  # by the algebra of each group's regression
        P = np.eye(3) + X[group == k].T @ X[group == k]
        wanted = np.linalg.solve(P, X[group == k].T @ y[group == k])
        np.testing.assert_allclose(q.mean[k], wanted, rtol=1e-8)
        np.testing.assert_allclose(q.variance[k], np.diag(np.linalg.inv(P)), rtol=1e-8)
    np.testing.assert_allclose(
        q.log_prob(fit.hyper["W"]),
        dist.MultivariateNormal(jnp.ravel(q.mean), q.covariance_matrix).log_prob(
            fit.hyper["W"].reshape(10, 6)
        ),
        rtol=1e-10,
    )


def test_a_mean_of_several_axes_with_its_precision_has_a_factor_of_its_own_shape():
    """w ~ Normal(mean, (tau P)^-1) of six values, tau ~ Gamma(5, 4): a Student-t of (3, 2)."""
    rng = np.random.default_rng(0)
    mean, root = rng.normal(size=6), np.eye(6) + 0.1 * rng.normal(size=(6, 6))
    P = root @ root.T
    of = [*map(jnp.asarray, (5.0, 4.0, P @ mean, P))]
    q = NormalGamma(("w", "tau"), (), (3, 2), *of).distributions()["w"]
    assert q.shape() == q.mean.shape == q.variance.shape == (3, 2)
    np.testing.assert_allclose(q.mean, mean.reshape(3, 2), rtol=1e-12)
    variance = 4.0 / (5.0 - 1.0) * np.diag(np.linalg.inv(P))  # E[1 / tau] P^-1
    np.testing.assert_allclose(q.variance, variance.reshape(3, 2), rtol=1e-12)
    w = rng.normal(size=(3, 2))
    exact = multivariate_t(mean, 4.0 / 5.0 * np.linalg.inv(P), df=10.0).logpdf(w.ravel())
    np.testing.assert_allclose(q.log_prob(w), exact, rtol=1e-12)


def test_a_model_of_its_inputs_has_nothing_to_predict():
    def model(x):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", dist.Normal(w, 1.0), obs=x)

    x = np.arange(4.0)
    fit = pg.fit(model, pg.Laplace(integrate=()), 0, x)
    with pytest.raises(pg.ModelError, match=r"nothing to predict at them; log_density"):
        fit.predict(x)
    with pytest.raises(pg.ModelError, match=r"sample: .*nothing to predict at them"):
        fit.sample(0, x, 3)
    assert pg.compare({"a": fit}, x).table[0]["log_density"] is not None
