"""Rendering a comparison: one column a method for people to read, one row a method in the CSV file."""

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


def _number(value, digits: int) -> str:
    if value is None:
        return _MISSING
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _plain(label: str, key: str, digits: int = 3) -> Line:
    return Line(label, lambda row: _number(row[key], digits))


def _with_error(label: str, key: str, digits: int = 3) -> Line:
    def show(row):
        if row[key] is None:
            return _MISSING
        return f"{_number(row[key], digits)} ± {_number(row[f'{key}_se'], digits)}"

    return Line(label, show)


def _khat(row: Row) -> str:
    return "exact" if row["khat"] == float("-inf") else _number(row["khat"], 2)


def lines(rows: Sequence[Row], reference: str | None) -> list[Line]:
    """The lines of the table; those that no method fills are left out."""
    error_name, calibration_name = (rows[0][k] if rows else "" for k in ("error_name", "calibration_name"))
    wanted = [
        Line("result", lambda row: str(row["result"])),
        _plain("seconds compiling", "compile_seconds", 1),
        _plain("seconds running", "run_seconds", 2),
        _plain("log evidence or bound (nats)", "log_evidence"),
        _with_error("  importance-sampled truth", "truth"),
        _with_error("test log density (nats a datum)", "log_density"),
        _plain(f"test error ({error_name})", "error"),
        _plain(f"calibration ({calibration_name})", "calibration"),
        Line("Pareto k-hat of q(f), joint", _khat),
        _plain("  share of q's draws that counts", "efficiency", 2),
        _plain("  share of the evidence that they meet", "share", 2),
        _plain("largest k-hat of a datum (LOO)", "khat_datum", 2),
        _with_error("LOO ELPD (nats)", "elpd_loo", 2),
        _plain(f"largest distance of means to {reference} (sd)", "mean_distance"),
        _plain(f"largest distance of sds to {reference} (sd)", "sd_distance"),
    ]
    return [line for line in wanted if any(line.show(row) != _MISSING for row in rows)]


def rich_table(rows: Sequence[Row], reference: str | None, caption: str) -> Table:
    """A rich table, methods across."""
    table = Table(caption=caption or None, caption_justify="left")
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(str(row["method"]), justify="right", no_wrap=True)
    for line in lines(rows, reference):
        table.add_row(line.label, *(line.show(row) for row in rows))
    return table


def as_text(rows: Sequence[Row], reference: str | None, caption: str) -> str:
    """The table as plain text, as wide as it needs to be."""
    out = io.StringIO()
    Console(file=out, width=40 + 22 * max(1, len(rows))).print(rich_table(rows, reference, caption))
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
    return f"<table><caption>{html.escape(caption)}</caption><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


def write_csv(rows: Sequence[Row], path: str | Path) -> None:
    """One row a method, full precision, empty where there is no value."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["method"])
        writer.writeheader()
        writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
