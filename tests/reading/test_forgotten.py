"""Models that were not given their observations: one refusal for all methods; what is a density
without data is sampled.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from ppl_gp.errors import ModelError

X = np.linspace(-1.0, 1.0, 6)
METHODS = (
    pg.Laplace(),
    pg.EP(),
    pg.VI(),
    pg.Laplace(pg.Sample(5, 5, 1)),
    pg.SVGP(3, max_steps=2),
    pg.NUTS(5, 5, 1),
    pg.EllipticalSlice(5, 5, 1),
    pg.SparseNUTS(3, num_warmup=5, num_samples=5, num_chains=1),
)
WITHOUT_GP = (pg.Laplace(), pg.NUTS(5, 5, 1), pg.SVI(num_steps=2), pg.MeanField())


def _function(X):
    return numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))


def plain(X, y=None):
    scale = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    f = _function(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, scale), obs=y)


def other_name(X, counts=None, exposure=None):
    f = _function(X)
    with numpyro.plate("data", X.shape[0]):
        rate = jnp.exp(f) if exposure is None else exposure * jnp.exp(f)
        numpyro.sample("n", dist.Gamma(rate, 1.0), obs=counts)


def two(X, y=None):
    f = _function(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("a", dist.Normal(f, 0.1), obs=None if y is None else y["a"])
        numpyro.sample("b", dist.Normal(f, 0.2), obs=None if y is None else y["b"])


def penalised(X, y=None):
    f = _function(X)
    numpyro.factor("penalty", -(jnp.sum(f) ** 2))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def of_weights(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(w * X, 0.5), obs=y)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_every_method_says_that_the_observations_were_not_given(method):
    with pytest.raises(ModelError, match="observes nothing: its argument 'y'.*y="):
        pg.fit(plain, method, 0, X)


@pytest.mark.parametrize("model, argument", [(other_name, "counts"), (two, "y"), (penalised, "y")])
def test_the_argument_is_found_by_what_it_does(model, argument):
    told = f"observes nothing: its argument '{argument}'.*{argument}="
    with pytest.raises(ModelError, match=told):
        pg.fit(model, pg.NUTS(5, 5, 1), 0, X)


@pytest.mark.parametrize("method", WITHOUT_GP, ids=lambda m: type(m).__name__)
def test_without_a_gp_too(method):
    with pytest.raises(ModelError, match="observes nothing: its argument 'y' was not given"):
        pg.fit(of_weights, method, 0, X, y=None)


def test_check_says_it():
    for model in (plain, of_weights):
        assert "NO  observations" in (told := str(pg.check(model, X))) and "y=" in told


def test_a_density_without_data_is_sampled():
    def funnel():
        v = numpyro.sample("v", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2.0)))

    def by_factor(y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.factor("lik", -((w - 1.0) ** 2) / (1.0 if y is None else y))

    for model in (funnel, by_factor):
        assert pg.fit(model, pg.NUTS(5, 5, 1), 0, throw=False).draws.num == 5


def test_a_factor_that_sees_data_is_a_likelihood():
    def model(X, z, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.factor("lik", dist.Normal(w * X, 0.5).log_prob(z))
            numpyro.sample("y", dist.Normal(w * X, 0.5), obs=y)

    fit = pg.fit(model, pg.NUTS(5, 5, 1), 0, X, X, throw=False)
    assert np.shape(fit.hyper["y"]) == (5, 6)


def test_of_two_outputs_one_may_be_left_open():
    def outputs(X, a=None, b=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("a", dist.Normal(w * X, 0.5), obs=a)
            numpyro.sample("b", dist.Normal(w * X, 0.5), obs=b)

    fit = pg.fit(outputs, pg.NUTS(5, 5, 1), 0, X, a=X, throw=False)
    assert np.shape(fit.hyper["b"]) == (5, 6)
