"""Regression whose noise changes with the inputs: two functions a datum.

f | x ~ GP(0, v_f exp(-(x - x')^2 / (2 l_f^2)))       the mean
g | x ~ GP(log_noise, v_g exp(-(x - x')^2 / (2 l_g^2)))   the logarithm of the noise's scale
y_n   ~ N(f_n, exp(2 g_n))

l_f, l_g ~ LogNormal(0, 1);   v_f ~ LogNormal(0, 1);   v_g ~ LogNormal(-1, 1)
    log_noise ~ N(-1, 1)
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def heteroscedastic(X, y=None):
    """X (N,) or (N, 1), y (N,) or `None` to draw it, both on a scale of about one."""
    kernels = {
        site: pg.kernels.RBF(
            numpyro.sample(f"variance_{site}", dist.LogNormal(level, 1.0)),
            numpyro.sample(f"lengthscale_{site}", dist.LogNormal(0.0, 1.0)),
        )
        for site, level in (("f", 0.0), ("g", -1.0))
    }
    log_noise = numpyro.sample("log_noise", dist.Normal(-1.0, 1.0))
    f = numpyro.sample("f", pg.GP(kernels["f"], X))
    g = numpyro.sample("g", pg.GP(kernels["g"], X, mean=log_noise))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)
