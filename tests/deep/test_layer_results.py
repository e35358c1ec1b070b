"""What a fit with layers or latents gives: latents of new data, trees that line up, evidence, one
set of nodes for several outputs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from jax.scipy.special import logsumexp
from numpyro.infer import SVI
from scipy import stats

import ppl_gp as pg
from models.deep import deep
from models.gplvm import gplvm
from models.latent import latent
from ppl_gp.infer.probes import is_additive
from ppl_gp.reading.factors import JointLogLikelihood
from ppl_gp.sparse.expectation import Expectation, expected_log_lik

N = 16
rng = np.random.default_rng(0)
X = np.linspace(-2.0, 2.0, N)[:, None]
y = np.sin(2.0 * X[:, 0]) * np.where(np.arange(N) % 2, 1.0, -1.0) + 0.1 * rng.normal(size=N)


@pytest.fixture(scope="module", params=[pg.Amortised(), pg.Free()], ids=["encoder", "free"])
def latent_fit(request):
    return pg.fit(
        latent,
        pg.SVGP(
            num_inducing=12,
            max_steps=200,
            layers=pg.Layers(latents=request.param, num_importance=3),
        ),
        0,
        X,
        y=y,
    )


@pytest.mark.slow
def test_latents_of_new_data_are_the_posterior(latent_fit):
    """Against the density on a grid of h, from the fit's own process at [x, h]."""
    new, seen = X[:4] + 0.05, y[:4]
    draws = latent_fit.infer_latents(0, new, seen, num_samples=4000, num_proposals=4000)
    grid = np.linspace(-6.0, 6.0, 2001)
    for n in range(4):
        q = latent_fit.posterior(np.stack([np.full_like(grid, new[n, 0]), grid], 1))
        noise = float(latent_fit.hyper["noise_scale"])
        log_p = stats.norm.logpdf(
            seen[n], np.asarray(q.loc), np.sqrt(np.asarray(q.variance) + noise**2)
        )
        p = np.exp(log_p + stats.norm.logpdf(grid))
        p /= p.sum()
        mean, sd = p @ grid, np.sqrt(p @ grid**2 - (p @ grid) ** 2)
        h = np.asarray(draws.draws["h"])[:, n, 0]
        error = sd / np.sqrt(min(4000.0, float(draws.ess[n])))
        assert abs(h.mean() - mean) < 4.0 * np.sqrt(2.0) * error
        assert abs(h.std() - sd) < 0.1 * sd
    assert draws.draws["h"].shape == (4000, 4, 1)


@pytest.mark.slow
def test_latents_need_a_fit_that_has_them():
    fit = pg.fit(deep, pg.SVGP(num_inducing=5, max_steps=2), 0, X, y=y)
    with pytest.raises(pg.ModelError, match=r"no q\(h\)"):
        fit.infer_latents(0, X, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [pytest.param(deep, marks=pytest.mark.slow), latent], ids=lambda model: model.__name__
)
def test_every_method_has_the_same_variables_and_dimensions(model):
    methods = (
        pg.NUTS(num_warmup=4, num_samples=4, num_chains=1),
        pg.SparseNUTS(num_inducing=5, num_warmup=4, num_samples=4, num_chains=1),
        pg.SVGP(num_inducing=5, max_steps=4),
    )
    trees = [
        pg.fit(model, method, 0, X, y=y, throw=False).to_datatree(num_draws=4) for method in methods
    ]
    for tree in trees:
        points = tree["point_estimates"] if "point_estimates" in tree.children else {}
        assert {*tree.posterior, *points} == set(trees[0].posterior)
        for name, values in tree.posterior.items():
            assert values.dims == trees[0].posterior[name].dims, name
            assert np.all(np.isfinite(values))
        assert tree.log_likelihood["y"].dims == ("chain", "draw", "data")


def test_global_weights_estimate_the_evidence():
    """exp of the log weights averages to p(y), whatever q is."""
    few, seen = X[:5], np.sin(X[:5, 0])

    def regression(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.8), obs=y)

    guide = pg.guide(regression, {"f": pg.SparsePosterior(few[:3])})
    elbo = pg.GlobalImportanceWeightedELBO(20_000)
    svi = SVI(regression, guide, optax.adam(0.01), pg.ELBO())
    args = (jnp.asarray(few),)
    params = svi.get_params(svi.init(random.key(0), *args, y=jnp.asarray(seen)))
    log_w = np.asarray(
        elbo.log_weights(random.key(1), params, regression, guide, *args, y=jnp.asarray(seen))
    )
    K = np.asarray(pg.kernels.RBF(1.0, 1.0)(few, few)) + 0.64 * np.eye(5)
    exact = stats.multivariate_normal.logpdf(seen, np.zeros(5), K)
    w = np.exp(log_w - exact)
    assert abs(w.mean() - 1.0) < 4.0 * w.std() / np.sqrt(len(w))
    assert w.std() > 1e-3  # there is something to average


def test_outputs_of_their_own_share_their_nodes():
    Y = jnp.asarray(rng.normal(size=(N, 2)))
    hyper = {
        "lengthscale": jnp.ones(2),
        "variance": 1.0,
        "noise_scale": 0.3,
        "h": jnp.zeros((N, 2)),
    }
    log_lik = JointLogLikelihood(gplvm, N, hyper, (jnp.asarray(X),), {"y": Y, "num_outputs": 2})
    mean, variance = {"f": jnp.asarray(rng.normal(size=(2, N)))}, {"f": jnp.full((2, N), 0.5)}
    one, product = (
        expected_log_lik(log_lik, mean, variance, Expectation(additive=additive), random.key(0))
        for additive in (True, False)
    )
    np.testing.assert_allclose(one, product, rtol=1e-10)
    assert is_additive(log_lik, {"f": (2, N)})

    def noisy(X, y=None):
        with numpyro.plate("two", 2):
            f = numpyro.sample("f", pg.GP(pg.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f[0], jnp.exp(f[1])), obs=y)

    assert not is_additive(
        JointLogLikelihood(noisy, N, {}, (jnp.asarray(X),), {"y": jnp.asarray(y)}), {"f": (2, N)}
    )


@pytest.mark.slow
def test_layers_whose_means_have_no_spread_find_inducing_points():
    def zero_mean(X, y=None):
        g = numpyro.sample("g", pg.GP(pg.kernels.RBF(), X))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(), g[:, None]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    fit = pg.fit(zero_mean, pg.SVGP(num_inducing=6, max_steps=3), 0, X, y=y)
    assert np.ptp(np.asarray(jax.tree.leaves(fit.inducing["f"])[0])) > 0.1
    assert float(logsumexp(jnp.asarray(fit.log_density(X, y)))) < np.inf
