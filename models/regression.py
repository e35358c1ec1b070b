"""Gaussian-process regression: the conjugate twin, for which Laplace, EP and VI are all exact.

    lengthscale_d ~ LogNormal(log(D) / 2, 1)        d = 1 ... D, in units of column d of X
    variance      ~ LogNormal(0, 1)                 prior variance of f, in units of y squared
    noise_scale   ~ LogNormal(-1, 1)                standard deviation of the noise, in units of y
    f | X         ~ GP(0, variance exp(-sum_d (x_d - x'_d)^2 / (2 lengthscale_d^2)))
    y_n | f       ~ N(f_n, noise_scale^2)

The priors are meant for standardised X and y. For others bind priors
in their units: `partial(regression, lengthscale_prior=pg.priors.lengthscale(X, ard=True),
variance_prior=pg.priors.variance(y), noise_prior=...)`, a log-normal about a part of y's standard
deviation, say.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def regression(X, y=None, lengthscale_prior=None, variance_prior=None, noise_prior=None):
    """X (N, D), y (N,) of real numbers or `None` to draw them; priors as above."""
    D = X.shape[-1]
    standard = dist.LogNormal(0.5 * jnp.log(D), 1.0).expand([D]).to_event(1)
    lengthscale = numpyro.sample("lengthscale", lengthscale_prior or standard)
    variance = numpyro.sample("variance", variance_prior or dist.LogNormal(0.0, 1.0))
    noise_scale = numpyro.sample("noise_scale", noise_prior or dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise_scale), obs=y)
