"""What a frame, a column or a labelled array holds: numbers and labels apart, and what they were
called.
"""

import dataclasses
from collections import Counter
from typing import NamedTuple

import numpy as np

from ppl_gp.errors import DataError


@dataclasses.dataclass(frozen=True)
class ArrayNames:
    """What one array argument was called where the user had it.

    - `columns`: names of the columns of a frame, of the last axis of a DataArray, or of a single
      column, which then stands alone; `None` where they had none.
    - `levels`: one entry a column: the labels of a column of categories, whose integers are their
      places here, and `None` of a column of numbers.
    - `rows`: labels of the rows (a pandas index that is no RangeIndex, the coordinate of a
      DataArray's first dimension), else `None`.
    - `dims`: the dimensions of a DataArray, else `None`.
    """

    columns: tuple[str, ...] | None = None
    levels: tuple[tuple[str, ...] | None, ...] = ()
    rows: tuple[str | int, ...] | None = None
    dims: tuple[str, ...] | None = None

    def level(self, column: int) -> tuple[str, ...] | None:
        """The labels of a column, `None` where it holds numbers."""
        return self.levels[column] if column < len(self.levels) else None

    def place(self, column: int) -> str:
        """What a message adds to an argument's name to name a column."""
        return f", column '{self.columns[column]}'," if self.columns else ""


class Labelled(NamedTuple):
    """A column of labels: row n has `labels[index[n]]`. Not all labels need occur."""

    labels: tuple[str, ...]
    index: np.ndarray


class Table(NamedTuple):
    """A value with names. `parts`: one array or `Labelled` a column of a frame; the one array, or
    column, of what is none.
    """

    parts: list[np.ndarray | Labelled]
    names: ArrayNames
    is_frame: bool

    def array(self, path: str, levels: tuple[tuple[str, ...] | None, ...]) -> np.ndarray:
        """(N, D) of a frame, else as it is, labels as their places in `levels`. Columns of several
        types have the type that holds them all (integers beside floats: floats).
        """
        columns = [
            codes(f"{path}{self.names.place(j)}", part, levels[j] or ())
            if isinstance(part, Labelled)
            else part
            for j, part in enumerate(self.parts)
        ]
        return np.stack(columns, 1) if self.is_frame else columns[0]


def codes(where: str, column: Labelled, levels: tuple[str, ...]) -> np.ndarray:
    """(N,) the place of each label in `levels`. Raises `DataError` for labels that are not there.

    The labels are looked up, and the rows follow by one gather.
    """
    place = {label: i for i, label in enumerate(levels)}
    table = np.array([place.get(label, -1) for label in column.labels], int)
    found = table[column.index]
    if unknown := np.flatnonzero(found < 0).tolist():
        labels = list(dict.fromkeys(column.labels[i] for i in column.index[unknown]))
        raise DataError(
            f"{where} has {labels[:5]} (first in row {unknown[0]}), and the labels of the fit are "
            f"{list(levels)}: an unknown label has no integer. Drop these rows, or fit with all "
            "labels declared as categories."
        )
    return found


def labels_of(where: str, labels) -> tuple[str, ...]:
    """Labels as text. Raises `DataError` where two would be one."""
    told = tuple(map(str, labels))
    if len(set(told)) < len(told):
        twice = sorted(x for x, num in Counter(told).items() if num > 1)
        raise DataError(f"{where} has several categories that read {twice}; rename them.")
    return told


def row_labels(labels) -> tuple[str | int, ...]:
    """Labels of rows as text or integers."""
    return tuple(x if type(x) in (str, int) else str(x) for x in labels)
