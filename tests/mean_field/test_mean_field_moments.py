"""Predictive means and variances under mean field: exact over q where that is proved, against
closed forms; of draws elsewhere, with an error.
"""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conjugate_families import families
from jax import random

import ppl_gp as pg
from models.linear_regression import linear_regression
from ppl_gp.mean_field.discrete import Dirichlet
from ppl_gp.mean_field.positive import Gamma

RNG = np.random.default_rng(8)
MOMENTS = {
    "gaussian": lambda z: [z["z"], z["z"][..., :, None] * z["z"][..., None, :]],
    "gamma": lambda z: [z["w"], 1 / z["w"], z["w"] ** 2, z["w"] ** -2],
    "wishart": lambda z: [z["W"], np.linalg.inv(z["W"])],
    "dirichlet": lambda z: [z["p"], z["p"][..., :, None] * z["p"][..., None, :]],
    "normal-gamma": lambda z: [z["w"], 1 / z["w"], z["m"], z["m"] ** 2, z["m"] * z["w"][..., None]],
    "normal-wishart": lambda z: [
        z["W"],
        np.linalg.inv(z["W"]),
        z["m"],
        z["m"][..., :, None] * z["m"][..., None, :],
    ],
}
# which of them the rules of a family have, in their order
HAS = {
    "gaussian": [[0, 1], [0, 1]],
    "gamma": [[0, 1], [0, 1, 2], [1, 3]],
    "wishart": [[0, 1]],
    "dirichlet": [[0]],
    "normal-gamma": [[0, 1, 2, 3, 4]],
    "normal-wishart": [[0, 1, 2, 3]],
}


def of_many(name):
    """A member of a family whose moments exist, and have errors."""
    q = families(np.random.default_rng(2))[name]
    if name in ("gamma", "normal-gamma"):
        return type(q)(*_with_shape(q, q.shape + 6.0))
    if name in ("wishart", "normal-wishart"):
        return type(q)(*_with_df(q, q.df + 12.0))
    return type(q)(q.sites, q.batch, False, q.alpha + 0.5) if name == "dirichlet" else q


def _with_shape(q, shape):
    values = {**vars(q), "shape": shape}
    return [values[k] for k in (f.name for f in fields(q))]


def _with_df(q, df):
    values = {**vars(q), "df": df}
    return [values[k] for k in (f.name for f in fields(q))]


@pytest.mark.parametrize("name", sorted(MOMENTS))
def test_rules_have_the_moments_of_draws(name):
    q = of_many(name)
    draws = {k: np.asarray(v) for k, v in q.draw(random.key(0), 40_000).items()}
    rules = q.moment_rules()
    assert len(rules) == len(HAS[name])
    for rule, which in zip(rules, HAS[name], strict=True):
        nodes = rule.nodes()
        values = {k: np.asarray(v) for k, v in nodes.values.items()}
        assert abs(float(jnp.sum(nodes.weights)) - 1.0) < 1e-12
        for i in which:
            drawn = MOMENTS[name](draws)[i]
            found = np.tensordot(nodes.weights, MOMENTS[name](values)[i], 1)
            error = drawn.std(0) / 200.0
            assert np.all(np.abs(found - drawn.mean(0)) <= 5.0 * error + 1e-12)


def test_the_statistics_of_a_mean_and_its_precision_are_those_that_the_rule_names():
    rule = of_many("normal-gamma").moment_rules()[0]
    w, m = 1.7, np.array([0.4, -2.0, 1.1])[: rule.q.size]
    square = np.outer(m, m)[np.tril_indices(len(m))]
    wanted = np.concatenate([[w, 1.0 / w], m, square, w * m, w * square])
    found = rule.statistics(jnp.concatenate([jnp.log(jnp.asarray([w])), jnp.asarray(m)]))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_one_category_is_sure():
    q = Dirichlet(("p",), (), False, jnp.asarray([2.5]))
    nodes = q.nodes(q.coordinates())
    np.testing.assert_array_equal(nodes.values["p"], np.ones((1, 1)))
    np.testing.assert_array_equal(nodes.weights, np.ones(1))


@pytest.mark.parametrize("alpha", [(20.01, 0.01), (0.01, 0.01), (0.001, 3.0)])
def test_nodes_of_a_beta_keep_both_logarithms(alpha):
    """A model computes 1 - p, of which nothing is left where p is rounded to one."""
    q = Dirichlet(("p",), (), True, jnp.asarray(alpha))
    nodes = q.own_nodes()
    p = np.asarray(nodes.values["p"])
    found = [nodes.weights @ x for x in (np.log(p), np.log(1.0 - p))]
    np.testing.assert_allclose(found, q.coordinates(), rtol=1e-9, atol=1e-10)


def test_nodes_of_a_vague_gamma_keep_its_logarithm():
    """E[log w] = -1000 is that of two nodes with one at exp(-2000), which is zero."""
    q = Gamma(("w",), (2,), False, jnp.asarray([0.001, 2.0]), jnp.asarray([0.001, 3.0]))
    nodes, (mean, log_mean) = q.own_nodes(), q.coordinates()
    w = np.asarray(nodes.values["w"])
    np.testing.assert_allclose(nodes.weights @ w, mean, rtol=1e-12)
    np.testing.assert_allclose(nodes.weights @ np.log(w), log_mean, rtol=1e-12)


