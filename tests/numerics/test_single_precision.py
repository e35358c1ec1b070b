"""Fits in float32, JAX's default: searches end, at the numbers of float64 up to rounding."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import multivariate_normal, norm

import ppl_gp as pg

_PROGRAM = """
import json, sys, warnings
import jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
import ppl_gp as pg
if sys.argv[1] == "x64":
    numpyro.enable_x64()
rng = np.random.default_rng(5)
X = np.sort(rng.uniform(0.0, 6.0, 60)); g = rng.integers(0, 6, 60)
real = np.sin(X) + 0.2 * rng.normal(size=60)
counts = rng.poisson(np.exp(1.0 + np.sin(X)))
grouped = rng.poisson(np.exp(0.5 * np.cos(X) + 0.7 * rng.normal(size=6)[g]))

def regression(X, y=None):
    l = numpyro.sample("l", dist.LogNormal(0.0, 1.0))
    n = numpyro.sample("n", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, l), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, n), obs=y)

def poisson(X, y=None):
    l = numpyro.sample("l", dist.LogNormal(0.0, 1.0))
    v = numpyro.sample("v", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.Matern32(v, l), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(1.0 + f)), obs=y)

def mixed(X, g, y=None):
    t = numpyro.sample("t", dist.HalfNormal(1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 2.0))
    with numpyro.plate("groups", 6):
        u = numpyro.sample("u", dist.Normal(0.0, t))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(b * jnp.cos(X) + u[g])), obs=y)

dense = np.sort(rng.uniform(0.0, 6.0, 50)); wave = np.sin(2 * dense)

def known(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(2.0, 1.0), X))
    kind = dist.Bernoulli(logits=f) if y.dtype.kind == "i" else dist.StudentT(4.0, f, 0.3)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", kind, obs=y)

MODELS = {"classes": (known, (dense,), (wave + 0.3 * rng.normal(size=50) > 0).astype(int)),
          "tails": (known, (dense,), wave + 0.3 * rng.standard_t(4, size=50)),
          "regression": (regression, (X,), real), "poisson": (poisson, (X,), counts),
          "mixed": (mixed, (X, g), grouped)}
METHODS = {"Laplace": pg.Laplace(), "EP": pg.EP(), "VI": pg.VI(),
           "Grid": pg.Laplace(hyper=pg.Grid())}
found = {}
for name in sys.argv[2].split(","):
    kind, method = name.split(" ")
    model, args, y = MODELS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("error", RuntimeWarning)  # overflows in NumPy
        fit = pg.fit(model, METHODS[method], 0, *args, y=y, throw=False)
    value = fit.log_evidence if method != "Grid" else fit.stats["log_posterior"]
    weights = np.exp(np.asarray(fit.draws.log_weights))
    hyper = {k: float(weights @ np.asarray(v)) for k, v in fit.draws.hyper.items()}
    found[name] = [str(fit.result), float(value), hyper]
