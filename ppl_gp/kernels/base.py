"""The kernel algebra: what a kernel is, sums, products, numbers and foreign kernels; what every
kernel does with its arguments; squared distances between rows.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ppl_gp.errors import DataError
from ppl_gp.numerics.linalg import default_jitter, product

ActiveDims = tuple[int, ...] | None


def active_dims_field():
    """`active_dims` of a kernel: a keyword, `None` for all columns."""
    return eqx.field(default=None, static=True, kw_only=True, converter=as_active_dims)


def as_inputs(X: Any, active_dims: ActiveDims = None, name: str = "X") -> Float[Array, "N D"]:
    """X as (N, D) floats, of the columns `active_dims`; (N,) means D = 1. Raises `DataError`."""
    X = jnp.asarray(X)
    if X.ndim not in (1, 2) or X.shape[1:] == (0,):
        raise DataError(f"{name} has shape {X.shape}; inputs are (N, D), D >= 1, or (N,).")
    if jnp.issubdtype(X.dtype, jnp.complexfloating):
        raise DataError(f"{name} has dtype {X.dtype}; give real and imaginary parts as columns.")
    X = floating(X if X.ndim == 2 else X[:, None])
    if active_dims is None:
        return X
    if not all(0 <= d < X.shape[1] for d in active_dims):
        raise DataError(
            f"active_dims={active_dims} is out of range for {name}, which has {X.shape[1]} "
            f"column(s): give column numbers from 0 to {X.shape[1] - 1}."
        )
    return X[:, jnp.array(active_dims)]


def input_pair(
    X1: Any, X2: Any, active_dims: ActiveDims
) -> tuple[Float[Array, "N1 D"], Float[Array, "N2 D"]]:
    """Both arguments of `k(X1, X2)` as (N, D); one object where both are the same object."""
    d1, d2 = (1 if jnp.ndim(X) == 1 else jnp.shape(X)[-1] if jnp.ndim(X) else 0 for X in (X1, X2))
    if d1 != d2:
        raise DataError(
            f"X1 has {d1} column(s) and X2 has {d2} (shapes {jnp.shape(X1)} and {jnp.shape(X2)}): "
            "both arguments of a kernel have the same input dimensions."
        )
    A = as_inputs(X1, active_dims, "X1")
    return A, A if X2 is X1 else as_inputs(X2, active_dims, "X2")


def as_active_dims(dims: Any) -> ActiveDims:
    """One column number or several as the static tuple that a kernel keeps."""
    if dims is None:
        return None
    columns = np.atleast_1d(np.asarray(dims))
    if not columns.size:
        raise DataError("active_dims=() picks no column: give column numbers, or None for all.")
    are_numbers = columns.dtype.kind in "iu" and columns.ndim == 1
    if not are_numbers or len(np.unique(columns)) < len(columns):
        raise DataError(
            f"active_dims={dims!r}: give different column numbers, as integers. Those of a mask "
            "are np.flatnonzero(mask)."
        )
    return tuple(columns.tolist())


def floating(x: ArrayLike) -> Float[Array, "..."]:
    """As an array of floats."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))


def as_tree(function: Any) -> Any:
    """A callable as a pytree: jit refuses a function as a leaf, and takes a Partial of one."""
    is_function = jax.tree_util.all_leaves([function])
    return jax.tree_util.Partial(function) if is_function else function


def scalar(value: Any, name: str) -> Float[Array, ""]:
    """A parameter that has to be one number."""
    value = jnp.asarray(value)
    if value.ndim:
        raise DataError(f"{name} has shape {value.shape}; it is one number (jax.vmap for a batch).")
    return floating(value)


def per_column(value: Any, D: int, name: str) -> Float[Array, "..."]:
    """A parameter that is one number for all columns, or one for each, (D,)."""
    value = jnp.asarray(value)
    if value.shape not in ((), (D,)):
        raise DataError(
            f"{name} has shape {value.shape}, and there are {D} input column(s) (the active ones, "
            f"with active_dims): give one number, or shape ({D},)."
        )
    return floating(value)


def fill(value: Float[Array, ""], X: Float[Array, "N D"]) -> Float[Array, "N"]:
    """One value for every row of X, in the dtype that a computation with both has."""
    return jnp.full(X.shape[0], value, jnp.result_type(X, value))


