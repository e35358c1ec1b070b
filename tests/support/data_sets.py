"""The data sets of the reference numbers, generated from the formulas that stand beside those
numbers.
"""

import json
from pathlib import Path

import numpy as np

_REFERENCE = Path(__file__).parents[1] / "reference"


def reference(name: str) -> dict:
    """A file of tests/reference, which names its own source."""
    return json.loads((_REFERENCE / f"{name}.json").read_text())


def wave40():
    """X (40, 1), y in {0, 1}."""
    x = -3.0 + 6.0 * np.arange(40) / 39.0
    return x[:, None], (np.sin(2 * x) + 0.3 * np.cos(7 * x) > 0).astype(int)


def sine30():
    """X (30, 1), y in {0, 1}."""
    x = np.linspace(0.0, 10.0, 30)
    return x[:, None], (np.sin(x) > 0).astype(int)


def ring100():
    """X (100, 2), y in {0, 1}, every seventh label flipped."""
    i = np.arange(1, 101)
    X = np.stack(
        [4 * ((i * 0.7548776662466927) % 1) - 2, 4 * ((i * 0.5698402909980532) % 1) - 2], 1
    )
    y = np.where(np.sin(3 * X[:, 0]) + X[:, 1] ** 2 - 1 > 0, 1, -1)
    return X, (np.where(i % 7 == 0, -y, y) > 0).astype(int)


BINARY = {"wave40": wave40, "sine30": sine30, "ring100": ring100}


def five_points(name: str):
    """Sets A and B (classification, y in {0, 1}) and R (regression)."""
    points = reference("small")["five_points"][name]
    if name == "R":
        return np.array(points["x"])[:, None], np.array(points["y"])
    return np.array(points["X"]), (np.array(points["y"]) > 0).astype(int)
