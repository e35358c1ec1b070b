"""The models of estimators that are given none, and their priors' parameters.

The parameters are arrays among a model's arguments and no constants of it: compiled code is keyed
by constants, and other training data (the folds of a cross-validation) shall find it.
The models are not wrapped by a checker of types: what a wrapper holds would be read with them.
"""

import math
from typing import Any, no_type_check

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from ppl_gp import kernels, priors
from ppl_gp.gp import GP


@no_type_check
def binary(X, y=None, *, lengthscale_prior):
    """Two classes, y (N,) of 0 and 1: l ~ InverseGamma(lengthscale_prior), v ~ LogNormal(1, 1), f ~
    GP(0, v exp(-|x - x'|^2 / (2 l^2))), y_n ~ Bernoulli(sigma(f_n)).
    """
    f = numpyro.sample("f", GP(_of_classes(lengthscale_prior), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@no_type_check
def multiclass(X, y=None, *, lengthscale_prior, num_classes):
    """C classes, y (N,) of 0 ... C - 1: f_1 ... f_C with the prior of `binary` each, l and v
    shared, y_n ~ Categorical(softmax(f_1n ... f_Cn)).
    """
    kernel = _of_classes(lengthscale_prior)
    with numpyro.plate("classes", num_classes):
        f = numpyro.sample("f", GP(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


@no_type_check
def regression(X, y=None, *, lengthscale_prior, variance_prior, noise_prior, location):
    """y (N,): l ~ InverseGamma(lengthscale_prior), v ~ LogNormal(variance_prior), s ~
    LogNormal(noise_prior), f ~ GP(location, v exp(-|x - x'|^2 / (2 l^2))), y_n ~ N(f_n, s^2).
    """
    lengthscale = numpyro.sample("lengthscale", dist.InverseGamma(*lengthscale_prior))
    variance = numpyro.sample("variance", dist.LogNormal(*variance_prior))
    noise_scale = numpyro.sample("noise_scale", dist.LogNormal(*noise_prior))
    f = numpyro.sample("f", GP(kernels.RBF(variance, lengthscale), X, mean=location))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise_scale), obs=y)


@no_type_check
def _of_classes(lengthscale_prior):
    lengthscale = numpyro.sample("lengthscale", dist.InverseGamma(*lengthscale_prior))
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    return kernels.RBF(variance, lengthscale)


def classification_arguments(X, num_classes: int) -> dict[str, Any]:
    """Of `binary` or `multiclass`: `priors.lengthscale(X)` by its two numbers. `DataError` where
    all rows of X (N, D) are equal.
    """
    prior: Any = priors.lengthscale(X)
    found: dict[str, Any] = {"lengthscale_prior": _pair(prior.concentration, prior.rate)}
    return found if num_classes == 2 else {**found, "num_classes": num_classes}


def regression_arguments(X, y) -> dict[str, Any]:
    """Of `regression`: `priors.lengthscale(X)` and `priors.variance(y)` by their two numbers each;
    the noise about e^-1 standard deviations of y (N,); `location` its mean. `DataError` where all
    rows of X, or all of y, are equal.
    """
    variance: Any = priors.variance(y)
    return {
        **classification_arguments(X, 2),
        "variance_prior": _pair(variance.loc, variance.scale),
        "noise_prior": _pair(math.log(float(np.std(y))) - 1.0, 1.0),
        "location": jnp.asarray(float(np.mean(y))),
    }


def _pair(first, second) -> tuple[Any, Any]:
    return jnp.asarray(float(first)), jnp.asarray(float(second))
