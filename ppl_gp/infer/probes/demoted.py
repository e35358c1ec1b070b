"""Effects that `MAP` would make points of, as they are not integrated: `require_none_demoted`.

Gaussian sites first that would be integrated, were it not for something around the predictor, an
operation on the way to it that no proof knows, or sizes that the model holds for itself: a
sum-to-zero factor made an evidence 14 nats too high. Then whatever is left (`points`).
"""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.extend.core import Literal
from numpyro.primitives import Messenger

from ppl_gp.errors import ModelError, warn
from ppl_gp.gp import bare, unwrap
from ppl_gp.infer.probes.points import effects, flows, is_floating, remedies, warn_if_points
from ppl_gp.reading.affine import Dependence
from ppl_gp.reading.declared import Declared
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.digest import arrays_of
from ppl_gp.reading.fingerprint import keyed
from ppl_gp.reading.predictor.collapse import collapse
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.predictor.cut import (
    at_places,
    dependences,
    evaluated,
    needed,
)
from ppl_gp.reading.predictor.predictor import is_gaussian
from ppl_gp.reading.predictor.sites import mean_of
from ppl_gp.reading.roles import is_observed, is_whole, roles
from ppl_gp.reading.tracing import run

# of a distribution that keeps another's: what it was declared by
_DECLARED = {
    dist.OrderedLogistic: ("predictor", "cutpoints"),
    dist.NegativeBinomial2: ("mean", "concentration"),
}


_UNREAD = (
    "the model cannot be traced at another number of rows, for example because it holds arrays of "
    "one entry per row, or writes their number down (numpyro.plate('units', 12)), and no linear "
    "predictor is found in it. Pass the arrays as arguments, and take the number from them "
    "(numpyro.plate('units', X.shape[0]))"
)
_SCALES = (0.1, 1.0, 10.0, 100.0)  # a clip far out is curved
_TOLERANCE = 1e-6


class _only_predictor(Messenger):
    """Hides densities that hold no data, and takes handlers off the priors of Gaussian sites."""

    def __init__(self, fn=None, hidden: tuple[str, ...] = (), bared: tuple[str, ...] = ()):
        self.hidden, self.bared = hidden, bared
        super().__init__(fn)

    def process_message(self, msg):
        """Of a site, behind the handlers inside the model."""
        if msg["type"] != "sample":
            return
        if msg["name"] in self.hidden:
            msg["stop"] = True
        if msg["name"] in self.bared:
            msg["scale"] = None
            whole, fn = msg["fn"], bare(msg["fn"])
            msg["fn"] = fn.to_event(whole.event_dim - fn.event_dim)


def require_none_demoted(
    model: Declared, args, kwargs, method: str, maximise: Sequence[str] = ()
) -> None:
    """Raise `ModelError` where effects (sites of several values that the data depend on, or several
    sites of one function) would be maximised for such a reason, or with their scale; warn of
    others, and of single values that are Gaussian. `maximise`: sites that the user knows of.
    Abstract traces, and none where no such site is left.
    """
    source = model.source if isinstance(model, Collapsed) else model
    inside = list(model.plan.sites) if isinstance(model, Collapsed) else []
    trace = run(source, args, kwargs)
    hyper = [k for k in roles(trace).hyper if k not in (*inside, *maximise)]
    left = [k for k in hyper if is_gaussian(trace[k])]
    many = [k for k in hyper if np.size(trace[k]["value"]) > 1 and is_floating(trace[k]["value"])]
    if not left and not many:
        return
    functions = [*inside, *roles(trace).gps]
    seen = lambda values: _seen(source, args, kwargs, trace, values)  # noqa: E731
    wide = lambda values: _seen(source, args, kwargs, trace, values, functions)  # noqa: E731
    known, named, gaussians = [], (), _reached(seen, trace, left)
    if left:
        use = remedies(trace, source.reading, functions)
        if not source.reading.grows:
            _refuse_or_warn(trace, gaussians, _UNREAD, method, use)
        _require_proved(seen, trace, gaussians, method, use)
        joined = lambda k: {*_if_named(source, args, kwargs, k, gaussians)} - {*k}  # noqa: E731
        many += [k for k in gaussians[1:] and gaussians if k not in many and joined([*inside, k])]
        if wanted := [k for k in gaussians if k in many]:
            named = _if_named(source, args, kwargs, [*inside, *wanted], gaussians)
        alone = [k for k in left if k not in named]
        known = _require_alone(source, args, kwargs, trace, alone, method, use)
    others = _reached(wide, trace, [k for k in many if k not in left])
    points = [k for k in hyper if k in many and k in (*gaussians, *others) and k not in known]
    points = effects(wide, trace, points, functions)
    warn_if_points(wide, trace, source.reading, points, functions, named, method)


