"""Deep Gaussian processes: every layer is a GP whose inputs are the layer below. Regression and
binary classification.

    lengthscale_l, lengthscale ~ LogNormal(log(D) / 2, 1)    of layer l and the last, one an input
    variance_l, variance       ~ LogNormal(0, 1)             variance_l ~ LogNormal(-1, 1) inside
    H_0 = X
    H_l = [f_1(H_(l-1)), ..., f_P(H_(l-1))],  f_p ~ GP(m_p, RBF)    l = 1 ... depth - 1;
                                              m_p(h) = h_p, or the projection (h W)_p
    f   ~ GP(0, RBF) on H_(depth-1)
    y_n ~ N(f_n, noise_scale^2),  or  Bernoulli(logit^-1 f_n)

Inner layers begin as the identity and bend it: with zero means a deep prior forgets its inputs as
it grows (Duvenaud et al. 2014). (Damianou & Lawrence 2013; Salimbeni & Deisenroth 2017.) The priors
are meant for standardised X and y.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def deep(X, y=None, depth=2, projection=None):
    """X (N, D), y (N,) of real numbers or `None` to draw them.

    `projection`: W (D, P) for P units in the inner layers, `pg.means.principal_axes(X, P)` say;
    `None`: D units.
    """
    f = last_layer(hidden_layers(X, depth, projection))
    noise_scale = numpyro.sample("noise_scale", dist.LogNormal(-1.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise_scale), obs=y)


def deep_binary(X, y=None, depth=2, projection=None):
    """X (N, D), y (N,) of 0 and 1 or `None`; otherwise as `deep`."""
    f = last_layer(hidden_layers(X, depth, projection))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def hidden_layers(X, depth, projection=None):
    """H_(depth-1), (N, P): the inputs passed through depth - 1 layers of GPs, sites `f_1`, `f_2`
    ... of shape (P, N).
    """
    H, mean = X, pg.means.Identity() if projection is None else pg.means.Projection(projection)
    for layer in range(1, depth):
        kernel = rbf(H.shape[-1], f"_{layer}", variance=-1.0)
        with numpyro.plate(f"units_{layer}", mean(H).shape[0]):
            H = numpyro.sample(f"f_{layer}", pg.GP(kernel, H, mean=mean)).T
        mean = pg.means.Identity()
    return H


def last_layer(H):
    """f, (N,)."""
    return numpyro.sample("f", pg.GP(rbf(H.shape[-1]), H))


def rbf(D, suffix="", variance=0.0):
    """The kernel of a layer with D inputs, its hyperparameters drawn; `variance` is the median's
    logarithm.
    """
    lengthscale = numpyro.sample(
        f"lengthscale{suffix}", dist.LogNormal(0.5 * jnp.log(D), 1.0).expand([D]).to_event(1)
    )
    return pg.kernels.RBF(
        numpyro.sample(f"variance{suffix}", dist.LogNormal(variance, 1.0)), lengthscale
    )
