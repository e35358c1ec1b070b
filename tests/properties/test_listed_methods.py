"""Every method that `pg.check` lists for a model runs, on small models of a dozen kinds; methods
of models without a GP, of one function or of several.
"""

import re

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy.special import logsumexp

import ppl_gp as pg

N, GROUPS = 9, 3
rng = np.random.default_rng(11)
X = np.linspace(0.0, 4.0, N)
GROUP = np.arange(N) % GROUPS
LABELS = (np.sin(X) + 0.4 * rng.normal(size=N) > 0).astype(int)
COUNTS = rng.poisson(2.0, N)
REAL = np.sin(X) + 0.3 * rng.normal(size=N)
KINDS = rng.integers(0, 3, N)
SHARES = rng.multinomial(6, [0.2, 0.3, 0.5], N)
_CHAIN = {"num_warmup": 4, "num_samples": 4, "num_chains": 1}
METHODS = {
    "Laplace": pg.Laplace(),
    "EP": pg.EP(),
    "VI": pg.VI(),
    "LocalBound": pg.LocalBound(),
    "SVGP": pg.SVGP(num_inducing=4, max_steps=2),
    "SparseNUTS": pg.SparseNUTS(num_inducing=4, **_CHAIN),
    "NUTS": pg.NUTS(**_CHAIN),
    "EllipticalSlice": pg.EllipticalSlice(**_CHAIN),
    "SVI": pg.SVI(num_steps=3),
    "MeanField": pg.MeanField(),
}


def _gp(X, name="f", **options):
    return numpyro.sample(name, pg.GP(pg.kernels.RBF(1.0, 1.0), X, **options))


def _observe(fn, X, y):
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", fn, obs=y)


def offset(X, y=None):
    """A function plus a coefficient."""
    c = numpyro.sample("c", dist.Normal(0.0, 1.0))
    _observe(dist.Bernoulli(logits=c + _gp(X)), X, y)


def groups(X, group, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(0.0, tau))
    _observe(dist.Poisson(jnp.exp(_gp(X) + u[group])), X, y)


def rows(X, y=None):
    """An effect of each row."""
    f = _gp(X)
    with numpyro.plate("data", X.shape[0]):
        h = numpyro.sample("h", dist.Normal(0.0, 0.5))
        numpyro.sample("y", dist.Poisson(jnp.exp(f + h)), obs=y)


def noisy(X, y=None):
    """Two functions: the mean and the logarithm of the noise."""
    f, g = _gp(X), _gp(X, "g", mean=-1.0)
    _observe(dist.Normal(f, jnp.exp(g)), X, y)


def classes(X, y=None):
    with numpyro.plate("classes", 3):
        f = _gp(X)
    _observe(dist.Categorical(logits=f.T), X, y)


def student(X, group, y=None):
    u = numpyro.sample("u", dist.StudentT(4.0).expand([GROUPS]).to_event(1))
    _observe(dist.Bernoulli(logits=_gp(X) + u[group]), X, y)


def labels(X, y=None):
    f = _gp(X)
    with numpyro.plate("data", X.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(f + z, 0.5), obs=y)


def layers(X, y=None):
    inner = _gp(X, "h")
    _observe(dist.Normal(_gp(inner), 0.5), X, y)


def mixed(X, group, y=None):
    """No GP: a generalised linear mixed model."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(0.0, tau))
    _observe(dist.Poisson(jnp.exp(b * X + u[group])), X, y)


def _scores(X, B):
    return jnp.concatenate([jnp.zeros((X.shape[0], 1)), B[0] + X[:, None] * B[1]], 1)


def multinomial(X, y=None):
    """No GP, two functions of one site."""
    B = numpyro.sample("B", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    _observe(dist.Multinomial(6, logits=_scores(X, B)), X, y)


def multinomial_groups(X, group, y=None):
    """No GP, two functions of three sites, one with an unknown spread."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    a = numpyro.sample("a", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.MultivariateNormal(jnp.zeros(2), tau**2 * jnp.eye(2)))
    logits = jnp.concatenate([jnp.zeros((X.shape[0], 1)), a + u[group]], 1)
    _observe(dist.Multinomial(6, logits=logits), X, y)


def scaled(X, y=None):
    """No GP: the mean and the logarithm of the noise are linear."""
    a, b, c, d = (numpyro.sample(k, dist.Normal(0.0, 1.0)) for k in "abcd")
    _observe(dist.Normal(a + b * X, jnp.exp(c + d * X)), X, y)


