"""Weighted draws: a draw of weight k / n is k of n equal draws, in everything that is asked of a
fit.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_fits
from small_fits import HYPER, classifier, made_fit

import ppl_gp as pg
from ppl_gp.draws import Draws, Moments, mixture
from ppl_gp.results.datatree import training_moments

COPIES = np.array([1, 2, 3])
X, Y, X_NEW = small_fits.classification()


def stacked(fits):
    """Fits of one setting of the hyperparameters as the draws of one fit, each as often as `COPIES`
    says.
    """
    return jax.tree.map(lambda *x: jnp.concatenate(x), *(fit.draws for fit in fits))


@pytest.fixture(scope="module")
def settings():
    """Three pseudo-likelihoods at three settings of the hyperparameters."""
    return [
        made_fit(classifier, {k: s * v for k, v in HYPER.items()}, X, y=Y, seed=i)
        for i, s in enumerate((0.7, 1.0, 1.6))
    ]


def weighted_and_copied(fit, draws):
    weighted = Draws(draws.hyper, draws.latents, draws.kept, jnp.log(COPIES / COPIES.sum()))
    repeated = draws.at(np.repeat(np.arange(3), COPIES))
    copied = Draws.equal(repeated.hyper, repeated.kept)
    return [dataclasses.replace(fit, draws=d, sampled=True) for d in (weighted, copied)]


@pytest.fixture(scope="module", params=["pseudo", "draws"])
def pair(request, settings):
    """(a weighted fit, the same with copies of its draws)."""
    fit = (
        settings[0]
        if request.param == "pseudo"
        else made_fit(classifier, HYPER, X, y=Y, num_draws=3)
    )
    return weighted_and_copied(fit, stacked(settings) if request.param == "pseudo" else fit.draws)


@pytest.mark.slow
def test_predictions_are_those_of_copies(pair):
    ours, theirs = (fit.predict(X_NEW) for fit in pair)
    for name in ("f_mean", "f_variance", "mean", "variance", "probs"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-10)
    scores = [fit.log_density(X_NEW, np.ones(len(X_NEW), int)) for fit in pair]
    np.testing.assert_allclose(*scores, rtol=1e-10)


@pytest.mark.slow
def test_the_posterior_process_is_that_of_copies(pair):
    at = np.linspace(-1.0, 1.0, len(X_NEW))
    np.testing.assert_allclose(*(fit.posterior(X_NEW).log_prob(at) for fit in pair), rtol=1e-10)
    np.testing.assert_allclose(
        *(fit.posterior(X_NEW, joint=True).log_prob(at) for fit in pair), rtol=1e-9
    )


def test_moments_at_the_training_inputs_are_those_of_copies(pair):
    ours, theirs = (training_moments(fit)["f"] for fit in pair)
    np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-10)
    np.testing.assert_allclose(ours.variance, theirs.variance, rtol=1e-10)


def test_draws_are_in_proportion_to_the_weights():
    fit = made_fit(classifier, HYPER, X, y=Y, num_draws=3)
    f = np.asarray(fit.latent["f"].mean)
    weighted, _ = weighted_and_copied(fit, fit.draws)
    # without noise, so f at the training inputs is the draw itself
    drawn = np.asarray(weighted.sample(0, X, 12).f)
    which = np.argmin(np.abs(drawn[:, None] - f).max(-1), 1)
    np.testing.assert_array_equal(np.bincount(which), 2 * COPIES)
    tree = weighted.to_datatree(num_draws=12)
    assert tree["posterior"].sizes["draw"] == 12 and tree["posterior"].sizes["chain"] == 1
    found = np.searchsorted(np.sort(fit.hyper["variance"]), tree["posterior"]["variance"].values[0])
    np.testing.assert_array_equal(
        np.bincount(found)[np.argsort(np.argsort(fit.hyper["variance"]))], 2 * COPIES
    )


def test_leave_one_out_weighs_by_what_each_draw_left_out(settings):
    weighted, _ = weighted_and_copied(settings[0], stacked(settings))
    each = np.stack([fit.loo().elpd_i.values for fit in settings])
    exact = -np.log(np.average(np.exp(-each), axis=0, weights=COPIES))
    np.testing.assert_allclose(weighted.loo().elpd_i.values, exact, rtol=1e-10)


def test_weights_are_kept_in_a_file(settings, tmp_path):
    weighted, copied = weighted_and_copied(settings[0], stacked(settings))
    loaded = pg.load(weighted.save(tmp_path / "weighted.fit"), classifier)
    np.testing.assert_array_equal(loaded.draws.log_weights, weighted.draws.log_weights)
    np.testing.assert_allclose(loaded.predict(X_NEW).probs, copied.predict(X_NEW).probs, rtol=1e-10)


@pytest.mark.one_case
@pytest.mark.parametrize("num", [1, 2, 7, 100, 1000])
def test_resampling_gives_each_draw_its_share(num):
    weights = np.array([0.5, 0.25, 0.2, 0.05])
    draws = Draws({}, {}, {}, jnp.log(weights))
    counts = np.bincount(draws.resampled(num), minlength=4)
    assert counts.sum() == num and np.all(np.abs(counts - num * weights) < 1.0 + 1e-9)
    equal = Draws({}, {}, {}, jnp.full(4, -np.log(4.0)))
    counts = np.bincount(equal.resampled(num), minlength=4)
    assert counts.sum() == num and np.ptp(counts) <= 1


def test_variances_within_and_between_draws_add_up():
    parts = Moments(jnp.array([[0.0, 1.0], [2.0, 1.0]]), jnp.array([[1.0, 1.0], [3.0, 1.0]]))
    even = mixture(lambda m: m, parts)
    np.testing.assert_allclose(even.mean, [1.0, 1.0])
    np.testing.assert_allclose(even.variance, [3.0, 1.0])
    skewed = mixture(lambda m: m, parts, jnp.log(jnp.array([0.75, 0.25])))
    np.testing.assert_allclose(skewed.mean, [0.5, 1.0])
    np.testing.assert_allclose(skewed.variance, [0.75 + 0.75 + 0.75, 1.0])
