"""Data for pictures: arrays, and what a fit's names, or the data's own, call their axes."""

from typing import Any, NamedTuple

import numpy as np

from ppl_gp.frames.names import arrays
from ppl_gp.frames.opened import opened
from ppl_gp.frames.table import ArrayNames, Labelled
from ppl_gp.model.arguments import argument_names
from ppl_gp.results.query.by_names import with_observations
from ppl_gp.results.record import Record


class Shown(NamedTuple):
    """Inputs and observations as arrays; names of the inputs' columns and of y, and the labels of
    y, `None` where there are none.
    """

    X: np.ndarray
    y: np.ndarray
    columns: tuple[str, ...] | None
    response: str | None
    levels: tuple[str, ...] | None


def shown(fit: Record, X, y) -> Shown:
    """The names are those of the fit, else those that X and y come with."""
    order = argument_names(fit.model, 1)
    _, _, own = arrays(order, (X,), {"y": y})
    given = [fit.names.get(path) or own.get(path) or ArrayNames() for path in (order[0], "y")]
    columns, of_y = given[0].columns, given[1].columns
    X, y, _, _ = with_observations(fit, X, y, (), {})
    response = of_y[0] if of_y and len(of_y) == 1 else None
    return Shown(np.asarray(X), np.asarray(y), columns, response, given[1].level(0))


class Variable(NamedTuple):
    """A variable to draw along: numbers (M,), its name or `""`, and the labels of the numbers where
    it holds labels.
    """

    values: np.ndarray
    name: str
    labels: tuple[str, ...] | None


def variable(what: str, values: Any) -> Variable:
    """Of a column of a frame, a DataArray or an array. Raises `DataError` as
    `frames.opened.opened`.
    """
    if (table := opened(what, values)) is None:
        return Variable(np.asarray(values), "", None)
    (part, *_), names = table.parts, table.names
    labels = part.labels if isinstance(part, Labelled) else None
    array = table.array(what, names.levels or (None,))
    return Variable(array, names.columns[0] if names.columns else "", labels)
