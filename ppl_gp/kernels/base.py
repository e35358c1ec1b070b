"""The kernel algebra: what a kernel is, sums, products, numbers and foreign kernels."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ppl_gp.errors import DataError
from ppl_gp.kernels.inputs import (
    ActiveDims,
    active_dims_field,
    as_inputs,
    as_tree,
    fill,
    input_pair,
    scalar,
)
from ppl_gp.numerics.linalg import default_jitter


class Kernel(eqx.Module):
    """A covariance function: `k(X1, X2)` is (N1, N2); `k.diag(X)` is (N,) at O(N) cost.

    Inputs are (N, D), or (N,) for one input dimension; integers become floats. `+` and `*` take
    kernels, callables (see `as_kernel`) and numbers; a number c stands for `Constant(c)`.

    Parameters may be Python numbers, arrays or tracers. Their shapes are checked when the kernel is
    called, not when it is made, so a kernel whose parameters carry a batch axis is a pytree that
    `jax.vmap` maps over. Calling a kernel raises `DataError` where shapes do not fit.
    """

    __array_ufunc__ = None  # makes NumPy leave `np.float64(2.0) * kernel` to the kernel

    @abstractmethod
    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        """The matrix k(x1_i, x2_j)."""

    @abstractmethod
    def diag(self, X: ArrayLike) -> Float[Array, "N"]:
        """The vector k(x_n, x_n)."""

    def __add__(self, other):
        return Sum(self, _operand(other))

    def __radd__(self, other):
        return Sum(_operand(other), self)

    def __mul__(self, other):
        return Product(self, _operand(other))

    def __rmul__(self, other):
        return Product(_operand(other), self)


class Sum(Kernel):
    """k(x, x') = k1(x, x') + k2(x, x')."""

    left: Any
    right: Any

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        return self.left(X1, X2) + self.right(X1, X2)

    def diag(self, X: ArrayLike) -> Float[Array, "N"]:
        """The vector k(x_n, x_n): the sum of both terms."""
        return self.left.diag(X) + self.right.diag(X)


class Product(Kernel):
    """k(x, x') = k1(x, x') k2(x, x')."""

    left: Any
    right: Any

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        return self.left(X1, X2) * self.right(X1, X2)

    def diag(self, X: ArrayLike) -> Float[Array, "N"]:
        """The vector k(x_n, x_n): the product of both factors."""
        return self.left.diag(X) * self.right.diag(X)


class SameVariance(Kernel):
    """k(x, x) = variance at every x."""

    variance: eqx.AbstractVar[ArrayLike]
    active_dims: eqx.AbstractVar[ActiveDims]

    def diag(self, X: ArrayLike) -> Float[Array, "N"]:
        """The vector k(x_n, x_n): the variance in every row."""
        return fill(variance_of(self), as_inputs(X, self.active_dims))


def variance_of(kernel: SameVariance) -> Float[Array, ""]:
    """Its variance, checked to be one number."""
    return scalar(kernel.variance, f"{type(kernel).__name__}(variance=...)")


class Constant(SameVariance):
    """k(x, x') = variance: the prior of an unknown offset. `active_dims` changes nothing here."""

    finite_rank = True
    variance: ArrayLike = 1.0
    active_dims: ActiveDims = active_dims_field()

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        X1, X2 = input_pair(X1, X2, self.active_dims)
        variance = variance_of(self)
        return jnp.full((X1.shape[0], X2.shape[0]), variance, jnp.result_type(X1, X2, variance))


class CallableKernel(Kernel):
    """A callable `k(X1, X2) -> (N1, N2)` that lacks `.diag`, with it supplied. Made by `as_kernel`.

    The diagonal is k(X) for a tinygp kernel, which calls it so, and N evaluations at single rows
    for other callables, or that of k(X, X) for one that has no value at single rows (distances of
    the training data that were computed before).
    """

    function: Callable

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        return self.function(jnp.asarray(X1), jnp.asarray(X2))

    def diag(self, X: ArrayLike) -> Float[Array, "N"]:
        """The vector k(x_n, x_n) of the wrapped kernel."""
        X = jnp.asarray(X)
        if hasattr(self.function, "evaluate_diag"):
            return self.function(X)
        # it reads a matrix of all rows
        if jax.eval_shape(lambda x: self.function(x, x), X[:1]).shape != (1, 1):
            return jnp.diagonal(self.function(X, X))
        return jax.vmap(lambda x: self.function(x[None], x[None])[0, 0])(X)


def as_kernel(kernel: Any) -> Any:
    """`kernel` itself where it is callable and has `.diag`; otherwise a callable wrapped so that it
    has.

    A callable that is a pytree (a tinygp kernel, an Equinox module) keeps its parameters as leaves.
    A plain function has none: what it closes over is seen by jit and grad only where the closure is
    made inside them. Raises `DataError` for anything that cannot be called.
    """
    if not callable(kernel) or isinstance(kernel, type):
        raise DataError(
            f"kernel={kernel!r} is no kernel; give one of ppl_gp.kernels, or a callable k(X1, X2)."
        )
    if hasattr(kernel, "diag"):
        return kernel
    return CallableKernel(as_tree(kernel))


def jitter_of(kernel, X) -> Float[Array, ""]:
    """The default jitter of the kernel at these rows, an absolute variance. O(N)."""
    return default_jitter(kernel.diag(X), of_finite_rank(kernel, X))


def of_finite_rank(kernel, X) -> Float[Array, "..."]:
    """The diagonal of the kernel's terms of finite rank."""
    if isinstance(kernel, Sum):
        return of_finite_rank(kernel.left, X) + of_finite_rank(kernel.right, X)
    if isinstance(kernel, Product):
        return of_finite_rank(kernel.left, X) * of_finite_rank(kernel.right, X)
    variance = kernel.diag(X)
    return variance if getattr(kernel, "finite_rank", False) else jnp.zeros_like(variance)


def _operand(value: Any) -> Any:
    if callable(value):
        return as_kernel(value)
    try:
        return Constant(scalar(value, "the number added to or multiplied with a kernel"))
    except TypeError:
        raise DataError(
            f"{value!r} cannot be combined with a kernel; give a kernel, a callable or a number."
        ) from None
