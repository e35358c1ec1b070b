"""Compiled prediction: quadrature where one f_n decides y_n, or several that can be integrated apart; draws of what lies below."""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.concave import is_concave
from ppl_gp.draws import Draws
from ppl_gp.gp import unwrap
from ppl_gp.results.case import Case, drawn_trace
from ppl_gp.results.integration import Integration
from ppl_gp.results.latent_proposals import Proposals
from ppl_gp.results.link import mackay_log_probs
from ppl_gp.results.mixing import Moments, mixture
from ppl_gp.results.observing import (
    fn_at,
    log_density_per_datum,
    log_expectation,
    log_expectation_and_error,
    moments_shape,
    outcome_log_probs,
    site_moments,
)
from ppl_gp.results.several import (
    Effort,
    coupled_groups,
    entries_of,
    log_expectation_over,
    outcomes_over,
    outer_sites,
    quadratic_log_expectation,
)
from ppl_gp.tracing import run
from ppl_gp.wrappers import bare

NODES = {True: 192, False: 384}  # by "many draws": what a mixture averages away need not be resolved
MIN_DRAWS = 1000  # Monte Carlo draws in all
LATENT_DRAWS = 4000  # of latents, which are weighted

LAYER_NODES = 32  # of each of at least 1000 draws of the last layer's inputs
MANY = 30  # draws of the hyperparameters from which several functions at each are integrated with fewer nodes
SEVERAL_NODES = {True: 64, False: 192}


def _nodes(case: Case) -> int:
    return NODES[case.draws.num > 1]


def _effort(case: Case, num_draws: int) -> Effort:
    """For several functions at each draw of the hyperparameters."""
    many = case.draws.num >= MANY
    return Effort(SEVERAL_NODES[many], many, _repeats(case, num_draws))


def _repeats(case: Case, num_draws: int) -> int:
    """Draws of f, and of what lies below, a posterior draw."""
    return math.ceil(num_draws / case.draws.num)


def _marginals(case: Case, draw: Draws) -> Moments:
    """f at the new inputs of the one GP site."""
    return _all_marginals(case, draw)[case.site]  # pyright: ignore[reportArgumentType]


def _all_marginals(case: Case, draw: Draws) -> dict[str, Moments]:
    """f at the new inputs of every GP site, none of which depends on another."""
    new = case.trace(draw, {})
    return {k: c.marginals(unwrap(new[k]["fn"])) for k, c in case.conditionals(draw).items()}


def predictive(case: Case, integration: Integration, link_approximation: str | None):
    """({GP site: Moments}, {label: Moments or None}, {label: log p (K, ...)}, {label: standard error of the mean of y}).

    Mixed over draws. Errors are of labels whose y was averaged over draws of f or of what lies below it.
    """
    entries = entries_of(case) if integration is Integration.functions else {}
    drawn = tuple(k for k, v in entries.items() if v.functions is None)
    return _predictive(case, integration, link_approximation, tuple(entries.items()), drawn)


@eqx.filter_jit
def _predictive(case: Case, integration: Integration, link_approximation, entries, drawn):
    num = case.draws.effective * _repeats(case, MIN_DRAWS)
    if integration is Integration.quadrature:
        f, y, log_probs = case.mixture(lambda draw: _predict_by_quadrature(case, draw, link_approximation))
        between = {}
    elif integration is Integration.functions:

        def component(draw):
            f = _all_marginals(case, draw)
            effort = _effort(case, MIN_DRAWS)
            return f, *outcomes_over(case.layout.sites, dict(entries), lambda f: case.trace(draw, f), f, effort)

        f, y, log_probs = case.mixture(component)
        between = {}
        if drawn:
            given_draw = lambda trace, f: _with_mean(case, _predict_given_draw(case, trace, f))  # noqa: E731
            _, more, more_probs, between = _average(case, integration, given_draw, MIN_DRAWS)
            between = {k: between[k] for k in drawn if k in between}
            y |= {k: more[k] for k in drawn if k in more}
            log_probs |= {k: more_probs[k] for k in drawn if k in more_probs}
    elif integration is Integration.layers and case.site is not None:

        def given_below(trace, f):
            below = _below(case, trace)
            y, log_probs = _outcomes(case, lambda x: _trace_above(case, below, x), f[case.site], LAYER_NODES)
            return _with_mean(case, (f, y, log_probs))

        f, y, log_probs, between = _average(case, integration, given_below, MIN_DRAWS)
    else:
        f, y, log_probs, between = _average(
            case, integration, lambda trace, f: _with_mean(case, _predict_given_draw(case, trace, f)), MIN_DRAWS
        )
    missing = {site.label: None for site in case.layout.sites}
    moments = {
        s.label: _outcome_moments(s.support, log_probs[s.label]) for s in case.layout.sites if s.label in log_probs
    }
    errors = {k: jnp.sqrt(v.variance / num) for k, v in between.items()}
    return f, {**missing, **y, **moments}, log_probs, errors


