"""A model and a file to a problem: what `check`, `fit` and `compare` begin with."""

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro.distributions import constraints

from ppl_gp.cli.data import Preparation, digest, prepare
from ppl_gp.cli.run import Problem, say
from ppl_gp.cli.tables import Columns, is_number, read_table
from ppl_gp.errors import DataError, ModelError, PplGpError
from ppl_gp.gp import unwrap
from ppl_gp.reading.arguments import argument_names, as_arrays, parameters_of
from ppl_gp.reading.reading import declare
from ppl_gp.reading.roles import is_factor, is_observed
from ppl_gp.reading.tracing import run
from ppl_gp.results.store.save import qualified_name, site_number

_RESERVED = frozenset(
    "model method rng_key throw progress tables X_new y_new num_samples link_approximation".split()
)
_CONSTANTS = {str(x): x for x in (True, False, None, math.inf)} | {"true": True, "false": False}


def read_problem(
    model: str,
    data: Path,
    target: str,
    standardise: bool,
    test_fraction: float,
    seed: int,
    settings: list[str],
) -> tuple[Problem, Preparation]:
    """Model and data, split at random unless `test_fraction` is 0; all rows scale the inputs."""
    columns, function = read_table(data), load_model(model)
    options = parse_settings(settings, function)
    preparation = prepare(columns, target, standardise, partial(num_outcomes, function, options))
    _tell(preparation, columns, standardise)
    X, y = preparation.X(columns), preparation.y(columns)
    for j, name in enumerate(preparation.inputs):
        if preparation.of(name) and _is_a_number(function, options, X, y, j):
            raise DataError(
                f"{columns.path}: column '{name}' holds words, and the model takes their integers "
                "for numbers, so that the order of the alphabet would be a distance. Use it as an "
                f"index in the model, u[X[:, {j}].astype(int)] of an effect u of "
                f"{len(preparation.of(name) or ())} levels, and give the kernel the other columns; "
                "or write one column of 0 and 1 for each word."
            )
    test, train = _split(len(y), test_fraction, seed)
    _trace(function, options, X[train], y[train])
    names = preparation.names(argument_names(function, 1)[0])
    problem = Problem(function, X[train], y[train], X[test], y[test], options, names)
    return problem, dataclasses.replace(preparation, digest=digest(X[train]))


def _tell(preparation: Preparation, columns: Columns, standardise: bool) -> None:
    """How labels are read, and what may be meant for some."""
    if preparation.labels is not None:
        first, *others = (f"{label} is read as {k}" for k, label in enumerate(preparation.labels))
        told = ", ".join([first, *(x.replace("is read ", "") for x in others)])
        say(f"'{preparation.target}': {told}.")
    for name in preparation.inputs:
        if levels := preparation.of(name):
            told = ", ".join(f"{label} {i}" for i, label in enumerate(levels[:10]))
            more = f" ... ({len(levels)} labels)" if len(levels) > 10 else ""
            say(f"'{name}': words, read as integers, {told}{more}; they reach the model unscaled.")
        elif standardise and (codes := _codes(columns.numbers(name))):
            say(
                f"'{name}': {len(codes)} whole numbers ({', '.join(codes[:5])} ...), shifted and "
                "scaled as numbers. Where they are codes that the model uses as an index, write "
                "them as words, or leave all inputs as they are by --no-standardise."
            )


