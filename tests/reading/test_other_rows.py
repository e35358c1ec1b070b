"""Observed sites with rows of their own that share effects or a function: refused with a remedy,
one table with a flag per row, which is run here and agrees with dense algebra.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import mask
from scipy.stats import multivariate_normal

import ppl_gp as pg

NUM, UNITS = 30, 6
RNG = np.random.default_rng(3)
UNIT, X = RNG.integers(0, UNITS, NUM), RNG.normal(size=(NUM, 1))
Y, Z = RNG.normal(size=NUM), RNG.normal(size=UNITS)


def effects(x):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("units", UNITS):
        return numpyro.sample("u", dist.Normal(0.0, scale)), slope * x[:, 0]


def apart(x, unit, y=None, z=None):
    """Several rows and one outcome per unit."""
    u, trend = effects(x)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(u[unit] + trend, 0.3), obs=y)
    with numpyro.plate("outcomes", UNITS):
        numpyro.sample("z", dist.Normal(2.0 * u, 0.5), obs=z)


def one_table(x, unit, is_z, y=None, z=None):
    u, trend = effects(x)
    eta = jnp.where(is_z, 2.0 * u[unit], u[unit] + trend)
    with numpyro.plate("rows", x.shape[0]):
        with mask(mask=~is_z):
            numpyro.sample("y", dist.Normal(eta, 0.3), obs=y)
        with mask(mask=is_z):
            numpyro.sample("z", dist.Normal(eta, 0.5), obs=z)


def table():
    is_z = np.arange(NUM + UNITS) >= NUM
    args = (np.concatenate([X, np.zeros((UNITS, 1))]), np.concatenate([UNIT, np.arange(UNITS)]))
    y, z = np.concatenate([Y, np.zeros(UNITS)]), np.concatenate([np.zeros(NUM), Z])
    return (*args, is_z), {"y": y, "z": z}


def test_effects_of_two_tables_are_refused_and_in_one_they_are_exact():
    with pytest.raises(pg.ModelError, match=r"\['z'\].* one table, with a flag"):
        pg.fit(apart, pg.Laplace(), 0, X, UNIT, y=Y, z=Z)
    args, observed = table()
    fit = pg.fit(one_table, pg.Laplace(hyper=pg.Fixed({"scale": 0.8})), 0, *args, **observed)
    loads = np.zeros((NUM + UNITS, UNITS + 1))
    loads[np.arange(NUM), UNIT], loads[:NUM, UNITS] = 1.0, X[:, 0]
    loads[NUM:, :UNITS] = 2.0 * np.eye(UNITS)
    cov = loads @ np.diag([0.64] * UNITS + [1.0]) @ loads.T
    cov += np.diag([0.09] * NUM + [0.25] * UNITS)
    truth = multivariate_normal(np.zeros(len(cov)), cov).logpdf(np.concatenate([Y, Z]))
    assert abs(fit.log_evidence - truth) < 1e-9


def two_sources(X1, X2, y1=None, y2=None):
    """One function that two sources of different lengths see."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), jnp.concatenate([X1, X2])))
    num = X1.shape[0]
    with numpyro.plate("first", num):
        numpyro.sample("y1", dist.Normal(f[:num], 0.3), obs=y1)
    with numpyro.plate("second", X2.shape[0]):
        numpyro.sample("y2", dist.Normal(f[num:], 0.5), obs=y2)


def one_source(X, is_second, y1=None, y2=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("rows", X.shape[0]):
        with mask(mask=~is_second):
            numpyro.sample("y1", dist.Normal(f, 0.3), obs=y1)
        with mask(mask=is_second):
            numpyro.sample("y2", dist.Normal(f, 0.5), obs=y2)


@pytest.mark.parametrize("method", [pg.Laplace(), pg.EP(), pg.SVGP(max_steps=2)])
def test_two_sources_are_refused_before_any_work(method):
    with pytest.raises(pg.PplGpError, match="one table, with a flag"):
        pg.fit(two_sources, method, 0, X, X[:7], y1=Y, y2=Y[:7])


def test_two_sources_are_exact_in_one_table_and_as_they_are_by_mean_field():
    X_all, is_second = np.concatenate([X, X[:7] + 0.1]), np.arange(NUM + 7) >= NUM
    y1, y2 = np.where(is_second, 0.0, [*Y, *Y[:7]]), np.where(is_second, [*Y, *Y[:7]], 0.0)
    fit = pg.fit(one_source, pg.EP(), 0, X_all, is_second, y1=y1, y2=y2)
    cov = np.exp(-0.5 * (X_all - X_all.T) ** 2) + np.diag(np.where(is_second, 0.25, 0.09))
    truth = multivariate_normal(np.zeros(len(cov)), cov).logpdf([*Y, *Y[:7]])
    assert abs(fit.log_evidence - truth) < 1e-4
    whole = pg.fit(two_sources, pg.MeanField(), 0, X, X[:7] + 0.1, y1=Y, y2=Y[:7])
    assert abs(whole.log_evidence - truth) < 1e-4
