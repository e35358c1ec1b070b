"""Which form K under a pseudo-likelihood is factored in: by class where one is known, decided while
tracing.
"""

from collections.abc import Callable
from typing import Any

from jax import lax

from ppl_gp.local.factor import Factor, low_rank, positive, signed
from ppl_gp.local.natural import MinusRankOne, Positive, PseudoLikelihood
from ppl_gp.local.softmax import SoftmaxFactor
from ppl_gp.numerics.blocks import as_blocks, is_positive
from ppl_gp.numerics.independent import Independent
from ppl_gp.numerics.low_rank import Covariance, LowRank


def asked(K: Covariance, sites: PseudoLikelihood, ask: Callable[[Factor], Any]) -> Any:
    """ask(factor), of the form that K and the signs of nat2 allow: by class where they are known,
    else both are compiled.
    """
    if isinstance(sites, MinusRankOne):
        if isinstance(K, Independent):
            return ask(SoftmaxFactor.of(K, sites.nat2))
        sites = Positive(sites.nat1, as_blocks(sites.nat2))
    if isinstance(K, LowRank):
        if K.rest is None:
            return ask(low_rank(K, sites.nat2))
        return asked(K.rest, sites, lambda alone: ask(low_rank(K, sites.nat2, alone)))
    if isinstance(K, Independent):
        K = K.dense()
    if isinstance(sites, Positive):
        return ask(positive(K, sites.nat2))
    forms = [lambda: ask(positive(K, sites.nat2)), lambda: ask(signed(K, sites.nat2))]
    return lax.cond(is_positive(sites.nat2), *forms)
