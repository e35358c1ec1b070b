"""Random walks and conditional autoregressions are integrated as the multivariate normals that they
are.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.contrib.control_flow import scan
from scipy.sparse import csr_matrix
from scipy.stats import multivariate_normal

import ppl_gp as pg
from ppl_gp.reading.predictor.predictor import root_of

TIMES, AREAS, N, TAU = 5, 4, 11, 0.6
rng = np.random.default_rng(0)
TIME, AREA, Y = rng.integers(0, TIMES, N), rng.integers(0, AREAS, N), rng.normal(size=N)
ADJACENT = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]], float)
WALK = np.minimum.outer(np.arange(1, TIMES + 1), np.arange(1, TIMES + 1))
LOC = np.array([0.3, -0.2, 0.1, 0.5])


def _observe(eta, y):
    with numpyro.plate("data", eta.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 0.5), obs=y)


def walk(time, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    z = numpyro.sample("z", dist.GaussianRandomWalk(tau, TIMES))
    _observe(z[time], y)


def walk_as_matrix(time, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    z = numpyro.sample("z", dist.MultivariateNormal(jnp.zeros(TIMES), tau**2 * jnp.asarray(WALK)))
    _observe(z[time], y)


def walks(time, area, y=None):
    """One walk an area, of different steps."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("areas", AREAS):
        steps = tau * jnp.arange(1.0, AREAS + 1)
        z = numpyro.sample("z", dist.GaussianRandomWalk(steps, TIMES))
    _observe(z[area, time], y)


