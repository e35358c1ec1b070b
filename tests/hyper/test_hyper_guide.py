"""Autoguides over the hyperparameters of `SVGP`: every kind of site, and nothing that an earlier
call left behind.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import SVI, autoguide
from numpyro.infer.autoguide import AutoBNAFNormal, AutoDelta, AutoMultivariateNormal, AutoNormal

import ppl_gp as pg

RNG = np.random.default_rng(4)
X = RNG.normal(size=(20, 2))
Y = np.sin(2 * X[:, 0]) + 0.3 * RNG.normal(size=20)
OPTIONS = {"num_inducing": 6, "max_steps": 150}


def optional(X, y=None, extra=False, most=None):
    """A hyperparameter that a keyword adds, and one whose support a keyword sets."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0)) if extra else 1.0
    noise = 0.3 if most is None else numpyro.sample("noise", dist.Uniform(0.0, most))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def in_a_plate(X, y=None, plate=True, param=True):
    """One length scale a column, in a plate or as a vector; the noise a parameter without a prior,
    or fixed at what it starts from.
    """
    prior = dist.LogNormal(0.0, 1.0)
    if plate:
        with numpyro.plate("columns", 2):
            lengthscale = numpyro.sample("lengthscale", prior)
    else:
        lengthscale = numpyro.sample("lengthscale", prior.expand([2]).to_event(1))
    noise = (
        numpyro.param("noise", jnp.asarray(0.5), constraint=constraints.positive) if param else 0.5
    )
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def fitted(model, guide=AutoNormal, **kwargs):
    return pg.fit(model, pg.SVGP(hyper=guide, **OPTIONS), 0, X, y=Y, **kwargs)


@pytest.mark.slow
def test_a_fit_does_not_depend_on_the_calls_before_it():
    alone = fitted(optional)
    larger = fitted(optional, extra=True)
    again = fitted(optional)
    assert set(larger.hyper) == {"lengthscale", "variance"} and set(again.hyper) == {"lengthscale"}
    assert alone.log_evidence == again.log_evidence
    assert abs(larger.log_evidence - alone.log_evidence) < 5.0  # its q(variance) is no free entropy
    narrow, wide = fitted(optional, most=0.5), fitted(optional, most=3.0)
    assert np.all(narrow.hyper["noise"] < 0.5) and np.any(
        wide.hyper["noise"] != narrow.hyper["noise"]
    )


