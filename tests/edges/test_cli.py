"""The command line as a user meets it: files written, one line and exit code 2 for an error, what
Ctrl-C keeps.
"""

import csv
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray
from scipy.stats import norm
from small_fits import classification, made_fit
from typer.testing import CliRunner

import ppl_gp as pg
from models.regression import regression
from ppl_gp.cli import app
from ppl_gp.cli import demo as pictures
from ppl_gp.cli import run as cli_run
from ppl_gp.cli.app import write_predictions
from ppl_gp.cli.data import Preparation, prepare
from ppl_gp.cli.demo import (
    breast_cancer,
    digits_3_5,
    principal_components,
    require_drawable,
    standardised,
)
from ppl_gp.cli.problem import load_model, num_outcomes, parse_settings, read_problem
from ppl_gp.cli.run import Problem
from ppl_gp.cli.tables import read_csv, read_table
from ppl_gp.errors import DataError, ModelError
from ppl_gp.results.predict.prediction import Prediction

ROOT = Path(__file__).parents[2]
MODEL = f"{ROOT / 'models' / 'classification.py'}:binary"
COUNTS = f"{ROOT / 'models' / 'counts.py'}:poisson"
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


@pytest.mark.slow
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
    """What is predicted from the saved fit is what the fit predicts, inputs scaled as in
    training.
    """
    out = tmp_path / "out"
    options = ("--target", "kind", "--methods", "laplace", "--out", out)
    result = run("fit", MODEL, data, *options, "--plot", tmp_path / "fit.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "fit.png").stat().st_size > 5000
    tree = xarray.open_datatree(out / "laplace.nc", engine="h5netcdf")
    assert tree.constant_data["X_dim_1"].values.tolist() == ["width", "height"]
    assert list(tree.observed_data["y"].attrs["levels"]) == ["no", "yes"]
    assert tree.posterior.sizes["draw"] == 1000 and "log_likelihood" in tree.children
    new = write(tmp_path / "new.csv", y)
    saved, predictions = out / "laplace.fit", tmp_path / "p.csv"
    result = run("predict", MODEL, new, "--fit", saved, "--out", predictions)
    assert result.exit_code == 0, result.output
    model, scaled = load_model(MODEL), (X - X.mean(0)) / X.std(0)
    assert pg.load(saved, model).names["X"].columns == ("width", "height")
    want = pg.fit(model, pg.Laplace(), 0, scaled, y=y).predict(scaled)
    found = rows(predictions)
    assert list(found[0]) == ["row", "width", "height", "f_mean", "f_sd", "p(no)", "p(yes)"]
    assert [r["row"] for r in found] == [str(i + 1) for i in range(25)]
    np.testing.assert_array_equal([[float(r[k]) for k in ("width", "height")] for r in found], X)
    np.testing.assert_allclose([float(r["p(yes)"]) for r in found], want.probs, rtol=1e-6)
    np.testing.assert_allclose([float(r["f_sd"]) ** 2 for r in found], want.f_variance, rtol=1e-6)


@pytest.mark.slow
def test_compare(data, tmp_path):
    out = tmp_path / "out"
    result = run(
        "compare",
        MODEL,
        data,
        "--target",
        "kind",
        "--methods",
        "laplace,ep",
        "--out",
        out,
        "--test-fraction",
        0.28,
    )
    assert result.exit_code == 0, result.output
    table = rows(out / "table.csv")
    assert [r["method"] for r in table] == ["laplace", "ep"]
    assert (
        "test log density" in result.stdout
        and "ep: Evidence: " in result.stdout
        and "Latents: " in result.stdout
    )
    pictures = {p.name for p in out.glob("*.png")}
    assert pictures == {"evidence.png", "forest.png", "calibration.png", "surface.png"}
    assert all((out / name).stat().st_size > 5000 for name in pictures)
    assert {p.name for p in out.glob("*.nc")} == {"laplace.nc", "ep.nc"} and not list(
        out.glob("*.fit")
    )


@pytest.mark.slow
def test_a_method_that_does_not_fit_is_told_and_skipped(data, tmp_path):
    out = tmp_path / "out"
    args = ("--target", "kind", "--set", "link=probit", "--methods", "bound,laplace", "--out", out)
    result = run("fit", MODEL, data, *args)
    assert result.exit_code == 2
    assert "bound: LocalBound() needs one observed Bernoulli" in result.stderr
    assert (out / "laplace.fit").exists() and not (out / "bound.fit").exists()


@pytest.mark.one_case
@pytest.mark.parametrize(
    "args, words",
    [
        (("MODEL", "DATA", "--target", "colour"), "no column 'colour'"),
        (("MODEL", "missing.csv", "--target", "kind"), "missing.csv"),
        (
            ("MODEL", "DATA", "--target", "kind", "--methods", "laplace,magic"),
            "magic: give some of laplace",
        ),
        (("MODEL", "DATA", "--target", "kind", "--set", "link=cauchit"), "link='cauchit'"),
        (("MODEL", "DATA", "--target", "kind", "--set", "probit"), "NAME=VALUE"),
        (
            ("MODEL", "DATA", "--target", "kind", "--set", "nonsense=3"),
            r"no option 'nonsense'; it has ['link', 'ard', 'lengthscale_prior']",
        ),
        (
            ("MODEL", "DATA", "--target", "kind", "--set", "throw=3"),
            "'throw' is an argument of the library's own",
        ),
        (
            ("MODEL", "DATA", "--target", "kind", "--set", "link=probit", "--set", "link=logit"),
            "given twice",
        ),
        (
            ("COUNTS", "DATA", "--target", "kind"),
            "no variable with such outcomes; give the model's number of classes",
        ),
        (
            ("COUNTS", "NUMBERS", "--target", "kind", "--set", "exposure=much"),
            "does not run on X (25, 2)",
        ),
        (("models.binary", "DATA", "--target", "kind"), "MODEL.py:function"),
        (("nowhere.py:binary", "DATA", "--target", "kind"), "no file 'nowhere.py'"),
    ],
)
def test_errors_are_one_line(args, words, data, tmp_path):
    numbers = write(tmp_path / "numbers.csv", y)
    given = {"MODEL": MODEL, "COUNTS": COUNTS, "DATA": data, "NUMBERS": numbers}
    result = run("fit", *(given.get(a, a) for a in args), "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert words in result.stderr and "Traceback" not in result.output
    assert len([line for line in result.stderr.splitlines() if "is read as" not in line]) == 1


def test_a_failed_run_leaves_an_earlier_ones_folder_as_it_was(data, tmp_path):
    out, three = tmp_path / "out", write(tmp_path / "labels.csv", [7, *y[1:]])
    out.mkdir()
    (out / "preparation.json").write_text("earlier")
    result = run("fit", MODEL, three, "--target", "kind", "--methods", "laplace", "--out", out)
    assert result.exit_code == 2 and "support" in result.stderr
    assert [p.name for p in out.iterdir()] == ["preparation.json"]
    assert (out / "preparation.json").read_text() == "earlier"


def test_the_version_is_told():
    result = run("--version")
    assert result.exit_code == 0 and result.stdout.strip() == f"ppl-gp {pg.__version__}"


def test_a_file_of_any_bytes_is_one_line(tmp_path):
    for i, content in enumerate((bytes(range(256)), b'a,"b\rc\r\n\xff,1', b"a\rb,c\xff")):
        (tmp_path / f"{i}.csv").write_bytes(content)
        result = run("check", MODEL, tmp_path / f"{i}.csv", "--target", "b")
        assert result.exit_code == 2 and f"{i}.csv" in result.stderr
        assert isinstance(result.exception, SystemExit) and "Traceback" not in result.output


BY_WORDS = """
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def as_distance(X, y=None, used=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def as_slope(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X[:, 0]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + X @ b, 0.5), obs=y)


def as_index(X, y=None):
    u = numpyro.sample("u", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X[:, 0]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[X[:, 1].astype(int)], 0.5), obs=y)


def as_label(X, y=None):
    u = numpyro.sample("u", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X[:, :1]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + u * (X[:, 1] == 1.0), 0.5), obs=y)
"""


@pytest.mark.parametrize("name", ["as_distance", "as_slope", "as_index", "as_label"])
def test_words_are_no_numbers(name, tmp_path):
    """A column of words is an index or a comparison; as a number it would order the alphabet."""
    model, path = tmp_path / "wards.py", tmp_path / "wards.csv"
    model.write_text(BY_WORDS)
    path.write_text("age,ward,y\n" + "".join(f"{i},{'aaab'[i % 4]},{i % 5}\n" for i in range(12)))
    read = functools.partial(read_problem, f"{model}:{name}", path, "y", True, 0.0, 0, settings=[])
    if name in ("as_index", "as_label"):
        assert read()[0].X.shape == (12, 2)
        return
    with pytest.raises(DataError, match=r"column 'ward' holds words.*u\[X\[:, 1\].astype\(int\)\]"):
        read()


def test_a_picture_shows_the_data_and_names_the_predictor(tmp_path, monkeypatch):
    """Of numbers y with its points; of two outcomes the function by its name. Counts of 0 and 1
    were taken for classes.
    """
    shown = []

    def band(fits, X, y, **how):
        shown.append(how)
        raise DataError("seen")

    monkeypatch.setattr(pictures.slices, "plot_predictions", band)

    def model(X, kind, y=None):
        eta = numpyro.sample("eta", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", kind(eta), obs=y)

    x = np.zeros((2, 1))
    for kind, observed in (
        (lambda f: dist.Normal(f, 1.0), True),
        (lambda f: dist.Poisson(jnp.exp(f)), True),
        (lambda f: dist.Bernoulli(logits=f), False),
    ):
        own, how = functools.partial(model, kind=kind), {"observed": observed}
        fit = made_fit(own, {}, x, y=np.array([0, 1]))
        problem = Problem(own, x, np.array([0, 1]), np.zeros((0, 1)), np.zeros(0))
        with pytest.raises(DataError, match="seen"):
            pictures.write_picture(
                tmp_path / "p.png", {"laplace": fit}, problem, Preparation("y", ["x"], [0.0], [1.0])
            )
        assert shown.pop() == {**how, "flabel": "eta"}


@pytest.mark.slow
def test_three_words_are_three_classes(tmp_path):
    """From the file to p(word) of each row, by the repository's model."""
    model, path, out = (
        f"{ROOT / 'models' / 'multiclass.py'}:multiclass",
        tmp_path / "a.csv",
        tmp_path,
    )
    write(path, np.array(["red", "green", "blue"])[np.arange(25) % 3], "x1,x2,colour")
    result = run("fit", model, path, "--target", "colour", "--methods", "laplace", "--out", out)
    assert result.exit_code == 0, result.output
    assert "blue is read as 0, green as 1, red as 2" in result.stderr
    saved = ["--fit", out / "laplace.fit", "--out", out / "p.csv"]
    result = run("predict", model, path, *saved)
    assert result.exit_code == 0, result.output
    found = rows(out / "p.csv")
    assert list(found[0]) == ["row", "x1", "x2", "p(blue)", "p(green)", "p(red)"]
    total = [sum(float(r[f"p({k})"]) for k in ("blue", "green", "red")) for r in found]
    np.testing.assert_allclose(total, 1.0, atol=1e-6)


def test_predictions_of_numbers_have_quantiles(tmp_path):
    """Of y; and an input that is called as an output is keeps its name apart."""
    path = tmp_path / "p.csv"
    table = tmp_path / "t.csv"
    table.write_text("mean,y\n" + "".join(f"{i},{i % 3}\n" for i in range(4)))
    columns = read_csv(table)
    plain = np.arange(4.0)
    found = Prediction(
        f_mean=plain,
        f_variance=plain,
        probs=None,
        counts=False,
        mean=plain,
        variance=plain**2,
        quantiles=np.stack([plain - 1, plain, plain + 1]),
    )
    write_predictions(path, found, prepare(columns, "y", False), columns, (0.025, 0.5, 0.975))
    first = rows(path)[3]
    assert list(first) == [
        "row",
        "mean (input)",
        "f_mean",
        "f_sd",
        "mean",
        "sd",
        "y_0.025",
        "y_0.5",
        "y_0.975",
    ]
    assert [float(x) for x in first.values()] == [4, 3, 3, 3**0.5, 3, 3, 2, 3, 4]


def test_predict_takes_the_levels_of_quantiles(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("x,y\n" + "".join(f"{i},{i % 4}\n" for i in range(6)))
    model, out = f"{ROOT / 'models' / 'regression.py'}:regression", tmp_path / "out"
    assert run("fit", model, table, "--target", "y", "--out", out).exit_code == 0
    args = ("--fit", out / "ep.fit", "--out", tmp_path / "p.csv", "--quantiles", "0.2,0.5")
    assert run("predict", model, table, *args).exit_code == 0
    found = rows(tmp_path / "p.csv")
    assert [k for k in found[0] if k.startswith("y_")] == ["y_0.2", "y_0.5"]
    mean, sd = (np.array([float(r[k]) for r in found]) for k in ("mean", "sd"))
    want = [norm.ppf(p, mean, sd) for p in (0.2, 0.5)]
    got = [[float(r[k]) for r in found] for k in ("y_0.2", "y_0.5")]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_predict_errors(data, tmp_path):
    result = run("predict", MODEL, data, "--fit", tmp_path / "none.fit")
    assert result.exit_code == 2 and "none.fit is no file" in result.stderr
    (tmp_path / "bad.fit").write_bytes(b"PK not a fit")
    result = run("predict", MODEL, data, "--fit", tmp_path / "bad.fit")
    assert result.exit_code == 2 and "preparation.json" in result.stderr
    prepare(read_csv(data), "kind", True).save(tmp_path / "preparation.json")
    result = run("predict", MODEL, data, "--fit", tmp_path / "bad.fit")
    assert result.exit_code == 2 and "bad.fit" in result.stderr
    result = run("predict", MODEL, data, "--fit", tmp_path / "bad.fit", "--quantiles", "0.1;0.9")
    assert result.exit_code == 2 and "--quantiles 0.1;0.9: give levels" in result.stderr
    for content in (
        "[]",
        "{}",
        '{"target": "y", "inputs": ["a"], "shift": [0], "scale": [0]}',
        "\u00e9",
    ):
        (tmp_path / "preparation.json").write_bytes(content.encode("latin-1"))
        result = run("predict", MODEL, data, "--fit", tmp_path / "bad.fit")
        assert result.exit_code == 2 and "preparation.json does not hold" in result.stderr


def test_predict_refuses_another_model_and_another_run(data, tmp_path):
    """A fit is told from one of another model, and from one of other data that a later run put
    beside it.
    """
    out = tmp_path / "out"
    assert (
        run("fit", MODEL, data, "--target", "kind", "--methods", "laplace", "--out", out).exit_code
        == 0
    )
    result = run("predict", COUNTS, data, "--fit", out / "laplace.fit", "--out", tmp_path / "p.csv")
    assert (
        result.exit_code == 2
        and "was saved from another model" in result.stderr
        and "Traceback" not in result.output
    )
    # as written by an older version: not told
    prepare(read_csv(data), "kind", False).save(out / "preparation.json")
    assert (
        run(
            "predict", MODEL, data, "--fit", out / "laplace.fit", "--out", tmp_path / "p.csv"
        ).exit_code
        == 0
    )
    later = Preparation(
        "kind", ["width", "height"], [0.0, 0.0], [1.0, 1.0], ["no", "yes"], "of other inputs"
    )
    later.save(out / "preparation.json")
    result = run("predict", MODEL, data, "--fit", out / "laplace.fit", "--out", tmp_path / "p.csv")
    assert result.exit_code == 2 and "fitted to other inputs" in result.stderr


def test_predict_refuses_the_labels_of_another_target(data, tmp_path):
    """Two runs on the same inputs into one folder: the digest of the inputs is the same."""
    out = tmp_path / "out"
    fit = ("fit", MODEL, data, "--target", "kind", "--methods", "laplace", "--out", out)
    assert run(*fit).exit_code == 0
    predict = ("predict", MODEL, data, "--fit", out / "laplace.fit", "--out", tmp_path / "p.csv")
    assert run(*predict).exit_code == 0
    kept = out / "preparation.json"
    kept.write_text(kept.read_text().replace('"yes"', '"sick"').replace('"no"', '"healthy"'))
    result = run(*predict)
    assert result.exit_code == 2 and "('no', 'yes')" in result.stderr
    assert "('healthy', 'sick')" in result.stderr and "folder of its own" in result.stderr


@pytest.mark.slow
def test_whole_numbers_that_may_be_codes_are_told(tmp_path):
    """And measurements, which are no codes, are not."""
    path = tmp_path / "codes.csv"
    lines = [f"{a:.3f},{i % 4},{i},{c}" for i, ((a, _), c) in enumerate(zip(X, y, strict=True))]
    path.write_text("\n".join(["width,ward,day,kind", *lines]))
    result = run("check", MODEL, path, "--target", "kind")
    assert "'ward': 4 whole numbers (0, 1, 2, 3 ...), shifted and scaled" in result.stderr
    assert "'day'" not in result.stderr and "'width'" not in result.stderr
    raw = run("check", MODEL, path, "--target", "kind", "--no-standardise")
    assert "whole numbers" not in raw.stderr


@pytest.mark.slow
def test_interrupted_comparison_keeps_what_was_finished(data, tmp_path, monkeypatch):
    """Ctrl-C while the second method warms up: the first one's row and posterior stand, exit code
    130.
    """
    real = cli_run.fit

    def interrupted(model, method, *args, **kwargs):
        if isinstance(method, pg.NUTS):
            raise KeyboardInterrupt
        return real(model, method, *args, **kwargs)

    monkeypatch.setattr(cli_run, "fit", interrupted)
    out = tmp_path / "out"
    result = run(
        "compare", MODEL, data, "--target", "kind", "--methods", "laplace,nuts,ep", "--out", out
    )
    assert result.exit_code == 130 and "interrupted during nuts" in result.stderr
    assert [r["method"] for r in rows(out / "table.csv")] == ["laplace"]
    assert {p.name for p in out.glob("*.nc")} == {"laplace.nc"}


@pytest.mark.slow
def test_signal(data, tmp_path):
    """A real SIGINT during a long chain."""
    out = tmp_path / "out"
    # A shell that put the suite into the background has told its children to ignore the signal.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heard}; from ppl_gp.cli import main; main()"
    args = [
        "compare",
        MODEL,
        data,
        "--target",
        "kind",
        "--methods",
        "laplace,nuts",
        "--num-warmup",
        "20",
    ]
    command = [sys.executable, "-c", code, *args, "--num-samples", "1000000", "--out", str(out)]
    with open(tmp_path / "said", "w") as said:  # a pipe that nobody reads would fill and block
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=said, stderr=said)
        deadline = time.monotonic() + 300
        while not (out / "table.csv").exists() and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(2.0)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=300)
    err = (tmp_path / "said").read_text()
    assert (
        process.returncode == 130 and "what was finished is kept" in err and "Traceback" not in err
    )
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


@pytest.mark.parametrize(
    "content, words",
    [
        (b"x,x,kind\n1,2,0\n3,4,1\n", r"line 1: the columns \[1, 2\] are all named 'x'"),
        (b"x,kind,kind\n1,0,0\n3,1,1\n", r"columns \[2, 3\] are all named 'kind'"),
        (b",x,kind\n0,1,0\n1,3,1\n", "column 1 is named '', as pandas.*index=False"),
        (b"Unnamed: 0,x,kind\n0,1,0\n1,3,1\n", "column 1 is named 'Unnamed: 0'"),
        (b"x,kind\n1,0\nnan,1\n", "line 3: column 'x' has 'nan' in data row 2; fill it in"),
        (b"x,z,kind\n1,2,0\n\n1,,1\n", "line 4: column 'z' has '' in data row 2; fill it in"),
        (b"x,kind\n1,0\n1_000,1\n", "line 3: column 'x' has '1_000'.*plain finite number"),
        (b'x,kind\n1,0\n"1,000",1\n', "line 3: column 'x' has '1,000'.*plain finite number"),
        (b"x,kind\n1,0\ninf,1\n", "column 'x' has 'inf'"),
        (b"x,kind\n1,0\n1e999,1\n", "column 'x' has '1e999'.*beyond float64"),
        (b"x,kind\n1e308,0\n-1e308,1\n", "column 'x' has mean.*nothing can be scaled"),
        (b"x,kind\n1,1\n2,nan\n", "line 3: column 'kind' has 'nan'.*fill it in"),
        (b"x,kind\n1,yes\n2,\n", "line 3: column 'kind' has ''.*fill it in"),
        (b"x,kind\n1,yes\n2,NA\n", "column 'kind' has 'NA'"),
        (
            b'x,kind\n1,"1,000"\n2,"2,000"\n',
            "line 2: column 'kind' has '1,000'.*plain finite number",
        ),
        (b"x,kind\n1,1\n2,1 000\n", "column 'kind' has '1 000'"),
        (b"x,kind\n1,1\n2,yes\n", "line 3: column 'kind' has 'yes'.*numbers only, or words only"),
        (b"x,kind\n1,yes\n2,yes\n", "1 values such as 'yes'"),
        (
            "x,kind\n1,no\n2,fran\u00e7ais\n".encode("latin-1"),
            "line 3: the byte 0xe7 is not UTF-8",
        ),
        (b'x,kind\n1,no\n2,"yes\n3,no\n', "line 4: unexpected end of data"),
        (b"x;kind\n1;0\n2;1\n", "line 1: one column, named 'x;kind'.*separated by semicolons"),
        (b"x;kind\r\n1,5;0\r\n", "line 1: one column.*decimal points"),
        (b"x\tkind\n1\t0\n", "line 1.*separated by tabs"),
        ("x,kind\n1,0\n".encode("utf-16"), "line 1: a byte is zero, as in UTF-16"),
        (b"x,z,kind\r\n1,2,0\r\n1\r\n", "line 3: data row 2 has 1 cells.*column 'z' is the first"),
        (b"x,kind\n1,0\n1,2,1\n", "line 3: .* 3 cells, the header 2; cell 3, '1', has no column"),
        (b'x,z,kind\n1,"a\nb",0\n2,"a\nb",\n', "line 4: column 'kind' has ''"),
        (b'x,z,kind\n1,"a\nb",0\n"2\n",,1\n', "line 4: column 'z' has ''"),
        (b"x,ward,kind\n1,north,0\n2,south,1\n", "line 2: column 'ward'.*no word .* occurs twice"),
        (b"x,ward,kind\n1,north,0\n2,3,1\n", "line 3: column 'ward' has '3'.*words only"),
        (b"x,ward,kind\n1,north,0\n2,NA,1\n", "line 3: column 'ward' has 'NA'.*fill it in"),
    ],
)
def test_files_that_would_be_misread(content, words, tmp_path):
    """What cannot be told from a wrong reading is refused by file, line and column."""
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}.*{words}"):
        prepare(read_csv(path), "kind", True)


def test_byte_order_mark_and_big_or_constant_numbers(tmp_path):
    path = tmp_path / "marked.csv"
    path.write_bytes(b"\xef\xbb\xbfkind,x,same\n1e20,1,0.1\n3,2,0.1\n4,3,0.1\n")
    columns = read_csv(path)
    found = prepare(columns, "kind", True)
    np.testing.assert_array_equal(found.y(columns), [1e20, 3.0, 4.0])
    # 0.1 has a rounding error for a standard deviation
    np.testing.assert_array_equal(found.X(columns)[:, 1], 0.0)
    path.write_bytes(b"kind,x,same\n0,1,0.3\n")
    np.testing.assert_allclose(found.X(read_csv(path))[0, 1], 0.2, rtol=1e-12)


def test_words_are_labels_with_integers(tmp_path):
    path = tmp_path / "wards.csv"
    path.write_text("ward,age,kind\nwest,30,0\nnorth,40,1\nwest,50,1\nnorth,20,0\n")
    found, kept = prepare(columns := read_csv(path), "kind", True), tmp_path / "preparation.json"
    np.testing.assert_array_equal(found.X(columns)[:, 0], [1, 0, 1, 0])  # not scaled
    np.testing.assert_allclose(found.X(columns)[:, 1].std(), 1.0)
    assert found.names("X")["X"].levels == (("north", "west"), None)
    found.save(kept)
    assert Preparation.load(kept) == found
    path.write_text("age,ward\n20,west\n30,east\n")
    with pytest.raises(DataError, match=r"line 3: column 'ward' has 'east'.*\['north', 'west'\]"):
        found.X(read_csv(path))
    path.write_text("age\n20\n")
    with pytest.raises(DataError, match=r"wards.csv, line 1 lacks the columns \['ward'\]"):
        found.X(read_csv(path))
    told = json.loads(kept.read_text())
    for levels in ([["north"]], [["a", "a"], None], ["ab", 3]):
        kept.write_text(json.dumps(told | {"levels": levels}))
        with pytest.raises(DataError, match="does not hold"):
            Preparation.load(kept)


WARDS = """
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def wards(X, y=None):
    effect = numpyro.sample("effect", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X[:, :1]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + effect[X[:, 1].astype(int)], 0.5), obs=y)
"""


@pytest.mark.slow
def test_labels_from_a_file_to_a_picture_and_a_prediction(tmp_path):
    model, path, out = tmp_path / "wards.py", tmp_path / "wards.csv", tmp_path / "out"
    model.write_text(WARDS)
    path.write_text("age,ward,y\n" + "".join(f"{i},{'ab'[i % 2]},{i % 5}\n" for i in range(12)))
    options = ["--target", "y", "--methods", "laplace", "--out", out]
    picture = ["--plot", tmp_path / "p.png", "--along"]
    result = run("fit", f"{model}:wards", path, *options, "--plot", tmp_path / "p.png")
    assert result.exit_code == 2 and "Give --along with one of them" in result.stderr
    result = run("fit", f"{model}:wards", path, *options, *picture, "age")
    assert result.exit_code == 0, result.output
    assert "'ward': words, read as integers, a 0, b 1" in result.stderr
    assert (tmp_path / "p.png").stat().st_size > 5000
    fitted = pg.load(out / "laplace.fit", load_model(f"{model}:wards"))
    assert fitted.names["X"].levels == (None, ("a", "b"))
    predictions = tmp_path / "p.csv"
    saved = ["--fit", out / "laplace.fit", "--out", predictions]
    result = run("predict", f"{model}:wards", path, *saved)
    assert result.exit_code == 0 and len(rows(predictions)) == 12, result.output


def normal(X, y=None, scale=1.0):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, scale), X))
    numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)


