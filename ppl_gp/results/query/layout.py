"""What a model declares at new inputs: the sites of training, by name, as they stand there; and the
arguments of a prediction as plain arrays, held to the names that the fit keeps, with observations
at new inputs, checked before they are scored.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions import constraints

from ppl_gp.deep.structure import is_below
from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, PplGpError
from ppl_gp.frames.names import Names
from ppl_gp.gp import bare_shape, mask_of, unwrap
from ppl_gp.quick import full_jit, kept_values
from ppl_gp.reading.arguments import argument_names, argument_of, as_arrays, parameters_of
from ppl_gp.reading.dependence import depends, sources
from ppl_gp.reading.digest import arrays_of
from ppl_gp.reading.factors import is_concave
from ppl_gp.reading.refusals import VALUE_WANTED, integers_wanted, require_dtype
from ppl_gp.reading.roles import (
    data_axis,
    is_factor,
    is_gp,
    is_missing_part,
    is_observed,
    subsampling,
)
from ppl_gp.reading.tracing import run
from ppl_gp.results.record import Record

MAX_SUPPORT = 1000  # outcomes beyond which probabilities are not enumerated


@dataclass(frozen=True)
class ObservedSite:
    """A site that was observed in training and is predicted now."""

    name: str  # in the trace
    label: str  # for the user: `name` without the "_observed" of an obs_mask
    axis: int | None  # of the data in the batch shape; None where one event holds all data
    support: tuple[int | float, ...] | None  # the outcomes, where they are finitely many scalars
    boolean: bool
    # its log density is proved to be log-concave and smooth in the one function that there is
    concave: bool = False


@dataclass(frozen=True)
class Layout:
    """Static facts about a prediction. `num` is M, the number of rows of X_new."""

    sites: tuple[ObservedSite, ...]
    local_latents: tuple[str, ...]  # one per datum, so that those at new inputs are drawn anew
    num: int
    inner: tuple[str, ...] = ()  # GP sites that feed another GP, or a latent's prior
    after: tuple[tuple[str, str], ...] = ()  # (site, another one whose observations it sees)

    def require_apart(self) -> None:
        """Raise `DataError` where a site sees what another one observes."""
        for site, other in self.after:
            raise DataError(
                f"site '{site}' is computed from what site '{other}' observes, and a prediction "
                "averages over each site alone. Draw them together: fit.sample(key, X_new)."
            )


def layout(
    model: Callable, args: tuple, kwargs: dict, draws: Draws, num: int, latents: tuple[str, ...]
) -> Layout:
    """Trace a declared model at new inputs, GP sites at their prior means, and look up what its
    reading says of its sites. Abstract, unless values are wanted (a binomial's totals).

    `latents`: per-datum sites. Raises `DataError` where the model does not run.
    """
    seen = []

    def look(args, kwargs, draws):
        seen.append(_layout(model, args, kwargs, draws.at(0).hyper, num, latents))

    try:
        eqx.filter_eval_shape(look, args, kwargs, draws)
    except VALUE_WANTED:
        look(args, kwargs, draws)
    return seen[-1]


def _layout(model, args, kwargs, hyper, num: int, latents: tuple[str, ...]) -> Layout:
    trace = _run(model, args, kwargs, hyper)
    require_all_rows(trace)
    _require_same_members(trace, hyper)
    drawn = {k: s for k, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
    names = [k for k in drawn if model.reading.predicts(k) and not is_missing_part(k, trace)]
    sites = [_observed_site(k, drawn[k], trace) for k in names]
    gps = tuple(k for k, s in trace.items() if is_gp(s))

    def rerun(values):
        return _run(model, args, kwargs, {**hyper, **values})

    seeing = tuple(k for k in latents if k in trace)
    asked = gps if seeing or len(gps) > 1 else ()
    inner = tuple(g for g in asked if is_below(g, gps, seeing, trace, rerun))
    if len(gps) == 1 and len(trace[gps[0]]["fn"].shape()) == 1:
        trace_at = lambda f: run(model, args, kwargs, hyper, {gps[0]: f})  # noqa: E731
        sites = [replace(s, concave=_is_concave(trace_at, s.name, num)) for s in sites]
    return Layout(tuple(sites), latents, num, inner, _after(names, trace, rerun))


def _after(names: list[str], trace: dict, rerun: Callable) -> tuple[tuple[str, str], ...]:
    if len(names) < 2:
        return ()

    def distributions(values):
        again = rerun(values)
        return {k: arrays_of(unwrap(again[k]["fn"])) for k in names}

    found = sources(distributions, {k: trace[k]["value"] for k in names})
    return tuple((k, other) for k in names for other in names if other in {*chain(*found[k])})


def _is_concave(trace_at, name: str, num: int) -> bool:
    try:
        return is_concave(trace_at, (name,), num)
    except (TypeError, ValueError):  # rows of f and of X_new differ in number
        return False


def _require_same_members(trace: dict, hyper: dict, cause: Exception | None = None) -> None:
    """Raise `DataError` where a site has another shape than the values that were inferred."""
    for name, value in hyper.items():
        site = trace.get(name, {"type": ""})
        if site["type"] == "sample" and site["fn"].shape() != jnp.shape(value):
            raise DataError(
                f"site '{name}' has shape {site['fn'].shape()} with the arguments of this "
                f"prediction, and {jnp.shape(value)} in training: nothing was inferred about other "
                "members. Give the tables of training; for a new member, fit with its entry in "
                "them, where it needs no rows of its own."
            ) from cause


def require_all_rows(trace: dict, remedy: str = "and pass None here") -> None:
    """Raise `DataError` where a plate subsamples: an answer would be of random rows."""
    for name, (size, batch) in subsampling(trace).items():
        raise DataError(
            f"plate '{name}' of the model takes {batch} of {size} rows at random, and an answer is "
            "wanted for all: make its subsample_size an argument of the model that can be None, "
            f"{remedy.format(batch)}."
        )


def _run(model, args, kwargs, hyper):
    try:
        return run(model, args, kwargs, hyper)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        refused = "distribution got invalid" in str(error)  # by NumPyro: a parameter's value
        if refused or isinstance(error, (PplGpError, *VALUE_WANTED)):
            raise
        drawn = {}
        with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
            drawn = run(model, args, kwargs)
        _require_same_members(drawn, hyper, error)
        if (told := integers_wanted(error)) is not None:
            raise told from error
        shapes = [jnp.shape(a) for a in jax.tree.leaves((args, kwargs)) if hasattr(a, "shape")]
        why = model.reading.held
        caught = f" In training {why}" if why else ""
        left_out = [p for p in inspect.signature(model).parameters if p not in kwargs][len(args) :]
        if left_out:
            caught += f" Left at their defaults: {left_out}; pass what the model needs."
        raise DataError(
            f"the model does not run at the new inputs (array arguments of shapes {shapes}): "
            f"{error} Give every array one entry per row of X_new, and take the model's sizes from "
            f"X (numpyro.plate('data', X.shape[0])).{caught}"
        ) from error


def _observed_site(name, site, trace) -> ObservedSite:
    fn, ndim = site["fn"], len(bare_shape(site["fn"]))
    if (axis := data_axis(site, ndim)) is not None:
        axis += ndim
    boolean = unwrap(fn).support is constraints.boolean
    return ObservedSite(name, label_of(name, trace), axis, outcomes(fn), boolean)


def label_of(name: str, trace: dict) -> str:
    """A site's name for the user: without the "_observed" that obs_mask adds."""
    stem = name.removesuffix("_observed")
    return stem if f"{stem}_unobserved" in trace else name


def observed_names(trace: dict) -> list[str]:
    return [k for k, site in trace.items() if is_observed(site) and not is_factor(site)]


def outcomes(fn) -> tuple[int | float, ...] | None:
    """What an entry of fn can be: at most `MAX_SUPPORT` numbers, the same for all entries."""
    core = unwrap(fn)
    if isinstance(core, dist.MixtureGeneral):
        of_parts = {outcomes(part) for part in core.component_distributions}
        return of_parts.pop() if len(of_parts) == 1 else None
    if core.event_dim == 0 and core.support is constraints.boolean:  # a mixture does not list them
        return (0, 1)
    if core.event_dim or not core.has_enumerate_support:
        return None
    try:
        with kept_values():
            values = np.ravel(core.enumerate_support(expand=False))
    except (NotImplementedError, ValueError):  # a binomial with totals that differ, say
        return None
    return tuple(values.tolist()) if values.size <= MAX_SUPPORT else None


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
    one optional argument that no distribution, mask or factor was computed from in training; where
    there is none, the one that factors alone were.
    """
    parameters, reading = parameters_of(model), model.reading
    used = {argument_of(p) for p in (*reading.shaping, *reading.masking)}
    optional = [k for k, p in parameters.items() if p.default is None and k not in used]
    factored = {*map(argument_of, reading.factored)}
    free = [k for k in optional if k not in factored] or optional
    if "y" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or not free:
        return "y"
    if len(free) > 1:
        raise DataError(
            f"y_new: the model has no argument y, and its observations may be any of {free}; give "
            f"them by name, {free[0]}=..., after X_new."
        )
    return free[0]


def observing(query, y_new):
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
        if not bool(jnp.all(inside)) and not _has_moving_support(query, name):
            bad = np.asarray(value)[~np.asarray(inside)].ravel()[:3].tolist()
            raise DataError(
                f"y_new: site '{name}' observes {bad}, outside its support; give observations "
                "coded as in training."
            )
    return query


def _has_moving_support(query, name: str) -> bool:
    """Whether the support of a site is computed from latents, and NumPyro validates: then it judges
    y at each draw, as in training.
    """
    draw = query.draws.at(0)
    drawn = {k: s for k, s in query.trace(draw, {}).items() if s["type"] == "sample"}
    latent = {k: s["value"] for k, s in drawn.items() if not s["is_observed"]}

    def support(latent):
        trace = query.trace(replace(draw, hyper=draw.hyper | latent), {})
        return jax.tree.leaves(unwrap(trace[name]["fn"]).support)

    return unwrap(drawn[name]["fn"])._validate_args and depends(support, latent)


@full_jit
def _inside(query) -> tuple[dict, Array]:
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
