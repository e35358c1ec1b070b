"""The demo: one declared classifier, two real data sets that ship with scikit-learn, every method."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ppl_gp.cli.methods import Effort
from ppl_gp.cli.pictures import write_pictures
from ppl_gp.cli.run import Files, Outcome, Problem, Recorder, fit_methods, say
from ppl_gp.errors import DataError


class DataSet(NamedTuple):
    """Real data, reduced to principal components whose variances are one in the training rows."""

    name: str
    title: str
    labels: tuple[str, str]
    X: np.ndarray
    y: np.ndarray


def digits_3_5(seed: int) -> DataSet:
    """365 handwritten digits of 8 x 8 pixels, 3 against 5."""
    load_digits = _sklearn_loader("load_digits")
    pixels, digit = load_digits(return_X_y=True)
    keep = np.flatnonzero((digit == 3) | (digit == 5))
    keep = np.random.default_rng(seed).permutation(keep)
    return DataSet(
        "digits_3_5", "handwritten digits, 3 against 5", ("a 3", "a 5"), pixels[keep], (digit[keep] == 5) * 1
    )


def breast_cancer(seed: int) -> DataSet:
    """569 breast masses described by 30 features, malignant against benign."""
    load_breast_cancer = _sklearn_loader("load_breast_cancer")
    X, benign = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(benign))
    X = (X - X.mean(0)) / X.std(0)
    return DataSet("breast_cancer", "breast cancer, Wisconsin", ("malignant", "benign"), X[order], benign[order])


def _sklearn_loader(name: str) -> Callable:
    try:
        import sklearn.datasets
    except ImportError as error:
        raise DataError("the demo's data come with scikit-learn; pip install 'ppl-gp[demo]'.") from error
    return getattr(sklearn.datasets, name)


def principal_components(X, num: int, num_train: int) -> np.ndarray:
    """The first components of all rows, found and scaled on the first `num_train`; signs made definite."""
    mean = X[:num_train].mean(0)
    _, _, axes = np.linalg.svd(X[:num_train] - mean, full_matrices=False)
    axes = axes[:num] * np.sign(axes[:num, np.argmax(np.abs(axes[:num]), 1)].diagonal())[:, None]
    scores = (X - mean) @ axes.T
    return scores / scores[:num_train].std(0)


NUM_COMPONENTS, NUM_TEST = 2, 200
DATA_SETS = (digits_3_5, breast_cancer)


def run_demo(model: Callable, out: Path, names: list[str], effort: Effort, num_train: int, seed: int) -> int:
    """Fit, compare, draw and explain for each data set, in a folder of its own; the exit code."""
    written = Files(out)
    for load in DATA_SETS:
        outcome = _one(model, load(seed), written, names, effort, num_train, seed)
        if outcome.exit_code:
            break
    print("Files:")
    written.tell()
    return outcome.exit_code


def _one(model, data: DataSet, written: Files, names, effort, num_train, seed) -> Outcome:
    say(f"\n{data.title}: {num_train} training rows, {NUM_TEST} test rows, {NUM_COMPONENTS} principal components")
    X = principal_components(data.X, NUM_COMPONENTS, num_train)
    split = slice(num_train), slice(num_train, num_train + NUM_TEST)
    problem = Problem(model, X[split[0]], data.y[split[0]], X[split[1]], data.y[split[1]])
    recorder = Recorder(problem, Files(written.out / data.name))
    outcome = fit_methods(problem, names, effort, seed, recorder)
    if outcome.fits:
        print(f"\n{data.title}\n{recorder.comparison}\n\nWhat can be trusted")
        print("\n".join(f"- {sentence}" for sentence in recorder.sentences()) + "\n")
    if outcome.fits and not outcome.interrupted:
        axes = [f"principal component {i + 1} (sd)" for i in range(NUM_COMPONENTS)]
        write_pictures(recorder, problem, axes, data.labels, data.title)
    written.written += recorder.files.written
    return outcome
