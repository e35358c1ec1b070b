"""Logistic regression with an unknown prior precision (Bishop 2006, section 10.6.3).

alpha     ~ Gamma(shape, rate)
weights   ~ N(0, alpha^-1 I)
y_n       ~ Bernoulli(sigma(X_n . weights))
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist


def logistic_regression(X, y=None, shape=1.0, rate=1.0):
    """X (N, D), with a column of ones where an intercept is wanted; y (N,) of 0 and 1."""
    alpha = numpyro.sample("alpha", dist.Gamma(shape, rate))
    with numpyro.plate("columns", X.shape[1]):
        weights = numpyro.sample("weights", dist.Normal(0.0, 1.0 / jnp.sqrt(alpha)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ weights), obs=y)
