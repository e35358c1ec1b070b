"""The groups `predictions` and `predictions_constant_data` of a tree: what is drawn at new inputs,
and these inputs.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.frames.table import ArrayNames
from ppl_gp.model.arguments import argument_names
from ppl_gp.results.integrals.compiled import joint_sites
from ppl_gp.results.named_tree import own_coordinates, with_columns
from ppl_gp.results.query.by_names import named_at
from ppl_gp.results.query.query import case_at
from ppl_gp.results.record import Record
from ppl_gp.results.tree_dimensions import (
    data_plate,
    deterministic_dimensions,
    dotted,
    dotted_dimensions,
    input_dimensions,
    inputs_of,
    require_known,
    site_dimensions,
    sizes_of,
    without_clashes,
)


class Predicted(NamedTuple):
    """`groups`: {group: {variable: array}}, draws (S, ...) in `predictions`; `dims`: {variable:
    dimensions after chain and draw}; `named`: {variable: names}.
    """

    groups: dict[str, dict]
    dims: dict[str, list[str]]
    named: dict[str, ArrayNames]

    def options(self, shared: Mapping[str, Sequence], coords: Mapping[str, Sequence]) -> dict:
        """`pred_dims` and `pred_coords` of ArviZ's `from_dict`: the coordinates that the names
        give, `shared` ones where the dimension has that length, and `coords` before both.

        Raises `DataError` for coordinates of other dimensions or lengths.
        """
        sizes = sizes_of(self.groups, self.dims, draws=1)
        require_known("pred_coords", coords, sizes)
        fitting = {d: labels for d, labels in shared.items() if sizes.get(d) == len(labels)}
        own = own_coordinates(self.named, self.dims, sizes)
        return {"pred_dims": self.dims, "pred_coords": {**own, **fitting, **coords}}


def predicted_groups(
    fit: Record,
    predictions: Any,
    key,
    num: int,
    trained: Mapping[str, ArrayNames],
    fixed: Container[str],
) -> Predicted:
    """y, f and deterministic sites at new inputs, `num` joint draws: draw s at the hyperparameters
    of the posterior's draw s.

    `predictions`: the new inputs, or {argument: value} with them among others; `trained`: {variable
    of the training data: names}; `fixed`: deterministic sites that have no distribution, and so
    are with the new inputs. Raises `DataError` as `predict`. O(S M^3) for M rows.
    """
    X_new, kwargs = _arguments(fit, predictions)
    X_new, args, kwargs, names = named_at(fit, X_new, (), kwargs)
    case = case_at(fit, X_new, args, kwargs)
    f, y, further = joint_sites(case, key, num)
    inputs = inputs_of(fit.model, case.new_args, case.new_kwargs)
    trace = case.trace(case.draws.at(0), {})
    plate = data_plate(trace)
    labels = {s.name: s.label for s in case.layout.sites} | {k: k for k in f}
    dims = {v: site_dimensions(v, trace[k], plate) for k, v in labels.items()}
    dims |= deterministic_dimensions(fit, {k: np.shape(v)[1:] for k, v in further.items()}, plate)
    dims |= input_dimensions(fit.model, inputs, plate)
    inputs |= {k: np.asarray(further.pop(k)[0]) for k in list(further) if k in fixed}
    own = {p: found for p, found in names.items() if p in inputs}
    own |= {k: ArrayNames(trained[k].columns, trained[k].levels) for k in y if k in trained}
    inputs, named, dims = with_columns(inputs, own, without_clashes(dims))
    groups = {
        "predictions": dotted(jax.tree.map(np.asarray, {**further, **f, **y})),
        "predictions_constant_data": dotted(inputs),
    }
    return Predicted(groups, dotted_dimensions(dims), dotted(named))


def _arguments(fit: Record, predictions) -> tuple[Any, dict]:
    """(X_new, the other arguments by name)."""
    first = argument_names(fit.model, 1)[0]
    given = predictions if type(predictions) is dict else {first: predictions}
    if first not in given or "y" in given:
        raise DataError(
            f"to_datatree(predictions={{{', '.join(map(repr, given))}}}): give the new inputs, or "
            f"a dictionary of the model's arguments by name, {{{first!r}: the new inputs, ...}}, "
            "without y, which is predicted."
        )
    return given[first], {k: v for k, v in given.items() if k != first}
