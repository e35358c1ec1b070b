"""A CSV or Parquet file as text by column, and its cells as numbers. Every error names the file,
the line (of a Parquet file the row) and the column.
"""

import codecs
import csv
import io
import re
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppl_gp.errors import DataError, warn
from ppl_gp.frames.opened import reads_as_float

# Narrower than Python's float(), which also reads 1_000, nan and digits of other scripts.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# What spreadsheets put into numbers: signs of thousands, of per cent, of money, and a long minus.
_DECORATION = re.compile(r"[\s,'’_%$€£¥−]")
# The cells that pandas.read_csv takes for missing values.
_MISSING = "|#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None"
_MISSING = {*_MISSING.split("|"), "n/a", "nan", "null"}
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
# How pandas names, when it reads a CSV file or writes a Parquet file, an index without a name.
_PANDAS_INDEX = re.compile(r"Unnamed: \d+|__index_level_\d+__")


class Columns(NamedTuple):
    """A file as text; `lines`: where the header (0: there is none) and each row are in the file."""

    path: str
    names: list[str]
    rows: list[list[str]]
    lines: list[int]
    unit: str = "line"  # what `lines` counts: rows of a Parquet file

    @property
    def header(self) -> str:
        """The file, and the line of its header where it has one."""
        return f"{self.path}, line {self.lines[0]}" if self.lines[0] else self.path

    def cells(self, name: str) -> list[str]:
        """One column; `DataError` where the header has its name twice."""
        where = [i for i, other in enumerate(self.names) if other == name]
        if len(where) > 1:
            raise DataError(
                f"{self.header}: the columns {[i + 1 for i in where]} are all named '{name}'; "
                "rename or remove them."
            )
        return [row[where[0]] for row in self.rows]

    def refusal(self, name: str, row: int, remedy: str) -> DataError:
        cell = self.rows[row][self.names.index(name)]
        place = f"{self.path}, {self.unit} {self.lines[row + 1]}"
        return DataError(f"{place}: column '{name}' has {cell!r} in data row {row + 1}; {remedy}")

    def require_names(self) -> None:
        """`DataError` for columns without a name of their own: an index would be an input too."""
        for i, name in enumerate(self.names):
            if not name or _PANDAS_INDEX.fullmatch(name):
                raise DataError(
                    f"{self.header}: column {i + 1} is named '{name}', as pandas leaves its index; "
                    "write the file with index=False, or name the column."
                )
            self.cells(name)

    def numbers(self, name: str) -> np.ndarray:
        """One column as floats, (N,); `DataError` names the first cell that is no finite number."""
        for i, cell in enumerate(cells := self.cells(name)):
            if not is_number(cell):
                raise self.refusal(name, i, remedy(cell) or "give numbers, or drop the column.")
            if not np.isfinite(float(cell)):
                raise self.refusal(name, i, "that is beyond float64; scale the column.")
        return np.array([float(cell) for cell in cells])


def read_table(path: Path) -> Columns:
    """A Parquet file by its suffix, else CSV."""
    return read_parquet(path) if path.suffix in (".parquet", ".pq") else read_csv(path)


def read_csv(path: str | Path) -> Columns:
    """Read a CSV file; without a header (a first row of numbers) columns are named x0, x1, ...
    pandas numbers columns without names, and 0,1,2 is such a header.
    """
    lines, rows = _parsed(path)
    if not rows:
        raise DataError(f"{path} is empty; give a CSV file with a header and one row per datum.")
    _require_commas(path, lines[0], rows[0])
    numbered = len(rows[0]) > 1 and rows[0] == [str(i) for i in range(len(rows[0]))]
    if numbered:
        warn(
            f"{path}: the first row, {','.join(rows[0])}, is taken for pandas' numbers of columns."
        )
    if all(map(is_number, rows[0])) and not numbered:
        header, lines = [f"x{i}" for i in range(len(rows[0]))], [0, *lines]
    else:
        header = rows.pop(0)
    if not rows:
        raise DataError(f"{path} has a header and no rows.")
    for i, row in enumerate(rows):
        if len(row) != len(header):
            raise DataError(
                f"{path}, line {lines[i + 1]}: data row {i + 1} has {len(row)} cells, the header "
                f"{len(header)}; {_ragged(row, header)}"
            )
    return Columns(str(path), header, rows, lines)


