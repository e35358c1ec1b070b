"""What features ask of a kernel: its terms, its factors, its scale, and that it is of a kind that
they fit. And their static settings, which may not depend on hyperparameters, as these are traced
while they are trained: numbers that shapes depend on, boxes, and which products of 1-D features are
taken.

Inducing variables for sums and products of kernels, from those of each term or factor.
"""

import heapq
from abc import abstractmethod
from collections.abc import Callable
from functools import reduce
from itertools import accumulate
from math import prod
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP
from ppl_gp.kernels import Constant, Product, Sum
from ppl_gp.kernels.base import as_inputs, per_column, variance_of
from ppl_gp.kernels.stationary import Isotropic
from ppl_gp.sparse.families import DiagonalRoot, Root
from ppl_gp.sparse.inducing import InducingVariables

Numbers = float | tuple[float, ...]


class Eigenfunctions(InducingVariables):
    """Products of orthonormal functions of one column each, of a kernel of `kinds`: Cov[u] = I."""

    kinds: ClassVar[tuple[type, ...]]
    size: int | tuple[int, ...] = eqx.field(static=True)

    @property
    def num(self):
        return self.size if isinstance(self.size, int) else prod(self.size)

    def root(self, prior) -> DiagonalRoot:
        fitting(prior.kernel, self.kinds, type(self).__name__)
        return DiagonalRoot(jnp.ones(self.num, prior.X.dtype))


def sum_terms(kernel: Any) -> list[Any]:
    """k = k_1 + k_2 + ...; a constant in front of a sum goes to each term."""
    if isinstance(kernel, Sum):
        return sum_terms(kernel.left) + sum_terms(kernel.right)
    scale, core = scaled(kernel)
    if not isinstance(core, Sum):
        return [kernel]
    return [Product(Constant(scale), term) for term in sum_terms(core)]


def product_factors(kernel: Any) -> list[Any]:
    """k = k_1 k_2 ...; all constants go to the first factor."""
    constants, rest = _factors(kernel)
    if not constants or not rest:
        return rest or [kernel]
    return [Product(Constant(prod(constants)), rest[0]), *rest[1:]]


def scaled(kernel: Any) -> tuple[Any, Any]:
    """(c, core) with k = c core where k is one kernel times constants; (1, k) where it is not."""
    constants, rest = _factors(kernel)
    return (prod(constants), rest[0]) if len(rest) == 1 else (1.0, kernel)


def _factors(kernel):
    if isinstance(kernel, Product):
        (c1, rest1), (c2, rest2) = _factors(kernel.left), _factors(kernel.right)
        return c1 + c2, rest1 + rest2
    return ([variance_of(kernel)], []) if isinstance(kernel, Constant) else ([], [kernel])


def fitting(kernel: Any, kinds: tuple[type, ...], name: str) -> tuple[Float[Array, ""], Any]:
    """(variance, core): the kernel's variance with constant factors multiplied in, and the kernel
    of one of `kinds`.

    `ModelError` for any other kernel, with the remedy that its structure suggests.
    """
    scale, core = scaled(kernel)
    if not isinstance(core, kinds):
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise ModelError(
            f"{name} has no form for the kernel {kernel!r}: it takes {wanted}. {_remedy(kernel)}"
        )
    return scale * variance_of(core), core


def _remedy(kernel):
    if isinstance(kernel, Sum):
        return "For a sum use Additive([...]), one kind of features for each term; or Points(Z)."
    if isinstance(kernel, Product):
        return (
            "For a product use Kronecker([...]), one kind of features for each factor; or "
            "Points(Z)."
        )
    return "Use Points(Z), which takes any kernel."


def columns(core: Isotropic, X: Any) -> tuple[Float[Array, "N D"], Float[Array, "D"]]:
    """The columns of X that a stationary kernel sees, and its length scale in each."""
    X, name = as_inputs(X, core.active_dims), f"{type(core).__name__}(lengthscale=...)"
    lengthscale = per_column(core.lengthscale, X.shape[1], name)
    return X, jnp.broadcast_to(lengthscale, (X.shape[1],)).astype(jnp.result_type(X, lengthscale))


def as_numbers(value: Any) -> Numbers:
    """One finite number, or one for each column, as what a static field may hold."""
    try:
        array = np.asarray(value, float)
    except (jax.errors.TracerArrayConversionError, TypeError, ValueError):
        raise DataError(
            f"features got {value!r}; their box or measure is fixed: give numbers known outside "
            "of jit and the model."
        ) from None
    if array.ndim > 1 or not np.all(np.isfinite(array)) or array.size == 0:
        raise DataError(
            f"features got {value!r}; give one finite number, or one for each input column."
        )
    return float(array) if array.ndim == 0 else tuple(array.tolist())


def as_num(num: Any) -> int | tuple[int, ...]:
    """How many features: a total, or a number for each input column (their full grid)."""
    values = num if isinstance(num, tuple | list) else (num,)
    if not values or any(isinstance(n, bool) or int(n) != n or n < 1 for n in values):
        raise DataError(
            f"the number of features is {num!r}; give a positive integer, or a tuple of them, one "
            "a column."
        )
    return tuple(int(n) for n in values) if isinstance(num, tuple | list) else int(num)


def check_box(low: Numbers, high: Numbers, name: str) -> None:
    """`DataError` unless low < high in every column."""
    try:
        good = np.all(np.asarray(low) < np.asarray(high))
    except ValueError:
        good = False
    if not good:
        raise DataError(
            f"{name}(low={low}, high={high}) is no box; give low < high in every input column."
        )


