"""The GP as a NumPyro distribution: density, draws, and everything NumPyro does to an ordinary
sample site.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Predictive, log_likelihood
from numpyro.infer.util import log_density, potential_energy

import ppl_gp as pg
from ppl_gp import kernels
from ppl_gp.errors import DataError

N = 7
X = np.random.default_rng(0).normal(size=(N, 2))
KERNEL = kernels.RBF(1.3, 0.8)
SITE = pg.GP(KERNEL, X, mean=lambda X: 0.5 * X[:, 0], jitter=1e-6)
SAME = dist.MultivariateNormal(0.5 * X[:, 0], KERNEL(X, X) + 1e-6 * jnp.eye(N))


def test_density_is_the_multivariate_normal():
    values = random.normal(random.key(0), (3, 2, N))
    assert SITE.log_prob(values).shape == (3, 2)
    np.testing.assert_allclose(SITE.log_prob(values), SAME.log_prob(values), rtol=1e-9)
    np.testing.assert_allclose(SITE.mean, SAME.mean)
    np.testing.assert_allclose(SITE.variance, SAME.variance, rtol=1e-12)
    np.testing.assert_allclose(SITE.covariance_matrix, SAME.covariance_matrix, rtol=1e-12)
    np.testing.assert_allclose(SITE.scale_tril, SAME.scale_tril, atol=1e-9)
    gradient = jax.grad(lambda v: SITE.log_prob(v))(values[0, 0])
    np.testing.assert_allclose(gradient, jax.grad(SAME.log_prob)(values[0, 0]), rtol=1e-7)


def test_draws_have_the_declared_moments():
    draws = SITE.sample(random.key(1), (40_000,))
    assert draws.shape == (40_000, N)
    np.testing.assert_allclose(draws.mean(0), SAME.mean, atol=5 * 1.15 / 200)
    np.testing.assert_allclose(np.cov(draws.T), SAME.covariance_matrix, atol=0.06)


def test_one_input_dimension_and_integer_inputs():
    one = pg.GP(KERNEL, X[:, 0])
    np.testing.assert_allclose(one.covariance_matrix, pg.GP(KERNEL, X[:, :1]).covariance_matrix)
    counts = pg.GP(KERNEL, np.arange(4))
    assert counts.X.dtype == jnp.float64 and counts.event_shape == (4,)


@pytest.mark.parametrize("mean", [2, np.array([2]), np.full(N, 2)], ids=str)
def test_a_mean_function_may_give_a_number_or_integers(mean):
    """A number had no shape, an array of none was indexed, and integers met floats in a loop."""
    site = pg.GP(KERNEL, X, mean=lambda X: mean)
    assert site.mean.dtype == float
    np.testing.assert_array_equal(site.mean, np.full(N, 2.0))


@pytest.mark.parametrize("length", [(N, 1), (N - 1,)])
def test_a_mean_function_that_gives_no_number_per_row_is_told(length):
    """A column was told to stand in a plate of N units, which raises the same."""

    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(KERNEL, X, mean=lambda X: jnp.zeros(length)))
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

    with pytest.raises(DataError, match=r"gives \(\d, ?1?\): give one number per row.*X\[:, 0\]"):
        pg.fit(model, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=np.zeros(N))


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (2, 2, 2), ()])
def test_inputs_of_a_wrong_shape(shape):
    with pytest.raises(DataError, match=r"X=\.\.\.\) has shape"):
        pg.GP(KERNEL, np.zeros(shape))


def test_a_factorisation_that_needs_jitter_says_how_much():
    repeated = pg.GP(KERNEL, np.zeros((5, 1)), jitter=0.0)
    L, added = repeated.factor()
    assert 0.0 < float(added) < 1e-4 and bool(jnp.all(jnp.isfinite(L)))
    assert float(SITE.factor()[1]) == 0.0


def test_float32():
    with jax.enable_x64(False):
        site = pg.GP(kernels.RBF(jnp.float32(1.3), jnp.float32(0.8)), X.astype(np.float32))
        draw = site.sample(random.key(0))
        assert draw.dtype == jnp.float32 and site.log_prob(draw).dtype == jnp.float32
    # In the 64-bit mode a table in float32 is computed with in float64, as everything that it meets
    # is.
    assert pg.GP(KERNEL, X.astype(np.float32)).X.dtype == jnp.float64
    double = pg.GP(KERNEL, X, jitter=float(site.jitter or site._jitter(site.kernel.diag(site.X))))
    np.testing.assert_allclose(site.log_prob(draw), double.log_prob(draw.astype(float)), rtol=1e-3)


def test_a_tinygp_kernel_in_its_place():
    foreign = 1.3 * tinygp.kernels.ExpSquared(scale=0.8)
    site = pg.GP(foreign, X, mean=lambda X: 0.5 * X[:, 0], jitter=1e-6)
    value = random.normal(random.key(2), (N,))
    np.testing.assert_allclose(site.variance, SITE.variance, rtol=1e-12)
    np.testing.assert_allclose(
        site.log_prob(value),
        pg.GP(foreign, X, lambda X: 0.5 * X[:, 0], 1e-6).log_prob(value),
        rtol=1e-12,
    )
    L1 = tinygp.kernels.ExpSquared(scale=0.8, distance=tinygp.kernels.distance.L2Distance())
    np.testing.assert_allclose(
        pg.GP(1.3 * L1, X, jitter=1e-6).covariance_matrix, SITE.covariance_matrix, rtol=1e-9
    )


def binary(X, y=None):
    """Two hyperparameters, a GP in the way of everything NumPyro does, Bernoulli observations."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal())
    variance = numpyro.sample("variance", dist.LogNormal())
    f = numpyro.sample("f", pg.GP(kernels.RBF(variance, lengthscale), X, mean=0.3))
    with numpyro.plate("data", X.shape[0]):
        return numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


