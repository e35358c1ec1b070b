"""Gaussian-process regression: the conjugate twin, for which Laplace, EP and VI are all exact.

    lengthscale_d ~ LogNormal(log(D) / 2, 1)        d = 1 ... D, in units of column d of X
    variance      ~ LogNormal(0, 1)                 prior variance of f, in units of y squared
    noise_scale   ~ LogNormal(-1, 1)                standard deviation of the noise, in units of y
    f | X         ~ GP(0, variance exp(-sum_d (x_d - x'_d)^2 / (2 lengthscale_d^2)))
    y_n | f       ~ N(f_n, noise_scale^2)

The priors are meant for standardised X and y.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def regression(X, y=None):
    """X (N, D), y (N,) of real numbers or `None` to draw them."""
    D = X.shape[-1]
    lengthscale = numpyro.sample(
        "lengthscale", dist.LogNormal(0.5 * jnp.log(D), 1.0).expand([D]).to_event(1)
    )
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise_scale = numpyro.sample("noise_scale", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise_scale), obs=y)
