"""Groups of a tree: deterministic sites, what the model draws before and after it has seen the
data, prior densities, `predictions` and their inputs; and what a fit's names say in them.
"""

import json
from collections.abc import Container, Mapping
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro import handlers

from ppl_gp.errors import DataError
from ppl_gp.frames.opened import ArrayNames
from ppl_gp.gp import bare
from ppl_gp.quick import full_jit
from ppl_gp.reading.arguments import Leaves, argument_names, is_array
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.roles import is_factor, is_missing_part, is_observed, roles
from ppl_gp.reading.tracing import run
from ppl_gp.results.integrals.compiled import joint_draws
from ppl_gp.results.query.layout import label_of, named_at, observed_names
from ppl_gp.results.query.query import query_at
from ppl_gp.results.record import Record
from ppl_gp.results.tree_dimensions import (
    DATA,
    Part,
    data_plate,
    deterministic_dimensions,
    inputs_of,
    rows_that_count,
    site_dimensions,
    without_clashes,
)

_PRIOR = 1  # folded into the key: other draws than those of the posterior


def deterministic_sites(fit: Record, values: dict) -> tuple[dict, dict]:
    """({site: (S, ...)} of deterministic sites that are computed from anything that has draws,
    {site: value} of the others) at `values`, draws of every site.
    """
    model, first = fit.source, {k: v[0] for k, v in values.items()}
    at = lambda values: _deterministic(run(model, fit.args, fit.kwargs, values, values))  # noqa: E731
    seen = {k: frozenset().union(*jax.tree.leaves(v)) for k, v in sources(at, first).items()}
    still = {k: v for k, v in at(first).items() if seen[k] <= fit.points} if seen else {}
    moving = tuple(k for k in seen if k not in still)
    return _each(model, values, moving, fit.args, fit.kwargs) if moving else {}, still


def _deterministic(trace: dict) -> dict:
    """Without what NumPyro's `obs_mask` puts together of observations and draws."""
    return {
        k: s["value"]
        for k, s in trace.items()
        if s["type"] == "deterministic" and is_array(s["value"]) and f"{k}_unobserved" not in trace
    }


@full_jit
def _each(model, values: dict, names: tuple[str, ...], args, kwargs) -> dict:
    def one(values):
        found = _deterministic(run(model, args, kwargs, values, values))
        return {k: found[k] for k in names}

    return lax.map(one, values)


def further_groups(fit: Record, values: dict, key, num_draws: int) -> dict[str, dict]:
    """{group: {variable: (S, ...)}}: `posterior_predictive` and `log_prior` (nats, of each
    hyperparameter that has draws, in its batch shape) at `values`, draws of every site; `prior` and
    `prior_predictive` of `num_draws` draws, O(S N^3), where the prior can be drawn.
    """
    model = fit.source
    found = _after(model, values, fit.args, fit.kwargs, key)
    found["log_prior"] = {k: v for k, v in found["log_prior"].items() if k not in fit.points}
    with suppress(NotImplementedError):
        found |= prior_draws(model, fit.args, fit.kwargs, random.fold_in(key, _PRIOR), num_draws)
    return found


def _replicated(trace: dict, key) -> dict:
    """A draw of each observed site given all else, without its observations."""
    return {
        label_of(k, trace): bare(trace[k]["fn"]).sample(random.fold_in(key, i))
        for i, k in enumerate(observed_names(trace))
    }


@full_jit
def _after(model, values: dict, args, kwargs, key) -> dict:
    def one(entry):
        values, key = entry
        trace = run(model, args, kwargs, values, values)
        names = roles(trace).hyper
        return {
            "posterior_predictive": _replicated(trace, key),
            "log_prior": {k: trace[k]["fn"].log_prob(trace[k]["value"]) for k in names},
        }

    num = next(iter(values.values())).shape[0]
    return lax.map(one, (values, random.split(key, num)))


