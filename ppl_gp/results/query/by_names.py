"""The arguments of a prediction as plain arrays, held to the names that the fit keeps: the first
thing that each verb does; and observations at new inputs, checked before they are scored.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ppl_gp.errors import DataError
from ppl_gp.frames.names import Names
from ppl_gp.gp import mask_of, unwrap
from ppl_gp.quick import full_jit
from ppl_gp.reading.arguments import argument_names, argument_of, as_arrays, parameters_of
from ppl_gp.reading.refusals import require_dtype
from ppl_gp.results.query.layout import observed_names
from ppl_gp.results.query.query import Query
from ppl_gp.results.record import Record


def by_names(fit: Record, X_new, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """(X_new, args, kwargs) with frames, columns and DataArrays as arrays, categories as the
    integers of training. Raises `DataError` as `frames.names.Names.again`.
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
    model's `y`, or what it calls them. Without `y_new` they may be in `kwargs`, as in the fit.
    """
    y_new = kwargs.pop("y", None) if y_new is None else y_new
    if y_new is None and "y" in fit.kwargs:
        raise DataError("this model needs y_new, as its fit had y.")
    if y_new is None:
        X_new, args, kwargs = by_names(fit, X_new, args, kwargs)
        return X_new, None, args, kwargs
    if isinstance(y_new, list) and all(isinstance(x, str) for x in y_new):
        y_new = np.asarray(y_new)  # which is refused as text, where a list would be an option
    name = observed_argument(fit.model)
    if name in kwargs:
        raise DataError(
            f"the observations are given twice: as {name}=..., and after X_new, where their place "
            "is. Give them once, and the model's other arguments by name."
        )
    X_new, args, found = by_names(fit, X_new, args, {**kwargs, name: y_new})
    return X_new, found[name], args, {k: found[k] for k in kwargs}


def observed_argument(model) -> str:
    """The name of the argument that holds the observations: `y`, or, of a model without one, the
    one optional argument that no distribution, mask or factor was computed from in training.
    """
    parameters, reading = parameters_of(model), model.reading
    used = {argument_of(p) for p in (*reading.shaping, *reading.masking, *reading.factored)}
    free = [k for k, p in parameters.items() if p.default is None and k not in used]
    if "y" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or not free:
        return "y"
    if len(free) > 1:
        raise DataError(
            f"y_new: the model has no argument y, and its observations may be any of {free}; give "
            f"them by name, {free[0]}=..., after X_new."
        )
    return free[0]


def require_no_such_argument(fit: Record, call: str, options: Iterable[str]) -> None:
    """Raise `DataError` where the model has an argument named as one of the call's options."""
    parameters = parameters_of(fit.model)
    if taken := [name for name in options if name in parameters or name in fit.kwargs]:
        raise DataError(
            f"the model has arguments {taken}, which {call} takes as its own options; give the "
            "model's another name."
        )


def observing(query: Query, y_new) -> Query:
    """The query with y_new observed, where it is given. Raises `DataError`: NaN, not the observed
    site's shape or dtype, outside its support.
    """
    if y_new is None:
        query.require_valid()
        return query
    y = as_arrays((), {"y": y_new})[1]["y"]
    query = query.observing({observed_argument(query.model): y})
    try:
        checked, valid = _inside(query)
    except (KeyError, IndexError, AttributeError) as error:
        raise DataError(
            f"y_new does not hold what the model observes ({error!r}); give it as in training."
        ) from error
    query.require_valid(valid)
    for name, (inside, value) in checked.items():
        if not bool(jnp.all(inside)):
            bad = np.asarray(value)[~np.asarray(inside)].ravel()[:3].tolist()
            raise DataError(
                f"y_new: site '{name}' observes {bad}, outside its support; give observations "
                "coded as in training."
            )
    return query


@full_jit
def _inside(query: Query) -> tuple[dict, Array]:
    trace = query.trace(query.draws.at(0), {})
    names = observed_names(trace)
    return {k: _check(k, trace[k], query.layout.num) for k in names}, query.valid()


def _check(name, site, num):
    fn, value = site["fn"], site["value"]
    if jnp.shape(value) != tuple(fn.shape()):
        raise DataError(
            f"y_new has shape {jnp.shape(value)} and X_new {num} row(s): site '{name}' observes "
            f"shape {jnp.shape(value)}, and its distribution has {tuple(fn.shape())} there; give "
            "one observation per row."
        )
    require_dtype(name, site, "y_new")
    core = unwrap(fn)
    batch = jnp.shape(value)[: jnp.ndim(value) - core.event_dim]
    return jnp.broadcast_to(core.support(value), batch) | ~mask_of(fn), value
