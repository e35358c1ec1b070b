"""Latents of single rows under samplers: they are judged as every other site is."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

X = np.linspace(0.0, 1.0, 6)
SHORT = {"num_warmup": 200, "num_samples": 200, "num_chains": 4}


def two_signs(x, y=None):
    """Whose rows have two modes each, which a chain does not leave."""
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        t = numpyro.sample("t", dist.Normal(0.0, 2.0))
        numpyro.sample("y", dist.Normal(jnp.abs(t) + m * x, 0.05), obs=y)


def rows_only(x, y=None):
    with numpyro.plate("data", x.shape[0]):
        e = numpyro.sample("e", dist.Normal(0.0, 0.7))
        numpyro.sample("y", dist.Poisson(jnp.exp(x + e)), obs=y)


def uncertain_inputs(x, y=None):
    with numpyro.plate("data", x.shape[0]):
        h = numpyro.sample("h", dist.Normal(x, 0.1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), h))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def test_chains_in_other_modes_of_a_row_have_not_mixed():
    fit = pg.fit(two_signs, pg.NUTS(**SHORT), 0, X, y=2.0 + X, throw=False)
    assert fit.result == "not_mixed" and fit.stats["r_hat_by_site"]["t"] > 1.5


def test_a_model_of_row_latents_alone_is_sampled():
    fit = pg.fit(rows_only, pg.NUTS(**SHORT), 0, X, y=np.array([0, 1, 1, 2, 2, 4]))
    assert [*fit.stats["r_hat_by_site"]] == ["e"] and fit.result == "converged"


@pytest.mark.parametrize("method", [pg.NUTS(**SHORT), pg.SparseNUTS(num_inducing=6, **SHORT)])
def test_inputs_that_are_latent_are_among_the_sites(method):
    fit = pg.fit(uncertain_inputs, method, 0, X, y=X, throw=False)
    assert "h" in fit.stats["r_hat_by_site"] and "h" in fit.stats["ess_by_site"]


def test_row_latents_alone_have_a_tree_and_densities():
    fit = pg.fit(rows_only, pg.NUTS(**SHORT), 0, X, y=np.array([0, 1, 1, 2, 2, 4]))
    assert fit.to_datatree()["log_likelihood"]["y"].shape == (4, 200, 6)
    assert np.isfinite(fit.loo().elpd)
