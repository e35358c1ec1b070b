"""Which of a datum's functions are integrated together: those that meet in a nonlinear operation of
the likelihood, as `reading.interactions` proves, or are correlated.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ppl_gp.gp import bare
from ppl_gp.reading import affine
from ppl_gp.reading.affine import Dependence
from ppl_gp.reading.interactions import dependence
from ppl_gp.results.integrals import cubature
from ppl_gp.results.integrals.likelihood import by_datum, log_density_per_datum, mean_and_variance
from ppl_gp.results.query.layout import ObservedSite
from ppl_gp.results.query.query import Query
from ppl_gp.sparse.expectation import flatten


def outer_sites(query: Query) -> list[str]:
    """GP sites that no other GP sees."""
    return [k for k in query.draws.kept if k not in query.layout.inner]


def coupled_groups(query: Query, observations: dict) -> tuple[tuple[int, ...], ...]:
    """Groups of functions (rows of `flatten`) between which log p(y_n | f) is a sum; functions that
    it does not see are in none.
    """
    trace_at, rows = _rows_at(query, **observations)
    found = dependence(
        lambda f: log_density_per_datum(trace_at(f), query.layout), rows.shape[0], rows
    )
    correlated = _correlated(query)
    # those that are seen, and those that are correlated with them
    seen = (correlated.astype(int) @ np.asarray(found.on[0].any(1)).astype(int)) > 0
    reach = (found.coupled | correlated) & seen[:, None] & seen
    for _ in range(int(np.ceil(np.log2(rows.shape[0]))) + 1):
        reach = (reach.astype(int) @ reach.astype(int)) > 0
    return tuple(sorted({tuple(int(j) for j in np.flatnonzero(row)) for row in reach if row.any()}))


@dataclass(frozen=True)
class Entries:
    """Which functions each entry of an observed site sees: (E, D) rows of `flatten`, D the most of
    any; `None` above three. `is_affine`: the mean of y is affine in all of them and its variance
    constant, as proved on the jaxpr.
    """

    functions: tuple[tuple[int, ...], ...] | None
    is_affine: bool = False

    @property
    def are_drawn(self) -> bool:
        """Whether moments of y have to be averaged over draws."""
        return self.functions is None and not self.is_affine


def entries_of(query: Query) -> dict[str, Entries]:
    """{label: Entries} of the observed sites that are predicted."""
    trace_at, rows = _rows_at(query)
    companions = _correlated(query)
    return {site.label: _entries(trace_at, site, rows, companions) for site in query.layout.sites}


def _entries(trace_at, site: ObservedSite, rows, companions) -> Entries:
    num = rows.shape[0]

    def moments(f):
        return mean_and_variance(bare(trace_at(f[:num])[site.name]["fn"]))

    def seen(f):
        fn = bare(trace_at(f[:num])[site.name]["fn"])
        if fn.event_dim:
            return mean_and_variance(fn)
        # What the distribution sees, its moments need not: a Cauchy's scale is in none. The value
        # is any number, so that what is found holds for all of them: it comes from a row of its
        # own.
        return [fn.log_prob(_value(fn, site, f[num, 0]))]

    points = jnp.concatenate([rows, rows[:1]])
    try:
        found = dependence(seen, num + 1, points)
    except NotImplementedError:  # vectors without moments, of which nothing is told
        return Entries(((0,),))
    is_affine = site.support is None and _is_affine(moments, points)
    # (F, E)
    seen_by = [
        np.stack([np.asarray(by_datum(x, site)).any(1) for x in on[:num]]) for on in found.on
    ]
    by_entry = (companions.astype(int) @ np.any(seen_by, 0).astype(int)) > 0
    sets = [np.flatnonzero(column).tolist() for column in np.transpose(by_entry)]
    size = max(1, *map(len, sets)) if sets else 1
    if size > cubature.MAX_DIMENSIONS:
        return Entries(None, is_affine)
    # any will do: the entry does not see them
    others = [[i for i in range(num) if i not in s] for s in sets]
    return Entries(
        tuple(tuple(s + o[: size - len(s)]) for s, o in zip(sets, others, strict=True)), is_affine
    )


def _value(fn, site: ObservedSite, number):
    """`number` for every entry, as a value of the distribution."""
    if site.support is not None:
        number = jnp.asarray(site.support[0] + number, jnp.asarray(site.support).dtype)
    elif fn.support.is_discrete:
        number = jnp.asarray(number, int)
    return jnp.broadcast_to(number, fn.batch_shape)


def _is_affine(moments, points) -> bool:
    try:
        mean, variance = affine.dependence(moments, points)
    except NotImplementedError:
        return False
    return mean <= Dependence.affine and variance is Dependence.constant


def _rows_at(query: Query, **observations):
    """(a trace as a function of rows (F, M) of the outer functions, an array of that shape) at the
    first draw.

    What lies below them does not matter here, and is at its prior mean.
    """
    first = query.draws.at(0)
    declared = query.trace(first, {}, **observations)
    rows, rebuild = flatten({k: jnp.zeros(declared[k]["fn"].shape()) for k in outer_sites(query)})
    return lambda f: query.trace(first, rebuild(f), **observations), rows


def _correlated(query: Query) -> np.ndarray:
    """(F, F): which functions are correlated within a row, given the data."""
    kept = {k: query.draws.kept[k] for k in outer_sites(query)}
    owners = [
        (k, 0 if v.coupled else i)
        for k, v in kept.items()
        for i in range(v.coupled or math.prod(v.mean.shape[1:-1]))
    ]
    return np.array([[a == b for b in owners] for a in owners])
