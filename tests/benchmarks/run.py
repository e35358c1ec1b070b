"""`make bench`: measure everything in one run, print the table, and write it into the README between its markers."""

import argparse
import datetime
import os
import pathlib
import platform
import re

import jax

jax.config.update("jax_enable_x64", True)

from tests.benchmarks import cost, deep, evidence, mcmc, sklearn_peer, sparse  # noqa: E402

README = pathlib.Path(__file__).parents[2] / "README.md"
PARTS = {
    "evidence": evidence.rows,
    "sklearn": sklearn_peer.rows,
    "mcmc": mcmc.rows,
    "cost": cost.rows,
    "sparse": sparse.rows,
    "deep": deep.rows,
}
ALONE = ("sparse", "deep")  # each has a table of its own in the README


def machine() -> str:
    """Processor, cores and versions, in one sentence."""
    info = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    name = found.group(1) if found else platform.processor() or platform.machine()
    return (
        f"Measured on {datetime.date.today()} with {name}, {os.cpu_count()} cores, {jax.devices()[0].platform}, float64, "
        f"Python {platform.python_version()}, JAX {jax.__version__}. Compiled and warm unless it says compile time; "
        "ratios are medians of pairs taken in turn in one process."
    )


def main():
    """Run the chosen parts. `sparse` or `deep` alone, and all the others together, rewrite their tables in the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all by default")
    chosen = parser.parse_args().parts or [part for part in PARTS if part not in ALONE]
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    rows = []
    for part in chosen:
        for row in PARTS[part]():
            rows.append(row)
            print(f"{row.what}: {row.figure} (target: {row.target})", flush=True)
    lines = ["| what | measured | target |", "|---|---|---|"] + [
        f"| {r.what} | {r.figure} | {r.target} |" for r in rows
    ]
    table = machine() + "\n\n" + "\n".join(lines)
    tables = {frozenset([part]): part for part in ALONE} | {frozenset(PARTS) - set(ALONE): "benchmarks"}
    if marks := tables.get(frozenset(chosen)):
        marked = re.compile(rf"(<!-- {marks}:start -->).*?(<!-- {marks}:end -->)", re.S)
        README.write_text(marked.sub(lambda m: f"{m[1]}\n{table}\n{m[2]}", README.read_text()))


if __name__ == "__main__":
    main()
