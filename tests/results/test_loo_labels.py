"""Leave-one-out where rows have labels: a row that is left out takes its label with it."""

import arviz_stats
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp

import ppl_gp as pg

RNG = np.random.default_rng(10)
ROWS = np.concatenate([RNG.normal(-6, 1, 9), RNG.normal(6, 1, 6)])


def two_kinds(x):
    w = numpyro.sample("w", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("kinds", 2):
        mu = numpyro.sample("mu", dist.Normal(0.0, 10.0))
        tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Categorical(w))
        numpyro.sample("x", dist.Normal(mu[z], 1.0 / jnp.sqrt(tau[z])), obs=x)


@pytest.fixture(scope="module")
def fit():
    return pg.fit(two_kinds, pg.MeanField(), 0, ROWS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:loo")
def test_rows_are_left_out_with_their_labels(fit):
    loo, inside = fit.loo(), fit.log_density(ROWS)
    assert loo.elpd < inside.sum() - 1.0
    for n in (0, 12):
        without = pg.fit(two_kinds, pg.MeanField(), 0, np.delete(ROWS, n))
        found, wanted = float(loo.elpd_i.values[n]), float(without.log_density(ROWS[n : n + 1])[0])
        assert found == pytest.approx(wanted, abs=0.1)  # draws, and q is not the posterior


@pytest.mark.filterwarnings("ignore:loo")
@pytest.mark.slow
def test_the_tree_has_the_densities_without_labels(fit):
    tree = fit.to_datatree(num_draws=300)
    draws = {k: tree["posterior"][k].values[0] for k in ("w", "mu", "tau")}
    sd = draws["tau"] ** -0.5
    each = np.log(draws["w"])[:, None] + np.array(
        dist.Normal(draws["mu"][:, None], sd[:, None]).log_prob(ROWS[:, None])
    )
    found = tree["log_likelihood"]["x"]
    assert found.dims == ("chain", "draw", "data")
    np.testing.assert_allclose(found.values[0], np.logaddexp(each[..., 0], each[..., 1]), rtol=1e-9)
    own = arviz_stats.loo(tree, pointwise=True)
    assert float(own.elpd) == pytest.approx(float(fit.loo().elpd), abs=0.5)


def logistic(x, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 2.0))
    w = numpyro.sample("w", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b + w * x), obs=y)


X = np.random.default_rng(14).normal(size=20)
BINARY = (np.random.default_rng(3).uniform(size=20) < 1 / (1 + np.exp(-0.5 - 1.5 * X))).astype(int)
_A, _B = (x.ravel() for x in np.meshgrid(*[np.linspace(-9, 9, 401)] * 2))


def _exact(log_p):
    """Leave-one-out on a grid of two values, each N(0, 2)."""
    log_prior = -(_A**2 + _B**2) / 8
    whole = log_prior + log_p.sum(0)
    return logsumexp(whole) - logsumexp(whole - log_p, axis=1)


@pytest.mark.filterwarnings("ignore:Estimated shape", "ignore:loo")
def test_what_mean_field_leaves_out_is_of_the_posterior():
    """Draws of q as they are: elpd .54 too high here."""
    sign = 2 * BINARY - 1
    exact = _exact(-np.logaddexp(0, -sign[:, None] * (_A + _B * X[:, None])))
    found = pg.fit(logistic, pg.MeanField(), 0, X, y=BINARY).loo()
    np.testing.assert_allclose(found.elpd_i.values, exact, atol=0.15)
    assert float(found.elpd) == pytest.approx(exact.sum(), abs=0.25)
