"""The history of the benchmarks: one JSON line a run and part, in `history/<part>.jsonl`."""

import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import subprocess

import jax

from tests.benchmarks.common import Row

ROOT = pathlib.Path(__file__).parents[2]
HISTORY = pathlib.Path(__file__).parent / "history"
# A run writes into these itself; they do not change what is measured.
WRITTEN = ("docs/benchmarks.md", "tests/benchmarks/history")
PACKAGES = ("ppl-gp", "jax", "jaxlib", "numpyro", "numpy", "scipy", "scikit-learn")


def machine() -> str:
    """Processor, cores and JAX's device."""
    info = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    name = found.group(1) if found else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {jax.devices()[0].platform}"


def commit() -> str:
    """The checked-out commit's short name, with "-dirty" where the tree differs from it; "unknown"
    without git.
    """
    try:
        name = _git("rev-parse", "--short=10", "HEAD").strip()
        changed = _git("status", "--porcelain", "--", ".", *(f":!{path}" for path in WRITTEN))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-dirty" if changed.strip() else name


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def entry(part: str, rows: list[Row], at: str | None = None) -> dict:
    """What a run of this part leaves: when, of which commit, where, with what, and every row.

    `at`: the commit, looked up if `None`; a run that takes long looks before it starts.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit() if at is None else at,
        "machine": machine(),
        "versions": {"python": platform.python_version()}
        | {p: importlib.metadata.version(p) for p in PACKAGES},
        "part": part,
        "rows": [_row(r) for r in rows],
    }


def _row(row: Row) -> dict:
    """Names as the history has them; a value that is no number is none."""
    value = None if row.value is None or not math.isfinite(row.value) else float(row.value)
    return {
        "name": row.what,
        "value": value,
        "unit": row.unit,
        "figure": row.figure,
        "target": row.target,
    }


def append(line: dict, folder: pathlib.Path = HISTORY) -> pathlib.Path:
    """One more line in the part's file, which is made where it is not there; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{line['part']}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
    return path


def load(folder: pathlib.Path = HISTORY) -> dict[str, list[dict]]:
    """{part: its runs, oldest first}, of every file in the folder.

    Raises `ValueError` with file and line where a line is no JSON.
    """
    return {path.stem: _lines(path) for path in sorted(folder.glob("*.jsonl"))}


def _lines(path: pathlib.Path) -> list[dict]:
    runs = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            runs.append(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name}, line {number}, is no JSON: {error}") from error
    return sorted(runs, key=lambda run: run["date"])
