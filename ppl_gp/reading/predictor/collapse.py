"""`collapse(model, ...)`: which Gaussian sites of a model are integrated, and the model without
them.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.extend.core import Literal

from ppl_gp.gp import GP, hidden_axes, unwrap
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.declared import Declared
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.digest import arrays_of
from ppl_gp.reading.interactions import dependence
from ppl_gp.reading.predictor.collapsed import Collapsed, Observed, Plan
from ppl_gp.reading.predictor.predictor import (
    Rest,
    cut,
    innovations,
    is_gaussian,
    predictor_sources,
    shapes,
    traced,
    traced_at,
)
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.reading.predictor.sites import spread_of
from ppl_gp.reading.predictor.skeleton import Skeleton, skeleton
from ppl_gp.reading.roles import (
    is_gp,
    is_missing_part,
    is_observed,
    is_whole,
    roles,
)
from ppl_gp.reading.tracing import run

_OBSERVED = "_observed"
_SITE, _REST = "site ", "rest"
# moves of entries: what comes out is what went in, elsewhere
_MOVES = {"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "copy_p"}


class Integrable(NamedTuple):
    """`sites`: integrated; their predictors are `functions` functions per datum in all."""

    sites: tuple[str, ...]
    functions: int


@contextmanager
def _of_any_length():
    """A plate that subsamples in the model is traced at other lengths than its own, of which
    NumPyro warns.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subsample_size does not match")
        yield


@_of_any_length()
def collapse(
    model: Declared,
    args: tuple,
    kwargs: dict,
    given: Mapping | None = None,
    only=None,
    plain: bool = False,
) -> Declared:
    """The model with its Gaussian sites integrated into its linear predictors; the model itself
    where it is one GP site of one function and nothing else, or where a datum sees the sites
    through no linear predictor.

    `given`: values of sites that are held, and so not integrated. `only`: the only sites to
    integrate beside GPs. `plain`: also the model of one GP site, whose predictor may have a
    coefficient and an offset. A model that holds arrays of N rows of its own, and so cannot be
    traced at another number of rows, stays as it is. Abstract traces, some 0.1 s.
    """
    trace = run(model, args, kwargs, dict(given or {}))
    sites = {
        k: is_gp(s)
        for k, s in trace.items()
        if is_gaussian(s)
        and is_whole(s)
        and not is_missing_part(k, trace)
        and k not in (given or {})
        and (only is None or k in only or is_gp(s))
    }
    done = any(isinstance(unwrap(trace[k]["fn"]), PredictorGP) for k in sites)
    stays = done or not model.reading.grows or bool(model.reading.without_rows)
    if stays or not sites or (_is_plain(trace, sites) and not plain):
        return model
    bones, found = skeleton(model, args, kwargs), roles(trace)
    arrays = Leaves(model, args, kwargs).arrays
    free = (*found.gps, *found.hyper, *found.params, *found.local_latents)
    # what stands one a datum has another shape for other rows, and is drawn where it is not given
    values = {k: trace[k]["value"] for k in free if not _is_by_row(trace[k])}
    whole = integrable(model, bones, arrays, values, sites, asked=only is not None)
    if whole is None or (_is_plain(trace, whole.sites) and not plain):
        return model
    if {*found.gps, *found.local_latents} - set(whole.sites):
        return model  # something that stands beside the data is left, a layer below, say
    return Collapsed(model, _plan(model, bones, trace, whole, arrays, values), bones)


def _is_by_row(site: dict) -> bool:
    return site["type"] == "sample" and site["data_axis"] is not None


def _is_plain(trace: dict, sites) -> bool:
    """Whether the only site is a GP of one function at the data's inputs, read as it is."""

    def plain(site):
        return is_gp(site) and len(site["fn"].shape()) == 1 and _is_by_row(site)

    return len(sites) == 1 and all(plain(trace[k]) for k in sites)


