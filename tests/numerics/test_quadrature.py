"""One-dimensional quadrature and tilted moments against closed forms and brute force, from sharp to
very broad.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from ppl_gp.draws import Moments
from ppl_gp.local.tilted import Cavity, tilted_gaussian, tilted_probit, tilted_quadrature
from ppl_gp.numerics.modes import derivatives, tilted_mode
from ppl_gp.numerics.quadrature import likelihood_nodes, log_ndtr
from ppl_gp.results.integrals import cubature

MEANS = np.repeat([-100.0, -4.0, 0.0, 0.7, 12.0], 4)
VARIANCES = np.tile([1e-4, 0.5, 9.0, 900.0], 5)
MEAN, VARIANCE = jnp.asarray(MEANS), jnp.asarray(VARIANCES)
SIGN = jnp.where(jnp.arange(20) % 3 == 0, -1.0, 1.0)


def _check(moments, log_z, mean, variance, tol):
    np.testing.assert_allclose(moments.log_z, log_z, rtol=tol, atol=tol)
    np.testing.assert_allclose((moments.mean - mean) / np.sqrt(VARIANCES), 0.0, atol=tol)
    np.testing.assert_allclose(moments.variance / variance, 1.0, atol=tol)


# The hardest cell (a probit edge 3.3 standard deviations of 30 away) is good to 9e-8 with the
# methods' own 96 nodes and
# converges geometrically: 2e-9 with 128.
@pytest.mark.slow
@pytest.mark.parametrize("num, tol", [(96, 1e-7), (128, 1e-8)])
def test_probit_closed_form_is_quadrature(num, tol):
    closed = tilted_probit(MEAN, VARIANCE, jnp.full(20, 1.3), jnp.full(20, -0.4), SIGN)
    moments = tilted_quadrature(lambda f: log_ndtr(SIGN * (1.3 * f - 0.4)), MEAN, VARIANCE, num=num)
    _check(moments, closed.log_z, closed.mean, closed.variance, tol)


def test_gaussian_closed_form_is_quadrature():
    y, scale = jnp.linspace(-3.0, 3.0, 20), jnp.full(20, 0.6)
    closed = tilted_gaussian(MEAN, VARIANCE, jnp.full(20, 1.3), jnp.full(20, -0.4), y, scale)
    moments = tilted_quadrature(
        lambda f: dist.Normal(1.3 * f - 0.4, scale).log_prob(y), MEAN, VARIANCE, num=96
    )
    _check(moments, closed.log_z, closed.mean, closed.variance, 1e-8)


LIKELIHOODS = {
    "logit": lambda f: dist.Bernoulli(logits=f).log_prob(jnp.where(SIGN > 0, 1, 0)),
    "poisson": lambda f: dist.Poisson(jnp.exp(f)).log_prob(3),
    "student_t": lambda f: dist.StudentT(3.0, f, 0.2).log_prob(1.0),
    "flat": lambda f: jnp.zeros_like(f),
}


def _brute_force(log_lik, n):
    """log normaliser, mean and variance of one tilted distribution by the trapezoidal rule on 100
    001 points.
    """
    m, sd = MEANS[n], np.sqrt(VARIANCES[n])
    f = m + sd * np.linspace(-14, 14, 100_001)
    log_p = (
        jax.vmap(lambda x: log_lik(jnp.full(20, x))[n])(jnp.asarray(f)) - 0.5 * ((f - m) / sd) ** 2
    )
    p = np.exp(log_p - log_p.max())
    mean = (p @ f) / p.sum()
    step = f[1] - f[0]
    log_z = log_p.max() + np.log(p.sum() * step) - np.log(sd * np.sqrt(2 * np.pi))
    return log_z, mean, p @ (f - mean) ** 2 / p.sum()


@pytest.mark.one_case
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_quadrature_is_brute_force(name):
    log_lik = LIKELIHOODS[name]
    moments = tilted_quadrature(log_lik, MEAN, VARIANCE, num=96)
    # The broadest tilted Poisson distributions are far from Gaussian: their moments are good to
    # fewer digits.
    tol = 1e-5 if name in ("poisson", "student_t") else 1e-7
    for n in range(0, 20, 3):
        log_z, mean, variance = _brute_force(log_lik, n)
        np.testing.assert_allclose(moments.log_z[n], log_z, rtol=tol, atol=tol)
        np.testing.assert_allclose((moments.mean[n] - mean) / np.sqrt(VARIANCES[n]), 0.0, atol=tol)
        np.testing.assert_allclose(moments.variance[n] / variance, 1.0, atol=10 * tol)


def test_weights_of_the_nodes_integrate_the_gaussian():
    f, log_w = likelihood_nodes(LIKELIHOODS["logit"], MEAN, VARIANCE, num=96)
    w = np.exp(log_w)
    np.testing.assert_allclose(w.sum(0), 1.0, rtol=1e-8)
    np.testing.assert_allclose((w * f).sum(0), MEANS, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose((w * (f - MEAN) ** 2).sum(0), VARIANCES, rtol=1e-7)


def test_tilted_mode_is_stationary():
    mode, scale = tilted_mode(LIKELIHOODS["logit"], MEAN, VARIANCE, MEAN)
    slope = jax.grad(lambda f: jnp.sum(LIKELIHOODS["logit"](f)))(mode) - (mode - MEAN) / VARIANCE
    assert np.max(np.abs(slope * scale)) < 1e-2  # it only has to say where to be dense
    assert bool(jnp.all(scale <= jnp.sqrt(VARIANCE) * (1 + 1e-12)))


def test_derivatives_are_right_where_numpyro_has_a_kink():
    # NumPyro writes log sigma with |f| and max(f, 0), whose derivatives JAX gets wrong at exactly
    # zero.
    for log_lik, y, total in (
        (lambda f: dist.Bernoulli(logits=f).log_prob(jnp.array([0, 1])), np.array([0, 1]), 1),
        (lambda f: dist.Binomial(5, logits=f).log_prob(jnp.array([2, 4])), np.array([2, 4]), 5),
    ):
        gradient, curvature = derivatives(log_lik, jnp.zeros(2))
        np.testing.assert_allclose(gradient, y - total / 2, atol=1e-12)
        np.testing.assert_allclose(curvature, -total / 4, atol=1e-12)


def test_derivatives_are_of_what_counts_only():
    def log_lik(f):  # a model that draws what it would observe; jax.hessian fails in JAX 0.9
        dist.Poisson(jnp.exp(f)).sample(jax.random.key(0))
        return dist.Poisson(jnp.exp(f)).log_prob(3.0)

    f = jnp.array([0.2, 1.5])
    gradient, hessian = derivatives(log_lik, f)
    np.testing.assert_allclose(gradient, 3.0 - jnp.exp(f), rtol=1e-12)
    np.testing.assert_allclose(hessian, -jnp.exp(f), rtol=1e-12)


def test_moments_of_one_row_do_not_depend_on_its_companions():
    """Nodes that several centres share are found by iteration, which must leave alone what it has
    found.
    """
    rng = np.random.default_rng(0)
    mean, variance = (
        jnp.asarray(0.5 * rng.normal(size=200)),
        jnp.asarray(10 ** rng.uniform(-2.0, 0.0, 200)),
    )

    def moments(row):
        f = Moments(*(x[None, None] for x in row))
        given = lambda f: (f[0], jnp.full_like(f[0], 0.16))  # noqa: E731
        return cubature.moments(given, f, cubature.Effort(384, False, 0))

    each = jax.jit(lambda rows: jax.lax.map(moments, rows))((mean, variance))
    np.testing.assert_allclose(each.mean[:, 0], mean, atol=1e-10)
    np.testing.assert_allclose(each.variance[:, 0], variance + 0.16, rtol=1e-9)


@pytest.mark.parametrize("num", [2, 3, 4, 5])
def test_the_fewest_nodes_are_judged_at_a_kink(num):
    """They are too few to go from break to break, and their error is estimated as no less than it
    is: log E[N(1; |f|, 1)] by 4001 equally spaced nodes.
    """
    kinked = lambda f: -0.5 * (1.0 - jnp.abs(f)) ** 2  # noqa: E731
    mean, variance = jnp.array([0.3, -2.0]), jnp.array([1.0, 4.0])
    found = tilted_quadrature(kinked, mean, variance, num=num, split=True)
    z = np.linspace(-10.0, 10.0, 4001)[:, None]
    exact = np.log(np.mean(np.exp(kinked(mean + np.sqrt(variance) * z) - 0.5 * z**2), 0) * 20.0)
    off = np.abs(found.log_z - exact + 0.5 * np.log(2.0 * np.pi))
    error = found.error(kinked, Cavity(1.0 / variance, mean, jnp.ones(2, bool)))
    assert np.all(off <= error) and np.all(np.isfinite(error))
