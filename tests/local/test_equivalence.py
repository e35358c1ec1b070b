"""The same posterior by different routes: orders of update, forms of the algebra, limits,
permutations, transformations.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from data_sets import wave40
from toy_models import ROWS, evidence, hyper, padded, solve, switched

import ppl_gp as pg
from ppl_gp import kernels
from ppl_gp.errors import Result
from ppl_gp.kept import FromPseudo
from ppl_gp.local.natural import PseudoLikelihood, condition, log_partition_and_mean

X40, Y40 = wave40()
HYPER = hyper(variance=4.0, lengthscale=0.7)


@pytest.fixture(scope="module")
def by_method():
    """name -> `solve` on wave40 with a logistic link."""
    args = HYPER, *padded(X40, Y40, "logit")
    return {type(m).__name__: solve(switched, m, *args) for m in (pg.Laplace(), pg.EP(), pg.VI())}


@pytest.mark.slow
def test_sequential_is_parallel_ep(by_method):
    log_z, solution = evidence(switched, pg.EP(sequential=True), HYPER, *padded(X40, Y40, "logit"))
    assert Result.from_code(solution.code) == "converged"
    parallel = by_method["EP"]
    np.testing.assert_allclose(log_z, parallel.log_z, rtol=0, atol=1e-8)
    np.testing.assert_allclose(
        solution.sites.nat2, parallel.solution.sites.nat2, rtol=1e-6, atol=1e-8
    )
    np.testing.assert_allclose(
        solution.marginals.mean, parallel.solution.marginals.mean, rtol=0, atol=1e-6
    )


def test_a_sequential_sweep_sees_the_sites_updated_before():
    """Against a loop that computes the posterior anew, by dense algebra, before every site."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(7, 1))
    K = jnp.asarray(np.exp(-0.5 * (X - X.T) ** 2) + 0.1 * np.eye(7))
    mean, y = jnp.linspace(-0.5, 0.5, 7), jnp.asarray(rng.integers(0, 2, 7))
    method, log_lik = pg.EP(sequential=True), pg.read(_logistic, X, y=y).log_lik
    sites = PseudoLikelihood(jnp.zeros(7), jnp.full(7, 0.3))
    swept = method._sequential_sweep(K, mean, log_lik, sites).target
    for n in range(7):
        q = condition(K, mean, sites)
        Sigma = np.linalg.inv(np.linalg.inv(K) + np.diag(sites.nat2))
        mu = Sigma @ (np.linalg.solve(K, mean) + sites.nat1)
        q = q._replace(mean=mu, variance=jnp.diag(jnp.asarray(Sigma)))
        new, *_ = method._matched(log_lik, sites, q)
        sites = PseudoLikelihood(
            sites.nat1.at[n].set(new.nat1[n]), sites.nat2.at[n].set(new.nat2[n])
        )
    np.testing.assert_allclose(swept.nat1, sites.nat1, rtol=0, atol=1e-9)
    np.testing.assert_allclose(swept.nat2, sites.nat2, rtol=0, atol=1e-9)


