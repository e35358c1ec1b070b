"""Whether the density of an observed site takes observations of the dtype that they have."""

import equinox as eqx
import jax
import jax.numpy as jnp

from ppl_gp.errors import DataError
from ppl_gp.gp import unwrap
from ppl_gp.model.arguments import Leaves
from ppl_gp.model.roles import is_factor

_OTHER = {"integers": int, "floats": float}


def require_dtype(name: str, site: dict, given: Leaves | str) -> None:
    """Raise `DataError` where log p of an observed site, or its gradient, exists for observations
    of another dtype alone: class labels that are floats, proportions that are integers.

    `given`: the arguments, one of which may be the observations, or how these are called. Abstract
    traces alone.
    """
    fn, value = site["fn"], site["value"]
    dtype = jnp.asarray(value).dtype
    why = None if is_factor(site) else _refusal(fn, jnp.shape(value), dtype)
    kind = "floats" if jnp.issubdtype(dtype, jnp.integer) else "integers"
    if not isinstance(why, TypeError) or _refusal(fn, jnp.shape(value), _OTHER[kind]) is not None:
        return  # the dtype is not at fault
    path = given if isinstance(given, str) else given.path_of(value) or "values"
    raise DataError(
        f"site '{name}' observes {path} of dtype {dtype}, and the density of "
        f"{type(unwrap(fn)).__name__} takes {kind}; convert: "
        f"{path}.astype({_OTHER[kind].__name__})."
    ) from why


def _refusal(fn, shape: tuple, dtype) -> Exception | None:
    """What log p raises at observations of this dtype, differentiated in its parameters."""
    leaves, structure = jax.tree.flatten(fn)
    moving = {i: x for i, x in enumerate(leaves) if eqx.is_inexact_array(x)}

    def total(parameters, value):
        entries = [parameters.get(i, x) for i, x in enumerate(leaves)]
        return jnp.sum(jax.tree.unflatten(structure, entries).log_prob(value))

    try:
        value = jax.ShapeDtypeStruct(shape, jnp.zeros((), dtype).dtype)
        jax.eval_shape(jax.grad(total), moving, value)
    except Exception as error:  # noqa: BLE001 - a user's own distribution may raise anything
        return error
    return None
