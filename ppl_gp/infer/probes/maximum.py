"""Whether a joint density has a maximum: what the reading of a model says of unknown spreads."""

from collections.abc import Sequence

from ppl_gp.errors import ModelError
from ppl_gp.model.gaussian_sites import gaussian
from ppl_gp.model.reading import Reading
from ppl_gp.model.roles import roles


def require_bounded(
    trace: dict, reading: Reading, method: str, points: Sequence[str] | None = None
) -> None:
    """Raise `ModelError` where a joint maximum need not exist: a site whose spread is itself
    unknown, a group effect say.

    `points`: the sites that are maximised over, where others have a distribution.

    p(u | tau) p(tau) has no upper bound as tau falls and u goes to its location, whatever the data
    say, unless p(tau) vanishes there faster than tau^-D grows: D values of u. Which one it is, is
    not proved.
    """
    found = roles(trace)
    unknown, sites = {*found.hyper, *found.params}, found.hyper if points is None else points
    for site, spread in reading.spread:
        if site in sites and (by := sorted(unknown.intersection(spread))):
            integrable = gaussian(trace[site]["fn"])
            raise ModelError(
                f"site '{site}' has a spread that is computed from {by}: {method} would maximise "
                "both together, and nothing says that their joint density has a maximum (it grows "
                f"without bound as the spread falls to zero and '{site}' to its centre, unless the "
                "spread's prior vanishes there fast enough). "
                + (
                    f"Integrate it, integrate=(..., '{site}'), if the data depend on it through a "
                    "linear predictor; else use "
                    if integrable
                    else "Use "
                )
                + "NUTS(), or a local method with hyper=Sample(); or give values, "
                "hyper=Fixed({...})."
            )


def perhaps_unbounded(trace: dict, reading: Reading) -> str | None:
    """What to say where a maximum was not found and may not exist: a site whose variance is itself
    unknown (a gamma frailty, say).

    Such a density need not be unbounded (it depends on the priors' tails), so that it is no ground
    to refuse the model.
    """
    found = roles(trace)
    unknown = {*found.hyper, *found.params}
    wide = {k: sorted(unknown.intersection(by)) for k, by in reading.variance if k in found.hyper}
    wide = {k: by for k, by in wide.items() if by}
    if not wide:
        return None
    named = ", ".join(f"'{k}' has a variance that is computed from {by}" for k, by in wide.items())
    return (
        f"a maximum may not exist: {named}; integrate them by NUTS() or hyper=Sample(), or "
        "hold them by hyper=Fixed({...})"
    )
