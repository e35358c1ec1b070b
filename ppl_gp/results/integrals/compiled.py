"""Compiled prediction: moments of y and probabilities of its outcomes, integrated over the
functions that decide an entry, or averaged over draws; and joint draws.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax, random
from jax.scipy.special import logsumexp

from ppl_gp.draws import JointMoments, Moments, plain
from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import bare, unwrap
from ppl_gp.local.tilted import line
from ppl_gp.quick import full_jit, quick_jit
from ppl_gp.reading.arguments import is_array
from ppl_gp.reading.dependence import Dependence, dependence
from ppl_gp.results.integrals import cubature, several
from ppl_gp.results.query.layout import ObservedSite
from ppl_gp.results.query.query import BY_DRAWS, Integration, Query, drawn_runs


class Outcome(NamedTuple):
    """What is said of y at a site: its moments, log p(y = k), (K, ...), of finitely many outcomes,
    and quantiles (Q, ...) of other numbers too. Where y is averaged over draws, the errors of its
    mean, of p(y <= k), (K, ...), and of quantiles: half the longer side of a 95 % interval.

    While draws are mixed, an error is `Moments`, whose variance is the squared error of one draw.
    """

    moments: Moments | None = None
    log_probs: Any = None
    mean_error: Any = None
    below_error: Any = None
    quantiles: Any = None
    quantiles_error: Any = None


def outcome_over(
    site: ObservedSite, seen: several.Entries, trace_at, f: dict, effort: cubature.Effort
) -> Outcome:
    """Of a site whose entries see at most three functions, or all of them in a straight line;
    nothing of others, which are drawn. trace_at: {site: f} -> trace.
    """
    rows, rebuild = several.stacked(f)
    fn_at = lambda x: bare(trace_at(rebuild(x))[site.name]["fn"])  # noqa: E731
    if seen.is_affine:
        return Outcome(_affine_moments(fn_at, rows))
    if seen.functions is None:
        return Outcome()
    if site.support is not None:
        return Outcome(log_probs=_log_probs(site, fn_at, seen.functions, rows, effort))
    both = lambda x: several.mean_and_variance(fn_at(x))  # noqa: E731
    ask = lambda own, f: cubature.moments(own(both), f, effort, site.concave)  # noqa: E731
    try:
        shape = jax.eval_shape(both, rows.mean)[0].shape
    except NotImplementedError:
        return Outcome()
    return Outcome(several.over_entries(site, shape, seen.functions, rows, ask))


def _log_probs(site: ObservedSite, fn_at, functions, f: Moments, effort: cubature.Effort):
    """log p(y = k) of every outcome k in the support, normalised over k: (K, *batch), nats."""
    shape = jax.eval_shape(fn_at, f.mean).batch_shape

    def of_outcome(k):
        def ask(own, f):
            log_p = own(lambda x: fn_at(x).log_prob(jnp.full(shape, k)))
            return cubature.log_integral(log_p, f, effort, concave=site.concave)[0]

        return several.over_entries(site, shape, functions, f, ask)

    found = lax.map(of_outcome, jnp.asarray(site.support))
    return found - logsumexp(found, 0)


def _affine_moments(fn_at, f: Moments) -> Moments:
    """E[a f + b] = a E[f] + b, Var = sum_i (a_i sd_i)^2 + Var[y | f]: of any number, exact."""
    moments_at = lambda x: several.mean_and_variance(fn_at(x))  # noqa: E731

    def along(i):
        step = jnp.zeros_like(f.mean).at[i].set(jnp.sqrt(f.variance[i]))
        return jax.jvp(lambda x: moments_at(x)[0], (f.mean,), (step,))[1]

    slopes = lax.map(along, jnp.arange(f.mean.shape[0]))
    mean, variance = moments_at(f.mean)
    return Moments(mean, variance + jnp.sum(slopes**2, 0))


def outcome_given(site: ObservedSite, trace: dict) -> Outcome:
    """Of a site in a run that gives all that decides y's distribution."""
    fn = bare(trace[site.name]["fn"])
    if site.support is not None:
        values = jnp.asarray(site.support).reshape((-1,) + (1,) * len(fn.batch_shape))
        every = jnp.broadcast_to(values, (values.size, *fn.batch_shape))
        return Outcome(log_probs=fn.log_prob(every))
    try:
        return Outcome(Moments(*several.mean_and_variance(fn)))
    except NotImplementedError:
        return Outcome()