def test_one_dirichlet_has_its_second_moments():
    q = families(RNG)["dirichlet"]
    one = type(q)(q.sites, (), False, jnp.asarray([0.2, 1.0, 3.0]))
    _, pairs = one.moment_rules()
    nodes, total = pairs.nodes(), 4.2
    p, m = np.asarray(nodes.values["p"]), np.array([0.2, 1.0, 3.0]) / 4.2
    exact = (total * np.outer(m, m) + np.diag(m)) / (total + 1.0)  # Var = (diag(m) - m m') / 5.2
    np.testing.assert_allclose(np.einsum("s,si,sj->ij", nodes.weights, p, p), exact, rtol=1e-12)


def test_moments_that_do_not_exist_have_no_rule():
    q = families(RNG)
    gamma = type(q["gamma"])(("w",), (), False, jnp.asarray(0.5), jnp.asarray(1.0))
    (reciprocal,) = gamma.moment_rules()
    w = np.asarray(reciprocal.nodes().values["w"])
    np.testing.assert_allclose([w.mean(), w.min()], [0.5, 0.0])  # E[1 / w] is infinite
    wishart = q["wishart"]
    assert type(wishart)(*_with_df(wishart, jnp.full(2, 3.9))).moment_rules() == ()
    pair = q["normal-gamma"]
    assert type(pair)(*_with_shape(pair, jnp.full(2, 0.9))).moment_rules() == ()


@pytest.mark.slow
def test_a_regression_has_the_variance_of_its_weights_and_noise():
    """E[y] = x m, Var[y] = x S x' + E[1 / tau] = x S x' + b / (a - 1)."""
    X = RNG.normal(size=(15, 3))
    y = X @ [1.0, 0.0, -2.0] + 0.5 * RNG.normal(size=15) + 40.0 * X[:, 0]
    fit = pg.fit(linear_regression, pg.MeanField(num_draws=3), 0, X, y=y)
    new = RNG.normal(size=(5, 3)) * [[1.0], [1.0], [100.0], [0.0], [1.0]]
    found, w, tau = fit.predict(new), fit.sites["weights"], fit.sites["tau"]
    np.testing.assert_allclose(found.mean, new @ w.mean, rtol=1e-9, atol=1e-9)
    variance = np.einsum("ni,ij,nj->n", new, w.covariance_matrix, new)
    variance += float(tau.rate / (tau.concentration - 1.0))
    np.testing.assert_allclose(found.variance, variance, rtol=1e-9)
    assert found.mean_error is None and found.probs is None


def normal_of_one_precision(X, y=None):
    """PRML 3.3 with one unknown precision of all: the posterior is a normal-gamma."""
    tau = numpyro.sample("tau", dist.Gamma(3.0, 2.0))
    w = numpyro.sample(
        "w", dist.MultivariateNormal(jnp.zeros(2), precision_matrix=tau * jnp.eye(2))
    )
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0 / jnp.sqrt(tau)), obs=y)


@pytest.mark.slow
def test_a_conjugate_regression_is_student_t():
    """The exact posterior predictive: St(x m, b / a (1 + x P^-1 x'), 2 a)."""
    X = RNG.normal(size=(9, 2))
    y = X @ [1.0, -1.0] + 0.4 * RNG.normal(size=9)
    fit = pg.fit(normal_of_one_precision, pg.MeanField(num_draws=3), 0, X, y=y)
    assert fit.factors == [["w", "tau"]]
    P = np.eye(2) + X.T @ X
    m = np.linalg.solve(P, X.T @ y)
    a, b = 3.0 + 4.5, 2.0 + 0.5 * (y @ y - m @ P @ m)
    new = RNG.normal(size=(4, 2))
    found = fit.predict(new)
    spread = 1.0 + np.einsum("ni,ij,nj->n", new, np.linalg.inv(P), new)
    np.testing.assert_allclose(found.mean, new @ m, rtol=1e-8)
    np.testing.assert_allclose(found.variance, b / (a - 1.0) * spread, rtol=1e-8)
    assert found.mean_error is None


