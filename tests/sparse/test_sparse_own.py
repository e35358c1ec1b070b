"""`SVGP` integrates per-datum effects in the likelihood, before q is looked at."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from sparse_targets import targets

import ppl_gp as pg
from ppl_gp.reading.factors import JointLogLikelihood
from ppl_gp.reading.reading import declare
from ppl_gp.sparse.expectation import Averaged

# as many rows as groups, and as inducing points at them
N = GROUPS = 12
JITTER = 1e-11
HELD = pg.Fixed({"sd": 0.7, "own": 0.4})


def arguments():
    rng = np.random.default_rng(0)
    X, W = np.sort(rng.uniform(0, 6, N)), rng.normal(size=(N, 2))
    return X, W, rng.integers(0, GROUPS - 1, N), rng


def model(X, W, group, y=None, counts=False):
    """Effects of groups and of each row beside a function."""
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    own = numpyro.sample("own", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.Matern32(1.0, 1.0), X, jitter=JITTER))
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(0.2, sd))
    with numpyro.plate("data", X.shape[0]):
        e = numpyro.sample("e", dist.Normal(0.1, own))
        eta = f + W @ beta + u[group] + 0.5 * e
        shown = dist.Poisson(jnp.exp(eta)) if counts else dist.Normal(eta, 0.3)
        numpyro.sample("y", shown, obs=y)


def at_the_data(X, **more):
    settings = {"hyper": HELD, "inducing": X, "train_inducing": False, "max_steps": 40}
    return pg.SVGP(**(settings | more))


def dense(X, W, group, y, new):
    """By NumPy: log evidence; of y's mean at new rows, of each term there and of e at the data the
    mean and the variance; K_* as of `model`.
    """

    def matern(A, B):
        r = np.sqrt(3.0) * np.abs(A[:, None] - B)
        return (1.0 + r) * np.exp(-r)

    def terms(r, s):
        """{term: covariance of what it adds at rows r with the predictor at rows s}."""
        return {
            "f": matern(r[0], s[0]),
            "beta": 4.0 * r[1] @ s[1].T,
            "u": 0.49 * (r[2][:, None] == s[2]),
        }

    data, at = (X, W, group), new
    K = sum(terms(data, data).values()) + (0.25 * 0.16 + 0.09) * np.eye(N)
    centred, inverse = y - 0.25, np.linalg.inv(K)
    evidence = -0.5 * (
        centred @ inverse @ centred + np.linalg.slogdet(K)[1] + N * np.log(2.0 * np.pi)
    )

    def given(C, prior):
        return C @ inverse @ centred, prior - np.einsum("ij,jk,ik->i", C, inverse, C)

    found = {k: given(C, np.diag(terms(at, at)[k])) for k, C in terms(at, data).items()}
    found["e"] = np.zeros(len(at[0])), np.full(len(at[0]), 0.25 * 0.16)
    whole = sum(np.diag(C) for C in terms(at, at).values()) + 0.25 * 0.16
    found["total"] = given(sum(terms(at, data).values()), whole)
    means = {"f": 0.0, "beta": 0.0, "u": 0.2, "e": 0.05, "total": 0.25}
    found = {k: (m + means[k], v) for k, (m, v) in found.items()}
    mean, variance = given(0.5 * 0.16 * np.eye(N), np.full(N, 0.16))
    return evidence, found, (0.1 + mean, variance)


@pytest.fixture(scope="module")
def fitted():
    """(the fit with inducing points at the data, the data)."""
    X, W, group, rng = arguments()
    y = rng.normal(size=N) + np.sin(X)
    return pg.fit(model, at_the_data(X), 0, X, W, group, y=y), (X, W, group, y)


@pytest.mark.slow
def test_the_bound_and_answers_are_those_of_the_dense_formula(fitted):
    fit, data = fitted
    X, W, group, _ = data
    new = (X[:5] + 0.1, W[:5], group[:5])
    evidence, terms, _ = dense(*data, new)
    assert evidence - 1e-6 < fit.log_evidence < evidence + 1e-8
    found, parts = fit.predict(*new), fit.components(*new)
    np.testing.assert_allclose(found.f_mean, terms["total"][0], atol=1e-6)
    np.testing.assert_allclose(found.f_variance, terms["total"][1], atol=1e-6)
    np.testing.assert_allclose(found.variance, terms["total"][1] + 0.09, atol=1e-6)
    assert set(parts) == set(terms)
    for k, (mean, variance) in terms.items():
        np.testing.assert_allclose(parts[k].mean, mean, atol=1e-6, err_msg=k)
        np.testing.assert_allclose(parts[k].variance, variance, atol=1e-6, err_msg=k)
    u = fit.sites["u"]  # the last group has no data
    np.testing.assert_allclose([u.mean[-1], u.variance[-1]], [0.2, 0.49], atol=1e-9)


@pytest.mark.slow
def test_the_collapsed_bound_and_answers_are_those_of_the_dense_formula():
    X, W, group, rng = arguments()
    y, new = rng.normal(size=N) + np.sin(X), (X[:5] + 0.1, W[:5], group[:5])
    evidence, terms, _ = dense(X, W, group, y, new)
    method = pg.CollapsedSVGP(hyper=HELD, inducing=X, train_inducing=False)
    fit = pg.fit(model, method, 0, X, W, group, y=y)
    assert evidence - 1e-6 < fit.log_evidence < evidence + 1e-8
    for k, found in fit.components(*new).items():
        np.testing.assert_allclose(found.mean, terms[k][0], atol=1e-6, err_msg=k)
        np.testing.assert_allclose(found.variance, terms[k][1], atol=1e-6, err_msg=k)


@pytest.mark.slow
def test_draws_of_effects_have_the_posterior_of_the_dense_formula(fitted):
    """At the training rows, within five standard errors of 4000 draws."""
    fit, data = fitted
    *_, (mean, variance) = dense(*data, data[:3])
    e = np.asarray(fit.to_datatree(num_draws=4000).posterior["e"])[0]
    sd = np.sqrt(variance)
    np.testing.assert_allclose(e.mean(0), mean, atol=5 * sd.max() / np.sqrt(4000))
    np.testing.assert_allclose(e.std(0), sd, rtol=5 / np.sqrt(8000))


@pytest.mark.slow
def test_what_needs_the_observations_says_so(fitted, tmp_path):
    fit, _ = fitted
    with pytest.raises(pg.ModelError, match=r"per-datum effects, \['e'\].*log_density"):
        fit.loo()
    back = pg.load(fit.save(tmp_path / "fit.zip"), model)
    with pytest.raises(pg.DataError, match=r"\['e'\] are per datum.*before saving"):
        back.to_datatree()


@pytest.mark.slow
def test_counts_have_a_tighter_bound_than_a_gaussian_of_each_effect():
    """`VI()` has one for all effects; the truth is above both, by importance sampling."""
    X, W, group, rng = arguments()
    y = rng.poisson(np.exp(np.sin(X) + 0.3 * rng.normal(size=N)))
    vi = pg.fit(model, pg.VI(hyper=HELD), 0, X, W, group, y=y, counts=True)
    ep = pg.fit(model, pg.EP(hyper=HELD), 0, X, W, group, y=y, counts=True)
    sparse = pg.fit(model, at_the_data(X), 0, X, W, group, y=y, counts=True)
    assert vi.log_evidence < sparse.log_evidence < ep.log_evidence + 2e-3
    sd = np.sqrt(ep.sites["u"].variance)
    np.testing.assert_allclose(sparse.sites["u"].mean / sd, ep.sites["u"].mean / sd, atol=0.05)
    np.testing.assert_allclose(np.sqrt(sparse.sites["u"].variance) / sd, 1.0, atol=0.05)


@pytest.mark.slow
def test_natural_gradients_of_minibatches_average_to_that_of_all_data():
    X, W, group, rng = arguments()
    y = rng.poisson(np.exp(np.sin(X)))
    method = at_the_data(X, batch_size=4)
    whole, parts = targets(method, model, (X, W, group), 4, y=y, counts=True)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-9)


@pytest.mark.slow
def test_minibatches_end_where_all_data_do():
    X, W, group, rng = arguments()
    y = rng.poisson(np.exp(np.sin(X)))
    whole = pg.fit(model, at_the_data(X), 0, X, W, group, y=y, counts=True)
    schedule = lambda step: 1.0 / (10.0 + 0.2 * step)  # noqa: E731
    training = pg.Training(natural_rate=schedule)
    part = at_the_data(X, max_steps=4000, batch_size=4, training=training)
    fit = pg.fit(model, part, 0, X, W, group, y=y, counts=True, throw=False)
    assert whole.log_evidence - 0.05 < fit.log_evidence < whole.log_evidence + 1e-9


def _counts(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.mark.slow
def test_the_integral_over_an_effect_is_that_of_a_fine_grid():
    """Values, derivatives in the function and in the spread, and draws; none without spread."""
    X, y = np.arange(4.0), np.array([0, 3, 40, 1])
    f, spread = jnp.array([-2.0, 0.5, 3.0, 1.0]), jnp.array([0.3, 1.5, 0.8, 0.0])
    joint = JointLogLikelihood(declare(_counts, (X,), {"y": y}), 4, {}, (X,), {"y": y})
    at = jax.jit(lambda f, s: Averaged(joint, "f", s**2)({"f": f}))

    def fine(f, s):
        z = jnp.linspace(-9.0, 9.0, 4001)[:, None]
        values = jax.vmap(lambda e: joint({"f": f + s * e}))(z)
        return jax.nn.logsumexp(values - 0.5 * z**2, 0) - jax.nn.logsumexp(-0.5 * z**2, 0)

    np.testing.assert_allclose(at(f, spread), fine(f, spread), atol=1e-8)
    slopes = jax.grad(lambda f, s: jnp.sum(at(f, s)), (0, 1))(f, spread)
    wanted = jax.grad(lambda f, s: jnp.sum(fine(f, s)), (0, 1))(f, spread)
    for a, b in zip(slopes, wanted, strict=True):
        np.testing.assert_allclose(a[:3], b[:3], atol=1e-6)
    draw = jax.vmap(lambda k: Averaged(joint, "f", spread**2).draw(f, k))
    e = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
    z = np.linspace(-9.0, 9.0, 4001)[:, None] * np.asarray(spread)
    log_p = jax.vmap(lambda e: joint({"f": f + e}))(jnp.asarray(z))
    log_p = np.asarray(log_p) - 0.5 * np.linspace(-9.0, 9.0, 4001)[:, None] ** 2
    p = np.exp(log_p - log_p.max(0))
    mean = (p * z).sum(0) / p.sum(0)
    sd = np.sqrt((p * z**2).sum(0) / p.sum(0) - mean**2)
    np.testing.assert_allclose(e.mean(0), mean, atol=5 * sd.max() / np.sqrt(4000))
    np.testing.assert_allclose(e.std(0)[:3], sd[:3], rtol=5 / np.sqrt(8000))
    assert np.all(e[:, 3] == 0.0)