_LITTLE = 5000  # draws x rows, of 96 nodes each, that take less time than it takes to compile well


def predictive(
    query: Query, link_approximation: str | None, judged: bool = False
) -> tuple[dict[str, Moments], dict[str, Outcome]]:
    """({GP site: Moments}, {label: Outcome}), mixed over draws.

    Errors are of labels whose y was averaged over draws of f or of what lies below it; `judged`: of
    all, the draws of the posterior, which are independent, included.
    """
    entries = several.entries_of(query)
    is_quadrature = query.integration is Integration.quadrature
    little = is_quadrature and query.draws.num * query.layout.num <= _LITTLE
    compiled = _predictive if little else _predictive.full
    f, y, valid = compiled(query, link_approximation, entries, judged)
    query.require_valid(valid)
    return f, y


@quick_jit
def _predictive(query: Query, link_approximation, entries, judged: bool):
    sites = query.layout.sites
    # what is drawn several times for a draw of the posterior counts as often as that, at the least
    num = query.draws.effective * (1 if judged else cubature.repeats(query, cubature.MIN_DRAWS))

    def integrated(draw):
        f = query.marginals(draw)

        def outcome(site):
            if query.integration is Integration.given:
                return outcome_given(site, query.trace(draw, {}))
            if link_approximation is None:
                how = partial(query.trace, draw), f, cubature.effort_of(query)
                return outcome_over(site, entries[site.label], *how)
            trace_at = lambda x: query.trace(draw, {query.site: x})  # noqa: E731
            return Outcome(log_probs=mackay_log_probs(site, trace_at, *f.values()))

        y = {s.label: _judged(s, outcome(s)) if judged else outcome(s) for s in sites}
        return {k: plain(v) for k, v in f.items()}, y

    def given_run(trace, f):
        def outcome(site):
            if query.integration is not Integration.layers or query.site is None:
                return outcome_given(site, trace)
            last = cubature.above(query, trace), {query.site: f[query.site]}
            return outcome_over(site, entries[site.label], *last, cubature.OF_LAYERS)

        return f, {s.label: _judged(s, outcome(s)) for s in sites}

    if query.integration in BY_DRAWS:
        f, y = cubature.average(query, given_run)
    else:
        f, y = query.mixture(integrated)
        if drawn := [k for k, v in entries.items() if v.functions is None and not v.is_affine]:
            _, averaged = cubature.average(query, given_run)
            y |= {k: averaged[k] for k in drawn}
    return f, {s.label: _finished(s, y[s.label], num) for s in sites}, query.valid()


def _judged(site: ObservedSite, y: Outcome) -> Outcome:
    """With what its errors are of."""
    known = lambda x: Moments(x, jnp.zeros_like(x))  # noqa: E731
    if y.log_probs is not None:
        below = jnp.cumsum(jnp.exp(y.log_probs), 0)
        mean = outcome_moments(site.support, y.log_probs).mean
        return y._replace(mean_error=known(mean), below_error=known(below))
    return y if y.moments is None else y._replace(mean_error=known(y.moments.mean))


def _finished(site: ObservedSite, y: Outcome, num) -> Outcome:
    """With moments of outcomes, and errors of averages over `num` independent draws."""
    if y.log_probs is not None:
        y = y._replace(moments=outcome_moments(site.support, y.log_probs))
    error = lambda v: None if v is None else jnp.sqrt(v.variance / num)  # noqa: E731
    return y._replace(mean_error=error(y.mean_error), below_error=error(y.below_error))


def outcome_moments(support, log_probs) -> Moments:
    """Of an outcome as a number, the variance about the mean; (K, ...) of log p(y = k)."""
    p = jnp.exp(log_probs)
    values = jnp.asarray(support, p.dtype).reshape((-1,) + (1,) * (p.ndim - 1))
    mean = jnp.sum(p * values, 0)
    return Moments(mean, jnp.sum(p * (values - mean) ** 2, 0))


MACKAY = "mackay"


def mackay_log_probs(site, trace_at, f: Moments | JointMoments):
    """log p(y = 0), log p(y = 1), (2, M): sigma(kappa m), kappa = (1 + pi v / 8)^(-1/2)
    (PRML 4.153-4.154). trace_at: f -> trace.

    m and v are those of the logits, a + b f. MacKay (1992), "The evidence framework applied to
    classification networks".
    """
    logits = lambda x: _logits(bare(trace_at(x)[site.name]["fn"]), x)  # noqa: E731
    form = line(logits, f.mean.shape[0], f.mean.dtype)
    mean, variance = form.intercept + form.slope * f.mean, form.slope**2 * f.variance
    eta = mean / jnp.sqrt(1.0 + jnp.pi * variance / 8.0)
    return jax.nn.log_sigmoid(jnp.stack([-eta, eta]))


