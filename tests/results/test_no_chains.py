"""Draws without a log evidence that are of no chain: points, and guides without a bound."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDelta, AutoLaplaceApproximation

import ppl_gp as pg

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(12, 3)), rng.normal(size=12)


def linear(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def fitted(guide):
    return pg.fit(linear, pg.SVI(guide=guide, num_steps=60, num_draws=100), 0, X, y=Y)


def test_a_point_is_no_sample_of_the_posterior(tmp_path):
    """Its equal draws have equal weights, which leave nothing out: -18.7 for -21.6 nats."""
    fit = fitted(AutoDelta)
    assert fit.points == pg.load(fit.save(tmp_path / "fit.zip"), linear).points == {"w"}
    assert "w" in fit.to_datatree()["point_estimates"]
    with pytest.raises(pg.DataError, match=r"q of SVI is a point of \['w'\]"):
        fit.loo()
    comparison = pg.compare({"point": fit}, X, Y)
    assert comparison.reference_name is None and "is a point" in comparison.notes["point"][1]


def test_draws_of_a_mode_are_taken_for_an_approximation():
    fit = fitted(AutoLaplaceApproximation)
    with pytest.warns(UserWarning, match="draws of SVI's q are taken for the posterior's"):
        fit.loo()
    assert pg.compare({"mode": fit}, X, Y).reference_name is None


def test_chains_are_a_reference_after_saving_too(tmp_path):
    fit = pg.fit(linear, pg.NUTS(20, 20, num_chains=1), 0, X, y=Y, throw=False)
    again = pg.load(fit.save(tmp_path / "fit.zip"), linear)
    assert fit.by_chains and again.by_chains and fit.points == again.points == set()
    assert pg.compare({"nuts": again}, X, Y).reference_name == "nuts"
