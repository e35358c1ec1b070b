"""Options of mean field, of `SVI`, and of bounds and guides for NumPyro's own SVI."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.infer.autoguide import AutoNormal
from obeyed import X, Y, by, by_slow, caught, hyper_of_arrays
from obeyed_sparse import latents
from small_fits import classifier

import ppl_gp as pg
from ppl_gp.infer import svi
from ppl_gp.mean_field import method as mean_field


def pairs(y):
    with numpyro.plate("columns", 2):
        m = numpyro.sample("m", dist.Normal(0.0, 3.0))
        w = numpyro.sample("w", dist.Gamma(2.0, 1.0))
    with numpyro.plate("rows", len(y), dim=-2):
        numpyro.sample("y", dist.Normal(m, 1.0 / jnp.sqrt(w)), obs=y)


def mean_field_settings(t):
    def fitting(**options):
        return lambda: pg.fit(pairs, pg.MeanField(**options), 0, X)

    found = caught(t, mean_field, "find_structure", fitting(factors=[["m", "w"]], bounds=False))
    assert found.given[2:] == ([["m", "w"]], False)
    with t.patch.context() as patch:
        patch.setattr(mean_field, "find_structure", lambda *_: None)
        patch.setattr(mean_field, "with_forms", lambda *_: None)
        start = caught(t, mean_field, "start_of", fitting(init={"m": np.ones(2)}))
        np.testing.assert_array_equal(start.given[0]["m"], 1.0)
        patch.setattr(mean_field, "start_of", lambda *_: None)
        stages = caught(t, mean_field, "_stages", fitting(restarts=3, max_steps=7, tol=0.5))
        _, starts, method = stages.given
        assert len(starts) == 3 and (method.max_steps, method.tol) == (7, 0.5)
    steps = caught(t, mean_field, "fit_by_steps", fitting(batch_size=4, max_steps=9))
    assert steps.given[0].batch_size == 4


def mean_field_climbs(t):
    """One fit that may make three sweeps and keeps eleven draws; another that tolerates all."""
    fit = pg.fit(pairs, pg.MeanField(max_steps=3, num_draws=11), 0, X, throw=False)
    assert fit.stats["steps"] == 3 and fit.hyper["m"].shape == (11, 2)
    loose = pg.fit(pairs, pg.MeanField(max_steps=3, num_draws=11, tol=1e9), 0, X, throw=False)
    assert loose.result == "converged" and loose.stats["steps"] < 3


def variational(t):
    """Guide, loss and optimiser go to NumPyro's SVI; steps and draws are counted."""
    loss, made = pg.ELBO(num_particles=2), {}
    real = svi.infer.SVI

    def recorded(model, guide, optim, loss, **kwargs):
        made.update(guide=guide, optim=optim, loss=loss)
        return real(model, guide, optim, loss, **kwargs)

    t.patch.setattr(svi.infer, "SVI", recorded)

    def weights(X, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(w * X[:, 0], 1.0), obs=y)

    method = pg.SVI(guide=AutoNormal, loss=loss, optimiser=optax.sgd(0.0), num_steps=7, num_draws=5)
    fit = pg.fit(weights, method, 0, X, y=1.0 * Y, throw=False)
    assert isinstance(made["guide"], AutoNormal) and made["loss"] is loss
    assert fit.stats["steps"] == len(fit.stats["losses"]) == 7
    assert fit.hyper["w"].shape == (5,)


def variational_rate(t):
    """A first step of Adam is as long as its rate."""

    def weights(X, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y)

    made = caught(
        t,
        svi.infer,
        "SVI",
        lambda: pg.fit(weights, pg.SVI(learning_rate=0.07), 0, X, y=jnp.asarray(1.0)),
    )
    params = {"w": jnp.asarray(1.0)}
    optim = made.given[2]
    state = optim.update({"w": jnp.asarray(3.0)}, optim.init(params), value=jnp.zeros(()))
    np.testing.assert_allclose(optim.get_params(state)["w"], 1.0 - 0.07, rtol=1e-4)


