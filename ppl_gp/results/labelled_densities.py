"""Log densities of the training data whose labels are summed, at draws of what stands in no row:

    log p(y_n | theta) = log sum_k p(z_n = k | theta) p(y_n | z_n = k, theta).

Leaving a datum out leaves its label out as well: given labels that were drawn with the datum, no
weights of the draws could.
"""

import jax.numpy as jnp
from jax import lax

from ppl_gp.draws import Draws
from ppl_gp.model.roles import roles
from ppl_gp.quick import full_jit
from ppl_gp.results.integrals.enumerated import combinations, summed_log_density
from ppl_gp.results.query.layout import Layout
from ppl_gp.results.query.query import Case
from ppl_gp.results.record import Record


def densities_without_labels(fit: Record, sites: dict, draws: dict, num: int):
    """(log p(y_n | theta) (S, N), draws without labels) at `draws`, {site: (S, ...)}, nats; `None`
    where a row has no labels, or they cannot be summed (a continuous latent, rows that see
    others'). S K runs of the model for K combinations of labels.
    """
    labels = tuple(k for k in roles(sites).local_latents if k in draws)
    if not labels or fit.latent:
        return None
    theta = {k: x for k, x in draws.items() if k not in labels}
    case = Case(
        fit.model,
        Layout((), labels, num),
        Draws.equal(theta, {}),
        None,
        fit.args,
        fit.kwargs,
        fit.args,
        fit.kwargs,
        {},
    )
    every = combinations(case, {})
    if every is None:
        return None
    return _summed(case, jnp.asarray(every)), theta


@full_jit
def _summed(case: Case, labels):
    return lax.map(lambda draw: summed_log_density(case, draw, {}, labels), case.draws)
