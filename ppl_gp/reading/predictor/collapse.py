"""`collapse(model, ...)`: which Gaussian sites of a model are integrated, and the model without
them.
"""

import itertools
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from ppl_gp.gp import hidden_axes, unwrap
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.dependence import depends, sources
from ppl_gp.reading.digest import arrays_of
from ppl_gp.reading.fingerprint import by_shapes
from ppl_gp.reading.interactions import dependence
from ppl_gp.reading.label_rules import crossing, is_entry_by_entry
from ppl_gp.reading.predictor.collapsed import Collapsed, Observed, Plan
from ppl_gp.reading.predictor.cut import evaluated
from ppl_gp.reading.predictor.predictor import Cut, Innovated, Rest, is_gaussian, shapes, spread_of
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.reading.predictor.skeleton import Skeleton, skeleton
from ppl_gp.reading.reading import Declared
from ppl_gp.reading.roles import (
    is_gp,
    is_missing_part,
    is_observed,
    is_whole,
    log_prob_per_datum,
    roles,
    subsampling,
)
from ppl_gp.reading.tracing import run
from ppl_gp.reading.walk import MOVES, line_of, needed

_OBSERVED = "_observed"
_SITE, _REST = "site ", "rest"
_MOVES = MOVES - {"slice"}  # which would leave entries out


@contextmanager
def _of_any_length():
    """Without NumPyro's warning of plates that subsample: they are traced at other lengths."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subsample_size does not match")
        yield


def collapse(
    model: Declared,
    args: tuple,
    kwargs: dict,
    given: Mapping | None = None,
    only: Collection[str] | None = None,
    plain: bool = False,
    lone: bool = False,
) -> Declared:
    """The model with its Gaussian sites integrated into its linear predictors; the model itself
    where it is one GP site of one function and nothing else, or where a datum sees the sites
    through no linear predictor.

    `given`: values of sites that are held, and so not integrated. `only`: the only sites to
    integrate beside GPs. `plain`: also the model of one GP site, whose predictor may have a
    coefficient and an offset. `lone`: also sites that rows see by broadcasting alone, in y ~
    Normal(theta, 1) for a plate of y. A model that holds arrays of N rows of its own stays as it
    is: no other number of rows can be traced. Abstract traces, some 0.1 s, once for arguments of
    these shapes.
    """
    named = None if only is None else tuple(sorted(only))
    if (found := _found(model, args, kwargs, dict(given or {}), named, plain, lone)) is None:
        return model
    plan, bones = found
    return Collapsed(model, plan, bones.with_first(Leaves(model, args, kwargs)))


@by_shapes
@_of_any_length()
def _found(
    model: Declared, args: tuple, kwargs: dict, given: dict, only, plain: bool, lone: bool
) -> tuple[Plan, Skeleton] | None:
    trace = run(model, args, kwargs, given)
    known = {k: s for k, s in trace.items() if is_gaussian(s) and is_whole(s) and k not in given}
    asked = [k for k, s in known.items() if only is None or k in only or is_gp(s)]
    sites = tuple(k for k in asked if not is_missing_part(k, trace))
    done = any(isinstance(unwrap(trace[k]["fn"]), PredictorGP) for k in sites)
    stays = done or not model.reading.grows or bool(model.reading.without_rows)
    stays = stays or bool(subsampling(trace))  # a batch is no slice of a model of other rows
    if stays or not sites or (_is_plain(trace, sites) and not plain):
        return None
    whole, found = Innovated(model, skeleton(model, args, kwargs), sites), roles(trace)
    free = (*found.gps, *found.hyper, *found.params, *found.local_latents)
    # what is per datum has another shape for other rows, and is drawn where it is not given
    values = {k: trace[k]["value"] for k in free if not _is_by_row(trace[k])}
    rest = Rest(Leaves(model, args, kwargs).arrays, values)
    whole = integrable(whole, rest, found.gps, only is not None, lone)
    whole = whole if only is not None else _without_hyperpriors(whole, rest, found.gps)
    if not whole.sites or (_is_plain(trace, whole.sites) and not plain):
        return None
    if {*found.gps, *found.local_latents} - set(whole.sites):
        return None  # something that stands beside the data is left, a layer below, say
    return _plan(whole, trace, rest), whole.skeleton


def _is_by_row(site: dict) -> bool:
    return site["type"] == "sample" and site["data_axis"] is not None


def _is_plain(trace: dict, sites) -> bool:
    """Whether the only site is a GP of one function at the data's inputs, read as it is."""
    site = trace[sites[0]]
    return len(sites) == 1 and is_gp(site) and len(site["fn"].shape()) == 1 and _is_by_row(site)