def bounds_of_numpyro(t):
    from ppl_gp.infer import elbo as bounds

    elbo = pg.ImportanceWeightedELBO(
        3, 4, expected_last=False, doubly_reparameterised=True, beta=0.5, num_nodes=7
    )

    def lost(elbo):
        given = (jax.random.key(0), {}, classifier, classifier, jnp.asarray(X))
        return lambda: elbo.loss_with_mutable_state(*given, y=jnp.asarray(Y))

    expectation, copies, key, *_ = caught(t, bounds, "Particle", lost(elbo)).given
    settings = {"expected_last": False, "beta": 0.5}
    told = pg.Layers(num_importance=3, doubly_reparameterised=True, **settings)
    assert copies == told and expectation.num_nodes == 7
    plain = pg.ELBO(5, expected_last=False, beta=0.5, num_nodes=7)
    expectation, copies, key, *_ = caught(t, bounds, "Particle", lost(plain)).given
    assert copies == pg.Layers(**settings) and expectation.num_nodes == 7

    class Counted:
        def __init__(self, *args):
            self.key = args[2]

        def bound(self):
            return 1.0 * jnp.sum(jax.random.bits(self.key) % 1000)

    with t.patch.context() as patch:
        patch.setattr(bounds, "Particle", Counted)
        found = lost(plain)()["loss"]
        keys = jax.random.split(jax.random.key(0), 5)
        np.testing.assert_allclose(found, -np.mean([Counted(0, 0, k).bound() for k in keys]))


def one_log_over_everything(t):
    elbo = pg.GlobalImportanceWeightedELBO(6, 4)
    t.patch.setattr(type(elbo), "_log_weight", lambda *_: jnp.log(jnp.asarray(3.0)), raising=True)
    drawn = elbo.log_weights(jax.random.key(0), {}, None, None)
    assert drawn.shape == (6,)
    seen = caught(
        t, type(elbo), "log_weights", lambda: elbo.loss(jax.random.key(0), {}, None, None)
    )
    assert elbo.num_particles == 4 and seen is not None
    np.testing.assert_allclose(elbo.loss(jax.random.key(0), {}, None, None), -np.log(3.0))


def sparse_posterior(t):
    Z = jnp.asarray(X[:4])

    def params(**options):
        q = pg.SparsePosterior(Z, **options)
        model = pg.approximate(handlers.substitute(classifier, hyper_of_arrays()), {"f": q})
        with handlers.seed(rng_seed=0):
            trace = handlers.trace(model).get_trace(jnp.asarray(X), y=jnp.asarray(Y))
        return {k: s["value"] for k, s in trace.items() if s["type"] == "param"}

    plain = params()
    np.testing.assert_array_equal(plain["f_Z"], Z)
    assert set(plain) == {"f_Z", "f_loc", "f_scale_tril"}
    np.testing.assert_array_equal(plain["f_scale_tril"], np.eye(4))
    assert set(params(train_inducing=False)) == {"f_loc", "f_scale_tril"}
    assert set(params(covariance="diagonal")) == {"f_Z", "f_loc", "f_log_scale"}


def guided(t):
    points = {"f": pg.SparsePosterior(X[:4])}

    def sites(model, *args, **options):
        guide = pg.guide(model, *args, **options)
        with handlers.seed(rng_seed=0):
            return handlers.trace(guide).get_trace(jnp.asarray(X), y=jnp.asarray(Y))

    assert "variance_auto_scale" in sites(classifier, points, AutoNormal)
    assert "variance_auto_scale" not in sites(classifier, points)
    at_pairs = {"f": pg.SparsePosterior(X[:4])}
    assert "h_packed" in sites(latents, at_pairs, latents=pg.Free())
    assert "h_encoder$params" in sites(latents, at_pairs)


ROWS: dict[str, dict[str, list]] = {
    "MeanField": {
        **dict.fromkeys(("factors", "init", "restarts", "bounds"), [mean_field_settings]),
        "batch_size": [mean_field_settings],
        **dict.fromkeys(("max_steps", "num_draws", "tol"), [mean_field_climbs]),
        **dict.fromkeys(
            ("natural_rate", "delay", "forgetting"),
            [by("test_mean_field_steps::test_rates_are_those_of_robbins_and_monro")],
        ),
        "checkpoint": [
            by_slow(
                "test_mean_field_steps::test_batches_of_a_regression_come_near_the_whole_and_resume"
            )
        ],
    },
    "SVI": {
        **dict.fromkeys(("guide", "loss", "optimiser", "num_steps", "num_draws"), [variational]),
        "learning_rate": [variational_rate],
    },
    "ELBO": dict.fromkeys(
        ("num_particles", "expected_last", "beta", "num_nodes"), [bounds_of_numpyro]
    ),
    "ImportanceWeightedELBO": dict.fromkeys(
        (
            "num_importance",
            "num_particles",
            "expected_last",
            "doubly_reparameterised",
            "beta",
            "num_nodes",
        ),
        [bounds_of_numpyro],
    ),
    "GlobalImportanceWeightedELBO": dict.fromkeys(
        ("num_importance", "num_particles"), [one_log_over_everything]
    ),
    "SparsePosterior": dict.fromkeys(
        ("inducing", "covariance", "train_inducing"), [sparse_posterior]
    ),
    "guide": dict.fromkeys(("hyper", "latents"), [guided]),
}