def scanned(time, y=None, centred=True):
    """The walk step by step, as NumPyro's scan draws it."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))

    def step(before, _):
        z = numpyro.sample("z", dist.Normal(before, tau) if centred else dist.Normal(0.0, 1.0))
        now = z if centred else before + tau * z
        return now, now

    _observe(scan(step, 0.0, None, TIMES)[1][time], y)


def scanned_walks(time, area, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))

    def step(before, _):
        with numpyro.plate("areas", AREAS):
            z = numpyro.sample("z", dist.Normal(before, tau * jnp.arange(1.0, AREAS + 1)))
        return z, z

    _observe(scan(step, jnp.zeros(AREAS), None, TIMES)[1][time, area], y)


def areas(area, y=None, sparse=False):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    between = csr_matrix(ADJACENT) if sparse else ADJACENT
    z = numpyro.sample("z", dist.CAR(LOC, 0.8, tau, between, is_sparse=sparse))
    _observe(z[area], y)


def _dense_walks(tau):
    same = AREA[:, None] == AREA
    steps = (tau * (AREA + 1.0)) ** 2
    return np.where(same, steps[:, None] * WALK[np.ix_(TIME, TIME)], 0.0), np.zeros(N)


def _dense_areas(tau):
    C = np.linalg.inv(tau * (np.diag(ADJACENT.sum(1)) - 0.8 * ADJACENT))
    return C[np.ix_(AREA, AREA)], LOC[AREA]


# name -> (model, arguments, options, the predictor's covariance and mean at tau)
CASES = {
    "walk": (walk, (TIME,), {}, lambda t: (t**2 * WALK[np.ix_(TIME, TIME)], np.zeros(N))),
    "scanned": (scanned, (TIME,), {}, lambda t: (t**2 * WALK[np.ix_(TIME, TIME)], np.zeros(N))),
    "scanned steps": (
        scanned,
        (TIME,),
        {"centred": False},
        lambda t: (t**2 * WALK[np.ix_(TIME, TIME)], np.zeros(N)),
    ),
    "scanned walks": (scanned_walks, (TIME, AREA), {}, _dense_walks),
    "walks": (walks, (TIME, AREA), {}, _dense_walks),
    "areas": (areas, (AREA,), {}, _dense_areas),
    "sparse areas": (areas, (AREA,), {"sparse": True}, _dense_areas),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", CASES)
def test_evidence_gradient_and_posterior_are_the_dense_formula(name):
    model, args, options, dense = CASES[name]

    def exact(tau):
        C, m = dense(tau)
        return multivariate_normal(m, C + 0.25 * np.eye(N)).logpdf(Y)

    @jax.jit
    @jax.value_and_grad
    def evidence(tau):
        factors = pg.read(model, *args, y=Y, hyper={"tau": tau}, **options)
        return pg.log_evidence(pg.Laplace(), factors)[0]

    value, slope = evidence(TAU)
    np.testing.assert_allclose(value, exact(TAU), rtol=1e-9)
    np.testing.assert_allclose(slope, (exact(TAU + 1e-5) - exact(TAU - 1e-5)) / 2e-5, rtol=1e-6)

    fixed = pg.Laplace(hyper=pg.Fixed({"tau": TAU}))
    fit = pg.fit(model, fixed, 0, *args, y=Y, **options)
    found, (C, m) = fit.predict(*args), dense(TAU)
    S = C + 0.25 * np.eye(N)
    np.testing.assert_allclose(found.f_mean, m + C @ np.linalg.solve(S, Y - m), atol=1e-9)
    within = C - C @ np.linalg.solve(S, C)
    np.testing.assert_allclose(found.f_variance, np.diag(within), atol=1e-9)
    assert set(fit.sites) == {"z"} and set(fit.hyper) == {"tau"}


def beside_a_function(X, time, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))

    def step(before, _):
        z = numpyro.sample("z", dist.Normal(0.9 * before, 0.7))
        return z, z

    _observe(f + scan(step, 0.0, None, TIMES)[1][time], y)


@pytest.mark.parametrize("method", [pg.Laplace(), pytest.param(pg.SVGP(), marks=pytest.mark.slow)])
def test_steps_of_a_scan_are_integrated_beside_a_function(method):
    """They were held at one draw: 81 nats were missing, and their variances were zero."""
    X = np.linspace(0.0, 3.0, N)
    if isinstance(method, pg.SVGP):
        method = pg.SVGP(inducing=X, train_inducing=False, max_steps=300)
    steps = 0.7 * np.tril(0.9 ** np.subtract.outer(np.arange(TIMES), np.arange(TIMES)))
    S, Z = steps @ steps.T, np.eye(TIMES)[TIME]
    C = np.exp(-0.5 * np.subtract.outer(X, X) ** 2) + Z @ S @ Z.T + 0.25 * np.eye(N)
    fit = pg.fit(beside_a_function, method, 0, X, TIME, y=Y, throw=False)
    exact = multivariate_normal(np.zeros(N), C).logpdf(Y)
    np.testing.assert_allclose(fit.log_evidence, exact, rtol=1e-6)
    z, gain = fit.sites["z"], S @ Z.T
    np.testing.assert_allclose(z.mean, gain @ np.linalg.solve(C, Y), atol=1e-5)
    within = np.diag(S - gain @ np.linalg.solve(C, gain.T))
    np.testing.assert_allclose(z.variance, within, rtol=1e-5)


def backwards(time, y=None, reverse=True):
    scales = jnp.linspace(0.2, 0.9, TIMES)

    def step(before, scale):
        z = numpyro.sample("z", dist.Normal(0.9 * before, scale))
        return z, z

    if reverse:
        _observe(scan(step, 0.0, scales, reverse=True)[1][time], y)
    else:
        _observe(scan(step, 0.0, scales[::-1])[1][::-1][time], y)


def test_a_scan_from_the_end_is_refused_and_its_remedy_is_right():
    """NumPyro takes given values in the order of the steps: a draw of its own is read backwards."""
    for method in (pg.Laplace(), pg.NUTS(num_warmup=1, num_samples=1)):
        with pytest.raises(pg.ModelError, match=r"'z'.*xs\[::-1\].*z\[::-1\]"):
            pg.fit(backwards, method, 0, TIME, y=Y)
    upper = 0.9 ** np.maximum(np.subtract.outer(np.arange(TIMES), np.arange(TIMES)).T, 0)
    steps = np.triu(upper) * np.linspace(0.2, 0.9, TIMES)
    Z = np.eye(TIMES)[TIME]
    exact = multivariate_normal(np.zeros(N), Z @ steps @ steps.T @ Z.T + 0.25 * np.eye(N))
    fit = pg.fit(backwards, pg.Laplace(), 0, TIME, y=Y, reverse=False)
    np.testing.assert_allclose(fit.log_evidence, exact.logpdf(Y), rtol=1e-9)


@pytest.mark.slow
def test_answers_by_part_and_draws_are_those_of_the_matrix(tmp_path):
    fits = [
        pg.fit(model, pg.Laplace(hyper=pg.Fixed({"tau": TAU})), 0, TIME, y=Y)
        for model in (walk, walk_as_matrix)
    ]
    one, other = (fit.sites["z"] for fit in fits)
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-9)
    np.testing.assert_allclose(one.variance, other.variance, atol=1e-9)
    draws = [np.asarray(f.to_datatree().posterior["z"]).reshape(-1, TIMES) for f in fits]
    error = 5.0 * np.sqrt(np.asarray(other.variance) / min(map(len, draws)))
    for drawn in draws:
        np.testing.assert_array_less(np.abs(drawn.mean(0) - np.asarray(other.mean)), error)
    loaded = pg.load(fits[0].save(tmp_path / "walk.ppl"), walk)
    np.testing.assert_allclose(loaded.sites["z"].mean, one.mean, rtol=1e-12)


@pytest.mark.parametrize("fn", [dist.GaussianRandomWalk(jnp.asarray([0.5, 2.0]), 3)], ids=["walk"])
def test_a_root_gives_draws_of_the_distribution(fn):
    white = random.normal(random.key(0), (20_000, *fn.shape()))
    drawn = jax.vmap(root_of(fn))(white)
    np.testing.assert_allclose(jnp.var(drawn, 0), fn.variance, rtol=0.05)


def over_rows(X, y=None):
    """A walk over the rows themselves."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    z = numpyro.sample("z", dist.GaussianRandomWalk(scale, X.shape[0]))
    _observe(z, y)


@pytest.mark.slow
def test_a_walk_over_the_rows_says_why_other_rows_have_none_of_it():
    X = np.arange(float(N))
    fit = pg.fit(over_rows, pg.Laplace(hyper=pg.Fixed({"scale": TAU})), 0, X, y=Y)
    C = TAU**2 * np.minimum.outer(X + 1.0, X + 1.0)
    exact = multivariate_normal(np.zeros(N), C + 0.25 * np.eye(N)).logpdf(Y)
    np.testing.assert_allclose(fit.log_evidence, exact, rtol=1e-9)
    assert fit.sites["z"].mean.shape == (N,)
    with pytest.raises(pg.ModelError, match="'z'.*entry for each row.*fit.sites"):
        fit.predict(X[:3])
    told = {item.name: item for item in pg.check(over_rows, X, y=Y).items}
    assert not told["rows"].ok and "'z'" in told["rows"].message
    assert "Laplace" in told["methods"].message