def _plan(whole: Innovated, trace: dict, rest: Rest) -> Plan:
    """Of the sites that are integrated; `rest`: arguments, and values of all that is random."""
    axes = {k: _axis_from_right(trace[k]) for k in whole.sites}
    hyper = {k: v for k, v in rest.hyper.items() if k not in whole.sites}
    few = whole.few(Rest(rest.arrays, hyper))
    cut, name = cast(Cut, whole.cut(few)), "eta"
    while name in trace:
        name += "_"
    return Plan(
        whole.sites,
        cut.functions,
        _are_independent(whole, trace, axes, few),
        _softmax(whole, cut.functions, few),
        tuple((k, a) for k, a in axes.items() if a is not None),
        _observations(whole, trace, rest),
        tuple(sorted(hyper)),
        name,
        _factored(whole, few),
        whole.lone,
        (*cut.coupled, *_crossing(whole, trace, axes, few)),
    )


def _crossing(whole: Innovated, trace: dict, axes: dict, few: Rest) -> Iterator[tuple]:
    """(observed site, kind of the cause, line) where row n of the predictor sees an innovation of
    another row: e ~ Normal(f - f.mean(), 1), of an f with one value per datum.
    """
    zero, eta = whole.zero(few), whole.at(few).eta
    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), few)
    for site, axis in axes.items():
        if axis is not None and site not in whole.lone:
            one = lambda e, k=site: eta({**zero, k: e}, rest)  # noqa: E731
            if (cause := crossing(one, zero[site], axis)) is not None:
                found = (k for k, s in trace.items() if is_observed(s))
                observed = next(iter(whole.model.reading.observed), None) or next(found)
                yield observed, cause.kind, line_of(cause.source)


def _factored(whole: Innovated, few: Rest) -> tuple[str, ...]:
    """Arguments with an entry per datum that factors alone see and the predictor comes from."""
    reading = whole.model.reading
    if not (asked := [p for p, _ in whole.skeleton.rows if p in reading.factored]):
        return ()
    eta, e = whole.at(few).eta, whole.innovations(few)
    seen = sources(lambda arrays: eta(e, few._replace(arrays=arrays)), few.arrays)
    return tuple(p for p in asked if p in seen)


def _axis_from_right(site: dict) -> int | None:
    """Of the data, in a value of the site."""
    if site["data_axis"] is None or is_gp(site):
        return None if site["data_axis"] is None else -1
    return site["data_axis"] - hidden_axes(site["fn"]) - unwrap(site["fn"]).event_dim


def _observations(whole: Innovated, trace: dict, rest: Rest) -> tuple:
    """What the observed sites are computed from."""

    def parts(named):
        args, kwargs = whole.skeleton.arguments(named)
        found = run(whole.model, args, kwargs, rest.hyper, rest.hyper)
        seen = {k: s for k, s in found.items() if is_observed(s)}
        return {k: [arrays_of(s["fn"]), arrays_of(s["value"])] for k, s in seen.items()}

    flow = sources(parts, shapes(rest.arrays))
    told = lambda found: tuple(sorted(frozenset().union(*found)))  # noqa: E731
    return tuple((k, Observed(_label(k, trace), *map(told, x))) for k, x in flow.items())


