"""Declared models that several test files share, and the log evidence of a local method compiled
once for all of them.

Compiling is what these tests spend their time on. So `switched` holds several likelihoods behind
one traced index, and every problem is padded to `ROWS` rows, which a mask leaves out: one
compilation a method serves all files.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax

import ppl_gp as pg
from ppl_gp import kernels
from ppl_gp.observations import BernoulliProbit

ROWS = 100

# name -> distribution of y given f and one positive likelihood parameter s (unused by some).
LIKELIHOODS = {
    "logit": lambda f, s: dist.Bernoulli(logits=f),
    "probit": lambda f, s: BernoulliProbit(f),
    "poisson": lambda f, s: dist.Poisson(jnp.exp(f)),
    "negative_binomial": lambda f, s: dist.NegativeBinomial2(jnp.exp(f), s),
    "gaussian": lambda f, s: dist.Normal(f, s),
    "student_t": lambda f, s: dist.StudentT(3.0, f, s),
    "binomial": lambda f, s: dist.Binomial(total_count=5, logits=f),
    "beta": lambda f, s: dist.BetaProportion(jax.nn.sigmoid(f), s),
    "gamma": lambda f, s: dist.Gamma(s, s * jnp.exp(-f)),
}
NAMES = ("logit", "probit", "poisson", "gaussian", "student_t", "clutter")


def _clutter(f, s, y):
    """Half N(f, 1), half N(0, 10): PRML 10.209."""
    signal, noise = dist.Normal(f, 1.0).log_prob(y), dist.Normal(0.0, jnp.sqrt(10.0)).log_prob(y)
    return jnp.logaddexp(signal, noise) - jnp.log(2.0)


def _log_prob(make):
    return lambda f, s, y: make(f, s).log_prob(y)


_BRANCHES = [_clutter if name == "clutter" else _log_prob(LIKELIHOODS[name]) for name in NAMES]


def one_gp(X, y=None, likelihood="logit", jitter=1e-8):
    """RBF prior with one length scale, zero mean; the likelihood by name, its parameter s a
    hyperparameter.
    """
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(kernels.RBF(variance, lengthscale), X, jitter=jitter))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", LIKELIHOODS[likelihood](f, s), obs=y)


class Data(NamedTuple):
    """Padded observations: which likelihood (index in `NAMES`), which rows count, how much each
    log-likelihood counts.
    """

    y: np.ndarray
    mask: np.ndarray
    which: int
    scale: float = 1.0


def switched(X, y: Data):
    """Mean slope x_1, RBF kernel; the likelihood is a factor that `y.which` chooses."""
    positive = {
        k: numpyro.sample(k, dist.LogNormal(0.0, 1.0)) for k in ("variance", "lengthscale", "s")
    }
    mean = pg.means.Linear(jnp.stack([numpyro.sample("slope", dist.Normal()), jnp.zeros(())]))
    f = numpyro.sample(
        "f", pg.GP(kernels.RBF(positive["variance"], positive["lengthscale"]), X, mean, jitter=1e-9)
    )
    with (
        numpyro.plate("data", X.shape[0]),
        numpyro.handlers.mask(mask=y.mask),
        numpyro.handlers.scale(scale=y.scale),
    ):
        numpyro.factor("y", lax.switch(y.which, _BRANCHES, f, positive["s"], y.y))


def padded(X, y, likelihood, scale=1.0, seed=11):
    """(X (ROWS, 2), Data): rows that do not count lie at random inputs; a missing second column is
    zero.
    """
    n, D = np.shape(X)
    inputs = np.random.default_rng(seed).normal(size=(ROWS, 2))
    inputs[:n], inputs[:n, :D] = 0.0, X
    values = np.full(ROWS, 0.5)
    values[:n] = y
    data = Data(values, np.arange(ROWS) < n, NAMES.index(likelihood), scale)
    return jnp.asarray(inputs), jax.tree.map(jnp.asarray, data)


def hyper(variance=1.0, lengthscale=1.0, s=1.0, slope=0.0) -> dict:
    """Hyperparameters of `switched`."""
    values = {"variance": variance, "lengthscale": lengthscale, "s": s, "slope": slope}
    return {k: jnp.asarray(float(v)) for k, v in values.items()}


@eqx.filter_jit
def evidence(model, method, hyper, *args, **kwargs):
    """(log evidence, solution) of a local method at given hyperparameters; compiled once a
    shape.
    """
    factors = pg.read(model, *args, hyper=hyper, **kwargs)
    return pg.log_evidence(method, factors)


class Solved(NamedTuple):
    """What `solve` gives; `gradient` is {site: d log evidence / d site}."""

    log_z: jax.Array
    solution: tuple
    gradient: dict
    prior: pg.GP


@eqx.filter_jit
def solve(model, method, hyper, *args, **kwargs) -> Solved:
    """Log evidence with its gradient; compiled once a shape."""

    def value(hyper):
        return evidence(model, method, hyper, *args, **kwargs)

    (log_z, solution), gradient = jax.value_and_grad(value, has_aux=True)(hyper)
    return Solved(log_z, solution, gradient, pg.read(model, *args, hyper=hyper, **kwargs).prior)
