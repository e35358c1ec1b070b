"""Nodes for means and variances of what is computed from a block: exact for more statistics than a
log density has.

A density's logarithm is affine in t(z) of its family, of a gamma (w, log w). A mean or a variance
is affine in others: 1 / w is the variance of N(0, 1 / w), w and w^2 make that of a Poisson. A rule
is a set of statistics s with nodes whose weighted sums are E[s],

    E_q[g(z)] = sum_p w_p g(z_p)   for g affine in s,

which has to be proved of g (`conjugacy.affine_in`). All elements of a plate move together, so nodes
have weights that all of them share.
"""

from abc import abstractmethod
from functools import singledispatch

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from ppl_gp.mean_field.discrete import Dirichlet
from ppl_gp.mean_field.family import Family, Nodes
from ppl_gp.mean_field.gaussian import Gaussian
from ppl_gp.mean_field.paired import NormalGamma, NormalWishart
from ppl_gp.mean_field.positive import Gamma, Wishart, from_triangle
from ppl_gp.numerics.roots import inverse


class Rule(eqx.Module):
    """Statistics of one element, at unconstrained coordinates (d,), and nodes of q for them."""

    q: eqx.AbstractVar[Family]

    @abstractmethod
    def statistics(self, row) -> Array:
        """s of one element."""

    @abstractmethod
    def nodes(self) -> Nodes:
        """Nodes with the E[s] of q."""


@singledispatch
def moment_rules(q: Family) -> tuple[Rule, ...]:
    """The rules of a family, to be tried in turn; none where the moments do not exist, or for a
    family of the user's own. Reads values: not under `jit`.
    """
    return ()


def _shared(values) -> Nodes:
    """Nodes of equal weights."""
    num = len(next(iter(values.values())))
    return Nodes(values, jnp.full(num, 1.0 / num))


def _two(gap: Array) -> tuple[Array, Array]:
    """(1 - s, 1 + s), whose mean is 1, and that of whose reciprocals 1 / (1 - s^2) = 1 / gap."""
    s = jnp.sqrt(1.0 - gap)
    return gap / (1.0 + s), 1.0 + s


class Squares(Rule):
    """(z, z z') of Gaussian values: the family's own nodes."""

    q: Gaussian

    def statistics(self, row):
        """The family's own."""
        return self.q.statistics(row)

    def nodes(self):
        """2 D."""
        return self.q.nodes(self.q.coordinates())


@moment_rules.register
def _(q: Gaussian):
    """Elements apart, and all values together."""
    together = bool(q.batch) and len(q.sites) == 1
    return (Squares(q), Squares(q.whole())) if together else (Squares(q),)


class Reciprocal(Rule):
    """(w, 1 / w) of a gamma: variances that are 1 / w. Where E[1 / w] is infinite (shape at most
    one), a node is zero.
    """

    q: Gamma

    def statistics(self, row):
        """(w, 1 / w)."""
        return jnp.concatenate([jnp.exp(row), jnp.exp(-row)])

    def nodes(self):
        """Two."""
        shape, mean = self.q.shape, self.q.shape / self.q.rate
        factors = _two(jnp.maximum(shape - 1.0, 0.0) / shape)
        return _shared(self.q.of(jnp.stack([c * mean for c in factors])))


class Square(Rule):
    """(w, 1 / w, w^2) of a gamma of shape a > 1: rates of counts.

    The three roots of x^3 - 3 a x^2 + 3 a (a - 1/2) x - a (a - 1/2) (a - 1) have the sums 3 a of x,
    3 a (a + 1) of x^2 and 3 / (a - 1) of 1 / x.
    """

    q: Gamma

    def statistics(self, row):
        """(w, 1 / w, w^2)."""
        return jnp.concatenate([jnp.exp(row), jnp.exp(-row), jnp.exp(2.0 * row)])

    def nodes(self):
        """Three."""
        a = self.q.shape
        angle = jnp.arccos(jnp.sqrt(0.5 / a))
        turns = 2.0 * jnp.pi * jnp.arange(3.0).reshape(-1, *(1 for _ in a.shape))
        away = jnp.sqrt(2.0 * a) * jnp.cos((angle + turns) / 3.0)
        return _shared(self.q.of((a + away) / self.q.rate))


class InverseSquare(Rule):
    """(1 / w, 1 / w^2) of a gamma of shape a > 3: scales that are 1 / w, of waiting times."""

    q: Gamma

    def statistics(self, row):
        """(1 / w, 1 / w^2)."""
        return jnp.concatenate([jnp.exp(-row), jnp.exp(-2.0 * row)])

    def nodes(self):
        """Two: mean and standard deviation of 1 / w."""
        a = self.q.shape
        s = 1.0 / jnp.sqrt(a - 2.0)
        mean = self.q.rate / (a - 1.0)
        return _shared(self.q.of(jnp.stack([1.0 / (mean * (1.0 - s)), 1.0 / (mean * (1.0 + s))])))


