"""A distribution as the arrays that it has, and the distribution again.

They are the attributes of the instance, and not the leaves of NumPyro's tree. Those are what its
class declares (`arg_constraints`, `pytree_data_fields`), and a user's class may declare nothing.
NumPyro also counts some arrays as static: the totals of a multinomial.
"""

import weakref
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions.transforms import Transform

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, unwrap
from ppl_gp.model.contents import attributes_of


class _Opened(NamedTuple):
    kind: type
    fields: dict[str, Any]


def opened(tree):
    """The tree with every distribution and transformation replaced by its attributes."""
    return jax.tree.map(_open, tree, is_leaf=lambda x: isinstance(x, dist.Distribution | Transform))


def _open(x):
    if not isinstance(x, dist.Distribution | Transform):
        return x
    own = {k: v for k, v in attributes_of(x).items() if not isinstance(v, weakref.ref)}
    try:
        return _Opened(type(x), opened(own))
    except (RecursionError, ValueError) as error:
        raise ModelError(
            f"{type(x).__name__}, a distribution of the model, has an attribute that is no tree of "
            "arrays: it holds itself, or is a dictionary whose keys cannot be sorted. Keep arrays "
            "as attributes, in lists, or in dictionaries with names as keys."
        ) from error


def _closed(tree):
    return jax.tree.map(_close, tree, is_leaf=lambda x: isinstance(x, _Opened))


def _close(x):
    if not isinstance(x, _Opened):
        return x
    made = object.__new__(x.kind)
    for name, value in _closed(x.fields).items():
        object.__setattr__(made, name, value)
    return made


class Bones(NamedTuple):
    """Distributions, and what else is in a tree, without their arrays."""

    structure: Any
    leaves: tuple  # `None`, which is no leaf of JAX's, in place of an array

    @classmethod
    def of(cls, tree) -> tuple[list, "Bones"]:
        """(arrays, the rest)."""
        leaves, structure = jax.tree.flatten(opened(tree))
        static = tuple(None if isinstance(x, jax.Array) else x for x in leaves)
        return arrays_of(tree), cls(structure, static)

    def with_arrays(self, arrays: list):
        """The tree again."""
        left = iter(arrays)
        leaves = [next(left) if x is None else x for x in self.leaves]
        return _closed(jax.tree.unflatten(self.structure, leaves))


def arrays_of(tree) -> list:
    """The arrays of all distributions in a tree, and of what else is in it."""
    return [x for x in jax.tree.leaves(opened(tree)) if isinstance(x, jax.Array)]


def own_kinds(fn) -> list[type]:
    """The user's classes that a distribution, which is not a GP, is of or is made of."""
    parts = [] if isinstance(unwrap(fn), GP) else jax.tree.leaves(opened(fn))
    foreign = lambda x: x.__module__.partition(".")[0] not in ("numpyro", "ppl_gp")  # noqa: E731
    return [x for x in parts if isinstance(x, type) and foreign(x)]


def own_density(fn, value):
    """What a user's class says of zeros in place of a value, () for another distribution; `None` if
    it raises, as it does for arrays that do not fit together (NumPyro's raise as they are made).
    """
    with suppress(Exception):
        return fn.log_prob(jnp.zeros(fn.shape(), jnp.result_type(value))) if own_kinds(fn) else ()
