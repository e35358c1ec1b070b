"""Gaussian sites of several values that the observations see and that no linear predictor holds, as
they are bent on the way: (u**2)[g], exp(u)[g] as a group's standard deviation.

Under `MAP` they become points. That is what a hyperparameter is, and it is told, as the mode of D
values is not their posterior; where an unknown scale multiplies them it is far from it (of
relu(tau u)[g] with four groups, tau became 1.18, and .62 with u integrated).
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import ModelError
from ppl_gp.model.roles import roles
from ppl_gp.proofs.dependence import sources

_STEP = 0.3  # of a scale: far more than rounding, and a positive value stays positive


def tell_of_bent_effects(seen, trace: dict, sites: list[str], method: str) -> None:
    """Raise `ModelError` for such sites that an unknown scale multiplies; warn of others.

    `seen`: (values of some latents) -> what the scored observations are computed from, with the
    others at those of the trace. Cost: four evaluations of the model for each hyperparameter.
    """
    for site in sites:
        remedy = (
            "No linear predictor holds it, so that it cannot be integrated: use NUTS(), or a local "
            "method with hyper=Sample(), or hold it, hyper=Fixed({...})"
        )
        if scales := _scales(seen, trace, site):
            raise ModelError(
                f"{method} would maximise site '{site}' together with {scales}, which multiply it, "
                f"far from their posterior. {remedy}; or say which sites to integrate, "
                "integrate=(...), to have it maximised."
            )
        warnings.warn(
            f"{method} maximises '{site}' ({np.size(trace[site]['value'])} values) with the "
            f"hyperparameters: a point, and no posterior. {remedy}.",
            stacklevel=3,
        )


def _scales(seen, trace: dict, site: str) -> list[str]:
    """The hyperparameters that act on what is seen through this site alone: moving them moves
    nothing where it is zero, and something where it is one.
    """
    value = {k: trace[k]["value"] for k in roles(trace).hyper}
    zero, one = {site: jnp.zeros_like(value[site])}, {site: jnp.ones_like(value[site])}
    others = [
        k for k in value if k != site and jnp.issubdtype(jnp.asarray(value[k]).dtype, jnp.floating)
    ]
    flow = sources(lambda moved: seen({site: value[site], **moved}), {k: value[k] for k in others})
    acting = frozenset().union(*jax.tree.leaves(flow, is_leaf=lambda x: isinstance(x, frozenset)))
    with jax.ensure_compile_time_eval():
        moved = {k: {k: _moved(value[k])} for k in sorted(acting.intersection(others))}
        return [
            k
            for k, new in moved.items()
            if _same(seen(zero), seen({**zero, **new}))
            and not _same(seen(one), seen({**one, **new}))
        ]


def _moved(x):
    return x + _STEP * (1.0 + jnp.abs(x))


def _same(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(bool(jnp.all(x == y)) for x, y in pairs)
