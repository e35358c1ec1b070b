"""A Gaussian autoencoder: rows from a few latents through a network with one hidden layer (Kingma &
Welling 2014), its weights with priors, and the network that goes the other way as a guide.

    W_in (K, H), W_out (H, D)  ~ N(0, 1 / number of inputs)      weights
    b_in (H,), b_out (D,)      ~ N(0, 1)                         biases
    noise                      ~ LogNormal(-1, 1)                standard deviation
    h_n                        ~ N(0, I_K)
    x_n | h_n                  ~ N(tanh(h_n W_in + b_in) W_out + b_out, noise^2 I)

`pg.SVI(guide=encoder)`, or an autoguide, which has a q(h_n) of its own for each row. Several
optima, one of which uses no latent: compare bounds of a few seeds. For columns of mean zero and
standard deviation about one.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random


def autoencoder(X, num_latents=2, num_hidden=16):
    """X (N, D), observed."""
    N, D = X.shape
    shapes = _shapes(D, num_latents, num_hidden)
    w = {
        k: numpyro.sample(k, dist.Normal(0.0, scale).expand(shape).to_event(len(shape)))
        for k, (shape, scale) in shapes.items()
    }
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    with numpyro.plate("data", N):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([num_latents]).to_event(1))
        mean = jnp.tanh(h @ w["W_in"] + w["b_in"]) @ w["W_out"] + w["b_out"]
        numpyro.sample("x", dist.Normal(mean, noise).to_event(1), obs=X)


def encoder(X, num_latents=2, num_hidden=16):
    """A guide: q(h_n | x_n) = N(m(x_n), diag s(x_n)^2) by a network of the same size, weights and
    noise by factorised normals.
    """
    N, D = X.shape
    for k, (shape, scale) in _shapes(D, num_latents, num_hidden).items():
        start = scale * random.normal(random.key(len(k)), shape)
        loc = numpyro.param(f"{k}_loc", start)
        sd = numpyro.param(f"{k}_sd", jnp.full(shape, 0.05), constraint=dist.constraints.positive)
        numpyro.sample(k, dist.Normal(loc, sd).to_event(len(shape)))
    loc = numpyro.param("noise_loc", -1.0)
    sd = numpyro.param("noise_sd", 0.05, constraint=dist.constraints.positive)
    numpyro.sample("noise", dist.LogNormal(loc, sd))
    inner = numpyro.param("inner", random.normal(random.key(1), (D, num_hidden)) / jnp.sqrt(D))
    heads = numpyro.param(
        "heads", random.normal(random.key(2), (num_hidden, 2 * num_latents)) / jnp.sqrt(num_hidden)
    )
    at = jnp.tanh(X @ inner) @ heads
    with numpyro.plate("data", N):
        q = dist.Normal(at[:, :num_latents], jnp.exp(at[:, num_latents:] - 1.0))
        numpyro.sample("h", q.to_event(1))


def _shapes(D, K, H):
    """{weights: (shape, prior standard deviation)}."""
    return {
        "W_in": ((K, H), K**-0.5),
        "b_in": ((H,), 1.0),
        "W_out": ((H, D), H**-0.5),
        "b_out": ((D,), 1.0),
    }
