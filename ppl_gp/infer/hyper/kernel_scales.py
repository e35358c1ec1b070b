"""Which hyperparameters are periods and length scales, in which searches have several modes, and
where else searches may start.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.gp import unwrap
from ppl_gp.model.predictor_prior import PredictorGP
from ppl_gp.model.roles import roles
from ppl_gp.model.tracing import run
from ppl_gp.proofs.dependence import sources

_POWERS = (-3, -2, -1, 1, 2, 3)  # of ten


def behind_kernels(model, args, kwargs, values: dict) -> tuple[list[str], list[str], list[str]]:
    """The names in `values` that kernels take (periods, length scales, length scales of several
    columns) from. Abstract.
    """

    def tuned(values):
        trace = run(model, args, kwargs, values)
        kernels = [k for name in roles(trace).gps for k in _kernels(unwrap(trace[name]["fn"]))]
        parts = jax.tree.leaves(kernels, is_leaf=lambda k: hasattr(k, "lengthscale"))
        scales = [k.lengthscale for k in parts if hasattr(k, "lengthscale")]
        several = [x for x in scales if np.size(x) > 1]
        return [k.period for k in parts if hasattr(k, "period")], scales, several

    periods, scales, several = sources(tuned, values)
    return tuple(sorted(frozenset().union(*x)) for x in (periods, scales, several))


def other_scales(free: dict, scales: list[str]) -> Iterator[dict]:
    """Unconstrained points with length scales of a thousandth to a thousand times those of `free`,
    by powers of ten.
    """
    for power in _POWERS if scales else ():
        # unconstrained values are logarithms of positive ones
        step = power * jnp.log(10.0)
        yield {k: x + step if k in scales else x for k, x in free.items()}


def _kernels(fn: Any) -> list:
    whole = isinstance(fn, PredictorGP)
    priors = fn.kernel.model.priors(fn.kernel, fn.X).values() if whole else [fn]
    return [p.kernel for p in priors]
