"""Groups of a tree: deterministic sites, what the model draws before and after it has seen the
data, prior densities, `predictions` and their inputs; and what variables and training rows are
called, with their dimensions: plates by name, else `<variable>_dim_<i>`.
"""

import json
from collections.abc import Container, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro import handlers

from ppl_gp.errors import DataError
from ppl_gp.frames.opened import ArrayNames
from ppl_gp.gp import bare, bare_shape, mask_of
from ppl_gp.quick import full_jit
from ppl_gp.reading.arguments import Leaves, argument_names, is_array
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.reading import Declared
from ppl_gp.reading.roles import (
    data_axis,
    data_plates,
    is_factor,
    is_missing_part,
    is_observed,
    roles,
)
from ppl_gp.reading.tracing import run
from ppl_gp.results.integrals.compiled import joint_draws
from ppl_gp.results.query.layout import label_of, named_at, observed_names
from ppl_gp.results.query.query import query_at
from ppl_gp.results.record import Record

# no chains, no draws
DATA = ("observed_data", "constant_data", "predictions_constant_data", "point_estimates")


class Part(NamedTuple):
    """Groups in which a name is one variable: those of sites, or those of arguments, as an argument
    may be called as a site. {group: {variable: array}}, {variable: dimensions after chain and
    draw}, {variable: names of its rows and columns}.
    """

    groups: dict[str, dict]
    dims: dict[str, list[str]]
    named: dict[str, ArrayNames]

    def dotted(self) -> "Part":
        """Under names that a tree can hold."""
        dims = {k: [dots(d) for d in own] for k, own in self.dims.items()}
        groups = {group: dotted(values) for group, values in self.groups.items() if values}
        return Part(groups, dotted(dims), dotted(self.named))


def scored_names(trace: dict) -> list[str]:
    """The sites of a trace that score data: those that observe, and factors that see data."""
    return [k for k, site in trace.items() if site["type"] == "sample" and site["is_scored"]]


def rows_that_count(site: dict) -> tuple[int, np.ndarray] | None:
    """(axis of the data without `to_event`, which rows have an entry that no mask leaves out,
    (N,)) of a site that scores data; `None` where one event holds all of them.
    """
    shape = bare_shape(site["fn"])
    if (axis := data_axis(site, len(shape))) is None:
        return None
    counts = np.broadcast_to(np.asarray(mask_of(site["fn"])), shape)
    by_row = np.moveaxis(counts, axis, 0).reshape(shape[axis], -1)
    return axis % len(shape), np.any(by_row, 1)


def counted_rows(trace: dict) -> np.ndarray:
    """The rows with an entry, of any site that scores data, that no mask leaves out."""
    found = [rows_that_count(trace[k]) for k in scored_names(trace)]
    rows = [x[1] for x in found if x is not None]
    return np.flatnonzero(np.any(rows, 0)) if rows else np.zeros(0, int)


def data_plate(trace: dict) -> str | None:
    """The name of the data's plate, if there is one; of several the first."""
    plates = data_plates(trace)
    sites = [s for s in trace.values() if s["type"] == "sample"]
    frames = (f.name for s in sites for f in s["cond_indep_stack"])
    return next((name for name in frames if name in plates), None)


def site_dimensions(name: str, site: dict, plate: str | None) -> list[str]:
    """Of a site of a trace; `plate`: the name of the axis of the data."""
    shape, batch = site["fn"].shape(), len(site["fn"].batch_shape)
    dims = [f"{name}_dim_{i}" for i in range(len(shape))]
    # also where `to_event`, or a GP, took the axis for an event
    if plate and site["data_axis"] is not None:
        dims[batch + site["data_axis"]] = plate
    for frame in site["cond_indep_stack"]:
        dims[batch + frame.dim] = frame.name
    return dims if not is_factor(site) else dims[:batch]


def deterministic_dimensions(
    fit: Record, shapes: Mapping[str, tuple], plate: str | None
) -> dict[str, list[str]]:
    """{deterministic site: dimensions} of sites of these shapes. The axis of the data is the one
    that is longer where the model is run with a row more: O(N).
    """
    grown = _with_a_row_more(fit) if shapes and plate and fit.model.reading.grows else {}
    found = {}
    for k, shape in shapes.items():
        lengths = enumerate(zip(*grown.get(k, (shape, shape)), strict=True))
        found[k] = [plate if plate and n < m else f"{k}_dim_{i}" for i, (n, m) in lengths]
    return found


