"""Whether the likelihood is a sum of terms that see one function each, for all data and not for the
first batch alone.
"""

import equinox as eqx
import jax.numpy as jnp
from jax import random

from ppl_gp.deep.structure import Structure
from ppl_gp.gp import unwrap
from ppl_gp.infer.batches import as_batch
from ppl_gp.infer.probes.joint import is_additive
from ppl_gp.infer.sources import ArraySource
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.model.factors import JointLogLikelihood
from ppl_gp.model.roles import is_factor, is_observed, log_prob_per_datum
from ppl_gp.sparse.bound import Batch

_COUNTS = (0, 1, 2)  # observations at which mixtures of discrete likelihoods change their form
_DRAWS = 3


class _OtherValues(eqx.Module):
    """A likelihood with other observations in place of the model's own."""

    joint: JointLogLikelihood
    values: dict

    def __call__(self, latent: dict):
        trace, num = self.joint.trace(latent), self.joint.num
        sites = [
            {**s, "value": self.values.get(k, s["value"])}
            for k, s in trace.items()
            if is_observed(s)
        ]
        terms = [log_prob_per_datum(s, num) for s in sites]
        return sum([t for t in terms if t.ndim], jnp.zeros(num))


def additive_throughout(
    source: ArraySource | StreamSource,
    model,
    structure: Structure,
    given: dict,
    trace: dict,
    batch: Batch,
) -> bool:
    """Whether what `is_additive` found on the first batch holds for all: a zero-inflated count is
    additive where y > 0 alone.

    Arrays are looked at as a whole, O(N log F). Of a stream's later batches the first one stands
    for all but the observations, which are drawn from the model and, discrete ones, put at 0, 1 and
    2; with a `numpyro.factor` nothing is known of them.
    """
    shapes = {k: tuple(trace[k]["fn"].shape()) for k in structure.outer}
    num = batch.weights.shape[0]
    if isinstance(source, StreamSource):
        joint = JointLogLikelihood(model, num, given, batch.args, batch.kwargs)
        observed = {k: s for k, s in trace.items() if is_observed(s)}
        if any(is_factor(s) for s in observed.values()):
            return False
        try:
            return all(
                is_additive(_OtherValues(joint, values), shapes) for values in _others(observed)
            )
        except NotImplementedError:  # a distribution that cannot be drawn from
            return False
    sweep = (as_batch(rows, batch.key) for rows in source.sweep(num))
    return source.whole or all(
        is_additive(JointLogLikelihood(model, num, {**given, **b.given}, b.args, b.kwargs), shapes)
        for b in sweep
    )


def _others(observed: dict):
    for i in range(_DRAWS):
        yield {
            k: s["fn"].sample(random.fold_in(random.key(i), j))
            for j, (k, s) in enumerate(observed.items())
        }
    discrete = {
        k: s
        for k, s in observed.items()
        if unwrap(s["fn"]).support.is_discrete and not s["fn"].event_shape
    }
    for count in _COUNTS if discrete else ():
        yield {k: _where_possible(s, count) for k, s in discrete.items()}


def _where_possible(site, count: int):
    value = jnp.asarray(site["value"])
    wanted = jnp.full_like(value, count)
    return jnp.where(unwrap(site["fn"]).support(wanted), wanted, value)
