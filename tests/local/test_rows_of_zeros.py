"""Rows that see no unknown, as all their covariates are zero: each adds its own log density to the
evidence, and leaving it out changes nothing else.
"""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.special import logsumexp

import ppl_gp as pg
from ppl_gp.results.left_out import distinct

N, ROW = 12, 3
rng = np.random.default_rng(8)
X = rng.normal(size=N)
X[ROW] = 0.0
Z = rng.normal(size=N)
Z[5] = 0.0
NOISY = 0.7 * X + 0.3 * rng.normal(size=N)
KINDS = {
    "gaussian": (lambda f: dist.Normal(f, 0.3), NOISY),
    "counts": (lambda f: dist.Poisson(jnp.exp(f)), rng.poisson(np.exp(0.5 * X))),
    "binary": (lambda f: dist.Bernoulli(logits=f), (rng.random(N) < 0.5).astype(int)),
    "student": (lambda f: dist.StudentT(4.0, f, 0.3), NOISY),
}
METHODS = {
    "ep": pg.EP(),
    "vi": pg.VI(),
    "power": pg.EP(power=0.5),
    "sequential": pg.EP(sequential=True),
    "laplace": pg.Laplace(),
}


def slope(kind="gaussian", offset=0.0):
    def model(x, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 3.0))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", KINDS[kind][0](offset + b * x), obs=y)

    return model


def two(x, z, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    c = numpyro.sample("c", dist.Normal(0.0, 0.3))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(b * x, jnp.exp(c * z)), obs=y)


def dense(x, y):
    return stats.multivariate_normal(cov=9.0 * np.outer(x, x) + 0.09 * np.eye(len(x))).logpdf(y)


