"""Parts of a predictor that are called as what `components` adds to them."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

X = np.linspace(0.0, 3.0, 5)


def model(X, name, effect, y=None):
    eta = numpyro.sample(name, pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    if effect is not None:
        eta += numpyro.sample(effect, dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 0.5), obs=y)


@pytest.mark.parametrize("names", [("f", "total"), ("offset", "b"), ("total", None)])
def test_no_part_is_hidden(names):
    fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed({})), 0, X, *names, y=np.sin(X))
    assert fit.predict(X).mean.shape == X.shape
    with pytest.raises(pg.ModelError, match="give these another name"):
        fit.components(X)
