"""Every benchmark once at toy size, so that none rots; the history's lines read back; and its
picture.
"""

import contextlib
import importlib
import json
import math
import os
import pathlib
import re
import sys

import jax
import pytest

from tests.benchmarks import ask, first_answer, history, record, run
from tests.benchmarks.common import Row
from tests.benchmarks.peers import call

WITH_PEERS = {"sparse": "svgp", "deep": "deep", "first": "first"}
PEERS = [(part, peer) for part, kind in WITH_PEERS.items() for peer in call.NAMES[kind]]
RUN = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789",
    "machine": "a processor, 2 cores, cpu",
    "versions": {},
    "part": "evidence",
}


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No peer is installed."""
    monkeypatch.setenv("PPL_GP_PEERS", str(tmp_path))


def in_this_process(command, environment, timeout):
    """A program of `peers` in place of its own process: starting and tracing are all of its time at
    toy size.
    """
    before = sys.argv, list(sys.path), jax.config.jax_enable_x64
    try:
        sys.argv, sys.path = command[1:], [str(call.HERE), *sys.path]
        program = importlib.import_module(pathlib.Path(command[1]).stem)
        _, settings = program.tasks.read(command[2])
        # as the program does when it starts
        jax.config.update("jax_enable_x64", settings["dtype"] == "float64")
        program.tasks.main("ppl_gp", "toy", program.Engine)
    finally:
        sys.argv, sys.path = before[:2]
        jax.config.update("jax_enable_x64", before[2])
    return ""


def written():
    """What a benchmark may write: the page and the history's files."""
    files = [run.PAGE, *record.HISTORY.glob("*")]
    return {path: path.read_bytes() for path in files}


def kept_folder():
    """In place of a new folder for compiled functions: the suite's own, so that filling it takes no
    time.
    """
    return contextlib.nullcontext(os.environ["JAX_COMPILATION_CACHE_DIR"])


def check(rows):
    names = [row.what for row in rows]
    assert names and len(set(names)) == len(names)  # the history tells rows apart by their names
    assert all(row.unit and row.value is not None and math.isfinite(row.value) for row in rows), (
        rows
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", run.PARTS)
def test_a_benchmark_runs_at_toy_size_and_writes_nothing(part, alone, monkeypatch):
    if part in ("sparse", "deep"):  # the subprocess itself is run by "first"
        monkeypatch.setattr(call, "_call", in_this_process)
    monkeypatch.setattr(first_answer, "TemporaryDirectory", kept_folder)
    before = written()
    check(run.measure(part, toy=True))
    assert written() == before


@pytest.mark.slow
@pytest.mark.parametrize("part,peer", PEERS)
def test_a_benchmark_runs_beside_a_peer(part, peer, monkeypatch):
    kind = WITH_PEERS[part]
    if peer not in call.available(kind):
        pytest.skip(f"{peer} is not installed: make bench-peers")
    monkeypatch.setitem(call.NAMES, kind, (peer,))
    rows = run.measure(part, toy=True)
    check(rows)
    told = " ".join(f"{row.what} {row.figure}" for row in rows).lower()
    assert peer in told and "no peer installed" not in told


def test_a_peer_that_is_not_installed_is_named(alone, capsys, monkeypatch):
    monkeypatch.setattr(first_answer, "PEERS", {"gpflow": "GPflow"})
    assert not list(first_answer.rows(first_answer.TOY._replace(methods=())))
    assert "gpflow is not installed: make bench-peers" in capsys.readouterr().out


def test_a_line_of_the_history_reads_back(tmp_path):
    rows = [
        Row("a", "2.0 x", "at least 1 x", 2.0, "x"),
        Row("b", "failed", "reported", math.nan, "s"),
    ]
    line = record.entry("evidence", rows)
    record.append(line, tmp_path / "new")
    record.append(line | {"date": "1999-01-01T00:00:00+00:00"}, tmp_path / "new")
    runs = record.load(tmp_path / "new")["evidence"]
    assert [r["date"][:4] for r in runs] == ["1999", line["date"][:4]] and runs[1] == line
    assert runs[1]["rows"][0] == {
        "name": "a",
        "value": 2.0,
        "unit": "x",
        "figure": "2.0 x",
        "target": "at least 1 x",
    }
    assert runs[1]["rows"][1]["value"] is None
    assert {"commit", "machine", "versions"} <= set(line) and line["versions"][
        "jax"
    ] == jax.__version__


def test_a_line_that_is_no_json_is_named(tmp_path):
    (tmp_path / "cost.jsonl").write_text(json.dumps(RUN) + "\n{\n")
    with pytest.raises(ValueError, match="cost.jsonl, line 2"):
        record.load(tmp_path)


def test_the_commit_says_whether_the_tree_was_changed(monkeypatch):
    answers = {"rev-parse": "0123456789\n", "status": ""}
    monkeypatch.setattr(record, "_git", lambda *a: answers[a[0]])
    assert record.commit() == "0123456789"
    answers["status"] = " M ppl_gp/gp.py\n"
    assert record.commit() == "0123456789-dirty"


def runs(*values):
    """Runs of two rows; the second has a value in the last run alone."""
    last = len(values) - 1
    rows = [
        [{"name": "a", "value": v, "unit": "x", "figure": "", "target": "at least 2 x"}]
        for v in values
    ]
    rows[last].append({"name": "b", "value": 1.0, "unit": "s", "figure": "", "target": "reported"})
    rows[0].append({"name": "b", "value": None, "unit": "s", "figure": "", "target": "reported"})
    return {"evidence": [{**RUN, "rows": r} for r in rows]}


def test_every_number_is_drawn_in_its_runs_place():
    first, second = history.panels(runs(1.0, 3.0, 2.0))
    assert [(i, value) for i, value, _ in first.dots] == [(0, 1.0), (1, 3.0), (2, 2.0)]
    assert second.name == "b" and second.dots == [(2, 1.0, RUN["machine"])]


def test_the_picture_is_drawn(tmp_path):
    path = tmp_path / "history.png"
    assert history.draw(runs(1.0, 3.0), path) == 2
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="make bench"):
        history.draw({}, path)


