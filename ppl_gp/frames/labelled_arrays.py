"""Reading xarray: a DataArray's values, and what its coordinates call its rows and columns."""

from typing import Any

import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.frames.table import ArrayNames, Labelled, Table, labels_of, row_labels


def open_labelled(path: str, value: Any) -> Table | None:
    """A DataArray; `None` of anything else of xarray's."""
    if not (hasattr(value, "dims") and hasattr(value, "coords") and hasattr(value, "values")):
        return None
    values, dims = np.asarray(value.values), tuple(map(str, value.dims))
    names = ArrayNames(_columns(path, value), (), _rows(value), dims or None)
    if values.dtype.kind in "biufc":
        return Table([values], names, False)
    part = _labelled(path, values)
    return Table([part], ArrayNames(None, (part.labels,), names.rows, names.dims), False)


def _columns(path: str, value) -> tuple[str, ...] | None:
    """The last dimension's coordinate where it is text: numbers there are places, no names."""
    if value.ndim < 2 or value.dims[-1] not in value.coords:
        return None
    labels = np.asarray(value.coords[value.dims[-1]].values)
    if labels.dtype.kind not in "OUT" or not all(isinstance(x, str) for x in labels.tolist()):
        return None
    return labels_of(f"{path}, dimension '{value.dims[-1]}',", labels.tolist())


def _rows(value) -> tuple[str | int, ...] | None:
    if not value.ndim or value.dims[0] not in value.coords:
        return None
    return row_labels(np.asarray(value.coords[value.dims[0]].values).tolist())


def _labelled(path: str, values: np.ndarray) -> Labelled:
    """Labels in alphabetical order."""
    text = values.dtype.kind in "OUT" and all(isinstance(x, str) for x in values.ravel().tolist())
    if not text or values.ndim != 1:
        raise DataError(
            f"{path} is a DataArray of {values.dtype} entries, shape {values.shape}; convert it to "
            "numbers, or give one axis of labels."
        )
    labels, index = np.unique(values.astype(str), return_inverse=True)
    require_no_numbers(path, labels.tolist())
    return Labelled(labels_of(path, labels.tolist()), index)


def require_no_numbers(where: str, labels: list[str]) -> None:
    """Raise `DataError` where text could be numbers that were read as text: which is meant cannot
    be known.
    """
    if labels and all(map(_is_number, labels)):
        raise DataError(
            f"{where} holds numbers written as text ({labels[:3]}); convert it to numbers "
            "(pandas.to_numeric), or, where they are labels, to declared categories "
            "(astype('category'), polars.Enum)."
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
