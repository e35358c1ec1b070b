"""Gaussian sites that are left hyperparameters, as a datum would see more functions of them than
the GPs alone make (`model.integrable`), unless they are asked for by name.

Under `MAP` they become points. Where an unknown scale multiplies them that mode is far from the
posterior, as density favours a large scale of small effects: of group effects that two outcomes
share, one of them with a GP beside it, a scale of 0.28 became one of 0.78.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import ModelError, warn
from ppl_gp.model.arguments import Leaves
from ppl_gp.model.collapse import collapse
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.declared import Declared
from ppl_gp.model.predictor import Rest, innovations, shapes, traced
from ppl_gp.model.roles import roles
from ppl_gp.proofs.dependence import sources


def tell_of_more_functions(
    model: Declared, args, kwargs, trace: dict, left: list[str], method: str
) -> list[str]:
    """Raise `ModelError` where such sites of several values, `left` ones, are multiplied by an
    unknown hyperparameter; warn of others, and return them. Abstract traces, where there are any
    such sites.
    """
    many = tuple(k for k in left if np.size(trace[k]["value"]) > 1)
    if not many:
        return []
    asked = collapse(model, args, kwargs, only=many)
    if not isinstance(asked, Collapsed):
        return []
    named = (*roles(trace).gps, *(k for k in many if k in asked.plan.sites))
    found = [k for k in many if k in asked.plan.sites]
    for site in found:
        remedy = f"integrate={named!r} integrates it"
        if scales := sorted(_multiplying(asked, args, kwargs, trace, site)):
            raise ModelError(
                f"{method} would maximise site '{site}' together with {scales}, which multiply it, "
                f"far from their posterior: with '{site}' a datum sees more functions than there "
                f"are GPs, and such sites are integrated where they are named. {remedy}; or use "
                "hyper=Sample() or NUTS(), or hold them, hyper=Fixed({...})."
            )
        warn(
            f"{method} maximises '{site}' ({np.size(trace[site]['value'])} values) with the "
            "hyperparameters: with it a datum sees more functions than there are GPs. "
            f"{remedy}; integrate={tuple(roles(trace).gps)!r} says that it is to be maximised.",
        )
    return found


def _multiplying(asked: Collapsed, args, kwargs, trace: dict, site: str) -> frozenset[str]:
    """The hyperparameters that the coefficients of a site in the predictors are computed from."""
    arrays = Leaves(asked.source, args, kwargs).arrays
    hyper = {k: trace[k]["value"] for k in asked.plan.hyper}
    rest, sites = Rest(arrays, hyper), asked.plan.sites
    flat = traced(asked.source, asked.skeleton, sites, rest)
    e = {
        k: jnp.zeros(x.shape, x.dtype)
        for k, x in innovations(asked.source, asked.skeleton, shapes(rest), sites).items()
    }
    along = {k: jnp.ones_like(x) if k == site else jnp.zeros_like(x) for k, x in e.items()}

    def coefficients(hyper):
        here = Rest(arrays, hyper)
        return jax.jvp(lambda e: flat.eta(e, here), (e,), (along,))[1]

    return sources(coefficients, hyper) & frozenset(roles(trace).hyper)
