"""A model and a file to a problem: what `check`, `fit` and `compare` begin with."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpyro.distributions import constraints

from ppl_gp.cli.csv_file import numbers
from ppl_gp.cli.data import Preparation, digest, prepare
from ppl_gp.cli.model_path import load_model
from ppl_gp.cli.parquet_file import read_table
from ppl_gp.cli.run import Problem, say
from ppl_gp.cli.settings import parse_settings
from ppl_gp.errors import DataError, ModelError, PplGpError
from ppl_gp.gp import unwrap
from ppl_gp.model.arguments import argument_names, as_arrays
from ppl_gp.model.roles import is_factor, is_observed
from ppl_gp.model.tracing import run
from ppl_gp.results.store.save import qualified_name


def read_problem(
    model: str,
    data: Path,
    target: str,
    standardise: bool,
    test_fraction: float,
    seed: int,
    settings: list[str],
) -> tuple[Problem, Preparation]:
    """Model and data, split at random; nothing is held out for `test_fraction` 0. Inputs are scaled
    by all rows.
    """
    columns, function = read_table(data), load_model(model)
    options = parse_settings(settings, function)
    preparation = prepare(
        columns, target, standardise, partial(observes_two_outcomes, function, options)
    )
    if preparation.labels is not None:
        say(f"'{target}': {preparation.labels[0]} is read as 0, {preparation.labels[1]} as 1.")
    for name in preparation.inputs:
        if levels := preparation.of(name):
            told = ", ".join(f"{label} {i}" for i, label in enumerate(levels[:10]))
            more = f" ... ({len(levels)} labels)" if len(levels) > 10 else ""
            say(f"'{name}': words, read as integers, {told}{more}; they reach the model unscaled.")
    for name in preparation.inputs if standardise else ():
        if codes := _codes(columns, preparation, name):
            say(
                f"'{name}': {len(codes)} whole numbers ({', '.join(codes[:5])} ...), shifted and "
                "scaled as numbers. Where they are codes that the model uses as an index, write "
                "them as words, or leave all inputs as they are by --no-standardise."
            )
    X, y = preparation.X(columns), preparation.y(columns)
    test, train = _split(len(y), test_fraction, seed)
    _trace(function, options, X[train], y[train])
    names = preparation.names(argument_names(function, 1)[0])
    problem = Problem(function, X[train], y[train], X[test], y[test], options, names)
    return problem, dataclasses.replace(preparation, digest=digest(X[train]))


def _codes(columns, preparation: Preparation, name: str) -> list[str]:
    """The values of an input that may be codes of categories: few whole numbers, each of which
    many rows have.
    """
    if preparation.of(name) is not None:
        return []
    found = np.unique(values := numbers(columns, name))
    whole = bool(np.all(found == np.round(found)))
    few = 2 < len(found) <= min(20, len(values) // 3)
    return [f"{x:.0f}" for x in found] if whole and few else []


def _split(num: int, test_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed).permutation(num)
    num_test = round(test_fraction * num)
    if test_fraction > 0 and not 0 < num_test < num:
        raise DataError(
            f"--test-fraction {test_fraction} of {num} rows leaves {num_test} for testing; give "
            "another."
        )
    return order[:num_test], np.sort(order[num_test:])


def observes_two_outcomes(model: Callable, options: dict, X: np.ndarray, y: np.ndarray) -> bool:
    """Whether every site that observes y has the outcomes 0 and 1. y (N,) holds two values; two
    traces, O(N).

    The sites are those whose value moves when y's two values change places.
    """
    first, other = (_trace(model, options, X, z) for z in (y, y.min() + y.max() - y))
    data = [k for k, s in first.items() if is_observed(s) and not is_factor(s)]
    moved = [
        k for k in data if k in other and not np.array_equal(first[k]["value"], other[k]["value"])
    ]
    return bool(moved) and all(_is_binary(unwrap(first[k]["fn"])) for k in moved)


def _is_binary(fn) -> bool:
    if fn.support is constraints.boolean:
        return True
    if fn.event_dim or not fn.has_enumerate_support:
        return False
    try:
        return np.array_equal(np.ravel(fn.enumerate_support(expand=False)), [0, 1])
    except NotImplementedError:  # a binomial with totals that differ
        return False


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
