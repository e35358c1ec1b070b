"""Binary classification with a latent Gaussian process.

    lengthscale_d ~ LogNormal(log(D) / 2, 1)        in column d's units; one for all: ard = False
    variance      ~ LogNormal(1, 1)                 prior variance of f
    f | X         ~ GP(0, variance exp(-sum_d (x_d - x'_d)^2 / (2 lengthscale_d^2)))
    y_n | f       ~ Bernoulli(sigma(f_n))           link = "logit"
                  ~ Bernoulli(Phi(f_n))             link = "probit", Phi: the standard normal's cdf

The priors are meant for standardised columns: the distance of two rows grows as sqrt(D), and so
does the median lengthscale. One lengthscale a column (ARD) lets a column that says nothing about y
fade out; one for all columns is two hyperparameters to find from the data in place of D + 1. For
columns that are not standardised bind a prior in their units: `partial(binary,
lengthscale_prior=pg.priors.lengthscale(X, ard=True))`, without `ard` for one.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

LINKS = ("logit", "probit")


def binary(X, y=None, link="logit", ard=True, lengthscale_prior=None):
    """X (N, D), y (N,) of 0 and 1 or `None` to draw them; `link` is "logit" or "probit"; `ard`: D
    lengthscales, or one.
    """
    if link not in LINKS:
        raise pg.errors.DataError(f"binary(link={link!r}): give one of {LINKS}.")
    D = X.shape[-1]
    shape = (D,) if ard else ()
    standard = dist.LogNormal(0.5 * jnp.log(D), 1.0).expand(shape).to_event(len(shape))
    lengthscale = numpyro.sample("lengthscale", lengthscale_prior or standard)
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        likelihood = (
            dist.Bernoulli(logits=f) if link == "logit" else pg.observations.BernoulliProbit(f)
        )
        numpyro.sample("y", likelihood, obs=y)
