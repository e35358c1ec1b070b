"""A likelihood that is written as a factor: its predictor is made of arguments that no distribution
is computed from, and never of the observations.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from ppl_gp.results.store.archive import read_archive
from ppl_gp.results.store.save import FORMAT, FORMAT_VERSION

RNG = np.random.default_rng(1)
N, GROUPS = 16, 3
X = np.sort(RNG.uniform(0.0, 5.0, N))
G = np.arange(N) % GROUPS
Z = RNG.normal(size=N)
Y = 1.0 + RNG.normal(size=N)
K = np.exp(-0.5 * (X[:, None] - X) ** 2) + 1e-8 * np.eye(N)
A = np.eye(GROUPS)[G]
C = 0.49 * A @ A.T + np.outer(Z, Z) + K


def parts(X, group, z):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(0.0, 0.7))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    return f + u[group] + b * z


def gaussian(X, group, z, y=None):
    eta = parts(X, group, z)
    with numpyro.plate("data", X.shape[0]):
        numpyro.factor("lik", dist.Normal(eta, 0.4).log_prob(y))


def gaussian_of_counts(X, counts, group, z):
    """Observations by another name, before the rest."""
    eta = parts(X, group, z)
    with numpyro.plate("data", X.shape[0]):
        numpyro.factor("lik", dist.Normal(eta, 0.4).log_prob(counts))


def censored(X, group, z, seen, y=None):
    """An exponential time, of which a lower bound is known where it was not seen."""
    eta = parts(X, group, z)
    with numpyro.plate("data", X.shape[0]):
        numpyro.factor("lik", seen * eta - y * jnp.exp(eta))


def squared(X, group, z, seen, y=None):
    """Another formula of a factor."""
    eta = parts(X, group, z)
    with numpyro.plate("data", X.shape[0]):
        numpyro.factor("lik", seen * eta - y * eta**2)


def sites(X, group, z, time, y=None):
    """The same, observed: a number of events in that time."""
    eta = parts(X, group, z)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("event", dist.Poisson(jnp.exp(eta) * time), obs=y)


def exact():
    cov = C + 0.16 * np.eye(N)
    evidence = -0.5 * Y @ np.linalg.solve(cov, Y) - 0.5 * np.linalg.slogdet(2 * np.pi * cov)[1]
    return evidence, 0.49 * A.T @ np.linalg.solve(cov, Y)


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("method", [pg.Laplace(), pg.EP(), pg.VI()], ids=lambda m: type(m).__name__)
def test_effects_behind_a_factor_are_those_of_the_site(method):
    fit = pg.fit(gaussian, method, 0, X, G, Z, y=Y)
    evidence, u = exact()
    assert fit.log_evidence == pytest.approx(evidence, abs=1e-8)
    np.testing.assert_allclose(fit.sites["u"].mean, u, atol=1e-8)
    new = np.array([0.3, 2.0]), np.array([2, 0]), np.array([0.5, -1.0])
    cross = 0.49 * np.eye(GROUPS)[new[1]] @ A.T + np.outer(new[2], Z)
    cross += np.exp(-0.5 * (new[0][:, None] - X) ** 2)
    found = fit.components(*new)["total"].mean
    np.testing.assert_allclose(found, cross @ np.linalg.solve(C + 0.16 * np.eye(N), Y), atol=1e-6)
    with pytest.raises(pg.DataError, match="'group'"):
        fit.components(new[0], z=new[2])


def test_observations_by_another_name_are_no_zeros():
    fit = pg.fit(gaussian_of_counts, pg.Laplace(), 0, X, Y, G, Z)
    evidence, u = exact()
    assert fit.log_evidence == pytest.approx(evidence, abs=1e-8)
    np.testing.assert_allclose(fit.sites["u"].mean, u, atol=1e-8)


@pytest.mark.slow
def test_censored_rows_see_their_own_groups(tmp_path):
    seen, time = (Z > -0.5).astype(int), np.abs(Y)
    by_factor = pg.fit(censored, pg.Laplace(), 0, X, G, Z, seen, y=time)
    by_sites = pg.fit(sites, pg.Laplace(), 0, X, G, Z, time, y=seen)
    for name in ("u", "b"):
        np.testing.assert_allclose(
            by_factor.sites[name].mean, by_sites.sites[name].mean, rtol=1e-6, atol=1e-8
        )
    constant = np.sum(seen * np.log(time))  # of the Poisson's density
    assert by_factor.log_evidence == pytest.approx(by_sites.log_evidence - constant, abs=1e-6)
    by_factor.save(tmp_path / "fit")
    _, arrays = read_archive(tmp_path / "fit", FORMAT, FORMAT_VERSION)
    assert not any(np.isin(time, x).any() for x in arrays.values())
    other = types.FunctionType(squared.__code__, globals(), "censored", squared.__defaults__)
    other.__qualname__ = "censored"
    with pytest.raises(pg.StoreError, match="formulas behind 'lik'"):
        pg.load(tmp_path / "fit", other)
    again = pg.load(tmp_path / "fit", censored)
    new = X[:3], G[:3], Z[:3]
    wanted = by_sites.components(*new, np.ones(3))["total"].mean
    for fit in (by_factor, again):
        np.testing.assert_allclose(fit.components(*new)["total"].mean, wanted, atol=1e-6)


def clipped(X, is_clipped, y=None):
    """Rows beyond a limit have a factor, all others a density."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        with numpyro.handlers.mask(mask=~is_clipped):
            seen = numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
        beyond = jax.scipy.stats.norm.logsf(seen, f, 0.3)
        numpyro.factor("clipped", jnp.where(is_clipped, beyond, 0.0))


def test_factors_without_their_observations_score_nothing(tmp_path):
    """A loaded fit has none, and y is drawn in their place."""
    y = np.minimum(Y, 0.5)
    fit = pg.fit(clipped, pg.Laplace(hyper=pg.Fixed({})), 0, X, y >= 0.5, y=y)
    assert np.isfinite(fit.loo().elpd)
    assert set(fit.to_datatree()["log_likelihood"]) == {"y", "clipped"}
    loaded = pg.load(fit.save(tmp_path / "fit"), clipped)
    with pytest.raises(pg.DataError, match="does not hold its observations"):
        loaded.loo()
    assert "log_likelihood" not in loaded.to_datatree().children
    new = X[:4], y[:4], y[:4] >= 0.5
    assert np.array_equal(*(f.log_density(*new) for f in (fit, loaded)))
