"""Classification into C classes by the softmax of C latent functions.

    lengthscale ~ LogNormal(log(D) / 2, 1)          one for each column of X, in its units
    variance    ~ LogNormal(1, 1)
    f_c | X     ~ GP(0, variance exp(-sum_d (x_d - x'_d)^2 / (2 lengthscale_d^2))),   c = 1 ... C
    y_n         ~ Categorical(softmax(f_1n, ..., f_Cn))

The functions share a prior; what all of them have in common is not seen by the data. For X
that is not standardised bind a prior in its units: `partial(multiclass,
lengthscale_prior=pg.priors.lengthscale(X, ard=True))`.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def multiclass(X, y=None, num_classes=3, lengthscale_prior=None):
    """X (N, D), y (N,) of classes 0 ... C - 1 or `None` to draw them."""
    D = X.shape[-1]
    standard = dist.LogNormal(0.5 * jnp.log(D), 1.0).expand([D]).to_event(1)
    lengthscale = numpyro.sample("lengthscale", lengthscale_prior or standard)
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    with numpyro.plate("classes", num_classes):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)