def _with_mean(case: Case, predicted):
    """What was predicted from one draw, and the mean of y given it, whose variance over draws is the squared error of one."""
    f, y, log_probs = predicted
    supports = {s.label: s.support for s in case.layout.sites}
    means = {k: v.mean for k, v in y.items()} | {k: _outcome_moments(supports[k], v).mean for k, v in log_probs.items()}
    return f, y, log_probs, {k: Moments(m, jnp.zeros_like(m)) for k, m in means.items()}


def _predict_by_quadrature(case: Case, draw: Draws, link_approximation):
    f = _marginals(case, draw)
    y, log_probs = _outcomes(case, lambda x: case.trace(draw, {case.site: x}), f, _nodes(case), link_approximation)
    return {case.site: f}, y, log_probs


def _outcomes(case: Case, trace_at, f: Moments, num_nodes: int, link_approximation=None):
    """({label: Moments of y}, {label: log p (K, ...)}) for f_n with these moments."""
    y, log_probs = {}, {}
    for site in case.layout.sites:
        fn = fn_at(trace_at, site)
        if link_approximation is not None:
            log_probs[site.label] = mackay_log_probs(fn, f)
        elif site.support is not None:
            log_probs[site.label] = outcome_log_probs(site, fn, f, num_nodes)
        elif (moments := site_moments(site, fn, f, num_nodes)) is not None:
            y[site.label] = moments
    return y, log_probs


def _below(case: Case, trace) -> dict:
    """Everything of a run that the last layer and the likelihood are given: hyperparameters, latents, inner layers."""
    known = (*case.draws.hyper, *case.layout.local_latents, *case.layout.inner)
    return {k: trace[k]["value"] for k in known if k in trace}


def _trace_above(case: Case, below: dict, f, **observations) -> dict:
    """The model given what lies below the outer GP sites: f is their one function, or {site: values}."""
    values = f if isinstance(f, dict) else {case.site: f}
    return run(case.model, case.new_args, {**case.new_kwargs, **observations}, below, values)


def _predict_given_draw(case: Case, trace, f):
    y, log_probs = {}, {}
    for site in case.layout.sites:
        fn = bare(trace[site.name]["fn"])
        if site.support is not None:
            values = jnp.asarray(site.support).reshape((-1,) + (1,) * len(fn.batch_shape))
            log_probs[site.label] = fn.log_prob(jnp.broadcast_to(values, (values.size, *fn.batch_shape)))
        elif moments_shape(lambda _, fn=fn: fn, jnp.zeros(())) is not None:
            y[site.label] = Moments(*(jnp.broadcast_to(x, fn.shape()) for x in (fn.mean, fn.variance)))
    return f, y, log_probs


def _average(case: Case, integration: Integration, quantity, num_draws: int, finish=lambda x: x, **observations):
    """Mix quantity(trace, moments of f) over draws of f at the new inputs, several a posterior draw if those are few.

    `finish`: of what was mixed within one posterior draw.
    """
    joint = integration is Integration.joint_draws

    def component(draw, keys):
        conditionals = case.conditionals(draw)

        def given_f(key):
            return quantity(*drawn_trace(case, draw, conditionals, key, joint=joint, **observations))

        return finish(mixture(given_f, keys))

    return case.mixture(component, _keys(case, num_draws))


def _keys(case: Case, num_draws: int):
    return random.split(random.key(0), (case.draws.num, _repeats(case, num_draws)))


