"""A second call with new data of the same shape compiles nothing, whatever the method."""

import numpy as np
import pytest
import small_fits

import ppl_gp as pg

SHORT = {"num_warmup": 5, "num_samples": 5, "num_chains": 1}
METHODS = {
    "laplace, fixed": pg.Laplace(hyper=pg.Fixed(small_fits.HYPER)),
    "ep, MAP": pg.EP(hyper=pg.MAP(max_steps=2)),
    "laplace, sample": pg.Laplace(hyper=pg.Sample(**SHORT)),
    "svgp": pg.SVGP(num_inducing=5, max_steps=4),
    "svgp, minibatches": pg.SVGP(num_inducing=5, batch_size=3, max_steps=4),
    "sparse nuts": pg.SparseNUTS(num_inducing=5, **SHORT),
    "nuts": pg.NUTS(**SHORT),
    "elliptical slice": pg.EllipticalSlice(**SHORT),
}


def _data(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(9, 2))
    return X, rng.integers(0, 2, 9)


@pytest.mark.parametrize("name", METHODS)
def test_second_call_compiles_nothing(name):
    def fitted(seed):
        X, y = _data(seed)
        return pg.fit(small_fits.classifier, METHODS[name], seed, X, y=y, throw=False)

    first, second = fitted(0), fitted(1)
    assert second.stats["compilations"] == 0, (first.stats["compilations"], second.stats["compilations"])
    assert not np.allclose(first.latent["f"].mean, second.latent["f"].mean)


def test_compilations_are_counted():
    """The count that the test above trusts is not always zero."""
    X, y = _data(0)
    fit = pg.fit(small_fits.classifier, pg.Laplace(hyper=pg.Fixed(small_fits.HYPER)), 0, X[:8], y=y[:8])
    assert fit.stats["compilations"] > 0 and fit.stats["compile_seconds"] > 0