# up to here differences, exact but O(D) passes over the matrix; above it one matrix product
MAX_DIRECT_COLUMNS = 16


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def squared_distance(
    A: Float[Array, "N1 D"], B: Float[Array, "N2 D"], same: bool = False
) -> Float[Array, "N1 N2"]:
    """r2_ij = sum_d (a_id - b_jd)^2; `same` says that A and B are one array, so that the diagonal
    is exactly zero.

    Up to 16 columns the differences themselves are taken: no cancellation, and equal rows are at
    distance 0. Above, the expansion |a|^2 + |b|^2 - 2 a.b of centred inputs, clipped at 0: its
    absolute error is about eps max|a|^2.

    The derivative is written as two products with thin matrices. Its transpose, what a gradient
    needs, then reads the cotangent twice whatever D is, where differentiating the sum of squares
    reads and writes it several times a column.
    """
    return _by_differences(A, B) if A.shape[1] <= MAX_DIRECT_COLUMNS else _by_products(A, B, same)


@squared_distance.defjvp
def _squared_distance_jvp(same, primals, tangents):
    # dr2_ij = 2 (a_i - b_j).(da_i - db_j), multiplied out; any common shift of a and b leaves it as
    # it is.
    A, B = _centred(*primals)
    dA, dB = tangents
    from_A = product(_append(-dA, jnp.sum(A * dA, 1)), _append(B, jnp.ones_like(B[:, 0])).T)
    from_B = product(_append(-A, jnp.ones_like(A[:, 0])), _append(dB, jnp.sum(B * dB, 1)).T)
    return squared_distance(*primals, same), 2.0 * (from_A + from_B)


def _by_differences(A, B):
    # One column at a time, so that XLA fuses the sum into one pass and no (N1, N2, D) array exists.
    # XLA would also fuse what makes the inputs (scaling, a layer's draws) into that pass, and
    # repeat it for every pair; it does not fuse a product, so the product with I stops it (an
    # optimization barrier does not, on CPU).
    A, B = (product(X, jnp.eye(X.shape[1], dtype=X.dtype)) for X in (A, B))
    return reduce(add, ((A[:, d, None] - B[None, :, d]) ** 2 for d in range(A.shape[1])))


def _by_products(A, B, same):
    A, B = _centred(A, B)
    r2 = jnp.sum(A**2, 1)[:, None] + jnp.sum(B**2, 1)[None, :] - 2.0 * product(A, B.T)
    r2 = jnp.maximum(r2, 0.0)
    return jnp.where(jnp.eye(A.shape[0], dtype=bool), 0.0, r2) if same else r2


def _centred(A, B):
    centre = middle(A)
    return A - centre, B - centre


def middle(X: Float[Array, "N D"]) -> Float[Array, "D"]:
    """The mean, without bad values, to measure from where only differences count."""
    return lax.stop_gradient(jnp.mean(jnp.where(jnp.isfinite(X), X, 0.0), 0))


def _append(A, column):
    return jnp.concatenate([A, column[:, None]], 1)


