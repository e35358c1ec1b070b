"""Ordered classes: a latent function and cut points, of which the cuts are hyperparameters.

lengthscale ~ LogNormal(log(D) / 2, 1)          one for each column of X, in its units
variance    ~ LogNormal(0, 1)
f | X       ~ GP(0, variance exp(-sum_d (x_d - x'_d)^2 / (2 lengthscale_d^2)))
first       ~ N(-1, 1)                          the lowest cut
gap_j       ~ LogNormal(0, 0.5)                 j = 1 ... K - 2
cut         = first, first + gap_1, first + gap_1 + gap_2, ...
p(y_n <= k) = Phi(cut_k - f_n)                  Chu & Ghahramani (2005)
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def ordinal(X, y=None, num_classes=4, lengthscale_prior=None):
    """X (N, D), y (N,) of ordered classes 0 ... K - 1 or `None` to draw them; K at least 3. For X
    that is not standardised: `partial(ordinal, lengthscale_prior=pg.priors.lengthscale(X,
    ard=True))`.
    """
    D = X.shape[-1]
    standard = dist.LogNormal(0.5 * jnp.log(D), 1.0).expand([D]).to_event(1)
    lengthscale = numpyro.sample("lengthscale", lengthscale_prior or standard)
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    first = numpyro.sample("first", dist.Normal(-1.0, 1.0))
    gap = numpyro.sample("gap", dist.LogNormal(0.0, 0.5).expand([num_classes - 2]).to_event(1))
    cuts = first + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gap)])
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", pg.observations.OrdinalProbit(f, cuts), obs=y)