def check_link_approximation(query: Query, name: str | None) -> None:
    """Raise `DataError` for an unknown name, `ModelError` for a model that it does not fit."""
    if name is None:
        return
    if name != MACKAY:
        raise DataError(
            f"link_approximation={name!r}: give 'mackay', or None for quadrature of the model's "
            "likelihood."
        )
    if query.integration is not Integration.quadrature or not _logits_are_affine(query):
        raise ModelError(
            "link_approximation='mackay' needs one GP site and one Bernoulli(logits=...) a row, of "
            "logits affine in f; the observed sites are "
            f"{[s.label for s in query.layout.sites]}. Leave it out: quadrature fits every "
            "likelihood."
        )


def _logits_are_affine(query: Query) -> bool:
    """Whether each observed site is a Bernoulli of logits proved affine in f, by traces alone."""
    first, kinds = query.draws.at(0), set()

    def logits(f):
        trace = query.trace(first, {query.site: f})
        fns = [bare(trace[site.name]["fn"]) for site in query.layout.sites]
        one_each = all(fn.shape() == f.shape for fn in fns)
        kinds.update(type(unwrap(fn)) if one_each else None for fn in fns)
        fns = [fn for fn in fns if type(unwrap(fn)) is dist.BernoulliLogits]
        return [_logits(fn, f) for fn in fns] if one_each else []

    proved = all(d <= Dependence.affine for d in dependence(logits, jnp.zeros(query.layout.num)))
    return proved and kinds <= {dist.BernoulliLogits}


def _logits(fn, f):
    return jnp.broadcast_to(unwrap(fn).logits, f.shape)


_ROOM = 2**30  # bytes for the covariances of draws that are made together
_COPIES = 25  # of a covariance that a joint draw takes on its way


def joint_draws(query: Query, key, num_samples: int, further: bool = False):
    """({GP site: (num_samples, ...)}, {label: (num_samples, ...)}, {deterministic site:
    (num_samples, ...)}, where `further` ones are wanted), in proportion to the draws' weights.

    The samples of a draw at once, or as many as `_ROOM` has covariances for, if each has its own.
    """
    chosen, place, each = _places(query, num_samples)
    at_once = each
    if query.layout.local_latents or query.layout.inner:
        at_once = max(1, int(_ROOM / (_COPIES * 8 * query.layout.num**2)))
    *found, valid = _joint_draws(query, key, chosen, place, each, min(at_once, each), further)
    query.require_valid(valid)
    return found


def _places(query: Query, num_samples: int):
    """(the draws that are used, the places of the samples among `each` samples of them, each)."""
    of_sample = query.draws.resampled(num_samples)
    chosen, which, counts = np.unique(of_sample, return_inverse=True, return_counts=True)
    # the first sample of each posterior draw, then the second: any part is spread over the draws
    rank = np.empty_like(which)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rank[np.argsort(which, kind="stable")] = np.arange(which.size) - starts
    return jnp.asarray(chosen), (jnp.asarray(which), jnp.asarray(rank)), int(counts.max())


@full_jit
def _joint_draws(query: Query, key, chosen, place, each: int, at_once: int, further: bool):
    """`each` samples of the draws `chosen`, those at `place` = (which draw, which sample) kept."""

    def component(entry):
        draw, keys = entry
        run = drawn_runs(query, draw, joint=True)

        def one(key):
            trace, _ = run(key)
            f = {k: trace[k]["value"] for k in draw.kept}
            known = {k: s["value"] for k, s in trace.items() if s["type"] == "deterministic"}
            y = {s.label: trace[s.name]["value"] for s in query.layout.sites}
            return f, y, {k: v for k, v in known.items() if further and is_array(v)}

        return jax.vmap(one)(keys) if at_once == each else lax.map(one, keys, batch_size=at_once)

    keys = random.split(key, (chosen.shape[0], each))
    found = lax.map(component, (query.draws.part(chosen), keys))
    return *jax.tree.map(lambda x: x[place], found), query.valid()
