"""The ArviZ tree of every kind of fit: groups, dimensions, draws and densities, and that files of
it can be written.
"""

import arviz_stats
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from scipy import special, stats
from small_fits import HYPER, NUM, classification, classifier, made_fit

import ppl_gp as pg
from ppl_gp.errors import DataError

X, Y, _ = classification()
POINT = ["laplace", "ep", "vi", "bound"]
SAMPLED = ["laplace_sample", "nuts"]


@pytest.mark.parametrize("name", POINT + SAMPLED)
def test_every_method_has_the_same_groups_and_dimensions(small_fit, name):
    fit = small_fit(name)
    tree = fit.to_datatree(num_draws=40)
    chains, draws = (2, 25) if name in SAMPLED else (1, 40)
    posterior = tree["posterior"]
    assert posterior["f"].dims == ("chain", "draw", "data") and posterior["f"].shape == (
        chains,
        draws,
        NUM,
    )
    for k in ("lengthscale", "variance"):
        if name in SAMPLED:
            assert posterior[k].dims == ("chain", "draw")
        else:
            assert k not in posterior and tree["point_estimates"][k].dims == ()
    assert tree["log_likelihood"]["y"].dims == ("chain", "draw", "data")
    assert (
        tree["observed_data"]["y"].dims == ("data",)
        and tree["constant_data"]["X"].dims[0] == "data"
    )
    np.testing.assert_array_equal(tree["observed_data"]["y"], Y)
    np.testing.assert_array_equal(tree["constant_data"]["X"], X)
    assert set(tree["constant_data"].data_vars) == {"X"}
    logits = posterior["f"].values
    expected = special.log_expit((2 * Y - 1) * logits)
    np.testing.assert_allclose(tree["log_likelihood"]["y"], expected, rtol=1e-9, atol=1e-14)
    assert tree.attrs["inference_library"] == "ppl_gp" and tree.attrs["result"] == str(fit.result)
    assert (
        tree.attrs["method"] == repr(fit.method) and tree.attrs["seconds"] == fit.stats["seconds"]
    )
    assert tree.attrs.get("log_evidence") == fit.log_evidence


def test_f_is_drawn_jointly_at_point_estimates(small_fit):
    fit = small_fit("ep")
    f = fit.to_datatree(num_draws=20_000)["posterior"]["f"].values[0]
    q, K = fit.latent["f"].draw(0), fit.posterior.prior.covariance_matrix
    covariance = np.linalg.inv(np.linalg.inv(K) + np.diag(q.sites.nat2))
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(q.variance, sd**2, rtol=1e-6)
    assert np.all(np.abs(f.mean(0) - q.mean) < 5 * sd / np.sqrt(20_000))
    np.testing.assert_allclose(
        np.cov(f.T) / np.outer(sd, sd), covariance / np.outer(sd, sd), atol=0.04
    )
    tree = fit.to_datatree(num_draws=30)
    assert tree["point_estimates"]["lengthscale"] == HYPER["lengthscale"]
    assert not np.array_equal(
        tree["posterior"]["f"], fit.to_datatree(num_draws=30, rng_key=1)["posterior"]["f"]
    )
    with pytest.raises(DataError, match="num_draws=0"):
        fit.to_datatree(num_draws=0)


def test_sampled_hyperparameters_come_with_their_own_f(small_fit):
    fit = small_fit("laplace_sample")
    tree = fit.to_datatree()
    np.testing.assert_array_equal(
        tree["posterior"]["lengthscale"].values.ravel(), fit.hyper["lengthscale"]
    )
    latent = fit.latent["f"]
    z = (tree["posterior"]["f"].values.reshape(-1, NUM) - latent.mean) / np.sqrt(latent.variance)
    # rows of z are correlated: 50 draws
    assert 0.9 < np.std(z) < 1.1 and abs(np.mean(z)) < 5 / np.sqrt(50)
    stats_group = tree["sample_stats"]
    assert {"diverging", "acceptance_rate", "n_steps", "energy"} <= set(stats_group.data_vars)
    assert stats_group["inner_steps"].shape == (2, 25) and np.all(
        stats_group["inner_residual"] < 1e-6
    )
    assert np.all(stats_group["inner_code"] == 0)


def test_draws_are_kept_as_they_are(small_fit):
    fit = small_fit("nuts")
    tree = fit.to_datatree()
    np.testing.assert_array_equal(
        tree["posterior"]["f"].values.reshape(-1, NUM), fit.latent["f"].mean
    )
    energy = tree["sample_stats"]["energy"]
    # The Hamiltonian's energy, so that ArviZ's BFMI means what it says: well above zero for a
    # sampler that works.
    assert energy.dims == ("chain", "draw") and np.all(arviz_stats.bfmi(tree)["energy"] > 0.1)


def test_trees_of_all_methods_can_be_summarised_and_written(small_fit, tmp_path):
    for name in ("vi", "nuts"):
        tree = small_fit(name).to_datatree(num_draws=20)
        assert "f[24]" in arviz_stats.summary(tree).index
        path = tmp_path / f"{name}.nc"
        tree.to_netcdf(path, engine="h5netcdf")
        read = xr.open_datatree(path, engine="h5netcdf")
        np.testing.assert_array_equal(read["posterior"]["f"], tree["posterior"]["f"])
        assert read.attrs["method"] == tree.attrs["method"]
        read.close()


def several(X, y=None, z=None, mask=None, weights=1.0):
    """Plates of several kinds, an unplated and a masked site, a factor, and a plate with an input's
    name.
    """
    with numpyro.plate("columns", 2):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("functions", 3):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    numpyro.factor("penalty", -jnp.sum(lengthscale))
    with numpyro.plate("X", X.shape[0]), numpyro.handlers.scale(scale=2.0):
        numpyro.sample("z", dist.Normal(f[0], weights), obs=z, obs_mask=mask)
    numpyro.sample("y", dist.Poisson(jnp.exp(f[1] + f[2])).to_event(1), obs=y)


def test_dimensions_masks_scales_and_factors():
    mask = np.arange(NUM) > 3
    data = {"y": Y, "z": X[:, 0], "mask": mask, "weights": np.full(NUM, 2.0)}
    fit = made_fit(several, {"lengthscale": np.ones(2)}, X, num_draws=4, **data)
    tree = fit.to_datatree()
    assert tree["posterior"]["lengthscale"].dims == ("chain", "draw", "columns")
    assert tree["posterior"]["f"].dims == ("chain", "draw", "functions", "X_dim")
    assert tree["observed_data"]["z"].dims == ("X_dim",) and tree["observed_data"]["y"].dims == (
        "X_dim",
    )
    assert set(tree["log_likelihood"].data_vars) == {"y", "z"}
    assert set(tree["constant_data"].data_vars) == {"X", "weights"}
    f = fit.latent["f"].mean
    expected = np.where(mask, stats.norm.logpdf(X[:, 0], f[:, 0], 2.0), 0.0)
    np.testing.assert_allclose(tree["log_likelihood"]["z"].values[0], expected, rtol=1e-10)
    counts = stats.poisson.logpmf(Y, np.exp(f[:, 1] + f[:, 2]))
    np.testing.assert_allclose(tree["log_likelihood"]["y"].values[0], counts, rtol=1e-9)


def test_without_observations_their_groups_are_left_out():
    tree = made_fit(classifier, HYPER, X).to_datatree(num_draws=5)
    assert {"posterior", "point_estimates", "constant_data"} == set(tree.children)
    assert tree["posterior"]["f"].dims == ("chain", "draw", "data")
