"""Tables with as many entries as there are rows (means and standard deviations of levels, centres
and widths of bumps) are options, whatever number of rows, however they are looked up: evidence and
predictions elsewhere are what dense algebra has.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

NOISE = 0.4
M, S = np.array([1.3, -0.5, 0.2]), np.array([0.6, 0.9, 0.5])


def levels(X, g, m, s, plate="table", y=None):
    """f and a level's effect with a mean and a standard deviation of its own."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), X))
    with numpyro.plate("levels", m.shape[0] if plate == "table" else plate):
        u = numpyro.sample("u", dist.Normal(m, s))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[g], NOISE), obs=y)


def bumps(X, m, s, y=None):
    """f and bumps around m of widths s."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), X))
    with numpyro.plate("bumps", m.shape[0]):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    phi = jnp.exp(-0.5 * ((X[:, None] - m) / s) ** 2)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + phi @ b, NOISE), obs=y)


def _k(a, b):
    return 1.5 * np.exp(-0.5 * ((a[:, None] - b) / 0.8) ** 2)


def _algebra(X, XN, y, A, B, m, scale):
    """Log evidence, means of f and effects at XN: eta = f + A w here, f + B w there, w ~ N(m,
    scale^2).
    """
    K = _k(X, X) + (A * scale**2) @ A.T + NOISE**2 * np.eye(len(X))
    r = y - A @ m
    evidence = -0.5 * (r @ np.linalg.solve(K, r) + np.linalg.slogdet(2 * np.pi * K)[1])
    return evidence, B @ m + (_k(XN, X) + (B * scale**2) @ A.T) @ np.linalg.solve(K, r)


def _data(num):
    rng = np.random.default_rng(num)
    return rng.uniform(0.0, 2.0, num), rng.normal(size=num)


CASES = [
    (1, 1, [0]),
    (1, 3, [2]),
    (2, 2, [0, 1]),
    (2, 2, [1, 1]),
    (3, 3, [0, 1, 2]),
    (3, 3, [2, 0, 2]),
    (3, 2, [1, 0, 1]),
]


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize(("num", "size", "g"), CASES)
def test_means_and_spreads_of_levels(num, size, g, literal):
    X, y = _data(num)
    m, s, g = M[:size], S[:size], np.array(g)
    plate = size if literal else "table"
    fit = pg.fit(levels, pg.Laplace(hyper=pg.Fixed({})), 0, X, g, m, s, plate, y=y)
    XN, new = np.array([0.1, 1.7]), np.array([0, size - 1])
    here, there = (np.equal.outer(i, np.arange(size)).astype(float) for i in (g, new))
    evidence, mean = _algebra(X, XN, y, here, there, m, s)
    np.testing.assert_allclose(fit.log_evidence, evidence, atol=1e-6)
    np.testing.assert_allclose(fit.predict(XN, new).mean, mean, atol=1e-6)
    assert "u" in fit.sites


@pytest.mark.parametrize(("num", "size"), [(1, 1), (1, 2), (2, 2), (3, 3), (3, 2)])
def test_centres_and_widths_of_bumps(num, size):
    X, y = _data(num)
    m, s = M[:size], S[:size]
    fit = pg.fit(bumps, pg.Laplace(hyper=pg.Fixed({})), 0, X, m, s, y=y)
    XN = np.array([0.1, 1.7])
    here, there = (np.exp(-0.5 * ((x[:, None] - m) / s) ** 2) for x in (X, XN))
    evidence, mean = _algebra(X, XN, y, here, there, np.zeros(size), np.ones(size))
    np.testing.assert_allclose(fit.log_evidence, evidence, atol=1e-6)
    np.testing.assert_allclose(fit.predict(XN).mean, mean, atol=1e-6)


def known(X, g, table, y=None):
    """f and what is known of a level."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + table[g], NOISE), obs=y)


@pytest.mark.parametrize("g", [[0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 3, 3]])
def test_a_table_of_numbers_is_remembered_whole(g):
    """In whichever order the rows look it up; it was taken for one entry per row in their own."""
    X, y = _data(4)
    g, table = np.array(g), np.array([10.0, -20.0, 30.0, 5.0])
    XN, new = np.array([0.1, 1.7]), np.array([3, 0])
    fit = pg.fit(known, pg.Laplace(hyper=pg.Fixed({})), 0, X, g, table, y=y)
    plain = pg.fit(known, pg.Laplace(hyper=pg.Fixed({})), 0, X, g * 0, np.zeros(4), y=y - table[g])
    np.testing.assert_allclose(fit.log_evidence, plain.log_evidence, atol=1e-8)
    np.testing.assert_allclose(
        fit.predict(XN, new).mean, plain.predict(XN, 0 * new).mean + table[new], atol=1e-8
    )


def test_minibatches_keep_a_table_whole():
    X = np.linspace(0.0, 2.0, 12)
    g, table = np.arange(12), 3.0 * np.arange(12.0)
    y = np.sin(X) + table
    svgp = pg.SVGP(num_inducing=12, batch_size=4, max_steps=400, hyper=pg.Fixed({}))
    fit = pg.fit(known, svgp, 0, X, g, table, y=y)
    exact = pg.fit(known, pg.Laplace(hyper=pg.Fixed({})), 0, X, g, table, y=y)
    np.testing.assert_allclose(fit.log_evidence, exact.log_evidence, atol=1e-3)
    new = (np.array([0.3, 1.9]), np.array([11, 4]))
    np.testing.assert_allclose(fit.predict(*new).mean, exact.predict(*new).mean, atol=1e-3)


@pytest.mark.parametrize("argument", ["covariance_matrix", "scale_tril"])
def test_a_covariance_of_as_many_levels_as_rows(argument):
    """Its rows in another order are no covariance matrix."""

    def model(X, g, S, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), X))
        u = numpyro.sample("u", dist.MultivariateNormal(0.0, **{argument: S}))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + u[g], NOISE), obs=y)

    X, y = _data(4)
    S, g = np.diag([1.0, 2.0, 3.0, 4.0]) + 0.5, np.array([0, 0, 3, 1])
    given = np.linalg.cholesky(S) if argument == "scale_tril" else S
    fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed({})), 0, X, g, given, y=y)
    K = _k(X, X) + S[g][:, g] + NOISE**2 * np.eye(4)
    evidence = -0.5 * (y @ np.linalg.solve(K, y) + np.linalg.slogdet(2 * np.pi * K)[1])
    np.testing.assert_allclose(fit.log_evidence, evidence, atol=1e-6)
    XN, new = np.array([0.1, 1.7]), np.array([2, 3])
    mean = (_k(XN, X) + S[new][:, g]) @ np.linalg.solve(K, y)
    np.testing.assert_allclose(fit.predict(XN, new).mean, mean, atol=1e-6)
