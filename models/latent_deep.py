"""A deep Gaussian process with a latent input: the hidden coordinate enters the first layer beside
x, and the layers bend both.

    h_n ~ N(0, I)                       latent input of datum n, (Q,)
    f   = a deep GP (`models.deep`) on [x_n, h_n], with D + Q units in each inner layer
    y_n ~ N(f_n, noise_scale^2)

Layers give sharp, non-stationary shapes; the latent gives conditional densities that are no
Gaussians (Salimbeni, Dutordoir, Hensman & Deisenroth 2019; Leibfried et al. 2022).
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from .deep import hidden_layers, last_layer


def latent_deep(X, y=None, depth=2, latent_dim=1):
    """X (N, D), y (N,) of real numbers or `None` to draw them; `latent_dim` is Q."""
    data = numpyro.plate("data", X.shape[0])
    with data:
        h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([latent_dim]).to_event(1))
    f = last_layer(hidden_layers(jnp.concatenate([X, h], -1), depth))
    noise_scale = numpyro.sample("noise_scale", dist.LogNormal(-2.0, 1.0))
    with data:
        numpyro.sample("y", dist.Normal(f, noise_scale), obs=y)
