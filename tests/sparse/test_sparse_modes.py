"""`SVGP` where the posterior of f has several modes: as good a bound as VI's."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

SD = 0.3


def either_sign(X, y=None):
    """y is f or minus f, with noise."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        which = dist.Categorical(probs=jnp.array([0.7, 0.3]))
        parts = [dist.Normal(f, SD), dist.Normal(-f, SD)]
        numpyro.sample("y", dist.MixtureGeneral(which, parts), obs=y)


def exact(X, y):
    """log p(y): a sum over signs of a Gaussian's density."""
    K = 4.0 * np.exp(-0.5 * (X - X.T) ** 2) + SD**2 * np.eye(2)
    terms = []
    for signs in np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]]):
        log_p = np.sum(np.where(signs > 0, np.log(0.7), np.log(0.3)))
        r = signs * y
        quadratic = r @ np.linalg.solve(K, r) + np.linalg.slogdet(2 * np.pi * K)[1]
        terms.append(log_p - 0.5 * quadratic)
    return np.logaddexp.reduce(terms)


@pytest.mark.parametrize("apart", [0.5, 3.0])
@pytest.mark.filterwarnings("ignore:.*nodes")
def test_a_run_leaves_the_plane_between_two_modes(apart):
    """Between them the bound is -17.6. The best q(f) has one mode of four: below log p(y) by -log
    of its share of the posterior, and VI's bound.
    """
    X, y = np.array([[0.0], [apart]]), np.array([2.0, 2.2])
    fit, best = (pg.fit(either_sign, m, 0, X, y=y) for m in (pg.SVGP(), pg.VI()))
    assert exact(X, y) - 1.0 < fit.log_evidence < exact(X, y)
    np.testing.assert_allclose(fit.log_evidence, best.log_evidence, atol=1e-3)
