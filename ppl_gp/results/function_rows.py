"""What the rows of a linear predictor of several functions are: the order in which they were found
is none of the model's.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from ppl_gp.quick import quick_jit
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.predictor.parts import Loadings, Weighted
from ppl_gp.results.record import Record, prior_at

_ROWS = 1000  # of the training inputs, from which coefficients are read
_VARIES = "(..)"  # a factor that depends on the row or on hyperparameters


def function_rows(record: Record) -> tuple[str, ...] | None:
    """What each row r of the predictor eta (R, N) adds up, as ("f", "g - f") or ("f[1] + offset",
    ...): `None` where the model's sites are not integrated in one predictor, or it is one function.

    A GP has its factor, `f`, `-f`, or `(..) f` of others; of a GP in a plate `f[0]`, `f[1]`, ...;
    effects are named alone, and "offset" is what is added without a site. Read from at most 1000
    training rows, evenly spread, at the first draw; O(1000 R^2 U) for U unknowns.
    """
    model: Any = record.model
    if not isinstance(model, Collapsed) or model.plan.functions == 1:
        return None
    there = _loadings(model, record.draws.at(0), record.args, record.kwargs)
    terms = [(k, *_factors(k, part)) for k, part in there.parts.items()]
    offset = np.any(np.abs(there.offset) > 1e-12, 1)
    return tuple(_told(r, terms, bool(offset[r])) for r in range(model.plan.functions))


@quick_jit
def _loadings(model: Collapsed, draw, args, kwargs) -> Loadings:
    prior: Any = prior_at(model, model.plan.name, draw.known, args, kwargs)
    num = prior.X.shape[0]
    rows = np.unique(np.linspace(0, num - 1, min(num, _ROWS)).astype(int))
    return prior.kernel.at(prior.X[rows])


def _factors(site: str, part) -> tuple[list[str], np.ndarray]:
    """(names of the functions, their factors (R, P, n)) of a GP's units; of another site itself,
    1 where it is.
    """
    if isinstance(part, Weighted):
        units = part.weights.shape[1]
        names = [site] if units == 1 else [f"{site}[{p}]" for p in range(units)]
        return names, np.asarray(part.weights)
    seen = jnp.reshape(part.diag(), part.mean.shape)[:, None] > 0
    return [site], np.asarray(seen, float)


def _told(r: int, terms: list, offset: bool) -> str:
    found = [
        (_factor(w), name)
        for _, names, weights in terms
        for name, w in zip(names, weights[r], strict=True)
        if np.any(np.abs(w) > 1e-12)
    ]
    found = sorted(found, key=lambda x: x[0] == "-")  # "g - f"
    signed = [("-" if a == "-" else "+", name if a in "-" else f"{a} {name}") for a, name in found]
    signed += [("+", "offset")] * offset
    if not signed:
        return "0"
    (sign, first), *others = signed
    start = first if sign == "+" else f"-{first}"
    return functools.reduce(lambda s, x: f"{s} {x[0]} {x[1]}", others, start)


def _factor(weights: np.ndarray) -> str:
    """Of one function in all rows."""
    for told, value in (("", 1.0), ("-", -1.0)):
        if np.all(np.abs(weights - value) <= 1e-9):
            return told
    return _VARIES
