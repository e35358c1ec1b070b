"""Warnings of the package point to the user's line, however deep their cause."""

import warnings
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

ROOT = Path(pg.__file__).parent
X = np.linspace(0.0, 4.0, 8)


def with_points(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.factor("known about it", -((b - 0.3) ** 2))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + b, 0.3), obs=y)


def draws(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def _said(call) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w for w in caught if issubclass(w.category, UserWarning)]


def test_a_fit_warns_at_the_line_of_the_fit():
    (said,) = _said(lambda: pg.fit(with_points, pg.Laplace(), 0, X, y=X))
    assert "maximises 'b'" in str(said.message)
    assert said.filename == __file__
    assert "pg.fit(with_points" in Path(__file__).read_text().splitlines()[said.lineno - 1]


@pytest.mark.slow
def test_a_fit_that_is_asked_warns_at_the_line_of_the_question():
    fit = pg.fit(draws, pg.Laplace(), 0, X, y=(X > 2).astype(int))
    asked = _said(lambda: fit.loo())
    assert all(w.filename == __file__ for w in asked)


def test_there_is_one_way_to_warn():
    """`errors.warn`, which finds that line."""
    own = [p for p in ROOT.rglob("*.py") if "warnings.warn(" in p.read_text()]
    assert not own and "warn_explicit" in (ROOT / "errors.py").read_text()
