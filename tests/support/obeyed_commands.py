"""Options of the commands."""

import functools
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from obeyed import Caught, X, Y, by, caught
from small_fits import classifier

import ppl_gp as pg
from ppl_gp.cli import app as cli

ROOT = Path(__file__).parents[2]
MODEL = f"{ROOT / 'models' / 'classification.py'}:binary"


@functools.cache
def file() -> str:
    path = Path(tempfile.mkdtemp()) / "data.csv"
    lines = [f"{a:.17g},{b:.17g},{c}" for (a, b), c in zip(X, Y, strict=True)]
    path.write_text("\n".join(["width,height,kind", *lines]))
    return str(path)


def called(t, what, *args) -> Caught:
    """What a command hands to a function of `cli.app`."""
    from typer.testing import CliRunner

    module = sys.modules["ppl_gp.cli.app"]
    return caught(t, module, what, lambda: _invoked(CliRunner(), args))


def _invoked(runner, args):
    error = runner.invoke(cli, [str(a) for a in args]).exception
    if error is not None:
        raise error


EFFORT = ("--restarts", 3, "--num-warmup", 11, "--num-samples", 13, "--num-chains", 4)


def fitted_by_command(t):
    out = t.folder / "here"
    args = ("fit", MODEL, file(), "--target", "kind", "--methods", "vi,laplace", "--out", out)
    args += (*EFFORT, "--sample-hyper", "--seed", 9, "--no-standardise", "--set", "link=probit")
    problem, names, effort, seed, _ = called(t, "fit_methods", *args).given
    assert names == ["vi", "laplace"] and seed == 9 and out.is_dir()
    assert tuple(effort[:5]) == (3, 11, 13, 4, True)
    np.testing.assert_allclose(problem.X, X)
    assert problem.kwargs == {"link": "probit"} and len(problem.X_test) == 0
    plain = called(t, "fit_methods", "fit", MODEL, file(), "--target", "kind", "--out", out)
    problem, names, effort, seed, _ = plain.given
    np.testing.assert_allclose(problem.X.std(0), 1.0)
    assert tuple(effort[:5]) == (1, 500, 500, 2, False) and seed == 0 and problem.kwargs == {}


def the_seed_reaches_the_fits(t):
    from ppl_gp.cli import run
    from ppl_gp.cli.run import Effort

    problem = run.Problem(classifier, X, Y, X, Y)
    for seed in (3, 4):
        found = caught(
            t, run, "fit", lambda seed=seed: run.fit_one(problem, "laplace", Effort(), seed)
        )
        assert found.given[2] == seed


def the_effort_is_that_of_the_method(t):
    from ppl_gp.cli.run import Effort, configured

    effort = Effort(3, 11, 13, 4, False)
    assert configured("ep", effort) == pg.EP(hyper=pg.MAP(restarts=3))
    sampled = configured("vi", effort._replace(sample_hyper=True))
    assert sampled == pg.VI(hyper=pg.Sample(11, 13, 4))
    for name in ("nuts", "slice", "sparse-nuts"):
        made = configured(name, effort)
        assert (made.num_warmup, made.num_samples, made.num_chains) == (11, 13, 4)


def drawn_by_command(t):
    """`--plot` and `--along` reach the picture."""
    module = sys.modules["ppl_gp.cli.app"]
    t.patch.setattr(module, "fit_methods", lambda *_: SimpleNamespace(fits={"a": 1}, exit_code=0))
    args = ("fit", MODEL, file(), "--target", "kind", "--out", t.folder / "there")
    found = called(t, "write_picture", *args, "--plot", "picture.png", "--along", "height")
    assert found.given[0] == Path("picture.png") and found.given[-1] == "height"


def compared_by_command(t):
    bare = ("compare", MODEL, file(), "--target", "kind", "--out", t.folder / "out")
    args = (*bare, "--methods", "ep", *EFFORT, "--sample-hyper", "--test-fraction", 0.4)
    args += ("--save", "--seed")
    more = ("--no-standardise", "--set", "link=probit")
    problem, names, effort, seed, recorder = called(t, "fit_methods", *args, 5, *more).given
    assert names == ["ep"] and seed == 5 and tuple(effort[:5]) == (3, 11, 13, 4, True)
    assert len(problem.X_test) == 4 and problem.kwargs == {"link": "probit"}
    assert recorder.save_fits and recorder.files.out == t.folder / "out"
    again, other = (called(t, "fit_methods", *args, s, *more).given[0].X_test for s in (5, 6))
    np.testing.assert_array_equal(problem.X_test, again)
    assert not np.array_equal(again, other)
    plain = called(t, "fit_methods", *bare)
    assert not plain.given[4].save_fits and len(plain.given[0].X_test) == 2


def checked_by_command(t):
    args = ("check", MODEL, file(), "--target", "kind")
    found = called(t, "check_model", *args, "--no-standardise", "--set", "link=probit")
    np.testing.assert_allclose(found.given[1], X)
    assert found.named["link"] == "probit"
    np.testing.assert_allclose(called(t, "check_model", *args).given[1].std(0), 1.0)


def shown_by_command(t):
    args = ("--out", t.folder, "--model", MODEL, "--num-train", 55, "--methods", "ep", "--seed", 8)
    found = called(t, "run_demo", "demo", *args, *EFFORT[2:])
    model, out, names, effort, num_train, seed = found.given
    assert model.__name__ == "binary" and out == t.folder and names == ["ep"]
    assert tuple(effort[:4]) == (1, 11, 13, 4) and (num_train, seed) == (55, 8)


CLI = "test_cli::test_"
FITTED = [fitted_by_command]
COMPARED = [compared_by_command]


ROWS: dict[str, dict[str, list]] = {
    "ppl-gp check": dict.fromkeys(
        ("model", "data", "target", "standardise", "settings"), [checked_by_command]
    ),
    "ppl-gp fit": {
        **dict.fromkeys(("model", "data", "target", "methods", "out", "standardise"), FITTED),
        **dict.fromkeys(
            ("restarts", "num_warmup", "num_samples", "num_chains", "sample_hyper"),
            [*FITTED, the_effort_is_that_of_the_method],
        ),
        "seed": [*FITTED, the_seed_reaches_the_fits],
        **dict.fromkeys(("plot", "along"), [drawn_by_command]),
        "settings": FITTED,
    },
    "ppl-gp compare": {
        **dict.fromkeys(("model", "data", "target", "methods", "out", "standardise"), COMPARED),
        **dict.fromkeys(
            ("restarts", "num_warmup", "num_samples", "num_chains", "sample_hyper"),
            [*COMPARED, the_effort_is_that_of_the_method],
        ),
        "seed": [*COMPARED, the_seed_reaches_the_fits],
        **dict.fromkeys(("test_fraction", "save", "settings"), COMPARED),
    },
    "ppl-gp predict": {
        **dict.fromkeys(("model", "data", "saved", "out"), [by(CLI + "fit_then_predict")]),
        "quantiles": [by(CLI + "predict_takes_the_levels_of_quantiles")],
    },
    "ppl-gp demo": dict.fromkeys(
        ("out", "model", "num_train", "num_warmup", "num_samples", "num_chains", "methods", "seed"),
        [shown_by_command],
    ),
}
