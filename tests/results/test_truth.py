"""Importance-sampled log evidence: against independent numbers, exact cases, direct quadrature, and
its own refusals.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from data_sets import BINARY, reference
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm, poisson, t
from small_fits import classifier

import ppl_gp as pg
from models.regression import regression
from models.robust import student_t
from ppl_gp.results.compare.table import verdict
from ppl_gp.results.compare.truth import importance_sampling, smooth, summarise

ROWS = [row for row in reference("evidence")["binary"] if row["data"] == "wave40"]


def fitted(row, method):
    X, y = BINARY[row["data"]]()
    hyper = {k: row[k] for k in ("lengthscale", "variance")}
    return pg.fit(
        classifier, method(hyper=pg.Fixed(hyper)), 0, X, y=y, link=row["link"], throw=False
    )


@pytest.mark.one_case
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['link']}-{row['variance']:g}")
def test_agrees_with_independent_importance_sampling(row):
    """Within four standard errors of 400 000 draws by other code; the error is small enough to tell
    EP from Laplace.
    """
    for method in (pg.EP, pg.Laplace):
        fit = fitted(row, method)
        truth = importance_sampling(fit, num_samples=20_000)
        want = row["importance_sampling"]
        error = np.hypot(truth.standard_error, want["standard_error"])
        assert truth.reason is None
        assert abs(truth.log_evidence - want["log_evidence"]) < 4 * error
        assert error < 0.06
        assert fit.log_evidence < truth.log_evidence  # both are below the truth on these sets


def test_a_worse_q_is_seen():
    """At the hardest logit cell the local bound's q wastes more draws than EP's, and its k-hat is
    larger.
    """
    row = next(row for row in ROWS if row["link"] == "logit" and row["variance"] == 25.0)
    bound, ep = (importance_sampling(fitted(row, method)) for method in (pg.LocalBound, pg.EP))
    assert bound.efficiency_q < 0.7 * ep.efficiency_q
    assert bound.khat_q > ep.khat_q
    assert abs(bound.log_evidence - ep.log_evidence) < 4 * np.hypot(
        bound.standard_error, ep.standard_error
    )


@pytest.mark.slow
def test_exact_for_a_gaussian_likelihood():
    """q is the posterior: weights from q are equal, k-hat is -inf, every draw counts."""
    X = np.linspace(-1.0, 1.0, 8)[:, None]
    hyper = {"lengthscale": np.array([0.5]), "variance": 1.5, "noise_scale": 0.3}
    fit = pg.fit(regression, pg.EP(hyper=pg.Fixed(hyper)), 0, X, y=np.sin(4 * X[:, 0]))
    truth = importance_sampling(fit, num_samples=4000)
    assert truth.khat_q == -np.inf
    # Without datum n the exact q has weights 1 / p(y_n|f_n), Pareto in the tail with the share of
    # its site as shape.
    latent = fit.latent["f"]
    shape = np.asarray(latent.sites.nat2 * latent.variance)[0]
    np.testing.assert_allclose(truth.khat_loo, shape, atol=0.35)
    np.testing.assert_allclose(truth.efficiency_q, 1.0, rtol=1e-9)
    assert abs(truth.log_evidence - fit.log_evidence) < 4 * truth.standard_error < 0.1


@pytest.mark.slow
def test_negative_precisions():
    """Student-t with an outlier: against a grid over both values of f."""
    X, y = np.array([[0.0], [0.6]]), np.array([0.0, 6.0])
    hyper = {"lengthscale": np.array([1.0]), "variance": 2.0, "noise_scale": 0.5, "df": 3.0}
    fit = pg.fit(student_t, pg.EP(hyper=pg.Fixed(hyper)), 0, X, y=y, throw=False)
    assert np.min(fit.latent["f"].sites.nat2) < 0
    truth = importance_sampling(fit, num_samples=20_000)
    grid = np.linspace(-12.0, 12.0, 801)
    f = np.stack([g.ravel() for g in np.meshgrid(grid, grid, indexing="ij")], 1)
    K = np.asarray(pg.kernels.RBF(2.0, 1.0)(X, X)) + 2e-8 * np.eye(2)
    log_p = multivariate_normal.logpdf(f, np.zeros(2), K) + t.logpdf(y, 3.0, f, 0.5).sum(1)
    want = logsumexp(log_p) + 2 * np.log(grid[1] - grid[0])
    assert abs(truth.log_evidence - want) < 4 * truth.standard_error < 0.15


def test_sampled_hyperparameters_have_no_one_evidence(small_fit):
    truth = importance_sampling(small_fit("nuts"))
    assert truth.log_evidence is None and truth.khat_q is None
    assert "sampled" in truth.reason


def test_refuses_heavy_tails():
    """Weights with Pareto shape 1.2 have no mean: no number is returned, the k-hat says why."""
    log_w = 1.2 * np.random.default_rng(0).exponential(size=20_000)
    truth = summarise(log_w, log_w, np.zeros((20_000, 1)))
    assert truth.log_evidence is None and truth.standard_error is None
    assert abs(truth.khat - 1.2) < 0.15
    assert "1." in truth.reason and "0.7" in truth.reason


def test_smoothing_keeps_the_constant():
    """Light-tailed weights: the estimate is the logarithm of their mean, whatever constant was
    added to their logs.
    """
    rng = np.random.default_rng(1)
    log_w = 0.3 * rng.normal(size=20_000) - 745.0
    truth = summarise(log_w, log_w, np.zeros((20_000, 1)))
    assert (
        abs(truth.log_evidence - (logsumexp(log_w) - np.log(20_000))) < 0.1 * truth.standard_error
    )
    w = np.exp(log_w + 745.0)
    np.testing.assert_allclose(
        truth.standard_error, w.std() / w.mean() / np.sqrt(20_000), rtol=0.02
    )
    # E[w]^2 / E[w^2] of a lognormal
    np.testing.assert_allclose(truth.efficiency_q, np.exp(-0.09), rtol=0.02)


def test_khat_of_known_shape():
    """exp(shape x standard exponential) is Pareto of that shape; one estimate has standard error (1
    + k) / sqrt(600).
    """
    rng = np.random.default_rng(2)
    for shape in (0.3, 0.6, 0.9):
        estimates = [smooth(shape * rng.exponential(size=40_000))[1] for _ in range(30)]
        assert abs(np.mean(estimates) - shape) < 4 * (1 + shape) / np.sqrt(600 * 30)


@pytest.mark.parametrize("num", [1000, 5000, 20_000])
def test_khat_of_nearly_equal_weights_is_small(num):
    """Whatever shape the tail's excess over the bulk has: k-hat rises with the size of the excess,
    to the shape itself where the weights are Pareto throughout.
    """
    rng = np.random.default_rng(3)
    pareto = np.expm1(0.8 * rng.exponential(size=(40, num)))
    khats = [np.mean([smooth(np.log1p(c * w))[1] for w in pareto]) for c in (1e-4, 0.01, 0.1, 1.0)]
    assert khats[0] < 0.05 and np.all(np.diff(khats) > 0.0)
    assert abs(khats[-1] - 0.8) < 0.06


def test_unusable_weights():
    truth = summarise(np.array([0.0, np.nan, 1.0]), np.zeros(3), np.zeros((3, 1)))
    assert truth.log_evidence is None and "not finite" in truth.reason


@pytest.mark.slow
def test_a_mode_that_q_has_no_draw_in_is_found():
    """y = f^2 + noise: each method's q is about one of two modes. Against draws of the prior, which
    meet both.
    """
    X, y = np.linspace(-1.0, 1.0, 8)[:, None], 4.0 + 0.4 * np.sin(np.arange(8.0))

    def square(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.0, 2.0), X, mean=pg.means.Constant(0.2)))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f**2, 0.5), obs=y)

    fit = pg.fit(square, pg.Laplace(), 0, X, y=y, throw=False)
    truth = importance_sampling(fit, num_samples=4000)
    L = np.linalg.cholesky(np.asarray(pg.kernels.RBF(4.0, 2.0)(X, X)) + 4e-8 * np.eye(8))
    f = 0.2 + np.random.default_rng(0).normal(size=(400_000, 8)) @ L.T
    log_p = norm.logpdf(y, f**2, 0.5).sum(1)
    w = np.exp(log_p - log_p.max())
    want, error = logsumexp(log_p) - np.log(len(w)), np.sqrt(np.sum(w**2)) / np.sum(w)
    assert abs(truth.log_evidence - want) < 4 * np.hypot(truth.standard_error, error) < 0.25
    assert truth.other_modes == 1 and truth.share_q < 0.7
    assert abs(fit.log_evidence - np.log(truth.share_q) - truth.log_evidence) < 0.05
    row = {
        "method": "laplace",
        "result": "converged",
        "log_evidence": fit.log_evidence,
        "truth": truth.log_evidence,
        "truth_se": truth.standard_error,
        "khat": truth.khat_q,
        "efficiency": truth.efficiency_q,
        "share": truth.share_q,
        "mean_distance": None,
        "sd_distance": None,
    }
    said = verdict(row, None, None)
    assert "do not use its means" in said and "other modes" in said and "off by a factor" in said


def two_rows(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(X[0, 1], 1.0), X[:, :1], jitter=1e-6))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.mark.slow
def test_the_standard_error_covers_it():
    """100 random problems of two counts, against a grid over both values of f."""
    grid, scores = np.linspace(-7.0, 7.0, 501), []
    nodes = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        variance, gap = 10 ** rng.uniform(-0.5, 1.0), rng.uniform(0.2, 2.0)
        X = np.array([[0.0, variance], [gap, variance]])
        L = np.linalg.cholesky(
            variance * np.exp(-0.5 * (X[:, :1] - X[:, 0]) ** 2) + 1e-6 * np.eye(2)
        )
        f = nodes @ L.T
        y = rng.poisson(np.exp(np.minimum(L @ rng.normal(size=2), 4.0)))
        log_p = norm.logpdf(nodes).sum(-1) + poisson.logpmf(y, np.exp(f)).sum(-1)
        exact = logsumexp(log_p) + 2.0 * np.log(grid[1] - grid[0])
        fit = pg.fit(two_rows, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=y)
        truth = importance_sampling(fit, rng_key=seed, num_samples=2000)
        if truth.reason is None:
            scores.append(abs(truth.log_evidence - exact) / truth.standard_error)
    assert len(scores) >= 90
    assert np.mean(np.less(scores, 2.0)) >= 0.9 and max(scores) < 10.0
