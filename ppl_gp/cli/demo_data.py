"""The data of the demo: two classification problems that ship with scikit-learn, and two ways to
prepare their columns.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ppl_gp.errors import DataError


class DataSet(NamedTuple):
    """Real data as they come: X (N, D), y (N,) of 0 and 1, the rows in random order."""

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
        "digits_3_5",
        "handwritten digits, 3 against 5",
        ("a 3", "a 5"),
        pixels[keep],
        (digit[keep] == 5) * 1,
    )


def breast_cancer(seed: int) -> DataSet:
    """569 breast masses described by 30 features, malignant against benign."""
    load_breast_cancer = _sklearn_loader("load_breast_cancer")
    X, benign = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(benign))
    return DataSet(
        "breast_cancer",
        "breast cancer, Wisconsin",
        ("malignant", "benign"),
        X[order],
        benign[order],
    )


def _sklearn_loader(name: str) -> Callable:
    try:
        import sklearn.datasets
    except ImportError as error:
        raise DataError(
            "the demo's data come with scikit-learn; pip install 'ppl-gp[demo]'."
        ) from error
    return getattr(sklearn.datasets, name)


def standardised(X, num_train: int) -> np.ndarray:
    """Columns (N, D) with mean 0 and standard deviation 1 in the first `num_train` rows; those
    constant there are left out.
    """
    train = X[:num_train]
    varies = train.max(0) > train.min(0)
    return ((X - train.mean(0)) / np.where(varies, train.std(0), 1.0))[:, varies]


def principal_components(X, num: int, num_train: int) -> np.ndarray:
    """The first components of all rows, found and scaled on the first `num_train`; signs made
    definite.
    """
    mean = X[:num_train].mean(0)
    _, _, axes = np.linalg.svd(X[:num_train] - mean, full_matrices=False)
    axes = axes[:num] * np.sign(axes[:num, np.argmax(np.abs(axes[:num]), 1)].diagonal())[:, None]
    scores = (X - mean) @ axes.T
    return scores / scores[:num_train].std(0)


DATA_SETS = (digits_3_5, breast_cancer)
