"""`Laplace(marginals="simplified")`: means, and the skewness of draws, by third derivatives
at the mode, against quadrature.

The mode is off the mean by a term of first order in 1 / n, n data for each unknown; what is left
after the correction is of second order.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from models.multiclass import multiclass

X = np.array([-1.0, -0.2, 0.4, 1.3])


def counts(x, exposure, y=None):
    """Two coefficients that four rows of counts share."""
    b = numpyro.sample("b", dist.Normal(0.0, 1.5).expand([2]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Poisson(exposure * jnp.exp(b[0] + b[1] * x)), obs=y)


def two_values(x, trials, y=None):
    """f at two places, and several trials at each."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(3.0, 1.0), x))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Binomial(trials, logits=f), obs=y)


def _moments(log_p, centre, reach=14.0):
    """Posterior means of two unknowns on a fine grid about `centre`, log_p: (G, G, 2) -> (G, G)."""
    grid = np.linspace(-reach, reach, 1201)
    z = np.stack(np.meshgrid(*(c + grid for c in centre), indexing="ij"), -1)
    p = np.asarray(log_p(z))
    p = np.exp(p - p.max())
    return np.einsum("ij,ijk->k", p, z) / p.sum()


def _errors(model, mean_of, exact, *args, y):
    """Distance of the two kinds of means from the exact ones; the evidence does not move."""
    fits = [
        pg.fit(model, pg.Laplace(hyper=pg.Fixed(), marginals=kind), 0, *args, y=y)
        for kind in ("gaussian", "simplified")
    ]
    assert fits[0].log_evidence == fits[1].log_evidence
    return [float(np.max(np.abs(mean_of(fit) - exact))) for fit in fits]


def _of_counts(n, rates=(0.5, 1.0, 1.0, 2.0)):
    y = n * np.array(rates)

    def log_p(b):
        eta = b[..., :1] + b[..., 1:] * X
        fit = np.sum(y * eta - n * np.exp(eta), -1)
        return fit - np.sum(b**2, -1) / (2 * 1.5**2)

    exact = _moments(log_p, (0.0, 0.5), 3.0 if n > 4 else 8.0)
    return _errors(
        counts, lambda fit: np.asarray(fit.sites["b"].mean), exact, X, n * np.ones(4), y=y
    )


def _of_trials(x, trials, y):
    K = 3.0 * np.exp(-0.5 * (x[:, None] - x) ** 2) + 3e-9 * np.eye(2)
    P = np.linalg.inv(K)

    def log_p(f):
        fit = np.sum(y * f - trials * np.logaddexp(0.0, f), -1)
        return fit - 0.5 * np.einsum("...i,ij,...j->...", f, P, f)

    def at_data(fit):
        return np.asarray(fit.predict(x, trials).f_mean)

    return _errors(two_values, at_data, _moments(log_p, (0.0, 0.0)), x, trials, y=y)


def test_the_error_of_means_falls_by_two_orders():
    """A fourfold number of data: the mode's error a quarter, the corrected one's a sixteenth."""
    (few, few_left), (many, many_left) = _of_counts(16), _of_counts(64)
    np.testing.assert_allclose(few / many, 4.0, rtol=0.1)
    assert few_left / many_left > 13.0
    assert few_left < 0.05 * few


