"""Inducing variables for sums and products of kernels, from those of each term or factor."""

from abc import abstractmethod
from functools import reduce
from itertools import accumulate
from math import prod

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP
from ppl_gp.sparse.features.structure import product_factors, sum_terms
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.root import Root


class _Composed(InducingVariables):
    """One part for each of several kernels that make up the prior's."""

    parts: tuple[InducingVariables, ...]

    def __init__(self, parts):
        self.parts = tuple(parts)
        if not self.parts:
            raise DataError(
                f"{type(self).__name__}([]) has no parts; give one kind of inducing variables a "
                "kernel."
            )

    @property
    def is_exact(self) -> bool:
        """Whether all parts are."""
        return all(getattr(part, "is_exact", True) for part in self.parts)

    def _pairs(self, kernels, prior):
        name = type(self).__name__
        if len(kernels) != len(self.parts):
            raise ModelError(
                f"{name} has {len(self.parts)} part(s), and the kernel {prior.kernel!r} has "
                f"{len(kernels)} to go with them: give one part for each, in the order in which "
                "the kernel is written; or use Points(Z)."
            )
        priors = (GP(kernel, prior.X, jitter=prior.jitter) for kernel in kernels)
        return list(zip(self.parts, priors, strict=True))


class Additive(_Composed):
    """For a kernel k_1 + k_2 + ...: f = f_1 + f_2 + ..., and part i is about f_i alone (Hensman et
    al. 2018).

    The terms are independent, so K_uu is block diagonal and keeps each part's structure; K_uf
    stacks the parts'. M is the sum of theirs, and so is the cost. Parts go with the terms in the
    order in which the kernel is written; a constant in front of the sum counts for each. Columns
    may be shared: a part sees its own term. For a term `Constant(...)` one point, `Points(X[:1])`,
    is exact. u is about f less its mean, so E[u] = 0.
    """

    @property
    def num(self):
        return sum(part.num for part in self.parts)

    def root(self, prior) -> "BlockRoot":
        roots = tuple(part.root(term) for part, term in self._terms(prior))
        return BlockRoot(roots, tuple(part.num for part in self.parts))

    def cross(self, prior, X):
        return jnp.concatenate([part.cross(term, X) for part, term in self._terms(prior)])

    def _terms(self, prior):
        return self._pairs(sum_terms(prior.kernel), prior)


class Kronecker(_Composed):
    """For a kernel k_1 k_2 ...: u are all products of the parts' functionals (Hensman et al. 2018).

    f(x) is F(x, x, ...) of a process F whose covariance is the factors' tensor product, and u is
    the tensor product of the parts' functionals of F: K_uu = K_1 (x) K_2 (x) ..., K_uf the products
    of the parts' rows. M is the product of theirs. Whitening costs what the parts' own do, one
    after another; nothing of size M x M is made. `Points` as parts make a grid of inducing points.
    Constant factors go to the first part. E[u] = 0, as u is about f less its mean.
    """

    @property
    def num(self):
        return prod(part.num for part in self.parts)

    def root(self, prior) -> "KroneckerRoot":
        roots = tuple(part.root(factor) for part, factor in self._factors(prior))
        return KroneckerRoot(roots, tuple(part.num for part in self.parts))

    def cross(self, prior, X):
        rows = (part.cross(factor, X) for part, factor in self._factors(prior))
        return reduce(lambda A, B: (A[:, None] * B[None]).reshape(-1, A.shape[1]), rows)

    def _factors(self, prior):
        return self._pairs(product_factors(prior.kernel), prior)


class _Roots(Root):
    """What is applied part by part, `_each` says how."""

    roots: tuple[Root, ...]
    sizes: tuple[int, ...] = eqx.field(static=True)

    def whiten(self, C):
        return self._each(lambda root, block: root.whiten(block), C)

    def color(self, v):
        return self._each(lambda root, block: root.color(block), v)

    @abstractmethod
    def _each(self, apply, C): ...

    @property
    def added(self) -> Float[Array, ""]:
        return reduce(jnp.maximum, (root.added for root in self.roots))


class BlockRoot(_Roots):
    """R = blockdiag(R_1, R_2, ...)."""

    def _each(self, apply, C):
        blocks = jnp.split(C, list(accumulate(self.sizes))[:-1])
        return jnp.concatenate([apply(*pair) for pair in zip(self.roots, blocks, strict=True)])


class KroneckerRoot(_Roots):
    """R = R_1 (x) R_2 (x) ..., applied along one axis after another."""

    def _each(self, apply, C):
        shape = C.shape
        C = C.reshape(*self.sizes, -1)
        for axis, root in enumerate(self.roots):
            front = jnp.moveaxis(C, axis, 0)
            rows = apply(root, front.reshape(front.shape[0], -1))
            C = jnp.moveaxis(rows.reshape(front.shape), 0, axis)
        return C.reshape(shape)