def _logistic(X, y=None):
    f = numpyro.sample("f", pg.GP(kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@pytest.mark.slow
def test_small_power_is_vi(by_method):
    power = 0.01
    log_z, solution = evidence(switched, pg.EP(power=power), HYPER, *padded(X40, Y40, "logit"))
    assert Result.from_code(solution.code) == "converged"
    vi, ep = by_method["VI"], by_method["EP"]
    # The difference vanishes in proportion to the power.
    for small, full in (
        (log_z - vi.log_z, ep.log_z - vi.log_z),
        (
            solution.marginals.variance[0] - vi.solution.marginals.variance[0],
            _variance(ep) - _variance(vi),
        ),
    ):
        assert 0.4 * power < small / full < 2.5 * power
    np.testing.assert_allclose(
        solution.marginals.mean, vi.solution.marginals.mean, rtol=0, atol=2e-3
    )


def _variance(at):
    return at.solution.marginals.variance[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", [pg.Laplace(), pg.EP(), pg.VI()], ids=lambda m: type(m).__name__)
def test_permuted_data(method, by_method):
    order = np.random.default_rng(0).permutation(ROWS)
    X, data = padded(X40, Y40, "logit")
    at = by_method[type(method).__name__]
    shuffled = solve(
        switched, method, HYPER, X[order], data._replace(y=data.y[order], mask=data.mask[order])
    )
    np.testing.assert_allclose(shuffled.log_z, at.log_z, rtol=0, atol=1e-9)
    np.testing.assert_allclose(
        shuffled.solution.marginals.mean, at.solution.marginals.mean[order], rtol=0, atol=1e-7
    )
    np.testing.assert_allclose(
        shuffled.gradient["lengthscale"], at.gradient["lengthscale"], rtol=0, atol=1e-7
    )


@eqx.filter_jit
def _many(method, hypers, X, data):
    return jax.vmap(lambda h: evidence.__wrapped__(switched, method, h, X, data)[0])(hypers)


@pytest.mark.slow
@pytest.mark.parametrize("method", [pg.Laplace(), pg.EP()], ids=lambda m: type(m).__name__)
def test_eight_settings_in_one_compiled_call_are_the_loop(method):
    X, data = padded(X40, Y40, "logit")
    settings = [hyper(v, ell) for v in (0.5, 2.0, 8.0, 30.0) for ell in (0.4, 1.5)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *settings)
    together = _many(method, stacked, X, data)
    one_by_one = [solve(switched, method, h, X, data).log_z for h in settings]
    np.testing.assert_allclose(together, one_by_one, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_eager_is_jit(by_method):
    X, data = padded(X40, Y40, "logit")
    factors = pg.read(switched, X, data, hyper=HYPER)
    value, _ = pg.log_evidence(pg.Laplace(), factors)
    np.testing.assert_allclose(value, by_method["Laplace"].log_z, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_laplace_covariance_in_whitened_coordinates(by_method):
    at = by_method["Laplace"]
    K, sites = np.asarray(at.prior.covariance_matrix), at.solution.sites
    L = np.linalg.cholesky(K)
    whitened = L @ np.linalg.solve(np.eye(ROWS) + L.T @ np.diag(sites.nat2) @ L, L.T)
    alpha = at.solution.marginals.alpha
    joint = FromPseudo(alpha, alpha, alpha, sites).process(at.prior)(at.prior.X, joint=True)
    np.testing.assert_allclose(joint.covariance_matrix, whitened, rtol=0, atol=1e-8)
    marginals = condition(jnp.asarray(K), jnp.zeros(ROWS), sites)
    np.testing.assert_allclose(marginals.variance, np.diag(whitened), rtol=0, atol=1e-8)


@jax.jit
def _conditioned(K, mean, sites):
    def value(K, mean, sites):
        log_z, mu = log_partition_and_mean(K, mean, sites)
        return log_z + jnp.sum(jnp.sin(mu)), mu

    (total, mu), gradient = jax.value_and_grad(value, (0, 1, 2), has_aux=True)(K, mean, sites)
    return condition(K, mean, sites), total, mu, gradient


def test_signed_form_is_the_positive_form():
    # A negative precision too small to matter forces the form that allows for negative ones.
    rng = np.random.default_rng(1)
    A = rng.normal(size=(20, 20))
    K, mean = jnp.asarray(A @ A.T / 20 + 0.1 * np.eye(20)), jnp.asarray(rng.normal(size=20))
    sites = PseudoLikelihood(
        jnp.asarray(rng.normal(size=20)), jnp.asarray(rng.uniform(0.1, 5.0, 20)).at[3].set(0.0)
    )
    forced = PseudoLikelihood(sites.nat1, sites.nat2.at[3].set(-1e-14))
    positive, signed = _conditioned(K, mean, sites), _conditioned(K, mean, forced)
    for a, b in zip(jax.tree.leaves(positive), jax.tree.leaves(signed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_signed_form_with_really_negative_precisions_is_the_dense_formula():
    rng = np.random.default_rng(2)
    A = rng.normal(size=(20, 20))
    K, mean = A @ A.T / 20 + 0.1 * np.eye(20), rng.normal(size=20)
    nat1, nat2 = rng.normal(size=20), np.where(np.arange(20) % 4 == 0, -0.02, 1.0)
    q = _conditioned(
        jnp.asarray(K), jnp.asarray(mean), PseudoLikelihood(jnp.asarray(nat1), jnp.asarray(nat2))
    )[0]
    covariance = np.linalg.inv(np.linalg.inv(K) + np.diag(nat2))
    np.testing.assert_allclose(q.variance, np.diag(covariance), rtol=1e-9)
    np.testing.assert_allclose(
        q.mean, covariance @ (nat1 + np.linalg.solve(K, mean)), rtol=0, atol=1e-9
    )
    b = nat1 + np.linalg.solve(K, mean)
    log_z = 0.5 * (
        np.linalg.slogdet(covariance)[1]
        - np.linalg.slogdet(K)[1]
        + b @ covariance @ b
        - mean @ np.linalg.solve(K, mean)
    )
    np.testing.assert_allclose(q.log_partition, log_z, rtol=0, atol=1e-9)


def logistic(X, y=None):
    """wave40's model as an ordinary Bernoulli site."""
    f = numpyro.sample("f", pg.GP(kernels.RBF(4.0, 0.7), X, jitter=1e-9))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@pytest.mark.slow
def test_local_bound_lies_below_vi(by_method):
    X, y = jnp.asarray(X40), jnp.asarray(Y40)
    bound, solution = evidence(logistic, pg.LocalBound(), {}, X, y=y)
    assert Result.from_code(solution.code) == "converged"
    vi = by_method["VI"]
    assert vi.log_z - 2.0 < bound < vi.log_z - 0.01
    # It is stationary in xi, and its covariance is too narrow.
    second = solution.marginals.variance + solution.marginals.mean**2
    np.testing.assert_allclose(solution.local**2, second, rtol=1e-6)
    assert bool(jnp.all(solution.marginals.variance < vi.solution.marginals.variance[:40]))
