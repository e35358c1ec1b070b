"""Data for the command line: columns to arrays, labels to integers, inputs standardised, and all of
it remembered.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ppl_gp.cli.tables import Columns, is_number, remedy
from ppl_gp.errors import DataError
from ppl_gp.frames.names import Names
from ppl_gp.frames.opened import ArrayNames

_EXACT = 2.0**53  # integers below are exact in float64


@dataclasses.dataclass
class Preparation:
    """How a file's columns become X and y; kept beside the fits, to treat new data alike."""

    target: str
    inputs: list[str]
    shift: list[float]
    scale: list[float]
    labels: list[str] | None = None  # the labels for y = 0, 1 ..., where they were recoded
    # of the training inputs, so that a fit of another run is not taken for one of this
    digest: str = ""
    # of each input the labels, whose integers are their places, or None where it holds numbers
    levels: list[list[str] | None] | None = None

    def X(self, columns: Columns) -> np.ndarray:
        """Inputs, (N, D), shifted and scaled."""
        if missing := [name for name in self.inputs if name not in columns.names]:
            raise DataError(
                f"{columns.header} lacks the columns {missing}; it has {columns.names}."
            )
        given = np.stack([self._column(columns, name) for name in self.inputs], 1)
        with np.errstate(over="ignore", invalid="ignore"):
            X = (given - self.shift) / self.scale
        for i, j in np.argwhere(~np.isfinite(X)):
            told = "that is beyond float64 when scaled as in training."
            raise columns.refusal(self.inputs[j], i, told)
        return X

    def of(self, name: str) -> list[str] | None:
        """The labels of an input, `None` where it holds numbers."""
        return self.levels[self.inputs.index(name)] if self.levels else None

    def _column(self, columns: Columns, name: str) -> np.ndarray:
        if (levels := self.of(name)) is None:
            return columns.numbers(name)
        return _places(columns, name, columns.cells(name), levels)

    def y(self, columns: Columns) -> np.ndarray:
        """Observations, (N,), labels recoded."""
        if self.labels is None:
            y = columns.numbers(self.target)
            return y.astype(int) if np.all((y == np.round(y)) & (np.abs(y) < _EXACT)) else y
        cells = [_canonical(cell) for cell in columns.cells(self.target)]
        return _places(columns, self.target, cells, self.labels)

    def names(self, inputs: str) -> Names:
        """What a fit keeps of the file: the columns of the argument `inputs`, the labels of y."""
        y = ArrayNames((self.target,), (None if self.labels is None else tuple(self.labels),))
        levels = tuple(tuple(x) if (x := self.of(name)) else None for name in self.inputs)
        return Names(((inputs, ArrayNames(tuple(self.inputs), levels)), ("y", y)))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Preparation":
        """From the file that `save` wrote; `DataError` for another."""
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
            found._check()
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise DataError(
                f"{path} does not hold what `ppl-gp fit` wrote beside its fits: {error}"
            ) from error
        return found

    def _check(self) -> None:
        shift, scale, labels = np.array(self.shift, float), np.array(self.scale, float), self.labels
        strings = [self.target, self.digest, *self.inputs, *(labels or ())]
        if not all(isinstance(s, str) for s in strings) or not isinstance(self.inputs, list):
            raise ValueError("its names are no strings.")
        alike = shift.shape == scale.shape == (len(self.inputs),)
        if not alike or not (np.isfinite(shift) & (scale > 0)).all():
            raise ValueError(f"{len(self.inputs)} inputs need as many shifts and positive scales.")
        if labels is not None and not (isinstance(labels, list) and len(set(labels)) > 1):
            raise ValueError(f"its labels are {labels}, and two or more that differ are needed.")
        if self.levels is not None and len(self.levels) != len(self.inputs):
            raise ValueError(f"{len(self.inputs)} inputs need as many entries of levels.")
        for found in filter(None, [*(self.levels or ()), labels]):
            if not all(isinstance(s, str) for s in found) or len(set(found)) < len(found):
                raise ValueError(f"its levels {found} are no labels that differ.")


def _places(columns: Columns, name: str, cells: list[str], labels: list[str]) -> np.ndarray:
    """(N,) the place of each cell among the labels; `DataError` for one that is none of them."""
    place = {label: i for i, label in enumerate(labels)}
    for i, cell in enumerate(cells):
        if cell not in place:
            raise columns.refusal(name, i, remedy(cell) or f"the labels are {labels}.")
    return np.array([place[cell] for cell in cells])


def digest(X) -> str:
    """A fingerprint of inputs, (N, D)."""
    X = np.ascontiguousarray(X, float)
    return hashlib.sha256(repr(X.shape).encode() + X.tobytes()).hexdigest()


