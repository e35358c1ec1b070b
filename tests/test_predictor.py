"""Models of several Gaussian sites under one likelihood: local methods integrate their linear
predictor, against dense formulas.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import multivariate_normal

import ppl_gp as pg
from tests.predictor_models import (
    NOISE,
    Rows,
    covariance,
    diagonal,
    drawn_terms,
    mean,
    model,
    rows_of,
)

N, M, TAU = 14, 3, 0.7
SEEDS = [pytest.param(s, marks=[pytest.mark.slow] if s > 3 else []) for s in range(100)]


class Dense:
    """The Gaussian answer by its formula."""

    def __init__(self, terms, rows: Rows, y):
        self.terms, self.rows = terms, rows
        self.S = self.prior(TAU) + NOISE**2 * np.eye(len(y))
        self.r = np.linalg.solve(self.S, y - mean(terms, rows))
        self.y = y

    def prior(self, tau):
        own = diagonal(self.terms, self.rows, tau)
        return covariance(self.terms, self.rows, self.rows, tau) + np.diag(own)

    def evidence(self, tau):
        S = self.prior(tau) + NOISE**2 * np.eye(len(self.y))
        return multivariate_normal(mean(self.terms, self.rows), S).logpdf(self.y)

    def given(self, part, new: Rows, own=0.0):
        """(mean without the prior's, variance) of what `part` of the terms adds at new rows."""
        C = covariance(part, new, self.rows, TAU)
        prior = np.diag(covariance(part, new, new, TAU)) + own
        return C @ self.r, prior - np.einsum("ij,ji->i", C, np.linalg.solve(self.S, C.T))


@pytest.mark.parametrize("seed", SEEDS)
def test_gaussian_answers_are_the_dense_formula(seed):
    terms, rows, new = drawn_terms(seed), rows_of(N, seed), rows_of(M, 1000 + seed)
    y = np.random.default_rng(seed).normal(size=N)
    dense = Dense(terms, rows, y)

    @jax.jit
    def evidence(tau):
        factors = pg.read(model, *rows, y=y, terms=terms, hyper={"tau": tau})
        return pg.log_evidence(pg.Laplace(), factors)[0]

    value, slope = jax.value_and_grad(evidence)(jnp.asarray(TAU))
    np.testing.assert_allclose(value, dense.evidence(TAU), rtol=1e-8)
    step = 1e-5
    numeric = (dense.evidence(TAU + step) - dense.evidence(TAU - step)) / (2 * step)
    np.testing.assert_allclose(slope, numeric, rtol=1e-5, atol=1e-6)

    fixed = pg.Laplace(hyper=pg.Fixed({"tau": TAU}))
    fit = pg.fit(model, fixed, 0, *rows, y=y, terms=terms)
    np.testing.assert_allclose(fit.log_evidence, value, rtol=1e-10)
    whole = dense.given(terms, new, diagonal(terms, new, TAU))
    found = fit.predict(*new)
    np.testing.assert_allclose(found.f_mean, mean(terms, new) + whole[0], atol=1e-8)
    np.testing.assert_allclose(found.f_variance, whole[1], atol=1e-8)

    parts = fit.components(*new)
    for name, wanted in {"units_f": "units"}.items() if "units" in terms else ():
        parts[wanted] = parts.pop(name)
    for term in set(terms) - {"offset", "own"}:
        m, v = dense.given((term,), new, diagonal((term,), new, TAU))
        centre = 0.5 if term == "level" else 0.0
        np.testing.assert_allclose(parts[term].mean, centre + m, atol=1e-8, err_msg=term)
        np.testing.assert_allclose(parts[term].variance, v, atol=1e-8, err_msg=term)
    adding = sum(np.asarray(p.mean) for k, p in parts.items() if k != "total")
    np.testing.assert_allclose(parts["total"].mean, adding, atol=1e-8)


FEW = ("beta", "u", "level", "v", "offset")  # eight to sixteen unknowns


@pytest.mark.parametrize("family", ["normal", "poisson", "logit"])
@pytest.mark.parametrize("method", [pg.Laplace(), pg.EP(), pg.VI()], ids=lambda m: type(m).__name__)
def test_few_unknowns_cost_as_few_and_answer_as_the_matrix(family, method, monkeypatch):
    rows, new = rows_of(40, 5), rows_of(4, 6)
    rng = np.random.default_rng(5)
    y = {"normal": rng.normal(size=40), "poisson": rng.poisson(1.5, 40)}.get(family)
    y = rng.integers(0, 2, 40) if y is None else y

    def answers():
        def evidence(tau):
            factors = pg.read(model, *rows, y=y, terms=FEW, family=family, hyper={"tau": tau})
            return pg.log_evidence(method, factors)[0]

        value, slope = jax.jit(jax.value_and_grad(evidence))(jnp.asarray(TAU))
        fixed = type(method)(hyper=pg.Fixed({"tau": TAU}))
        fit = pg.fit(model, fixed, 0, *rows, y=y, terms=FEW, family=family)
        found = fit.predict(*new)
        parts = [v for p in fit.components(*new).values() for v in (p.mean, p.variance)]
        effects = [v for p in fit.sites.values() for v in (p.mean, p.variance)]
        return value, slope, found.f_mean, found.f_variance, found.mean, *parts, *effects

    few = answers()
    for place in ("local.method", "kept", "infer.hyper.point", "posterior"):
        module = importlib.import_module(f"ppl_gp.{place}")
        monkeypatch.setattr(module, "covariance_of", lambda prior: prior.covariance_matrix)
    jax.clear_caches()
    for a, b in zip(few, answers(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7)
    jax.clear_caches()
