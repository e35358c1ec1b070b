"""The linear predictors of a model: what its observed sites see of its Gaussian sites z.

Each Gaussian site is written as its mean plus an innovation e, so that a site whose mean is affine
in another (group effects about a level that is Gaussian too) is one more affine operation. What the
observed sites are computed from e through is the smallest cut of the jaxpr (`proofs.cut`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.primitives import Messenger

from ppl_gp.gp import GP
from ppl_gp.model.arguments import Leaves
from ppl_gp.model.tracing import is_observed, run
from ppl_gp.proofs.cut import Predictors, flat_shapes, predictors
from ppl_gp.wrappers import unwrap

_GAUSSIAN = (GP, dist.Normal, dist.MultivariateNormal)


class innovate(Messenger):
    """Gives every site of `values` its mean plus the innovation there."""

    def __init__(self, fn, values: Mapping[str, Any]):
        self.values = values
        super().__init__(fn)

    def process_message(self, msg):
        """Set the value."""
        if msg["type"] == "sample" and msg["name"] in self.values and msg["value"] is None:
            mean = jnp.broadcast_to(unwrap(msg["fn"]).mean, msg["fn"].shape())
            msg["value"] = mean + self.values[msg["name"]]


class Arguments(NamedTuple):
    """What stays when z moves: arrays."""

    arrays: dict[str, Any]
    hyper: dict[str, Any]


def gaussian_sites(trace: dict) -> dict[str, dict]:
    """{name: site} of unobserved sites whose distribution is Gaussian."""
    return {
        k: s
        for k, s in trace.items()
        if s["type"] == "sample" and not s["is_observed"] and isinstance(unwrap(s["fn"]), _GAUSSIAN)
    }


def read_predictors(
    model: Callable, args: tuple, kwargs: dict, hyper: dict, sites: tuple[str, ...]
) -> tuple[Predictors, list] | None:
    """The predictors of the sites `sites`, and the static part of the observed sites behind them;
    `None` where there is no cut. Abstract.
    """
    leaves, held = Leaves(model, args, kwargs), []

    def seen(e, rest: Arguments):
        given = leaves.replaced(rest.arrays)
        trace = run(innovate(model, e), *given, rest.hyper)
        observed = {k: {**s} for k, s in trace.items() if is_observed(s)}
        arrays, static = eqx.partition(
            {k: (s["fn"], s["scale"]) for k, s in observed.items()}, eqx.is_array
        )
        held.append((static, observed))
        return jax.tree.leaves(arrays)

    rows = model.reading.row_axes  # pyright: ignore[reportFunctionMemberAccess]
    more = _more(leaves, rows)
    shapes = []
    for extra in (0, more):
        arrays = {p: _longer(x, rows.get(p), extra) for p, x in leaves.arrays.items()}
        rest = Arguments(arrays, jax.tree.map(_shaped, hyper))
        e = _innovations(model, leaves, rest, sites)
        shapes.append((flat_shapes(seen, e, rest), e, rest))
    (short, e, rest), (long, _, _) = shapes
    if len(short) != len(long):
        return None
    found = predictors(seen, e, rest, lambda i: _grown(short[i], long[i]))
    return None if found is None else (found, held)


def _innovations(model, leaves: Leaves, rest: Arguments, sites) -> dict:
    """Shapes of the sites' values."""

    def values(rest):
        trace = run(model, *leaves.replaced(rest.arrays), rest.hyper)
        return {k: jnp.zeros(trace[k]["fn"].shape()) for k in sites}

    return jax.eval_shape(values, rest)


def _more(leaves: Leaves, rows: dict[str, int]) -> int:
    """Further rows such that their number is no other size."""
    num = next(x.shape[rows[p]] for p, x in leaves.arrays.items() if p in rows)
    taken = {n for x in leaves.arrays.values() for n in x.shape}
    return next(k for k in range(1, 1000) if num + k not in taken)


def _shaped(x):
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _longer(x, axis: int | None, more: int):
    shape = tuple(n + more * (i == axis) for i, n in enumerate(x.shape))
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype))


def _grown(short: tuple[int, ...], long: tuple[int, ...]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), None)