@pytest.mark.parametrize(
    "values,axis", [([2.0], (0.0, 2.5)), ([-4.0, 2.0], (-5.0, 2.5)), ([0.0], (0.0, 1.0))]
)
def test_zero_and_every_value_are_on_the_axis(values, axis):
    assert history._range(values) == axis


def test_a_target_about_peers_is_none_without_one():
    ours, both = (
        {"ppl_gp": {"seconds": 0.002}},
        {"ppl_gp": {"seconds": 0.002}, "gpflow": {"seconds": 0.004}},
    )
    alone, beside = [
        ask.against_best(a, 1e3, "ms").row("a step", "at most 0.5") for a in (ours, both)
    ]
    assert (alone.value, alone.unit, alone.target) == (2.0, "ms", "none without a peer")
    assert (beside.value, beside.unit, beside.target) == (0.5, "of the best peer's", "at most 0.5")


@pytest.mark.parametrize(
    "target,wanted",
    [
        ("at most 8", ("most", 8.0)),
        ("at least 2 x", ("least", 2.0)),
        ("at most 1e-3", ("most", 1e-3)),
        ("reported", None),
    ],
)
def test_the_number_of_a_target(target, wanted):
    assert history.limit(target) == wanted


def test_a_table_goes_between_its_markers_alone(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text(
        "a\n<!-- first:start -->\nold\n<!-- first:end -->\n<!-- deep:start -->\nkept\n<!-- "
        "deep:end -->\n"
    )
    row = Row("what", "1.0 s", "at most 2 s", 1.0, "s")
    run.write_table(["first"], [row], page)
    assert (
        "| what | 1.0 s | at most 2 s |\n<!-- first:end -->\n<!-- deep:start -->\nkept"
        in page.read_text()
    )
    before = page.read_text()
    run.write_table(["cost"], [row], page)  # one part of a table that has more
    assert page.read_text() == before and "old" not in before


@pytest.mark.parametrize("marks", [*run.ALONE, "benchmarks"])
def test_the_page_has_every_table_once(marks):
    page = run.PAGE.read_text()
    (kept,) = re.findall(rf"<!-- {marks}:start -->(.*?)<!-- {marks}:end -->", page, re.DOTALL)
    assert "| what | measured | target |" in kept and kept.strip().startswith("Measured on")
