"""A scale that a search for the mode runs after, down to where numbers end: the noise of data that
show none.
"""

from typing import Any

import jax
import numpy as np

from ppl_gp.infer.hyper.restarts import FLAT
from ppl_gp.infer.hyper.space import support

# sd of a logarithm from which on a hyperparameter is weakly known. Length scales and variances of
# GPs have up to 1.6 (noise, 20 binary rows); with .97, a scale's effects have .67 of their true sds
WEAK, WEAK_SCALE = 2.0, 0.9
_FELL = 1e-3  # of where the search began: what has fallen so far is named


def vanishing(trace: dict, before: dict, after: dict, slopes: dict) -> str | None:
    """What to say of a search that has not converged, where a site fell toward the lower end of its
    support and the log posterior still rises that way; else `None`.

    `trace`: of the model, at any values; `before`, `after`: {site: value} where it began and ended;
    `slopes`: of the negative log posterior in unconstrained coordinates, at the latter.
    """
    told = []
    for name in before:
        if (end := _lower_end(support(trace[name]))) is not None:
            leaves = [jax.tree.leaves(x[name]) for x in (before, after, slopes)]
            for began, ended, slope in zip(*leaves, strict=True):
                told += _fallen(name, began, ended, np.asarray(end, float), slope)
    if not told:
        return None
    return (
        f"{' and '.join(told)}, and the log posterior still rises as it falls: more steps only "
        "follow it. Data without noise do this to the scale of the noise. Give it a prior whose "
        "density is zero at its lower end (dist.LogNormal, dist.InverseGamma), a floor (1e-3 + "
        "noise, in units of y), or a value, hyper=Fixed({...})"
    )


def stopped(stats: dict, slopes: dict) -> str:
    """Where a search that has not converged stopped."""
    steepest = {k: max(np.max(np.abs(x)) for x in jax.tree.leaves(v)) for k, v in slopes.items()}
    name = max(steepest, key=steepest.__getitem__)
    edge = f", with {stats['at_bound']} at an end of the declared interval" * bool(
        stats["at_bound"]
    )
    return (
        f"the search stopped where the log posterior still changes by {steepest[name]:.1g} nats "
        f"per unit of the unconstrained '{name}'{edge}. If a scale is at zero, give it a prior "
        "away from zero (dist.LogNormal) or hold it, hyper=Fixed({...}); else try MAP(restarts=8)"
    )


def _fallen(name: str, began, ended, end, slope) -> list[str]:
    """The first entry of a site that fell to its lower end, in words, where there is one."""
    began, ended = (np.ravel(np.asarray(x, float) - end) for x in (began, ended))
    slope = np.ravel(np.asarray(slope, float))
    falls = np.flatnonzero((ended < _FELL * began) & (slope > FLAT))
    return [f"'{name}' fell from {began[i]:.1g} to {ended[i]:.1g}" for i in falls[:1]]


def weakly_known(trace: dict, hyper: dict, sds: dict, scales: frozenset) -> str | None:
    """What to say of a positive hyperparameter whose posterior is wide compared with its distance
    from the lower end of its support; `sds`: of the unconstrained values; `scales`: of effects.
    """
    found = []
    for name, sd in sds.items():
        if (end := _lower_end(support(trace[name]))) is not None:
            limit = WEAK_SCALE if name in scales else WEAK
            for value, ratio in zip(jax.tree.leaves(hyper[name]), jax.tree.leaves(sd), strict=True):
                value, ratio = np.ravel(np.asarray(value) - np.asarray(end)), np.ravel(ratio)
                most = ratio.argmax()
                found.append((ratio[most] / limit, ratio[most], value[most], name))
    excess, ratio, value, name = max(found, default=(0.0, 0.0, 0.0, ""))
    if not excess > 1.0:
        return None
    known = ", so that its effects' sds are too small, by about a third or more" * (name in scales)
    return (
        f"MAP(): the data hardly determine '{name}': {value:.1g}, with a posterior sd "
        f"{min(ratio, 999.0):.2g} times that. MAP takes it as known{known}. "
        "Use hyper=Grid(), which integrates it."
    )


def _lower_end(where: Any):
    """Of a support that has no upper one, where each entry has its own coordinate."""
    while hasattr(where, "base_constraint"):
        where = where.base_constraint
    return None if hasattr(where, "upper_bound") else getattr(where, "lower_bound", None)