def _label(name: str, trace: dict) -> str:
    stem = name.removesuffix(_OBSERVED)
    return stem if is_missing_part(f"{stem}_unobserved", trace) else name


def integrable(
    whole: Innovated, rest: Rest, gps: Collection[str], asked: bool = False, lone: bool = False
) -> Innovated:
    """With what of the sites is integrated; none where the data see no linear predictor of them.

    A site is left a hyperparameter where a kernel, a scale or another prior is computed from it
    (but for a Gaussian prior's mean), and, unless it is asked for by name, where it would make a
    datum see more functions than the GPs alone do: the logarithm of a noise with a normal prior,
    say, or an intercept for each of more outputs than there are GPs. Where there is no function
    without it (scores of classes without a GP), all are.

    `rest`: arguments, and {site: value} of everything that is random. `asked`: whether the user
    named them: all are wanted, however many functions a datum then sees. At most two traces a site.
    """
    left = _shaping_nothing(whole, rest)

    def functions(some) -> int | None:
        hyper = {k: v for k, v in rest.hyper.items() if k not in some}
        cut = whole._replace(sites=tuple(some)).cut(Rest(rest.arrays, hyper)) if some else None
        return None if cut is None else cut.functions

    every = functions(left)
    # one more function for each: beside GPs it would be left out unless it is asked for
    if every is None and lone and (asked or not gps):
        whole = whole._replace(lone=_lone(whole, rest, left))
        every = functions(left)
    if every is not None and (asked or every == 1):
        return whole._replace(sites=tuple(left))
    chosen = [k for k in left if k in gps]
    if (num := functions(chosen)) is None:
        chosen, num = [], 1
    for site in (k for k in left if k not in gps):
        if (more := functions([*chosen, site])) is not None and more <= num:
            chosen, num = [*chosen, site], more
    chosen = chosen or (left if every else [])
    some = tuple(k for k in whole.lone if k in chosen)
    return whole._replace(sites=tuple(chosen), lone=some)


def _without_hyperpriors(whole: Innovated, rest: Rest, gps: Collection[str]) -> Innovated:
    """Without effects that the prior of a hyperparameter sees, which are hyperparameters too: m of
    log_s ~ Normal(m, 1), the logarithm of a noise.
    """
    while whole.sites:
        kept = {*gps, *_shaping_nothing(whole, rest)}
        if kept.issuperset(whole.sites):
            break
        left, lone = (tuple(k for k in some if k in kept) for some in (whole.sites, whole.lone))
        whole = whole._replace(sites=left, lone=lone)
    return whole


def _lone(whole: Innovated, rest: Rest, sites: Collection[str]) -> tuple[str, ...]:
    """Those of the sites that rows see by broadcasting alone: with one value per row the model
    runs, and row n of each observed site is proved to see the value of row n alone.
    """
    found = []
    for k in sites:
        hyper = {j: v for j, v in rest.hyper.items() if j != k}
        one = whole._replace(sites=(k,), lone=(k,))
        few = one._replace(lone=()).few(Rest(rest.arrays, hyper))
        if one._replace(lone=()).cut(few) is None and _runs_by_rows(one, few):
            found.append(k)
    return tuple(found)


def _runs_by_rows(one: Innovated, few: Rest) -> bool:
    (site,), num, proved = one.sites, one.skeleton.num_rows(few.arrays), []

    def look(rest):
        (shape,) = (x.shape for x in one.innovations(few).values())

        def log_p(name, x):
            spread = jnp.broadcast_to(jnp.reshape(x, (num, *[1] * len(shape))), (num, *shape))
            return log_prob_per_datum(one.trace({site: spread}, rest)[name])

        seen = [k for k, s in one.trace(one.zero(few), rest).items() if is_observed(s)]
        x = jnp.zeros(num)
        each = (partial(log_p, k) for k in seen)
        proved.append(all(is_entry_by_entry(f, x) or not depends(f, x) for f in each))
        return x

    try:
        jax.eval_shape(look, few)
    except Exception:  # whatever the user's code says of an array in place of a number
        return False
    return all(proved)


