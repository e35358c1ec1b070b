"""Rendering a comparison: one column a method for people to read, one row a method in the CSV file.

Methods that do not fit side by side in `WIDTH` columns go into a second table below.
"""

import csv
import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

Row = dict[str, object]


class Line(NamedTuple):
    """One quantity: its label, and how a method's row shows it."""

    label: str
    show: Callable[[Row], str]


_MISSING = "-"
WIDTH = 100  # columns of a terminal that a printed table keeps to
_BORDERS = 3  # of a column: a space on either side and a line


def _number(value, digits: int) -> str:
    if value is None:
        return _MISSING
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _plain(label: str, key: str, digits: int = 3) -> Line:
    return Line(label, lambda row: _number(row[key], digits))


def _with_error(label: str, key: str, digits: int = 3) -> tuple[Line, Line]:
    """The value, and its standard error on a line of its own, which keeps columns narrow."""
    indent = " " * (2 + len(label) - len(label.lstrip()))
    return _plain(label, key, digits), _plain(f"{indent}standard error", f"{key}_se", digits)


def _khat(row: Row) -> str:
    return "exact" if row["khat"] == float("-inf") else _number(row["khat"], 2)


def lines(rows: Sequence[Row], reference: str | None) -> list[Line]:
    """The lines of the table; those that no method fills are left out."""
    error_name, calibration_name = (
        rows[0][k] if rows else "" for k in ("error_name", "calibration_name")
    )
    wanted = [
        Line("result", lambda row: str(row["result"])),
        _plain("seconds compiling", "compile_seconds", 1),
        _plain("seconds running", "run_seconds", 2),
        *_with_error("log evidence or bound (nats)", "log_evidence"),
        *_with_error("  importance-sampled truth", "truth"),
        *_with_error("test log density (nats a datum)", "log_density"),
        _plain(f"test error ({error_name})", "error"),
        _plain(f"calibration ({calibration_name})", "calibration"),
        Line("Pareto k-hat of q(f), joint", _khat),
        _plain("  share of q's draws that counts", "efficiency", 2),
        _plain("  share of the evidence they meet", "share", 2),
        _plain("largest k-hat of a datum (LOO)", "khat_datum", 2),
        *_with_error("LOO ELPD (nats)", "elpd_loo", 2),
        _plain(f"largest gap of means to {reference} (sd)", "mean_distance"),
        _plain(f"largest gap of sds to {reference} (sd)", "sd_distance"),
    ]
    return [line for line in wanted if any(line.show(row) != _MISSING for row in rows)]


def rich_tables(rows: Sequence[Row], reference: str | None, caption: str) -> list[Table]:
    """Tables of at most `WIDTH` columns where names allow; the last has the caption."""
    of = lines(rows, reference)
    return [
        _rich_table(block, of, caption if block[-1] is rows[-1] else "")
        for block in _blocks(rows, of)
    ]


def _rich_table(rows: Sequence[Row], of: Sequence[Line], caption: str) -> Table:
    table = Table(caption=caption or None, caption_justify="left")
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(str(row["method"]), justify="right", no_wrap=True)
    for line in of:
        table.add_row(line.label, *(line.show(row) for row in rows))
    return table


def _blocks(rows: Sequence[Row], of: Sequence[Line]) -> list[list[Row]]:
    """Methods that go side by side: as many as fit, one at least."""
    first = 1 + _BORDERS + max((len(line.label) for line in of), default=0)
    blocks, used = [[]], first
    for row in rows:
        width = _BORDERS + max(len(str(row["method"])), *(len(line.show(row)) for line in of))
        if blocks[-1] and used + width > WIDTH:
            blocks, used = [*blocks, []], first
        blocks[-1].append(row)
        used += width
    return blocks


def as_text(rows: Sequence[Row], reference: str | None, caption: str) -> str:
    """The table as plain text, `WIDTH` columns wide or as wide as a name needs."""
    out, tables = io.StringIO(), rich_tables(rows, reference, caption)
    unbound = Console(width=10_000)
    width = max(WIDTH, *(unbound.measure(table).maximum for table in tables))
    Console(file=out, width=width).print(*tables)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def as_html(rows: Sequence[Row], reference: str | None, caption: str) -> str:
    """The table for a notebook."""
    head = "".join(f"<th>{html.escape(str(row['method']))}</th>" for row in rows)
    body = "".join(
        f"<tr><th>{html.escape(line.label)}</th>"
        + "".join(f"<td>{html.escape(line.show(row))}</td>" for row in rows)
        + "</tr>"
        for line in lines(rows, reference)
    )
    head = f"<thead><tr><th></th>{head}</tr></thead>"
    return f"<table><caption>{html.escape(caption)}</caption>{head}<tbody>{body}</tbody></table>"


def write_csv(rows: Sequence[Row], path: str | Path) -> None:
    """One row a method, full precision, empty where there is no value."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["method"])
        writer.writeheader()
        writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
