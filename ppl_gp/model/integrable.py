"""Which Gaussian sites of a model can be integrated: those that the data see through one linear
predictor.

A site is left a hyperparameter where a kernel, a scale or another prior is computed from it (but
for a Gaussian prior's mean), and, unless it is asked for by name, where it would make a datum see
more functions than the GPs alone do: the logarithm of a noise with a normal prior, say, or an
intercept for each of more outputs than there are GPs.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppl_gp.model.gaussian_sites import spread_of
from ppl_gp.model.predictor import Rest, cut, innovations, shapes, traced_at
from ppl_gp.model.roles import is_missing_part, is_observed
from ppl_gp.model.skeleton import Skeleton
from ppl_gp.proofs.dependence import sources

_SITE, _REST = "site ", "rest"


class Integrable(NamedTuple):
    """`sites`: integrated; their predictors are `functions` functions a datum in all."""

    sites: tuple[str, ...]
    functions: int


def integrable(
    model: Callable,
    skeleton: Skeleton,
    arrays: Mapping[str, Any],
    values: Mapping[str, Any],
    sites: Mapping[str, bool],
    asked: bool = False,
) -> Integrable | None:
    """What of `sites` is integrated, or `None` where the data see no linear predictor of them.

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
    """All sites, where a datum sees one function of them, or where they were asked for; else the
    GPs, and what adds none.
    """
    if (whole := found_of(sites)) is not None and (asked or whole.functions == 1):
        return whole
    found = found_of(gps)
    for site in (k for k in sites if k not in gps):
        more = found_of([*(found.sites if found else ()), site])
        if more is not None and more.functions <= (found.functions if found else 1):
            found = more
    return found


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
        parts = {k: spread_of(s["fn"]) if k in sites else s["fn"] for k, s in free.items()}
        return [jnp.asarray(x) for x in jax.tree.leaves(parts)]

    e = innovations(model, skeleton, rest, sites)
    flow = sources(priors, {_REST: rest} | {_SITE + k: x for k, x in e.items()})
    shaping = frozenset().union(*flow)
    return [k for k in sites if _SITE + k not in shaping]