def prepare(
    columns: Columns,
    target: str,
    standardise: bool,
    outcomes: Callable[[np.ndarray, np.ndarray], int] = lambda X, y: len(np.unique(y)),
) -> Preparation:
    """Inputs are all columns but the target: numbers, standardised on request, or words, which
    become the integers of their labels in alphabetical order. Labels of the target may be recoded
    to 0, 1, ...

    `outcomes`(X, y) is the number of outcomes 0, 1, ... that the model observes, or 0. Two numbers
    other than 0 and 1 are recoded only where it is 2: counts of 1 and 4 are counts. Words are
    recoded where it is their number, and refused elsewhere.
    """
    if target not in columns.names:
        raise DataError(
            f"{columns.header} has no column '{target}' for --target; it has {columns.names}."
        )
    columns.require_names()
    if not (inputs := [name for name in columns.names if name != target]):
        raise DataError(f"{columns.path} has the target '{target}' and no inputs.")
    levels = [_levels(columns, name) for name in inputs]
    plain = [0.0] * len(inputs), [1.0] * len(inputs)
    found = Preparation(target, inputs, *plain, levels=levels if any(levels) else None)
    X = found.X(columns)
    if standardise:
        shift, scale = _standard(columns, found, X)
        found = dataclasses.replace(found, shift=shift.tolist(), scale=scale.tolist())
    return dataclasses.replace(found, labels=_labels(columns, found, outcomes))


def _levels(columns: Columns, name: str) -> list[str] | None:
    """The labels of an input of words; `DataError` if every row has its own: nothing is learnt."""
    if not _words(columns, name, "drop the column, "):
        return None
    found = sorted(set(cells := columns.cells(name)))
    if len(found) == len(cells) > 1:
        told = "no word of the column occurs twice: drop it, or give numbers."
        raise columns.refusal(name, 0, told)
    return found


def _standard(columns, found: Preparation, X):
    """(mean, sd) of each column; a constant one becomes zeros, rounding or not; labels stay."""
    inputs, labels = found.inputs, np.array([found.of(name) is not None for name in found.inputs])
    constant = X.max(0) == X.min(0)
    with np.errstate(over="ignore", invalid="ignore"):
        shift, scale = np.where(constant, X[0], X.mean(0)), np.where(constant, 1.0, X.std(0))
    shift, scale = np.where(labels, 0.0, shift), np.where(labels, 1.0, scale)
    for name, a, b in zip(inputs, shift, scale, strict=True):
        if not (np.isfinite(a) and np.isfinite(b) and b > 0):
            raise DataError(
                f"{columns.path}: column '{name}' has mean {a:.3g} and standard deviation {b:.3g} "
                "in float64, by which nothing can be scaled; give it in other units."
            )
    return shift, scale


def _labels(columns: Columns, found: Preparation, outcomes) -> list[str] | None:
    words = _words(columns, found.target)
    cells = {_canonical(c) for c in columns.cells(found.target)}
    labels = sorted(cells, key=lambda v: (is_number(v) and float(v), v))
    if not words:
        two = len(labels) == 2 and labels != ["0", "1"]
        return labels if two and outcomes(found.X(columns), found.y(columns)) == 2 else None
    if len(labels) == 1 or len(labels) == len(columns.rows) > 2:
        raise DataError(
            f"{columns.path}: the target '{found.target}' has {len(labels)} values such as "
            f"{labels[0]!r} in {len(columns.rows)} rows; give numbers, or words that occur often."
        )
    coded = dataclasses.replace(found, labels=labels).y(columns)
    if (num := outcomes(found.X(columns), coded)) != len(labels):
        model = f"a variable with {num} outcomes" if num else "no variable with such outcomes"
        raise DataError(
            f"{columns.path}: the target '{found.target}' has the {len(labels)} words "
            f"{labels[:10]}, and the model observes {model}; give the model's number of classes "
            f"(--set num_classes={len(labels)}, where that is its option), or give numbers."
        )
    return labels


def _words(columns: Columns, name: str, else_: str = "") -> bool:
    """Whether a column holds words, not numbers; `DataError` for cells of both, or of neither."""
    cells = columns.cells(name)
    for i, cell in enumerate(cells):
        if advice := remedy(cell):
            raise columns.refusal(name, i, advice)
        if is_number(cell) != is_number(cells[0]):
            raise columns.refusal(
                name, i, f"data row 1 has {cells[0]!r}: {else_}give numbers only, or words only."
            )
    return not is_number(cells[0])


def _canonical(cell: str) -> str:
    """1, 1.0 and 1e0 are one label, and so are 0 and -0."""
    return repr(float(cell) + 0.0).removesuffix(".0") if is_number(cell) else cell
