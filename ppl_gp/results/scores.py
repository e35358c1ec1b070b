"""Scores of a prediction against test observations, and distances between posteriors: plain NumPy on arrays."""

from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ppl_gp.results.mixing import Moments

if TYPE_CHECKING:
    from ppl_gp.results.predict import Prediction

NUM_BINS = 10
LEVELS = np.arange(0.05, 1.0, 0.05)  # nominal coverage of central intervals
_WIDTHS = np.array(
    [NormalDist().inv_cdf(0.5 + 0.5 * level) for level in LEVELS]
)  # half of them, in standard deviations


class Score(NamedTuple):
    """A number and what it is."""

    value: float | None
    name: str


def is_classification(prediction: "Prediction") -> bool:
    """Whether y has finitely many outcomes, so that every one has a probability."""
    return prediction.probs is not None and not isinstance(prediction.probs, dict)


def outcome_probabilities(prediction: "Prediction") -> Float[ndarray, "M K"]:
    """p(y = k), for Bernoulli observations too."""
    probs = np.asarray(prediction.probs)
    return np.stack([1.0 - probs, probs], 1) if probs.ndim == 1 else probs


def error(prediction: "Prediction", y) -> Score:
    """Share of misclassified rows where y has finitely many outcomes 0, 1, ..., else the root mean squared error."""
    y = np.asarray(y)
    if is_classification(prediction):
        return Score(float(np.mean(np.argmax(outcome_probabilities(prediction), 1) != y)), "misclassified")
    if prediction.mean is None or isinstance(prediction.mean, dict):
        return Score(None, "RMSE")
    return Score(float(np.sqrt(np.mean((np.asarray(prediction.mean) - y) ** 2))), "RMSE")


def calibration(prediction: "Prediction", y) -> Score:
    """How far stated and observed frequencies are apart; 0 is calibrated, and M rows alone give about 1 / sqrt(M).

    Finitely many outcomes: the expected calibration error over `NUM_BINS` bins of p(y = 1), or of the largest
    probability (Guo et al. 2017). Otherwise: the mean gap between nominal and observed coverage of central intervals,
    from z-scores (y - mean) / sd.
    """
    if is_classification(prediction):
        stated, observed, weight = reliability(prediction, y)
        return Score(float(np.sum(weight * np.abs(stated - observed))), "ECE")
    if prediction.mean is None or isinstance(prediction.mean, dict):
        return Score(None, "coverage gap")
    return Score(float(np.mean(np.abs(coverage(prediction, y) - LEVELS))), "coverage gap")


def reliability(prediction: "Prediction", y):
    """(stated, observed, weight) of the occupied bins: mean probability, observed frequency, share of the rows."""
    probs, y = outcome_probabilities(prediction), np.asarray(y)
    binary = probs.shape[1] == 2
    stated = probs[:, 1] if binary else probs.max(1)
    happened = (y == 1) if binary else (y == probs.argmax(1))
    which = np.minimum((stated * NUM_BINS).astype(int), NUM_BINS - 1)
    count = np.bincount(which, minlength=NUM_BINS)
    used = count > 0
    means = [np.bincount(which, v, NUM_BINS)[used] / count[used] for v in (stated, happened.astype(float))]
    return (*means, count[used] / len(y))


def coverage(prediction: "Prediction", y) -> Float[ndarray, "L"]:
    """Share of y inside the central interval at each of `LEVELS`, by a Gaussian with the predictive mean and
    variance."""
    z = (np.asarray(y) - np.asarray(prediction.mean)) / np.sqrt(np.asarray(prediction.variance))
    return np.mean(np.abs(np.ravel(z))[:, None] <= _WIDTHS, 0)


def latent_moments(f: Moments) -> tuple[ndarray, ndarray]:
    """Posterior mean and standard deviation of f at the training inputs, draws (S, ...) of the hyperparameters mixed."""
    mean, variance = np.asarray(f.mean), np.asarray(f.variance)
    return mean.mean(0), np.sqrt(variance.mean(0) + mean.var(0))


def distance(f: Moments, reference: Moments) -> tuple[float, float]:
    """Largest |difference| of latent means and of standard deviations, in standard deviations of the reference."""
    (mean, sd), (mean_ref, sd_ref) = latent_moments(f), latent_moments(reference)
    return float(np.max(np.abs(mean - mean_ref) / sd_ref)), float(np.max(np.abs(sd - sd_ref) / sd_ref))
