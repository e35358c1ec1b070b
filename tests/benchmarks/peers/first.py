"""The command line of the programs that time a first answer: `python LIBRARY_first.py problem.npz
out.json`.

Such a program imports its library, then this module's `main` reads the problem (`protocol.Problem`,
and "X_new"), fits, predicts p(y = 1) at X_new, and writes when each was done, on `time.time`, which
the caller's clock shares.
"""

import json
import pathlib
import sys
import time

import numpy as np
from protocol import read


def main(library: str, version: str, fit, predict):
    """`fit(problem, settings)` is whatever `predict(fitted, X_new)`, which returns (M,)
    probabilities, is given.
    """
    imported = time.time()
    problem, settings = read(sys.argv[1])
    with np.load(sys.argv[1]) as file:
        X_new = file["X_new"]
    found = fit(problem, settings)
    fitted = time.time()
    probs = np.asarray(predict(found, X_new), float)
    stamps = {"imported": imported, "fitted": fitted, "answered": time.time()}
    out = {"library": library, "version": version, "probs": probs.tolist(), **stamps}
    pathlib.Path(sys.argv[2]).write_text(json.dumps(out))


def engine(make):
    """(fit, predict) of an engine of `protocol`: steps of Adam on all the data, from the given
    start.
    """

    def fit(problem, settings):
        settings = settings | {"batch": len(problem.y)}
        made = make(
            problem, settings, settings["methods"][0], settings["learning_rate"], settings["gamma"]
        )
        made.run(np.zeros((settings["steps"], 0), np.int32))
        return made

    def predict(made, X_new):
        return _probability(*made.predict(X_new))

    return fit, predict


def _probability(mean, variance):
    """E[sigmoid(f)] for Gaussian f, by 20-point quadrature, as the engines integrate."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    f = mean[:, None] + np.sqrt(variance)[:, None] * nodes
    return (weights / weights.sum() / (1.0 + np.exp(-f))).sum(-1)
