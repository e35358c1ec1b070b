"""Compiled prediction: quadrature where one f_n decides y_n, Monte Carlo over joint draws where it does not."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax, random

from ppl_gp.gp import unwrap
from ppl_gp.results.case import Case, drawn_trace
from ppl_gp.results.integration import Integration
from ppl_gp.results.link import mackay_log_probs
from ppl_gp.results.mixing import Moments, mixture
from ppl_gp.results.observing import (
    fn_at,
    log_density_per_datum,
    log_expectation,
    moments_shape,
    outcome_log_probs,
    site_moments,
)
from ppl_gp.tracing import run
from ppl_gp.wrappers import bare

NODES = {True: 192, False: 384}  # by "many draws": what a mixture averages away need not be resolved
_MIN_DRAWS = 1000  # Monte Carlo draws in all


LAYER_NODES = 32  # of each of at least 1000 draws of the last layer's inputs


def _nodes(case: Case) -> int:
    return NODES[case.num_draws > 1]


def _marginals(case: Case, hyper, latents) -> Moments:
    """f at the new inputs of the one GP site."""
    new = unwrap(case.trace(hyper, {})[case.site]["fn"])
    return case.conditionals(hyper, latents)[case.site].marginals(new)  # pyright: ignore[reportArgumentType]


@eqx.filter_jit
def predictive(case: Case, integration: Integration, link_approximation: str | None):
    """({GP site: Moments}, {label: Moments or None}, {label: log p (K, ...)}), mixed over draws."""
    if integration is Integration.quadrature:
        f, y, log_probs = mixture(lambda draw: _predict_by_quadrature(case, *draw, link_approximation), case.draws)
    elif integration is Integration.layers:

        def given_below(trace, f):
            below = _below(case, trace)
            y, log_probs = _outcomes(case, lambda x: _trace_above(case, below, x), f[case.site], LAYER_NODES)
            return f, y, log_probs

        f, y, log_probs = _average(case, integration, given_below)
    else:
        f, y, log_probs = _average(case, integration, lambda trace, f: _predict_given_draw(case, trace, f))
    missing = {site.label: None for site in case.layout.sites}
    moments = {
        s.label: _outcome_moments(s.support, log_probs[s.label]) for s in case.layout.sites if s.label in log_probs
    }
    return f, {**missing, **y, **moments}, log_probs


def _predict_by_quadrature(case: Case, hyper, latents, link_approximation):
    f = _marginals(case, hyper, latents)
    y, log_probs = _outcomes(case, lambda x: case.trace(hyper, {case.site: x}), f, _nodes(case), link_approximation)
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
    known = (*case.draws[0], *case.layout.local_latents, *case.layout.inner)
    return {k: trace[k]["value"] for k in known if k in trace}


def _trace_above(case: Case, below: dict, f, **observations) -> dict:
    return run(case.model, case.new_args, {**case.new_kwargs, **observations}, below, {case.site: f})


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


def _average(case: Case, integration: Integration, quantity, **observations):
    """Mix quantity(trace, moments of f) over draws of f at the new inputs, several a posterior draw if those are few."""
    repeats = math.ceil(_MIN_DRAWS / case.num_draws)
    keys = random.split(random.key(0), (case.num_draws, repeats))
    joint = integration is Integration.joint_draws

    def component(draw):
        (hyper, latents), keys = draw
        conditionals = case.conditionals(hyper, latents)

        def given_f(key):
            return quantity(*drawn_trace(case, hyper, conditionals, key, joint=joint, **observations))

        return mixture(given_f, keys)

    return mixture(component, (case.draws, keys))


def _outcome_moments(support, log_probs) -> Moments:
    """Of an outcome as a number; the variance about the mean, with p(y = k) along the first axis."""
    p = jnp.exp(log_probs)
    values = jnp.asarray(support, p.dtype).reshape((-1,) + (1,) * (p.ndim - 1))
    mean = jnp.sum(p * values, 0)
    return Moments(mean, jnp.sum(p * (values - mean) ** 2, 0))


@eqx.filter_jit
def log_density_at(case: Case, integration: Integration, observations: dict):
    """log p(y*_n | x*_n, data), (M,), mixed over draws."""

    def by_quadrature(draw):
        hyper, latents = draw

        def log_lik(f):
            return log_density_per_datum(case.trace(hyper, {case.site: f}, **observations), case.layout)

        return log_expectation(log_lik, _marginals(case, hyper, latents), _nodes(case))

    if integration is Integration.quadrature:
        return mixture(by_quadrature, case.draws)

    return _average(case, integration, lambda trace, f: log_lik_above(case, trace, f, observations), **observations)


def log_lik_above(case: Case, trace: dict, f: dict, observations: dict):
    """log p(y*_n | what was drawn below), (M,): the last layer integrated where it is one function, else as it was drawn."""
    if not case.is_approximation or case.site is None:
        return log_density_per_datum(trace, case.layout)
    below = _below(case, trace)

    def log_lik(x):
        return log_density_per_datum(_trace_above(case, below, x, **observations), case.layout)

    return log_expectation(log_lik, f[case.site], LAYER_NODES)


@eqx.filter_jit
def joint_draws(case: Case, key, num_samples: int):
    """({GP site: (num_samples, ...)}, {label: (num_samples, ...)})."""
    used = min(case.num_draws, num_samples)
    chosen = (jnp.arange(used) * case.num_draws) // used
    draws = jax.tree.map(lambda x: x[chosen], case.draws)
    keys = random.split(key, (used, math.ceil(num_samples / used)))

    def component(draw):
        (hyper, latents), keys = draw
        conditionals = case.conditionals(hyper, latents)

        def one(key):
            trace, _ = drawn_trace(case, hyper, conditionals, key, joint=True)
            f = {k: trace[k]["value"] for k in latents}
            return f, {s.label: trace[s.name]["value"] for s in case.layout.sites}

        return jax.vmap(one)(keys)

    f_and_y = lax.map(component, (draws, keys))
    # Of every posterior draw the first sample, then the second: cutting to num_samples leaves them spread.
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape((-1, *x.shape[2:]))[:num_samples], f_and_y)
