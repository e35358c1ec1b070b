"""How y is integrated over f at new inputs, chosen from the model's structure and, for draws of f,
by a probe.
"""

from enum import Enum

import jax
import jax.numpy as jnp
from jax import lax, random

from ppl_gp.model.per_datum import log_prob_per_datum, without_wrappers
from ppl_gp.quick import quick_jit
from ppl_gp.results.query.query import Case
from ppl_gp.sparse.expectation import flatten


class Integration(Enum):
    """The ways."""

    given = "a draw decides y's distribution: the model has no function"
    quadrature = "one f_n decides y_n"
    functions = "several functions decide y_n, row by row, all of them Gaussian given a draw"
    layers = "as one of these, at inputs that are drawn: latents, or layers below"
    joint_draws = "rows of y depend on several rows of f"


def plan_integration(case: Case) -> Integration:
    """The cheapest way that is right for this model."""
    pointwise = all(site.axis is not None for site in case.layout.sites)
    if not case.draws.kept and pointwise:
        return Integration.layers if case.layout.local_latents else Integration.given
    pointwise = pointwise and (case.is_approximation or bool(_is_pointwise(case)))
    if not pointwise:
        return Integration.joint_draws
    if case.layout.local_latents or case.layout.inner:
        return Integration.layers
    return Integration.functions if case.site is None else Integration.quadrature


@quick_jit
def _is_pointwise(case: Case):
    """Whether row n of y sees only row n of each function: J v = (J 1) * v for a random v, one
    function at a time.
    """
    first = case.draws.at(0)
    num, names = case.layout.num, [site.name for site in case.layout.sites]
    declared = case.trace(first, {})
    f = {k: random.normal(random.key(3), declared[k]["fn"].shape()) for k in first.kept}
    if any(x.shape[-1] != num for x in f.values()):
        return jnp.zeros((), bool)
    y = case.trace(first, f)

    def log_lik(f):
        trace = case.trace(first, f)
        sites = [
            {**without_wrappers(trace[k]), "scale": None, "value": y[k]["value"]} for k in names
        ]
        return sum([log_prob_per_datum(site, num) for site in sites], jnp.zeros(num))

    flat, rebuild = flatten(f)
    v, ones = random.normal(random.key(4), (num,)), jnp.ones(num)

    def function_is_pointwise(one):
        along, rows = (
            jax.jvp(lambda x: log_lik(rebuild(x)), (flat,), (one[:, None] * d,))[1]
            for d in (v, ones)
        )
        tolerance = 1e3 * jnp.finfo(flat.dtype).eps * (1.0 + jnp.abs(along) + jnp.abs(rows * v))
        return jnp.all(jnp.abs(along - rows * v) <= tolerance)

    return jnp.all(lax.map(function_is_pointwise, jnp.eye(flat.shape[0], dtype=flat.dtype)))