@full_jit
def prior_draws(model, args, kwargs, key, num_draws: int) -> dict:
    """`prior` and `prior_predictive` of a model with its observations."""

    def one(key):
        with handlers.block():
            drawn = handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs)
        own = {k: s for k, s in drawn.items() if s["type"] in ("sample", "deterministic")}
        # not observations, nor draws where these are missing
        seen = lambda k: is_missing_part(k, drawn) or f"{k}_unobserved" in drawn  # noqa: E731
        free = {k: jnp.asarray(s["value"]) for k, s in own.items() if not is_observed(s)}
        free = {k: x for k, x in free.items() if not seen(k)}
        return {"prior": free, "prior_predictive": _replicated(drawn, random.fold_in(key, 1))}

    return lax.map(one, random.split(key, num_draws))


def parts_of(
    drawn: Part, group: str, inputs: dict, along: dict, names: Mapping, still: Mapping
) -> tuple[Part, Part]:
    """`drawn`, and `group` of the arguments `inputs`, whose dimensions are `along`, with their
    `names`: under names that a tree can hold and that are one variable or dimension each. `still`:
    values of sites that go to the arguments.
    """
    for k, value in still.items():
        own = f"{k}_" if k in inputs else k
        inputs[own], along[own] = value, drawn.dims[k]
    dims, along = without_clashes(drawn.dims, along)
    constant = with_columns(group, inputs, along, names)
    return drawn._replace(dims=dims).dotted(), constant.dotted()


def with_columns(group: str, inputs: dict, dims: dict, named: Mapping[str, ArrayNames]) -> Part:
    """The arguments, in this group, with the columns of tables as variables of their own, before
    the tables: what ArviZ's pictures put along an axis. A name that another argument or a dimension
    has, or that a tree takes for a path, is left out.
    """
    taken = {*dims, *(d for own in dims.values() for d in own)}
    columns, labels, along = {}, {}, {}
    for path, names in named.items():
        if path not in inputs or not names.columns or np.ndim(inputs[path]) != 2:
            continue
        for j, column in enumerate(names.columns):
            if column and "/" not in column and column not in {*taken, *columns, ".", ".."}:
                columns[column] = inputs[path][:, j]
                labels[column] = ArrayNames((column,), (names.level(j),))
                along[column] = dims[path][:1]
    return Part({group: {**columns, **inputs}}, {**dims, **along}, {**named, **labels})


def datasets(
    parts: tuple[Part, ...], option: str, shared: Mapping, given: Mapping
) -> dict[str, Any]:
    """{group: Dataset}, by ArviZ. A log density has the batch's dimensions alone. Variables of
    labels have the attribute `levels`: a list of them, the integers being their places; of a frame,
    JSON of {column: list}.

    Coordinates are columns and rows that have names, before these `shared` ones where the dimension
    has that length, before both `given` ones, which `option` has.
    """
    import arviz_base  # with xarray and pandas it takes a second, which a fit need not wait for

    found, coords = {}, _coordinates(parts, option, shared, given)
    for groups, dims, named in parts:
        for group, values in groups.items():
            density, draws = group in ("log_likelihood", "log_prior"), [] if group in DATA else None
            found[group] = arviz_base.dict_to_dataset(
                values, coords=coords, dims={**dims}, sample_dims=draws, skip_event_dims=density
            )
            for variable in [k for k in named if k in values and any(named[k].levels)]:
                found[group][variable].attrs["levels"] = _told(named[variable])
    return found


def _coordinates(parts: tuple[Part, ...], option: str, shared: Mapping, given: Mapping) -> dict:
    """{dimension: labels}. Raises `DataError` for given labels of other dimensions or lengths."""
    found: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for groups, dims, named in parts:
        for group, values in groups.items():
            first = 0 if group in DATA else 2  # after chain and draw
            for k, v in values.items():
                sizes |= zip(dims.get(k, ()), np.shape(v)[first:], strict=False)
        for variable, names in named.items():
            own = dims.get(variable, ())
            if names.columns and len(own) > 1:
                found.setdefault(own[-1], list(names.columns))
            if names.rows and own:
                found.setdefault(own[0], list(names.rows))
    for name, labels in given.items():
        if sizes.get(name) != len(labels):
            raise DataError(
                f"to_datatree({option}={{{name!r}: {len(labels)} labels}}): the tree's dimensions "
                f"are {sizes}."
            )
    fitting = {d: x for d, x in {**found, **shared}.items() if sizes.get(d) == len(x)}
    return {**fitting, **given}


