"""What the rows of a predictor of several functions are, against the posterior processes of the
sites.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

X = np.linspace(-2.0, 2.0, 10)
NEW = np.array([-1.0, 0.4, 2.6])
Y = np.array([0, 1, 0, 2, 2, 1, 3, 2, 3, 3])


def ordered(f, g):
    width = jax.nn.softplus(g)
    return dist.OrderedLogistic(f, jnp.stack([0 * g - 1.0, width - 1.0, width + 1.0], -1))


LIKELIHOODS = {
    "ordered": ordered,  # g stands before f
    "normal": lambda f, g: dist.Normal(f, jnp.exp(g)),
    "gamma": lambda f, g: dist.Gamma(jnp.exp(g), jnp.exp(g - f)),
    "shifted": lambda f, g: dist.Normal(f + g + 1.0, jnp.exp(-g)),
}


def program(name):
    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(2.0, 1.0), X))
        g = numpyro.sample("g", pg.GP(pg.kernels.RBF(0.5, 1.5), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", LIKELIHOODS[name](f, g), obs=y)

    return model


def value(told, sites):
    """A row's name, evaluated."""
    return eval(told, {"offset": 1.0}, sites)


@pytest.mark.one_case
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_rows_are_what_they_are_called(name):
    fit = pg.fit(
        program(name), pg.Laplace(hyper=pg.Fixed({})), 0, X, y=Y + (name == "gamma"), throw=False
    )
    found = fit.predict(NEW)
    sites = {k: np.asarray(process(NEW).mean) for k, process in fit.posterior.items()}
    assert found.f_rows == fit.functions
    for told, row in zip(found.f_rows, found.f_mean, strict=True):
        np.testing.assert_allclose(value(told, sites), row, atol=1e-5)
    tree = fit.to_datatree(num_draws=3, predictions=NEW)
    for group in ("posterior", "predictions"):
        eta = tree[group]["eta"]
        assert tuple(eta.coords[eta.dims[2]].values) == fit.functions
    draws = tree["posterior"]
    for told in fit.functions:
        row = draws["eta"].sel(eta_dim_0=told).values
        both = {k: draws[k].values for k in sites}
        np.testing.assert_allclose(value(told, both), row, atol=1e-3)


def test_rows_of_plates_of_effects_and_of_factors():
    def model(X, y=None):
        with numpyro.plate("classes", 3):
            f = numpyro.sample("f", pg.GP(pg.kernels.RBF(2.0, 1.0), X))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        logits = jnp.stack([f[0] + b, 0.5 * f[1], -f[2] + 1.0], -1)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=Y % 3, throw=False)
    assert set(fit.functions) == {"b + f[0]", "(..) f[1]", "-f[2] + offset"}


def test_functions_that_add_up_the_same_have_their_places():
    """A table kept the last of them alone."""

    def panel(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(2.0, 1.0), X))
        with numpyro.plate("units", 3):
            u = numpyro.sample("u", dist.Normal(0.0, 0.8))
        with numpyro.plate("rows", 3, dim=-2), numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + u[:, None], 0.3), obs=y)

    how = pg.Laplace(hyper=pg.Fixed({}), integrate=("f", "u"))
    fit = pg.fit(panel, how, 0, X, y=np.sin(X) + np.array([[1.0], [0.0], [-1.0]]))
    found = fit.predict(NEW)
    assert fit.functions == ("f + u (0)", "f + u (1)", "f + u (2)")
    table = found.to_frame()
    for r, name in enumerate(fit.functions):
        np.testing.assert_array_equal(table[f"f_mean[{name}]"], found.f_mean[r])
    eta = fit.to_datatree(num_draws=3)["posterior"]["eta"]
    assert eta.sel(eta_dim_0="f + u (1)").shape == (1, 3, len(X))


def test_one_function_has_no_rows():
    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(2.0, 1.0), X))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f + b)), obs=y)

    fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=Y)
    assert fit.functions is None
    assert fit.predict(NEW).f_rows is None
