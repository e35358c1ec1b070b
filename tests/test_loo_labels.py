"""Leave-one-out where rows have labels: a row that is left out takes its label with it."""

import arviz_stats
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

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