@moment_rules.register
def _(q: Gamma):
    least = float(jnp.min(q.shape))
    found: tuple[Rule, ...] = (Reciprocal(q),)
    found += (Square(q),) if least > 1.0 else ()
    return found + ((InverseSquare(q),) if least > 3.0 else ())


class Probabilities(Rule):
    """p of a Dirichlet: one node, the mean."""

    q: Dirichlet

    def statistics(self, row):
        """p."""
        return jnp.exp(self.q.statistics(row))

    def nodes(self):
        """One."""
        mean = self.q.alpha / jnp.sum(self.q.alpha, -1, keepdims=True)
        return Nodes(self.q.of(mean[None]), jnp.ones(1))


class Pairs(Rule):
    """p p' of one Dirichlet: E[p p'] = (A m m' + diag(m)) / (A + 1), A = sum alpha (as an urn of
    Polya: the mean, and the corners).
    """

    q: Dirichlet

    def statistics(self, row):
        """p p'."""
        p = jnp.exp(self.q.statistics(row))
        return jnp.outer(p, p)[jnp.tril_indices(len(p))]

    def nodes(self):
        """K + 1."""
        alpha = self.q.alpha.reshape(-1)
        total, K = jnp.sum(alpha), self.q.size
        points = jnp.concatenate([alpha[None] / total, jnp.eye(K, dtype=alpha.dtype)])
        weights = jnp.concatenate([total[None], alpha / total]) / (total + 1.0)
        return Nodes(self.q.of(points.reshape(K + 1, *self.q.batch, K)), weights)


@moment_rules.register
def _(q: Dirichlet):
    alone = q.alpha.size == q.size
    return (Probabilities(q), Pairs(q)) if alone else (Probabilities(q),)


def _matrix_and_inverse(triangle, size: int):
    W = from_triangle(triangle, size)
    at = jnp.tril_indices(size)
    return W, jnp.concatenate([W[at], inverse(W)[at]])


class Inverse(Rule):
    """(W, W^-1) of a Wishart of more than D + 1 degrees of freedom: covariances."""

    q: Wishart

    def statistics(self, row):
        """(W, W^-1)."""
        return _matrix_and_inverse(row, self.q.size)[1]

    def nodes(self):
        """Two, E[W] (1 -+ s): E[W^-1] = rate / (df - D - 1)."""
        mean, _ = self.q.coordinates()
        factors = _two((self.q.df - self.q.size - 1.0) / self.q.df)
        return _shared(self.q.of(jnp.stack([c[..., None, None] * mean for c in factors])))


@moment_rules.register
def _(q: Wishart):
    return (Inverse(q),) if float(jnp.min(q.df)) > q.size + 1.0 else ()


class MeanAndPrecision(Rule):
    """(w, 1 / w, m, m m', w m, w m m') of a normal-gamma of shape a > 1."""

    q: NormalGamma

    def statistics(self, row):
        """As said."""
        w, m = jnp.exp(row[0]), row[1:]
        square = jnp.outer(m, m)[jnp.tril_indices(len(m))]
        both = jnp.concatenate([m, square])
        return jnp.concatenate([jnp.stack([w, 1.0 / w]), both, w * both])

    def nodes(self):
        """4 D: those of w as of `Reciprocal`, and about the mean for each."""
        return self.q.nodes_at(_two((self.q.shape - 1.0) / self.q.shape))


@moment_rules.register
def _(q: NormalGamma):
    return (MeanAndPrecision(q),) if float(jnp.min(q.shape)) > 1.0 else ()


class MeanAndMatrix(Rule):
    """(W, W^-1, m, m m', W m, m' W m) of a normal-Wishart of more than D + 1 degrees of freedom."""

    q: NormalWishart

    def statistics(self, row):
        """As said."""
        D = self.q.size
        W, both = _matrix_and_inverse(row[:-D], D)
        m = row[-D:]
        moved = W @ m
        square = jnp.outer(m, m)[jnp.tril_indices(D)]
        return jnp.concatenate([both, m, square, moved, (m @ moved)[None]])

    def nodes(self):
        """4 D."""
        return self.q.nodes_at(_two((self.q.df - self.q.size - 1.0) / self.q.df))


@moment_rules.register
def _(q: NormalWishart):
    return (MeanAndMatrix(q),) if float(jnp.min(q.df)) > q.size + 1.0 else ()


def lacks_variances(q: Family) -> bool:
    """Whether E[1 / w], or E[W^-1], of a precision is infinite under q: a Student-t of at most two
    degrees of freedom has no variance. Reads values: not under `jit`.
    """
    if isinstance(q, Gamma | NormalGamma):
        return float(jnp.min(q.shape)) <= 1.0
    return isinstance(q, Wishart | NormalWishart) and float(jnp.min(q.df)) <= q.size + 1.0
