"""A Gaussian of unknown mean and precision (Bishop 2006, section 10.1.3).

    tau     ~ Gamma(shape, rate)
    mu      ~ N(0, (strength tau)^-1)
    y_n     ~ N(mu, tau^-1)

(mu, tau) together are conjugate: mean field is exact unless they are put in factors of their own.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist


def gaussian(y, shape=1.0, rate=1.0, strength=1.0):
    """y (N,), observed."""
    tau = numpyro.sample("tau", dist.Gamma(shape, rate))
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0 / jnp.sqrt(strength * tau)))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0 / jnp.sqrt(tau)), obs=y)