@pytest.mark.slow
def test_hyperparameters_in_a_plate_are_those_of_a_vector():
    """The same density under another declaration: the same draws and the same run."""
    plate, vector = fitted(in_a_plate, param=False), fitted(in_a_plate, plate=False, param=False)
    assert plate.hyper["lengthscale"].shape == (100, 2)
    np.testing.assert_allclose(plate.stats["bounds"], vector.stats["bounds"], rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("guide", [AutoNormal, AutoMultivariateNormal])
def test_parameters_without_a_prior_are_points(guide):
    fit = fitted(in_a_plate, guide)
    assert np.ptp(fit.hyper["noise"]) == 0.0 and abs(fit.hyper["noise"][0] - 0.5) > 0.01
    assert np.std(fit.hyper["lengthscale"][:, 0]) > 0.01
    assert fit.stats["log_evidence_se"] > 0.0


@pytest.mark.slow
def test_a_model_of_parameters_alone_has_no_guide():
    def model(X, y=None):
        noise = numpyro.param("noise", jnp.asarray(0.5), constraint=constraints.positive)
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    guided, point = fitted(model), fitted(model, pg.MAP())
    np.testing.assert_array_equal(guided.stats["bounds"], point.stats["bounds"])


def test_a_guide_of_other_sites_is_refused():
    def of_nothing(model):
        return lambda *args, **kwargs: numpyro.sample("other", dist.Normal())

    with pytest.raises(pg.ModelError, match=r"the guide draws \['other'\]"):
        fitted(optional, of_nothing)


def group_effect(X, y=None):
    """Group effects with a random scale: maximised together they have no maximum."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    u = numpyro.sample("u", dist.Normal(0.0, tau).expand([2]).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[(X[:, 0] > 0).astype(int)], 0.3), obs=y)


def point_at_one(model):
    """A guide of one's own that is a point."""
    return lambda *args, **kwargs: numpyro.sample(
        "lengthscale",
        dist.Delta(numpyro.param("at", lambda key: 1.0 + 0.0 * jax.random.normal(key))),
    )


def in_parts(*point):
    """AutoDelta over the sites named, AutoNormal over the others."""

    def make(model):
        both = autoguide.AutoGuideList(model)
        both.append(AutoNormal(handlers.block(model, hide=list(point)), prefix="a"))
        both.append(AutoDelta(handlers.block(model, expose=list(point)), prefix="b"))
        return both

    return make


@pytest.mark.parametrize("method", ["fit", "svi"])
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (autoguide.AutoLaplaceApproximation, "trained as a point"),
        (autoguide.AutoDAIS, "anneals"),
        (autoguide.AutoSemiDAIS, "anneals"),
        (autoguide.AutoSurrogateLikelihoodDAIS, "anneals"),
        (autoguide.AutoBatchedMultivariateNormal, "batch dimensions"),
        (autoguide.AutoGuideList, r"draws no \['lengthscale'\]"),
        (lambda model: None, "has to return a guide"),
        (lambda model: model.no_such_name, "makes no guide"),
    ],
)
def test_guides_that_stand_for_another_distribution_than_they_are_trained_as_are_refused(
    make, told, method
):
    with pytest.raises(pg.PplGpError, match=told):
        if method == "fit":
            fitted(optional, make)
        else:
            guide = pg.guide(optional, {"f": pg.SparsePosterior(X[:6])}, hyper=make)
            SVI(optional, guide, optax.adam(0.01), pg.ELBO()).init(jax.random.key(0), X, y=Y)


@pytest.mark.slow
def test_a_point_is_judged_without_its_prior_whichever_way_it_is_asked_for():
    """One number for one value, the bound there; `Fixed` at that value is the second route."""
    options = {"inducing": X[:6], "train_inducing": False, "max_steps": 600}
    point, mode = (
        pg.fit(optional, pg.SVGP(hyper=h, **options), 0, X, y=Y) for h in (AutoDelta, pg.MAP())
    )
    held = pg.fit(optional, pg.SVGP(hyper=pg.Fixed(point.hyper), **options), 0, X, y=Y)
    assert np.shape(point.hyper["lengthscale"]) == () and "log_evidence_se" not in point.stats
    np.testing.assert_allclose(point.hyper["lengthscale"], mode.hyper["lengthscale"], rtol=1e-2)
    np.testing.assert_allclose(
        [point.log_evidence, mode.log_evidence], held.log_evidence, atol=1e-2
    )
    own = pg.fit(optional, pg.SVGP(hyper=point_at_one, **{**options, "max_steps": 3}), 0, X, y=Y)
    assert np.shape(own.hyper["lengthscale"]) == ()


@pytest.mark.parametrize("make", [AutoDelta, in_parts("u")])
def test_points_of_any_guide_meet_the_gate_of_map(make):
    guide = pg.guide(group_effect, {"f": pg.SparsePosterior(X[:6])}, hyper=make)
    with pytest.raises(pg.ModelError, match="'u' has a spread"):
        SVI(group_effect, guide, optax.adam(0.01), pg.ELBO()).init(jax.random.key(0), X, y=Y)


@pytest.mark.slow
def test_effects_are_no_points_under_svgp():
    """An autoguide leaves them to be integrated; a guide that draws them meets the gate."""
    fit = fitted(group_effect, AutoDelta)
    assert "u" not in fit.hyper and np.all(fit.sites["u"].variance > 0.01)
    with pytest.raises(pg.ModelError, match="'u' has a spread"):
        fitted(group_effect, in_parts("u"))


