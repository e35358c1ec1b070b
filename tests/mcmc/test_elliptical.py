"""Elliptical slice sampling against exact answers: a conjugate model, and a slice whose likelihood
must see the proposal.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax, random
from numpyro.distributions import constraints

import ppl_gp as pg
from ppl_gp.infer.mcmc.elliptical import _SliceWithinGibbs, elliptical_slice
from ppl_gp.infer.mcmc.nuts import self_contained, whitened


def conjugate(X, y=None):
    """Gaussian noise of known variance, and one hyperparameter that the likelihood hardly
    informs.
    """
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.01))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def test_agrees_with_exact_regression():
    X = np.linspace(-2.0, 2.0, 8)
    y = np.where(X > 0, 2.0, -2.0)
    K = np.exp(-0.5 * (X[:, None] - X) ** 2)
    gain = np.linalg.solve(K + 0.25 * np.eye(8), K)
    mean, sd = gain.T @ y, np.sqrt(np.diag(K - K @ gain))
    method = pg.EllipticalSlice(num_warmup=100, num_samples=1500, num_chains=1, num_slices=10)
    fit = pg.fit(conjugate, method, 0, X[:, None], y=y, throw=False)
    draws = np.asarray(fit.latent["f"].mean)
    error = 6 * sd / np.sqrt(fit.stats["ess_by_site"]["f"])
    assert fit.stats["ess_by_site"]["f"] > 200
    np.testing.assert_array_less(np.abs(draws.mean(0) - mean), error)
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.2)


def test_an_improper_prior_has_a_start():
    """As under NUTS, which needs no draws of it."""

    def model(X, y=None):
        noise = numpyro.sample("noise", dist.ImproperUniform(constraints.positive, (), ()))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    X = jnp.linspace(-2.0, 2.0, 8)
    white = whitened(self_contained(model), ("f",))
    kernel = _SliceWithinGibbs(white, pg.EllipticalSlice(), ("f_base",), True)
    state = kernel.init(random.key(0), 2, None, (X,), {"y": jnp.sin(X)})
    assert state.z["whites"]["f_base"].shape == (8,) and jnp.isfinite(state.z["hyper"]["noise"])


def test_one_update_leaves_the_posterior_invariant():
    """Prior N(0, I), likelihood N(3; v, 1) in each of two dimensions: posterior N(1.5, 1/2)."""

    def log_lik(v):
        return -0.5 * jnp.sum((3.0 - v["a"]) ** 2)

    def step(v, key):
        v = elliptical_slice(key, v, log_lik)
        return v, v["a"]

    start = {"a": jnp.zeros(2)}
    _, draws = jax.jit(lambda keys: lax.scan(step, start, keys))(
        random.split(random.key(0), 20_000)
    )
    np.testing.assert_allclose(draws[500:].mean(0), 1.5, atol=0.05)
    np.testing.assert_allclose(draws[500:].var(0), 0.5, atol=0.05)