def groups(X, y=None):
    """The mixture of `models/mixture.py`, with numbers of rows from X."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.full(2, 0.7)))
    with numpyro.plate("components", 2):
        W = numpyro.sample("precision", dist.Wishart(3.0, rate_matrix=jnp.eye(2)))
        mean = numpyro.sample("mean", dist.MultivariateNormal(jnp.zeros(2), precision_matrix=W))
    with numpyro.plate("data", X.shape[0]):
        z = numpyro.sample("z", dist.Categorical(weights))
        numpyro.sample("y", dist.MultivariateNormal(mean[z], precision_matrix=W[z]), obs=y)


@pytest.mark.slow
def test_a_mixture_has_the_moments_of_its_student_t():
    y = np.concatenate([RNG.normal(-2, 0.7, (14, 2)), RNG.normal(2, 1.0, (16, 2))])
    X = np.zeros((30, 1))
    fit = pg.fit(groups, pg.MeanField(num_draws=3), 0, X, y=y)
    (pair,) = [q for q in fit.blocks if len(q.sites) == 2]
    alpha = np.asarray(fit.sites["weights"].concentration)
    share, beta = alpha / alpha.sum(), np.asarray(pair.strength)
    m = np.asarray(pair.linear) / beta[:, None]
    free = np.asarray(pair.df) - 3.0  # df - D - 1
    var = np.einsum("kdd->kd", np.asarray(pair.rate)) * ((1.0 + 1.0 / beta) / free)[:, None]
    mean = share @ m
    found = fit.predict(X[:3])
    np.testing.assert_allclose(found.mean, np.broadcast_to(mean, (3, 2)), rtol=1e-8, atol=1e-9)
    exact = share @ (var + (m - mean) ** 2)
    np.testing.assert_allclose(found.variance, np.broadcast_to(exact, (3, 2)), rtol=1e-8)
    assert found.mean_error is None


def counts(X, y=None):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(rate * X[:, 0]), obs=y)


def waiting(X, y=None):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Exponential(rate * X[:, 0]), obs=y)


@pytest.mark.one_case
@pytest.mark.parametrize("model", [counts, waiting])
def test_rates_have_negative_binomial_and_lomax_moments(model):
    X = RNG.uniform(0.5, 2.0, (9, 1))
    y = RNG.poisson(3.0 * X[:, 0]) if model is counts else RNG.exponential(1.0 / X[:, 0])
    fit = pg.fit(model, pg.MeanField(num_draws=2), 0, X, y=y)
    new = np.array([[0.3], [1.0], [7.0]])
    found, x = fit.predict(new), new[:, 0]
    if model is counts:
        a, b = 2.0 + y.sum(), 1.0 + X.sum()
        mean, variance = a / b * x, a / b * x + a / b**2 * x**2
    else:
        a, b = 2.0 + 9.0, 1.0 + np.sum(y * X[:, 0])
        mean = b / (a - 1.0) / x
        variance = a / (a - 2.0) * mean**2
    np.testing.assert_allclose(found.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(found.variance, variance, rtol=1e-10)
    assert found.mean_error is None


@pytest.mark.slow
def test_a_share_has_its_mean_as_probability():
    def coin(X, y=None):
        share = numpyro.sample("share", dist.Beta(2.0, 3.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(share), obs=y)

    y = np.array([1, 0, 1, 1, 1, 0, 1])
    found = pg.fit(coin, pg.MeanField(num_draws=2), 0, np.zeros((7, 1)), y=y).predict(
        np.zeros((2, 1))
    )
    np.testing.assert_allclose(found.probs, [7 / 12, 7 / 12], rtol=1e-12)
    np.testing.assert_allclose(found.variance, [35 / 144, 35 / 144], rtol=1e-12)
    assert found.mean_error is None


def labelled(X, y=None):
    with numpyro.plate("columns", 2):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


@pytest.mark.slow
def test_where_a_sigmoid_stands_between_q_is_drawn_with_an_error():
    X = RNG.normal(size=(15, 2))
    y = (X[:, 0] + 0.5 * RNG.normal(size=15) > 0).astype(int)
    fit = pg.fit(labelled, pg.MeanField(num_draws=500), 0, X, y=y)
    found = fit.predict(X[:3])
    p = 1.0 / (1.0 + np.exp(-np.asarray(fit.hyper["w"]) @ X[:3].T))
    np.testing.assert_allclose(found.mean, p.mean(0), rtol=1e-8)
    np.testing.assert_allclose(found.mean_error, p.std(0) / np.sqrt(500), rtol=1e-6)
    q = fit.sites["w"]
    m, s = X[:3] @ q.mean, np.sqrt(np.einsum("ni,ij,nj->n", X[:3], q.covariance_matrix, X[:3]))
    z, weights = np.polynomial.hermite_e.hermegauss(64)
    exact = (1.0 / (1.0 + np.exp(-(m + s * z[:, None])))).T @ weights / np.sqrt(2.0 * np.pi)
    assert np.all(np.abs(found.mean - exact) < 5.0 * np.asarray(found.mean_error))


def one_factor(X, y=None):
    loading = numpyro.sample("loading", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(loading * h, 0.3), obs=y)


@pytest.mark.slow
def test_latents_of_a_row_are_drawn_with_an_error():
    """E[y] = 0 for any loading: latents are symmetric."""
    X, y = np.zeros((9, 1)), RNG.normal(size=9)
    fit = pg.fit(one_factor, pg.MeanField(max_steps=30, num_draws=200), 0, X, y=y, throw=False)
    found = fit.predict(X[:2])
    assert np.all(found.mean_error > 0.0)
    assert np.all(np.abs(found.mean) < 5.0 * np.asarray(found.mean_error))
    jax.clear_caches()
