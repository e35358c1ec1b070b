"""Looks at a likelihood of one or several functions: whether it is finite, and whether it is a sum
of terms of one function.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from ppl_gp.deep.structure import Structure
from ppl_gp.errors import DataError
from ppl_gp.quick import quick_jit
from ppl_gp.reading.factors import JointLogLikelihood, LogLikelihood, require_equal_rows
from ppl_gp.reading.tracing import reading_of
from ppl_gp.sparse.bound import Batch
from ppl_gp.sparse.expectation import flatten

ROUNDINGS = 1e3  # roundings within which numbers count as equal


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
    """Whether log p(y_n | f_n) is a sum of terms that see one function each: no curvature between
    functions. O(log F) jvps.
    """
    if sum(math.prod(s[:-1]) for s in shapes.values()) < 2:
        return False
    outside, all_of_it = _curvature_outside(log_lik, tuple(shapes.items()), random.key(12))
    return bool(jnp.all(outside <= ROUNDINGS * jnp.finfo(all_of_it.dtype).eps * (1.0 + all_of_it)))


@quick_jit
def _curvature_outside(log_lik: Callable, shapes: tuple, key):
    """The largest second derivative between functions of different sets, and of all."""
    f = {k: random.normal(random.fold_in(key, i), s) for i, (k, s) in enumerate(shapes)}
    rows, rebuild = flatten(f)
    slope = jax.grad(lambda rows: jnp.sum(log_lik(rebuild(rows))))

    def between(bit):
        inside = ((jnp.arange(len(rows)) >> bit) & 1).astype(rows.dtype)[:, None]
        along = jax.jvp(slope, (rows,), (inside * random.normal(random.key(11), rows.shape),))[1]
        return jnp.max(jnp.abs((1.0 - inside) * along)), jnp.max(jnp.abs(along))

    # Any two functions differ in one bit of their numbers.
    return lax.map(between, jnp.arange(max(1, (len(rows) - 1).bit_length())))


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
    require_equal_rows([log_lik.site], log_lik.num, log_lik.joint.num)
    reading_of(log_lik.joint.model).require_pointwise("a local method", (log_lik.site,))
    functions = () if log_lik.functions == 1 else (log_lik.functions,)
    probe_finite(log_lik.joint, {log_lik.site: (*functions, log_lik.num)})


def probe_layers(model, structure: Structure, hyper: dict, trace: dict, batch: Batch) -> bool:
    """Require rows of layers and latents that see none but themselves, and finite terms. Returns
    whether the likelihood is additive over the outer functions (`is_additive`).
    """
    num = batch.weights.shape[0]
    for name in structure.outer:
        require_equal_rows([name], trace[name]["fn"].shape()[-1], num)
    reading_of(model).require_pointwise("SVGP()", structure.gps)
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
