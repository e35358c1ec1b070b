"""Every declared model with layers or latents runs as an ordinary NumPyro program, and through the
whole of a sparse fit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import SVI, Predictive
from often import some

import ppl_gp as pg
from models.deep import deep, deep_binary
from models.gplvm import gplvm
from models.latent import latent
from models.latent_deep import latent_deep

N, NEW = 14, 5
X = np.stack([np.linspace(-2.0, 2.0, N), np.cos(np.arange(N))], 1)
X_NEW = X[:NEW] + 0.1
# The model, its other arguments, shapes of its latent functions and of y for M rows.
MODELS = {
    "latent": (latent, {}, {"f": ()}, ()),
    "deep": (deep, {}, {"f_1": (2,), "f": ()}, ()),
    "deep_binary": (deep_binary, {}, {"f_1": (2,), "f": ()}, ()),
    "latent_deep": (latent_deep, {}, {"f_1": (3,), "f": ()}, ()),
    "gplvm": (gplvm, {"num_outputs": 3}, {"f": (3,)}, (3,)),
}
every = pytest.mark.parametrize("name", MODELS)
# compiling takes seconds
sampled = pytest.mark.parametrize("name", [k for k in MODELS if k != "deep_binary"])


@functools.cache
def data(name):
    """Observations drawn by the model itself."""
    model, kwargs, _, _ = MODELS[name]
    return Predictive(model, num_samples=1)(random.key(3), X, **kwargs)["y"][0]


@functools.cache
def fitted(name, seed=0):
    model, kwargs, _, _ = MODELS[name]
    method = pg.SVGP(max_steps=20, num_inducing=8)
    return pg.fit(model, method, seed, X, y=data(name), **kwargs)


@pytest.mark.one_case
@every
def test_prior_predictive_and_trace(name):
    model, kwargs, gps, shape = MODELS[name]
    draws = Predictive(model, num_samples=3)(random.key(0), X, **kwargs)
    assert draws["y"].shape == (3, N, *shape) and np.isfinite(draws["y"]).all()
    for site, units in gps.items():
        assert draws[site].shape == (3, *units, N)
        assert len(np.unique(np.asarray(draws[site]).reshape(3, -1)[:, 0])) == 3
    y = data(name)
    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        model(X, y=y, **kwargs)
    assert trace["y"]["is_observed"] and trace["y"]["fn"].shape() == (N, *shape)
    if "h" in trace:
        assert trace["h"]["fn"].batch_shape == (N,)


@pytest.mark.slow
@sampled
def test_plain_nuts(name):
    model, kwargs, gps, _ = MODELS[name]
    kernel = numpyro.infer.NUTS(model, max_tree_depth=3)
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=0, num_samples=5, progress_bar=False)
    mcmc.run(random.key(1), X, y=data(name), **kwargs)
    assert np.isfinite(mcmc.get_samples()["f"]).all() and mcmc.get_samples()["f"].shape == (
        5,
        *gps["f"],
        N,
    )


@pytest.mark.slow
@sampled
def test_svi(name):
    model, kwargs, gps, _ = MODELS[name]
    inputs = {k: 2 if name in ("deep", "gplvm") else 3 for k in gps}
    rng = np.random.default_rng(0)
    posteriors = {k: pg.SparsePosterior(rng.normal(size=(5, D))) for k, D in inputs.items()}
    svi = SVI(model, pg.guide(model, posteriors), optax.adam(0.01), pg.ImportanceWeightedELBO(2))
    result = svi.run(random.key(2), 3, jnp.asarray(X), y=data(name), progress_bar=False, **kwargs)
    assert np.isfinite(result.losses).all() and all(
        np.isfinite(v).all() for v in jax.tree.leaves(result.params)
    )
    assert {f"{k}_loc" for k in gps} <= set(result.params)


@pytest.mark.slow
@every
def test_a_fit_predicts_scores_draws_and_is_kept(name, tmp_path):
    model, kwargs, gps, shape = MODELS[name]
    fit = fitted(name)
    assert (
        fit.result == "completed" and np.isfinite(fit.log_evidence) and set(fit.latent) == set(gps)
    )
    bounds = fit.stats["bounds"]
    assert np.mean(bounds[-5:]) > np.mean(bounds[:5])
    prediction = fit.predict(X_NEW)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(prediction))
    assert all(np.all(v > 0) for v in jax.tree.leaves(prediction.f_variance))
    assert prediction.mean.shape == (NEW, *shape) and (prediction.probs is None) == (
        name != "deep_binary"
    )
    few = {"num_draws": 400}  # as a layer's or a latent's default of 4000 takes seconds
    density = fit.log_density(X_NEW, data(name)[:NEW], **few)
    assert density.shape == (NEW,) and np.isfinite(density).all()
    draws = fit.sample(1, X_NEW, 4)
    assert draws.y.shape == (4, NEW, *shape)
    again = pg.load(fit.save(tmp_path / "a.fit"), model)
    for ours, theirs in zip(
        jax.tree.leaves(again.predict(X_NEW)), jax.tree.leaves(prediction), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-10)
    np.testing.assert_allclose(
        again.log_density(X_NEW, data(name)[:NEW], **few), density, atol=1e-10
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", some(MODELS, "latent", "deep_binary"))
def test_two_fits_are_compared_by_their_density_at_new_data(name):
    fits, y = {"one": fitted(name), "other": fitted(name, 1)}, data(name)[:NEW]
    table = {row["method"]: row for row in pg.compare(fits, X_NEW, y).table}
    for label, fit in fits.items():
        assert abs(table[label]["log_density"] - float(jnp.mean(fit.log_density(X_NEW, y)))) < 1e-10
    assert table["one"]["log_density"] != table["other"]["log_density"]


def test_depth_one_is_regression():
    """The same numbers as the shallow model with these priors' values."""
    y = data("deep")
    method = pg.SVGP(
        inducing=X[:6],
        train_inducing=False,
        max_steps=10,
        hyper=pg.Fixed({"lengthscale": np.array([1.0, 2.0]), "variance": 1.3, "noise_scale": 0.4}),
    )
    fit = pg.fit(functools.partial(deep, depth=1), method, 0, X, y=y)
    K = np.asarray(pg.kernels.RBF(1.3, np.array([1.0, 2.0]))(X, X)) + 1.3e-8 * np.eye(N)
    Q = K[:, :6] @ np.linalg.solve(K[:6, :6], K[:6])
    C = Q + 0.16 * np.eye(N)
    titsias = (
        -0.5 * y @ np.linalg.solve(C, y)
        - 0.5 * np.linalg.slogdet(2 * np.pi * C)[1]
        - np.trace(K - Q) / 0.32
    )
    assert abs(fit.log_evidence - titsias) < 1e-5