print(json.dumps(found))
"""
# The search of Grid is that of MAP. Sites of dense inputs are a hundredth of their cavities.
DEFAULT = ["regression Grid", "classes EP", "tails VI"]
SLOW = [
    f"{kind} {method}"
    for kind in ("regression", "poisson", "mixed", "classes", "tails")
    for method in (
        ["Laplace", "EP", "VI"] + ["Grid"] * (kind in ("regression", "poisson", "mixed"))
    )
]


def _run(precision: str, names: list[str]) -> dict:
    environment = {**os.environ, "JAX_ENABLE_X64": "0"}
    command = [sys.executable, "-c", _PROGRAM, precision, ",".join(names)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "names", [DEFAULT, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_a_search_ends_in_float32_where_it_ends_in_float64(names):
    """They ended as `max_steps`: no step could gain the 1e-10 nats of float64, and sites below 6 %
    of their cavities were dropped as rounding.
    """
    few, many = _run("x32", names), _run("x64", names)
    for name in names:
        (result, value, hyper), (_, exact, there) = few[name], many[name]
        assert result == "converged", name
        # the jitter of float32 is 1e-5 of the variance, for 1e-8 in float64
        assert value == pytest.approx(exact, abs=0.05), name
        np.testing.assert_allclose(
            list(hyper.values()), list(there.values()), rtol=0.05, err_msg=name
        )


def test_whole_numbers_that_single_precision_rounds_are_refused():
    """Times in seconds were rounded to one or two of twelve, 63 nats off: columns of an integrated
    predictor are floats. So are the inputs of a GP alone, which a model may compute of an origin.
    """
    start = 1_700_000_000
    t, y = start + 10 * np.arange(12), np.sin(np.arange(12.0))

    def model(t, y=None, level=True, raw=False, unit=1):
        x = (t if t.ndim == 1 else t[:, 0]) / unit if raw else (t - start) / 10.0
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.5), x))
        if level:
            f = f + numpyro.sample("level", dist.Normal(0.0, 0.5))
        with numpyro.plate("data", t.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    held = pg.Laplace(hyper=pg.Fixed({}))
    s = np.arange(12.0)
    K = np.exp(-0.5 * ((s[:, None] - s) / 1.5) ** 2) + (0.04 + 1e-5) * np.eye(12)
    truth = multivariate_normal(np.zeros(12), K).logpdf(y)
    with jax.enable_x64(False):
        alone = pg.fit(model, held, 0, t, y=y, level=False)
        assert abs(alone.log_evidence - truth) < 1e-3
        # neighbours are one number, too; they are apart, and their distances 128 for 300
        for times in (t, start + 60 * np.arange(12), start + 300 * np.arange(12)):
            with pytest.raises(pg.DataError, match="argument 't' has whole numbers up to 17000"):
                pg.fit(model, held, 0, times, y=y)
        for times, unit in ((t, 1), (t, 60.0), (np.stack([t, t % 3], 1), 1)):
            with pytest.raises(pg.DataError, match="argument 't' has whole numbers up to 17000"):
                pg.fit(model, held, 0, times, y=y, level=False, raw=True, unit=unit)
        assert pg.fit(model, held, 0, t - start, y=y, level=False, raw=True).result == "converged"


@pytest.mark.parametrize("effects", [True, False])
def test_large_counts_of_people_are_an_exposure_in_single_precision(effects):
    """Rounded by 1e-8 of themselves, they cost nothing. Without effects the joint mode, which is
    found to the rounding of log p, was not taken for one.
    """
    people = np.array([331_002_651, 1_380_004_385, 67_886_011, 5_421_241])
    deaths = np.array([330, 1381, 70, 4])

    def model(people, y=None):
        level = numpyro.sample("level", dist.Normal(-13.0, 3.0))
        with numpyro.plate("data", people.shape[0]):
            own = numpyro.sample("own", dist.Normal(0.0, 0.1)) if effects else 0.0
            numpyro.sample("y", dist.Poisson(people * jnp.exp(level + own)), obs=y)

    exact = pg.fit(model, pg.Laplace(), 0, people, y=deaths).log_evidence
    with jax.enable_x64(False):
        single = pg.fit(model, pg.Laplace(), 0, people, y=deaths)
        assert np.isfinite(single.predict(people[:1]).mean)
    assert abs(single.log_evidence - exact) < 1e-2


def test_predictions_far_from_zero_have_their_noise_alone():
    """The variance of f was floored at 50 rounding errors of its mean's square: .79 for .36."""

    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 2.0), X, mean=300.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    x = np.linspace(0.0, 3.0, 12)
    y = 300.0 + np.sin(x)
    with jax.enable_x64(False):
        fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed({})), 0, x, y=y)
        found = fit.predict(x)
        variance = found.f_variance + 0.09
        np.testing.assert_allclose(found.sd, np.sqrt(variance), rtol=1e-3)
        scores = norm.logpdf(y, found.f_mean, np.sqrt(variance))
        np.testing.assert_allclose(fit.log_density(x, y), scores, atol=2e-3)


def test_draws_of_a_function_have_joint_draws_at_a_grid():
    """1e-10 of the variance is below a rounding error: all were NaN."""

    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 2.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    x, few = np.linspace(0.0, 3.0, 12), pg.NUTS(num_warmup=20, num_samples=20, num_chains=1)
    with jax.enable_x64(False):
        fit = pg.fit(model, few, 0, x, y=np.sin(x), throw=False)
        joint = fit.posterior(np.linspace(0.0, 4.0, 60), joint=True)
        assert np.all(np.isfinite(joint.sample(jax.random.key(0), (20,))))
