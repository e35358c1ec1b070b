"""A Parquet file as text by column, as a CSV file is read: one reader for the rest of the command
line, and the same errors.
"""

from pathlib import Path
from typing import Any

from ppl_gp.cli.csv_file import Columns, read_csv
from ppl_gp.errors import DataError


def read_table(path: Path) -> Columns:
    """A Parquet file by its suffix, else CSV."""
    return read_parquet(path) if path.suffix in (".parquet", ".pq") else read_csv(path)


def read_parquet(path: Path) -> Columns:
    """Numbers as the shortest text that reads as the same float64, truth values as 0 and 1; missing
    entries as empty cells.

    Raises `DataError` where neither polars, nor pandas with an engine for Parquet, is installed,
    and where the file cannot be read.
    """
    frame = _frame(path)
    names = list(map(str, frame.columns))
    columns = [[_cell(x) for x in frame[name].to_list()] for name in frame.columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    if not rows:
        raise DataError(f"{path} has no rows.")
    return Columns(str(path), names, rows, list(range(len(rows) + 1)), "row")


def _frame(path: Path) -> Any:
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


def _read(path: Path) -> Any:
    try:
        import polars
    except ImportError:
        import pandas

        return pandas.read_parquet(path)
    return polars.read_parquet(path)


def _cell(value) -> str:
    if value is None or value != value:  # NaN is the one number that is not itself
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str) else repr(value)