def _outcome_moments(support, log_probs) -> Moments:
    """Of an outcome as a number; the variance about the mean, with p(y = k) along the first axis."""
    p = jnp.exp(log_probs)
    values = jnp.asarray(support, p.dtype).reshape((-1,) + (1,) * (p.ndim - 1))
    mean = jnp.sum(p * values, 0)
    return Moments(mean, jnp.sum(p * (values - mean) ** 2, 0))


class LogDensity(NamedTuple):
    """log p(y*_n | x*_n, data), (M,), nats, and its estimated errors: of nodes, and of draws (standard errors)."""

    value: Float[Array, "M"]
    nodes: Float[Array, "M"]
    draws: Float[Array, "M"]


def log_density_at(
    case: Case, integration: Integration, observations: dict, num_draws: int | None, effective: float | None
) -> LogDensity:
    """The log density mixed over draws.

    `effective`: how many independent draws of the posterior the fit's are worth, if they are random ones; where they are not (one
    setting, or weighted points) only what is drawn within each counts as an error.
    """
    groups = groups_above(case, integration, observations)
    least = LATENT_DRAWS if case.layout.local_latents and integration is Integration.layers else MIN_DRAWS
    log_p, nodes, within, between = _log_density(case, integration, groups, observations, num_draws or least)
    square = within if effective is None else between / effective
    return LogDensity(log_p, nodes, jnp.sqrt(square))


def groups_above(case: Case, integration: Integration, observations: dict) -> tuple[tuple[int, ...], ...]:
    """Groups of outer functions that the likelihood couples; none where it is not proved that rows are apart, or for one function."""
    if integration is Integration.quadrature or integration is Integration.joint_draws or case.site is not None:
        return ()
    return coupled_groups(case, observations)


@eqx.filter_jit
def _log_density(case: Case, integration: Integration, groups, observations: dict, num_draws: int):
    if integration is Integration.quadrature:

        def by_quadrature(draw):
            def log_lik(f):
                return log_density_per_datum(case.trace(draw, {case.site: f}, **observations), case.layout)

            concave = is_concave(lambda f: case.trace(draw, {case.site: f}, **observations), None, case.layout.num)
            log_p, log_error = log_expectation_and_error(log_lik, _marginals(case, draw), _nodes(case), concave)
            return log_p, log_error, 2.0 * log_p

        first, log_error, second = case.mixture(by_quadrature)
        _, between = _squared_errors(case, first, second, second, 1)
        return first, jnp.exp(log_error), jnp.zeros_like(first), between
    if integration is Integration.functions:

        def over_functions(draw, key):
            def log_lik(f):
                return log_density_per_datum(case.trace(draw, f, **observations), case.layout)

            f, effort = _all_marginals(case, draw), _effort(case, num_draws)
            log_p, error = log_expectation_over(log_lik, f, groups, effort, key)
            return log_p, 2.0 * log_p + jnp.log1p(error), 2.0 * log_p

        sums, repeats = case.mixture(over_functions, random.split(random.key(0), case.draws.num)), 1
        return sums[0], jnp.zeros_like(sums[0]), *_squared_errors(case, *sums, repeats)
    if case.layout.local_latents and integration is Integration.layers:
        sums = _over_latents(case, groups, observations, num_draws)
    else:

        def weight(trace, f):
            log_p = log_density_per_datum(trace, case.layout)
            if integration is Integration.layers:
                log_p = log_lik_above(case, trace, f, observations, groups, random.key(1))
            return log_p, 2.0 * log_p

        sums = _average(case, integration, weight, num_draws, _with_square, **observations)
    return sums[0], jnp.zeros_like(sums[0]), *_squared_errors(case, *sums, _repeats(case, num_draws))


def _with_square(sums):
    """(log E[w], log E[w^2]) of one draw and the log of E[w] squared, whose mean over draws tells their variance."""
    return *sums, 2.0 * sums[0]