def _ragged(row: list[str], header: list[str]) -> str:
    if len(row) < len(header):
        return f"column '{header[len(row)]}' is the first without one."
    extra = row[len(header)]
    return f"cell {len(header) + 1}, {extra!r}, has no column (quote a cell that holds a comma)."


def _require_commas(path, line: int, first: list[str]) -> None:
    """`DataError` where one cell holds what looks like the whole header."""
    found = [name for sign, name in _SEPARATORS.items() if len(first) == 1 and sign in first[0]]
    if found:
        raise DataError(
            f"{path}, line {line}: one column, named {first[0]!r}: the cells are separated by "
            f"{found[0]}; save the file with commas between cells and decimal points in numbers."
        )


def _parsed(path) -> tuple[list[int], list[list[str]]]:
    """(lines of the file, rows of stripped cells), blank rows left out."""
    reader = csv.reader(io.StringIO(_decoded(path), newline=""), strict=True)
    lines, rows, before = [], [], 0  # a row stands on the line after the one before it
    try:
        for row in reader:
            if row:
                lines.append(before + 1)
                rows.append([cell.strip() for cell in row])
            before = reader.line_num
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: {error}; close and escape its quotation marks."
        ) from error
    return lines, rows


def _decoded(path) -> str:
    """The file's text without the byte-order mark that spreadsheets begin a file with."""
    content = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    if b"\0" in content:
        raise DataError(
            f"{path}, line {content[: content.index(0)].count(10) + 1}: a byte is zero, as in "
            "UTF-16 or a spreadsheet's own format; save the file as CSV in UTF-8."
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}, line {line}: the byte {content[error.start]:#04x} is not UTF-8; save the "
            "file as CSV in UTF-8 (it may be in Latin-1, or in a spreadsheet's own format)."
        ) from error


def read_parquet(path: Path) -> Columns:
    """Numbers as the shortest text that reads as the same float64, truth values as 0 and 1, labels
    as they are; missing entries as empty cells. An index that pandas wrote is columns too.

    Raises `DataError` where neither polars nor pyarrow is installed, where the file cannot be read,
    and for entries that are neither numbers nor text.
    """
    Path(path).open("rb").close()  # a file that is not there is told as one
    try:
        columns = _entries(path)
    except ImportError as error:
        raise DataError(
            f"{path} is a Parquet file, which needs polars, or pyarrow: "
            f'pip install "ppl-gp[frames]" ({error}).'
        ) from error
    except Exception as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {type(error).__name__}: {error}"
        ) from error
    cells = [[_cell(path, k, i, x) for i, x in enumerate(xs)] for k, xs in columns.items()]
    if not (rows := [list(row) for row in zip(*cells, strict=True)]):
        raise DataError(f"{path} has no rows.")
    return Columns(str(path), list(columns), rows, list(range(len(rows) + 1)), "row")


def _entries(path: Path) -> dict[str, list]:
    """{column: entries as Python has them}."""
    try:
        import polars
    except ImportError:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]

        # A plain file: of a path the folder's name may add columns (hive partitions).
        with Path(path).open("rb") as file:
            return pyarrow.parquet.read_table(file).to_pydict()
    return polars.read_parquet(path).to_dict(as_series=False)


def _cell(path, name: str, row: int, value: Any) -> str:
    if value is None or value != value:  # NaN is the one number that is not itself
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Integral):  # truth values too
        return repr(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    raise DataError(
        f"{path}, row {row + 1}: column '{name}' has {value!r}; give numbers or text (the days "
        "since a date of your choice, say), or drop the column."
    )


def is_number(cell: str) -> bool:
    """Whether a cell is a plain decimal number."""
    return _NUMBER.fullmatch(cell) is not None


def remedy(cell: str) -> str | None:
    """What to do about a cell that is missing, or a number in another notation; else `None`."""
    if cell in _MISSING:
        return "fill it in, or drop the row."
    if not is_number(cell) and (reads_as_float(cell) or is_number(_DECORATION.sub("", cell))):
        return "write it as a plain finite number, such as 1000.5."
    return None
