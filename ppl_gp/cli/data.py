"""Data for the command line: a CSV file to arrays, labels to 0 and 1, inputs standardised, and all of it remembered."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ppl_gp.errors import DataError


class Columns(NamedTuple):
    """A CSV file by column, as text."""

    path: str
    names: list[str]
    cells: dict[str, list[str]]


def read_csv(path: str | Path) -> Columns:
    """Read a CSV file with a header; without one (a first row of numbers) the columns are named x0, x1, ..."""
    with open(path, newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    if not rows:
        raise DataError(f"{path} is empty; give a CSV file with a header and one row a datum.")
    header = (
        [f"x{i}" for i in range(len(rows[0]))] if all(map(_is_number, rows[0])) else [c.strip() for c in rows.pop(0)]
    )
    if not rows:
        raise DataError(f"{path} has a header and no rows.")
    if ragged := [i for i, row in enumerate(rows) if len(row) != len(header)]:
        raise DataError(f"{path}: data row {ragged[0] + 1} has {len(rows[ragged[0]])} cells, the header {len(header)}.")
    return Columns(str(path), header, {name: [row[i].strip() for row in rows] for i, name in enumerate(header)})


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def numbers(columns: Columns, name: str) -> np.ndarray:
    """One column as floats, (N,); `DataError` names the first cell that is no number."""
    cells = columns.cells[name]
    for i, cell in enumerate(cells):
        if not _is_number(cell):
            raise DataError(
                f"{columns.path}: column '{name}' has {cell!r} in data row {i + 1}; give numbers, or drop the column."
            )
    return np.array([float(cell) for cell in cells])


@dataclasses.dataclass
class Preparation:
    """How a file's columns become X and y: kept beside the fits, so that new data are treated alike."""

    target: str
    inputs: list[str]
    shift: list[float]
    scale: list[float]
    labels: list[str] | None = None  # the words for y = 0 and y = 1, where they were recoded

    def X(self, columns: Columns) -> np.ndarray:
        """Inputs, (N, D), shifted and scaled."""
        if missing := [name for name in self.inputs if name not in columns.names]:
            raise DataError(f"{columns.path} lacks the columns {missing}; it has {columns.names}.")
        return (np.stack([numbers(columns, name) for name in self.inputs], 1) - self.shift) / self.scale

    def y(self, columns: Columns) -> np.ndarray:
        """Observations, (N,), labels recoded."""
        if self.labels is None:
            y = numbers(columns, self.target)
            return y.astype(int) if np.all(y == np.round(y)) else y
        cells = [_canonical(cell) for cell in columns.cells[self.target]]
        if unknown := sorted(set(cells) - set(self.labels)):
            raise DataError(f"{columns.path}: '{self.target}' has {unknown}, and the labels are {self.labels}.")
        return np.array([self.labels.index(cell) for cell in cells])

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "Preparation":
        """Read what `save` wrote."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path} does not hold what `ppl-gp fit` wrote beside its fits: {error}") from error


def prepare(columns: Columns, target: str, standardise: bool) -> Preparation:
    """Inputs are all columns but the target, standardised on request; two labels other than 0 and 1 are recoded."""
    if target not in columns.names:
        raise DataError(f"{columns.path} has no column '{target}' for --target; it has {columns.names}.")
    inputs = [name for name in columns.names if name != target]
    if not inputs:
        raise DataError(f"{columns.path} has the target '{target}' and no inputs.")
    X = np.stack([numbers(columns, name) for name in inputs], 1)
    shift, scale = (X.mean(0), X.std(0)) if standardise else (np.zeros(X.shape[1]), np.ones(X.shape[1]))
    # A constant column says nothing: it becomes zeros.
    return Preparation(
        target, inputs, shift.tolist(), np.where(scale > 0, scale, 1.0).tolist(), _labels(columns, target)
    )


def _labels(columns: Columns, target: str) -> list[str] | None:
    values = sorted({_canonical(cell) for cell in columns.cells[target]}, key=lambda v: (_is_number(v) and float(v), v))
    if len(values) == 2 and values != ["0", "1"]:
        return values
    if words := [v for v in values if not _is_number(v)]:
        raise DataError(
            f"{columns.path}: the target '{target}' has {len(values)} values such as {words[0]!r}; give numbers."
        )
    return None


def _canonical(cell: str) -> str:
    """1, 1.0 and 1e0 are one label."""
    return f"{float(cell):.17g}" if _is_number(cell) else cell
