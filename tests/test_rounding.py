"""Evidences that rounding has eaten are no results: a noise that is a function, of data that f
interpolates.
"""

import numpy as np
import pytest

import ppl_gp as pg
from models.heteroscedastic import heteroscedastic

X = np.linspace(-2.0, 2.0, 14)
Y = np.array(
    [-1.85, -3.75, -3.29, -2.63, -1.22, -2.22, -1.25, 1.01, 0.36, 2.21, -0.86, 0.31, -4.28, -2.28]
)
# f is apart at each datum, and the joint mode has f = y and a noise of exp(-15)
FREE = {
    "variance_f": 5.977721364423399,
    "lengthscale_f": 8.186812753081857e-06,
    "variance_g": 0.004452936718584249,
    "lengthscale_g": 1.0374173711363612,
}


def test_an_evidence_without_digits_is_no_result():
    """log Z and the constants are 1e14 each there; their sum came out as anything up to 45 000
    nats, `converged`.
    """
    rng = np.random.default_rng(0)
    for i in range(12):
        scale = np.exp(rng.normal(size=4) * [0.5, 2.0, 0.5, 0.5]) if i else np.ones(4)
        at = {k: v * float(s) for (k, v), s in zip(FREE.items(), scale, strict=True)}
        fit = pg.fit(heteroscedastic, pg.Laplace(hyper=pg.Fixed(at)), 0, X, y=Y, throw=False)
        assert fit.result == "nonfinite" or fit.log_evidence < -20.0


def test_an_ordinary_noise_has_its_digits():
    usual = {"variance_f": 2.4, "lengthscale_f": 0.8, "variance_g": 0.3, "lengthscale_g": 1.3}
    fit = pg.fit(heteroscedastic, pg.Laplace(hyper=pg.Fixed(usual)), 0, X, y=Y)
    assert fit.result == "converged" and -40.0 < fit.log_evidence < -20.0
    with pytest.raises(pg.FitError):
        pg.fit(heteroscedastic, pg.Laplace(hyper=pg.Fixed(FREE)), 0, X, y=Y)
