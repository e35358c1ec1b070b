"""A scale that a search for the mode runs after, down to where numbers end: the noise of data that
show none.
"""

from typing import Any

import jax
import numpy as np

from ppl_gp.infer.hyper.restarts import FLAT
from ppl_gp.infer.hyper.space import Space, support
from ppl_gp.model.tracing import run

_FELL = 1e-3  # of where the search began: what has fallen so far is named


def vanishing(space: Space, before: dict, after: dict, slopes: dict) -> str | None:
    """What to say of a search that has not converged, where a site fell toward the lower end of its
    support and the log posterior still rises that way; else `None`.

    `before`, `after`: unconstrained points where it began and ended; `slopes`: of the negative log
    posterior, at the latter.
    """
    first, last = space.constrain(before), space.constrain(after)
    trace = run(space.model, space.args, space.kwargs, {**space.given, **last})
    told = []
    for name in space.names:
        if (end := _lower_end(support(trace[name]))) is not None:
            leaves = [jax.tree.leaves(x[name]) for x in (first, last, slopes)]
            for began, ended, slope in zip(*leaves, strict=True):
                told += _fallen(name, began - end, ended - end, slope)
    if not told:
        return None
    return (
        f"{' and '.join(told)}, and the log posterior still rises as it falls: more steps only "
        "follow it. Data without noise do this to the scale of the noise. Give it a prior whose "
        "density is zero at its lower end (dist.LogNormal, dist.InverseGamma), a floor (1e-3 + "
        "noise, in units of y), or a value, hyper=Fixed({...})"
    )


def _fallen(name: str, began, ended, slope) -> list[str]:
    """The first entry of a site that fell, in words, where there is one."""
    began, ended, slope = (np.ravel(np.asarray(x, float)) for x in (began, ended, slope))
    falls = np.flatnonzero((ended < _FELL * began) & (slope > FLAT))
    return [f"'{name}' fell from {began[i]:.1g} to {ended[i]:.1g}" for i in falls[:1]]


def _lower_end(where: Any):
    """Of a support that has no upper one, where each entry has its own coordinate."""
    while hasattr(where, "base_constraint"):
        where = where.base_constraint
    return None if hasattr(where, "upper_bound") else getattr(where, "lower_bound", None)