def _shaping_nothing(whole: Innovated, rest: Rest) -> list[str]:
    """The sites that no prior sees but through its mean."""
    sites = whole.sites
    held = shapes(Rest(rest.arrays, {k: v for k, v in rest.hyper.items() if k not in sites}))

    def priors(named):
        trace = whole.trace({k: named[_SITE + k] for k in sites}, named[_REST])
        free = {k: s for k, s in trace.items() if s["type"] == "sample" and not is_observed(s)}
        free = {k: s for k, s in free.items() if not is_missing_part(k, trace)}
        return arrays_of([spread_of(s["fn"]) if k in sites else s["fn"] for k, s in free.items()])

    e = {_SITE + k: x for k, x in whole.innovations(held).items()}
    shaping = frozenset().union(*sources(priors, {_REST: held} | e))
    return [k for k in sites if _SITE + k not in shaping]


def _are_independent(whole: Innovated, trace: dict, axes: dict, few: Rest) -> bool:
    """Whether each function is made of GPs at the data's inputs and of units of its own."""
    num, e = whole.skeleton.num_rows(few.arrays), whole.innovations(few)
    if any(axes[k] is None or not is_gp(trace[k]) or x.shape[-1] != num for k, x in e.items()):
        return False
    starts = [0, *itertools.accumulate(x.size // num for x in e.values())]
    zero = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), few)

    def eta(flat):
        units = zip(e.items(), starts, starts[1:], strict=False)
        parts = {k: jnp.reshape(flat[a:b], x.shape) for (k, x), a, b in units}
        return [whole.at(few).eta(parts, zero)]

    (on,) = dependence(eta, starts[-1], np.zeros((starts[-1], num))).on  # (F, R, n)
    return bool(np.all(np.sum(np.any(on, -1), 1) <= 1))


def _softmax(whole: Innovated, functions: int, few: Rest) -> tuple[int, ...]:
    """(r_1, ..., r_C) where score c of the only site, a categorical one, is function r_c; or ()."""
    num, found = whole.skeleton.num_rows(few.arrays), []

    def scores(eta, rest):
        parts = [*whole.at(few).observed(eta, rest).values()]
        fns: list[Any] = [unwrap(part.fn) for part in parts]
        is_one = len(fns) == 1 and type(fns[0]) is dist.CategoricalLogits
        is_one = is_one and parts[0].fn.shape() == (num,)  # one label a row
        found.append(is_one and jnp.shape(fns[0].logits) == (num, functions))
        return fns[0].logits if found[-1] else eta

    shape = jax.ShapeDtypeStruct((functions, num), jnp.result_type(float))
    closed = jax.make_jaxpr(scores)(shape, few)
    if functions < 2 or not found[-1]:
        return ()
    if (places := _moved(closed, np.arange(functions * num).reshape(functions, num))) is None:
        return ()
    order = places[0] // num
    expected = order[None, :] * num + np.arange(num)[:, None]
    return tuple(order.tolist()) if np.array_equal(places, expected) else ()


def _moved(closed, entries: np.ndarray) -> np.ndarray | None:
    """Where the entries of the first input end in the only output, if they are only moved."""
    eta, *_ = closed.jaxpr.invars
    steps, used = needed(closed.jaxpr, closed.jaxpr.outvars)
    moves = all(e.primitive.name in _MOVES and len(e.invars) == 1 for e in steps)
    if not moves or used - {v for e in steps for v in e.outvars} != {eta}:
        return None
    with jax.ensure_compile_time_eval():
        (found,) = evaluated(closed, {eta: jnp.asarray(entries)}, closed.jaxpr.outvars)
    return np.asarray(found)
