"""Log densities of the training data: each datum left out by its cavity, and at draws of f."""

from jax import lax, random

from ppl_gp.draws import Draws
from ppl_gp.kept import FromFunctions
from ppl_gp.model.concave import is_concave
from ppl_gp.model.factors import read
from ppl_gp.model.tracing import run
from ppl_gp.quick import full_jit
from ppl_gp.results.cavities import cavity, cavity_of_functions
from ppl_gp.results.integrals.averages import NODES, SEVERAL_NODES
from ppl_gp.results.integrals.likelihood import log_density_per_datum, log_expectation
from ppl_gp.results.integrals.several import Effort, log_expectation_over
from ppl_gp.results.query.layout import Layout
from ppl_gp.results.query.mixture import Moments

DRAWS = 1000  # of q(f), for the weights of an SVGP


@full_jit
def cavity_log_densities(model, site: str, draws: Draws, args, kwargs, scaled: bool):
    """(log p(y_n | y_-n), log p(y_n | y), log E[p(y_n | f_n)^w_n | y_-n]) at each draw of the
    hyperparameters, (S, N) each; w_n of `scale` handlers, all 1 unless `scaled`.
    """
    num = draws.kept[site].mean.shape[-1]
    plan, num_nodes = Layout((), (), num), NODES[draws.num > 1]

    def one(draw):
        hyper, latent = draw.known, draw.kept[site]
        factors = read(model, *args, hyper=hyper, **kwargs)
        prior = factors.prior
        if isinstance(latent, FromFunctions):
            return _of_functions(factors, latent, plan, draws.num, scaled)
        concave = is_concave(lambda f: run(model, args, kwargs, hyper, {site: f}), None, num)

        def score(moments, weighed=False):
            def log_lik(f):
                trace = run(model, args, kwargs, hyper, {site: f})
                return log_density_per_datum(trace, plan, weighed)

            return log_expectation(log_lik, moments, num_nodes, concave)

        without = cavity(prior, latent)
        left_out, kept = score(without), score(Moments(latent.mean, latent.variance))
        return left_out, kept, score(without, True) if scaled else left_out

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
