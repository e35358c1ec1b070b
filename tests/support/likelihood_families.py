"""Likelihoods written twice: as a NumPyro distribution for a model, and in NumPy for a second route
to its numbers.

Every family takes f, a positive parameter s (of an output, say) and a positive integer e (an
exposure, a number of trials). The NumPy log densities take complex f, so that their derivatives
come by complex steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from scipy.special import expit, gamma, gammaln, log_ndtr, loggamma

import ppl_gp as pg


class Family(NamedTuple):
    """p(y | f, s, e). `outcomes`: how many y there are, 0, 1, ..., where they are finitely many for
    e = 1.
    """

    site: Callable  # (f, s, e) -> NumPyro distribution
    log_prob: Callable  # (y, f, s, e) -> nats
    moments: Callable  # (f, s, e) -> (mean, variance) of y
    draw: Callable  # (rng, f, s, e) -> y
    outcomes: int | None = None
    boolean: bool = False


def _normal(y, mean, sd):
    return -0.5 * ((y - mean) / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)


def _poisson(y, log_rate):
    return y * log_rate - np.exp(log_rate) - gammaln(y + 1.0)


def _softplus(x):
    return np.log(1.0 + np.exp(x))


def _choose(n, k):
    return gammaln(n + 1.0) - gammaln(k + 1.0) - gammaln(n - k + 1.0)


def _student(y, f, sd, df=4.0):
    constant = gammaln((df + 1) / 2) - gammaln(df / 2) - 0.5 * np.log(df * np.pi) - np.log(sd)
    return constant - 0.5 * (df + 1) * np.log(1 + ((y - f) / sd) ** 2 / df)


def _negative_binomial(y, f, s, e):
    mean = e * np.exp(f)
    constant = gammaln(y + s) - gammaln(s) - gammaln(y + 1.0) + s * np.log(s)
    return constant + y * np.log(mean) - (y + s) * np.log(mean + s)


def _gamma(y, f, s, e):
    rate = s / (e * np.exp(f))
    return s * np.log(rate) + (s - 1) * np.log(y) - rate * y - gammaln(s)


def _weibull(y, f, s, e):
    k, log_scale = 1.0 + s, f + np.log(e)
    return (
        np.log(k)
        - log_scale
        + (k - 1) * (np.log(y) - log_scale)
        - np.exp(k * (np.log(y) - log_scale))
    )


def _weibull_moments(f, s, e):
    k, scale = 1.0 + s, e * np.exp(f)
    first = gamma(1 + 1 / k)
    return scale * first, scale**2 * (gamma(1 + 2 / k) - first**2)


def _beta(y, f, s, e):
    mean, c = 1 / (1 + np.exp(-f - np.log(e))), 1.0 + 4.0 * s
    a, b = mean * c, (1 - mean) * c
    return loggamma(c) - loggamma(a) - loggamma(b) + (a - 1) * np.log(y) + (b - 1) * np.log1p(-y)


def _zero_inflated(y, f, s, e, gate=0.2):
    rate = s * e * np.exp(f)
    return np.where(
        y == 0,
        np.log(gate + (1 - gate) * np.exp(-rate)),
        np.log(1 - gate) + _poisson(y, np.log(rate)),
    )


def _ordinal(log_cdf):
    """Intervals between -s and s of f + noise, in the tail where nothing cancels."""

    def log_prob(y, f, s, e):
        f = f + np.log(e)
        outside = log_cdf(np.where(y == 0, -f, f) - s)
        near = np.where(np.real(f) < 0, f, -f)
        upper, lower = log_cdf(s + near), log_cdf(near - s)
        return np.where(y == 1, upper + np.log(1 - np.exp(lower - upper)), outside)

    return log_prob


def _log_logistic(x):
    return -_softplus(-x)


def _categorical(y, f, s, e):
    logits = np.stack(np.broadcast_arrays(0.0 * f, f + np.log(s * e), 1.5 * f + 0 * np.log(s * e)))
    normaliser = np.log(np.sum(np.exp(logits), 0))
    return np.where(y == 0, logits[0], np.where(y == 1, logits[1], logits[2])) - normaliser


def _finite(log_prob, site, outcomes=3, boolean=False):
    """A family over the outcomes 0, 1, ..., whose moments and draws follow from its
    probabilities.
    """

    def probabilities(f, s, e):
        return np.stack(
            [np.exp(log_prob(np.full(np.shape(f + s + e), k), f, s, e)) for k in range(outcomes)],
            -1,
        )

    def moments(f, s, e):
        p, k = probabilities(f, s, e), np.arange(outcomes)
        return p @ k, p @ k**2 - (p @ k) ** 2

    def draw(rng, f, s, e):
        cumulative = np.cumsum(probabilities(f, s, e), -1)
        return np.sum(rng.uniform(size=(*cumulative.shape[:-1], 1)) > cumulative[..., :-1], -1)

    return Family(site, log_prob, moments, draw, outcomes, boolean)


def _mean_and_itself(mean):
    return lambda f, s, e: (mean(f, s, e), mean(f, s, e))


def _cutpoints(s):
    return jnp.stack([-jnp.asarray(s, float), jnp.asarray(s, float)], -1)


FAMILIES = {
    "normal": Family(
        lambda f, s, e: dist.Normal(f, s / jnp.sqrt(e)),
        lambda y, f, s, e: _normal(y, f, s / np.sqrt(e)),
        lambda f, s, e: (f + 0 * s * e, s**2 / e + 0 * f),
        lambda rng, f, s, e: rng.normal(f, s / np.sqrt(e)),
    ),
    "saturating": Family(
        lambda f, s, e: dist.Normal(3 * jnp.tanh(f / 3), s / jnp.sqrt(e)),
        lambda y, f, s, e: _normal(y, 3 * np.tanh(f / 3), s / np.sqrt(e)),
        lambda f, s, e: (3 * np.tanh(f / 3) + 0 * s * e, s**2 / e + 0 * f),
        lambda rng, f, s, e: rng.normal(3 * np.tanh(f / 3), s / np.sqrt(e)),
    ),
    "student_t": Family(
        lambda f, s, e: dist.StudentT(4.0, f, s / jnp.sqrt(e)),
        lambda y, f, s, e: _student(y, f, s / np.sqrt(e)),
        lambda f, s, e: (f + 0 * s * e, 2 * s**2 / e + 0 * f),
        lambda rng, f, s, e: rng.normal(f, s / np.sqrt(e)),
    ),
    "lognormal": Family(
        lambda f, s, e: dist.LogNormal(f + jnp.log(e), s),
        lambda y, f, s, e: _normal(np.log(y), f + np.log(e), s) - np.log(y),
        lambda f, s, e: (e * np.exp(f + s**2 / 2), e**2 * np.expm1(s**2) * np.exp(2 * f + s**2)),
        lambda rng, f, s, e: np.exp(rng.normal(f + np.log(e), s)),
    ),
    "gamma": Family(
        lambda f, s, e: dist.Gamma(s, s / (e * jnp.exp(f))),
        _gamma,
        lambda f, s, e: (e * np.exp(f) + 0 * s, e**2 * np.exp(2 * f) / s),
        lambda rng, f, s, e: rng.gamma(s, e * np.exp(f) / s),
    ),
    "weibull": Family(
        lambda f, s, e: dist.Weibull(e * jnp.exp(f), 1.0 + s),
        _weibull,
        _weibull_moments,
        lambda rng, f, s, e: e * np.exp(f) * rng.weibull(1.0 + s + 0 * (f + e)),
    ),
    "beta": Family(
        lambda f, s, e: dist.BetaProportion(jax.nn.sigmoid(f + jnp.log(e)), 1.0 + 4.0 * s),
        _beta,
        lambda f, s, e: (
            expit(f + np.log(e)) + 0 * s,
            expit(f + np.log(e)) * expit(-f - np.log(e)) / (2.0 + 4.0 * s),
        ),
        lambda rng, f, s, e: np.clip(rng.beta(2 * expit(f) + 0 * s * e, 2 * expit(-f)), 0.02, 0.98),
    ),
    "poisson": Family(
        lambda f, s, e: dist.Poisson(s * e * jnp.exp(f)),
        lambda y, f, s, e: _poisson(y, f + np.log(s * e)),
        _mean_and_itself(lambda f, s, e: s * e * np.exp(f)),
        lambda rng, f, s, e: rng.poisson(s * e * np.exp(f)),
    ),
    "poisson_softplus": Family(
        lambda f, s, e: dist.Poisson(s * e * jax.nn.softplus(f)),
        lambda y, f, s, e: _poisson(y, np.log(s * e) + np.log(_softplus(f))),
        _mean_and_itself(lambda f, s, e: s * e * _softplus(f)),
        lambda rng, f, s, e: rng.poisson(s * e * _softplus(f)),
    ),
    "zero_inflated": Family(
        lambda f, s, e: dist.ZeroInflatedPoisson(0.2, s * e * jnp.exp(f)),
        _zero_inflated,
        lambda f, s, e: (
            0.8 * s * e * np.exp(f),
            0.8 * s * e * np.exp(f) * (1 + 0.2 * s * e * np.exp(f)),
        ),
        lambda rng, f, s, e: rng.poisson(s * e * np.exp(f)),
    ),
    "negative_binomial": Family(
        lambda f, s, e: dist.NegativeBinomial2(e * jnp.exp(f), s),
        _negative_binomial,
        lambda f, s, e: (e * np.exp(f) + 0 * s, e * np.exp(f) + e**2 * np.exp(2 * f) / s),
        lambda rng, f, s, e: rng.poisson(e * np.exp(f) + 0 * s),
    ),
    "bernoulli": _finite(
        lambda y, f, s, e: y * (f + np.log(s * e)) - _softplus(f + np.log(s * e)),
        lambda f, s, e: dist.Bernoulli(logits=f + jnp.log(s * e)),
        2,
        True,
    ),
    "probit": _finite(
        lambda y, f, s, e: log_ndtr((2 * y - 1) * (f + np.log(s * e))),
        lambda f, s, e: pg.observations.BernoulliProbit(f + jnp.log(s * e)),
        2,
        True,
    ),
    "binomial": Family(
        lambda f, s, e: dist.Binomial(3 * e, logits=f + jnp.log(s)),
        lambda y, f, s, e: (
            _choose(3 * e, y) + y * (f + np.log(s)) - 3 * e * _softplus(f + np.log(s))
        ),
        lambda f, s, e: (
            3 * e * expit(f + np.log(s)),
            3 * e * expit(f + np.log(s)) * expit(-f - np.log(s)),
        ),
        lambda rng, f, s, e: rng.binomial(3 * e, expit(f + np.log(s))),
        4,
    ),
    "ordinal": _finite(
        _ordinal(log_ndtr),
        lambda f, s, e: pg.observations.OrdinalProbit(f + jnp.log(e), _cutpoints(s)),
    ),
    "ordered_logistic": _finite(
        _ordinal(_log_logistic), lambda f, s, e: dist.OrderedLogistic(f + jnp.log(e), _cutpoints(s))
    ),
    "categorical": _finite(
        _categorical,
        lambda f, s, e: dist.Categorical(
            logits=jnp.stack(
                jnp.broadcast_arrays(0.0 * f, f + jnp.log(s * e), 1.5 * f + 0.0 * jnp.log(s * e)),
                -1,
            )
        ),
    ),
}
