"""`marginal`: the model with f integrated out, as a NumPyro model over the hyperparameters
alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import small_fits
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density, potential_energy
from toy_models import evidence, one_gp

import ppl_gp as pg
from ppl_gp import kernels
from ppl_gp.deep.structure import Structure
from ppl_gp.errors import ModelError, Result
from ppl_gp.infer.hyper.sample import marginal
from ppl_gp.infer.mcmc.sparse_nuts import sparse_model
from ppl_gp.sparse.expectation import Expectation

N = 12
X = jnp.asarray(np.random.default_rng(0).normal(size=(N, 1)))
Y = jnp.asarray((np.arange(N) % 3 == 0).astype(float))
HYPER = {"lengthscale": jnp.asarray(0.9), "variance": jnp.asarray(1.4), "s": jnp.asarray(1.0)}
MARGINAL = marginal(one_gp, pg.Laplace())
ONE_LAYER = Structure(("f",), (), (), (), ("f",))


def _trace(model, **kwargs):
    return handlers.trace(handlers.substitute(handlers.seed(model, 0), HYPER)).get_trace(
        X, y=Y, **kwargs
    )


def test_sites_are_the_hyperparameters_and_the_inner_state():
    trace = _trace(MARGINAL)
    latent = [k for k, s in trace.items() if s["type"] == "sample" and not s["is_observed"]]
    assert set(latent) == set(HYPER)
    assert trace["f_mean"]["value"].shape == trace["f_nat2"]["value"].shape == (N,)
    assert (
        Result.from_code(trace["f_code"]["value"]) == "converged"
        and int(trace["f_steps"]["value"]) > 1
    )
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
        np.testing.assert_allclose(
            gradient[name], (value(up) - value(down)) / (2 * h), rtol=1e-6, atol=1e-7
        )


def test_an_inner_iteration_that_did_not_converge_is_nan_and_never_a_bias():
    hurried = marginal(one_gp, pg.Laplace(max_steps=1))
    assert bool(jnp.isnan(log_density(hurried, (X,), {"y": Y}, HYPER)[0]))
    assert Result.from_code(_trace(hurried)["f_code"]["value"]) == "max_steps"


def test_shared_terms_and_params_and_missing_data():
    mask = jnp.arange(N) < 8

    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal())
        lengthscale = numpyro.param(
            "lengthscale", jnp.asarray(0.9), constraint=dist.constraints.positive
        )
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


@pytest.mark.slow
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
        numpyro.sample("y", dist.Bernoulli(logits=f * g), obs=y)

    with pytest.raises(ModelError, match=r"2 functions.*takes one"):
        handlers.seed(marginal(two, pg.LocalBound()), 0)(X, y=Y)


def test_samplers_see_the_jacobian_of_their_transforms():
    """NumPyro's samplers add log |dx/du| through the handlers; hiding it would change the prior
    that is sampled from.
    """
    X, y, _ = (jnp.asarray(a) for a in small_fits.classification())
    free = {"lengthscale": jnp.log(1.2), "variance": jnp.log(2.0)}
    hyper = {k: jnp.exp(v) for k, v in free.items()}
    white = {"f_base": jnp.linspace(-1.0, 1.0, len(X))}
    cases = (
        (pg.marginal(small_fits.classifier, pg.Laplace()), (X,), {}),
        (
            sparse_model(small_fits.classifier, Expectation(), ONE_LAYER),
            ({"f": pg.Points(X)}, X),
            white,
        ),
    )
    for model, args, more in cases:
        density, _ = log_density(model, args, {"y": y}, {**hyper, **more})
        potential = potential_energy(model, args, {"y": y}, {**free, **more})
        assert abs(density + sum(free.values()) + potential) < 1e-8
    # Known inducing variables at all inputs are f itself: the density is the whitened model's.
    whitened = handlers.reparam(small_fits.classifier, config={"f": pg.Whiten()})
    assert abs(log_density(whitened, (X,), {"y": y}, {**hyper, **white})[0] - density) < 1e-4


@pytest.mark.slow
def test_sampled_hyperparameters_are_those_of_joint_nuts_where_the_approximation_is_exact():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(12, 1))
    y = np.sin(X[:, 0]) + 0.3 * rng.normal(size=12)
    sampled = pg.fit(
        regression, pg.Laplace(hyper=pg.Sample(num_warmup=300, num_samples=1000)), 0, X, y=y
    )
    joint = pg.fit(regression, pg.NUTS(num_warmup=300, num_samples=1000, num_chains=1), 1, X, y=y)
    assert min(sampled.stats["ess"], joint.stats["ess"]) > 150
    for name in sampled.hyper:
        ours, theirs = (np.log(np.asarray(f.hyper[name])) for f in (sampled, joint))
        assert abs(ours.mean() - theirs.mean()) < 0.46 * theirs.std(), name


def regression(X, y=None):
    """Gaussian noise: Laplace's method is exact."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)
