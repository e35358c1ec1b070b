"""Several outputs that share latent functions: the linear model of coregionalisation.

    lengthscale ~ LogNormal(0, 1)
    g_q | x     ~ GP(0, exp(-(x - x')^2 / (2 lengthscale^2))),   q = 1 ... Q
    W_pq        ~ N(0, 1)                           p = 1 ... P outputs, a hyperparameter
    scale       ~ LogNormal(-1, 1)                  of the noise
    y_np        ~ N(sum_q W_pq g_q(x_n), scale^2)

A datum sees Q functions, whatever P is; given W they are Gaussian, and the answers exact (quantiles
of y up to three functions). W has several values: `Sample()` and `NUTS()` integrate it, and `MAP`
holds it at the mode if it is named, `Laplace(hyper=pg.MAP(maximise=("W",)))`.
"""

import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def outputs(X, y=None, num_outputs=3, num_latents=2):
    """X (N,) or (N, 1), y (N, P) or `None` to draw it."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 1.0))
    shape = [num_outputs, num_latents]
    W = numpyro.sample("W", dist.Normal(0.0, 1.0).expand(shape).to_event(2))
    with numpyro.plate("latents", num_latents):
        g = numpyro.sample("g", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal((W @ g).T, scale).to_event(1), obs=y)
