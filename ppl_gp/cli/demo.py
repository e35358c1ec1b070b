"""The demo: one declared classifier of two real data sets, with all their columns, and with two for
a picture; and the pictures of a comparison, written to its folder.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ppl_gp.cli.data import Preparation
from ppl_gp.cli.problem import num_outcomes
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
from ppl_gp.frames.opened import ArrayNames
from ppl_gp.report import pictures as plots
from ppl_gp.report import slices
from ppl_gp.report.pictures import plot_surface
from ppl_gp.results.fit import Fit
from ppl_gp.results.predict.prediction import is_classification


def write_pictures(
    recorder: Recorder, problem: Problem, inputs: Sequence[str], labels=None, title: str = ""
) -> None:
    """evidence, forest, calibration; band (one input) or surface (two, binary observations)."""
    for name, figure in _figures(recorder, problem, inputs, labels):
        save_figure(figure, recorder.files.path(name), title)


def require_drawable(path: Path | None, problem: Problem, along: str | None = None) -> None:
    """Raise `DataError`, before any work, where no picture shows the inputs."""
    inputs = list(next(iter(problem.names.values())).columns or ())
    if path is None:
        raise DataError(f"--along {along}: give the name of the picture too, --plot FILE.png.")
    if path.suffix != ".png":
        raise DataError(f"--plot {path}: give the name of a PNG file, FILE.png.")
    if not path.parent.is_dir():
        raise DataError(f"--plot {path}: there is no folder {path.parent}; make it first.")
    if along is not None and along not in inputs:
        raise DataError(f"--along {along}: the inputs are {inputs}; give one.")
    num = problem.X.shape[1]
    drawn = num == 1 or (num == 2 and _is_binary(problem))
    if along is None and (_holds_words(problem) or not drawn):
        raise DataError(
            f"--plot shows one input of numbers, or two with a target of two outcomes; the inputs "
            f"are {inputs}. Give --along with one of them: the others are held at their medians."
        )


def _is_binary(problem: Problem) -> bool:
    return num_outcomes(problem.model, problem.kwargs, problem.X, problem.y) == 2


def _holds_words(problem: Problem) -> bool:
    """Whether an input is the integers of labels, between which there is nothing to draw."""
    return any(next(iter(problem.names.values()), ArrayNames()).levels)


def write_picture(
    path: Path, fits: Mapping[str, Fit], problem: Problem, preparation: Preparation, along=None
) -> None:
    """The fits over one or two inputs, or a slice along one, in the file's units; a panel each."""
    X, y, kwargs, one = problem.X, problem.y, problem.kwargs, problem.X.shape[1] == 1
    scales = list(zip(preparation.shift, preparation.scale, strict=True))
    how = _shown(fits, problem) if along is not None or one else {}
    if along is not None:
        units = dict(zip(preparation.inputs, scales, strict=True))
        figure = slices.plot_predictions(fits, X, y, along=along, units=units, **how, **kwargs)
    else:
        draw = slices.plot_predictions if one else plots.plot_surface
        figure = draw(fits, X, y, **how, **kwargs)
        for ax in figure.axes[: len(fits)]:
            for axis, (shift, scale) in zip((ax.xaxis, ax.yaxis), scales, strict=False):
                axis.set_major_formatter(lambda v, _, a=shift, b=scale: f"{a + b * v:.6g}")
    save_figure(figure, path)


def _shown(fits: Mapping[str, Fit], problem: Problem) -> dict:
    """Show y with the data; for two outcomes the function by its name, which may be more than f."""
    (site, *_) = next(iter(fits.values())).latent or ("f",)
    return {"observed": not _is_binary(problem), "flabel": site}


def save_figure(figure, path, title: str = "") -> None:
    """As a PNG file, with a title at the bottom."""
    import matplotlib.pyplot as plt

    if title:
        # which the layout keeps room for
        figure.supxlabel(title, x=0.995, ha="right", fontsize=8, color="grey")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _figures(recorder: Recorder, problem: Problem, inputs, labels):
    comparison, fits = recorder.comparison, recorder.comparison.fits
    X_test, y_test, kwargs = problem.X_test, problem.y_test, problem.kwargs
    if any(row["log_evidence"] is not None for row in comparison.table):
        yield "evidence.png", plots.plot_evidence(comparison)
    yield "forest.png", plots.plot_forest(fits)
    yield "calibration.png", plots.plot_calibration(fits, X_test, y_test, **kwargs)
    words = _holds_words(problem)
    if problem.X.shape[1] == 1 and not words:
        how = {"xlabel": inputs[0], **_shown(fits, problem), **kwargs}
        yield "band.png", slices.plot_predictions(fits, problem.X, problem.y, **how)
    prediction = next(iter(fits.values())).predict(X_test, **kwargs)
    binary = is_classification(prediction) and prediction.probs.ndim == 1
    if problem.X.shape[1] == 2 and binary and not words:
        how = {"labels": inputs, "classes": labels or ("y = 0", "y = 1"), **kwargs}
        yield "surface.png", plots.plot_surface(fits, problem.X, problem.y, **how)


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
