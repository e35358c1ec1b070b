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


def test_an_evidence_at_a_noise_of_exp_minus_15_is_right_or_refused():
    """Rounding decides which, and with it the order of operations."""
    fit = pg.fit(heteroscedastic, pg.Laplace(hyper=pg.Fixed(FREE)), 0, X, y=Y, throw=False)
    if fit.result == "nonfinite":
        with pytest.raises(pg.FitError):
            pg.fit(heteroscedastic, pg.Laplace(hyper=pg.Fixed(FREE)), 0, X, y=Y)
    else:
        assert fit.log_evidence == pytest.approx(laplace_by_blocks(FREE), abs=0.01)


def laplace_by_blocks(at):
    """f apart at each datum, eliminated: Newton's steps in g alone, its level integrated."""
    v, g = at["variance_f"] * (1.0 + 1e-8), np.full(len(Y), -15.0)
    K = np.exp(-0.5 * ((X[:, None] - X) / at["lengthscale_g"]) ** 2) + 1e-8 * np.eye(len(Y))
    K = 1.0 + at["variance_g"] * K
    for _ in range(50):
        s2 = np.exp(2.0 * g)
        r = Y * s2 / (v + s2)
        H = np.linalg.inv(K) + np.diag(2.0 * r**2 / s2)
        g = g + np.linalg.solve(H, r**2 / s2 - 1.0 - np.linalg.solve(K, g + 1.0))
    joint = -0.5 * np.sum(r**2 / s2 + (Y - r) ** 2 / v) - np.sum(g) - len(Y) * np.log(2 * np.pi)
    joint -= 0.5 * len(Y) * np.log(v) + 0.5 * (g + 1.0) @ np.linalg.solve(K, g + 1.0)
    joint -= 0.5 * np.linalg.slogdet(2 * np.pi * K)[1]
    H_f = 1.0 / s2 + 1.0 / v
    log_det = np.sum(np.log(H_f)) + np.linalg.slogdet(H - np.diag((2.0 * r / s2) ** 2 / H_f))[1]
    return joint + len(Y) * np.log(2 * np.pi) - 0.5 * log_det
