"""Linear regression with unknown weights, prior precision and noise (Bishop 2006, section 10.3).

alpha     ~ Gamma(1, 1)                 precision of the weights
tau       ~ Gamma(1, 1)                 precision of the noise
weights   ~ N(0, alpha^-1 I)
y_n       ~ N(X_n . weights, tau^-1)
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist


def linear_regression(X, y=None):
    """X (N, D), with a column of ones where an intercept is wanted; y (N,)."""
    alpha = numpyro.sample("alpha", dist.Gamma(1.0, 1.0))
    tau = numpyro.sample("tau", dist.Gamma(1.0, 1.0))
    with numpyro.plate("columns", X.shape[1]):
        weights = numpyro.sample("weights", dist.Normal(0.0, 1.0 / jnp.sqrt(alpha)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ weights, 1.0 / jnp.sqrt(tau)), obs=y)
