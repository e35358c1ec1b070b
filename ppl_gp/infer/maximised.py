"""What of a model a local method integrates; and what `MAP` would hold at its mode: effects that
are not integrated are refused, unless `maximise=` names them; and sites whose spread is unknown, as
then no mode need exist.

The refusal is a rule by role, whatever the prior: the mode of D values is not their posterior, and
together with their scale it is far from it or does not exist (tau became .99 instead of .4 for
tau u[g] with Student's t).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.primitives import Messenger

from ppl_gp.errors import ONE_TABLE, DataError, ModelError, warn
from ppl_gp.gp import bare, unwrap
from ppl_gp.local.laplace import Laplace
from ppl_gp.local.method import LocalMethod
from ppl_gp.reading.dependence import bend, sources
from ppl_gp.reading.digest import arrays_of
from ppl_gp.reading.fingerprint import by_shapes, keyed
from ppl_gp.reading.predictor.collapse import collapse
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.predictor.predictor import gaussian, is_gaussian, mean_of
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.reading.reading import Declared, Reading
from ppl_gp.reading.roles import cannot_be_drawn, is_observed, is_whole, roles, subsampling
from ppl_gp.reading.tracing import run
from ppl_gp.reading.walk import line_of
from ppl_gp.settings import GAUSSIAN

# of a distribution that keeps another's: what it was declared by
_DECLARED = {
    dist.OrderedLogistic: ("predictor", "cutpoints"),
    dist.NegativeBinomial2: ("mean", "concentration"),
}
_MORE = "with {} a datum depends on more functions than without"
_BATCHES = "plates {} subsample; leave subsample_size out, and give SVGP(batch_size=...)"
_UNREAD = (
    "the model cannot be traced at another number of rows: it holds arrays of one entry a row, or "
    "writes their number down, numpyro.plate('units', 12). Pass them as arguments, take the number "
    "from these, X.shape[0], and look effects up, u[group] in place of jnp.repeat(u, 4)"
)


def integrated(
    model: Declared, method: LocalMethod, args: tuple, kwargs: dict, given: Mapping | None = None
) -> Declared:
    """The model that `method` sees under its `integrate`; `given`: values of sites that are held.
    `DataError` for another `integrate`, `ModelError` for a site of it that cannot be integrated.
    """
    which, name = method.integrate, type(method).__name__
    if which == GAUSSIAN:
        # `Laplace` has the joint mode of a model without a predictor of rows that stand alone
        by_mode = isinstance(method, Laplace)
        found = collapse(model, args, kwargs, given, lone=not by_mode)
        by_mode &= isinstance(found, Collapsed) and bool(found.reading.coupled)
        return model if by_mode and not roles(run(model, args, kwargs, given)).gps else found
    if not isinstance(which, tuple) or not all(isinstance(k, str) for k in which):
        raise DataError(
            f"{name}(integrate={which!r}): give '{GAUSSIAN}' or a tuple of names of sites."
        )
    found = collapse(model, args, kwargs, given, only=which, lone=True)
    trace = run(model, args, kwargs, given)
    inside = found.plan.sites if isinstance(found, Collapsed) else roles(trace).gps
    if left := [k for k in which if k not in inside]:
        why = _why_not(model, args, kwargs, trace, inside, left)
        raise ModelError(
            f"{name}(integrate={which!r}): {left} cannot be integrated with the others: {why}. "
            "Leave it out, or use NUTS()."
        )
    return found


def require_no_maximised_effects(
    model: Declared, args, kwargs, method: str, maximise: Sequence[str] = ()
) -> None:
    """Raise `ModelError` where effects that are not integrated would be maximised with the
    hyperparameters; warn of single values that would be integrated, were it not for their prior,
    a factor, a handler or sizes that the model holds.

    Effects are Gaussian sites of several values that the observations depend on (a vector, or
    single values that `integrate=` could make one function of), and others of several values that
    act on an array that functions act on too. `maximise`: sites that the user knows of. Abstract
    traces, once for arguments of these shapes.
    """
    for told in _maximised(model, args, kwargs, method, tuple(maximise)):
        warn(told)


@by_shapes
def _maximised(model: Declared, args, kwargs, method: str, maximise: tuple) -> list[str]:
    """What to warn of; `ModelError` for what is refused."""
    source = model.source if isinstance(model, Collapsed) else model
    inside = list(model.plan.sites) if isinstance(model, Collapsed) else []
    trace = run(source, args, kwargs)
    hyper = [k for k in roles(trace).hyper if k not in (*inside, *maximise)]
    hyper = [k for k in hyper if _is_floating(trace[k]["value"])]
    many = [k for k in hyper if np.size(trace[k]["value"]) > 1]
    if not hyper:
        return []
    functions = [*inside, *roles(trace).gps]
    seen = _Seen(source, args, kwargs, trace, functions)
    gaussians = [k for k in hyper if is_gaussian(trace[k]) and k in seen.reached]
    joined = _joined(source, args, kwargs, inside, gaussians, many)
    points = [k for k in hyper if k in joined or k in many and k in (*gaussians, *seen.shared)]
    asked = points if subsampling(trace) else (*gaussians, *points)
    causes = _causes(source, args, kwargs, trace, {*asked})
    alone = [k for k in hyper if k in seen.shared and k not in (*many, *gaussians)]
    bent = [k for k in alone if not (points or maximise or _kind(trace[k]) == "Delta")]
    bent = [k for k in bent if _joins(source, args, kwargs, functions, k)]
    causes |= {k: f"the prior of {{}}, {_kind(trace[k])}, is not Gaussian" for k in bent}
    single = [k for k in gaussians if k in seen.shared and k not in (*many, *causes, *points)]
    for k in () if points or maximise else single:
        named = tuple(dict.fromkeys((*functions, k)))
        found = collapse(source, args, kwargs, only=named, lone=True)
        if isinstance(found, Collapsed) and {*found.plan.sites} == {*named}:
            causes[k] = f"{_MORE}. A local method with integrate={named!r} integrates it"
    if points:
        if causes.keys().isdisjoint(points):
            require_bounded(trace, source.reading, method, points, integrated=functions)
        beside = seen.beside(points, trace)
        why = _why(trace, seen, points, joined, causes)
        flat = [k for k in points if cannot_be_drawn(trace[k])]  # a search wants a start, too
        use = remedies(trace, source.reading, functions, beside, drawn=not flat)
        start = f", init={to_fill(flat)}" if flat else ""
        wide = ", or a normal prior of a large scale" if flat else ""
        known = (
            f"; hyper=MAP(maximise={tuple(points)!r}{start}) says that you know: points, which the "
            "evidence and the variances of predictions take as known (where tried, 2 values of 50 "
            "rows: evidence 4.7 nats too high, variances down to 0.78 of the right ones)"
        )
        raise ModelError(
            f"{method} would maximise {', '.join(map(repr, points))} "
            f"({sum(np.size(trace[k]['value']) for k in points)} values) together with "
            f"{beside or 'the hyperparameters'}, far from their posterior if one scales the other, "
            f"and does not integrate them: {why}. Use {use}{wide}{known if functions else ''}."
        )
    told = {why: [k for k in causes if causes[k] == why] for why in causes.values()}
    flat = lambda sites: any(cannot_be_drawn(trace[k]) for k in sites)  # noqa: E731
    return [_told(method, sites, why, flat(sites)) for why, sites in told.items()]


def _told(method: str, sites: list[str], why: str, flat: bool) -> str:
    """What `MAP()` does to single values, how much it matters, and what to do; `flat`: of improper
    priors, from which `Sample()` cannot start.
    """
    names, one = ", ".join(map(repr, sites)), len(sites) == 1
    instead = "a normal prior of a large scale" if flat else "a local method with hyper=Sample(),"
    return (
        f"{method} maximises {names} with the hyperparameters and does not integrate "
        f"{'it' if one else 'them'}: {why.replace('{}', names)}. The evidence and the variances of "
        f"predictions take {'its value' if one else f'these {len(sites)} values'} as known (where "
        "tried, the log evidence was 1.7 nats too high with one value, 7.8 with four). "
        f"Use NUTS(), or {instead} instead."
    )


class _Seen:
    """What of the observations is computed from which latents, all of which are given.

    `arrays`: of each array of their distributions, the latents; `means`: of each function's prior
    mean, which counts as computed from the function.
    """

    def __init__(self, source, args, kwargs, trace: dict, functions: Sequence[str]):
        free = [k for k, s in trace.items() if s["type"] == "sample" and not s["is_observed"]]
        self.values = {k: trace[k]["value"] for k in (*free, *roles(trace).params)}
        self.functions = functions
        self._run = partial(run, source, args, kwargs)

        def parts(values):
            again = self._run(values, values)
            means = [mean_of(again[k]["fn"]) + 0.0 * again[k]["value"] for k in functions]
            return means, jax.tree.leaves(_scored_arrays(again))

        self.means, self.arrays = sources(parts, self.values)

    @property
    def reached(self) -> frozenset[str]:
        """Those that a distribution of the observations is computed from."""
        return frozenset().union(*self.arrays)

    @property
    def shared(self) -> frozenset[str]:
        """Those behind an array that functions enter too: no noise of a group, no cut points."""
        every = (*self.arrays, *self.means)
        return frozenset().union(*(on for on in every if not on.isdisjoint(self.functions)))

    def beside(self, sites: list[str], trace: dict) -> list[str]:
        """The hyperparameters behind an array that these sites enter: one may scale the other."""
        found = roles(trace)
        others = {*found.hyper, *found.params} - {*sites, *self.functions}
        met = frozenset().union(*(on for on in self.arrays if not on.isdisjoint(sites)))
        return sorted(k for k in others & met if _is_floating(self.values[k]))

    def bend(self, site: str) -> str:
        """Where it stops being affine on its way to the observations, in words."""

        def arrays(x):
            held = self.values | {site: x}
            return _scored_arrays(self._run(held, held))

        if (found := bend(arrays, self.values[site])) is None:
            return (
                f"no linear predictor holds '{site}', an array with one entry per row: write what "
                "all rows share times jnp.ones(y.shape[0])"
            )
        line = line_of(found[1])
        return f"`{found[0]}` is not known to be affine in '{site}'{line and f' ({line})'}"


def _scored_arrays(trace: dict) -> dict[str, list]:
    """{scored site: arrays of its distribution}."""
    scored = {k: s["fn"] for k, s in trace.items() if s["type"] == "sample" and s["is_scored"]}
    return {k: _arrays(fn) for k, fn in scored.items()}


def _why_not(model: Declared, args, kwargs, trace: dict, inside, left: list[str]) -> str:
    """Why sites that `integrate=` names are not integrated: the cause of the first."""
    site = trace.get(left[0], {"type": ""})
    if site["type"] != "sample" or site["is_observed"]:
        return f"'{left[0]}' is no latent site of the model"
    causes = _causes(model, args, kwargs, trace, left)
    return _why(trace, _Seen(model, args, kwargs, trace, inside), left, (), causes)


def _why(trace: dict, seen: _Seen, points: list[str], joined: Sequence[str], causes: dict) -> str:
    """The one cause of the first site for which there is one."""
    if cause := next((causes[k] for k in points if k in causes), None):
        return cause.replace("{}", ", ".join(repr(k) for k in points if causes.get(k) == cause))
    if joined:
        more, named = _MORE.replace("{}", "them"), tuple(dict.fromkeys(joined))
        return f"{more}. A local method with integrate={named!r} integrates them with the others"
    for k in points:
        if not is_gaussian(trace[k]):
            told = f"the prior of '{k}', {_kind(trace[k])}, is not Gaussian"
            fixed = f" (its value is fixed: write {k} = numpyro.deterministic('{k}', value))"
            return told + fixed * isinstance(unwrap(trace[k]["fn"]), dist.Delta)
    return seen.bend(points[0])


def _kind(site: dict) -> str:
    return type(unwrap(site["fn"])).__name__


def _arrays(fn) -> list:
    """The parameters of a distribution, as it was declared where it keeps others."""
    core = unwrap(fn)
    names = next((names for kind, names in _DECLARED.items() if isinstance(core, kind)), ())
    parts = [getattr(core, k) for k in names] or fn
    return [x for x in arrays_of(parts) if eqx.is_inexact_array(x)]


def _joined(
    source: Declared, args, kwargs, inside: list[str], gaussians: list[str], many: list[str]
) -> Sequence[str]:
    """What `integrate=` may name, so that these Gaussian sites are integrated with the others."""

    def named(sites) -> tuple:
        return _if_named(source, args, kwargs, [*inside, *sites], gaussians)

    alone = [k for k in gaussians if k not in many] if len(gaussians) > 1 else []
    wanted = [k for k in alone if {*named([k])} - {*inside, k}]
    wanted = [k for k in gaussians if k in many or k in wanted]
    found = named(wanted) if wanted else ()
    return () if {*found}.isdisjoint(wanted) else found


def _causes(source: Declared, args, kwargs, trace: dict, sites) -> dict[str, str]:
    """{Gaussian site: what beside the predictor keeps it from being integrated}."""
    sites = [k for k in trace if k in sites and is_gaussian(trace[k])]
    plates = [*subsampling(trace)]
    if plates or not source.reading.grows:
        return dict.fromkeys(sites, _BATCHES.format(plates) if plates else _UNREAD)
    hidden = tuple(k for k, s in trace.items() if is_observed(s) and s["data_axis"] is None)
    bared = tuple(k for k in sites if not is_whole(trace[k]))
    if not sites or not (hidden or bared):
        return {}
    plain = replace(source, function=keyed(_only_predictor(source.function, hidden, bared)))
    found = collapse(plain, args, kwargs, lone=True)
    inside = found.plan.sites if isinstance(found, Collapsed) else roles(trace).gps
    sites = [k for k in sites if k in inside]
    seeing = _seeing(source, args, kwargs, trace, hidden, sites)
    table = f". {ONE_TABLE}" * (not {*seeing}.isdisjoint(source.reading.observed))
    told = f"{seeing} (a factor, or an observation with other rows or none) see it as well{table}"
    around = dict.fromkeys(bared, "a scale or mask handler stands around the prior of {}")
    return {k: around.get(k, told) for k in sites}


def _joins(source: Declared, args, kwargs, functions: list[str], site: str) -> bool:
    """Whether a site that is not Gaussian would be integrated with these functions if it were."""
    moved = replace(source, function=keyed(_only_predictor(source.function, (), (site,))))
    base = collapse(source, args, kwargs, only=functions, plain=True)
    more = collapse(moved, args, kwargs, only=(*functions, site), plain=True)
    if not (isinstance(base, Collapsed) and isinstance(more, Collapsed)):
        return False
    one_more = {*more.plan.sites} == {*base.plan.sites, site}
    return one_more and more.plan.functions == base.plan.functions


def _seeing(model, args, kwargs, trace: dict, hidden, sites) -> list[str]:
    """The hidden densities that are computed from these sites."""

    def densities(values):
        again = run(model, args, kwargs, values)
        return {k: arrays_of(again[k]["fn"]) for k in hidden}

    found = sources(densities, {k: trace[k]["value"] for k in sites})
    return [k for k, leaves in found.items() if any(leaves)]


class _only_predictor(Messenger):
    """Hides densities that hold no data, and gives sites a Gaussian prior without handlers."""

    def __init__(self, fn=None, hidden: tuple[str, ...] = (), bared: tuple[str, ...] = ()):
        self.hidden, self.bared = hidden, bared
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] != "sample":
            return
        if msg["name"] in self.hidden:
            msg["stop"] = True
        if msg["name"] in self.bared:
            msg["scale"] = None
            whole, fn = msg["fn"], bare(msg["fn"])
            if not gaussian(fn):
                inside = fn.support or dist.constraints.real  # a scale stays positive
                at = inside.feasible_like(jnp.zeros(fn.shape()))
                fn = dist.Normal(at, 1e-3).to_event(fn.event_dim)
            msg["fn"] = fn.to_event(whole.event_dim - fn.event_dim)


def _if_named(source: Declared, args, kwargs, sites: list[str], others: list[str]) -> tuple:
    """All that is integrated with these Gaussian sites, some of them only if they are named: with
    those a datum depends on more functions (`integrable`); also others that add none.
    """
    plan = lambda only: getattr(collapse(source, args, kwargs, only=only), "plan", None)  # noqa: E731
    if not (found := plan(sites)):
        return ()
    for site in others:
        more = plan({*found.sites, site})
        if more and {*more.sites} > {*found.sites} and more.functions == found.functions:
            found = more
    return found.sites


def _is_floating(tree) -> bool:
    """Whether all arrays of a value are of floating point."""
    return all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in jax.tree.leaves(tree))


def require_bounded(
    trace: dict,
    reading: Reading,
    method: str,
    points: Sequence[str] | None = None,
    held: Sequence[str] | None = None,
    integrated: Sequence[str] = (),
) -> None:
    """Raise `ModelError` where a joint maximum need not exist: a site whose spread is itself
    unknown, a group effect say.

    `points`: the sites that are maximised over, where others have a distribution. `held`: sites
    whose values are given, if all others are maximised together and none can be sampled alone.
    `integrated`: sites of a trace that are not maximised.

    p(u | tau) p(tau) has no upper bound as tau falls and u goes to its location, whatever the data
    say, unless p(tau) vanishes there faster than tau^-D grows: D values of u. Which one it is, is
    not proved.
    """
    sites = roles(trace).hyper if points is None else points
    for site, by in unknown_behind(trace, reading.spread).items():
        if site in sites and (by := [k for k in by if k not in (held or ())]):
            raise ModelError(
                f"site '{site}' has a spread that is computed from {by}: {method} would maximise "
                "both together, and nothing says that their joint density has a maximum (it grows "
                f"without bound as the spread falls to zero and '{site}' to its centre, unless the "
                "spread's prior vanishes there fast enough). "
                + _to_integrate(site, reading) * gaussian(trace[site]["fn"])
                + f"Use {remedies(trace, reading, integrated, drawn=held is None)}."
            )


def _to_integrate(site: str, reading: Reading) -> str:
    if reading.held:
        return f"It is not integrated, as {reading.held} "
    return (
        f"Integrate it, integrate=(..., '{site}'), if the data depend on it through a linear "
        "predictor. "
    )


def remedies(
    trace: dict,
    reading: Reading,
    integrated: Sequence[str],
    scales: Sequence[str] = (),
    drawn: bool = True,
) -> str:
    """What to use, as code that runs. Values are of all that is not integrated, or without a GP of
    spreads, and of `scales`, alone: then all else has a joint mode.
    """
    found = roles(trace)
    local = "a local method with hyper=Sample(), or " if drawn and (integrated or found.gps) else ""
    fns = [unwrap(trace[k]["fn"]) for k in found.gps]
    own = [f.kernel for f in fns if isinstance(f, PredictorGP) and not f.behind.priors()]
    if len(own) < len(fns) or found.params:
        names = [k for k in (*found.hyper, *found.params) if k not in integrated]
        return f"NUTS(), or {local}{_fixed(names)}"
    readings = (reading, *(k.model.source.reading for k in own))
    spreads = (x for r in readings for by in unknown_behind(trace, r.spread).values() for x in by)
    held = f", {_fixed(names)}" if (names := sorted({*scales, *spreads})) else ""
    return f"NUTS(), or {local}Laplace(integrate=(){held})"


def _fixed(names: Iterable[str]) -> str:
    return f"hyper=Fixed({to_fill(names)})"


def to_fill(names: Iterable[str]) -> str:
    return f"{{{', '.join(f'{k!r}: ...' for k in names)}}}"


def unknown_behind(trace: dict, pairs: Iterable[tuple]) -> dict[str, list[str]]:
    """{site: the hyperparameters and params among the sites that it is computed from}, of
    `reading.spread` or `reading.variance`; sites without any are left out.
    """
    unknown = {*roles(trace).hyper, *roles(trace).params}
    return {k: by for k, sites in pairs if (by := sorted(unknown.intersection(sites)))}
