"""The demo: one declared classifier of two real data sets, with all their columns, and with two for
a picture.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ppl_gp.cli.pictures import save_figure, write_pictures
from ppl_gp.cli.run import (
    Effort,
    Files,
    Outcome,
    Problem,
    Recorder,
    fit_methods,
    fit_one,
    say,
    wrapped,
)
from ppl_gp.errors import DataError
from ppl_gp.report.pictures import plot_surface

# that take 300 rows in seconds each, and draws to judge them by
METHODS = ("laplace", "ep", "vi", "nuts")
# A leapfrog step at 300 rows takes milliseconds: short trajectories, and one chain by default, as
# two would warm up twice.
MAX_TREE_DEPTH, TARGET_ACCEPT_PROB = 5, 0.7
PICTURE_METHODS = ("ep", "nuts")  # the best of the quick ones, and the truth
PICTURE_ROWS, NUM_COMPONENTS = 60, 2
GAIN = 1.0  # nats of log evidence that length scales of their own have to gain: less is a tie
MIN_TEST = 20


class DataSet(NamedTuple):
    """Real data as they come: X (N, D), y (N,) of 0 and 1, the rows in random order."""

    name: str
    title: str
    labels: tuple[str, str]
    X: np.ndarray
    y: np.ndarray


def digits_3_5(seed: int) -> DataSet:
    """365 handwritten digits of 8 x 8 pixels, 3 against 5."""
    pixels, digit = _loaded("load_digits")
    rows = np.random.default_rng(seed).permutation(np.flatnonzero((digit == 3) | (digit == 5)))
    title, y = "handwritten digits, 3 against 5", (digit[rows] == 5) * 1
    return DataSet("digits_3_5", title, ("a 3", "a 5"), pixels[rows], y)


def breast_cancer(seed: int) -> DataSet:
    """569 breast masses described by 30 features, malignant against benign."""
    X, benign = _loaded("load_breast_cancer")
    rows = np.random.default_rng(seed).permutation(len(benign))
    title, labels = "breast cancer, Wisconsin", ("malignant", "benign")
    return DataSet("breast_cancer", title, labels, X[rows], benign[rows])


def _loaded(name: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        import sklearn.datasets
    except ImportError as error:
        raise DataError(
            "the demo's data come with scikit-learn; pip install 'ppl-gp[demo]'."
        ) from error
    return getattr(sklearn.datasets, name)(return_X_y=True)


def standardised(X, num_train: int) -> np.ndarray:
    """Columns (N, D) with mean 0 and sd 1 in the first `num_train` rows, without constant ones."""
    train = X[:num_train]
    varies = train.max(0) > train.min(0)
    return ((X - train.mean(0)) / np.where(varies, train.std(0), 1.0))[:, varies]


def principal_components(X, num: int, num_train: int) -> np.ndarray:
    """The first components of all rows, found and scaled on `num_train` rows, with fixed signs."""
    mean = X[:num_train].mean(0)
    _, _, axes = np.linalg.svd(X[:num_train] - mean, full_matrices=False)
    axes = axes[:num] * np.sign(axes[:num, np.argmax(np.abs(axes[:num]), 1)].diagonal())[:, None]
    scores = (X - mean) @ axes.T
    return scores / scores[:num_train].std(0)


DATA_SETS = (digits_3_5, breast_cancer)


def run_demo(
    model: Callable, out: Path, names: list[str], effort: Effort, num_train: int, seed: int
) -> int:
    """Fit, compare, draw and explain for each data set, in a folder of its own; the exit code."""
    written, how = Files(out), (effort, num_train, seed)
    for load in DATA_SETS:
        data = load(seed)
        files = Files(out / data.name)
        outcome = _compare(model, data, files, names, *how)
        if not outcome.exit_code:
            outcome = _picture(model, data, files, *how)
        written.written += files.written
        if outcome.exit_code:
            break
    print("Files:")
    written.tell()
    return outcome.exit_code


def _compare(model, data: DataSet, files: Files, names, effort: Effort, num_train, seed) -> Outcome:
    """Fit all columns; score and draw on all rows that are not for training."""
    X = standardised(data.X, num_train)
    problem = _split(model, X, data, num_train)
    rows = f"{num_train} training rows, {len(problem.y_test)} test rows"
    print(f"\n{data.title}: {rows}, {X.shape[1]} columns")
    problem.kwargs |= _lengthscales(problem, effort, seed)
    recorder = Recorder(problem, files)
    effort = effort._replace(max_tree_depth=MAX_TREE_DEPTH, target_accept_prob=TARGET_ACCEPT_PROB)
    outcome = fit_methods(problem, names, effort, seed, recorder)
    if outcome.fits:
        print(f"\n{recorder.comparison}\n\nWhat can be trusted")
        print("\n".join(wrapped(f"- {sentence}") for sentence in recorder.sentences()) + "\n")
    if outcome.fits and not outcome.interrupted:
        write_pictures(recorder, problem, (), data.labels, data.title)
    return outcome


def _split(model, X: np.ndarray, data: DataSet, num_train: int) -> Problem:
    """The first rows to learn from, the rest to score on."""
    if len(X) - num_train < MIN_TEST:
        raise DataError(
            f"--num-train {num_train} of {len(X)} rows of {data.name} leaves fewer than "
            f"{MIN_TEST} for testing; give at most {len(X) - MIN_TEST}."
        )
    return Problem(model, X[:num_train], data.y[:num_train], X[num_train:], data.y[num_train:])


def _lengthscales(problem: Problem, effort: Effort, seed: int) -> dict[str, bool]:
    """{"ard": whether each column gets its own length scale}, as the log evidence prefers; {} for a
    model without the choice.

    Laplace's log evidences at the posterior modes of the hyperparameters are compared: the quickest
    with D + 1 of them.
    """
    if "ard" not in inspect.signature(problem.model).parameters:
        return {}
    both = (replace(problem, kwargs={"ard": ard}) for ard in (True, False))
    found = [fit_one(p, "laplace", effort, seed).log_evidence for p in both]
    each, one = (-np.inf if x is None else x for x in found)
    ard = each > one + GAIN
    print(
        f"log evidence by Laplace: {each:.2f} nats with a length scale a column, {one:.2f} with "
        f"one; taken: {'one a column' if ard else 'one'}"
    )
    return {"ard": bool(ard)}


def _picture(model, data: DataSet, files: Files, effort: Effort, num_train, seed) -> Outcome:
    """surface.png: p(y = 1) over two principal components, of the first few training rows."""
    X = principal_components(standardised(data.X, num_train), NUM_COMPONENTS, num_train)
    problem = _split(model, X, data, min(PICTURE_ROWS, num_train))
    size = f"{len(problem.y)} rows and {NUM_COMPONENTS} principal components"
    say(f"\n{data.title}: {size} for the picture")
    outcome = fit_methods(problem, PICTURE_METHODS, effort, seed, lambda name, fitted: None)
    if outcome.fits and not outcome.interrupted:
        axes = [f"principal component {i + 1} (sd)" for i in range(NUM_COMPONENTS)]
        named = {"labels": axes, "classes": data.labels}
        figure = plot_surface(outcome.fits, problem.X, problem.y, **named)
        save_figure(figure, files.path("surface.png"), data.title)
    return outcome