def _plan(model, bones: Skeleton, trace: dict, found: Integrable, arrays, values) -> Plan:
    axes = {k: _axis_from_right(trace[k]) for k in found.sites}
    hyper = {k: v for k, v in values.items() if k not in found.sites}
    name = "eta"
    while name in trace:
        name += "_"
    few = Rest(bones.resized(arrays, 3), shapes(hyper))
    return Plan(
        found.sites,
        found.functions,
        are_independent(model, bones, found.sites, axes, few),
        softmax_of(model, bones, found.sites, few),
        tuple((k, a) for k, a in axes.items() if a is not None),
        _observations(model, bones, trace, arrays, values),
        tuple(sorted(hyper)),
        name,
        _factored(model, bones, found.sites, Rest(arrays, hyper)),
    )


def _factored(model, bones: Skeleton, sites, rest: Rest) -> tuple[str, ...]:
    """Arguments with an entry per datum that factors alone see and the predictor comes from."""
    asked = [p for p, _ in bones.rows if p in model.reading.factored]
    if not asked:
        return ()
    seen = predictor_sources(model, bones, sites, rest)
    return tuple(p for p in asked if p in seen)


def _axis_from_right(site: dict) -> int | None:
    """Of the data, in a value of the site."""
    if site["data_axis"] is None or is_gp(site):
        return None if site["data_axis"] is None else -1
    return site["data_axis"] - hidden_axes(site["fn"]) - unwrap(site["fn"]).event_dim


def _observations(model, bones: Skeleton, trace: dict, arrays, values) -> tuple:
    """What the observed sites are computed from."""

    def parts(named):
        found = run(model, *bones.arguments(named), values, values)
        return {
            k: [arrays_of(s["fn"]), arrays_of(s["value"])]
            for k, s in found.items()
            if is_observed(s)
        }

    flow = sources(parts, shapes(dict(arrays)))
    told = lambda found: tuple(sorted(frozenset().union(*found)))  # noqa: E731
    return tuple(
        (k, Observed(_label(k, trace), told(fn), told(value))) for k, (fn, value) in flow.items()
    )


def _label(name: str, trace: dict) -> str:
    stem = name.removesuffix(_OBSERVED)
    return stem if is_missing_part(f"{stem}_unobserved", trace) else name


def integrable(
    model: Callable,
    skeleton: Skeleton,
    arrays: Mapping[str, Any],
    values: Mapping[str, Any],
    sites: Mapping[str, bool],
    asked: bool = False,
) -> Integrable | None:
    """What of `sites` is integrated, or `None` where the data see no linear predictor of them.

    A site is left a hyperparameter where a kernel, a scale or another prior is computed from it
    (but for a Gaussian prior's mean), and, unless it is asked for by name, where it would make a
    datum see more functions than the GPs alone do: the logarithm of a noise with a normal prior,
    say, or an intercept for each of more outputs than there are GPs.

    `values`: {site: value} of everything that is random. `sites`: {Gaussian site: whether it is a
    GP}. `asked`: whether the user named them, so that all of them are wanted, however many
    functions a datum then sees. Abstract traces, at most two for each site.
    """
    left = _shaping_nothing(model, skeleton, arrays, values, list(sites))

    def found(some) -> Integrable | None:
        hyper = {k: v for k, v in values.items() if k not in some}
        seen = cut(model, skeleton, tuple(some), Rest(dict(arrays), hyper)) if some else None
        return None if seen is None else Integrable(tuple(some), seen.functions)

    return _chosen(found, left, [k for k in left if sites[k]], asked)


def _chosen(found_of: Callable, sites: list[str], gps: list[str], asked: bool) -> Integrable | None:
    """All sites, if a datum depends on one function of them, or if they were asked for; else the
    GPs, and what adds no function; else, if that is nothing (scores of classes without a GP), all.
    """
    if (whole := found_of(sites)) is not None and (asked or whole.functions == 1):
        return whole
    found = found_of(gps)
    for site in (k for k in sites if k not in gps):
        more = found_of([*(found.sites if found else ()), site])
        if more is not None and more.functions <= (found.functions if found else 1):
            found = more
    return found or whole