def factors(X, y=None):
    """No GP, no linear predictor of a Gaussian site, and a conjugate one of a precision."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0))
    _observe(dist.Normal(mean * jnp.ones(X.shape[0]), precision**-0.5), X, y)


def ranks(X, y=None):
    cuts = numpyro.sample("cuts", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        ordered = jnp.stack([cuts[0], cuts[0] + jnp.exp(cuts[1])])
        numpyro.sample("y", dist.OrderedLogistic(_gp_free(X), ordered), obs=y)


def _gp_free(X):
    return numpyro.sample("b", dist.Normal(0.0, 1.0)) * X


def batches(X, y=None, size=4):
    plate = numpyro.plate("data", X.shape[0], subsample_size=size)
    with plate as at:
        pass
    f = _gp(X[at])
    with plate:
        numpyro.sample("y", dist.Normal(f, 0.5), obs=None if y is None else y[at])


def halved(X, y=None):
    """The prior of a function under `scale`."""
    with handlers.scale(scale=0.5):
        f = _gp(X)
    _observe(dist.Normal(f, 0.5), X, y)


MODELS = {
    "a coefficient beside a function": (offset, (X,), LABELS),
    "groups": (groups, (X, GROUP), COUNTS),
    "rows": (rows, (X,), COUNTS),
    "noise": (noisy, (X,), REAL),
    "classes": (classes, (X,), KINDS),
    "Student's t": (student, (X, GROUP), LABELS),
    "labels": (labels, (X,), REAL),
    "layers": (layers, (X,), REAL),
    "mixed, no GP": (mixed, (X, GROUP), COUNTS),
    "multinomial, no GP": (multinomial, (X,), SHARES),
    "multinomial groups, no GP": (multinomial_groups, (X, GROUP), SHARES),
    "noise, no GP": (scaled, (X,), REAL),
    "a mean, no GP": (factors, (X,), REAL),
    "ranks, no GP": (ranks, (X,), KINDS),
    "batches": (batches, (X,), REAL),
    "a scaled prior": (halved, (X,), REAL),
}


def listed(model, args, y) -> dict:
    """{name: the method as it is listed}: some with the hyperparameters sampled."""
    (told,) = (i.message for i in pg.check(model, *args, y=y).items if i.name == "methods")
    plain, _, sampled = (re.split(r"\W+", part) for part in told.partition("with hyper=Sample()"))
    drawn = {k: type(METHODS[k])(hyper=pg.Sample(**_CHAIN)) for k in METHODS if k in sampled}
    return {k: METHODS[k] for k in METHODS if k in plain} | drawn


def ran(method, model, args, y):
    """The fit of a listed method; a fit without steps enough is one, a refusal or a crash not."""
    fit = pg.fit(model, method, 0, *args, y=y, throw=False)
    assert fit.result in pg.Result
    return fit


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_every_method_that_check_lists_runs(kind):
    model, args, y = MODELS[kind]
    found = listed(model, args, y)
    assert found
    for method in found.values():
        fit = ran(method, model, args, y)
        fit.summary()
        if not fit.mixing:
            whole = {"size": None} if kind == "batches" else {}
            assert fit.predict(*args, **whole) is not None


def test_methods_are_listed_with_the_hyper_that_they_take():
    """`Laplace()` was listed, whose `MAP()` refuses to maximise the effects."""
    (told,) = (
        i.message for i in pg.check(student, X, GROUP, y=LABELS).items if i.name == "methods"
    )
    sampled = "with hyper=Sample() EP, Laplace, LocalBound, VI"
    assert told == f"NUTS, EllipticalSlice, SparseNUTS, {sampled}"


def test_methods_that_are_listed_with_a_coefficient_run():
    """`SparseNUTS()` ended with a bare KeyError here."""
    model, args, y = MODELS["a coefficient beside a function"]
    assert "SparseNUTS" in listed(model, args, y)
    fit = ran(METHODS["SparseNUTS"], model, args, y)
    assert set(fit.hyper) == {"c"} and np.all(np.isfinite(fit.predict(X).probs))


@pytest.mark.long
def test_sparse_nuts_with_effects_is_nuts():
    """With a point at each row q(u) is q(f): the same posterior, up to draws."""
    model, args, y = MODELS["groups"]
    draws = {"num_warmup": 500, "num_samples": 3000, "num_chains": 1}
    sparse = pg.SparseNUTS(inducing=X, **draws)
    few, exact = (pg.fit(model, m, 0, *args, y=y, throw=False) for m in (sparse, pg.NUTS(**draws)))
    for site in ("u", "tau"):
        a, b = (np.asarray(f.hyper[site]) for f in (few, exact))
        np.testing.assert_allclose(a.mean(0), b.mean(0), atol=0.1 * b.std(0).max())
        np.testing.assert_allclose(a.std(0), b.std(0), rtol=0.15)
    np.testing.assert_allclose(few.predict(*args).f_mean, exact.predict(*args).f_mean, atol=0.08)


@pytest.fixture(scope="module")
def shares():
    """(log p(y), E[B[1]]) of `multinomial` by weighted prior draws, and the error of the former."""
    draws = np.random.default_rng(0).normal(size=(400_000, 2, 2))
    scores = np.concatenate(
        [np.zeros((len(draws), N, 1)), draws[:, :1] + X[:, None] * draws[:, 1:]], -1
    )
    log_p = scores - logsumexp(scores, -1, keepdims=True)
    log_w = np.sum(SHARES * log_p, (1, 2)) + np.sum(_coefficients())
    weights = np.exp(log_w - logsumexp(log_w))
    error = np.sqrt(np.sum(weights**2))
    mean = np.tensordot(weights, draws, 1)
    sd = np.sqrt(np.tensordot(weights, (draws - mean) ** 2, 1))
    return logsumexp(log_w) - np.log(len(draws)), error, mean, sd


def _coefficients():
    zero = jnp.zeros((N, 3))
    return dist.Multinomial(6, logits=zero).log_prob(SHARES) - 6 * jnp.log(1 / 3)


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["EP", "VI", "Laplace"])
def test_several_functions_without_a_gp_are_integrated_by_every_method(name, shares):
    """`EP()` said "no GP site" unless `integrate` named the only site."""
    log_p, error, mean, sd = shares
    fit = ran(METHODS[name], multinomial, (X,), SHARES)
    assert fit.result == "converged" and list(fit.sites) == ["B"] and not fit.hyper
    off = {"EP": 0.03, "VI": 0.05, "Laplace": 0.3}[name]
    assert fit.log_evidence == pytest.approx(log_p, abs=off + 4.0 * error)
    near = {"EP": 0.05, "VI": 0.05, "Laplace": 0.5}[name] + 4.0 * error
    assert np.max(np.abs(fit.sites["B"].mean - mean) / sd) < near
