"""Whether a joint maximum over sites need exist: not if the spread of one is unknown itself."""

from collections.abc import Iterable, Sequence

from ppl_gp.errors import ModelError
from ppl_gp.gp import unwrap
from ppl_gp.reading.predictor.predictor import gaussian
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.reading.reading import Reading
from ppl_gp.reading.roles import roles


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
    has_functions = bool(integrated or found.gps)
    local = "a local method with hyper=Sample(), or " if drawn and has_functions else ""
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


def perhaps_unbounded(trace: dict, reading: Reading) -> str | None:
    """What to say where a maximum was not found and may not exist: a variance that is unknown."""
    wide, hyper = unknown_behind(trace, reading.variance), roles(trace).hyper
    told = [f"'{k}' has a variance that is computed from {wide[k]}" for k in wide if k in hyper]
    if not told:
        return None
    return (
        f"a maximum may not exist: {', '.join(told)}; integrate them by NUTS() or hyper=Sample(), "
        "or hold them by hyper=Fixed({...})"
    )
