"""Log densities of the training data: each datum left out by its cavity, and at draws of f."""

from typing import Any

import jax.numpy as jnp
from jax import lax, random

from ppl_gp.draws import Draws
from ppl_gp.kept import FromFunctions, FromInducing
from ppl_gp.model.concave import is_concave
from ppl_gp.model.factors import read
from ppl_gp.model.tracing import run
from ppl_gp.quick import full_jit
from ppl_gp.results.cavities import cavity, cavity_of_functions, cavity_of_inducing
from ppl_gp.results.integrals.averages import NODES, SEVERAL_NODES
from ppl_gp.results.integrals.likelihood import log_density_per_datum, log_expectation
from ppl_gp.results.integrals.several import Effort, log_expectation_over
from ppl_gp.results.query.layout import Layout
from ppl_gp.results.query.mixture import Moments
from ppl_gp.results.record import prior_at

DRAWS = 1000  # of q(f), for the weights of an SVGP


@full_jit
def cavity_log_densities(model, site: str, draws: Draws, args, kwargs, scaled: bool, num: int):
    """(log p(y_n | y_-n), log p(y_n | y), log E[p(y_n | f_n)^w_n | y_-n]) at each draw of the
    hyperparameters, (S, N) each; w_n of `scale` handlers, all 1 unless `scaled`; and how far a
    sparse q is from its fixed point, (S,).
    """
    plan, num_nodes = Layout((), (), num), NODES[draws.num > 1]

    def one(draw):
        hyper, latent, off = draw.known, draw.kept[site], jnp.zeros(())
        sparse = isinstance(latent, FromInducing)
        factors: Any = None if sparse else read(model, *args, hyper=hyper, **kwargs)
        if isinstance(latent, FromFunctions):
            return *_of_functions(factors, latent, plan, draws.num, scaled), off
        concave = is_concave(lambda f: run(model, args, kwargs, hyper, {site: f}), None, num)

        def log_lik(f, weighed=False):
            trace = run(model, args, kwargs, hyper, {site: f})
            return log_density_per_datum(trace, plan, weighed)

        def score(moments, weighed=False):
            proper = jnp.isfinite(moments.variance)  # else one row's NaN is every row's
            at = Moments(*(jnp.where(proper, x, 1.0) for x in (moments.mean, moments.variance)))
            found = log_expectation(lambda f: log_lik(f, weighed), at, num_nodes, concave)
            return jnp.where(proper, found, jnp.nan)

        if sparse:
            weighed = lambda f: log_lik(f, True)  # noqa: E731
            prior = prior_at(model, site, hyper, args, kwargs)
            within, without, off = cavity_of_inducing(prior, latent, weighed)
        else:
            within = Moments(latent.mean, latent.variance)
            without = cavity(factors.prior, latent)
        left_out, kept = score(without), score(within)
        return left_out, kept, score(without, True) if scaled else left_out, off

    return lax.map(one, draws)


def _of_functions(factors, latent: FromFunctions, plan: Layout, num_draws: int, scaled: bool):
    """As `cavity_log_densities`, where a datum sees several functions: by cubature, or by weighted
    draws above three.
    """
    log_lik, site, (R, _) = factors.log_lik, factors.log_lik.site, latent.mean.shape
    effort = Effort(SEVERAL_NODES[num_draws > 1], num_draws > 1, DRAWS)

    def score(moments, weighed=False):
        def log_p(f):
            return log_density_per_datum(log_lik.trace(f[site]), plan, weighed)

        together = (tuple(range(R)),)
        return log_expectation_over(log_p, {site: moments}, together, effort, random.key(4))[0]

    without, within = cavity_of_functions(factors.prior, latent)
    left_out, kept = score(without), score(within)
    return left_out, kept, score(without, True) if scaled else left_out


@full_jit
def draw_log_densities(model, hyper, f, args, kwargs, num: int):
    """log p(y_n | f, hyperparameters) at each draw, over all observed sites of a datum, and the
    same times `scale` handlers, as it is part of the posterior; (S, N) each.
    """
    plan = Layout((), (), num)

    def one(draw):
        trace = run(model, args, kwargs, *draw)
        return log_density_per_datum(trace, plan), log_density_per_datum(trace, plan, True)

    return lax.map(one, (hyper, f))
