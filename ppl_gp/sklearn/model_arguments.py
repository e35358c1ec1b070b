"""What an estimator is told about its model: checked before the work, in its own words."""

import inspect
from collections.abc import Mapping
from typing import Any

from ppl_gp.errors import DataError
from ppl_gp.results.fit import Fit


def require_arguments(estimator: str, model: Any, arguments: Any) -> None:
    """Raise `DataError` for a model that is no function of X and y, and for `arguments` that it
    does not take.
    """
    if not callable(model):
        raise DataError(f"{estimator}(model={model!r}): give a function model(X, y=None, ...).")
    if arguments is not None and not isinstance(arguments, Mapping):
        raise DataError(
            f"{estimator}(arguments={arguments!r}): give {{name: value}} of the model's arguments."
        )
    try:
        parameters = inspect.signature(model).parameters
    except (TypeError, ValueError):  # a callable that does not tell
        return
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "y" not in parameters and not anything:
        raise DataError(
            f"{estimator}(model=...): the model's arguments are {list(parameters)}, and the "
            "observations reach it as `y`; call them so, model(X, y=None, ...)."
        )
    own = [k for k in list(parameters)[1:] if k != "y"]
    unknown = [k for k in arguments or () if k not in own and (k == "y" or not anything)]
    if unknown:
        raise DataError(
            f"{estimator}(arguments=...): {unknown} are no arguments of the model beside X and y; "
            f"it has {own}."
        )


def require_none_of_rows(estimator: str, fit: Fit, arguments: Mapping | None) -> None:
    """Raise `DataError` for an argument with an entry for each row: it has none at other rows."""
    if bad := [k for k in arguments or () if fit.model.reading.axis_of(k) is not None]:
        raise DataError(
            f"{estimator}(arguments=...): {bad} have one entry a row of training, and new rows "
            "would need theirs; make each a column of X, which the model takes apart."
        )
