"""Where a proof of affinity ends although nothing is curved: the first operation of a function that
is not on the list of `proofs.affine`, and whose outputs look affine.

A look is no proof, and nothing is built on it: it tells a caller whose proof has failed that the
failure is likely the list's, and where.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ppl_gp.proofs.affine import Dependence
from ppl_gp.proofs.cut import at_places, dependences, evaluated, needed

_SCALES = (0.1, 1.0, 10.0, 100.0)  # a clip far out is curved
_TOLERANCE = 1e-6


def unproved(function: Callable, x) -> str | None:
    """The name of that operation of function(x), a tree of arrays; `None` where there is none.

    One trace, and a dozen evaluations of what leads to operations that are not known.
    """
    closed = at_places(lambda z, rest: function(z), x, (), ()).closed
    jaxpr = closed.jaxpr
    (source,), how = jaxpr.invars, dependences(jaxpr, 1)
    for equation in needed(jaxpr, [source, *jaxpr.constvars], jaxpr.outvars):
        into = [how.get(v, 0) for v in equation.invars if not isinstance(v, Literal)]
        out = [v for v in equation.outvars if how.get(v, 0) is Dependence.unknown]
        known = 0 < max(into, default=0) < Dependence.unknown
        if known and out and _looks_affine(closed, source, out, x):
            return equation.primitive.name
    return None


def _looks_affine(closed, source, out, x) -> bool:
    """Whether all are numbers that change with x, and along lines at every scale as lines do."""
    if not all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in out):
        return False
    rng = np.random.default_rng(0)
    for scale in _SCALES:
        start, step = (scale * rng.normal(size=np.shape(x)) for _ in range(2))
        points = [jnp.asarray(start + t * step, source.aval.dtype) for t in (0.0, 1.0, 2.0)]
        a, b, c = (_flat(evaluated(closed, {source: z}, out)) for z in points)
        if not np.all(np.abs(a - 2.0 * b + c) <= _TOLERANCE * np.max(np.abs([a, b, c]))):
            return False
        if not np.any(np.abs(c - a) > _TOLERANCE * np.max(np.abs(c))):
            return False
    return True


def _flat(arrays) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(v)) for v in arrays])
