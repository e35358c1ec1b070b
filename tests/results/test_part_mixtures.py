"""Answers by part where the hyperparameters were integrated: mixtures over the draws of the dense
formula at each.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from predictor_models import NOISE, TABLE, covariance, diagonal, mean, model, rows_of
from scipy.stats import multivariate_normal, norm

import ppl_gp as pg

SAMPLE = pg.Sample(num_warmup=10, num_samples=7, num_chains=1)
# (terms, rows): by the matrix of the rows, and by unknowns, of which there are fewer than rows
MODELS = {
    "rows": (("g", "h", "beta", "u", "level", "offset"), 14),
    "unknowns": (("h", "beta", "u", "level", "offset"), 30),
}
SCALE = {"g": -0.5, "h": 1.0}  # of a GP in the predictor
CASES = [(m, h) for m in MODELS for h in (pg.Grid(), SAMPLE)]


class Dense:
    """The Gaussian answer at one draw of `tau` by its formula."""

    def __init__(self, terms, rows, y, tau):
        self.rows, self.tau = rows, tau
        own = NOISE**2 + diagonal(terms, rows, tau)
        self.S = covariance(terms, rows, rows, tau) + np.diag(own)
        self.r = np.linalg.solve(self.S, y - mean(terms, rows))

    def given(self, part, new):
        """(mean without the prior's, covariance) of what `part` of the terms adds."""
        C = covariance(part, new, self.rows, self.tau)
        prior = covariance(part, new, new, self.tau) + np.diag(diagonal(part, new, self.tau))
        return C @ self.r, prior - C @ np.linalg.solve(self.S, C.T)


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]}-{type(c[1]).__name__}")
def case(request):
    """(terms, the fit, its weights, the dense formula of each draw)."""
    which, hyper = request.param
    terms, num = MODELS[which]
    rows, y = rows_of(num, 3), np.random.default_rng(3).normal(size=num)
    fit = pg.fit(model, pg.Laplace(hyper=hyper), 0, *rows, y=y, terms=terms, throw=False)
    weights = np.exp(np.asarray(fit.draws.log_weights))
    return terms, fit, weights, [Dense(terms, rows, y, float(t)) for t in fit.hyper["tau"]]


def _is_the_mixture(found, weights, each):
    """`each`: (mean, variance) of every draw. Moments, and the density at some value."""
    means, variances = (np.stack(x) for x in zip(*each, strict=True))
    centre = weights @ means
    np.testing.assert_allclose(found.mean, centre, atol=1e-7)
    whole = weights @ (variances + (means - centre) ** 2)
    np.testing.assert_allclose(found.variance, whole, atol=1e-7)
    at = centre + 0.7 * np.sqrt(whole)
    density = weights @ norm(means, np.sqrt(variances)).pdf(at)
    np.testing.assert_allclose(found.log_prob(at), np.log(density), atol=1e-4)


@pytest.mark.slow
def test_components_are_the_mixture_of_the_dense_formula(case):
    terms, fit, weights, each = case
    new = rows_of(5, 1003)
    parts = fit.components(*new)
    for term in set(terms) - {"offset"}:
        centre = 0.5 if term == "level" else 0.0
        given = [(centre + m, np.diag(v)) for m, v in (d.given((term,), new) for d in each)]
        _is_the_mixture(parts[term], weights, given)
    given = [d.given(terms, new) for d in each]
    whole = [(mean(terms, new) + m, np.diag(v)) for m, v in given]
    _is_the_mixture(parts["total"], weights, whole)
    np.testing.assert_allclose(parts["offset"].mean, new.offset, atol=1e-12)
    found = fit.predict(*new)
    np.testing.assert_allclose(parts["total"].mean, found.f_mean, atol=1e-9)
    np.testing.assert_allclose(parts["total"].variance, found.f_variance, atol=1e-9)


@pytest.mark.slow
def test_processes_of_gps_are_the_mixture_of_the_dense_formula(case):
    terms, fit, weights, each = case
    new = rows_of(5, 1003)
    gps = [k for k in terms if k in SCALE]
    inputs = {"g": new.X[:, 1:], "h": TABLE[new.place]}
    processes = fit.posterior if len(gps) > 1 else {gps[0]: fit.posterior}
    assert set(processes) == set(gps)
    for k in gps:
        a = SCALE[k]
        given = [(m / a, np.diag(v) / a**2) for m, v in (d.given((k,), new) for d in each)]
        _is_the_mixture(processes[k](inputs[k]), weights, given)