def _with_a_row_more(fit: Record) -> dict[str, tuple]:
    """{deterministic site: (its shape in training, and with the first row again at the end)}."""
    model, hyper = fit.source, fit.draws.at(0).hyper
    leaves, axes = Leaves(model, fit.args, fit.kwargs), model.reading.row_axes
    own = {p: x for p, x in leaves.arrays.items() if p in axes}
    first = {p: jnp.take(x, jnp.arange(1), axes[p]) for p, x in own.items()}
    more = {p: jnp.concatenate([x, first[p]], axes[p]) for p, x in own.items()}
    before, after = (run(model, *leaves.replaced(x), hyper) for x in (own, more))
    known = [k for k, s in before.items() if s["type"] == "deterministic"]
    return {k: (jnp.shape(before[k]["value"]), jnp.shape(after[k]["value"])) for k in known}


def inputs_of(
    model: Declared, args: tuple, kwargs: dict, plate: str | None
) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """({path: array}, {path: dimensions}) of the arrays that distributions are computed from."""
    reading, arrays, dims = model.reading, {}, {}
    for path, value in Leaves(model, args, kwargs).arrays.items():
        if path in reading.shaping and np.ndim(value) > 0:
            arrays[path] = np.asarray(value)
            dims[path] = [f"{path}_dim_{i}" for i in range(np.ndim(value))]
            if plate and (axis := reading.row_axes.get(path)) is not None:
                dims[path][axis] = plate
    return arrays, dims


def dotted(named: Mapping) -> dict:
    """The same under names that a tree can hold: a slash, which scopes put into the names of sites,
    is a way down a tree, and becomes a dot. Raises `DataError` where two would be one.
    """
    if len({dots(k) for k in named}) < len(named):
        raise DataError(f"two of {list(named)} are one name in a tree; rename a site of the model.")
    return {dots(k): v for k, v in named.items()}


def dots(name: str) -> str:
    """One of them; a site or plate called as a tree's own dimensions has an underscore behind."""
    name = name.replace("/", ".")
    return f"{name}_" if name in ("chain", "draw") else name


def without_clashes(sites: dict, inputs: dict) -> tuple[dict, dict]:
    """Both {variable: dimensions}, with `_dim` behind a dimension that is called as a variable,
    which xarray takes for its coordinate, and `_` behind an argument's that a site of its name has.
    """
    taken = {*sites, *inputs}
    free = lambda own: [f"{d}_dim" if d in taken else d for d in own]  # noqa: E731
    apart = lambda k, own: [f"{d}_" if d.startswith(f"{k}_dim_") else d for d in own]  # noqa: E731
    return (
        {k: free(own) for k, own in sites.items()},
        {k: free(apart(k, own) if k in sites else own) for k, own in inputs.items()},
    )


def row_names(fit: Record, num: int) -> tuple[str | int, ...]:
    """A name for each of `num` training rows: the labels of the inputs' rows where these tell them
    apart, else those of another argument with an entry per row, else their numbers.
    """
    by_row = fit.model.reading.row_axes
    for path in (argument_names(fit.model, 1)[0], *fit.names):
        rows = (path in fit.names and fit.names[path].rows) or ()
        if by_row.get(path) == 0 and len(rows) == len(set(rows)) == num:
            return rows
    return tuple(range(num))


def deterministic_sites(fit: Record, values: dict) -> tuple[dict, dict]:
    """({site: (S, ...)} of deterministic sites that are computed from anything that has draws,
    {site: value} of the others) at `values`, draws of every site.
    """
    model, first = fit.source, jax.tree.map(lambda x: x[0], values)
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
    model, (key_after, key_prior) = fit.source, random.split(key)
    found = _after(model, values, fit.args, fit.kwargs, key_after)
    found["log_prior"] = {k: v for k, v in found["log_prior"].items() if k not in fit.points}
    with suppress(NotImplementedError):
        found |= prior_draws(model, fit.args, fit.kwargs, key_prior, num_draws)
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

    num = len(jax.tree.leaves(values)[0])
    return lax.map(one, (values, random.split(key, num)))


@full_jit
def prior_draws(model, args, kwargs, key, num_draws: int, outputs: tuple[str, ...] = ()) -> dict:
    """`prior` and `prior_predictive`: a draw of each site that is observed, and the sites `outputs`
    where they are not.
    """

    def one(key):
        key, key_y = random.split(key)
        with handlers.block():
            drawn = handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs)
        own = {k: s for k, s in drawn.items() if s["type"] in ("sample", "deterministic")}
        new = _replicated(drawn, key_y)
        left_out = {k: jnp.asarray(own[k]["value"]) for k in outputs if k in own and k not in new}
        # not observations, nor draws where these are missing
        seen = lambda k: is_missing_part(k, drawn) or f"{k}_unobserved" in drawn  # noqa: E731
        free = {k: jnp.asarray(s["value"]) for k, s in own.items() if not is_observed(s)}
        free = {k: x for k, x in free.items() if not (seen(k) or label_of(k, drawn) in left_out)}
        return {"prior": free, "prior_predictive": new | left_out}

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
