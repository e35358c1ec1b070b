"""A Bayesian neural network: weight space beside function space, under the same bounds.

    weights, biases ~ N(0, 1)                      outputs divided by the root of a layer's inputs
    noise_scale     ~ LogNormal(-1, 1)             or: the second output is the log noise scale
    h_n             ~ N(0, I)                      optional latent inputs, (Q,): a Bayesian
                                                   conditional variational autoencoder
    y_n             ~ N(network([x_n, h_n]), noise_scale^2)

The network is an Equinox module given a prior by NumPyro's `random_eqx_module`. (Leibfried et al.
2022, sections 2 and 4; Kingma & Welling 2014; Sohn et al. 2015.) Fit it by `pg.guide(model, {},
hyper=AutoNormal, latents=...)` and this package's bounds. The priors are meant for standardised X
and y.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.module import random_eqx_module


class Network(eqx.Module):
    """Layers of tanh units, whose sums are scaled by the root of the number of inputs, so that wide
    layers tend to GPs.
    """

    weights: list
    biases: list

    def __init__(self, sizes):
        self.weights = [
            jnp.zeros((out, inside)) for inside, out in zip(sizes[:-1], sizes[1:], strict=True)
        ]
        self.biases = [jnp.zeros(out) for out in sizes[1:]]

    def __call__(self, x):
        for i, (W, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = W @ x / jnp.sqrt(W.shape[1]) + b
            x = jnp.tanh(x) if i + 1 < len(self.weights) else x
        return x


def bayesian_network(
    X, y=None, width=30, depth=2, heteroscedastic=False, latent_dim=0, subsample_size=None
):
    """X (N, D), y (N,) of real numbers or `None` to draw them; `depth` hidden layers of `width`
    units.

    `subsample_size`: rows a step, drawn by the model's own plate.
    """
    network = Network((X.shape[-1] + latent_dim, *[width] * depth, 1 + heteroscedastic))
    net = random_eqx_module("net", network, prior=dist.Normal(0.0, 1.0))
    noise_scale = (
        None if heteroscedastic else numpyro.sample("noise_scale", dist.LogNormal(-1.0, 1.0))
    )
    with numpyro.plate("data", X.shape[0], subsample_size=subsample_size) as rows:
        inputs = X[rows]
        if latent_dim:
            h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([latent_dim]).to_event(1))
            inputs = jnp.concatenate([inputs, h], -1)
        out = jax.vmap(net)(inputs)
        scale = jnp.exp(out[:, 1] - 1.0) if noise_scale is None else noise_scale
        numpyro.sample("y", dist.Normal(out[:, 0], scale), obs=None if y is None else y[rows])
