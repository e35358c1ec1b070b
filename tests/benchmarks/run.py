"""`make bench`: measure, print, write the tables into docs/benchmarks.md between their markers, and
a line into the history.
"""

import argparse
import datetime
import pathlib
import platform
import re

import jax

jax.config.update("jax_enable_x64", True)

from tests.benchmarks import (  # noqa: E402
    cost,
    deep,
    evidence,
    first_answer,
    mcmc,
    mean_field,
    memory,
    predictor,
    record,
    sklearn_peer,
    sparse,
)
from tests.benchmarks.common import Row  # noqa: E402

PAGE = record.ROOT / "docs" / "benchmarks.md"
PARTS = {
    "evidence": evidence,
    "sklearn": sklearn_peer,
    "mcmc": mcmc,
    "cost": cost,
    "memory": memory,
    "predictor": predictor,
    "mean_field": mean_field,
    "sparse": sparse,
    "deep": deep,
    "first": first_answer,
}  # each has `rows(size)`, and the sizes FULL and TOY
ALONE = ("sparse", "deep", "first")  # each has a table of its own
_IN_TURN = "Compiled and warm; each library in a process of its own, one after the other."
HOW = {
    "sparse": _IN_TURN,
    "deep": _IN_TURN,
    "first": "Each answer by fresh processes, one after the other.",
}


def heading(marks: str = "benchmarks") -> str:
    """When, where and how this table was measured."""
    how = (
        "Compiled and warm unless it says compile time; ratios are medians of pairs taken in "
        "turn in one process."
    )
    return (
        f"Measured on {datetime.date.today()} with {record.machine()}, float64, "
        f"Python {platform.python_version()}, JAX {jax.__version__}. {HOW.get(marks, how)}"
    )


def measure(part: str, toy: bool = False) -> list[Row]:
    """Every row of the part, printed as it comes."""
    module, rows = PARTS[part], []
    for row in module.rows(module.TOY if toy else module.FULL):
        rows.append(row)
        print(f"{row.what}: {row.figure} (target: {row.target})", flush=True)
    return rows


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    head = ["| what | measured | target |", "|---|---|---|"]
    return "\n".join(head + [f"| {r.what} | {r.figure} | {r.target} |" for r in rows])


def write_table(parts: list[str], rows: list[Row], page: pathlib.Path = PAGE) -> None:
    """Between the page's markers, if these parts together have a table there."""
    tables = {frozenset([part]): part for part in ALONE} | {
        frozenset(PARTS) - set(ALONE): "benchmarks"
    }
    if marks := tables.get(frozenset(parts)):
        marked = re.compile(rf"(<!-- {marks}:start -->).*?(<!-- {marks}:end -->)", re.S)
        new = f"{heading(marks)}\n\n{table(rows)}"
        page.write_text(marked.sub(lambda m: f"{m[1]}\n{new}\n{m[2]}", page.read_text()))


def main():
    """Run the chosen parts. Those in `ALONE`, each alone, and all the others together, rewrite
    their tables.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument(
        "--toy", action="store_true", help="once, at toy size, and nothing is written"
    )
    chosen = parser.parse_args()
    parts = chosen.parts or [part for part in PARTS if part not in ALONE]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    rows, at = [], record.commit()
    for part in parts:
        measured = measure(part, chosen.toy)
        rows += measured
        if not chosen.toy:
            record.append(record.entry(part, measured, at))
    if not chosen.toy:
        write_table(parts, rows)


if __name__ == "__main__":
    main()
