"""The ELBO of a model at given hyperparameters, on one page.

  sum_n w_n E log (1/K) sum_k exp(E_q(f)[log p(y_n | f_n, h_n^k)]) p(h_n^k) / q(h_n^k)
  - sum over GP sites of KL[q(u) || p(u)]
  + log p of observations that belong to no datum,      w_n = N / B,

for K copies h_n^k ~ q(h_n) of every datum's latents (`deep.importance`). The log is taken for each
datum, the global KL stands outside it, w_n outside the mean. At K = 1 the first line is
  sum_n w_n (E[log p(y_n | f_n, h_n)] - KL[q(h_n) || p(h_n)]),
and without latents and layers sum_n w_n E_q(f)[log p(y_n | f_n)] (Hensman, Fusi & Lawrence 2013;
Hensman, Matthews & Ghahramani 2015, eq. 19).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax, random

from ppl_gp.deep.importance import Sampling
from ppl_gp.deep.layers import Copies, Moments
from ppl_gp.deep.structure import Structure
from ppl_gp.reading.factors import shared_log_prob
from ppl_gp.reading.roles import plate_scale
from ppl_gp.sparse.bound import (
    Batch,
    Terms,
    Variational,
    at_batch,
    kl_weights,
    weighted_kl,
)
from ppl_gp.sparse.expectation import Expectation, expected_log_lik
from ppl_gp.sparse.families import Nudge


def terms(
    model: Callable,
    expectation: Expectation,
    sampling: Sampling,
    structure: Structure,
    hyper: dict,
    variational: Variational,
    batch: Batch,
    nudge: dict[str, Nudge] | None = None,
) -> Terms:
    """The bound's terms, nats. O(M^3 + M^2 B) a GP site (see `projection.explained`), times
    num_paths K where its inputs differ; K^3 B a drawn layer; the quadrature of the likelihood.
    """
    at, counts = at_batch(model, hyper, variational, batch, nudge), batch.weights
    if structure.is_shallow:
        per_datum = expected_log_lik(at.log_lik, *at.marginals(), expectation, batch.key)
    else:
        known = {k: Moments(*at.processes[k].marginals(at.priors[k])) for k in structure.given}
        copies = Copies(at, expectation, sampling, structure, variational.latents, known)
        keys = random.split(at.batch.key, sampling.num_paths)
        # log (1/K) sum_k w_nk, averaged over paths
        per_datum = jnp.mean(lax.map(copies.log_mean_weight, keys), 0)
        counts = counts * plate_scale(at.trace)  # which no log of a mean holds
    # A padded row repeats another one; `where` keeps what a mask leaves out from turning 0 x inf
    # into NaN.
    expected = jnp.sum(jnp.where(batch.weights > 0, counts * per_datum, 0.0))
    weights = kl_weights(at.trace, at.priors, sampling.beta)
    kl = weighted_kl(at.q, weights)
    return Terms(expected, kl, shared_log_prob(at.trace), at.q, weights)
