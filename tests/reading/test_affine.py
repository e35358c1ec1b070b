"""Closed forms are for likelihoods that are proved affine in f: curved ones go by quadrature, or
are refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from toy_models import evidence

import ppl_gp as pg
from ppl_gp import kernels
from ppl_gp.errors import ModelError, Result
from ppl_gp.infer.checklist.check import check
from ppl_gp.local.tilted import Cavity, is_affine, line, tilted
from ppl_gp.observations import BernoulliProbit
from ppl_gp.reading.dependence import Dependence, dependence

NUM = 4
GIVEN = jnp.arange(1.0, 5.0)
# What each equals beside the function: (slope, intercept), broadcast.
LINES = {
    "shifted": (lambda f: 2 * f + 1, 2.0, 1.0),
    "negative": (lambda f: -(f - GIVEN) / GIVEN, -1 / GIVEN, 1.0),
    "repeats": (lambda f: jnp.repeat(f[:, None], 3, 1), 1.0, 0.0),
    "plate outside": (lambda f: jnp.broadcast_to(f, (3, NUM)) + 2.0, 1.0, 2.0),
    "rows chosen by data": (
        lambda f: jnp.where(GIVEN > 2, 3 * f, 7.0),
        jnp.array([0, 0, 3, 3]),
        jnp.array([7, 7, 0, 0]),
    ),
    "index": (lambda f: f[jnp.arange(NUM)], 1.0, 0.0),
    "binomial": (lambda f: dist.Binomial(5, logits=f).logits, 1.0, 0.0),
    "probit": (lambda f: BernoulliProbit(3.0 * f - 1.0).f, 3.0, -1.0),
    "compiled": (jax.jit(lambda f: 0.5 * f), 0.5, 0.0),
    "far": (lambda f: 1e9 + 1e-3 * f, 1e-3, 1e9),
    "constant": (lambda f: GIVEN, 0.0, GIVEN),
}
CURVED = {
    "minimum": lambda f: jnp.minimum(f, 2.0),
    "clip": lambda f: jnp.clip(f, -1e6, 1e6),
    "where": lambda f: jnp.where(f < 1e9, f, 0.0),
    "square": lambda f: f**2,
    "product": lambda f: f * (f + 1),
    "abs": jnp.abs,
    "relu": jax.nn.relu,
    "quotient": lambda f: 1.0 / f,
    "rounded": lambda f: f.astype(int).astype(float),
    "inside a call": jax.jit(lambda f: jnp.maximum(f, -1e9)),
    "applied": lambda f: f.at[0].apply(jnp.exp),
    "stopped": lambda f: jax.lax.stop_gradient(f),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_are_recognised_and_read(name):
    function, slope, intercept = LINES[name]
    assert is_affine(function, NUM, jnp.float64)
    at = line(function, NUM, jnp.float64)
    np.testing.assert_allclose(at.slope, np.broadcast_to(slope, at.slope.shape), rtol=1e-12)
    np.testing.assert_allclose(
        at.intercept, np.broadcast_to(intercept, at.intercept.shape), rtol=1e-12
    )


@pytest.mark.parametrize("name", CURVED)
def test_nothing_curved_passes(name):
    assert not is_affine(CURVED[name], NUM, jnp.float64)


def test_hyperparameters_may_be_tracers():
    @jax.jit
    def slope(a):
        assert is_affine(lambda f: a * f + a, NUM, jnp.float64)
        assert not is_affine(lambda f: a * f**2, NUM, jnp.float64)
        assert dependence(lambda f: jnp.exp(a) * GIVEN, jnp.zeros(NUM)) == (Dependence.constant,)
        return line(lambda f: a * f + a, NUM, jnp.float64).slope

    np.testing.assert_allclose(slope(3.0), 3.0)


def one(X, y=None, make=None):
    f = numpyro.sample("f", pg.GP(kernels.RBF(9.0, 1.0), X, jitter=1e-6))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", make(f), obs=y)


X = jnp.asarray(np.random.default_rng(0).uniform(-4, 4, (12, 1)))
REAL = jnp.asarray(np.minimum(3 * np.sin(np.asarray(X[:, 0])), 2.0))
BINARY = (REAL > 0).astype(int)
SATURATED = {
    "sensor": (lambda f: dist.Normal(jnp.minimum(f, 2.0), 0.2), REAL),
    "probit": (lambda f: BernoulliProbit(jnp.clip(f, -2.6, 2.6)), BINARY),
    "scale moves": (lambda f: dist.Normal(f, 0.2 + 0.01 * jnp.abs(f)), REAL),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", SATURATED)
def test_a_saturated_likelihood_has_the_moments_of_quadrature(name):
    make, y = SATURATED[name]
    log_lik = pg.read(one, X, y=y, make=make, hyper={}).log_lik
    mean, variance = jnp.linspace(-2.0, 4.0, 12), jnp.full(12, 4.0)
    a = tilted(log_lik, mean, variance, num=96)
    u = jnp.linspace(-12.0, 12.0, 200_001)
    f = mean + jnp.sqrt(variance) * u[:, None]
    log_p = np.asarray(jax.vmap(log_lik)(f)) - 0.5 * np.asarray(u)[:, None] ** 2
    p = np.exp(log_p) * float(u[1] - u[0]) / np.sqrt(2 * np.pi)
    b = (np.log(p.sum(0)), (first := (p * f).sum(0) / p.sum(0)))
    b += ((p * (f - first) ** 2).sum(0) / p.sum(0),)
    told = np.asarray(a.error(log_lik, Cavity(1.0 / variance, mean, jnp.ones(12, bool))))
    assert np.all(np.abs(a.log_z - b[0]) <= told + 1e-8)
    for x, z in zip(a[:3], b, strict=True):
        np.testing.assert_allclose(x, z, rtol=0, atol=1e-4)


def test_an_affine_likelihood_keeps_its_closed_form(monkeypatch):
    monkeypatch.setattr("ppl_gp.local.tilted.tilted_quadrature", None)
    for make, y in (
        (lambda f: dist.Normal(2 * f - 1, 0.3 + 0.1 * GIVEN[0]), REAL),
        (lambda f: BernoulliProbit(2 * f - 1), BINARY),
    ):
        log_lik = pg.read(one, X, y=y, make=make, hyper={}).log_lik
        assert bool(
            jnp.all(jnp.isfinite(tilted(log_lik, jnp.zeros(12), jnp.ones(12), num=96).log_z))
        )


def clipped(f):
    return dist.Bernoulli(logits=jnp.clip(f, -3.0, 3.0))


@pytest.mark.slow
def test_clipped_logits_are_refused_where_only_lines_serve():
    with pytest.raises(ModelError, match="logits affine in f.*'y'"):
        pg.fit(one, pg.LocalBound(hyper=pg.Fixed()), 0, X, y=BINARY, make=clipped)
    methods = next(
        i for i in check(one, X, y=BINARY, make=clipped).items if i.name == "methods"
    ).message
    assert "LocalBound" not in methods and "EP" in methods
    fit = pg.fit(one, pg.Laplace(hyper=pg.Fixed()), 0, X, y=BINARY, make=clipped)
    with pytest.raises(ModelError, match="mackay"):
        fit.predict(X[:3], link_approximation="mackay")


REPEATS = 3
MANY = jnp.asarray(np.random.default_rng(1).integers(0, 2, (12, REPEATS)))


def as_event(X, y=None, kept=True):
    f = numpyro.sample("f", pg.GP(kernels.RBF(4.0, 1.0), X, jitter=1e-4))
    logits = jnp.array([0.5, 1.0, 2.0]) * f[:, None] - 0.3
    with numpyro.plate("data", X.shape[0]), numpyro.handlers.mask(mask=kept):
        numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)


def in_a_plate(X, y=None):
    f = numpyro.sample("f", pg.GP(kernels.RBF(4.0, 1.0), X, jitter=1e-4))
    with numpyro.plate("repeats", REPEATS, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def as_rows(X, y=None, logits=None, weights=None):
    """The same data, a row each, f of a datum's rows held together by one inducing linear map: a
    kernel on row numbers.
    """
    K = kernels.RBF(4.0, 1.0)

    def same_row(A, B):
        return K(A[:, :1], B[:, :1]) + 1e-4 * (A[:, 1:] == B[:, 1:].T)

    f = numpyro.sample("f", pg.GP(same_row, X, jitter=1e-10))
    with numpyro.plate("data", X.shape[0]), numpyro.handlers.mask(mask=weights):
        numpyro.sample("y", dist.Bernoulli(logits=logits[0] * f + logits[1]), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["event", "plate"])
def test_repeats_of_a_datum_are_repeated_rows(form):
    slopes = jnp.array([0.5, 1.0, 2.0]) if form == "event" else jnp.ones(3)
    offset = -0.3 if form == "event" else 0.0
    kept = (jnp.arange(12) != 2) if form == "event" else jnp.ones(12, bool)
    model, y = (as_event, MANY) if form == "event" else (in_a_plate, MANY.T)
    options = {"kept": kept} if form == "event" else {}
    bound, at = evidence(model, pg.LocalBound(), {}, X, y=y, **options)
    assert Result.from_code(at.code) == "converged"
    rows = jnp.repeat(jnp.concatenate([X, jnp.arange(12.0)[:, None]], 1), REPEATS, 0)
    line_of = (jnp.tile(slopes, 12), jnp.full(36, offset))
    wanted, same = evidence(
        as_rows,
        pg.LocalBound(),
        {},
        rows,
        y=MANY.ravel(),
        logits=line_of,
        weights=jnp.repeat(kept, REPEATS),
    )
    np.testing.assert_allclose(bound, wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(at.marginals.mean, same.marginals.mean[::REPEATS], rtol=0, atol=1e-5)
    assert bound < evidence(model, pg.VI(), {}, X, y=y, **options)[0]
    assert check(model, X, y=y).ok