def _if_named(source: Declared, args, kwargs, sites: list[str], others: list[str]) -> tuple:
    """All that is integrated with these Gaussian sites, some of them only if they are named: with
    those a datum depends on more functions (`collapse.integrable`); also others that add none.
    """
    plan = lambda only: getattr(collapse(source, args, kwargs, only=only), "plan", None)  # noqa: E731
    found = plan(sites)
    for site in others if found else ():
        more = plan({*found.sites, site})
        if more and {*more.sites} > {*found.sites} and more.functions == found.functions:
            found = more
    return found.sites if found else ()


def _require_alone(
    source: Declared, args, kwargs, trace: dict, left: list[str], method: str, use: str
) -> list[str]:
    """Raise `ModelError` where something beside the predictor keeps sites of several values from
    being integrated; warn of single values, and return them.
    """
    hidden = tuple(k for k, s in trace.items() if is_observed(s) and s["data_axis"] is None)
    bared = tuple(k for k in left if not is_whole(trace[k]))
    if not hidden and not bared:
        return []
    plain = Declared(keyed(_only_predictor(source.function, hidden, bared)), source.reading)
    found = collapse(plain, args, kwargs)
    gps = set(roles(trace).gps)
    would = set(found.plan.sites) if isinstance(found, Collapsed) else gps
    demoted = [k for k in left if k in would]
    if not demoted:
        return []
    why = _why(_seeing(source, args, kwargs, trace, hidden, demoted), demoted, bared)
    _refuse_or_warn(trace, demoted, why, method, use)
    return demoted


def _seen(model, args, kwargs, trace: dict, values: dict, functions: Sequence[str] = ()) -> dict:
    """{scored site: arrays of its distribution} with all latents given, these ones moving, and
    {function: its prior's mean}, which counts as computed from the function.
    """
    free = (k for k, s in trace.items() if s["type"] == "sample" and not s["is_observed"])
    held = {k: trace[k]["value"] for k in free}
    again = run(model, args, kwargs, {**held, **values}, {**held, **values})
    means = {k: [mean_of(again[k]["fn"]) + 0.0 * again[k]["value"]] for k in functions}
    scored = {k: s["fn"] for k, s in again.items() if s["type"] == "sample" and s["is_scored"]}
    return {**means, **{k: _arrays(fn) for k, fn in scored.items()}}


def _reached(seen: Callable, trace: dict, left: list[str]) -> list[str]:
    """Those of these sites from which the scored observations are computed, with f given."""
    if not left:
        return []
    found = frozenset().union(*flows(seen, {k: trace[k]["value"] for k in left}))
    return [k for k in left if k in found]


def _require_proved(seen: Callable, trace: dict, reached: list[str], method: str, use: str) -> None:
    """Raise `ModelError` for a site of several values that the observations see through what looks
    affine and is not proved to be.
    """
    for site in reached:
        x = trace[site]["value"]
        if np.size(x) > 1 and (step := unproved(lambda x, k=site: seen({k: x}), x)) is not None:
            why = (
                f"'{site}' looks like Gaussian effects of the predictor, and `{step}`, an "
                "operation of JAX on its way to the observations, is not known to be affine (sums, "
                "products, indexing, concatenate and `.at[].set` are)"
            )
            _refuse_or_warn(trace, [site], why, method, use)


