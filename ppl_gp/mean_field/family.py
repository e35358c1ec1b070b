"""What a factor of mean field is: an exponential family over one site, or over a few together.

q(z) is proportional to exp(eta . t(z)). A log density that is affine in t(z) has the mean

    E_q[g(z)] = sum_p w_p g(z_p)   for nodes with   sum_p w_p = 1,  sum_p w_p t(z_p) = E_q[t(z)],

exactly, so that a model's own functions are integrated by calling them. The nodes here have weights
that are the same for every element of a plate, so that all elements move together; of discrete
sites the categories are the nodes, and the probabilities their weights. Differentiating that mean
by the coordinates of q gives the message: the coefficients of t (Winn & Bishop 2005, eq. 23).

A mean or a variance of what is computed from z is affine in other statistics than a log density: of
a gamma w, 1 / w is the variance of N(0, 1 / w), and w and w^2 make that of a Poisson. These have
nodes of their own, `Rule`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array

from ppl_gp.mean_field.affinity import affine_in

Values = dict[str, Array]


class Nodes(NamedTuple):
    """`values`: {site: (P, ...)}. `weights`: (P,), or (P, batch) of discrete sites."""

    values: Values
    weights: Array

    @classmethod
    def equal(cls, values: Values) -> "Nodes":
        """Nodes of equal weights."""
        first = next(iter(values.values()))
        return cls(values, jnp.full(len(first), 1.0 / len(first), first.dtype))


class Rule(eqx.Module):
    """Statistics s of one element of q, `of(q, row)` at unconstrained coordinates (d,), and nodes
    with their means E[s], `by(q)`: E_q[g(z)] = sum_p w_p g(z_p) for g affine in s, which has to be
    proved of g (`Family.is_affine`).
    """

    q: "Family"
    of: Callable[..., Array] = eqx.field(static=True)
    by: Callable[..., Nodes] = eqx.field(static=True)

    def statistics(self, row) -> Array:
        """s of one element."""
        return self.of(self.q, row)

    def nodes(self) -> Nodes:
        """Nodes with the E[s] of q."""
        return self.by(self.q)


class Family(eqx.Module):
    """q of one block of mean field. `batch`: the shape of its independent elements."""

    is_discrete: ClassVar[bool] = False

    sites: tuple[str, ...] = eqx.field(static=True)
    batch: tuple[int, ...] = eqx.field(static=True)

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

    def own_nodes(self) -> Nodes:
        """Those of this q."""
        return self.nodes(self.coordinates())

    @abstractmethod
    def natural(self, coordinates, gradient) -> "Family":
        """The q of natural parameters dE[log p] / dE[t], from the gradient by the coordinates: the
        maximum of the bound over this block.
        """

    @abstractmethod
    def distributions(self) -> dict[str, dist.Distribution]:
        """{site: its marginal under q}, of the site's own shape."""

    def entropy(self) -> Array:
        """H[q], nats, of all elements: that of the one site's distribution."""
        (q,) = self.distributions().values()
        return jnp.sum(q.entropy())

    def eta(self) -> Any:
        """Affine in q's natural parameters and determines them, a tree: the fields if they are."""
        return tuple(jax.tree.leaves(self))

    def at_eta(self, eta) -> "Family":
        """The q of the same sites with this `eta`."""
        return jax.tree.unflatten(jax.tree.structure(self), eta)

    def log_prob(self, values: Values) -> Array:
        """log q at the sites' values, nats, of all elements; by the one site's distribution."""
        ((site, q),) = self.distributions().items()
        return jnp.sum(q.log_prob(values[site]))

    def draw(self, key, num: int) -> Values:
        """{site: (num, ...)}: of the one site's distribution."""
        ((site, q),) = self.distributions().items()
        return {site: jnp.asarray(q.sample(key, (num,)))}

    @abstractmethod
    def free(self, key, spread) -> Array:
        """Values far apart in the support, unconstrained coordinates (E, d), a row per element."""

    @abstractmethod
    def at(self, free) -> Values:
        """{site: value} of unconstrained coordinates."""

    @abstractmethod
    def statistics(self, row) -> Array:
        """t of one element at unconstrained coordinates (d,)."""

    def expectations(self, coordinates) -> Array | None:
        """E[t] of each element, (E, T), in the order of `statistics`; `None`: no closed form."""
        return None

    def random_values(self, key) -> Values:
        """Values far apart, anywhere in the support."""
        return self.at(self.free(key, 1.0))

    def is_affine(self, function: Callable, statistics_of: Callable, key) -> Array:
        """(terms,): whether function(values), (terms,), is affine in statistics of q's sites."""
        return affine_in(function, self, statistics_of, key)

    def moment_rules(self) -> tuple[Rule, ...]:
        """Rules for means and variances that exist, to be tried in turn. Not under `jit`."""
        return ()

    def lacks_variances(self) -> bool:
        """Whether E[1 / w], or E[W^-1], of a precision is infinite. Not under `jit`."""
        return False


def blend(old: Family, new: Family, rate) -> Family:
    """(1 - rate) eta_old + rate eta_new: a natural-gradient step (Hoffman et al. 2013, eq. 26)."""
    return old.at_eta(jax.tree.map(lambda a, b: (1.0 - rate) * a + rate * b, old.eta(), new.eta()))


def symmetric(x: Array) -> Array:
    """The symmetric part of matrices."""
    return 0.5 * (x + jnp.swapaxes(x, -1, -2))


def lower(A: Array) -> Array:
    """The lower triangles of matrices, row by row, as the last axis."""
    i, j = jnp.tril_indices(A.shape[-1])
    return A[..., i, j]


def by_element(batch: tuple[int, ...], *parts: Array) -> Array:
    """(E, T) of parts (*batch, T_i), one after another."""
    return jnp.concatenate([x.reshape(math.prod(batch), -1) for x in parts], 1)
