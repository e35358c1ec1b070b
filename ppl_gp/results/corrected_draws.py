"""Draws of a sparse q(f) with the weights that make them draws of the posterior: what leave-one-out
by them needs.
"""

from typing import cast

import jax.numpy as jnp
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.draws import Draws
from ppl_gp.kept import FromInducing
from ppl_gp.model.factors import JointLogLikelihood
from ppl_gp.quick import full_jit
from ppl_gp.results.record import Record, feeds_another, prior_at
from ppl_gp.sparse.inducing_draws import draws_with_inducing
from ppl_gp.sparse.process import SparseProcess

MAX_ROWS = 2000  # f is drawn jointly over them


def can_be_corrected(fit: Record, num_data: int) -> bool:
    """Whether p(f, y) / q(f) is known: one setting of the hyperparameters, one layer, and q(u) over
    inducing variables alone.
    """
    functions = max([kept.coupled for kept in fit.latent.values()], default=0)
    if (
        fit.sampled
        or fit.local
        or num_data * max(1, functions) > MAX_ROWS
        or (len(fit.latent) > 1 and feeds_another(fit))
    ):
        return False
    return all(isinstance(kept, FromInducing) for kept in fit.latent.values())


@full_jit
def corrected_draws(
    model, draws: Draws, num_data: int, args, kwargs, key, num: int
) -> tuple[dict, Float[Array, "S"], Float[Array, "S"]]:
    """({GP site: (S, *C, N)}, log p(y | f) (S,), log p(u) - log q(u) (S,)), S = `num`. O(N^3 + S
    N^2).
    """
    draw = draws.at(0)
    f, log_ratio = {}, jnp.zeros(num)
    for i, (site, kept) in enumerate(draw.kept.items()):
        prior = prior_at(model, site, draw.known, args, kwargs)
        f[site], ratio = draws_with_inducing(
            cast(SparseProcess, kept.process(prior)), prior, random.fold_in(key, i), num
        )
        log_ratio = log_ratio + ratio
    log_lik = JointLogLikelihood(model, num_data, draw.known, args, kwargs)
    return f, lax.map(lambda f: jnp.sum(log_lik(f)), f), log_ratio