def _squared_errors(case: Case, first, second, square, repeats: int):
    """Squared relative errors of E[w]: (of what is drawn within a posterior draw, `repeats` times; the variance between draws).

    From log E[w], log E[w^2] and log of E[E[w | draw]^2], mixed over draws.
    """
    ratio, between = jnp.exp(second - 2.0 * first), jnp.exp(square - 2.0 * first)
    known = jnp.isfinite(first)
    within = jnp.maximum(ratio - between, 0.0) / (repeats * case.draws.effective)
    return jnp.where(known, within, jnp.inf), jnp.where(known, jnp.maximum(between - 1.0, 0.0), jnp.inf)


def _over_latents(case: Case, groups, observations: dict, num_draws: int):
    """(log E[w], log E[w^2], log E[E[w | draw]^2]) of importance weights over the latents of new data (`latent_proposals`)."""

    def log_lik(trace, f, key):
        return log_lik_above(case, trace, f, observations, groups, key)

    proposals = Proposals.fitted(case, observations, quick_log_lik(case, observations, groups), {}, random.key(2))

    def component(draw, entries):
        conditionals, base = case.conditionals(draw), proposals.base(case, draw)

        def one(entry):
            key, which = entry
            h, log_ratio = proposals.draw(case, draw, base, key, which)
            trace, f = drawn_trace(case, draw, conditionals, key, joint=False, latents=h, **observations)
            log_w = log_lik(trace, f, key) + log_ratio
            return log_w, 2.0 * log_w

        return _with_square(mixture(one, entries))

    keys = _keys(case, num_draws)
    which = jnp.arange(keys.size).reshape(keys.shape)
    return case.mixture(component, (keys, which))


def log_lik_above(case: Case, trace: dict, f: dict, observations: dict, groups, key):
    """log p(y*_n | what was drawn below the outer GP sites), (M,): these are integrated."""
    below = _below(case, trace)

    def log_lik(x):
        return log_density_per_datum(_trace_above(case, below, x, **observations), case.layout)

    if case.site is not None:
        return log_expectation(log_lik, f[case.site], LAYER_NODES)
    outer = {k: f[k] for k in outer_sites(case)}
    return log_expectation_over(log_lik, outer, groups, Effort(LAYER_NODES, True, LAYER_NODES), key)[0]


def quick_log_lik(case: Case, observations: dict, groups):
    """(trace, f, key) -> nearly log p(y*_n | what was drawn below), (M,), for fitting proposals.

    Several functions: log p is taken as quadratic about their means, which is exact for Gaussian noise, and costs two gradients.
    """
    if case.site is not None:
        return lambda trace, f, key: log_lik_above(case, trace, f, observations, groups, key)

    def log_lik(trace, f, key):
        below, outer = _below(case, trace), {k: f[k] for k in outer_sites(case)}
        return quadratic_log_expectation(
            lambda x: log_density_per_datum(_trace_above(case, below, x, **observations), case.layout), outer
        )

    return log_lik


def joint_draws(case: Case, key, num_samples: int):
    """({GP site: (num_samples, ...)}, {label: (num_samples, ...)}), in proportion to the draws' weights."""
    of_sample = case.draws.resampled(num_samples)
    chosen, which, counts = np.unique(of_sample, return_inverse=True, return_counts=True)
    # Of every posterior draw the first sample, then the second: a part of the samples is spread over the draws too.
    rank = np.empty_like(which)
    rank[np.argsort(which, kind="stable")] = np.arange(which.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return _joint_draws(case, key, jnp.asarray(chosen), (jnp.asarray(which), jnp.asarray(rank)), int(counts.max()))


@eqx.filter_jit
def _joint_draws(case: Case, key, chosen, place, each: int):
    """`each` samples of the draws `chosen`, of which those at `place` = (which draw, which sample) are kept."""

    def component(entry):
        draw, keys = entry
        conditionals = case.conditionals(draw)

        def one(key):
            trace, _ = drawn_trace(case, draw, conditionals, key, joint=True)
            f = {k: trace[k]["value"] for k in draw.kept}
            return f, {s.label: trace[s.name]["value"] for s in case.layout.sites}

        return jax.vmap(one)(keys)

    keys = random.split(key, (chosen.shape[0], each))
    f_and_y = lax.map(component, (case.draws.part(chosen), keys))
    return jax.tree.map(lambda x: x[place], f_and_y)