def _shaping_nothing(model, skeleton, arrays, values, sites: list[str]) -> list[str]:
    """The sites that no prior sees but through its mean."""
    hyper = {k: v for k, v in values.items() if k not in sites}
    rest = shapes(Rest(dict(arrays), hyper))

    def priors(named):
        e = {k: named[_SITE + k] for k in sites}
        trace = traced_at(model, skeleton, e, named[_REST])
        free = {
            k: s
            for k, s in trace.items()
            if s["type"] == "sample" and not is_observed(s) and not is_missing_part(k, trace)
        }
        return arrays_of([spread_of(s["fn"]) if k in sites else s["fn"] for k, s in free.items()])

    e = innovations(model, skeleton, rest, sites)
    flow = sources(priors, {_REST: rest} | {_SITE + k: x for k, x in e.items()})
    shaping = frozenset().union(*flow)
    return [k for k in sites if _SITE + k not in shaping]


def are_independent(
    model: Callable, bones: Skeleton, sites: tuple[str, ...], axes: dict, rest: Rest
) -> bool:
    """Whether each function is made of GPs at the data's inputs, and of units that no other
    function sees.
    """
    whole = traced(model, bones, sites, rest)
    e = innovations(model, bones, rest, sites)
    trace = jax.eval_shape(lambda rest: _kinds(model, bones, e, rest, sites), rest)
    if len(trace) < len(sites) or any(axes[k] is None for k in sites):
        return False
    if any(e[k].shape[-1] != bones.num_rows(rest.arrays) for k in sites):
        return False
    rows = {k: int(np.prod(e[k].shape[:-1])) for k in sites}
    flat = np.zeros((sum(rows.values()), bones.num_rows(rest.arrays)))

    def eta(flat):
        parts, at = {}, 0
        for k, num in rows.items():
            parts[k] = jnp.reshape(flat[at : at + num], e[k].shape)
            at += num
        zero = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), rest)
        return [whole.eta(parts, zero)]

    (on,) = dependence(eta, len(flat), flat).on  # (F, R, n)
    return bool(np.all(np.sum(np.any(on, -1), 1) <= 1))


def _kinds(model, bones, e, rest, sites):
    """An array for each of the sites that is a GP."""
    zero = {k: np.zeros(x.shape, x.dtype) for k, x in e.items()}
    trace = traced_at(model, bones, zero, rest)
    return {k: jnp.zeros(()) for k in sites if isinstance(unwrap(trace[k]["fn"]), GP)}


def softmax_of(model: Callable, bones: Skeleton, sites: tuple[str, ...], rest: Rest) -> tuple:
    """(r_1, ..., r_C): score c of the only observed site, a categorical one, is function r_c; ()
    where that is not how the functions enter.
    """
    whole, found = traced(model, bones, sites, rest), []
    num = bones.num_rows(rest.arrays)
    functions = sum(int(np.prod(s)) for s in whole.predictors.shapes) // num

    def scores(eta, rest):
        parts = whole.observed(eta, rest)
        fns: list[Any] = [unwrap(part.fn) for part in parts.values()]
        categorical = [fn for fn in fns if type(fn) is dist.CategoricalLogits]
        alone = len(fns) == len(categorical) == 1
        found.append(alone and jnp.shape(categorical[0].logits) == (num, functions))
        return categorical[0].logits if found[-1] else eta

    shape = jax.ShapeDtypeStruct((functions, num), jnp.result_type(float))
    closed = jax.make_jaxpr(scores)(shape, rest)
    if functions < 2 or not found[-1]:
        return ()
    places = _moved(closed.jaxpr, np.arange(functions * num).reshape(functions, num))
    if places is None or places.shape != (num, functions):
        return ()
    order = places[0] // num
    expected = order[None, :] * num + np.arange(num)[:, None]
    return tuple(order.tolist()) if np.array_equal(places, expected) else ()


def _moved(jaxpr, entries: np.ndarray) -> np.ndarray | None:
    """Where the entries of the first input end in the only output, if they are only moved."""
    (last,), made = jaxpr.outvars, {v: e for e in jaxpr.eqns for v in e.outvars}
    steps = []
    while last is not jaxpr.invars[0]:
        if isinstance(last, Literal) or last not in made:
            return None
        equation = made[last]
        if equation.primitive.name not in _MOVES or len(equation.invars) != 1:
            return None
        steps.append(equation)
        last = equation.invars[0]
    with jax.ensure_compile_time_eval():
        for equation in reversed(steps):
            entries = equation.primitive.bind(jnp.asarray(entries), **equation.params)
    return np.asarray(entries)