def safe_sqrt(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """sqrt(x) for x >= 0 whose derivative at 0 is 0, not inf: below the smallest normal number x
    counts as that number.

    No `where(x == 0, ...)`: XLA may compute x anew for each use and round it differently (fused
    multiply-adds), so that two tests of one x disagree. A guard like this one, continuous across
    its threshold, is safe.
    """
    return jnp.sqrt(jnp.maximum(x, jnp.finfo(x.dtype).tiny))


class Kernel(eqx.Module):
    """Base class of kernels: `k(X1, X2)` is (N1, N2), and `k.diag(X)` is (N,) in O(N).

    Inputs are (N, D), or (N,) for one input dimension, and integers become floats. `+` and `*`
    combine kernels with kernels, callables (see `as_kernel`) and numbers; a number c means
    `Constant(c)`.

    Raises
    ------
    DataError
        If you call a kernel with shapes that do not match.

    Notes
    -----
    Parameters may be Python numbers, arrays or tracers. Their shapes are checked when you call the
    kernel, not when you make it. A kernel whose parameters have a batch axis is therefore a pytree
    that `jax.vmap` can map over.

    Examples
    --------
    >>> kernel = pg.kernels.RBF(1.0, 0.5) + 2.0 * pg.kernels.Linear()
    >>> kernel(np.array([0.0, 1.0]), np.array([1.0])).round(2).tolist()
    [[0.14], [3.0]]
    """

    __array_ufunc__ = None  # makes NumPy leave `np.float64(2.0) * kernel` to the kernel

    @abstractmethod
    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        """The matrix k(x1_i, x2_j)."""

    @abstractmethod
    def diag(self, X: ArrayLike) -> Float[Array, "N"]:
        """The vector k(x_n, x_n)."""

    def __add__(self, other):
        return Sum(self, other)

    def __radd__(self, other):
        return Sum(other, self)

    def __mul__(self, other):
        return Product(self, other)

    def __rmul__(self, other):
        return Product(other, self)


def _operand(value: Any) -> Any:
    if callable(value):
        return as_kernel(value)
    try:
        return Constant(scalar(value, "the number added to or multiplied with a kernel"))
    except TypeError:
        raise DataError(
            f"{value!r} cannot be combined with a kernel; give a kernel, a callable or a number."
        ) from None


class Sum(Kernel):
    """The sum of two kernels, k1(x, x') + k2(x, x'), as `k1 + k2` makes it.

    Parameters
    ----------
    left, right : Kernel, callable or float
        The terms.

    Examples
    --------
    >>> kernel = pg.kernels.RBF() + pg.kernels.Constant(2.0)
    >>> kernel(np.zeros(1), np.zeros(1)).tolist()
    [[3.0]]
    """

    left: Any = eqx.field(converter=_operand)
    right: Any = eqx.field(converter=_operand)

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        return self.left(X1, X2) + self.right(X1, X2)

    def diag(self, X: ArrayLike) -> Float[Array, "N"]:
        """The vector k(x_n, x_n), (N,): the sum of both terms."""
        return self.left.diag(X) + self.right.diag(X)


class Product(Kernel):
    """The product of two kernels, k1(x, x') k2(x, x'), as `k1 * k2` makes it.

    Parameters
    ----------
    left, right : Kernel, callable or float
        The factors.

    Examples
    --------
    >>> kernel = pg.kernels.RBF() * pg.kernels.Constant(2.0)
    >>> kernel(np.zeros(1), np.zeros(1)).tolist()
    [[2.0]]
    """

    left: Any = eqx.field(converter=_operand)
    right: Any = eqx.field(converter=_operand)

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        return self.left(X1, X2) * self.right(X1, X2)

    def diag(self, X: ArrayLike) -> Float[Array, "N"]:
        """The vector k(x_n, x_n), (N,): the product of both factors."""
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
    """Kernel of an unknown constant offset, k(x, x') = variance.

    Parameters
    ----------
    variance : float, default 1.0
        The prior variance of the offset.
    active_dims : int or tuple of int, default None
        Without effect here.

    Examples
    --------
    >>> pg.kernels.Constant(2.0)(np.array([0.0, 1.0]), np.array([5.0])).tolist()
    [[2.0], [2.0]]
    """

    finite_rank = True
    variance: ArrayLike = 1.0
    active_dims: ActiveDims = active_dims_field()

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        X1, X2 = input_pair(X1, X2, self.active_dims)
        variance = variance_of(self)
        return jnp.full((X1.shape[0], X2.shape[0]), variance, jnp.result_type(X1, X2, variance))


class CallableKernel(Kernel):
    """A callable `k(X1, X2) -> (N1, N2)` with a method `diag` added. `as_kernel` makes it.

    Parameters
    ----------
    function : callable
        The kernel, for example of tinygp.

    Notes
    -----
    `diag` calls k(X) for a tinygp kernel, and makes N evaluations at single rows for other
    callables. If the callable has no values at single rows, it takes the diagonal of k(X, X). An
    example is a kernel of distances of the training data that were computed before.
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
        # one object twice, as in k(X, X): a kernel may add noise `if X1 is X2`
        return jax.vmap(lambda x: self.function(*[x[None]] * 2)[0, 0])(X)


def as_kernel(kernel: Any) -> Any:
    """Make a kernel with a method `diag` from any callable.

    Parameters
    ----------
    kernel : callable
        `k(X1, X2) -> (N1, N2)`. One that has `.diag` is returned unchanged.

    Returns
    -------
    Kernel or CallableKernel
        The kernel.

    Raises
    ------
    DataError
        If `kernel` cannot be called.

    Notes
    -----
    A pytree (a tinygp kernel, an Equinox module) keeps its parameters as leaves. A plain function
    has none: jit and grad reach the values in its closure only if you make the closure inside them.

    Examples
    --------
    >>> kernel = pg.kernels.as_kernel(lambda X1, X2: jnp.minimum(X1, X2.T))
    >>> kernel.diag(np.array([[1.0], [2.0]])).tolist()
    [1.0, 2.0]
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