Y = np.array([1, 0, 0, 1, 1, 0, 1])
HYPER = {"lengthscale": jnp.asarray(0.9), "variance": jnp.asarray(1.4)}


def test_trace_condition_substitute_and_predictive():
    conditioned = handlers.condition(binary, {"f": jnp.zeros(N)})
    trace = handlers.trace(handlers.seed(conditioned, 0)).get_trace(X)
    assert trace["f"]["is_observed"] and trace["y"]["fn"].logits.shape == (N,)
    prior = Predictive(binary, num_samples=5)(random.key(0), X)
    assert prior["f"].shape == (5, N) and prior["y"].shape == (5, N)
    replicated = Predictive(binary, {"f": prior["f"]}, batch_ndims=1)(random.key(1), X)
    assert replicated["y"].shape == (5, N)
    ll = log_likelihood(binary, {k: prior[k] for k in ("f", "lengthscale", "variance")}, X, y=Y)
    np.testing.assert_allclose(ll["y"], dist.Bernoulli(logits=prior["f"]).log_prob(Y), rtol=1e-9)


def test_masks_and_scales_on_the_site():
    def model():
        with handlers.mask(mask=False):
            numpyro.sample("f", SITE)

    assert float(log_density(model, (), {}, {"f": jnp.ones(N)})[0]) == 0.0
    scaled = handlers.scale(lambda: numpyro.sample("f", SITE), scale=3.0)
    np.testing.assert_allclose(
        log_density(scaled, (), {}, {"f": jnp.ones(N)})[0],
        3 * SAME.log_prob(jnp.ones(N)),
        rtol=1e-9,
    )


def test_plates_expand_the_site():
    def model():
        with numpyro.plate("classes", 3):
            return numpyro.sample("f", SITE)

    f = handlers.seed(model, 0)()
    assert f.shape == (3, N)
    np.testing.assert_allclose(
        log_density(model, (), {}, {"f": f})[0], SAME.log_prob(f).sum(), rtol=1e-9
    )
    assert SITE.expand([2, 3]).sample(random.key(0)).shape == (2, 3, N)
    assert not np.allclose(f[0], f[1])


@pytest.mark.parametrize("in_plate", [False, True])
def test_whitening_is_a_change_of_variables(in_plate):
    def model():
        if in_plate:
            with numpyro.plate("classes", 3):
                return numpyro.sample("f", SITE)
        return numpyro.sample("f", SITE)

    whitened = handlers.reparam(model, config={"f": pg.Whiten()})
    shape = (3, N) if in_plate else (N,)
    v = random.normal(random.key(3), shape)
    trace = handlers.trace(
        handlers.substitute(handlers.seed(whitened, 0), {"f_base": v})
    ).get_trace()
    f = trace["f"]["value"]
    np.testing.assert_allclose(f, SAME.mean + v @ SAME.scale_tril.T, atol=1e-9)
    log_jacobian = jnp.sum(jnp.log(jnp.diagonal(SAME.scale_tril))) * (3 if in_plate else 1)
    white = log_density(whitened, (), {}, {"f_base": v})[0]
    np.testing.assert_allclose(
        white, log_density(model, (), {}, {"f": f})[0] + log_jacobian, rtol=1e-9
    )


