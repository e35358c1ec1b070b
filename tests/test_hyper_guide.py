"""Autoguides over the hyperparameters of `SVGP`: every kind of site, and nothing that an earlier call left behind."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

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
    """One length scale a column, in a plate or as a vector; the noise a parameter without a prior, or fixed at what it starts from."""
    prior = dist.LogNormal(0.0, 1.0)
    if plate:
        with numpyro.plate("columns", 2):
            lengthscale = numpyro.sample("lengthscale", prior)
    else:
        lengthscale = numpyro.sample("lengthscale", prior.expand([2]).to_event(1))
    noise = numpyro.param("noise", jnp.asarray(0.5), constraint=constraints.positive) if param else 0.5
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def fitted(model, guide=AutoNormal, **kwargs):
    return pg.fit(model, pg.SVGP(hyper=guide, **OPTIONS), 0, X, y=Y, **kwargs)


def test_a_fit_does_not_depend_on_the_calls_before_it():
    alone = fitted(optional)
    larger = fitted(optional, extra=True)
    again = fitted(optional)
    assert set(larger.hyper) == {"lengthscale", "variance"} and set(again.hyper) == {"lengthscale"}
    assert alone.log_evidence == again.log_evidence
    assert abs(larger.log_evidence - alone.log_evidence) < 5.0  # its q(variance) is no free entropy
    narrow, wide = fitted(optional, most=0.5), fitted(optional, most=3.0)
    assert np.all(narrow.hyper["noise"] < 0.5) and np.any(wide.hyper["noise"] != narrow.hyper["noise"])


def test_hyperparameters_in_a_plate_are_those_of_a_vector():
    """The same density under another declaration: the same draws and the same run."""
    plate, vector = fitted(in_a_plate, param=False), fitted(in_a_plate, plate=False, param=False)
    assert plate.hyper["lengthscale"].shape == (100, 2)
    np.testing.assert_allclose(plate.stats["bounds"], vector.stats["bounds"], rtol=1e-8)


@pytest.mark.parametrize("guide", [AutoNormal, AutoMultivariateNormal])
def test_parameters_without_a_prior_are_points(guide):
    fit = fitted(in_a_plate, guide)
    assert np.ptp(fit.hyper["noise"]) == 0.0 and abs(fit.hyper["noise"][0] - 0.5) > 0.01
    assert np.std(fit.hyper["lengthscale"][:, 0]) > 0.01
    assert fit.stats["log_evidence_se"] > 0.0


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
