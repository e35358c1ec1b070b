"""Probit and ordinal probit against SciPy and their definitions, in the tails above all, and inside
NumPyro models.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.infer.util import log_density
from scipy import special, stats

from ppl_gp.errors import DataError
from ppl_gp.numerics.quadrature import inverse_mills, log_ndtr
from ppl_gp.observations import BernoulliProbit, OrdinalProbit

CUTPOINTS = jnp.array([-1.0, 0.2, 1.5])
# h = N(x; 0, 1) / Phi(x) and -h (x + h) at x = -40 and -8, computed with mpmath 1.4 in 60-digit
# arithmetic.
REFERENCE = {
    "first": [40.0249688472072637, 8.12136811223611268],
    "second": [-0.99937733162140861, -0.98567511655665908],
}


def value_and_two_derivatives(function, x):
    """Of an elementwise function, (3, N), compiled once."""

    def one(x):
        first = jax.grad(function)
        return jnp.stack([function(x), first(x), jax.grad(first)(x)])

    return np.asarray(jax.jit(jax.vmap(one, out_axes=1))(x))


def test_log_ndtr_has_full_relative_precision_up_to_the_second_derivative():
    x = np.array([-1e3, -40.0, -20.0, -20.001, -5.001, -4.999, -1.0, 0.0, 1.0, 5.0, 7.76, 15.0])
    value, first, second = value_and_two_derivatives(log_ndtr, x)
    # Reference: erfcx for x < 0 (SciPy's, another implementation), the upper tail's probability for
    # x > 0.
    tail = special.erfcx(-x / np.sqrt(2))
    with np.errstate(over="ignore", divide="ignore"):
        log_p = np.where(x < 0, np.log(tail / 2) - x**2 / 2, np.log1p(-stats.norm.sf(x)))
    h = np.sqrt(2 / np.pi) / tail
    np.testing.assert_allclose(value, log_p, rtol=1e-13)
    np.testing.assert_allclose(first, h, rtol=1e-13)
    # The reference's own x + h cancels far below zero, hence its tolerance there ...
    assert np.all(np.abs(second / (-h * (x + h)) - 1) < 1e-13 + 1e-15 * x**2)
    # ... and the high-precision values at -40, and at -8.
    second = value_and_two_derivatives(log_ndtr, np.array([-40.0, -8.0]))[1:]
    np.testing.assert_allclose(second, [REFERENCE["first"], REFERENCE["second"]], rtol=1e-13)


def test_log_ndtr_extremes():
    x = jnp.array([-1e100, -jnp.inf, jnp.inf, 1e100])
    np.testing.assert_array_equal(log_ndtr(x), [-5e199, -jnp.inf, 0.0, 0.0])
    assert jnp.isnan(log_ndtr(jnp.nan))
    np.testing.assert_allclose(inverse_mills(jnp.array([-1e10, 60.0])), [1e10, 0.0])


@pytest.mark.parametrize("y", [0, 1])
def test_probit_is_finite_and_right_far_from_the_data(y):
    f = np.array([-40.0, -3.0, 0.0, 3.0, 40.0])
    sign = 2 * y - 1
    value, slope, curvature = value_and_two_derivatives(lambda f: BernoulliProbit(f).log_prob(y), f)
    np.testing.assert_allclose(value, stats.norm.logcdf(sign * f), rtol=1e-12, atol=1e-300)
    assert np.all(np.isfinite(slope)) and np.all(np.sign(slope) * sign >= 0)
    assert np.all((-1.0 <= curvature) & (curvature <= 0.0))
    # At the wrong end log p is nearly -f^2 / 2: slope about |f|, curvature about -1.
    wrong = 0 if y else 4
    expected = [sign * REFERENCE["first"][0], REFERENCE["second"][0]]
    np.testing.assert_allclose([slope[wrong], curvature[wrong]], expected, rtol=1e-13)


def test_probit_moments_support_and_samples():
    f = jnp.array([-1.0, 0.0, 2.0])
    site = BernoulliProbit(f)
    p = stats.norm.cdf(np.asarray(f))
    np.testing.assert_allclose(site.mean, p, rtol=1e-14)
    np.testing.assert_allclose(site.variance, p * (1 - p), rtol=1e-14)
    np.testing.assert_array_equal(site.enumerate_support(), [[0, 0, 0], [1, 1, 1]])
    assert site.enumerate_support(expand=False).shape == (2, 1)
    draws = site.sample(random.key(0), (40_000,))
    assert draws.shape == (40_000, 3) and jnp.issubdtype(draws.dtype, jnp.integer)
    # 5 standard errors of a proportion.
    assert np.all(np.abs(np.mean(draws, 0) - p) < 5 * np.sqrt(p * (1 - p) / 40_000))


def ordinal_definition(k, f, cutpoints):
    edges = np.concatenate([[-np.inf], np.asarray(cutpoints), [np.inf]])
    return stats.norm.cdf(edges[k + 1] - f) - stats.norm.cdf(edges[k] - f)


@pytest.mark.slow
def test_ordinal_is_its_definition_and_sums_to_one():
    f = np.array([-1.5, 0.1, 2.0])
    site = OrdinalProbit(f, CUTPOINTS)
    p = np.exp(site.log_prob(jnp.arange(4)[:, None]))
    expected = [ordinal_definition(k, f, CUTPOINTS) for k in range(4)]
    np.testing.assert_allclose(p, expected, rtol=1e-12)
    np.testing.assert_allclose(p.sum(0), 1.0, rtol=1e-14)
    mean = (np.arange(4)[:, None] * expected).sum(0)
    np.testing.assert_allclose(site.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(
        site.variance, (np.arange(4)[:, None] ** 2 * expected).sum(0) - mean**2, rtol=1e-11
    )


@pytest.mark.slow
def test_ordinal_tails_mirror_and_stay_finite():
    @jax.jit
    @jax.vmap
    def derivatives(f, y):
        def log_p(f, shift):
            return OrdinalProbit(f, CUTPOINTS + shift).log_prob(y)

        slope = jax.grad(log_p)
        return log_p(f, 0.0), slope(f, 0.0), jax.grad(slope)(f, 0.0), jax.grad(log_p, 1)(f, 0.0)

    y = jnp.arange(4)
    value, slope, curvature, shift = derivatives(jnp.full(4, -60.0), y)
    assert jnp.all(jnp.isfinite(slope)) and jnp.all((-1.0 <= curvature) & (curvature <= 0.0))
    # Shifting f and all cutpoints together changes nothing.
    np.testing.assert_allclose(slope, -shift, atol=1e-10)
    # Turning the axis round turns the classes round.
    mirrored = OrdinalProbit(60.0, -CUTPOINTS[::-1]).log_prob(3 - y)
    np.testing.assert_allclose(value, mirrored, rtol=1e-14)
    # The middle of a class 1e-6 wide holds its density times its width.
    narrow = OrdinalProbit(0.3, jnp.array([0.25, 0.25 + 1e-6])).log_prob(1)
    np.testing.assert_allclose(
        narrow, stats.norm.logpdf(0.25 + 5e-7 - 0.3) + np.log(1e-6), rtol=1e-10
    )


def test_ordinal_with_two_classes_is_probit():
    f, y = jnp.array([-30.0, -0.4, 1.0, 30.0]), jnp.array([1, 0, 1, 0])
    ordinal = OrdinalProbit(f, jnp.zeros(1)).log_prob(y)
    np.testing.assert_allclose(ordinal, BernoulliProbit(f).log_prob(y), rtol=1e-14)


def test_ordinal_batches_samples_and_support():
    f = jnp.zeros((5, 1))
    site = OrdinalProbit(f, jnp.stack([CUTPOINTS, CUTPOINTS + 1.0]))
    assert site.batch_shape == (5, 2)
    assert site.enumerate_support().shape == (4, 5, 2)
    draws = site.sample(random.key(1), (20_000,))
    assert draws.shape == (20_000, 5, 2) and draws.min() == 0 and draws.max() == 3
    error = 5 * np.sqrt(np.asarray(site.variance) / 20_000)
    assert np.all(np.abs(np.mean(draws, 0) - site.mean) < error)
    assert site.support(3) and not site.support(4)
    with pytest.raises(DataError, match="cutpoints"):
        OrdinalProbit(f, 1.0)


@pytest.mark.parametrize(
    "make", [BernoulliProbit, lambda f: OrdinalProbit(f, CUTPOINTS)], ids=["probit", "ordinal"]
)
def test_lives_in_numpyro_models_under_jit_and_vmap(make):
    f = jnp.linspace(-2.0, 2.0, 6)

    def model(y=None):
        with numpyro.plate("data", 6):
            numpyro.sample("y", make(f), obs=y)

    drawn = Predictive(model, num_samples=3)(random.key(2))["y"]
    assert drawn.shape == (3, 6)
    total = log_density(model, (), {"y": drawn[0]}, {})[0]
    np.testing.assert_allclose(total, make(f).log_prob(drawn[0]).sum(), rtol=1e-13)
    # A distribution is a pytree: it crosses jit and vmap as an argument and as a result.
    site = jax.jit(jax.vmap(make))(f)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(lambda d, y: d.log_prob(y)))(site, drawn[0]).sum(), total, rtol=1e-13
    )
    with handlers.mask(mask=False):
        assert log_density(model, (), {"y": drawn[0]}, {})[0] == 0.0
