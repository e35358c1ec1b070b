"""Compiled prediction: quadrature where one f_n decides y_n, or several that can be integrated
apart; draws of what lies below.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.draws import Draws
from ppl_gp.gp import bare
from ppl_gp.quick import full_jit, quick_jit
from ppl_gp.reading.arguments import is_array
from ppl_gp.results.integrals import cubature
from ppl_gp.results.integrals.averages import (
    LAYER_NODES,
    MIN_DRAWS,
    all_marginals,
    average,
    below_outer,
    effort_of,
    marginals,
    num_nodes,
    repeats,
    trace_above,
)
from ppl_gp.results.integrals.groups import Entries, entries_of
from ppl_gp.results.integrals.integration import Integration, mackay_log_probs
from ppl_gp.results.integrals.likelihood import (
    by_datum,
    expected_moments,
    fn_at,
    from_by_datum,
    log_expectation,
    moments_shape,
    outcome_log_probs,
    site_moments,
)
from ppl_gp.results.integrals.several import Effort, stacked
from ppl_gp.results.query.mixture import Moments, plain
from ppl_gp.results.query.query import Query, drawn_trace


def outcomes_over(sites, entries: dict[str, Entries], trace_at, f: dict[str, Any], effort: Effort):
    """({label: Moments of y}, {label: log p (K, ...)}) of the sites whose entries need no draws:
    they see at most three functions, or all of them in a straight line. trace_at: {site: f} ->
    trace.
    """
    mean, variance, rebuild = stacked(f)
    sd, y, log_probs = jnp.sqrt(variance), {}, {}
    for site in sites:
        if entries[site.label].are_drawn:
            continue
        fn_at = lambda rows, site=site: bare(trace_at(rebuild(rows))[site.name]["fn"])  # noqa: E731
        if entries[site.label].is_affine:
            shape: Any = moments_shape(fn_at, mean)
            parts = _affine_moments(site, fn_at, shape, mean, sd)
            y[site.label] = Moments(*(from_by_datum(x, site, shape) for x in parts))
            continue
        index = jnp.asarray(entries[site.label].functions)
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


def _affine_moments(site, fn_at, shape, mean, sd) -> Moments:
    """E[a f + b] = a E[f] + b, Var = sum_i (a_i sd_i)^2 + Var[y | f]: exact, of any number of
    functions.
    """

    def read(name):
        return lambda x: by_datum(jnp.broadcast_to(getattr(fn_at(x), name), shape), site)

    def along(i):
        step = jnp.zeros_like(mean).at[i].set(sd[i])
        return jax.jvp(read("mean"), (mean,), (step,))[1]

    slopes = lax.map(along, jnp.arange(mean.shape[0]))
    return Moments(read("mean")(mean), read("variance")(mean) + jnp.sum(slopes**2, 0))


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


_ROOM = 2**30  # bytes for the covariances of draws that are made together
_COPIES = 25  # of a covariance that a joint draw takes on its way
_LITTLE = 5000  # draws x rows, of 96 nodes each, that take less time than it takes to compile well


class OverDraws(NamedTuple):
    """Of a label whose y is averaged over draws: the mean of y, and p(y <= k) of every outcome k,
    (K, ...), where there are finitely many. `Moments` of them, or standard errors.
    """

    mean: Any
    below: Any = None


def predictive(
    query: Query, integration: Integration, link_approximation: str | None, judged: bool = False
):
    """({GP site: Moments}, {label: Moments or None}, {label: log p (K, ...)}, {label: standard
    errors, `OverDraws`}).

    Mixed over draws. Errors are of labels whose y was averaged over draws of f or of what lies
    below it; `judged`: of all, the draws of the posterior, which are independent, included.
    """
    entries = entries_of(query) if integration is Integration.functions else {}
    drawn = tuple(k for k, v in entries.items() if v.are_drawn)
    little = integration is Integration.quadrature and query.draws.num * query.layout.num <= _LITTLE
    compiled = _predictive if little else _predictive.full
    return compiled(query, integration, link_approximation, tuple(entries.items()), drawn, judged)


@quick_jit
def _predictive(query: Query, integration: Integration, link_approximation, entries, drawn, judged):
    # what is drawn several times for a draw of the posterior counts as often as that, at the least
    num = query.draws.effective * (1 if judged else repeats(query, MIN_DRAWS))

    def judge(predicted):  # what is exact given a draw
        return _with_moments(query, predicted) if judged else (*predicted, {})

    if integration is Integration.given:
        f, y, log_probs, between = query.mixture(
            lambda draw: judge(_predict_given_draw(query, query.trace(draw, {}), {}))
        )
    elif integration is Integration.quadrature:
        f, y, log_probs, between = query.mixture(
            lambda draw: judge(_predict_by_quadrature(query, draw, link_approximation))
        )
    elif integration is Integration.functions:

        def component(draw):
            f = all_marginals(query, draw)
            effort = effort_of(query, MIN_DRAWS)
            y, log_probs = outcomes_over(
                query.layout.sites, dict(entries), lambda f: query.trace(draw, f), f, effort
            )
            return judge(({k: plain(v) for k, v in f.items()}, y, log_probs))

        f, y, log_probs, exact = query.mixture(component)
        between = {}
        if drawn:
            given_draw = lambda trace, f: _with_moments(query, _predict_given_draw(query, trace, f))  # noqa: E731
            _, more, more_probs, between = average(query, integration, given_draw, MIN_DRAWS)
            between = {k: between[k] for k in drawn if k in between}
            y |= {k: more[k] for k in drawn if k in more}
            log_probs |= {k: more_probs[k] for k in drawn if k in more_probs}
        between = {**exact, **between}
    elif integration is Integration.layers and query.site is not None:

        def given_below(trace, f):
            below = below_outer(query, trace)
            y, log_probs = _outcomes(
                query, lambda x: trace_above(query, below, x), f[query.site], LAYER_NODES
            )
            return _with_moments(query, (f, y, log_probs))

        f, y, log_probs, between = average(query, integration, given_below, MIN_DRAWS)
    else:
        f, y, log_probs, between = average(
            query,
            integration,
            lambda trace, f: _with_moments(query, _predict_given_draw(query, trace, f)),
            MIN_DRAWS,
        )
    missing = {site.label: None for site in query.layout.sites}
    moments = {
        s.label: outcome_moments(s.support, log_probs[s.label])
        for s in query.layout.sites
        if s.label in log_probs
    }
    errors = jax.tree.map(
        lambda v: jnp.sqrt(v.variance / num), between, is_leaf=lambda v: isinstance(v, Moments)
    )
    return f, {**missing, **y, **moments}, log_probs, errors


def _with_moments(query: Query, predicted):
    """What was predicted from one draw, and what y is given it, `OverDraws`, whose variance over
    draws is the squared error of one.
    """
    f, y, log_probs = predicted
    supports = {s.label: s.support for s in query.layout.sites}
    found = {k: OverDraws(_known(v.mean)) for k, v in y.items()}
    for k, log_p in log_probs.items():
        below = jnp.cumsum(jnp.exp(log_p), 0)
        found[k] = OverDraws(_known(outcome_moments(supports[k], log_p).mean), _known(below))
    return f, y, log_probs, found


def _known(value) -> Moments:
    return Moments(value, jnp.zeros_like(value))


def _predict_by_quadrature(query: Query, draw: Draws, link_approximation):
    f = marginals(query, draw)
    y, log_probs = _outcomes(
        query, lambda x: query.trace(draw, {query.site: x}), f, num_nodes(query), link_approximation
    )
    return {query.site: f}, y, log_probs


def _outcomes(query: Query, trace_at, f: Moments, num_nodes: int, link_approximation=None):
    """({label: Moments of y}, {label: log p (K, ...)}) for f_n with these moments."""
    y, log_probs = {}, {}
    for site in query.layout.sites:
        fn = fn_at(trace_at, site)
        if link_approximation is not None:
            log_probs[site.label] = mackay_log_probs(fn, f)
        elif site.support is not None:
            log_probs[site.label] = outcome_log_probs(site, fn, f, num_nodes)
        elif (moments := site_moments(site, fn, f, num_nodes)) is not None:
            y[site.label] = moments
    return y, log_probs


def _predict_given_draw(query: Query, trace, f):
    y, log_probs = {}, {}
    for site in query.layout.sites:
        fn = bare(trace[site.name]["fn"])
        if site.support is not None:
            values = jnp.asarray(site.support).reshape((-1,) + (1,) * len(fn.batch_shape))
            log_probs[site.label] = fn.log_prob(
                jnp.broadcast_to(values, (values.size, *fn.batch_shape))
            )
        elif moments_shape(lambda _, fn=fn: fn, jnp.zeros(())) is not None:
            y[site.label] = Moments(
                *(jnp.broadcast_to(x, fn.shape()) for x in (fn.mean, fn.variance))
            )
    return f, y, log_probs


def outcome_moments(support, log_probs) -> Moments:
    """Of an outcome as a number; the variance about the mean, with p(y = k) along the first
    axis.
    """
    p = jnp.exp(log_probs)
    values = jnp.asarray(support, p.dtype).reshape((-1,) + (1,) * (p.ndim - 1))
    mean = jnp.sum(p * values, 0)
    return Moments(mean, jnp.sum(p * (values - mean) ** 2, 0))


def joint_draws(query: Query, key, num_samples: int):
    """({GP site: (num_samples, ...)}, {label: (num_samples, ...)}), in proportion to the draws'
    weights.
    """
    return _in_batches(query, key, num_samples, False)[:2]


def joint_sites(query: Query, key, num_samples: int):
    """As `joint_draws`, and {deterministic site: (num_samples, ...)}."""
    return _in_batches(query, key, num_samples, True)


def _in_batches(query: Query, key, num_samples: int, further: bool):
    """The samples of a draw at once, or as many as `_ROOM` has covariances for where each has
    inputs, and so a covariance, of its own.
    """
    chosen, place, each = _places(query, num_samples)
    at_once = each
    if query.layout.local_latents or query.layout.inner:
        at_once = max(1, int(_ROOM / (_COPIES * 8 * query.layout.num**2)))
    return _joint_draws(query, key, chosen, place, each, min(at_once, each), further)


def _places(query: Query, num_samples: int):
    """(the draws that are used, the places of the samples among `each` samples of them, each)."""
    of_sample = query.draws.resampled(num_samples)
    chosen, which, counts = np.unique(of_sample, return_inverse=True, return_counts=True)
    # Of every posterior draw the first sample, then the second: a part of the samples is spread
    # over the draws too.
    rank = np.empty_like(which)
    rank[np.argsort(which, kind="stable")] = np.arange(which.size) - np.repeat(
        np.cumsum(counts) - counts, counts
    )
    return jnp.asarray(chosen), (jnp.asarray(which), jnp.asarray(rank)), int(counts.max())


@full_jit
def _joint_draws(query: Query, key, chosen, place, each: int, at_once: int, further: bool):
    """`each` samples of the draws `chosen`, of which those at `place` = (which draw, which sample)
    are kept; `further`: deterministic sites too.
    """

    def component(entry):
        draw, keys = entry
        conditionals = query.conditionals(draw)

        def one(key):
            trace, _ = drawn_trace(query, draw, conditionals, key, joint=True)
            f = {k: trace[k]["value"] for k in draw.kept}
            known = {k: s["value"] for k, s in trace.items() if s["type"] == "deterministic"}
            y = {s.label: trace[s.name]["value"] for s in query.layout.sites}
            return f, y, {k: v for k, v in known.items() if further and is_array(v)}

        return jax.vmap(one)(keys) if at_once == each else lax.map(one, keys, batch_size=at_once)

    keys = random.split(key, (chosen.shape[0], each))
    found = lax.map(component, (query.draws.part(chosen), keys))
    return jax.tree.map(lambda x: x[place], found)
