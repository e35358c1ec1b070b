"""What a run of `SVGP` raises: the ELBO of a batch and the log prior of the hyperparameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.deep.bound import terms
from ppl_gp.infer.hyper.space import Space, log_prior
from ppl_gp.infer.svgp.problem import Problem
from ppl_gp.sparse.bound import Batch, Terms, Variational
from ppl_gp.sparse.families import Nudge


def objective(
    problem: Problem,
    free: dict,
    variational: Variational,
    batch: Batch,
    nudge: dict[str, Nudge] | None = None,
) -> tuple[Float[Array, ""], Terms]:
    """(the objective, nats; the bound's terms) on a batch of B of N data:

      sum_n (N / B) E[log p(y_n | f_n, h_n)]      expected log likelihood, f ~ q(f), h_n ~ q(h_n)
    - sum_n (N / B) KL[q(h_n) || p(h_n)]          latents; both lines are one log-mean-exp over K
                                                  copies where num_importance = K > 1
    - sum over GP sites of KL[q(u) || p(u)]
    + log p(observations that belong to no datum)
    + log p(hyperparameters)                      - log q of them where a guide draws them

    Every KL times `beta`. `deep.bound.terms` has all lines but the last; `nudge`: zeros whose
    gradient is the natural one.
    """
    hyper, log_p = hyper_at(problem, free, batch)
    t = terms_at(problem, hyper, variational, batch, nudge)
    return t.bound + log_p, t


def terms_at(
    problem: Problem,
    hyper: dict,
    variational: Variational,
    batch: Batch,
    nudge: dict[str, Nudge] | None = None,
) -> Terms:
    """The terms of the bound on a batch, at hyperparameters."""
    plan, sampling = problem.plan, problem.plan.sampling._replace(beta=problem.rates.beta)
    whole = variational._replace(latents=eqx.combine(variational.latents, problem.frozen))
    return terms(plan.model, plan.expectation, sampling, plan.structure, hyper, whole, batch, nudge)


def hyper_at(problem: Problem, free, batch: Batch):
    """(hyperparameters, log prior - log q of them)."""
    plan = problem.plan
    if plan.guide is None:
        given = {**problem.fixed, **batch.given}
        where = Space(plan.model, tuple(plan.names), batch.args, batch.kwargs, given)
        hyper = {**problem.fixed, **where.constrain(free)}
        extra = jnp.zeros(())
    else:
        hyper, log_q = plan.guide.draw(
            free, jax.random.fold_in(batch.key, 1), batch.args, batch.kwargs
        )
        hyper, extra = {**problem.fixed, **hyper}, -log_q
    return hyper, log_prior(plan.model, batch.args, batch.kwargs, {**hyper, **batch.given}) + extra
