"""Looks at a likelihood of one or several functions: whether it is finite, and whether it is a sum
of terms of one function.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.deep.structure import Structure
from ppl_gp.errors import DataError
from ppl_gp.quick import quick_jit
from ppl_gp.reading.factors import JointLogLikelihood, LogLikelihood, require_equal_rows
from ppl_gp.reading.interactions import dependence
from ppl_gp.reading.tracing import reading_of
from ppl_gp.sparse.bound import Batch
from ppl_gp.sparse.expectation import flatten


def probe_finite(log_lik: JointLogLikelihood, shapes: dict) -> None:
    """Raise `DataError` where terms or their slopes are not finite at random values of f.
    `shapes`: {GP site: (*C, N)}. One jvp, O(N).
    """
    require_finite(_finite(log_lik, tuple(shapes.items()), random.key(7)), "", "random values of f")


@quick_jit
def _finite(log_lik: JointLogLikelihood, shapes: tuple, key):
    keys = random.split(key, 2)
    f = {k: random.normal(random.fold_in(keys[0], i), s) for i, (k, s) in enumerate(shapes)}
    ones = jax.tree.map(jnp.ones_like, f)
    slopes = jax.jvp(log_lik, (f,), (ones,))[1]
    return jnp.isfinite(log_lik(f) + log_lik.shared(f)) & ~jnp.isnan(slopes)


def is_additive(log_lik: Callable, shapes: dict) -> bool:
    """Whether log p(y_n | f_n) is proved a sum of terms that see one function each, whatever the
    data.
    """
    rows, rebuild = flatten({k: jnp.zeros(s) for k, s in shapes.items()})
    if len(rows) < 2:
        return False
    met = dependence(lambda rows: log_lik(rebuild(rows)), len(rows), rows).coupled
    return not np.any(met & ~np.eye(len(rows), dtype=bool))


_CAUSE = "look at what their distribution is computed from (of an exposure of zero: 0 log 0 = NaN)"


def listed(rows) -> str:
    """The first rows of a mask (N,) as text, and how many there are."""
    bad = np.flatnonzero(np.asarray(rows))
    return f"{bad[:5].tolist()}{f', ... ({len(bad)} rows)' if len(bad) > 5 else ''}"


def require_finite(rows, of: str, where: str, cause: str = _CAUSE) -> None:
    """Raise `DataError` if terms of the log-likelihood, or their slopes, are not finite."""
    if not np.all(rows):
        raise DataError(
            f"the log-likelihood of row(s) {listed(~np.asarray(rows))}{of}, or its slope, is not "
            f"finite at {where}: {cause}; leave such rows out."
        )


def probe(log_lik: LogLikelihood) -> None:
    """Require that a datum sees functions at its own row alone, and finite terms."""
    reading = reading_of(log_lik.joint.model)
    reading.require_pointwise("a local method", (log_lik.site,))
    functions = () if log_lik.functions == 1 else (log_lik.functions,)
    probe_finite(log_lik.joint, {log_lik.site: (*functions, log_lik.num)})


def probe_layers(model, structure: Structure, hyper: dict, trace: dict, batch: Batch) -> bool:
    """Require rows of layers and latents that see none but themselves, and finite terms. Returns
    whether the likelihood is additive over the outer functions (`is_additive`).
    """
    num, reading = batch.weights.shape[0], reading_of(model)
    for name in structure.outer:
        require_equal_rows([name], trace[name]["fn"].shape()[-1], num, reading.in_order)
    reading.require_pointwise("SVGP()", structure.gps)
    below = {k: trace[k]["value"] for k in (*structure.latents, *structure.inner)}
    below = {
        k: v
        + random.normal(random.fold_in(random.key(9), i), jnp.shape(v)) * (k in structure.inner)
        for i, (k, v) in enumerate(below.items())
    }
    log_lik = JointLogLikelihood(model, num, {**hyper, **below}, batch.args, batch.kwargs)
    outer = {k: tuple(trace[k]["fn"].shape()) for k in structure.outer}
    probe_finite(log_lik, outer)
    return is_additive(log_lik, outer)
