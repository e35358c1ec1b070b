"""Predictions with another value of a table: what training rows are computed from stays, new
entries may follow, and an answer that would be of other members is refused.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

SCALE, NOISE = 1.5, 0.3
LOCAL = [pg.Laplace(), *(pytest.param(m, marks=pytest.mark.slow) for m in (pg.EP(), pg.VI()))]
named = pytest.mark.parametrize("method", LOCAL, ids=["Laplace", "EP", "VI"])


def rbf(a, b):
    return np.exp(-0.5 * ((a[:, None] - b) / SCALE) ** 2)


def looked_up(places, idx, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, SCALE), places))
    with numpyro.plate("data", idx.shape[0]):
        numpyro.sample("y", dist.Normal(f[idx], NOISE), obs=y)


def at_rows(places, idx, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, SCALE), places[idx]))
    with numpyro.plate("data", idx.shape[0]):
        numpyro.sample("y", dist.Normal(b + f, NOISE), obs=y)


def heights(places, idx, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("areas", places.shape[0]):
        a = numpyro.sample("a", dist.Normal(b * places, 0.5))
    with numpyro.plate("data", idx.shape[0]):
        numpyro.sample("y", dist.Normal(a[idx], NOISE), obs=y)


# {model: covariance of the predictor at places a and b}
MODELS = {
    looked_up: rbf,
    at_rows: lambda a, b: 1.0 + rbf(a, b),
    heights: lambda a, b: np.outer(a, b) + 0.25 * (a[:, None] == b),
}
models = pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)


def data(num, places=6):
    rng = np.random.default_rng(num)
    table = np.cumsum(rng.uniform(0.5, 1.5, places))
    idx = np.sort(np.arange(num) % places)  # rows sorted by place: the first are all at one
    return table, idx, np.sin(table)[idx] + NOISE * rng.normal(size=num)


@named
@models
def test_a_table_that_differs_in_any_entry_is_refused(model, method):
    table, idx, y = data(30)
    fit = pg.fit(model, method, 0, table, idx, y=y)
    others = [table + 10.0, table[::-1], table[:3], *(table + 0.2 * np.eye(6))]
    for other in others:
        with pytest.raises(pg.DataError, match="'places' is not that of training"):
            fit.predict(other, np.array([0]))
    with pytest.raises(pg.DataError, match="'places' is not that of training"):
        fit.log_density(others[0], y[:1], idx[:1])


@pytest.mark.parametrize("num", [4, 6, 30])  # fewer rows than places, as many, more
@named
@models
def test_new_entries_may_follow(model, method, num):
    """Against dense algebra; whether there are more rows than unknowns is no matter."""
    table, idx, y = data(num)
    k, more = MODELS[model], np.r_[table, 2.2, 40.0]
    fit = pg.fit(model, method, 0, table, idx, y=y)
    new = np.array([7, 2, 6])
    cov = k(table[idx], table[idx]) + NOISE**2 * np.eye(num)
    cross = k(more[new], table[idx])
    found = fit.predict(more, new)
    np.testing.assert_allclose(found.mean, cross @ np.linalg.solve(cov, y), atol=2e-5)
    left = k(more[new], more[new]) - cross @ np.linalg.solve(cov, cross.T)
    np.testing.assert_allclose(found.variance, np.diag(left) + NOISE**2, atol=2e-5)
    np.testing.assert_allclose(fit.predict(table, new[1:2]).mean, found.mean[1:2], atol=1e-9)


def test_a_mean_of_the_table_is_no_table_to_extend():
    def centred(places, idx, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", idx.shape[0]):
            mean = b * (places - jnp.mean(places))[idx]
            numpyro.sample("y", dist.Normal(mean, NOISE), obs=y)

    table, idx, y = data(30)
    fit = pg.fit(centred, pg.Laplace(), 0, table, idx, y=y)
    with pytest.raises(pg.DataError, match="linear predictor"):
        fit.predict(np.r_[table, 9.0], np.array([6]))


@pytest.mark.parametrize(
    "method",
    [
        pg.NUTS(num_warmup=5, num_samples=5),
        pg.Laplace(integrate=()),
        pg.MeanField(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_values_that_were_drawn_are_not_of_other_members(method):
    table, idx, y = data(30)
    fit = pg.fit(heights, method, 0, table, idx, y=y, throw=False)
    assert fit.predict(table, np.array([5])).mean.shape == (1,)
    with pytest.raises(pg.DataError, match=r"'a' has shape \(7,\).* \(6,\) in training"):
        fit.predict(np.r_[table, 3.0], np.array([6]))


def test_a_first_argument_that_is_a_table_is_remembered():
    table, idx, y = data(30)
    fit = pg.fit(looked_up, pg.Laplace(), 0, table, idx, y=y)
    np.testing.assert_array_equal(
        fit.predict(idx=np.array([1, 4])).mean, fit.predict(table, np.array([1, 4])).mean
    )

    def line(X, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(b * X, NOISE), obs=y)

    with pytest.raises(pg.DataError, match=r"predict\(\) needs new inputs: give 'X'"):
        pg.fit(line, pg.Laplace(), 0, table, y=table).predict()


def beside(places, idx, w, y=None):
    """A function at the rows and an effect of each place."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, SCALE), w))
    with numpyro.plate("places", places.shape[0]):
        u = numpyro.sample("u", dist.Normal(0.0, 0.8))
    with numpyro.plate("data", idx.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[idx] + places[idx], NOISE), obs=y)


@pytest.mark.parametrize("places", [6, 205])  # columns, and one unknown a row
def test_inducing_variables_know_the_members_of_training(places):
    table, idx, y = data(30 if places == 6 else 250, places)
    w = np.linspace(0.0, 4.0, len(idx))
    fit = pg.fit(beside, pg.SVGP(num_inducing=20, max_steps=5), 0, table, idx, w, y=y, throw=False)
    assert fit.predict(table, idx[:1], w[:1]).mean.shape == (1,)
    with pytest.raises(pg.DataError, match=rf"\['u'\] have shapes \[\({places + 1},\)\]"):
        fit.predict(np.r_[table, 9.0], np.array([places]), w[:1])


def test_a_table_of_two_axes_may_stand_first_and_grow():
    def areas(K, idx, y=None):
        f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(K.shape[0]), K))
        with numpyro.plate("data", idx.shape[0]):
            numpyro.sample("y", dist.Normal(f[idx], NOISE), obs=y)

    A = np.random.default_rng(0).normal(size=(7, 9))
    K, idx, y, new = A @ A.T, np.arange(12) % 5, np.sin(np.arange(12.0)), np.array([6, 2])
    fit = pg.fit(areas, pg.Laplace(), 0, K[:5, :5], idx, y=y)
    S = K[idx][:, idx] + NOISE**2 * np.eye(12)
    mean = K[new][:, idx] @ np.linalg.solve(S, y)
    np.testing.assert_allclose(fit.predict(K, new).mean, mean, atol=1e-8)


def test_members_are_named_where_arrays_of_them_do_not_fit():
    def sums(places, idx, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("areas", places.shape[0]):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", idx.shape[0]):
            numpyro.sample("y", dist.Normal((u + b * places)[idx], NOISE), obs=y)

    table, idx, y = data(30)
    fit = pg.fit(sums, pg.MeanField(), 0, table, idx, y=y)
    with pytest.raises(pg.DataError, match=r"'u' has shape \(7,\).* \(6,\) in training"):
        fit.predict(np.r_[table, 3.0], np.array([6]))