def _refuse_or_warn(trace: dict, sites: list[str], why: str, method: str, use: str) -> None:
    """Raise `ModelError` for Gaussian effects of several values that are not integrated; warn of
    single values. `use`: the remedies.
    """
    if many := [k for k in sites if np.size(trace[k]["value"]) > 1]:
        raise ModelError(
            f"{method} would maximise {many} with the hyperparameters, and they cannot be "
            f"integrated: {why}. Change that, or use {use}; hyper=MAP(maximise={tuple(many)!r}) "
            "keeps them as points, which the evidence takes as known (6 values: 11 nats too high "
            "where tried)."
        )
    if sites:
        told = f"{method} maximises {sites} with the hyperparameters and does not integrate them"
        warn(f"{told}: {why}.")


def _arrays(fn) -> list:
    """The parameters of a distribution, as it was declared where it keeps others."""
    core = unwrap(fn)
    names = next((names for kind, names in _DECLARED.items() if isinstance(core, kind)), ())
    parts = [getattr(core, k) for k in names] or fn
    return [x for x in arrays_of(parts) if eqx.is_inexact_array(x)]


def _seeing(model, args, kwargs, trace: dict, hidden, demoted) -> list[str]:
    """The hidden densities that are computed from these sites."""

    def densities(values):
        again = run(model, args, kwargs, values)
        return {k: arrays_of(again[k]["fn"]) for k in hidden}

    found = sources(densities, {k: trace[k]["value"] for k in demoted})
    return [k for k, leaves in found.items() if any(leaves)]


def _why(seeing: list[str], demoted: list[str], bared: tuple[str, ...]) -> str:
    if handled := [k for k in demoted if k in bared]:
        return f"a scale or mask handler stands around the prior of {handled}"
    return f"{seeing} (a factor, or an observation that holds no rows) see them as well"


def unproved(function: Callable, x) -> str | None:
    """The first operation of function(x), a tree of arrays, that is not on the list of
    `reading.affine` and whose outputs look affine; `None` where there is none.

    A look is not a proof, and nothing is built on it: it tells a caller whose proof has failed that
    the failure is likely the list's, and where. One trace, and a dozen evaluations of what leads to
    operations that are not known.
    """
    closed = at_places(lambda z, rest: function(z), x, (), ()).closed
    jaxpr = closed.jaxpr
    (source,), how = jaxpr.invars, dependences(jaxpr, 1)
    for equation in needed(jaxpr, [source, *jaxpr.constvars], jaxpr.outvars):
        into = [how.get(v, 0) for v in equation.invars if not isinstance(v, Literal)]
        out = [v for v in equation.outvars if how.get(v, 0) is Dependence.unknown]
        known = 0 < max(into, default=0) < Dependence.unknown
        if known and out and _looks_affine(closed, source, out, x):
            return equation.primitive.name
    return None


def _looks_affine(closed, source, out, x) -> bool:
    """Whether all are numbers that change with x, and along lines at every scale as lines do."""
    if not all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in out):
        return False
    rng = np.random.default_rng(0)
    for scale in _SCALES:
        start, step = (scale * rng.normal(size=np.shape(x)) for _ in range(2))
        points = [jnp.asarray(start + t * step, source.aval.dtype) for t in (0.0, 1.0, 2.0)]
        found = ([*map(np.ravel, evaluated(closed, {source: z}, out))] for z in points)
        a, b, c = map(np.concatenate, found)
        if not np.all(np.abs(a - 2.0 * b + c) <= _TOLERANCE * np.max(np.abs([a, b, c]))):
            return False
        if not np.any(np.abs(c - a) > _TOLERANCE * np.max(np.abs(c))):
            return False
    return True
