"""What is compiled for the signs of a pseudo-likelihood: forms against dense inverses, each other,
and a driver that tries again.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from ppl_gp.errors import Result
from ppl_gp.local.method import first_sites
from ppl_gp.local.natural import Positive, PseudoLikelihood, asked, flat

N = 12
RNG = np.random.default_rng(4)
X = RNG.normal(size=(N, 1))
COUNTS = RNG.poisson(2.0, N)
K = np.exp(-0.5 * (X - X.T) ** 2) + 0.1 * np.eye(N)


def poisson(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def robust(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, f, 0.5), obs=y)


@pytest.mark.parametrize(
    "form, low",
    [(PseudoLikelihood, 0.2), (PseudoLikelihood, -0.05), (Positive, 0.2)],
    ids=["plain", "signed", "positive"],
)
def test_a_factor_answers_as_the_dense_inverse(form, low):
    nat2 = np.where(np.arange(N) % 3 == 0, low, 1.5)
    r = jnp.asarray(RNG.normal(size=N))

    def ask(factor):
        inverse = factor.inverse()
        root = inverse.root()
        R = jnp.diag(root.diagonal) + root.sign * root.W.T @ root.W
        return (
            factor.half_log_det(),
            factor.solve(jnp.asarray(r)),
            inverse.variance(),
            inverse.precision(),
            R,
        )

    half, solved, variance, precision, R = asked(
        jnp.asarray(K), form(jnp.zeros(N), jnp.asarray(nat2)), ask
    )
    T = np.diag(nat2)
    dense = T @ np.linalg.inv(np.eye(N) + K @ T)  # (K + T^-1)^-1
    np.testing.assert_allclose(half, 0.5 * np.linalg.slogdet(np.eye(N) + K @ T)[1], rtol=1e-10)
    np.testing.assert_allclose(solved, np.linalg.solve(np.eye(N) + T @ K, r), atol=1e-9)
    np.testing.assert_allclose(variance, np.diag(np.linalg.inv(np.linalg.inv(K) + T)), rtol=1e-9)
    np.testing.assert_allclose(precision, dense, atol=1e-9)
    np.testing.assert_allclose(R, dense, atol=1e-9)


def test_the_signs_of_a_log_concave_likelihood_are_known_and_of_no_other():
    assert isinstance(
        first_sites(pg.EP(), pg.read(poisson, X, y=COUNTS, hyper={"variance": 1.0})), Positive
    )
    assert (
        type(first_sites(pg.EP(), pg.read(robust, X, y=COUNTS * 1.0, hyper={}))) is PseudoLikelihood
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", [pg.Laplace(), pg.EP(), pg.VI()], ids=lambda m: type(m).__name__)
def test_known_signs_change_no_answer(method):
    @jax.jit
    def solved(init):
        def evidence(variance, X):
            factors = pg.read(poisson, X, y=COUNTS, hyper={"variance": variance})
            return pg.log_evidence(method, factors, init)

        both = jax.value_and_grad(evidence, argnums=(0, 1), has_aux=True)  # X moves all of K
        (value, solution), slopes = both(2.0, jnp.asarray(X))
        return value, *slopes, solution.sites.nat1, solution.sites.nat2, solution.code

    plain, known = solved(flat(jnp.zeros(N))), solved(flat(jnp.zeros(N), Positive))
    assert plain[-1] == known[-1] == Result.converged.code
    for a, b in zip(plain, known, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8)


class Picky(pg.Laplace):
    """Fails where it is told the signs."""

    def solve(self, K, mean, log_lik, init=None):
        """Laplace's, called a failure for sites that are known to be positive."""
        solution = super().solve(K, mean, log_lik, init)
        return (
            solution._replace(code=jnp.int32(Result.nonfinite.code))
            if isinstance(init, Positive)
            else solution
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "hyper",
    [pg.MAP(), pg.MAP(restarts=2), pg.Fixed({"variance": 2.0})],
    ids=["map", "restarts", "fixed"],
)
def test_what_fails_without_the_general_form_is_tried_with_it(hyper):
    picky, laplace = (
        pg.fit(poisson, method(hyper=hyper), 0, X, y=COUNTS) for method in (Picky, pg.Laplace)
    )
    assert picky.result == laplace.result == Result.converged
    np.testing.assert_allclose(picky.log_evidence, laplace.log_evidence, rtol=1e-9)
    np.testing.assert_allclose(picky.hyper["variance"], laplace.hyper["variance"], rtol=1e-6)
