"""What a model raises while it is run is told as an error of this package, with the line of the
model.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

X, GROUPS, Y = np.linspace(0.0, 1.0, 4)[:, None], np.array([0, 1, 1, 0]), np.array([1, 0, 2, 1])
TABLE = np.array([0.5, 2.0])
FIXED = pg.Fixed({})


def counts(rate):
    def model(X, g, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(rate(f, g)), obs=y)

    return model


def if_value(f, g):
    if g[0] > 0:
        return jnp.exp(f)
    return 2.0 * jnp.exp(f)


WANTS_VALUES = {
    "a NumPy table indexed by an argument": lambda f, g: TABLE[g] * jnp.exp(f),
    "np.where on an argument": lambda f, g: np.where(g == 1, 2.0, 1.0) * jnp.exp(f),
    "if on an argument": if_value,
    "NumPy on f": lambda f, g: np.exp(f),
}


@pytest.mark.parametrize("case", WANTS_VALUES)
@pytest.mark.parametrize("verb", ["fit", "check"])
def test_numpy_on_arguments_is_named_with_its_line(case, verb):
    model = counts(WANTS_VALUES[case])
    act = {
        "fit": lambda: pg.fit(model, pg.Laplace(hyper=FIXED), 0, X, GROUPS, y=Y),
        "check": lambda: pg.check(model, X, GROUPS, y=Y),
    }
    with pytest.raises(
        pg.ModelError, match=r"(lambda|if_value).*line \d+.*jnp.asarray\(table\)\[index\]"
    ):
        act[verb]()


def test_the_remedy_works():
    fit = pg.fit(
        counts(lambda f, g: jnp.asarray(TABLE)[g] * jnp.exp(f)),
        pg.Laplace(hyper=FIXED),
        0,
        X,
        GROUPS,
        y=Y,
    )
    assert fit.result == "converged"


def test_a_parameter_out_of_range_is_told_as_bad_data():
    with pytest.raises(pg.DataError, match="Poisson distribution got invalid rate parameter.*line"):
        pg.fit(
            counts(lambda f, g: jnp.exp(f) * (g - 0.5)), pg.Laplace(hyper=FIXED), 0, X, GROUPS, y=Y
        )


def test_an_argument_of_another_length_does_not_hide_the_line():
    """The lengths were blamed, with a line of the package."""

    def model(X, g, few, y=None):
        counts(WANTS_VALUES["a NumPy table indexed by an argument"])(X, g, y)

    with pytest.raises(pg.ModelError, match=r"lambda.*line \d+.*jnp.asarray\(table\)\[index\]"):
        pg.fit(model, pg.Laplace(hyper=FIXED), 0, X, GROUPS, np.ones(2), y=Y)
