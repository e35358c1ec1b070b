"""A mixed model of counts: a smooth function, fixed effects and group effects in one predictor.

    lengthscale ~ LogNormal(0, 1)
    variance    ~ LogNormal(-1, 1)            prior variance of f
    spread      ~ HalfNormal(1)               standard deviation of the group effects
    f | x       ~ GP(0, variance exp(-(x - x')^2 / (2 lengthscale^2)))
    beta_p      ~ N(0, 2^2)                   p = 1 ... P, of the columns of W
    u_g         ~ N(0, spread^2)              g = 0 ... G - 1
    eta_n       = f(x_n) + w_n^T beta + u_group(n) + log exposure_n
    y_n         ~ Poisson(exp(eta_n))

Laplace, EP and VI integrate f, beta and u together; `fit.components` says what each adds.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def mixed_counts(X, W, group, exposure, y=None, num_groups=1):
    """X (N,) of the smooth part, W (N, P), group (N,) integers below `num_groups`, exposure (N,)
    positive, y (N,) counts or `None` to draw them.
    """
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(-1.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([W.shape[1]]).to_event(1))
    with numpyro.plate("groups", num_groups):
        u = numpyro.sample("u", dist.Normal(0.0, spread))
    eta = f + W @ beta + u[group] + jnp.log(exposure)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)