def _told(names: ArrayNames) -> list[str] | str:
    if len(names.levels) == 1 and names.levels[0]:
        return list(names.levels[0])
    columns = names.columns or tuple(map(str, range(len(names.levels))))
    pairs = zip(columns, names.levels, strict=True)
    return json.dumps({k: labels for k, labels in pairs if labels})


def names_of_observed(fit: Record, trace: dict) -> dict[str, ArrayNames]:
    """{observed site: names of the argument that it observes, which has the same values}."""
    leaves, found = Leaves(fit.model, fit.args, fit.kwargs).arrays, {}
    for k in observed_names(trace):
        y = trace[k]["value"]
        for path, names in fit.names.items():
            if path in leaves and (y is leaves[path] or np.array_equal(y, leaves[path])):
                found.setdefault(k.removesuffix("_observed"), names)
    return found


def without_masked_rows(densities: Any, scored: dict[str, dict]) -> Any:
    """A Dataset of log densities without the rows that masks leave out of all sites {variable:
    site of the training trace}: ArviZ's loo refuses a density of 0 in every draw.
    """
    dims, counted = set(), []
    for k, site in scored.items():
        if is_factor(site) or (found := rows_that_count(site)) is None:
            return densities
        axis, counts = found
        dims.add(densities[k].dims[2 + axis])
        counted.append(counts)
    if len(dims) != 1 or not np.any(counted):
        return densities
    return densities.isel({dims.pop(): np.flatnonzero(np.any(counted, 0))})


def predicted_groups(
    fit: Record,
    predictions: Any,
    key,
    num: int,
    trained: Mapping[str, ArrayNames],
    fixed: Container[str],
) -> tuple[Part, Part]:
    """y, f and deterministic sites at new inputs, `num` joint draws, draw s at the hyperparameters
    of the posterior's draw s; and these inputs.

    `predictions`: the new inputs, or {argument: value} with them among others; `trained`: {variable
    of the training data: names}; `fixed`: deterministic sites that have no distribution, and so
    are with the new inputs. Raises `DataError` as `predict`. O(S M^3) for M rows.
    """
    X_new, kwargs = _arguments(fit, predictions)
    X_new, args, kwargs, names = named_at(fit, X_new, (), kwargs)
    query = query_at(fit, X_new, args, kwargs)
    f, y, further = joint_draws(query, key, num, further=True)
    trace = query.trace(query.draws.at(0), {})
    plate = data_plate(trace)
    labels = {s.name: s.label for s in query.layout.sites} | {k: k for k in f}
    dims = {v: site_dimensions(v, trace[k], plate) for k, v in labels.items()}
    dims |= deterministic_dimensions(fit, {k: np.shape(v)[1:] for k, v in further.items()}, plate)
    still = {k: np.asarray(further.pop(k)[0]) for k in [*further] if k in fixed}
    drawn = {"predictions": jax.tree.map(np.asarray, {**further, **f, **y})}
    own = {k: ArrayNames(trained[k].columns, trained[k].levels) for k in y if k in trained}
    new = inputs_of(fit.model, query.new_args, query.new_kwargs, plate)
    return parts_of(Part(drawn, dims, own), "predictions_constant_data", *new, names, still)


def _arguments(fit: Record, predictions) -> tuple[Any, dict]:
    first = argument_names(fit.model, 1)[0]
    given = predictions if type(predictions) is dict else {first: predictions}
    if first not in given or "y" in given:
        raise DataError(
            f"to_datatree(predictions={{{', '.join(map(repr, given))}}}): give the new inputs, or "
            f"a dictionary of the model's arguments by name, {{{first!r}: the new inputs, ...}}, "
            "without y, which is predicted."
        )
    return given[first], {k: v for k, v in given.items() if k != first}