def test_corrected_means_are_nearer_on_random_problems():
    """Binary and sparse binomial data at two places, under a broad prior."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        x, trials = rng.uniform(-2.0, 2.0, 2), rng.integers(1, 6, 2)
        y = rng.binomial(trials, rng.uniform(0.05, 0.95, 2))
        mode, corrected = _of_trials(x, trials, y)
        ratios.append(corrected / mode)
    assert np.max(ratios) < 1.0
    assert np.median(ratios) < 0.5


def _skewness(p, x):
    """Of weights p (they need not sum to one) at x."""
    p = p / p.sum()
    centred = x - p @ x
    return (p @ centred**3) / (p @ centred**2) ** 1.5


def _on_grid(log_p, reach=6.0, num=601):
    z = np.stack(np.meshgrid(*(np.linspace(-reach, reach, num),) * 2, indexing="ij"), -1)
    p = np.asarray(log_p(z))
    return np.exp(p - p.max()).ravel(), z.reshape(-1, 2)


def _agrees(drawn, p, x, skewed=True):
    """Skewness and quantiles of draws and of weights p at x; how skewed the posterior is."""
    exact = _skewness(p, x)
    found = _skewness(np.ones(len(drawn)), drawn)
    np.testing.assert_allclose(found, exact if skewed else 0.0, atol=0.04)
    order, levels = np.argsort(x), (0.025, 0.5, 0.975)
    want = x[order][np.searchsorted(np.cumsum(p[order]) / p.sum(), levels)]
    errors = np.abs(np.quantile(drawn, levels) - want) / np.std(drawn)
    assert np.max(errors) < 0.12 if skewed else np.max(errors) > 0.3
    return exact


def test_draws_of_effects_are_as_skewed_as_the_posterior():
    """Two coefficients that four rows share, integrated as unknowns."""
    y, n, spread = np.array([1.0, 1.0, 2.0, 5.0]), 4.0, 1.5

    def log_p(b):
        eta = b[..., :1] + b[..., 1:] * X
        return np.sum(y * eta - n * np.exp(eta), -1) - np.sum(b**2, -1) / (2 * spread**2)

    p, b = _on_grid(log_p)
    for skewed, kind in enumerate(("gaussian", "simplified")):
        fit = pg.fit(counts, pg.Laplace(marginals=kind), 0, X, np.full(4, n), y=y)
        drawn = fit.to_datatree(num_draws=400_000)["posterior"]["b"].values[0]
        assert _agrees(drawn[:, 0], p, b[:, 0], skewed) < -0.3
        table = fit.summary()
        ends = np.quantile(drawn, (0.05, 0.95), axis=0).T
        np.testing.assert_allclose(table[["5 %", "95 %"]], ends, atol=0.015)
        np.testing.assert_allclose(drawn.mean(0), table["mean"], atol=0.01)


def test_draws_of_a_function_are_as_skewed_as_the_posterior(tmp_path):
    """f at two places, from its covariance; from the saved fit as well."""
    x, trials, y = np.array([0.0, 0.5]), 20, np.array([0, 1])
    P = np.linalg.inv(3.0 * np.exp(-0.5 * (x[:, None] - x) ** 2) + 3e-9 * np.eye(2))

    def log_p(f):
        prior = 0.5 * np.einsum("...i,ij,...j->...", f, P, f)
        return np.sum(y * f - trials * np.logaddexp(0.0, f), -1) - prior

    p, f = _on_grid(log_p, 10.0, 1601)
    method = pg.Laplace(marginals="simplified")
    fit = pg.fit(two_values, method, 0, x, np.full(2, trials), y=y)
    again = pg.load(fit.save(tmp_path / "a.fit"), two_values)
    for one in (fit, again):
        drawn = one.to_datatree(num_draws=100_000)["posterior"]["f"].values[0]
        assert max(_agrees(drawn[:, i], p, f[:, i]) for i in range(2)) < -0.35


def test_the_summary_of_a_mixture_has_its_quantiles():
    """They were those of 4000 draws, .08 sd off; the skewed ones agree with the tree's draws."""

    def groups(index, y=None):
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        with numpyro.plate("groups", 3):
            u = numpyro.sample("u", dist.Normal(0.0, spread))
        with numpyro.plate("data", index.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=u[index] - 0.5), obs=y)

    index, y = np.arange(18) % 3, np.random.default_rng(1).binomial(1, 0.3, 18)
    for kind in ("gaussian", "simplified"):
        fit = pg.fit(groups, pg.Laplace(hyper=pg.Grid(), marginals=kind), 0, index, y=y)
        ends = fit.summary().loc[["u[0]", "u[1]", "u[2]"], ["5 %", "95 %"]].to_numpy(float)
        drawn = fit.to_datatree(num_draws=100_000)["posterior"]["u"].values[0]
        errors = (ends - np.quantile(drawn, (0.05, 0.95), axis=0).T) / drawn.std(0)[:, None]
        assert np.max(np.abs(errors)) < 0.04
        if kind == "gaussian":
            for at, level in zip(ends.T, (0.05, 0.95), strict=True):
                np.testing.assert_allclose(fit.sites["u"].cdf(at), level, rtol=1e-10)


@pytest.mark.slow
def test_classes_by_softmax_are_corrected_as_one_function_is():
    """Two classes whose functions have variance v are one logit of variance 2 v, means included."""
    rng = np.random.default_rng(1)
    x, y = rng.uniform(-2.0, 2.0, (12, 1)), rng.integers(0, 2, 12)

    def mean(model, variance, kind):
        at = pg.Fixed({"variance": variance, "lengthscale": [0.8]})
        fit = pg.fit(model, pg.Laplace(hyper=at, marginals=kind), 0, x, y=y)
        return np.asarray(fit.predict(x).f_mean)

    def logit(x, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal().expand([1]).to_event(1))
        variance = numpyro.sample("variance", dist.LogNormal())
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), x))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    for kind in ("gaussian", "simplified"):
        f = mean(partial(multiclass, num_classes=2), 2.0, kind)
        np.testing.assert_allclose(f[1] - f[0], mean(logit, 4.0, kind), atol=1e-7)
    assert np.max(np.abs(f[1] - f[0] - mean(logit, 4.0, "gaussian"))) > 0.1


def test_what_cannot_be_corrected_is_refused():
    """Another word, and a model whose latents enter no linear predictor."""
    with pytest.raises(pg.DataError, match="simplified"):
        pg.Laplace(marginals="skewed")

    def bent(y=None):
        numpyro.sample(
            "y", dist.Normal(numpyro.sample("a", dist.Normal(0.0, 1.0)) ** 2, 1.0), obs=y
        )

    with pytest.raises(pg.ModelError, match="marginals"):
        pg.fit(bent, pg.Laplace(marginals="simplified"), 0, y=0.3)