def two_classes(X, y=None, num=2):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    logits = jnp.stack([f, *([-f] * (num - 1))], -1)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def three_classes(X, y=None):
    two_classes(X, y, 3)


def masked_labels(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    numpyro.sample(
        "rain", dist.Poisson(jnp.exp(f)).mask(False).to_event(1), obs=jnp.full(X.shape[0], 3)
    )
    numpyro.sample(
        "y", dist.Bernoulli(logits=f).mask(jnp.arange(X.shape[0]) > 0).to_event(1), obs=y
    )


@pytest.mark.parametrize(
    ("model", "cells", "labels", "want"),
    [
        (load_model(COUNTS), "1 4 4", None, [1, 4, 4]),
        (load_model(COUNTS), "0 2 0", None, [0, 2, 0]),
        (normal, "0.5 2.5 2.5", None, [0.5, 2.5, 2.5]),
        (normal, "-1 1 1", None, [-1, 1, 1]),
        (three_classes, "0 2 2", None, [0, 2, 2]),
        (masked_labels, "-1 1 -1", ["-1", "1"], [0, 1, 0]),
        (masked_labels, "True False True", ["False", "True"], [1, 0, 1]),
        (two_classes, "2 1 1.0", ["1", "2"], [1, 0, 0]),
        (two_classes, "b a a", ["a", "b"], [1, 0, 0]),
        (two_classes, "0.0 1.0 1", None, [0, 1, 1]),
        (three_classes, "b a a", "words", None),
        (three_classes, "b a c b", ["a", "b", "c"], [1, 0, 2, 1]),
        (normal, "b a a", "words", None),
    ],
)
def test_labels_are_recoded_for_models_of_two_outcomes_only(model, cells, labels, want, tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("x,kind\n" + "".join(f"{i},{c}\n" for i, c in enumerate(cells.split())))
    columns, outcomes = read_csv(path), functools.partial(num_outcomes, model, {})
    if labels == "words":
        with pytest.raises(DataError, match=r"words \['a', 'b'\]"):
            prepare(columns, "kind", True, outcomes)
        return
    found = prepare(columns, "kind", True, outcomes)
    assert found.labels == labels
    np.testing.assert_array_equal(found.y(columns), want)


@pytest.mark.slow
def test_counts_of_two_values_stay_counts(tmp_path):
    """`fit` and `predict` of counts 1 and 4: the mean lies among the counts, and no column is
    called p(4).
    """
    data, out = write(tmp_path / "counts.csv", 1 + 3 * y), tmp_path / "out"
    result = run(
        "fit",
        COUNTS,
        data,
        "--target",
        "kind",
        "--methods",
        "laplace",
        "--set",
        "exposure=2",
        "--out",
        out,
    )
    assert result.exit_code == 0 and "is read as" not in result.stderr, result.output
    result = run("predict", COUNTS, data, "--fit", out / "laplace.fit", "--out", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    found = rows(tmp_path / "p.csv")
    outputs = ["f_mean", "f_sd", "mean", "sd", "y_0.05", "y_0.5", "y_0.95"]
    assert list(found[0]) == ["row", "width", "height", *outputs]
    np.testing.assert_allclose(
        np.mean([float(r["mean"]) for r in found]), np.mean(1 + 3 * y), rtol=0.1
    )
    assert pg.load(out / "laplace.fit", load_model(COUNTS)).kwargs == {"exposure": 2}


def test_options_are_read_as_python_would_mean_them():
    def model(X, y=None, link="logit", flag=True, size=1, **more):
        pass

    texts = ["link=probit", "flag=false", "size=-3", "depth=1e-2", "other=None", "odd=1_000"]
    want = {
        "link": "probit",
        "flag": False,
        "size": -3,
        "depth": 0.01,
        "other": None,
        "odd": "1_000",
    }
    assert parse_settings(texts, model) == want
    with pytest.raises(DataError, match="no option 'y'"):
        parse_settings(["y=3"], model)


def test_unknown_label(tmp_path, data):
    preparation = prepare(read_csv(data), "kind", True)
    other = read_csv(write(tmp_path / "new.csv", ["perhaps"] * 25))
    with pytest.raises(DataError, match="'perhaps'.*'no', 'yes'"):
        preparation.y(other)


def test_model_files(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import helper_of_mine\n\ndef model(X, y=None):\n    return helper_of_mine.VALUE\n"
    )
    with pytest.raises(ModelError, match="No module named 'helper_of_mine'"):
        load_model(f"{path}:model")
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 3\n")
    assert load_model(f"{path}:model")(None) == 3
    with pytest.raises(ModelError, match=r"no function 'binary'; it defines \['model'\]"):
        load_model(f"{path}:binary")


def test_demo_data():
    """Sizes, both classes, what is scaled is scaled by the training rows only, and columns that are
    constant there go.
    """
    for data, size, columns in ((digits_3_5(0), 365, 54), (breast_cancer(0), 569, 30)):
        assert len(data.X) == len(data.y) == size and set(data.y) == {0, 1}
        Z, full = principal_components(data.X, 2, 150), standardised(data.X, 300)
        np.testing.assert_allclose(Z[:150].std(0), 1.0, rtol=1e-10)
        np.testing.assert_allclose(np.corrcoef(Z[:150].T)[0, 1], 0.0, atol=1e-10)
        assert full.shape == (size, columns)
        np.testing.assert_allclose(full[:300].mean(0), 0.0, atol=1e-10)
        np.testing.assert_allclose(full[:300].std(0), 1.0, rtol=1e-10)
        changed = np.concatenate([data.X[:300], 2 * data.X[300:] + 1])
        np.testing.assert_allclose(principal_components(changed, 2, 150)[:150], Z[:150])
        np.testing.assert_allclose(standardised(changed, 300)[:300], full[:300])


def test_demo_refuses_to_leave_nothing_for_testing(tmp_path):
    result = run("demo", "--model", MODEL, "--num-train", 360, "--out", tmp_path)
    assert (
        result.exit_code == 2
        and "--num-train 360 of 365 rows" in result.stderr
        and "at most 345" in result.stderr
    )


def test_long_sentences_are_broken():
    text = cli_run.wrapped("- nuts: " + "what can be trusted of it and " * 12)
    assert max(map(len, text.splitlines())) <= 100 and text.splitlines()[1].startswith("  ")
    assert " ".join(text.split()) == ("- nuts: " + "what can be trusted of it and " * 12).strip()


@pytest.mark.slow
def test_draws_that_have_not_mixed_judge_nothing(small_fit):
    """The sentence on EP compares it with NUTS where that has converged, and only there."""
    for result, compared in (
        (pg.errors.Result.converged, True),
        (pg.errors.Result.not_mixed, False),
    ):
        recorder = cli_run.Recorder.__new__(cli_run.Recorder)
        fits = {
            "ep": small_fit("ep"),
            "nuts": dataclasses.replace(small_fit("nuts"), result=result),
        }
        recorder.comparison = pg.compare(fits, X[:7], y[:7], num_importance_samples=1000)
        assert ("means differ from nuts" in recorder.sentences()[0]) is compared


@pytest.mark.long
def test_demo(tmp_path):
    """The whole demo on few rows and draws: every file, a sentence for every method, no line too
    long for a terminal.
    """
    args = ("--num-train", 30, "--num-warmup", 50, "--num-samples", 50, "--out", tmp_path)
    result = run("demo", "--model", MODEL, *args)
    assert result.exit_code == 0, result.output
    for name in ("digits_3_5", "breast_cancer"):
        files = {p.name for p in (tmp_path / name).iterdir()}
        pictures = {"evidence.png", "forest.png", "calibration.png", "surface.png"}
        assert files >= {"table.csv", "nuts.nc", "ep.nc", *pictures}
        assert [row["method"] for row in rows(tmp_path / name / "table.csv")] == [
            "laplace",
            "ep",
            "vi",
            "nuts",
        ]
    text = result.stdout
    assert text.count("What can be trusted") == 2 and text.count("\n- ep: ") == 2
    assert text.count("nats with a length scale a column") == 2
    assert max(map(len, text[: text.index("Files:")].splitlines())) <= 100


def test_a_parquet_file_is_the_csv_file(data, tmp_path, monkeypatch):
    pl, path = pytest.importorskip("polars"), tmp_path / "data.parquet"
    pl.read_csv(data).write_parquet(path)
    want, found = read_csv(data), read_table(path)
    assert (found.names, read_table(Path(data))) == (want.names, want)
    preparation = prepare(want, "kind", True)
    np.testing.assert_array_equal(prepare(found, "kind", True).X(found), preparation.X(want))
    np.testing.assert_array_equal(preparation.y(found), y)
    pl.DataFrame({"width": [1.0, None], "height": [True, False], "kind": [0, 1]}).write_parquet(
        path
    )
    with pytest.raises(DataError, match="data.parquet, row 2: column 'width' has '' in data row 2"):
        prepare(read_table(path), "kind", True)
    path.write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match="data.parquet cannot be read as Parquet"):
        read_table(path)
    monkeypatch.setitem(sys.modules, "polars", None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DataError, match=r"data.parquet is a Parquet file, which needs polars"):
        read_table(path)


AS_CELLS = [
    ["3", "1", "0.1", "south", "a"],
    ["", "0", "1e+300", "north", "b"],
    ["9007199254740993", "1", "2.0", "south", "a"],
]


def test_polars_reads_numbers_labels_and_gaps(tmp_path):
    pl, path = pytest.importorskip("polars"), tmp_path / "data.parquet"
    ward = pl.Series(["south", "north", "south"], dtype=pl.Enum(["south", "north"]))
    columns = {"count": [3, None, 2**53 + 1], "well": [True, False, True]}
    columns |= {"size": [0.1, 1e300, 2.0], "ward": ward, "who": ["a", "b", "a"]}
    pl.DataFrame(columns).write_parquet(path)
    found = read_table(path)
    assert (found.names, found.rows) == (list(columns), AS_CELLS)


@pytest.mark.parametrize("reader", ["polars", "pandas"])
def test_what_pandas_writes_is_read_alike(reader, tmp_path, monkeypatch):
    """Its index too, and whole numbers with gaps beyond 2^53."""
    pytest.importorskip("pyarrow")
    pytest.importorskip(reader)
    import pandas as pd

    count = pd.array([3, None, 2**53 + 1], dtype="Int64")
    ward = pd.Categorical(["south", "north", "south"], categories=["south", "north"])
    columns = {"count": count, "well": [True, False, True], "size": [0.1, 1e300, 2.0], "ward": ward}
    path, index = tmp_path / "data.parquet", pd.Index(["a", "b", "a"], name="who")
    pd.DataFrame(columns, index=index).to_parquet(path)
    if reader == "pandas":
        monkeypatch.setitem(sys.modules, "polars", None)
    found = read_table(path)
    assert (found.names, found.rows) == ([*columns, "who"], AS_CELLS)
    pd.DataFrame(columns, index=["a", "b", "a"]).to_parquet(path)
    with pytest.raises(DataError, match="column 5 is named '__index_level_0__', as pandas"):
        prepare(read_table(path), "size", True)


def test_parquet_entries_that_are_no_numbers_and_no_text(tmp_path):
    import datetime

    pl, path = pytest.importorskip("polars"), tmp_path / "data.parquet"
    day = datetime.date(2020, 1, 2)
    pl.DataFrame({"x": [1.0], "day": [day], "kind": [0]}).write_parquet(path)
    with pytest.raises(DataError, match="row 1: column 'day' has datetime.date.*days since"):
        read_table(path)
    pl.DataFrame({"__index_level_0__": [0], "x": [1.0], "kind": [0]}).write_parquet(path)
    with pytest.raises(DataError, match="column 1 is named '__index_level_0__', as pandas"):
        prepare(read_table(path), "kind", True)


def test_a_picture_that_shows_nothing_is_refused_before_the_work():
    names = Preparation("y", ["a", "b"], [0.0, 0.0], [1.0, 1.0]).names("X")
    problem = cli_run.Problem(regression, X, y, X, y, names=names)
    with pytest.raises(DataError, match=r"two outcomes; the inputs are \['a', 'b'\]"):
        require_drawable(Path("p.png"), problem)
    with pytest.raises(DataError, match="p.pdf: give the name of a PNG"):
        require_drawable(Path("p.pdf"), problem)
    with pytest.raises(DataError, match="there is no folder absent"):
        require_drawable(Path("absent/p.png"), problem, "a")
    with pytest.raises(DataError, match=r"--along c: the inputs are \['a', 'b'\]"):
        require_drawable(Path("p.png"), problem, "c")
    with pytest.raises(DataError, match="--along a: give the name of the picture"):
        require_drawable(None, problem, "a")
    require_drawable(Path("p.png"), problem, "a")


def test_numbers_of_columns_are_a_header(tmp_path):
    """As pandas writes it; it was the first row of the data."""
    (tmp_path / "a.csv").write_text("0,1,2\n0.0,1.0,2.0\n3.0,4.0,5.0\n")
    table = read_csv(tmp_path / "a.csv")
    assert list(table.names) == ["0", "1", "2"] and len(table.rows) == 2
