"""How the functions of a predictor are coupled: by their prior, and by a softmax of them. Both are
proofs, read off jaxprs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.extend.core import Literal

from ppl_gp.gp import GP
from ppl_gp.model.predictor import Rest, innovations, traced, traced_at
from ppl_gp.model.skeleton import Skeleton
from ppl_gp.proofs.meeting import dependence
from ppl_gp.wrappers import unwrap

# moves of entries: what comes out is what went in, elsewhere
_MOVES = {"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "copy_p"}


def are_independent(
    model: Callable, bones: Skeleton, sites: tuple[str, ...], axes: dict, rest: Rest
) -> bool:
    """Whether each function is made of GPs at the data's inputs, and of units that no other
    function sees.
    """
    whole = traced(model, bones, sites, rest)
    e = innovations(model, bones, rest, sites)
    trace = jax.eval_shape(lambda rest: _kinds(model, bones, e, rest, sites), rest)
    if len(trace) < len(sites) or any(axes[k] is None for k in sites):
        return False
    if any(e[k].shape[-1] != bones.num_rows(rest.arrays) for k in sites):
        return False
    rows = {k: int(np.prod(e[k].shape[:-1])) for k in sites}
    flat = np.zeros((sum(rows.values()), bones.num_rows(rest.arrays)))

    def eta(flat):
        parts, at = {}, 0
        for k, num in rows.items():
            parts[k] = jnp.reshape(flat[at : at + num], e[k].shape)
            at += num
        zero = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), rest)
        return [whole.eta(parts, zero)]

    (on,) = dependence(eta, len(flat), flat).on  # (F, R, n)
    return bool(np.all(np.sum(np.any(on, -1), 1) <= 1))


def _kinds(model, bones, e, rest, sites):
    """An array for each of the sites that is a GP."""
    zero = {k: np.zeros(x.shape, x.dtype) for k, x in e.items()}
    trace = traced_at(model, bones, zero, rest)
    return {k: jnp.zeros(()) for k in sites if isinstance(unwrap(trace[k]["fn"]), GP)}


def softmax_of(model: Callable, bones: Skeleton, sites: tuple[str, ...], rest: Rest) -> tuple:
    """(r_1, ..., r_C): score c of the only observed site, a categorical one, is function r_c; ()
    where that is not how the functions enter.
    """
    whole, found = traced(model, bones, sites, rest), []
    num = bones.num_rows(rest.arrays)
    functions = sum(int(np.prod(s)) for s in whole.predictors.shapes) // num

    def scores(eta, rest):
        parts = whole.observed(eta, rest)
        fns: list[Any] = [unwrap(part.fn) for part in parts.values()]
        categorical = [fn for fn in fns if type(fn) is dist.CategoricalLogits]
        alone = len(fns) == len(categorical) == 1
        found.append(alone and jnp.shape(categorical[0].logits) == (num, functions))
        return categorical[0].logits if found[-1] else eta

    shape = jax.ShapeDtypeStruct((functions, num), jnp.result_type(float))
    closed = jax.make_jaxpr(scores)(shape, rest)
    if functions < 2 or not found[-1]:
        return ()
    places = _moved(closed.jaxpr, np.arange(functions * num).reshape(functions, num))
    if places is None or places.shape != (num, functions):
        return ()
    order = places[0] // num
    expected = order[None, :] * num + np.arange(num)[:, None]
    return tuple(order.tolist()) if np.array_equal(places, expected) else ()


def _moved(jaxpr, entries: np.ndarray) -> np.ndarray | None:
    """Where the entries of the first input end in the only output, if they are only moved."""
    (last,), made = jaxpr.outvars, {v: e for e in jaxpr.eqns for v in e.outvars}
    steps = []
    while last is not jaxpr.invars[0]:
        if isinstance(last, Literal) or last not in made:
            return None
        equation = made[last]
        if equation.primitive.name not in _MOVES or len(equation.invars) != 1:
            return None
        steps.append(equation)
        last = equation.invars[0]
    with jax.ensure_compile_time_eval():
        for equation in reversed(steps):
            entries = equation.primitive.bind(jnp.asarray(entries), **equation.params)
    return np.asarray(entries)
