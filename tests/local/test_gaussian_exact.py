"""With a Gaussian likelihood every local method is exact GP regression: evidence, gradient, means,
covariances, to 1e-8.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from toy_models import ROWS, Data, hyper, padded, solve, switched

import ppl_gp as pg
from ppl_gp import kernels
from ppl_gp.errors import Result
from ppl_gp.kept import FromPseudo
from ppl_gp.local.natural import condition

METHODS = {"laplace": pg.Laplace(), "ep": pg.EP(), "vi": pg.VI()}
HYPER = hyper(variance=1.7, lengthscale=0.8, s=0.3, slope=0.6)
NEW = jnp.asarray(np.random.default_rng(5).normal(size=(6, 2)))


def _rbf(h, A, B):
    squared = jnp.sum((A[:, None] - B[None]) ** 2, -1)
    return h["variance"] * jnp.exp(-0.5 * squared / h["lengthscale"] ** 2)


@jax.jit
def _exact_evidence(h, X, y):
    covariance = _rbf(h, X, X) + (1e-9 + h["s"] ** 2) * jnp.eye(len(X))
    return dist.MultivariateNormal(h["slope"] * X[:, 0], covariance).log_prob(y)


def _exact_posterior(h, X, y, new):
    solve_with = jnp.linalg.solve(
        _rbf(h, X, X) + (1e-9 + h["s"] ** 2) * jnp.eye(len(X)), _rbf(h, X, new)
    )
    mean = h["slope"] * new[:, 0] + solve_with.T @ (y - h["slope"] * X[:, 0])
    return mean, _rbf(h, new, new) + 1e-9 * jnp.eye(len(new)) - _rbf(h, new, X) @ solve_with


@pytest.fixture(scope="module")
def problem():
    """70 of 100 rows observed, the others masked with absurd values."""
    rng = np.random.default_rng(4)
    X = rng.normal(size=(ROWS, 2))
    y = np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=ROWS) + 1.0
    seen = rng.permutation(ROWS) < 70
    _, template = padded(X, y, "gaussian")
    data = Data(jnp.where(seen, y, 1e6), jnp.asarray(seen), template.which, template.scale)
    return jnp.asarray(X), jnp.asarray(y), seen, data


@pytest.fixture(scope="module", params=METHODS)
def solved(request, problem):
    X, _, _, data = problem
    at = solve(switched, METHODS[request.param], HYPER, X, data)
    assert Result.from_code(at.solution.code) == "converged"
    return at


@pytest.mark.slow
def test_evidence_and_its_gradient_in_every_parameter(solved, problem):
    X, y, seen, _ = problem
    value, gradient = jax.value_and_grad(_exact_evidence)(HYPER, X[seen], y[seen])
    np.testing.assert_allclose(solved.log_z, value, rtol=0, atol=1e-8)
    for name in HYPER:
        np.testing.assert_allclose(solved.gradient[name], gradient[name], rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.one_case
def test_posterior_at_new_inputs_and_at_the_masked_rows(solved, problem):
    X, y, seen, _ = problem
    alpha = solved.solution.marginals.alpha
    posterior = FromPseudo(alpha, alpha, alpha, solved.solution.sites).process(solved.prior)
    joint = posterior(NEW, joint=True)
    mean, covariance = _exact_posterior(HYPER, X[seen], y[seen], NEW)
    np.testing.assert_allclose(joint.mean, mean, rtol=0, atol=1e-8)
    np.testing.assert_allclose(joint.covariance_matrix, covariance, rtol=0, atol=1e-8)
    np.testing.assert_allclose(posterior(NEW).variance, jnp.diagonal(covariance), rtol=0, atol=1e-8)
    mean, covariance = _exact_posterior(HYPER, X[seen], y[seen], X[~seen])
    q = condition(solved.prior.covariance_matrix, solved.prior.mean, solved.solution.sites)
    np.testing.assert_allclose(q.mean[~seen], mean, rtol=0, atol=1e-8)
    np.testing.assert_allclose(q.variance[~seen], jnp.diagonal(covariance), rtol=0, atol=1e-8)


def regression(X, y=None):
    """The same as an ordinary model: a Normal site, no mask."""
    variance, lengthscale, s = (
        numpyro.sample(k, dist.LogNormal()) for k in ("variance", "lengthscale", "s")
    )
    slope = numpyro.sample("slope", dist.Normal())
    f = numpyro.sample(
        "f", pg.GP(kernels.RBF(variance, lengthscale), X, lambda X: slope * X[:, 0], jitter=1e-9)
    )
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, s), obs=y)


def test_fit_returns_exact_regression(problem):
    X, y, seen, _ = problem
    X, y = np.asarray(X[seen]), np.asarray(y[seen])
    fit = pg.fit(regression, pg.Laplace(hyper=pg.Fixed(HYPER)), 0, X, y=y)
    np.testing.assert_allclose(fit.log_evidence, _exact_evidence(HYPER, X, y), rtol=0, atol=1e-8)
    joint = fit.posterior(NEW, joint=True)
    mean, covariance = _exact_posterior(HYPER, X, y, NEW)
    np.testing.assert_allclose(joint.mean, mean, rtol=0, atol=1e-8)
    np.testing.assert_allclose(joint.covariance_matrix, covariance, rtol=0, atol=1e-8)


@pytest.mark.parametrize("constant", [1.0, 1e8])
@pytest.mark.parametrize("method", [pg.Laplace(), pg.CollapsedSVGP()], ids=["dense", "sparse"])
def test_joint_covariances_under_a_wide_prior(constant, method, problem):
    """f = g + b, b ~ N(0, constant): the covariance by that of g alone and by b's, which lose no
    digits to the constant; what is left is the jitter that fits report, and its rounding.
    """
    X, y = np.asarray(problem[0])[:, :1], np.asarray(problem[1])
    new = np.r_[X[:5], np.linspace(-3.0, 3.0, 40)[:, None]]  # closer than the length scale

    def wide(X, y=None):
        kernel = kernels.Constant(constant) + kernels.RBF(1.0, 0.7)
        f = numpyro.sample("f", pg.GP(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    covariance = pg.fit(wide, method, 0, X, y=y).posterior(new, joint=True).covariance_matrix
    K = lambda a, b: np.exp(-0.5 * (a - b.T) ** 2 / 0.7**2)  # noqa: E731
    solved = np.linalg.solve(K(X, X) + 0.09 * np.eye(ROWS), np.c_[K(X, new), np.ones(ROWS)])
    h = 1.0 - K(new, X) @ solved[:, -1]
    exact = K(new, new) - K(new, X) @ solved[:, :-1]
    exact += np.outer(h, h) / (1.0 / constant + solved[:, -1].sum())
    np.testing.assert_allclose(covariance, exact, rtol=0, atol=2e-3)
