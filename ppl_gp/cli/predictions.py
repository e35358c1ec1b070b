"""Predictions as a CSV file."""

import csv
from pathlib import Path

import numpy as np

from ppl_gp.cli.csv_file import Columns
from ppl_gp.cli.data import Preparation
from ppl_gp.errors import DataError, ModelError
from ppl_gp.model.arguments import argument_names
from ppl_gp.results.compare.scores import is_classification, outcome_probabilities
from ppl_gp.results.fit import Fit
from ppl_gp.results.predict.predict import Prediction


def require_same_labels(saved: Path, fit: Fit, preparation: Preparation) -> None:
    """Raise `DataError` if a fit's columns or levels differ from its folder's preparation."""
    given = preparation.names(argument_names(fit.model, 1)[0]).arguments
    known = dict(fit.names.arguments)
    for name, now in given:
        if (then := known.get(name)) and (then.columns, then.levels) != (now.columns, now.levels):
            raise DataError(
                f"{saved} was fitted to {then.columns} with the labels {list(then.levels)}, and "
                f"{saved.parent / 'preparation.json'} has {now.columns} with "
                f"{list(now.levels)} (a later run wrote to the same folder?); fit again, each data "
                "set into a folder of its own."
            )


LEVELS = (0.05, 0.5, 0.95)


def write_predictions(
    path: Path, prediction: Prediction, preparation: Preparation, columns: Columns
) -> None:
    """One row per input row: its number and inputs as they are in the file, mean and standard
    deviation of f; p(y = k) for each label, else mean, sd and `LEVELS` quantiles of y.
    """
    if isinstance(prediction.f_mean, dict) or isinstance(prediction.mean, dict):
        raise ModelError(
            "the model has several GP or observed sites; predict from Python: "
            "pg.load(...).predict(X_new)."
        )
    table = {"f_mean": prediction.f_mean, "f_sd": np.sqrt(np.asarray(prediction.f_variance))}
    if is_classification(prediction) and np.ndim(prediction.f_mean) > 1:
        table = {}  # a function for each class, of which only differences are known
    if is_classification(prediction):
        probs = outcome_probabilities(prediction)
        labels = preparation.labels or [str(k) for k in range(probs.shape[1])]
        if len(labels) != probs.shape[1]:
            raise DataError(
                f"the fit has {probs.shape[1]} outcomes, and its preparation.json the labels "
                f"{labels}."
            )
        table |= {f"p({label})": probs[:, k] for k, label in enumerate(labels)}
    elif prediction.mean is not None:
        table |= {"mean": prediction.mean, "sd": np.sqrt(np.asarray(prediction.variance))}
    if prediction.quantiles is not None:
        ends = np.asarray(prediction.quantiles)
        table |= {f"y_{level:g}": ends[i] for i, level in enumerate(LEVELS)}
    found = {name: np.asarray(column) for name, column in table.items()}
    if several := {name: column.shape for name, column in found.items() if column.ndim != 1}:
        raise ModelError(
            f"a row has several values of {several}; predict from Python: "
            "pg.load(...).predict(X_new)."
        )
    taken = {*found, "row"}
    cells = {f"{k} (input)" if k in taken else k: columns.cells(k) for k in preparation.inputs}
    whole = {"row": range(1, len(columns.rows) + 1), **cells}
    whole |= {name: column.tolist() for name, column in found.items()}
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(whole)
        writer.writerows(zip(*whole.values(), strict=True))
