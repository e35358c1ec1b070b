"""`marginal`: the model with f integrated out, as a NumPyro model over the hyperparameters alone."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density
from toy_models import evidence, one_gp

import ppl_gp as pg
from ppl_gp import kernels
from ppl_gp.errors import ModelError, Result
from ppl_gp.infer.handlers import marginal

N = 12
X = jnp.asarray(np.random.default_rng(0).normal(size=(N, 1)))
Y = jnp.asarray((np.arange(N) % 3 == 0).astype(float))
HYPER = {"lengthscale": jnp.asarray(0.9), "variance": jnp.asarray(1.4), "s": jnp.asarray(1.0)}
MARGINAL = marginal(one_gp, pg.Laplace())


def _trace(model, **kwargs):
    return handlers.trace(handlers.substitute(handlers.seed(model, 0), HYPER)).get_trace(X, y=Y, **kwargs)


def test_sites_are_the_hyperparameters_and_the_inner_state():
    trace = _trace(MARGINAL)
    latent = [k for k, s in trace.items() if s["type"] == "sample" and not s["is_observed"]]
    assert set(latent) == set(HYPER)
    assert trace["f_mean"]["value"].shape == trace["f_nat2"]["value"].shape == (N,)
    assert Result.from_code(trace["f_code"]["value"]) == "converged" and int(trace["f_steps"]["value"]) > 1
    assert float(trace["f_residual"]["value"]) < 1e-8
    assert "y" not in trace and "f" not in trace and "data" not in trace


def test_density_is_prior_times_evidence():
    log_joint, _ = log_density(MARGINAL, (X,), {"y": Y}, HYPER)
    log_z, _ = evidence(one_gp, pg.Laplace(), HYPER, X, y=Y)
    prior = sum(dist.LogNormal().log_prob(v) for v in HYPER.values())
    np.testing.assert_allclose(log_joint, log_z + prior, rtol=1e-10)


def test_gradient_through_the_handlers():
    @jax.jit
    def value(hyper):
        return log_density(MARGINAL, (X,), {"y": Y}, hyper)[0]

    gradient, h = jax.grad(value)(HYPER), 1e-5
    for name in ("lengthscale", "variance"):
        up, down = ({**HYPER, name: HYPER[name] + d} for d in (h, -h))
        np.testing.assert_allclose(gradient[name], (value(up) - value(down)) / (2 * h), rtol=1e-6, atol=1e-7)


def test_an_inner_iteration_that_did_not_converge_is_nan_and_never_a_bias():
    hurried = marginal(one_gp, pg.Laplace(max_steps=1))
    assert bool(jnp.isnan(log_density(hurried, (X,), {"y": Y}, HYPER)[0]))
    assert Result.from_code(_trace(hurried)["f_code"]["value"]) == "max_steps"


def test_shared_terms_and_params_and_missing_data():
    mask = jnp.arange(N) < 8

    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal())
        lengthscale = numpyro.param("lengthscale", jnp.asarray(0.9), constraint=dist.constraints.positive)
        numpyro.sample("measured", dist.Normal(variance, 0.1), obs=1.3)
        f = numpyro.sample("f", pg.GP(kernels.RBF(variance, lengthscale), X, jitter=1e-8))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y, obs_mask=mask)

    hyper = {"variance": jnp.asarray(1.4), "lengthscale": jnp.asarray(0.9)}
    value, trace = log_density(marginal(model, pg.Laplace()), (X,), {"y": Y.astype(int)}, hyper)
    log_z, _ = evidence(one_gp, pg.Laplace(), HYPER, X[:8], y=Y[:8])
    expected = log_z + dist.LogNormal().log_prob(1.4) + dist.Normal(1.4, 0.1).log_prob(1.3)
    np.testing.assert_allclose(value, expected, rtol=1e-7)
    assert trace["lengthscale"]["type"] == "param"


def test_runs_under_numpyros_own_nuts():
    mcmc = MCMC(NUTS(MARGINAL), num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(random.key(0), X, y=Y)
    draws = mcmc.get_samples()
    assert draws["f_mean"].shape == (10, N) and bool(jnp.all(draws["f_code"] == 0))
    assert bool(jnp.all(jnp.isfinite(draws["lengthscale"])))


def test_handlers_around_it_reach_the_hyperparameters():
    fixed = handlers.condition(MARGINAL, {"lengthscale": jnp.asarray(2.0)})
    trace = handlers.trace(handlers.seed(fixed, 0)).get_trace(X, y=Y)
    assert trace["lengthscale"]["is_observed"] and float(trace["lengthscale"]["value"]) == 2.0


def test_errors_are_those_of_read():
    def two(X, y=None):
        f, g = (numpyro.sample(k, pg.GP(kernels.RBF(1.0, 1.0), X)) for k in "fg")
        numpyro.sample("y", dist.Bernoulli(logits=f + g), obs=y)

    with pytest.raises(ModelError, match="several latent functions"):
        handlers.seed(marginal(two, pg.Laplace()), 0)(X, y=Y)
