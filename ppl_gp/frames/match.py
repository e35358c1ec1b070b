"""What is given at a prediction against the names of the fit."""

from typing import Any

import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.frames.table import ArrayNames, Labelled, Table


def require_columns(path: str, known: ArrayNames, table: Table, is_y: bool) -> None:
    """Raise `DataError` for columns that are missing, extra or in another order, and for swapped
    dimensions. A single column of observations may have another name.
    """
    new = table.names
    if known.dims and new.dims and known.dims != new.dims and set(known.dims) == set(new.dims):
        raise DataError(
            f"argument '{path}' has the dimensions {list(new.dims)}, and in training "
            f"{list(known.dims)}; give .transpose{known.dims}."
        )
    if not known.columns or not new.columns or known.columns == new.columns:
        return
    if is_y and len(known.columns) == len(new.columns) == 1:
        return
    missing = [k for k in known.columns if k not in new.columns]
    extra = [k for k in new.columns if k not in known.columns]
    what = f"lacks the columns {missing}" if missing else ""
    what += " and " if missing and extra else ""
    what += f"has the columns {extra}, which the fit had not" if extra else ""
    # a column for a column, which is (N,), a frame for a frame, (N, D)
    first, *others = known.columns
    wanted = first if not (table.is_frame or others) else list(known.columns)
    raise DataError(
        f"argument '{path}' {what or f'has its columns in another order, {list(new.columns)}'}: "
        f"the fit was made with {list(known.columns)}. Give these, frame[{wanted!r}]."
    )


def settled(path: str, known: ArrayNames, table: Table) -> Table:
    """The table with labels where the fit had labels and numbers where it had numbers.

    Integers may stand for labels in a DataArray without coordinates, which counts as an array;
    `DataError` where they could be either, as in any frame or column.
    """
    for j, part in enumerate(table.parts):
        where, levels = f"argument '{path}'{table.names.place(j)}", known.level(j)
        if isinstance(part, Labelled) and levels is None:
            raise DataError(
                f"{where} holds labels, and the fit was made with numbers there: labels have no "
                "integers. Give numbers, or fit with the labels."
            )
        if levels is not None and not isinstance(part, Labelled):
            if table.names.columns or table.names.dims is None:
                raise DataError(
                    f"{where} holds {part.dtype} entries, and the fit was made with the labels "
                    f"{list(levels)} there. Give labels (astype('category'), polars.Enum), or "
                    "their places as an array without names, .to_numpy()."
                )
            require_codes(where, part, levels)
    return table


def require_codes_of(path: str, known: ArrayNames, value: Any) -> None:
    """Raise `DataError` where an array without names holds no places of labels where the fit had
    labels.
    """
    if not any(known.levels) or not (hasattr(value, "__array__") or isinstance(value, list)):
        return
    array = np.asarray(value)
    if len(known.levels) > 1 and array.shape[-1:] != (len(known.levels),):
        raise DataError(
            f"argument '{path}' has shape {array.shape}, and the fit was made with the "
            f"{len(known.levels)} columns {list(known.columns or ())}; give as many."
        )
    for j, levels in enumerate(known.levels):
        column = array[..., j] if len(known.levels) > 1 or array.ndim > 1 else array
        if levels is not None and array.dtype.kind in "biuf":
            require_codes(f"argument '{path}'{known.place(j)}", column, levels)


def require_codes(where: str, column: np.ndarray, levels: tuple[str, ...]) -> None:
    """Raise `DataError` for numbers that are no places of labels; NaN is refused elsewhere."""
    column = column[np.isfinite(column)]
    wrong = column[(column != np.round(column)) | (column < 0) | (column >= len(levels))]
    if wrong.size:
        raise DataError(
            f"{where} has {wrong.ravel()[0]}, where the fit was made with the labels "
            f"{list(levels)}: give labels, or integers from 0 to {len(levels) - 1}."
        )