@pytest.mark.one_case
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("almost", [0.0, 1e-9, 1e-160])
def test_gaussian_rows_are_those_of_dense_algebra(method, almost):
    x = np.where(X == 0.0, almost, X)
    fit = pg.fit(slope(), METHODS[method], 0, x, y=NOISY)
    assert fit.result == "converged"
    np.testing.assert_allclose(fit.log_evidence, dense(x, NOISY), atol=1e-7)
    every = dense(x, NOISY)
    want = [every - dense(np.delete(x, i), np.delete(NOISY, i)) for i in range(N)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        left_out = fit.loo()
    np.testing.assert_allclose(left_out.elpd_i, want, atol=1e-6)
    assert not np.any(np.isnan(left_out.pareto_k))


# sequential EP of the Student-t rows stays at a residual of 1e-7, with the row of zeros or without
CASES = [(k, m) for k in ("counts", *KINDS) for m in METHODS if (k, m) != ("student", "sequential")]


@pytest.mark.one_case
@pytest.mark.parametrize("offset", [2.0, 0.0])
@pytest.mark.parametrize("kind, method", dict.fromkeys(CASES))
def test_a_row_of_zeros_adds_its_own_log_density(kind, method, offset):
    y, others = KINDS[kind][1], np.arange(N) != ROW
    whole, rest = (
        pg.fit(slope(kind, offset), METHODS[method], 0, X[keep], y=y[keep])
        for keep in (np.ones(N, bool), others)
    )
    assert whole.result == rest.result == "converged"
    own = float(KINDS[kind][0](jnp.asarray(offset)).log_prob(y[ROW]))
    np.testing.assert_allclose(whole.log_evidence - rest.log_evidence, own, atol=1e-6)


@pytest.mark.one_case
@pytest.mark.parametrize("method", ["vi", "ep"])
def test_rows_of_zeros_of_one_of_two_functions(method):
    """X is zero in one row and Z in another; the evidence moves continuously to it."""
    both = dataclasses.replace(METHODS[method], integrate=("b", "c"))
    fits = [pg.fit(two, both, 0, X + d, Z + d, y=NOISY) for d in (0.0, 1e-8)]
    assert all(fit.result == "converged" for fit in fits)
    assert next(iter(fits[0].draws.at(0).kept.values())).sites.functions == 2
    np.testing.assert_allclose(fits[0].log_evidence, fits[1].log_evidence, atol=1e-5)


def test_draws_leave_out_a_row_of_zeros_exactly():
    """Pareto smoothing raised `ValueError` of equal weights, and NaN where rounding split them."""
    fit = pg.fit(slope(), pg.NUTS(num_warmup=100, num_samples=200), 0, X, y=NOISY)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        left_out = fit.loo()
    own = stats.norm.logpdf(NOISY[ROW], 0.0, 0.3)
    np.testing.assert_allclose(left_out.elpd_i[ROW], own, atol=1e-7)
    assert np.isfinite(left_out.elpd) and left_out.pareto_k[ROW] < 0.5


def test_log_densities_that_differ_are_left_alone():
    some = rng.normal(size=(400, 3))
    some[:, 1] = -2.0
    moved = distinct(some)
    np.testing.assert_array_equal(moved[:, [0, 2]], some[:, [0, 2]])
    assert len(np.unique(moved[:, 1])) == 400
    np.testing.assert_allclose(moved[:, 1], -2.0, atol=2e-8)


@pytest.mark.one_case
@pytest.mark.parametrize("kind, method", dict.fromkeys(CASES))
def test_new_rows_of_zeros_alone_have_their_own_density(kind, method):
    """No other row of the call has a variance."""
    y = KINDS[kind][1]
    fit = pg.fit(slope(kind), METHODS[method], 0, X, y=y)
    own = KINDS[kind][0](jnp.zeros(2))
    log_p, error = fit.log_density(np.zeros(2), y[:2], with_error=True)
    np.testing.assert_allclose(log_p, own.log_prob(y[:2]), atol=1e-9)
    assert np.max(error) < 1e-9
    found = fit.predict(np.zeros(2))
    np.testing.assert_allclose(found.mean, own.mean, atol=1e-9)
    np.testing.assert_allclose(found.variance, own.variance, rtol=1e-9)


def test_leaving_out_a_row_where_no_row_sees_an_unknown():
    y = KINDS["counts"][1]
    left_out = pg.fit(slope("counts"), pg.Laplace(), 0, np.zeros(N), y=y).loo()
    np.testing.assert_allclose(left_out.elpd_i, stats.poisson(1.0).logpmf(y), atol=1e-9)


def varying(X, y=None):
    """A slope that is a function, and an effect."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    u = numpyro.sample("u", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(X[:, 0] * f + X[:, 1] * u)), obs=y)


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["svgp", "laplace", "ep", "vi"])
def test_rows_of_zeros_beside_a_function_that_is_multiplied(name):
    X2, y = np.column_stack([X, np.where(X == 0.0, 0.0, Z)]), KINDS["counts"][1]
    rest = X != 0.0
    svgp = pg.SVGP(inducing=X2[rest], train_inducing=False, max_steps=60)
    method = svgp if name == "svgp" else METHODS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, without = (pg.fit(varying, method, 0, X2[k], y=y[k]) for k in (X < np.inf, rest))
    own = stats.poisson(1.0).logpmf(y[ROW])
    np.testing.assert_allclose(whole.log_evidence - without.log_evidence, own, atol=1e-5)


@pytest.mark.parametrize("method", ["ep", "power"])
def test_rows_of_zeros_add_their_density_in_single_precision(method):
    """Beside a mean of log 10, whose digits end far above the variance of such a row. The evidence
    by quadrature over b; EP's own error is below 1e-3 nats here.
    """
    x, y = np.array([0.0, 0, 0, 1, 1, 2]), np.array([9, 11, 10, 14, 12, 20])

    def counts(x, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Poisson(jnp.exp(np.log(10.0) + b * x)), obs=y)

    b = np.linspace(-6.0, 6.0, 4001)
    rates = np.exp(np.log(10.0) + b[:, None] * x)
    log_p = np.sum(stats.poisson.logpmf(y, rates), 1) + stats.norm.logpdf(b)
    with jax.enable_x64(False):
        fit = pg.fit(counts, METHODS[method], 0, x, y=y)
    np.testing.assert_allclose(fit.log_evidence, logsumexp(log_p, b=b[1] - b[0]), atol=2e-3)
    assert fit.stats["quadrature_error"] < 1e-4
