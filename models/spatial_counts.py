"""Counts in the cells of a map: a log-Gaussian Cox process with an offset, a covariate and noise of
each cell (Moller, Syversveen & Waagepetersen 1998; Besag, York & Mollie 1991).

    lengthscale ~ LogNormal(0, 1)
    variance    ~ LogNormal(-1, 1)
    spread      ~ HalfNormal(0.5)                   of what a cell has to itself
    f | s       ~ GP(0, variance (1 + r) exp(-r)),  Matern 3/2, r = sqrt(3) |s - s'| / lengthscale
    level       ~ N(0, 3^2),   beta ~ N(0, 1)
    e_n         ~ N(0, spread^2)
    y_n         ~ Poisson(expected_n exp(level + beta w_n + f(s_n) + e_n))

f, level, beta and e are integrated by the local methods.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def spatial_counts(S, w, expected, y=None):
    """S (N, 2) centres of cells, w (N,) a covariate, expected (N,) positive (area, population),
    y (N,) counts or `None` to draw them.
    """
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(-1.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(0.5))
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.Matern32(variance, lengthscale), S))
    with numpyro.plate("cells", S.shape[0]):
        e = numpyro.sample("e", dist.Normal(0.0, spread))
        rate = expected * jnp.exp(level + beta * w + f + e)
        numpyro.sample("y", dist.Poisson(rate), obs=y)
