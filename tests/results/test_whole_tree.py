"""Trees with every group that ArviZ knows: their numbers by a second route, and its checks run."""

import arviz_stats
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import ppl_gp as pg

N = 12
X = np.linspace(-2.0, 2.0, N)
Y = np.random.default_rng(0).poisson(np.exp(1.0 + np.sin(X)))
GROUPS = {"posterior", "posterior_predictive", "prior", "prior_predictive", "log_prior"}
GROUPS |= {"log_likelihood", "observed_data", "constant_data"}


def counts(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    level = numpyro.sample("level", dist.Normal(1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    rate = numpyro.deterministic("rate", jnp.exp(level + f))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


METHODS = {
    "laplace": pg.Laplace(),
    "ep": pg.EP(),
    "sample": pg.Laplace(hyper=pg.Sample(num_warmup=100, num_samples=100)),
    "nuts": pg.NUTS(100, 100),
    "svgp": pg.SVGP(num_inducing=6, max_steps=100),
}


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("name", METHODS)
def test_groups_and_their_numbers(name):
    fit = pg.fit(counts, METHODS[name], 0, X, y=Y, throw=False)
    names = [f"row {i}" for i in range(N)]
    tree = fit.to_datatree(num_draws=100, whole=True, coords={"data": names})
    assert set(tree.children) >= GROUPS - {"log_prior"}
    posterior = tree["posterior"]
    assert posterior["f"].coords["data"].values.tolist() == names if "f" in posterior else True
    points = tree["point_estimates"] if "point_estimates" in tree.children else {}
    assert ("lengthscale" in points) == (name in ("laplace", "ep", "svgp"))
    level = (points if "level" in points else posterior)["level"].values[..., None]
    if "f" in posterior:
        np.testing.assert_allclose(
            posterior["rate"], np.exp(level + posterior["f"].values), rtol=1e-9
        )
    drawn = tree["posterior_predictive"]["y"]
    assert drawn.dims == ("chain", "draw", "data") and drawn.sizes["data"] == N
    spread = np.sqrt(posterior["rate"].values.mean() / drawn.size)
    assert abs(drawn.values.mean() - posterior["rate"].values.mean()) < 6 * spread
    if "lengthscale" in posterior:
        want = stats.lognorm.logpdf(posterior["lengthscale"].values, 0.5)
        np.testing.assert_allclose(tree["log_prior"]["lengthscale"], want, rtol=1e-9)
    prior = tree["prior"]
    assert {"lengthscale", "level", "f", "rate"} <= set(prior.data_vars)
    np.testing.assert_allclose(
        prior["rate"], np.exp(prior["level"].values[..., None] + prior["f"].values), rtol=1e-9
    )
    assert tree["prior_predictive"]["y"].shape == (1, 100, N)


def levelled(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    eta = numpyro.deterministic("eta", level + f)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


def test_noise_of_replicates_knows_nothing_of_what_it_is_added_to():
    """One key for both gave correlations of 0.99; 1000 draws know theirs to 0.03."""
    fit = pg.fit(levelled, pg.Laplace(hyper=pg.Grid()), 0, X, y=np.sin(X))
    tree = fit.to_datatree(num_draws=1000, whole=True)
    for before, after in (("prior", "prior_predictive"), ("posterior", "posterior_predictive")):
        eta, y = tree[before]["eta"].values[0], tree[after]["y"].values[0]
        correlations = np.corrcoef(eta.T, (y - eta).T)[:N, N:]
        assert np.max(np.abs(correlations)) < 5.0 / np.sqrt(1000)
    want = np.asarray(fit.predict(X).variance)
    np.testing.assert_allclose(y.var(0), want, rtol=6.0 * np.sqrt(2.0 / 1000))


def test_prior_draws_are_the_priors():
    fit = pg.fit(counts, pg.Laplace(), 0, X, y=Y)
    prior = fit.to_datatree(num_draws=4000, whole=True)["prior"]
    for name, cdf in (("lengthscale", stats.lognorm(0.5).cdf), ("level", stats.norm(1.0).cdf)):
        assert stats.kstest(prior[name].values.ravel(), cdf).pvalue > 1e-3
    for n in (0, 7):
        assert stats.kstest(prior["f"].values[0, :, n], stats.norm.cdf).pvalue > 1e-3


def events(X, y=None):
    """Hyperparameters of every shape: in an event, in a plate of events, in a matrix."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.zeros(2), 0.5).to_event(1))
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("group", 4):
        level = numpyro.sample("level", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    noise = numpyro.sample("noise", dist.LKJCholesky(2))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(share[0], lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        mean = f + jnp.sum(level**2) + noise[1, 0]
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


@pytest.mark.slow
def test_an_event_of_hyperparameters_has_one_prior_density():
    method = pg.Laplace(hyper=pg.Sample(num_warmup=20, num_samples=20))
    X2 = np.stack([X, X**2], 1)
    fit = pg.fit(events, method, 0, X2, y=np.sin(X), throw=False)
    tree = fit.to_datatree(whole=True)
    found, drawn = tree["log_prior"], tree["posterior"]
    sizes = {k: found[k].shape[2:] for k in found.data_vars}
    assert sizes == {"lengthscale": (), "share": (), "level": (4,), "noise": ()}
    assert found["level"].dims == ("chain", "draw", "group")
    values = drawn["lengthscale"].values
    want = stats.lognorm.logpdf(values, 0.5).sum(-1)
    np.testing.assert_allclose(found["lengthscale"], want, rtol=1e-9)
    np.testing.assert_allclose(found["share"], np.log(2.0), rtol=1e-9)
    want = stats.norm.logpdf(drawn["level"].values).sum(-1)
    np.testing.assert_allclose(found["level"], want, rtol=1e-9)


def scoped(x, y=None):
    with numpyro.plate("group", 2):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    slope, spread = numpyro.sample("slope", dist.Laplace()), numpyro.sample("s", dist.HalfNormal())
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(slope * x + level[0], spread), obs=y)


def test_names_in_a_scope_have_dots_in_the_tree():
    model = numpyro.handlers.scope(scoped, prefix="a")
    fit = pg.fit(model, pg.NUTS(50, 100, 1), 0, X, y=np.sin(X), throw=False)
    labels = {"a.group": ["left", "right"]}
    tree = fit.to_datatree(whole=True, coords=labels)
    np.testing.assert_array_equal(tree["posterior"]["a.slope"].values[0], fit.hyper["a/slope"])
    assert tree["posterior"]["a.level"].dims == ("chain", "draw", "a.group")
    assert tree["log_prior"]["a.level"].coords["a.group"].values.tolist() == ["left", "right"]
    assert np.isfinite(fit.loo().elpd)


def test_coordinates_that_fit_nothing_are_told():
    fit = pg.fit(counts, pg.Laplace(), 0, X, y=Y)
    for coords in ({"data": ["a"]}, {"rows": list(range(N))}):
        with pytest.raises(pg.DataError, match="coords="):
            fit.to_datatree(num_draws=5, coords=coords)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_arviz_runs_on_the_tree(name):
    import matplotlib

    matplotlib.use("Agg")
    plots = pytest.importorskip("arviz_plots")
    fit = pg.fit(counts, METHODS[name], 0, X, y=Y, throw=False)
    tree = fit.to_datatree(num_draws=200, whole=True)
    some = {"backend": "matplotlib"}
    plots.plot_ppc_dist(tree, **some)
    plots.plot_ppc_pit(tree, **some)
    plots.plot_loo_pit(tree, **some)
    if "level" in fit.points:
        assert "log_prior" not in tree.children
    else:
        plots.plot_prior_posterior(tree, var_names=["level"], **some)
        assert "level" in arviz_stats.psense_summary(tree, var_names=["level"]).index
    assert np.isfinite(arviz_stats.loo(tree).elpd)
    matplotlib.pyplot.close("all")


@pytest.mark.one_case
@pytest.mark.parametrize("how", ["obs_mask", "handler"])
def test_rows_that_were_not_observed_have_no_density_and_no_prior(how):
    """ArviZ's leave-one-out of the tree is that of a fit to the other rows."""

    def partly(X, seen=None, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            if how == "obs_mask":
                numpyro.sample("y", dist.Normal(f, 1.0), obs=y, obs_mask=seen)
            else:
                seen = jnp.ones(len(X), bool) if seen is None else seen
                with numpyro.handlers.mask(mask=seen):
                    numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    seen, y = np.arange(N) % 4 != 1, np.sin(X)
    tree = pg.fit(partly, pg.Laplace(), 0, X, seen=seen, y=y).to_datatree(whole=True)
    densities = tree["log_likelihood"]["y"]
    assert densities["data"].values.tolist() == np.flatnonzero(seen).tolist()
    assert "y" not in tree["prior"].data_vars
    assert tree["prior_predictive"]["y"].sizes["data"] == N
    only = pg.fit(partly, pg.Laplace(), 0, X[seen], y=y[seen]).to_datatree()
    want = arviz_stats.loo(only).elpd
    assert abs(arviz_stats.loo(tree).elpd - want) < 0.2  # two sets of 1000 draws


def test_rows_that_only_one_site_misses_stay():
    def both(X, seen=None, y=None, z=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y, obs_mask=seen)
            numpyro.sample("z", dist.Normal(f, 1.0), obs=z)

    fit = pg.fit(both, pg.Laplace(), 0, X, seen=np.arange(N) > 2, y=np.sin(X), z=np.sin(X))
    densities = fit.to_datatree()["log_likelihood"]
    assert densities["z"].sizes["data"] == N
    assert np.all(densities["y"].values[..., :3] == 0.0)


def test_rows_that_every_site_misses_have_no_density():
    """Also where the sites score different rows."""

    def both(X, is_z, seen, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            for name, own in {"y": ~is_z & seen, "z": is_z}.items():
                with numpyro.handlers.mask(mask=own):
                    numpyro.sample(name, dist.Normal(f, 1.0), obs=y)

    is_z, seen = np.arange(N) % 2 == 0, np.arange(N) != 3
    fit = pg.fit(both, pg.Laplace(), 0, X, is_z, seen, y=np.sin(X))
    densities = fit.to_datatree()["log_likelihood"]
    assert densities["z"].shape[-1] == densities["y"].shape[-1] == N - 1 == fit.loo().n_data_points
