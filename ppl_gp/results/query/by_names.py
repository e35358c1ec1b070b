"""The arguments of a prediction as plain arrays, held to the names that the fit keeps: the first
thing that each verb does.
"""

from typing import Any

import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.frames.names import Names
from ppl_gp.model.arguments import argument_names
from ppl_gp.results.query.own_arguments import observed_argument
from ppl_gp.results.record import Record


def by_names(fit: Record, X_new, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """(X_new, args, kwargs) with frames, columns and DataArrays as arrays, categories as the
    integers of training.

    Raises `DataError` as `frames.names.Names.again`. Plain arrays are as they were; O(M) where they
    stand for labels.
    """
    return named_at(fit, X_new, args, kwargs)[:3]


def named_at(fit: Record, X_new, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict, Names]:
    """As `by_names`, and what the arguments are called there."""
    order = argument_names(fit.model, 1 + len(args))
    aligned = fit.model.reading.row_axes
    (X_new, *others), kwargs, names = fit.names.again(order, (X_new, *args), kwargs, aligned)
    return X_new, tuple(others), kwargs, names


def with_observations(
    fit: Record, X_new, y_new, args: tuple, kwargs: dict
) -> tuple[Any, Any, tuple, dict]:
    """(X_new, y_new, args, kwargs), as `by_names`, with y_new as observations of the
    model's `y`, or what it calls them.
    """
    if y_new is None:
        X_new, args, kwargs = by_names(fit, X_new, args, kwargs)
        return X_new, None, args, kwargs
    if isinstance(y_new, list) and all(isinstance(x, str) for x in y_new):
        y_new = np.asarray(y_new)  # which is refused as text, where a list would be an option
    name = observed_argument(fit.model)
    if name in kwargs:
        raise DataError(
            f"the observations are given twice, as y_new and as {name}=...; give them once: "
            f"log_density(X_new, y_new), and arguments after y_new by name."
        )
    X_new, args, found = by_names(fit, X_new, args, {**kwargs, name: y_new})
    return X_new, found[name], args, {k: found[k] for k in kwargs}