def test_whitening_leaves_an_observed_site_alone_and_names_a_wrong_one():
    whitened = handlers.reparam(
        lambda: numpyro.sample("f", SITE, obs=jnp.zeros(N)), config={"f": pg.Whiten()}
    )
    np.testing.assert_allclose(
        log_density(whitened, (), {}, {})[0], SAME.log_prob(jnp.zeros(N)), rtol=1e-9
    )
    wrong = handlers.reparam(lambda: numpyro.sample("z", dist.Normal()), config={"z": pg.Whiten()})
    with pytest.raises(DataError, match="'z' is a Normal"):
        handlers.seed(wrong, 0)()


def test_whitening_respects_a_mask():
    def model():
        with handlers.mask(mask=False):
            numpyro.sample("f", SITE)

    whitened = handlers.reparam(model, config={"f": pg.Whiten()})
    assert float(log_density(whitened, (), {}, {"f_base": jnp.ones(N)})[0]) == 0.0


def test_jit_vmap_and_pytree():
    value = random.normal(random.key(4), (N,))

    def log_prob(variance):
        return pg.GP(kernels.RBF(variance, 0.8), X).log_prob(value)

    variances = jnp.array([0.5, 1.0, 2.0])
    one_by_one = jnp.stack([log_prob(v) for v in variances])
    np.testing.assert_allclose(jax.vmap(log_prob)(variances), one_by_one, rtol=1e-9)
    np.testing.assert_allclose(jax.jit(jax.vmap(log_prob))(variances), one_by_one, rtol=1e-9)
    # the distribution itself crosses jit as a pytree
    through = jax.jit(lambda gp: gp.log_prob(value))(SITE)
    np.testing.assert_allclose(through, SITE.log_prob(value), rtol=1e-12)
    batch = jax.vmap(lambda v: pg.GP(kernels.RBF(v, 0.8), X))(variances)
    np.testing.assert_allclose(
        jax.vmap(lambda gp: gp.log_prob(value))(batch), one_by_one, rtol=1e-9
    )


def test_gradient_in_hyperparameters_is_finite_differences():
    value = random.normal(random.key(5), (N,))

    def log_prob(v):
        return pg.GP(kernels.RBF(v[0], v[1]), X, mean=v[2], jitter=1e-6).log_prob(value)

    at, h = jnp.array([1.3, 0.8, 0.2]), 1e-5
    gradient = jax.grad(log_prob)(at)
    for i in range(3):
        e = jnp.zeros(3).at[i].set(h)
        np.testing.assert_allclose(
            gradient[i], (log_prob(at + e) - log_prob(at - e)) / (2 * h), rtol=1e-6, atol=1e-7
        )


def additive(X, y=None):
    """Two latent functions at one likelihood."""
    f = numpyro.sample("f", pg.GP(kernels.RBF(1.0, 1.0, active_dims=[0]), X))
    g = numpyro.sample("g", pg.GP(kernels.RBF(1.0, 1.0, active_dims=[1]), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f + g), obs=y)


@pytest.mark.slow
def test_an_additive_model_under_nuts_and_prior_draws():
    prior = Predictive(additive, num_samples=3)(random.key(0), X)
    assert prior["f"].shape == prior["g"].shape == prior["y"].shape == (3, N)
    whitened = handlers.reparam(additive, config={"f": pg.Whiten(), "g": pg.Whiten()})
    mcmc = MCMC(NUTS(whitened), num_warmup=20, num_samples=20, progress_bar=False)
    mcmc.run(random.key(1), X, y=Y)
    draws = mcmc.get_samples()
    assert draws["f"].shape == draws["g"].shape == (20, N) and bool(
        jnp.all(jnp.isfinite(draws["f"]))
    )
    f = draws["f_base"] @ pg.GP(kernels.RBF(1.0, 1.0, active_dims=[0]), X).scale_tril.T
    np.testing.assert_allclose(draws["f"], f, atol=1e-9)


def test_the_plain_model_has_a_potential_without_any_of_our_handlers():
    free = {"f": jnp.zeros(N), "lengthscale": jnp.asarray(0.1), "variance": jnp.asarray(0.2)}
    potential = potential_energy(binary, (X,), {"y": Y}, free)
    site = pg.GP(kernels.RBF(jnp.exp(0.2), jnp.exp(0.1)), X, mean=0.3)
    expected = site.log_prob(free["f"]) + dist.Bernoulli(logits=free["f"]).log_prob(Y).sum()
    expected += dist.Normal().log_prob(0.1) + dist.Normal().log_prob(0.2)
    np.testing.assert_allclose(-potential, expected, rtol=1e-9)


def test_a_kernel_that_is_not_positive_definite_gives_nan_and_not_a_number():
    site = pg.GP(kernels.RBF(-1.0, 1.0), X)
    assert bool(jnp.isnan(site.log_prob(jnp.zeros(N))))


import pytest  # noqa: E402
