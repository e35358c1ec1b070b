"""Integrals over several independent functions a datum: a product over groups of functions that the
likelihood couples.

`results.dependence` proves which functions meet in a nonlinear operation. Functions that do not
meet are integrated apart, one by one on the nodes of `numerics.quadrature` (several outputs, or
several observed sites, each with a function of its own); two or three that meet by cubature; more
by weighted draws, with an error.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.kept import FromFunctions
from ppl_gp.proofs.meeting import dependence
from ppl_gp.results.integrals import cubature
from ppl_gp.results.integrals.likelihood import (
    by_datum,
    expected_moments,
    floored,
    from_by_datum,
    log_density_per_datum,
    log_expectation,
    moments_shape,
)
from ppl_gp.results.query.layout import ObservedSite
from ppl_gp.results.query.mixture import JointMoments, Moments
from ppl_gp.results.query.query import Case
from ppl_gp.sparse.expectation import flatten
from ppl_gp.wrappers import bare

# draws among which a datum's point of reference is looked for where the means have no density
REFERENCES = 64


class Effort(NamedTuple):
    """Static: nodes of one function, whether `many` integrals are averaged, and draws of more
    functions than cubature serves.
    """

    nodes: int
    many: bool
    draws: int


def outer_sites(case: Case) -> list[str]:
    """GP sites that no other GP sees."""
    return [k for k in case.draws.kept if k not in case.layout.inner]


def _rows_at(case: Case, **observations):
    """(a trace as a function of rows (F, M) of the outer functions, an array of that shape) at the
    first draw.

    What lies below them does not matter here, and is at its prior mean.
    """
    first = case.draws.at(0)
    declared = case.trace(first, {}, **observations)
    rows, rebuild = flatten({k: jnp.zeros(declared[k]["fn"].shape()) for k in outer_sites(case)})
    return lambda f: case.trace(first, rebuild(f), **observations), rows


def coupled_groups(case: Case, observations: dict) -> tuple[tuple[int, ...], ...]:
    """Groups of functions (rows of `flatten`) between which log p(y_n | f) is a sum; functions that
    it does not see are in none.
    """
    trace_at, rows = _rows_at(case, **observations)
    found = dependence(
        lambda f: log_density_per_datum(trace_at(f), case.layout), rows.shape[0], rows
    )
    seen = _with_companions(case, np.asarray(found.on[0].any(1)))
    reach = found.coupled & seen[:, None] & seen
    reach |= _correlated(case) & seen[:, None] & seen
    for _ in range(int(np.ceil(np.log2(rows.shape[0]))) + 1):
        reach = (reach.astype(int) @ reach.astype(int)) > 0
    return tuple(sorted({tuple(int(j) for j in np.flatnonzero(row)) for row in reach if row.any()}))


def _correlated(case: Case) -> np.ndarray:
    """(F, F): which functions are correlated within a row, given the data."""
    kept = {k: case.draws.kept[k] for k in outer_sites(case)}
    owners = [
        (k, i if not isinstance(v, FromFunctions) else 0)
        for k, v in kept.items()
        for i in range(math.prod(v.mean.shape[1:-1]))
    ]
    return np.array([[a == b for b in owners] for a in owners])


def _with_companions(case: Case, seen: np.ndarray) -> np.ndarray:
    """The functions that are seen, and those that are correlated with them."""
    return (_correlated(case).astype(int) @ seen.astype(int)) > 0


@dataclass(frozen=True)
class Entries:
    """Which functions each entry of an observed site sees: (E, D) rows of `flatten`, D the most of
    any; `None` above three.
    """

    functions: tuple[tuple[int, ...], ...] | None


def entries_of(case: Case) -> dict[str, Entries]:
    """{label: Entries} of the observed sites that are predicted."""
    trace_at, rows = _rows_at(case)
    companions = _correlated(case)
    return {site.label: _entries(trace_at, site, rows, companions) for site in case.layout.sites}


def _entries(trace_at, site: ObservedSite, rows, companions) -> Entries:
    num = rows.shape[0]

    def seen(f):
        fn = bare(trace_at(f[:num])[site.name]["fn"])
        if site.support is None:
            return [jnp.broadcast_to(getattr(fn, a), fn.shape()) for a in ("mean", "variance")]
        # An outcome is any number, so that what is found holds for all of them: it comes from a row
        # of its own.
        return [
            fn.log_prob(
                jnp.asarray(site.support[0] + f[num, 0], jnp.asarray(site.support).dtype)
                + jnp.zeros(fn.batch_shape, int)
            )
        ]

    try:
        found = dependence(seen, num + 1, jnp.concatenate([rows, rows[:1]]))
    except NotImplementedError:  # no moments
        return Entries(((0,),))
    # (F, E)
    seen_by = [
        np.stack([np.asarray(by_datum(x, site)).any(1) for x in on[:num]]) for on in found.on
    ]
    by_entry = (companions.astype(int) @ np.any(seen_by, 0).astype(int)) > 0
    sets = [np.flatnonzero(column).tolist() for column in np.transpose(by_entry)]
    size = max(1, *map(len, sets)) if sets else 1
    if size > cubature.MAX_DIMENSIONS:
        return Entries(None)
    # any will do: the entry does not see them
    others = [[i for i in range(num) if i not in s] for s in sets]
    return Entries(tuple(tuple(s + o[: size - len(s)]) for s, o in zip(sets, others, strict=True)))


def _stacked(f: dict[str, Any]):
    """(means (F, M), variances that nodes resolve (F, M), the way back to {site: f}) of independent
    coordinates: the functions, or, where they are correlated, standard normal ones behind them.
    """
    joint = {k: v for k, v in f.items() if isinstance(v, JointMoments)}
    mean, rebuild = flatten(
        {k: jnp.zeros_like(v.mean) if k in joint else v.mean for k, v in f.items()}
    )
    variance = flatten(
        {k: jnp.ones_like(v.mean) if k in joint else v.variance for k, v in f.items()}
    )[0]

    def back(rows):
        return {k: joint[k].at(x) if k in joint else x for k, x in rebuild(rows).items()}

    return mean, jax.vmap(lambda m, v: floored(Moments(m, v)).variance)(mean, variance), back


def log_expectation_over(log_lik, f: dict[str, Any], groups, effort: Effort, key):
    """(log E[exp log_lik(f)_n], squared relative error), (M,) each, under Gaussian f of these
    `Moments` or `JointMoments`; log_lik: {site: f} -> (M,).
    """
    mean, variance, rebuild = _stacked(f)
    sd, at = jnp.sqrt(variance), lambda rows: log_lik(rebuild(rows))
    if not groups:
        return at(mean), jnp.zeros_like(mean[0])
    base, offset = mean, jnp.zeros_like(mean[0])
    if len(groups) > 1:
        base, offset = _reference(at, mean, sd)
    parts = []
    for size in sorted({len(g) for g in groups}):
        index = jnp.asarray([g for g in groups if len(g) == size])

        def one(entry, size=size):
            i, key = entry

            def log_g(z):
                return at(base.at[i].set(mean[i] + sd[i] * z)) - offset

            if size == 1:
                (i,) = i
                alone = lambda x: at(base.at[i].set(x)) - offset  # noqa: E731
                log_p = log_expectation(alone, Moments(mean[i], variance[i]), effort.nodes)
                return log_p, jnp.zeros_like(log_p)
            if size <= cubature.MAX_DIMENSIONS:
                return cubature.log_integral(log_g, size, mean[0], effort.many)
            return cubature.log_integral_by_draws(log_g, size, mean[0], effort.draws, key)

        log_p, error = lax.map(
            one, (index, random.split(random.fold_in(key, size), index.shape[0]))
        )
        parts.append((jnp.sum(log_p, 0), jnp.sum(error, 0)))
    log_p, error = (sum(x[1:], x[0]) for x in zip(*parts, strict=True))
    log_p = offset + log_p
    return jnp.where(jnp.isnan(log_p), -jnp.inf, log_p), jnp.where(jnp.isnan(log_p), jnp.inf, error)


def quadratic_log_expectation(log_lik, f: dict[str, Moments]) -> Float[Array, "M"]:
    """log E[exp log_lik(f)_n] with log_lik replaced by its slope and curvature along each function
    at the means, (M,).
    """
    mean, variance, rebuild = _stacked(f)
    slope = jax.grad(lambda rows: jnp.sum(log_lik(rebuild(rows))))

    def along(i):
        direction = jnp.zeros_like(mean).at[i].set(1.0)
        g, h = jax.jvp(slope, (mean,), (direction,))
        return g[i], jnp.minimum(h[i], 0.0)

    g, h = jax.vmap(along)(jnp.arange(mean.shape[0]))
    shrunk = 1.0 - variance * h
    return log_lik(rebuild(mean)) + 0.5 * jnp.sum(variance * g**2 / shrunk - jnp.log(shrunk), 0)


def _reference(at, mean, sd):
    """(rows, log_lik there): the means, and where they have no density the likeliest of a few
    draws.

    Terms of other groups are taken relative to it, so it must be finite.
    """
    z = random.normal(random.key(5), (REFERENCES, *mean.shape), mean.dtype)
    trials = jnp.concatenate([mean[None], mean + sd * z])
    values = lax.map(at, trials)
    finite = jnp.where(jnp.isfinite(values), values, -jnp.inf)
    best = jnp.where(jnp.isfinite(values[0]), 0, jnp.argmax(finite, 0))
    take = lambda x: jnp.take_along_axis(x, jnp.broadcast_to(best, x.shape[1:])[None], 0)[0]  # noqa: E731
    return take(trials), take(values)


def outcomes_over(sites, entries: dict[str, Entries], trace_at, f: dict[str, Any], effort: Effort):
    """({label: Moments of y}, {label: log p (K, ...)}) of the sites whose entries see at most three
    functions;
    trace_at: {site: f} -> trace.
    """
    mean, variance, rebuild = _stacked(f)
    sd, y, log_probs = jnp.sqrt(variance), {}, {}
    for site in sites:
        index = entries[site.label].functions
        if index is None:
            continue
        index = jnp.asarray(index)
        fn_at = lambda rows, site=site: bare(trace_at(rebuild(rows))[site.name]["fn"])  # noqa: E731
        if site.support is not None:
            log_probs[site.label] = _outcome_log_probs(site, fn_at, index, mean, sd, effort)
        elif (shape := moments_shape(fn_at, mean)) is not None:
            each = lambda e, a=(site, fn_at, shape, index, mean, sd, effort): _entry_moments(*a, e)  # noqa: E731
            parts = lax.map(each, jnp.arange(index.shape[0]))
            y[site.label] = Moments(*(from_by_datum(x, site, shape) for x in parts))
    return y, log_probs


def _outcome_log_probs(site, fn_at, index, mean, sd, effort: Effort) -> Float[Array, "K ..."]:
    shape = jax.eval_shape(fn_at, mean).batch_shape

    def entry(outcome, e):
        i = index[e]

        def log_lik(x):
            fn = fn_at(mean.at[i].set(x))
            return by_datum(fn.log_prob(jnp.full(fn.batch_shape, outcome)), site)[e]

        if index.shape[1] == 1:
            return log_expectation(
                lambda x: log_lik(x[None]), Moments(mean[i[0]], sd[i[0]] ** 2), effort.nodes
            )
        return cubature.log_integral(
            lambda z: log_lik(mean[i] + sd[i] * z), index.shape[1], mean[0], effort.many
        )[0]

    entries = jnp.arange(index.shape[0])
    log_p = lax.map(lambda k: lax.map(lambda e: entry(k, e), entries), jnp.asarray(site.support))
    log_p = jax.vmap(lambda x: from_by_datum(x, site, shape))(log_p)
    return log_p - logsumexp(log_p, 0)


def _entry_moments(site, fn_at, shape, index, mean, sd, effort: Effort, e) -> Moments:
    i = index[e]

    def read(name):
        return lambda x: by_datum(
            jnp.broadcast_to(getattr(fn_at(mean.at[i].set(x)), name), shape), site
        )[e]

    first, spread = read("mean"), read("variance")
    if index.shape[1] == 1:
        f = Moments(mean[i[0]], sd[i[0]] ** 2)
        return expected_moments(
            lambda x: first(x[None]), lambda x: spread(x[None]), f, effort.nodes
        )
    at = lambda z: mean[i] + sd[i] * z  # noqa: E731
    return cubature.moments(
        lambda z: first(at(z)), lambda z: spread(at(z)), index.shape[1], mean[0], effort.many
    )
