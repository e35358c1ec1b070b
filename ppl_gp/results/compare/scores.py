"""Scores of a prediction against test observations, and distances between posteriors."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ppl_gp.draws import Moments
from ppl_gp.errors import DataError
from ppl_gp.results.fit import Fit
from ppl_gp.results.predict.log_density import Pit, pit
from ppl_gp.results.predict.predict import Prediction

NUM_BINS = 10
LEVELS = np.arange(0.05, 1.0, 0.05)  # nominal coverage of central intervals


class Score(NamedTuple):
    """A number and what it is."""

    value: float | None
    name: str


def is_classification(prediction: Prediction) -> bool:
    """Whether outcomes of y are classes (Bernoulli, Categorical, ordinal). Counts are numbers."""
    probs = prediction.probs
    return probs is not None and not isinstance(probs, dict) and not prediction.counts


def outcome_probabilities(prediction: Prediction) -> Float[ndarray, "... K"]:
    """p(y = k) in the shape of y and K, for Bernoulli observations too."""
    probs = np.asarray(prediction.probs)
    binary = probs.ndim == 1 or probs.shape == np.shape(prediction.mean)
    return np.stack([1.0 - probs, probs], -1) if binary else probs


def judged(fit: Fit, X, y, args: tuple, kwargs: dict) -> tuple[Prediction, Pit | None]:
    """What `calibration` wants: the prediction, and where numbers of one site fall in it."""
    prediction = fit.predict(X, *args, **kwargs)
    if is_classification(prediction) or isinstance(y, dict):
        return prediction, None
    return prediction, pit(fit, X, y, *args, **kwargs)


def error(prediction: Prediction, y) -> Score:
    """Share of misclassified observations of classes 0, 1, ..., else root mean squared error."""
    if is_classification(prediction):
        guess = np.argmax(outcome_probabilities(prediction), -1)
        return Score(float(np.mean(guess != _observed(y, guess.shape))), "misclassified")
    if prediction.mean is None or isinstance(prediction.mean, dict):
        return Score(None, "RMSE")
    mean = np.asarray(prediction.mean)
    return Score(float(np.sqrt(np.mean((mean - _observed(y, mean.shape)) ** 2))), "RMSE")


def _observed(observed: Any, shape: tuple[int, ...]) -> ndarray:
    """y in the shape of its prediction; `DataError` for another, which NumPy would broadcast."""
    y = observed
    if isinstance(observed, dict) and len(observed) == 1:
        (y,) = observed.values()
    if np.shape(y) != shape:
        raise DataError(
            f"y_test has shape {np.shape(y)}, and predictions of it {shape}; give it as the model "
            "observes it."
        )
    return np.asarray(y)


def calibration(prediction: Prediction, y, pit: Pit | None = None) -> Score:
    """How far stated and observed frequencies differ: about 1 / sqrt(M) by chance over M rows.

    Classes: the expected calibration error over `NUM_BINS` bins of p(y = 1), or of the largest
    probability (Guo et al. 2017). Otherwise, where `pit` is known: the mean gap between nominal and
    observed coverage of the predictive distribution's central intervals.
    """
    if is_classification(prediction):
        stated, observed, rows = reliability(prediction, y)
        return Score(float(np.average(np.abs(stated - observed), weights=rows)), "ECE")
    if pit is None:
        return Score(None, "coverage gap")
    return Score(float(np.mean(np.abs(coverage(pit) - LEVELS))), "coverage gap")


def reliability(prediction: Prediction, y):
    """(mean probability, observed frequency, number of rows) of the bins that have rows."""
    probs = outcome_probabilities(prediction)
    y, probs = np.ravel(_observed(y, probs.shape[:-1])), np.reshape(probs, (-1, probs.shape[-1]))
    binary = probs.shape[1] == 2
    stated = probs[:, 1] if binary else probs.max(1)
    happened = (y == 1) if binary else (y == probs.argmax(1))
    which = np.minimum((stated * NUM_BINS).astype(int), NUM_BINS - 1)
    count = np.bincount(which, minlength=NUM_BINS)
    used = count > 0
    mean = lambda v: np.bincount(which, v, NUM_BINS)[used] / count[used]  # noqa: E731
    return mean(stated), mean(happened.astype(float)), count[used]


def coverage(pit: Pit) -> Float[ndarray, "L"]:
    """Share of the observations inside the predictive distribution's central interval at each of
    `LEVELS`. A count counts by the share of its probability that lies between the interval's two
    tails (the non-randomised PIT of Czado, Gneiting & Held 2009).
    """
    below, up_to = (np.ravel(x)[:, None] for x in pit)
    low, high = 0.5 - 0.5 * LEVELS, 0.5 + 0.5 * LEVELS
    width = up_to - below
    overlap = np.clip(np.minimum(up_to, high) - np.maximum(below, low), 0.0, None)
    inside = (low <= up_to) & (up_to <= high)
    return np.mean(np.where(width > 0, overlap / np.where(width > 0, width, 1.0), inside), 0)


def distance(f: Moments, reference: Moments) -> tuple[float, float]:
    """Largest |difference| of means, and of sds, in standard deviations of the reference."""
    sd, sd_ref = (np.sqrt(np.asarray(x.variance)) for x in (f, reference))
    apart = np.abs(np.asarray(f.mean) - np.asarray(reference.mean)) / sd_ref
    return float(np.max(apart)), float(np.max(np.abs(sd - sd_ref) / sd_ref))
