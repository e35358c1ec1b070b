"""The exact methods against importance sampling from the prior, and by simulation-based calibration
(Talts et al. 2018).
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import Predictive
from scipy import stats

import ppl_gp as pg

METHODS = {
    "nuts": pg.NUTS(num_warmup=300, num_samples=1000, num_chains=2),
    "elliptical": pg.EllipticalSlice(num_warmup=300, num_samples=2000, num_chains=2),
}
X = np.linspace(-2.0, 2.0, 6)[:, None]


def small(X, y=None):
    """Six counts, two hyperparameters."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.fixture(scope="module")
def by_importance():
    """(y, {quantity: (mean, standard error)}) from 400 000 prior draws weighted by their
    likelihood.
    """
    y = np.array([0, 1, 4, 2, 1, 0])
    prior = Predictive(small, num_samples=400_000, parallel=True)(random.key(0), X)
    weight = jax.nn.softmax(dist.Poisson(jnp.exp(prior["f"])).log_prob(y).sum(-1))
    figures = {}
    for name, x in _quantities({k: np.asarray(v) for k, v in prior.items()}).items():
        mean = float(weight @ x)
        figures[name] = mean, float(np.sqrt(np.sum(weight**2 * (x - mean) ** 2)))
    return y, figures


def _quantities(draws):
    logs = {f"log {k}": np.log(draws[k]) for k in ("lengthscale", "variance")}
    f = draws["f"]
    return logs | {
        "f_0": f[:, 0],
        "f_2": f[:, 2],
        "f_2^2": f[:, 2] ** 2,
        "f_0 f_1": f[:, 0] * f[:, 1],
    }


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_agrees_with_importance_sampling(name, by_importance):
    y, wanted = by_importance
    method = METHODS[name]
    fit = pg.fit(small, method, 1, X, y=y, throw=False)
    draws = {k: np.asarray(v) for k, v in {**fit.hyper, "f": fit.latent["f"].mean}.items()}
    for quantity, x in _quantities(draws).items():
        chains = x.reshape(method.num_chains, -1)
        error = chains.std() / np.sqrt(float(numpyro.diagnostics.effective_sample_size(chains)))
        mean, its_error = wanted[quantity]
        assert its_error < 0.02
        assert abs(chains.mean() - mean) < 4.5 * np.hypot(error, its_error), quantity


@pytest.mark.long
@pytest.mark.parametrize("name, thin", [("nuts", 5), ("elliptical", 20)])
def test_ranks_of_the_truth_are_uniform(name, thin):
    simulations, kept = 120, 39
    kind = type(METHODS[name])
    method = kind(num_warmup=200, num_samples=kept * thin, num_chains=1)
    truth = Predictive(small, num_samples=simulations)(random.key(5), X)
    ranks = {"log variance": [], "log lengthscale": [], "f_0": [], "f_2": []}
    for i in range(simulations):
        fit = pg.fit(small, method, i, X, y=np.asarray(truth["y"][i]), throw=False, progress=False)
        draws = _quantities(
            {k: np.asarray(v)[::thin] for k, v in {**fit.hyper, "f": fit.latent["f"].mean}.items()}
        )
        one = _quantities({k: np.asarray(v)[i : i + 1] for k, v in truth.items()})
        for quantity in ranks:
            ranks[quantity].append(int(np.sum(draws[quantity] < one[quantity])))
    for quantity, r in ranks.items():
        counts = np.histogram(r, bins=8, range=(0, kept + 1))[0]
        assert stats.chisquare(counts).pvalue > 1e-3, (quantity, counts)


@pytest.mark.slow
def test_chains_on_two_devices_are_the_chains_on_one():
    code = """
import sys, numpyro
numpyro.set_host_device_count(int(sys.argv[1]))
import jax, numpy as np, ppl_gp as pg
from test_calibration import small, X
assert jax.local_device_count() == int(sys.argv[1])
y = np.array([0, 1, 4, 2, 1, 0])
nuts = pg.NUTS(num_warmup=25, num_samples=25)
fit = pg.fit(small, nuts, 0, X, y=y, throw=False, progress=False)
draws = fit.hyper["variance"][np.array([0, 24, 25, 49])]
print([round(float(v), 6) for v in (*draws, fit.predict(X).f_mean[0])])
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", code, n], stdout=-1, env=environment, text=True)
        for n in "12"
    ]
    one, two = (run.communicate(timeout=300)[0] for run in runs)
    assert one == two and len(one) > 20


def conjugate(y=None):
    """A normal with a mean and a precision, and no GP."""
    tau = numpyro.sample("tau", dist.Gamma(3.0, 2.0))
    mu = numpyro.sample("mu", dist.Normal(1.0, 1.0 / jnp.sqrt(0.5 * tau)))
    with numpyro.plate("data", 4):
        numpyro.sample("y", dist.Normal(mu, 1.0 / jnp.sqrt(tau)), obs=y)


@pytest.mark.long
def test_ranks_of_the_truth_are_uniform_without_a_gp():
    simulations, kept, thin = 200, 19, 8
    method = pg.NUTS(num_warmup=150, num_samples=kept * thin, num_chains=1)
    truth = Predictive(conjugate, num_samples=simulations)(random.key(6))
    ranks = {"mu": [], "tau": []}
    for i in range(simulations):
        y = np.asarray(truth["y"][i])
        fit = pg.fit(conjugate, method, i, y=y, throw=False, progress=False)
        for k, r in ranks.items():
            r.append(int(np.sum(np.asarray(fit.hyper[k])[::thin] < truth[k][i])))
    for k, r in ranks.items():
        counts = np.histogram(r, bins=10, range=(0, kept + 1))[0]
        assert stats.chisquare(counts).pvalue > 1e-4, (k, counts)