def _codes(values: np.ndarray) -> list[str]:
    """The values of an input that may be codes of categories: few whole numbers, in many rows."""
    found = np.unique(values)
    whole = bool(np.all(found == np.round(found)))
    few = 2 < len(found) <= min(20, len(values) // 3)
    return [f"{x:.0f}" for x in found] if whole and few else []


def _split(num: int, test_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed).permutation(num)
    num_test = round(test_fraction * num)
    if test_fraction > 0 and not 0 < num_test < num:
        raise DataError(
            f"--test-fraction {test_fraction} leaves {num_test} of {num} rows for tests; change it."
        )
    return order[:num_test], np.sort(order[num_test:])


def num_outcomes(model: Callable, options: dict, X: np.ndarray, y: np.ndarray) -> int:
    """How many outcomes 0, 1, ... every site has that observes y, 0 if one has others. Two traces,
    O(N): the sites are those whose value moves when y's values (N,) change places.
    """
    first, other = (_trace(model, options, X, z) for z in (y, y.min() + y.max() - y))
    data = [k for k, s in first.items() if k in other and is_observed(s) and not is_factor(s)]
    moved = [k for k in data if not np.array_equal(first[k]["value"], other[k]["value"])]
    found = {_num_outcomes(unwrap(first[k]["fn"])) for k in moved}
    return found.pop() if len(found) == 1 else 0


def _num_outcomes(fn) -> int:
    if fn.support is constraints.boolean:
        return 2
    if fn.event_dim or not fn.has_enumerate_support:
        return 0
    try:
        values = np.ravel(fn.enumerate_support(expand=False))
    except NotImplementedError:  # a binomial with totals that differ
        return 0
    return len(values) if np.array_equal(values, np.arange(len(values))) else 0


def _is_a_number(model: Callable, options: dict, X, y, j: int) -> bool:
    """Whether densities or kernels move with column j between integers; an index does not."""
    odd = np.arange(len(X)) % 2.0
    at = X + 0.25 * odd[:, None] * (np.arange(X.shape[1]) == j)
    tangent = np.zeros_like(X)
    tangent[:, j] = 1.0 + odd
    kwargs = {**options, "y": y}

    def numbers(X):
        sites = run(declared, (X,), kwargs).values()
        return [site_number(s) for s in sites if s["type"] == "sample"]

    try:
        declared = declare(model, *as_arrays((X,), kwargs))
        _, slopes = jax.jvp(numbers, (at,), (tangent,))
    except Exception:  # noqa: BLE001 - a model may need integers there, which an index is
        return False
    return any(float(abs(x)) > 0.0 for x in slopes)


def _trace(model: Callable, options: dict, X, y) -> dict:
    """The model's trace; whatever a user's file raises becomes one line that names it."""
    try:
        return run(model, *as_arrays((X,), {**options, "y": y}))
    except PplGpError:
        raise
    except Exception as error:
        raise ModelError(
            f"the model '{qualified_name(model)}' does not run on X {X.shape} and y {y.shape} "
            f"with the options {options}: {type(error).__name__}: {error}"
        ) from error


def parse_settings(settings: list[str], model: Callable) -> dict[str, Any]:
    """{name: number, truth value, `None` or text}. `DataError` for an option that is given twice,
    that the model does not have, or that belongs to the library.
    """
    options = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise DataError(f"--set {text}: write NAME=VALUE.")
        if name in options:
            raise DataError(f"--set {text}: '{name}' is given twice.")
        options[name] = _value(value)
        _require_option(text, name, model)
    return options


def _require_option(text: str, name: str, model: Callable) -> None:
    if name in _RESERVED:
        raise DataError(
            f"--set {text}: '{name}' is an argument of the library's own; rename the model's."
        )
    parameters = list(parameters_of(model).values())[1:]  # the first takes the inputs
    if not parameters_of(model):  # a callable that does not tell
        return
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [k for k in by_name if k != "y"]
    if name not in named and not (anything and name != "y"):
        raise DataError(f"--set {text}: the model has no option '{name}'; it has {named}.")


def _value(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if not is_number(text):
        return text
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def load_model(location: str) -> Callable:
    """The function at `path/to/file.py:name`; the file's folder is importable, after all others."""
    file, colon, name = location.rpartition(":")
    path = Path(file)
    if not colon or not name.isidentifier():
        raise ModelError(
            f"'{location}' names no model; write MODEL.py:function, such as "
            "models/classification.py:binary."
        )
    if not path.is_file():
        raise ModelError(f"there is no file '{file}'.")
    spec = importlib.util.spec_from_file_location(f"_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelError(f"'{file}' is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # one line that names the user's file
        raise ModelError(f"'{file}' cannot be imported: {type(error).__name__}: {error}") from error
    model = getattr(module, name, None)
    if not callable(model):
        functions = {k: v for k, v in vars(module).items() if callable(v)}
        found = [k for k, v in functions.items() if getattr(v, "__module__", None) == spec.name]
        raise ModelError(f"'{file}' defines no function '{name}'; it defines {found}.")
    return model
