"""A comparison as a person reads it: a table, and three sentences for each method, on its evidence,
its latents and its predictions, each with the size of the difference and what that matters for.

Methods that do not fit side by side in `WIDTH` columns go into a second table below.

A difference of at most `ERRORS` standard errors is never called wrong, and one that is larger is
never called equal: it is called small if it is.
"""

import html
import io
import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ppl_gp.results.compare.truth import KHAT_LIMIT

Row = dict[str, object]


class Line(NamedTuple):
    """One quantity: its label, its key in a method's row, and the digits that are shown."""

    label: str
    key: str
    digits: int = 3

    def show(self, row: Row) -> str:
        value = row[self.key]
        if value is None:
            return _MISSING
        if self.key == "khat" and value == -math.inf:
            return "exact"
        return f"{value:.{self.digits}f}" if isinstance(value, float) else str(value)


_MISSING = "-"
WIDTH = 100  # columns of a terminal that a printed table keeps to
_BORDERS = 3  # of a column: a space on either side and a line


def _with_error(label: str, key: str, digits: int = 3) -> tuple[Line, Line]:
    """The value, and its standard error on a line of its own, which keeps columns narrow."""
    indent = " " * (2 + len(label) - len(label.lstrip()))
    return Line(label, key, digits), Line(f"{indent}standard error", f"{key}_se", digits)


def lines(rows: Sequence[Row], reference: str | None) -> list[Line]:
    """The lines of the table; those that no method fills are left out."""
    first = rows[0] if rows else {"error_name": "", "calibration_name": ""}
    wanted = [
        Line("result", "result"),
        Line("seconds compiling", "compile_seconds", 1),
        Line("seconds running", "run_seconds", 2),
        *_with_error("log evidence or bound (nats)", "log_evidence"),
        *_with_error("  importance-sampled truth", "truth"),
        *_with_error("test log density (nats a datum)", "log_density"),
        Line(f"test error ({first['error_name']})", "error"),
        Line(f"calibration ({first['calibration_name']})", "calibration"),
        Line("Pareto k-hat of q(f), joint", "khat", 2),
        Line("  share of q's draws that counts", "efficiency", 2),
        Line("  share of the evidence they meet", "share", 2),
        Line("largest k-hat of a datum (LOO)", "khat_datum", 2),
        *_with_error("LOO ELPD (nats)", "elpd_loo", 2),
        Line(f"largest gap of means to {reference} (sd)", "mean_distance"),
        Line(f"largest gap of sds to {reference} (sd)", "sd_distance"),
    ]
    return [line for line in wanted if any(line.show(row) != _MISSING for row in rows)]


def rich_tables(rows: Sequence[Row], reference: str | None, caption: str) -> list[Table]:
    """Tables of at most `WIDTH` columns where names allow; the last has the caption."""
    of = lines(rows, reference)
    *first, last = _blocks(rows, of)
    return [*(_rich_table(block, of, "") for block in first), _rich_table(last, of, caption)]


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


def printed(*tables: Table) -> str:
    """Tables as plain text, `WIDTH` columns wide or as wide as a name needs."""
    out, unbound = io.StringIO(), Console(width=10_000)
    width = max(WIDTH, *(unbound.measure(table).maximum for table in tables))
    Console(file=out, width=width).print(*tables)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def as_html(rows: Sequence[Row], reference: str | None, caption: str) -> str:
    """The table as notebooks show it, a column a method, and the caption below."""
    import pandas as pd  # with xarray it takes a second, which a fit need not wait for

    of = lines(rows, reference)
    shown = {row["method"]: [line.show(row) for line in of] for row in rows}
    table = pd.DataFrame(shown, index=[line.label for line in of]).to_html()
    return f"{table}<p>{html.escape(caption)}</p>"


# reference standard deviations within which latent means and standard deviations count as the same
NEAR = 0.25
SMALL_GAP = 0.1  # nats of a log evidence below which a difference is called small
MOST = 0.95  # share of the evidence that q's own draws have to meet where another mode was found
WASTEFUL = 0.5  # effective share of q's draws below which q is a poor approximation
ERRORS = 3  # standard errors beyond which two numbers are called different


def verdict(row: dict, reference: str | None, reference_error: float | None) -> str:
    """The sentences on one row of `Comparison.table`."""
    if row["result"] not in ("converged", "completed"):
        return f"{row['method']}: it ended as '{row['result']}'; do not use its numbers."
    if row["method"] == reference:
        known = reference_error is not None
        error = f"; their own error is about {reference_error:.2f} posterior sd" if known else ""
        return f"{row['method']}: its draws are the reference{error}."
    found = (_evidence(row), _latents(row, reference), _predictions(row, reference))
    return f"{row['method']}: {' '.join(s for s in found if s) or 'nothing here judges it.'}"


def _evidence(row) -> str | None:
    if row["truth"] is None:
        return None
    gap = row["log_evidence"] - row["truth"]
    side, error = "above" if gap > 0 else "below", row["truth_se"]
    figure = f"{abs(gap):.2f} nats {side} the importance-sampled truth ± {error:.2g}"
    if within := _within(gap, error):
        return f"Evidence: right {within} ({figure})."
    if abs(gap) <= SMALL_GAP:
        return f"Evidence: {figure}: more than its error, but small."
    factor = math.exp(min(abs(gap), 50.0))
    return (
        f"Evidence: {figure}; where it is compared with another method's or model's, the ratio is "
        f"off by a factor of {factor:.3g}."
    )


def _within(gap: float, error: float) -> str:
    """How many standard errors, rounded up, the difference is at most; nothing above `ERRORS`."""
    num = next((n for n in range(1, ERRORS + 1) if abs(gap) <= n * error), 0)
    return f"within {num} standard error{'s' * (num > 1)}" if num else ""


def _latents(row, reference) -> str | None:
    parts = [part for part in (_shape(row), _nearness(row, reference)) if part]
    return f"Latents: {'; '.join(parts)}." if parts else None


def _shape(row) -> str | None:
    if row["khat"] is None:
        return None
    if row.get("share") is not None and row["share"] < MOST:
        return (
            f"the Gaussian approximation has {100 * row['share']:.0f} % of the posterior, and the "
            "rest is in other modes: do not use its means and intervals"
        )
    figure = f"k-hat {row['khat']:.2f}, {100 * row['efficiency']:.0f} % of its draws count"
    if row["khat"] <= KHAT_LIMIT and row["efficiency"] >= WASTEFUL:
        return f"the Gaussian approximation is close to the posterior ({figure})"
    if row["khat"] <= KHAT_LIMIT or row["efficiency"] >= WASTEFUL:
        return f"the Gaussian approximation is usable but not exact ({figure})"
    return f"the Gaussian approximation is too far off for weights to correct it ({figure})"


def _nearness(row, reference) -> str | None:
    if row["mean_distance"] is None:
        return None
    mean, sd = row["mean_distance"], row["sd_distance"]
    figure = f"means differ from {reference} by up to {mean:.2f} sd and spreads by up to {sd:.2f}"
    if max(mean, sd) <= NEAR:
        return f"{figure}, which is small"
    return f"{figure}, which matters for intervals of single latents"


def _predictions(row, reference) -> str | None:
    gap, error = row.get("log_density_gap"), row.get("log_density_gap_se")
    if gap is None or error is None:
        return None
    figure = f"{abs(gap):.3f} ± {error:.2g} nats per test row"
    if within := _within(gap, error):
        return f"Predictions: equal to those of {reference} {within} ({figure})."
    how = "better" if gap > 0 else "worse"
    return f"Predictions: {how} than those of {reference} by {figure}, on these test rows."