@pytest.mark.slow
def test_a_joint_mixture_has_the_density_of_the_dense_formula(case):
    terms, fit, weights, each = case
    new = rows_of(4, 1003)._replace(place=np.array([4, 0, 2, 1]))
    process = fit.posterior["h"] if isinstance(fit.posterior, dict) else fit.posterior
    found = process(TABLE[new.place], joint=True)
    moments = [d.given(("h",), new) for d in each]
    centre = weights @ np.stack([m for m, _ in moments])
    np.testing.assert_allclose(found.mean, centre, atol=1e-7)
    at = centre + 0.3
    density = weights @ [multivariate_normal(m, v).pdf(at) for m, v in moments]
    np.testing.assert_allclose(found.log_prob(at), np.log(density), atol=1e-4)
    drawn = found.sample(random.key(0), (4000,))
    sd = np.sqrt(np.asarray(found.variance))
    assert np.all(np.abs(drawn.mean(0) - centre) < 5 * sd / 4000**0.5)


@pytest.mark.slow
def test_effects_are_the_mixture_of_the_dense_formula(case):
    """u about its level: what the two terms add to a row of the group."""
    terms, fit, weights, each = case
    assert set(fit.sites) == {"beta", "u", "level"}
    rows = rows_of(14, 3)
    new = type(rows)(*(x[:4] for x in rows))._replace(group=np.arange(4))
    given = [(0.5 + m, np.diag(v)) for m, v in (d.given(("u", "level"), new) for d in each)]
    _is_the_mixture(fit.sites["u"], weights, given)
    one = type(rows)(*(x[:1] for x in rows))
    given = [(0.5 + m[0], v[0, 0]) for m, v in (d.given(("level",), one) for d in each)]
    _is_the_mixture(fit.sites["level"], weights, given)


@pytest.mark.slow
def test_an_offset_that_a_hyperparameter_scales_has_its_spread():
    def scaled(X, exposure, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f + b + scale * exposure)), obs=y)

    rng = np.random.default_rng(0)
    X, exposure, y = rng.normal(size=9), rng.uniform(0.0, 1.0, 9), rng.poisson(2.0, 9)
    fit = pg.fit(scaled, pg.Laplace(hyper=pg.Grid()), 0, X, exposure, y=y, throw=False)
    parts, weights = fit.components(X[:3], exposure[:3]), np.exp(np.asarray(fit.draws.log_weights))
    scales = np.asarray(fit.hyper["scale"])
    spread = weights @ (scales - weights @ scales) ** 2
    np.testing.assert_allclose(parts["offset"].mean, weights @ scales * exposure[:3], rtol=1e-10)
    np.testing.assert_allclose(parts["offset"].variance, spread * exposure[:3] ** 2, rtol=1e-8)


def in_units(x, place, y=None):
    """Two functions at a table of places, an intercept and a slope."""
    with numpyro.plate("units", 2):
        h = numpyro.sample("h", pg.GP(pg.kernels.RBF(0.9, 1.2), jnp.asarray(TABLE)))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(h[0][place] + x * h[1][place], NOISE), obs=y)


@pytest.mark.one_case
@pytest.mark.parametrize("num", [7, 40], ids=["rows", "unknowns"])
def test_functions_at_a_table_of_places_have_a_process_each(num):
    rng = np.random.default_rng(num)
    x, place, y = rng.normal(size=num), rng.integers(0, len(TABLE), num), rng.normal(size=num)
    fit = pg.fit(in_units, pg.Laplace(hyper=pg.Fixed({})), 0, x, place, y=y)
    K = covariance(("h",), *[rows_of(len(TABLE), 0)._replace(place=np.arange(len(TABLE)))] * 2, 1.0)
    loads = np.ones(num), x
    S = sum(K[np.ix_(place, place)] * np.outer(a, a) for a in loads) + NOISE**2 * np.eye(num)
    assert set(fit.posterior) == {"h[0]", "h[1]"}
    for p, a in enumerate(loads):
        C = K[:, place] * a
        found = fit.posterior[f"h[{p}]"](TABLE, joint=True)
        np.testing.assert_allclose(found.mean, C @ np.linalg.solve(S, y), atol=1e-7)
        wanted = K - C @ np.linalg.solve(S, C.T)
        np.testing.assert_allclose(found.covariance_matrix, wanted, atol=1e-7)


@pytest.mark.slow
def test_effects_alone_have_no_process():
    rows, y = rows_of(9, 3), np.random.default_rng(3).normal(size=9)
    fit = pg.fit(
        model, pg.Laplace(hyper=pg.Fixed({"tau": 0.7})), 0, *rows, y=y, terms=("u", "beta")
    )
    with pytest.raises(pg.ModelError, match="no GP site.*fit.sites"):
        _ = fit.posterior
