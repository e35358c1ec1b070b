"""Every option of every method, verb and command is obeyed: it has a row in `option_rows.ROWS`,
and the row holds. An option that is new here fails until somebody says what must follow it.
"""

import ast
import dataclasses
import functools
import inspect
from pathlib import Path

import pytest
from obeyed import By, Tools
from option_rows import ROWS

import ppl_gp as pg
from ppl_gp.cli import app
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.hyper.point import infer_hyper
from ppl_gp.local.method import LocalMethod
from ppl_gp.report import effects as part_plots
from ppl_gp.report import pictures as plots
from ppl_gp.report import slices as slice_plots
from ppl_gp.results.fit import Fit

TESTS = Path(__file__).parents[1]
CONFIGURATIONS = (
    pg.Checkpoint,
    pg.Training,
    pg.Layers,
    pg.Expectation,
    pg.Free,
    pg.Amortised,
    pg.SparsePosterior,
    pg.ELBO,
    pg.ImportanceWeightedELBO,
    pg.GlobalImportanceWeightedELBO,
)
# what a question is about, and no option of it
DATA = {"self", "fit", "record", "fits", "comparison", "model", "method", "approximation"}
DATA |= {"X", "y", "X_new", "X_test", "posteriors", "factors", "make"}
OBSERVED = {"y_new", "y_test"}  # which may be left out where a model observes its inputs
# scikit-learn's own
THEIRS = ("get_metadata_routing", "set_score_request", "set_predict_request", "score")


def options_of(function, data=DATA) -> list[str]:
    """The named arguments, but for what a question is about."""
    found = []
    for p in inspect.signature(function).parameters.values():
        variadic = p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        asked = p.name in data and p.default is p.empty or p.name in OBSERVED
        found += [] if variadic or asked else [p.name]
    return found


def of_configurations() -> dict[str, list[str]]:
    """Methods, choices of the hyperparameters, and what else is made and handed over."""
    known = {*run_method.registry, *infer_hyper.registry} - {object, LocalMethod}
    kinds = {*known, *_below(LocalMethod), *CONFIGURATIONS}
    ours = [kind for kind in kinds if kind.__module__.startswith("ppl_gp.")]
    return {
        kind.__name__: [f.name for f in dataclasses.fields(kind)]
        if dataclasses.is_dataclass(kind)
        else options_of(kind)
        for kind in ours
    }


def _below(kind) -> set:
    return {k for child in kind.__subclasses__() for k in ({child} | _below(child))}


def of_functions() -> dict[str, list[str]]:
    public = {k: getattr(pg, k) for k in pg.__all__}
    found = {k: f for k, f in public.items() if inspect.isfunction(inspect.unwrap(f))}
    for module in (plots, part_plots, slice_plots):
        drawing = inspect.getmembers(module, inspect.isfunction)
        found |= {k: f for k, f in drawing if k.startswith("plot_")}
    return {k: options_of(f) for k, f in found.items()}


def of_verbs() -> dict[str, list[str]]:
    verbs = inspect.getmembers(Fit, inspect.isfunction)
    own = [(k, verb) for k, verb in verbs if not k.startswith("_") and k in vars(Fit)]
    return {f"Fit.{k}": options_of(verb) for k, verb in own}


def of_estimators() -> dict[str, list[str]]:
    found = {}
    for kind in (pg.sklearn.GPClassifier, pg.sklearn.GPRegressor):
        found[kind.__name__] = options_of(kind, {"self"})
        for name, verb in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") and name not in THEIRS:
                found[f"{kind.__name__}.{name}"] = options_of(verb)
    return found


def of_commands() -> dict[str, list[str]]:
    return {
        f"ppl-gp {c.callback.__name__}": options_of(c.callback, set())
        for c in app.registered_commands
    }


def all_options() -> dict[str, list[str]]:
    found = of_configurations() | of_functions() | of_verbs() | of_estimators() | of_commands()
    return {owner: options for owner, options in found.items() if options}


def test_every_option_has_a_row():
    wanted = {(owner, option) for owner, options in all_options().items() for option in options}
    rows = {(owner, option) for owner, options in ROWS.items() for option in options}
    missing = sorted(wanted - rows)
    assert not missing, f"no row for option {', '.join(f'{o}({x}=)' for o, x in missing)}"
    assert not rows - wanted, f"rows of options that are none: {sorted(rows - wanted)}"
    assert len(wanted) > 150, "the options were not found"


@functools.cache
def named_in(file: str) -> dict[str, bool]:
    """{name of a test: whether the slow suite alone runs it}."""
    found = {}
    (path,) = TESTS.rglob(f"{file}.py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = " ".join(map(ast.unparse, node.decorator_list))
            slow = "mark.slow" in marks or "mark.long" in marks
            found[node.name] = slow
    return found


def test_tests_that_rows_name_are_there():
    """And run by default, unless the row says that they do not."""
    for owner, options in ROWS.items():
        for option, row in options.items():
            for shown in (x for x in row if isinstance(x, By)):
                for name in shown.tests:
                    file, _, test = name.partition("::")
                    assert test in named_in(file), f"{owner}({option}=): no test {name}"
                    assert named_in(file)[test] is shown.slow, f"{owner}({option}=): {name}"


def checks() -> dict:
    """{what is called: the options that it is for}."""
    found: dict = {}
    for owner, options in ROWS.items():
        for option, row in options.items():
            for check in (x for x in row if not isinstance(x, By)):
                found.setdefault(check, []).append(f"{owner}.{option}")
    return found


def name_of(options: list[str]) -> str:
    return options[0] + (f" and {len(options) - 1} more" if len(options) > 1 else "")


@pytest.mark.parametrize("check", checks(), ids=map(name_of, checks().values()))
def test_options_are_obeyed(check, monkeypatch, tmp_path, small_fit):
    check(Tools(monkeypatch, tmp_path, small_fit))
