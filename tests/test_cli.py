"""The command line as a user meets it: files written, one line and exit code 2 for an error, Ctrl-C keeps what was done."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import xarray
from small_fits import classification
from typer.testing import CliRunner

import ppl_gp as pg
from ppl_gp.cli import app
from ppl_gp.cli import run as cli_run
from ppl_gp.cli.data import prepare, read_csv
from ppl_gp.cli.demo import breast_cancer, digits_3_5, principal_components
from ppl_gp.cli.model_path import load_model
from ppl_gp.errors import DataError, ModelError

ROOT = Path(__file__).parents[1]
MODEL = f"{ROOT / 'models' / 'classification.py'}:binary"
X, y, _ = classification()


def write(path, y, header="width,height,kind"):
    lines = [f"{a:.17g},{b:.17g},{c}" for (a, b), c in zip(X, y, strict=True)]
    path.write_text("\n".join([*([header] if header else []), *lines]) + "\n")
    return str(path)


@pytest.fixture
def data(tmp_path):
    """25 rows with two inputs and the words no and yes."""
    return write(tmp_path / "data.csv", np.where(y == 1, "yes", "no"))


def run(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_check(data):
    result = run("check", MODEL, data, "--target", "kind")
    assert result.exit_code == 0
    assert "ok  GP sites" in result.stdout and "LocalBound" in result.stdout
    assert "no is read as 0, yes as 1" in result.stderr


def test_check_of_a_model_that_does_not_fit(data, tmp_path):
    bad = write(tmp_path / "three.csv", y + 1.5 * (np.arange(25) == 3))
    result = run("check", MODEL, bad, "--target", "kind")
    assert result.exit_code == 1 and "outside the support" in result.stdout


def test_fit_then_predict(data, tmp_path):
    """What is predicted from the saved fit is what the fit predicts, inputs scaled as in training."""
    out = tmp_path / "out"
    result = run("fit", MODEL, data, "--target", "kind", "--methods", "laplace", "--out", out)
    assert result.exit_code == 0, result.output
    tree = xarray.open_datatree(out / "laplace.nc", engine="h5netcdf")
    assert tree.posterior.sizes["draw"] == 1000 and "log_likelihood" in tree.children
    new = write(tmp_path / "new.csv", y)
    saved, predictions = out / "laplace.fit", tmp_path / "p.csv"
    result = run("predict", MODEL, new, "--fit", saved, "--out", predictions)
    assert result.exit_code == 0, result.output
    model, scaled = load_model(MODEL), (X - X.mean(0)) / X.std(0)
    want = pg.fit(model, pg.Laplace(), 0, scaled, y=y).predict(scaled)
    found = rows(predictions)
    assert list(found[0]) == ["f_mean", "f_sd", "p(no)", "p(yes)"] and len(found) == 25
    np.testing.assert_allclose([float(r["p(yes)"]) for r in found], want.probs, rtol=1e-6)
    np.testing.assert_allclose([float(r["f_sd"]) ** 2 for r in found], want.f_variance, rtol=1e-6)


def test_compare(data, tmp_path):
    out = tmp_path / "out"
    result = run(
        "compare", MODEL, data, "--target", "kind", "--methods", "laplace,ep", "--out", out, "--test-fraction", 0.28
    )
    assert result.exit_code == 0, result.output
    table = rows(out / "table.csv")
    assert [r["method"] for r in table] == ["laplace", "ep"]
    assert "test log density" in result.stdout and "ep: " in result.stdout and "trust" in result.stdout
    pictures = {p.name for p in out.glob("*.png")}
    assert pictures == {"evidence.png", "forest.png", "calibration.png", "surface.png"}
    assert all((out / name).stat().st_size > 5000 for name in pictures)
    assert {p.name for p in out.glob("*.nc")} == {"laplace.nc", "ep.nc"} and not list(out.glob("*.fit"))


def test_a_method_that_does_not_fit_is_told_and_skipped(data, tmp_path):
    out = tmp_path / "out"
    args = ("--target", "kind", "--set", "link=probit", "--methods", "bound,laplace", "--out", out)
    result = run("fit", MODEL, data, *args)
    assert result.exit_code == 2
    assert "bound: LocalBound() needs one observed Bernoulli" in result.stderr
    assert (out / "laplace.fit").exists() and not (out / "bound.fit").exists()


@pytest.mark.parametrize(
    "args, words",
    [
        (("MODEL", "DATA", "--target", "colour"), "no column 'colour'"),
        (("MODEL", "missing.csv", "--target", "kind"), "missing.csv"),
        (("MODEL", "DATA", "--target", "kind", "--methods", "laplace,magic"), "magic: give some of laplace"),
        (("MODEL", "DATA", "--target", "kind", "--set", "link=cauchit"), "link='cauchit'"),
        (("MODEL", "DATA", "--target", "kind", "--set", "probit"), "NAME=VALUE"),
        (("models.binary", "DATA", "--target", "kind"), "MODEL.py:function"),
        (("nowhere.py:binary", "DATA", "--target", "kind"), "no file 'nowhere.py'"),
    ],
)
def test_errors_are_one_line(args, words, data, tmp_path):
    given = {"MODEL": MODEL, "DATA": data}
    result = run("fit", *(given.get(a, a) for a in args), "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert words in result.stderr and "Traceback" not in result.output
    assert len([line for line in result.stderr.splitlines() if "is read as" not in line]) == 1


def test_predict_errors(data, tmp_path):
    (tmp_path / "bad.fit").write_bytes(b"PK not a fit")
    result = run("predict", MODEL, data, "--fit", tmp_path / "bad.fit")
    assert result.exit_code == 2 and "preparation.json" in result.stderr
    prepare(read_csv(data), "kind", True).save(tmp_path / "preparation.json")
    result = run("predict", MODEL, data, "--fit", tmp_path / "bad.fit")
    assert result.exit_code == 2 and "bad.fit" in result.stderr


def test_interrupted_comparison_keeps_what_was_finished(data, tmp_path, monkeypatch):
    """Ctrl-C while the second method warms up: the first one's row and posterior stand, exit code 130."""
    real = cli_run.fit

    def interrupted(model, method, *args, **kwargs):
        if isinstance(method, pg.NUTS):
            raise KeyboardInterrupt
        return real(model, method, *args, **kwargs)

    monkeypatch.setattr(cli_run, "fit", interrupted)
    out = tmp_path / "out"
    result = run("compare", MODEL, data, "--target", "kind", "--methods", "laplace,nuts,ep", "--out", out)
    assert result.exit_code == 130 and "interrupted during nuts" in result.stderr
    assert [r["method"] for r in rows(out / "table.csv")] == ["laplace"]
    assert {p.name for p in out.glob("*.nc")} == {"laplace.nc"}


