"""What a factor of mean field is: an exponential family over one site, or over a few together.

q(z) is proportional to exp(eta . t(z)). A log density that is affine in t(z) has the mean

    E_q[g(z)] = sum_p w_p g(z_p)   for nodes with   sum_p w_p = 1,  sum_p w_p t(z_p) = E_q[t(z)],

exactly, so that a model's own functions are integrated by calling them. The nodes here have weights
that are the same for every element of a plate, so that all elements move together; of discrete
sites the categories are the nodes, and the probabilities their weights. Differentiating that mean
by the coordinates of q gives the message: the coefficients of t (Winn & Bishop 2005, eq. 23).
"""

import math
from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array

from ppl_gp.quick import quick_jit

Values = dict[str, Array]


class Nodes(NamedTuple):
    """`values`: {site: (P, ...)}. `weights`: (P,), or (P, batch) of discrete sites."""

    values: Values
    weights: Array


class Family(eqx.Module):
    """q of one block of mean field. `batch`: the shape of its independent elements."""

    sites: eqx.AbstractVar[tuple[str, ...]]
    batch: eqx.AbstractVar[tuple[int, ...]]

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self).__name__

    @abstractmethod
    def coordinates(self) -> Any:
        """Moments that determine q, a tree of arrays."""

    @abstractmethod
    def nodes(self, coordinates) -> Nodes:
        """Nodes of q with these coordinates, differentiable in them."""

    @abstractmethod
    def natural(self, coordinates, gradient) -> "Family":
        """The q of natural parameters dE[log p] / dE[t], from the gradient by the coordinates: the
        maximum of the bound over this block.
        """

    @abstractmethod
    def entropy(self) -> Array:
        """H[q], nats, of all elements."""

    @abstractmethod
    def distributions(self) -> dict[str, dist.Distribution]:
        """{site: its marginal under q}, of the site's own shape."""

    def eta(self) -> Any:
        """An affine function of q's natural parameters that determines them, a tree of arrays: the
        fields themselves, where they are one.
        """
        return tuple(jax.tree.leaves(self))

    def at_eta(self, eta) -> "Family":
        """The q of the same sites with this `eta`."""
        return jax.tree.unflatten(jax.tree.structure(self), eta)

    def log_prob(self, values: Values) -> Array:
        """log q at the sites' values, nats, all elements together. Of a family of several sites, or
        of matrices: its own.
        """
        ((site, q),) = self.distributions().items()
        return jnp.sum(q.log_prob(values[site]))

    @abstractmethod
    def draw(self, key, num: int) -> Values:
        """{site: (num, ...)}."""

    @abstractmethod
    def free(self, key, spread) -> Array:
        """Values somewhere in the support, far apart, as unconstrained coordinates (E, d), one row
        an element.
        """

    @abstractmethod
    def at(self, free) -> Values:
        """{site: value} of unconstrained coordinates."""

    @abstractmethod
    def statistics(self, row) -> Array:
        """t of one element at unconstrained coordinates (d,)."""

    def expectations(self, coordinates) -> Array | None:
        """E[t] of each element, (E, T), in the order of `statistics`; `None` where a family has no
        closed form of them, and terms are summed over nodes.
        """
        return None

    def random_values(self, key, spread=1.0) -> Values:
        """Values far apart, anywhere in the support."""
        return self.at(self.free(key, spread))


@quick_jit
def moments(q: Family) -> Array | None:
    """E[t] of each element, (E, T), where there is a closed form."""
    return q.expectations(q.coordinates())


def blend(old: Family, new: Family, rate) -> Family:
    """(1 - rate) eta_old + rate eta_new: a natural-gradient step (Hoffman et al. 2013, eq. 26)."""
    mixed = jax.tree.map(lambda a, b: (1.0 - rate) * a + rate * b, old.eta(), new.eta())
    return old.at_eta(mixed)


def symmetric(x: Array) -> Array:
    """The symmetric part of matrices."""
    return 0.5 * (x + jnp.swapaxes(x, -1, -2))


def lower(A: Array) -> Array:
    """The lower triangles of matrices, row by row, as the last axis."""
    i, j = jnp.tril_indices(A.shape[-1])
    return A[..., i, j]


def by_element(batch: tuple[int, ...], *parts: Array) -> Array:
    """(E, T) of parts (*batch, T_i), one after another."""
    num = math.prod(batch)
    return jnp.concatenate([x.reshape(num, -1) for x in parts], 1)
