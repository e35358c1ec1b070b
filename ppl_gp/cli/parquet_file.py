"""A Parquet file as text by column, as a CSV file is read: one reader for the rest of the command
line, and the same errors.
"""

import numbers
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from ppl_gp.cli.csv_file import Columns, read_csv
from ppl_gp.errors import DataError


def read_table(path: Path) -> Columns:
    """A Parquet file by its suffix, else CSV."""
    return read_parquet(path) if path.suffix in (".parquet", ".pq") else read_csv(path)


def read_parquet(path: Path) -> Columns:
    """Numbers as the shortest text that reads as the same float64, truth values as 0 and 1, labels
    as they are; missing entries as empty cells. An index that pandas wrote is columns too.

    Raises `DataError` where neither polars, nor pandas with pyarrow, is installed, where the file
    cannot be read, and for entries that are neither numbers nor text.
    """
    columns = _columns(path)
    cells = [
        [_cell(path, name, i, x) for i, x in enumerate(column)] for name, column in columns.items()
    ]
    rows = [list(row) for row in zip(*cells, strict=True)]
    if not rows:
        raise DataError(f"{path} has no rows.")
    return Columns(str(path), list(columns), rows, list(range(len(rows) + 1)), "row")


def _columns(path: Path) -> dict[str, list]:
    Path(path).open("rb").close()  # a file that is not there is told as one
    try:
        return _read(path)
    except ImportError as error:
        raise DataError(
            f"{path} is a Parquet file, which needs polars, or pandas with pyarrow: "
            f'pip install "ppl-gp[frames]" ({error}).'
        ) from error
    except Exception as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {type(error).__name__}: {error}"
        ) from error


def _read(path: Path) -> dict[str, list]:
    """{column: entries as Python has them}, by polars, else by pandas."""
    try:
        import polars
    except ImportError:
        return _read_by_pandas(path)
    frame = polars.read_parquet(path)
    return {name: frame[name].to_list() for name in frame.columns}


def _read_by_pandas(path: Path) -> dict[str, list]:
    """As polars sees the file: whole numbers with gaps stay whole, and what pandas takes for the
    index stands last, where it was written, under the name that it has in the file.
    """
    import pandas

    frame: Any = pandas.read_parquet(path, engine="pyarrow", dtype_backend="numpy_nullable")
    columns = {str(k): frame[k] for k in frame.columns}
    if not isinstance(frame.index, pandas.RangeIndex):
        for i, name in enumerate(frame.index.names):
            entries = frame.index.get_level_values(i).to_series()
            columns[f"__index_level_{i}__" if name is None else str(name)] = entries
    return {k: v.astype(object).where(v.notna(), None).to_list() for k, v in columns.items()}


def _cell(path, name: str, row: int, value) -> str:
    if value is None or value != value:  # NaN is the one number that is not itself
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, numbers.Integral | np.bool_):  # truth values too
        return repr(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    raise DataError(
        f"{path}, row {row + 1}: column '{name}' has {value!r}; give numbers or text (the days "
        "since a date of your choice, say), or drop the column."
    )
