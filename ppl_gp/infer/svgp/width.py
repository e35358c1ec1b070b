"""How wide q(u) starts: as the prior, where the likelihood can be integrated under that."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.gp import GP
from ppl_gp.infer.svgp.problem import Plan
from ppl_gp.infer.svgp.start import priors_of
from ppl_gp.model.factors import JointLogLikelihood
from ppl_gp.quick import quick_jit
from ppl_gp.sparse.bound import Batch, Variational
from ppl_gp.sparse.expectation import expected_log_lik
from ppl_gp.sparse.families import Family
from ppl_gp.sparse.own_effects import all_apart, averaged
from ppl_gp.sparse.several import num_values, prior_moments

# Standard deviations, in those of the prior. Where f is certain at the prior mean the next step is
# that of Newton's method there.
WIDTHS = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3)


def started(
    plan: Plan, trace: dict, hyper: dict, variational: Variational, batch: Batch
) -> Variational:
    """q(u) as wide as the best of `WIDTHS` on a first batch; as the prior unless another gains more
    than a nat a datum. O(B), the likelihood at six times its nodes. Of layers and latents as it is.

    Under q(u) = p(u) a prior of standard deviation 8 gives E[exp(f)] = 1e14: a first step from
    there, of q(u) or of a hyperparameter, is no step at all.
    """
    if not plan.structure.is_shallow:
        return variational
    priors, shapes = priors_of(trace, variational.q)
    num = sum(num_values(priors[k], s, variational.variables[k].num) for k, s in shapes.items())
    given = {**hyper, **batch.given}
    return variational._replace(q=_narrowed(plan, given, priors, shapes, num, variational.q, batch))


@quick_jit
def _narrowed(
    plan: Plan, given: dict, priors: dict[str, GP], shapes: dict, num: int, q: dict, batch: Batch
) -> dict[str, Family]:
    widths, weights = jnp.asarray(WIDTHS), batch.weights
    joint = JointLogLikelihood(plan.model, batch.num, given, batch.args, batch.kwargs)
    priors, own = all_apart(priors)
    log_lik = averaged(joint, own)
    moments = {k: prior_moments(p, shapes[k]) for k, p in priors.items()}
    mean, variance = ({k: x[i] for k, x in moments.items()} for i in (0, 1))

    def expected(width) -> Float[Array, ""]:
        narrow = jax.tree.map(lambda v: width**2 * v, variance)
        terms = expected_log_lik(log_lik, mean, narrow, plan.expectation, batch.key)
        return jnp.sum(jnp.where(weights > 0, weights * terms, 0.0))

    # KL[N(0, s^2) || N(0, 1)] of every whitened variable
    bounds = lax.map(expected, widths) - num * (0.5 * (widths**2 - 1.0) - jnp.log(widths))
    bounds = jnp.where(jnp.isfinite(bounds), bounds, -jnp.inf)
    best = jnp.argmax(bounds)
    width = jnp.where(bounds[best] - bounds[0] > jnp.sum(weights), widths[best], 1.0)
    return {k: one.narrowed(width) for k, one in q.items()}
