"""A Gaussian process with a latent input: one function, whose spread and shape at each x a hidden
coordinate decides.

    lengthscale_d ~ LogNormal(log(D + Q) / 2, 1)    one for each column of X and latent dimension
    variance      ~ LogNormal(0, 1)                 prior variance of f, in units of y squared
    noise_scale   ~ LogNormal(-2, 1)                standard deviation of the noise, in units of y
    h_n           ~ N(0, I)                         latent input of datum n, (Q,)
    f             ~ GP(0, RBF) on [x_n, h_n]
    y_n | f       ~ N(f_n, noise_scale^2)

Given x, y is a Gaussian's image under a function: it may be skewed, have several modes, change its
spread with x. The priors are meant for standardised X and y. (Wang & Neal 2012; Dutordoir et al.
2018; Leibfried et al. 2022.)
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def latent(X, y=None, latent_dim=1):
    """X (N, D), y (N,) of real numbers or `None` to draw them; `latent_dim` is Q."""
    data, D = numpyro.plate("data", X.shape[0]), X.shape[-1] + latent_dim
    lengthscale = numpyro.sample(
        "lengthscale", dist.LogNormal(0.5 * jnp.log(D), 1.0).expand([D]).to_event(1)
    )
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise_scale = numpyro.sample("noise_scale", dist.LogNormal(-2.0, 1.0))
    with data:
        h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([latent_dim]).to_event(1))
    f = numpyro.sample(
        "f", pg.GP(pg.kernels.RBF(variance, lengthscale), jnp.concatenate([X, h], -1))
    )
    with data:
        numpyro.sample("y", dist.Normal(f, noise_scale), obs=y)