def per_dimension(value: Numbers, D: int, name: str) -> np.ndarray:
    """One number for each of D columns, (D,)."""
    if np.shape(value) not in ((), (D,)):
        raise DataError(
            f"{name} has {np.size(value)} numbers, and the kernel sees {D} input column(s): give "
            f"{D}, or one."
        )
    return np.broadcast_to(np.asarray(value, float), (D,))


def multi_indices(
    num: int | tuple[int, ...], D: int, cost: Callable[[int, int], float], name: str
) -> np.ndarray:
    """(M, D) of indices from 0: the full grid where `num` is a tuple, else the M with the smallest
    sum_d cost(d, j_d), which grows with j; of equal ones the lexicographically smaller. O(M D log
    M).
    """
    if isinstance(num, tuple):
        if len(num) != D:
            raise DataError(
                f"{name}(num={num}) is for {len(num)} input column(s); the kernel sees {D}."
            )
        return np.indices(num).reshape(D, -1).T
    taken, queue, seen = [], [(0.0, (0,) * D)], {(0,) * D}
    while len(taken) < num:
        _, index = heapq.heappop(queue)
        taken.append(index)
        for d in range(D):
            after = (*index[:d], index[d] + 1, *index[d + 1 :])
            if after not in seen:
                seen.add(after)
                # Rounded, so that equal costs stay ties whatever order they were summed in.
                total = round(sum(cost(e, j) for e, j in enumerate(after)), 9)
                heapq.heappush(queue, (total, after))
    return np.array(taken)


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


class _Composed(InducingVariables):
    """One part for each of several kernels that make up the prior's."""

    kernels: ClassVar[Callable[[Any], list[Any]]]  # of the prior's kernel
    composed: ClassVar[type[_Roots]]
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
        """Whether all parts are exact."""
        return all(getattr(part, "is_exact", True) for part in self.parts)

    def root(self, prior) -> _Roots:
        roots = tuple(part.root(own) for part, own in self._pairs(prior))
        return self.composed(roots, tuple(part.num for part in self.parts))

    def _rows(self, prior, X) -> list[Array]:
        return [part.cross(own, X) for part, own in self._pairs(prior)]

    def _pairs(self, prior):
        name, kernels = type(self).__name__, self.kernels(prior.kernel)
        if len(kernels) != len(self.parts):
            raise ModelError(
                f"{name} has {len(self.parts)} part(s), and the kernel {prior.kernel!r} has "
                f"{len(kernels)} to go with them: give one part for each, in the order in which "
                "the kernel is written; or use Points(Z)."
            )
        priors = (GP(kernel, prior.X, jitter=prior.jitter) for kernel in kernels)
        return list(zip(self.parts, priors, strict=True))


class Additive(_Composed):
    """Inducing variables for a sum of kernels, one part per term.

    Parameters
    ----------
    parts : list of InducingVariables
        One per term of `k_1 + k_2 + ...`, in the order in which the kernel is written. Part i
        belongs to f_i of f = f_1 + f_2 + ... alone. For a `Constant` term one point,
        `Points(X[:1])`, is exact.

    Raises
    ------
    DataError
        For an empty list.
    ModelError
        In `fit`, unless there is one part per term.

    Notes
    -----
    The terms are independent, so Cov[u] is block diagonal, and each block keeps its structure. M
    and the cost are the sums over the parts. A constant in front of the sum multiplies each term.
    Parts may share input columns. u is about f minus its mean, so E[u] = 0. Source: Hensman,
    Durrande & Solin (2018).

    Examples
    --------
    >>> trend = pg.features.FourierFeatures(10, -5.0, 15.0)
    >>> rest = pg.Points(jnp.linspace(0.0, 10.0, 20))
    >>> pg.features.Additive([trend, rest]).num
    41
    """

    kernels = staticmethod(sum_terms)
    composed = BlockRoot

    @property
    def num(self):
        return sum(part.num for part in self.parts)

    def cross(self, prior, X):
        return jnp.concatenate(self._rows(prior, X))


class Kronecker(_Composed):
    """Inducing variables for a product of kernels, one part per factor.

    Parameters
    ----------
    parts : list of InducingVariables
        One per factor of `k_1 k_2 ...`, in the order in which the kernel is written. `Points` make
        a grid of inducing points.

    Raises
    ------
    DataError
        For an empty list.
    ModelError
        In `fit`, unless there is one part per factor.

    Notes
    -----
    u are all products of the parts' functionals, and Cov[u] is the Kronecker product of theirs. M
    is the product over the parts, but nothing of size M x M is made: whitening costs what the parts
    cost, one after another. Constant factors go to the first part. u is about f minus its mean, so
    E[u] = 0. Source: Hensman, Durrande & Solin (2018).

    Examples
    --------
    >>> one = pg.features.FourierFeatures(5, -1.0, 2.0)
    >>> two = pg.features.FourierFeatures(10, -1.0, 2.0)
    >>> pg.features.Kronecker([one, two]).num
    231
    """

    kernels = staticmethod(product_factors)
    composed = KroneckerRoot

    @property
    def num(self):
        return prod(part.num for part in self.parts)

    def cross(self, prior, X):
        rows = self._rows(prior, X)
        return reduce(lambda A, B: (A[:, None] * B[None]).reshape(-1, A.shape[1]), rows)
