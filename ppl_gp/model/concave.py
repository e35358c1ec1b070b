"""Proof that a likelihood is log-concave and smooth in f: its family, and a parameter that is
affine in f or c exp(affine).

Then every integral has one mode, and no scan for others is compiled. The proof is read off the
jaxpr while tracing; whatever is not on the list takes the general way.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpyro.distributions as dist

from ppl_gp.model.roles import is_factor, is_observed
from ppl_gp.observations import BernoulliProbit
from ppl_gp.proofs.affine import Dependence, dependence
from ppl_gp.wrappers import unwrap

# {family: ({parameter that may see f: how}, other parameters, which may not)}.
_FAMILIES = {
    dist.BernoulliLogits: ({"logits": Dependence.affine}, ()),
    dist.BinomialLogits: ({"logits": Dependence.affine}, ("total_count",)),
    BernoulliProbit: ({"f": Dependence.affine}, ()),
    dist.CategoricalLogits: ({"logits": Dependence.affine}, ()),
    dist.MultinomialLogits: ({"logits": Dependence.affine}, ("total_count",)),
    dist.Normal: ({"loc": Dependence.affine}, ("scale",)),
    dist.Poisson: ({"rate": Dependence.exponential}, ()),
    dist.NegativeBinomial2: ({"mean": Dependence.exponential}, ("concentration",)),
}


def is_concave(trace_at: Callable, sites: tuple[str, ...] | None, num: int) -> bool:
    """Whether the terms of `sites` (`None`: of all that is observed) in `trace_at(f)`, f (num,),
    are log-concave and smooth in f.

    Decided while tracing; nothing is computed. Cost: two abstract traces.
    """
    zero = jnp.zeros((num,))
    found = trace_at(zero)
    names = [k for k, s in found.items() if is_observed(s)] if sites is None else list(sites)
    if any(is_factor(found[k]) or type(unwrap(found[k]["fn"])) not in _FAMILIES for k in names):
        return False
    wanted = [(k, *_FAMILIES[type(unwrap(found[k]["fn"]))]) for k in names]

    def parameters(f):
        trace = {k: unwrap(s["fn"]) for k, s in trace_at(f).items() if k in names}
        return [[getattr(trace[k], p) for p in (*seeing, *others)] for k, seeing, others in wanted]

    allowed = [
        how
        for _, seeing, others in wanted
        for how in (*seeing.values(), *[Dependence.constant] * len(others))
    ]
    ways = dependence(lambda f: [jnp.asarray(x) for x in sum(parameters(f), [])], zero)
    return all(
        way is how or way is Dependence.constant for way, how in zip(ways, allowed, strict=True)
    )