@pytest.mark.slow
def test_a_scale_may_be_a_point_where_what_it_spreads_has_a_distribution():
    """Variational EM: the bound at the scale, without its prior."""
    fit = fitted(group_effect, in_parts("tau"))
    assert np.ptp(fit.hyper["tau"]) == 0.0 and np.std(fit.hyper["u"][:, 0]) > 0.01


def smooth(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 1.0), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("make", [AutoNormal, AutoMultivariateNormal, AutoDelta])
@pytest.mark.parametrize(
    "bound", [pg.ELBO(2), pg.ImportanceWeightedELBO(2)], ids=["elbo", "weighted"]
)
def test_bounds_under_an_autoguide_train_in_svi(bound, make):
    """The gradient passes K_uu batched over draws of the hyperparameters. A draw's gradient leaves
    out the score of q, whose mean is zero: over many draws it is that of finite differences, and of
    a guide that draws nothing it is so exactly.
    """
    x, y = jnp.asarray(X[:5]), jnp.asarray(Y[:5])
    guide = pg.guide(smooth, {"f": pg.SparsePosterior(X[:3])}, hyper=make)
    svi = SVI(smooth, guide, optax.adam(0.01), bound)
    params = svi.run(jax.random.key(0), 3, x, y=y, progress_bar=False).params
    slopes = jax.tree.map(lambda p: np.random.default_rng(5).normal(size=np.shape(p)), params)

    def compared(key):
        loss = lambda p: bound.loss(key, p, smooth, guide, x, y=y)  # noqa: E731
        moved = lambda h: jax.tree.map(lambda p, s: p + h * s, params, slopes)  # noqa: E731
        along = jax.tree.map(lambda g, s: jnp.sum(g * s), jax.grad(loss)(params), slopes)
        return sum(jax.tree.leaves(along)), (loss(moved(1e-5)) - loss(moved(-1e-5))) / 2e-5

    keys = jax.random.split(jax.random.key(1), 1 if make is AutoDelta else 20_000)
    along, numeric = jax.jit(lambda keys: jax.lax.map(compared, keys, batch_size=500))(keys)
    if make is AutoDelta:
        np.testing.assert_allclose(along, numeric, rtol=1e-5)
        return
    error = np.std(along - numeric) / np.sqrt(len(keys))
    assert error < 0.01 * np.abs(np.mean(numeric))
    assert np.abs(np.mean(along - numeric)) < 4.0 * error


@pytest.mark.slow
def test_a_flow_without_an_inverse_is_scored_by_what_it_was_drawn_from():
    fit = fitted(in_a_plate, AutoBNAFNormal, param=False)
    assert np.std(fit.hyper["lengthscale"][:, 0]) > 0.01
    assert abs(fit.log_evidence - fitted(in_a_plate, AutoNormal, param=False).log_evidence) < 3.0


def test_global_weights_under_an_autoguide_average_to_the_evidence():
    x, y = jnp.asarray(X[:4]), jnp.asarray(Y[:4])
    guide = pg.guide(smooth, {"f": pg.SparsePosterior(X[:4])}, hyper=AutoNormal)
    svi = SVI(smooth, guide, optax.adam(0.01), pg.ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), x, y=y))
    params |= {"lengthscale_auto_loc": jnp.zeros(()), "lengthscale_auto_scale": jnp.asarray(0.5)}
    weights = pg.GlobalImportanceWeightedELBO(20_000).log_weights
    found = np.exp(
        jax.jit(lambda key: weights(key, params, smooth, guide, x, y=y))(jax.random.key(2))
    )
    nodes, share = np.polynomial.hermite_e.hermegauss(30)
    distances = np.sum((X[:4, None] - X[:4]) ** 2, -1)
    density = [
        np.exp(
            dist.MultivariateNormal(0.0, np.exp(-0.5 * distances / np.exp(z)) + np.eye(4)).log_prob(
                y
            )
        )
        for z in nodes
    ]
    truth, error = np.sum(share / share.sum() * np.array(density)), np.std(found) / np.sqrt(20_000)
    assert abs(found.mean() - truth) < 4 * error and error < 0.02 * truth