@pytest.mark.slow
def test_signal(data, tmp_path):
    """A real SIGINT during a long chain."""
    out = tmp_path / "out"
    code = "from ppl_gp.cli import main; main()"
    args = ["compare", MODEL, data, "--target", "kind", "--methods", "laplace,nuts", "--num-warmup", "20"]
    command = [sys.executable, "-c", code, *args, "--num-samples", "1000000", "--out", str(out)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while not (out / "table.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "what was finished is kept" in err and "Traceback" not in err
    assert rows(out / "table.csv")[0]["method"] == "laplace"


def test_reading_csv(tmp_path):
    plain = prepare(read_csv(write(tmp_path / "a.csv", y, header=None)), "x2", False)
    assert (plain.target, plain.inputs, plain.labels) == ("x2", ["x0", "x1"], None)
    columns = read_csv(write(tmp_path / "b.csv", 2 * y - 1))
    signs = prepare(columns, "kind", True)
    assert signs.labels == ["-1", "1"] and np.array_equal(signs.y(columns), y)
    np.testing.assert_allclose(signs.X(columns).std(0), 1.0, rtol=1e-12)
    reals = prepare(read_csv(write(tmp_path / "c.csv", y + 0.25 * np.arange(25))), "kind", True)
    assert reals.labels is None
    kept = tmp_path / "preparation.json"
    signs.save(kept)
    assert type(signs).load(kept) == signs and json.loads(kept.read_text())["target"] == "kind"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is empty"),
        ("a,b\n", "no rows"),
        ("a,b\n1,2\n3\n", "data row 2 has 1 cells"),
        ("a,kind\n1,0\nred,1\n", "column 'a' has 'red' in data row 2"),
        ("a,kind\n1,no\n2,yes\n3,maybe\n", "3 values such as 'maybe'"),
        ("kind\n1\n0\n", "no inputs"),
    ],
)
def test_csv_that_cannot_be_used(text, words, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        prepare(read_csv(path), "kind", True)


def test_unknown_label(tmp_path, data):
    preparation = prepare(read_csv(data), "kind", True)
    other = read_csv(write(tmp_path / "new.csv", ["perhaps"] * 25))
    with pytest.raises(DataError, match="'perhaps'.*'no', 'yes'"):
        preparation.y(other)


def test_model_files(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import helper_of_mine\n\ndef model(X, y=None):\n    return helper_of_mine.VALUE\n")
    with pytest.raises(ModelError, match="No module named 'helper_of_mine'"):
        load_model(f"{path}:model")
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 3\n")
    assert load_model(f"{path}:model")(None) == 3
    with pytest.raises(ModelError, match=r"no function 'binary'; it defines \['model'\]"):
        load_model(f"{path}:binary")


def test_demo_data():
    """The data of the demo: sizes, both classes, components of unit variance found on the training rows only."""
    for data, size in ((digits_3_5(0), 365), (breast_cancer(0), 569)):
        assert len(data.X) == len(data.y) == size and set(data.y) == {0, 1}
        Z = principal_components(data.X, 2, 150)
        np.testing.assert_allclose(Z[:150].std(0), 1.0, rtol=1e-10)
        np.testing.assert_allclose(np.corrcoef(Z[:150].T)[0, 1], 0.0, atol=1e-10)
        changed = np.concatenate([data.X[:150], 2 * data.X[150:]])
        np.testing.assert_allclose(principal_components(changed, 2, 150)[:150], Z[:150])


@pytest.mark.slow
def test_demo(tmp_path):
    """The whole demo on few rows and draws: every file, a sentence for every method."""
    args = ("--num-train", 30, "--num-warmup", 50, "--num-samples", 50, "--out", tmp_path)
    result = run("demo", "--model", MODEL, *args)
    assert result.exit_code == 0, result.output
    for name in ("digits_3_5", "breast_cancer"):
        files = {p.name for p in (tmp_path / name).iterdir()}
        assert files >= {
            "table.csv",
            "nuts.nc",
            "slice.nc",
            "evidence.png",
            "forest.png",
            "calibration.png",
            "surface.png",
        }
        assert {row["method"] for row in rows(tmp_path / name / "table.csv")} == {
            "laplace", "ep", "vi", "bound", "svgp", "sparse-nuts", "nuts", "slice"
        }  # fmt: skip
    assert result.stdout.count("What can be trusted") == 2 and result.stdout.count("\n- ep: ") == 2
