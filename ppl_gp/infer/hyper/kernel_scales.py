"""Which hyperparameters are periods and length scales, in which searches have several modes, and
where else searches may start.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.gp import unwrap
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.reading.roles import roles
from ppl_gp.reading.tracing import run

_REACH = 3  # powers of ten


def behind_kernels(model, args, kwargs, values: dict) -> tuple[list[str], list[str], list[str]]:
    """The names in `values` that kernels take (periods, length scales, length scales of several
    columns) from. Abstract.
    """

    def tuned(values):
        trace = run(model, args, kwargs, values)
        fns = [unwrap(trace[name]["fn"]) for name in roles(trace).gps]
        kernels = [p.kernel for fn in fns for p in _priors(fn)]
        parts = jax.tree.leaves(kernels, is_leaf=lambda k: hasattr(k, "lengthscale"))
        scales = [k.lengthscale for k in parts if hasattr(k, "lengthscale")]
        several = [x for x in scales if np.size(x) > 1]
        return [k.period for k in parts if hasattr(k, "period")], scales, several

    periods, scales, several = sources(tuned, values)
    return tuple(sorted(frozenset().union(*x)) for x in (periods, scales, several))


def other_scales(free: dict, model, args, kwargs, hyper: dict) -> Iterator[dict]:
    """Unconstrained points with other length scales than those of `free`, whose values are `hyper`:
    by powers of ten up to a thousandth and a thousand times those, and as far around the standard
    deviation of each column of the kernels' inputs.
    """
    scales = behind_kernels(model, args, kwargs, hyper)[1]
    middles = {0, *_powers_to_inputs(run(model, args, kwargs, hyper))} if scales else set()
    powers = {m + p for m in middles for p in range(-_REACH, _REACH + 1)} - {0}
    for power in sorted(powers):
        # unconstrained values are logarithms of positive ones
        step = power * jnp.log(10.0)
        yield {k: x + step if k in scales else x for k, x in free.items()}


def _powers_to_inputs(trace: dict) -> Iterator[int]:
    """Powers of ten, rounded, between length scales and standard deviations of their columns."""
    for name in roles(trace).gps:
        for prior in _priors(unwrap(trace[name]["fn"])):
            spread = np.std(np.asarray(prior.X).reshape(len(prior.X), -1), 0)
            for k in jax.tree.leaves(prior.kernel, is_leaf=lambda k: hasattr(k, "lengthscale")):
                scale = np.ravel(getattr(k, "lengthscale", ()))
                own = spread[list(getattr(k, "active_dims", None) or range(len(spread)))]
                # a periodic kernel's is a pure number; a user's may be of other inputs
                if not hasattr(k, "period") and scale.size in (1, len(own)):
                    ratio = own / scale
                    yield from np.round(np.log10(ratio[ratio > 0])).astype(int).tolist()


def _priors(fn: Any) -> list:
    whole = isinstance(fn, PredictorGP)
    return list(fn.kernel.model.priors(fn.kernel, fn.X).values()) if whole else [fn]
