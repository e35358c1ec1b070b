"""Options of the model on the command line: --set NAME=VALUE."""

import inspect
from collections.abc import Callable
from typing import Any

from ppl_gp.cli.csv_file import is_number
from ppl_gp.errors import DataError

_RESERVED = (
    "model",
    "method",
    "rng_key",
    "throw",
    "progress",
    "X_new",
    "y_new",
    "num_samples",
    "link_approximation",
)
_CONSTANTS = {
    "true": True,
    "false": False,
    "True": True,
    "False": False,
    "None": None,
    "inf": float("inf"),
}


def parse_settings(settings: list[str], model: Callable) -> dict[str, Any]:
    """{name: number, truth value, `None` or text}.

    Raises `DataError` for an option that is given twice, that the model does not have, or that
    belongs to the library.
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
    try:
        # the first takes the inputs
        parameters = list(inspect.signature(model).parameters.values())[1:]
    except (TypeError, ValueError):  # a callable that does not tell
        return
    named = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "y"
    ]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if name not in named and not (anything and name != "y"):
        raise DataError(f"--set {text}: the model has no option '{name}'; it has {named}.")


def _value(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if not is_number(text):
        return text
    return int(text) if text.lstrip("+-").isdigit() else float(text)
