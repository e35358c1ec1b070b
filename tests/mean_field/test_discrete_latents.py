"""Log densities of new rows with discrete latents of their own: summed, not drawn."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.special import logsumexp

import ppl_gp as pg
from models.mixture import mixture

rng = np.random.default_rng(0)
N = 40
X = rng.uniform(-1.0, 1.0, (N, 1))
SIDE = rng.integers(0, 2, N)
Y = np.where(SIDE, 2.0, -1.0) * X[:, 0] + 0.2 * rng.normal(size=N)
NEW, AT = rng.uniform(-1.0, 1.0, (6, 1)), np.linspace(-2.0, 2.0, 6)
POINTS = np.concatenate(
    [0.4 * rng.normal(size=(20, 2)) + 1.0, 0.4 * rng.normal(size=(20, 2)) - 1.0]
)


def two_lines(X, y=None):
    """Each datum is of one of two lines; slopes and noise are apart in q, and meet in y."""
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    tau = numpyro.sample("tau", dist.Gamma(20.0, 2.0))
    with numpyro.plate("lines", 2):
        slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", X.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(share))
        numpyro.sample("y", dist.Normal(slope[z] * X[:, 0], 1.0 / jnp.sqrt(tau)), obs=y)


@pytest.fixture(scope="module")
def fits():
    return {
        "lines": pg.fit(two_lines, pg.MeanField(), 0, X, y=Y),
        "points": pg.fit(mixture, pg.MeanField(), 0, POINTS, num_components=2),
    }


@pytest.mark.slow
def test_labels_are_summed_at_every_draw(fits):
    fit = fits["lines"]
    share, slope, tau = (np.asarray(fit.hyper[k]) for k in ("share", "slope", "tau"))
    log_share = np.log(np.stack([1.0 - share, share], 1))[:, None]
    noise = 1.0 / np.sqrt(tau)[:, None, None]
    terms = stats.norm.logpdf(AT[None, :, None], slope[:, None] * NEW[None], noise)
    by_hand = logsumexp(log_share + terms, axis=(0, 2)) - np.log(len(share))
    np.testing.assert_allclose(fit.log_density(NEW, AT), by_hand, atol=1e-10)
    one_by_one = [fit.log_density(NEW[i : i + 1], AT[i : i + 1])[0] for i in range(6)]
    np.testing.assert_allclose(fit.log_density(NEW, AT), one_by_one, atol=1e-10)


@pytest.mark.slow
def test_error_is_that_of_the_draws_of_q(fits):
    """Against the integral over q: beta shares, Gaussian slopes, a sum over gamma precisions."""
    fit = fits["lines"]
    found, error = fit.log_density(NEW, AT, with_error=True)
    q = fit.sites
    share = np.array([1.0 - q["share"].mean, q["share"].mean])
    a, b = float(q["tau"].concentration), float(q["tau"].rate)
    tau = stats.gamma(a, scale=1.0 / b).ppf((np.arange(2000) + 0.5) / 2000)[:, None, None]
    scale = np.sqrt(1.0 / tau + (NEW * np.asarray(q["slope"].scale)) ** 2)
    terms = stats.norm.logpdf(AT[:, None], np.asarray(q["slope"].loc) * NEW, scale)
    exact = logsumexp(np.log(share) + terms, axis=(0, 2)) - np.log(2000)
    np.testing.assert_array_less(np.abs(found - exact), 5.0 * error + 1e-6)
    assert np.all(error < 0.2)


@pytest.mark.slow
def test_a_mixture_scores_points_without_y(fits):
    """A Student-t mixture (Bishop 2006, eq. 10.81), integrated over q without draws."""
    fit = fits["points"]
    found, error = fit.log_density(POINTS[:7], with_error=True)
    weights, t = fit.sites["weights"], fit.sites["mean"]
    precision = fit.sites["precision"]
    # x | k is Student-t with the marginal of the mean widened by one more observation; NumPyro's
    # `covariance_matrix` is that of the scale
    nu = np.asarray(precision.concentration) + 1 - 2
    scatter = np.linalg.inv(np.asarray(precision.scale_matrix))
    count = np.array(
        [
            np.trace(s) / np.trace(np.asarray(t.covariance_matrix)[k] * nu[k])
            for k, s in enumerate(scatter)
        ]
    )
    terms = np.stack(
        [
            stats.multivariate_t(
                np.asarray(t.mean)[k], scatter[k] * (count[k] + 1) / (count[k] * nu[k]), nu[k]
            ).logpdf(POINTS[:7])
            for k in range(2)
        ],
        1,
    )
    exact = logsumexp(np.log(np.asarray(weights.mean)) + terms, axis=1)
    np.testing.assert_allclose(found, exact, atol=1e-8)
    assert np.all(np.asarray(error) == 0.0)


@pytest.mark.slow
def test_y_is_asked_for_where_the_fit_had_it(fits):
    with pytest.raises(pg.DataError, match="needs y_new"):
        fits["lines"].log_density(NEW)


def shifted(X, y=None):
    """A datum sees its neighbour's label."""
    with numpyro.plate("lines", 2):
        slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", X.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(0.4))
        numpyro.sample("y", dist.Normal(slope[jnp.roll(z, 1)] * X[:, 0], 0.3), obs=y)


def test_labels_of_other_rows_are_not_taken_for_a_rows_own():
    try:
        fit = pg.fit(shifted, pg.MeanField(), 0, X, y=Y)
        found = fit.log_density(NEW, AT)
    except pg.ModelError:
        return  # refused
    slope = np.asarray(fit.hyper["slope"])
    terms = stats.norm.logpdf(AT[None, :, None], slope[:, None] * NEW[None], 0.3)
    by_hand = logsumexp(np.log([0.6, 0.4]) + terms, axis=(0, 2)) - np.log(len(slope))
    np.testing.assert_allclose(found, by_hand, atol=0.3)
