"""Kernels of the difference x - x', and of the inner product x . x' (linear and polynomial)."""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ppl_gp.errors import DataError
from ppl_gp.kernels.base import (
    ActiveDims,
    Kernel,
    SameVariance,
    active_dims_field,
    as_inputs,
    input_pair,
    middle,
    per_column,
    safe_sqrt,
    scalar,
    squared_distance,
    variance_of,
)
from ppl_gp.numerics.linalg import product


class Isotropic(SameVariance):
    """k(x, x') = variance rho(r^2) with r^2 = sum_d (x_d - x'_d)^2 / lengthscale_d^2."""

    variance: ArrayLike = 1.0
    lengthscale: ArrayLike = 1.0
    active_dims: ActiveDims = active_dims_field()

    @abstractmethod
    def correlation(self, r2: Float[Array, "..."]) -> Float[Array, "..."]:
        """rho(r^2), one at r = 0, elementwise."""

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        X1, X2 = input_pair(X1, X2, self.active_dims)
        name = f"{type(self).__name__}(lengthscale=...)"
        lengthscale = per_column(self.lengthscale, X1.shape[1], name)
        r2 = squared_distance(X1 / lengthscale, X2 / lengthscale, X1 is X2)
        return variance_of(self) * self.correlation(r2)


class RBF(Isotropic):
    """Squared-exponential kernel, whose functions are infinitely smooth.

    Parameters
    ----------
    variance : float, default 1.0
        k(x, x).
    lengthscale : float or array, default 1.0
        In units of x: one number, or one per column, (D,).
    active_dims : int or tuple of int, default None
        The columns of X that are used. None is all.

    Notes
    -----
    `k = variance exp(-r^2 / 2)` with `r^2 = sum_d (x_d - x'_d)^2 / lengthscale_d^2` (Rasmussen &
    Williams 2006, equation 4.9).

    Examples
    --------
    >>> kernel = pg.kernels.RBF(variance=2.0, lengthscale=0.5)
    >>> kernel(np.array([0.0]), np.array([0.0, 0.5])).round(2).tolist()
    [[2.0, 1.21]]
    """

    def correlation(self, r2: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.exp(-0.5 * r2)


class Matern12(Isotropic):
    """Exponential kernel, whose functions are continuous but rough (Matern with nu = 1/2).

    Parameters
    ----------
    variance, lengthscale, active_dims
        As for `RBF`.

    Notes
    -----
    `k = variance exp(-r)`, with r as for `RBF` (Rasmussen & Williams 2006, equation 4.18 with gamma
    = 1).

    Examples
    --------
    >>> pg.kernels.Matern12(2.0, 0.5)(np.array([0.0]), np.array([0.5])).round(2).tolist()
    [[0.74]]
    """

    def correlation(self, r2: Float[Array, "..."]) -> Float[Array, "..."]:
        return matern12(r2)


class Matern32(Isotropic):
    """Matern kernel with nu = 3/2, whose functions are once differentiable.

    Parameters
    ----------
    variance, lengthscale, active_dims
        As for `RBF`.

    Notes
    -----
    `k = variance (1 + s) exp(-s)`, `s = sqrt(3) r`, with r as for `RBF` (Rasmussen & Williams 2006,
    equation 4.17).

    Examples
    --------
    >>> pg.kernels.Matern32(2.0, 0.5)(np.array([0.0]), np.array([0.5])).round(2).tolist()
    [[0.97]]
    """

    def correlation(self, r2: Float[Array, "..."]) -> Float[Array, "..."]:
        return matern32(r2)


class Matern52(Isotropic):
    """Matern kernel with nu = 5/2, whose functions are twice differentiable.

    Parameters
    ----------
    variance, lengthscale, active_dims
        As for `RBF`.

    Notes
    -----
    `k = variance (1 + s + s^2 / 3) exp(-s)`, `s = sqrt(5) r`, with r as for `RBF` (Rasmussen &
    Williams 2006, equation 4.17).

    Examples
    --------
    >>> pg.kernels.Matern52(2.0, 0.5)(np.array([0.0]), np.array([0.5])).round(2).tolist()
    [[1.05]]
    """

    def correlation(self, r2: Float[Array, "..."]) -> Float[Array, "..."]:
        return matern52(r2)


class RationalQuadratic(Isotropic):
    """Mixture of RBF kernels of many length scales.

    Parameters
    ----------
    variance, lengthscale, active_dims
        As for `RBF`.
    alpha : float, default 1.0
        Positive. The larger, the narrower the range of length scales; it tends to `RBF`.

    Notes
    -----
    `k = variance (1 + r^2 / (2 alpha))^(-alpha)`, with r as for `RBF` (Rasmussen & Williams 2006,
    equation 4.19).

    Examples
    --------
    >>> pg.kernels.RationalQuadratic(2.0, 0.5)(np.array([0.0]), np.array([0.5])).round(2).tolist()
    [[1.33]]
    """

    alpha: ArrayLike = 1.0

    def correlation(self, r2: Float[Array, "..."]) -> Float[Array, "..."]:
        alpha = scalar(self.alpha, "RationalQuadratic(alpha=...)")
        return jnp.exp(-alpha * jnp.log1p(r2 / (2.0 * alpha)))


class Periodic(SameVariance):
    """Kernel of functions that repeat with a fixed period.

    Parameters
    ----------
    variance, active_dims
        As for `RBF`.
    lengthscale : float or array, default 1.0
        A pure number, not in units of x. One number, or one per column, (D,).
    period : float or array, default 1.0
        In units of x. One number, or one per column, (D,).

    Notes
    -----
    `k = variance exp(-2 sum_d sin^2(pi (x_d - x'_d) / period_d) / lengthscale_d^2)` (Rasmussen &
    Williams 2006, equation 4.31).

    Examples
    --------
    >>> kernel = pg.kernels.Periodic(period=2.0)
    >>> kernel(np.array([0.0]), np.array([1.0, 2.0])).round(2).tolist()
    [[0.14, 1.0]]
    """

    variance: ArrayLike = 1.0
    lengthscale: ArrayLike = 1.0
    period: ArrayLike = 1.0
    active_dims: ActiveDims = active_dims_field()

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        X1, X2 = input_pair(X1, X2, self.active_dims)
        lengthscale = per_column(self.lengthscale, X1.shape[1], "Periodic(lengthscale=...)")
        period = per_column(self.period, X1.shape[1], "Periodic(period=...)")
        # Only differences count: phases near zero keep the digits that inputs such as years would
        # lose.
        origin = middle(X1)

        def on_circles(X):
            phase = 2.0 * jnp.pi * (X - origin) / period
            return jnp.concatenate([jnp.cos(phase) / lengthscale, jnp.sin(phase) / lengthscale], 1)

        r2 = squared_distance(on_circles(X1), on_circles(X2), X1 is X2)
        return variance_of(self) * jnp.exp(-0.5 * r2)


class White(SameVariance):
    """Kernel of an independent value for each distinct input.

    Parameters
    ----------
    variance : float, default 1.0
        k(x, x).
    active_dims : int or tuple of int, default None
        The columns of X that are used. None is all.

    Notes
    -----
    k(x, x') = variance if x and x' are equal in every active column, else 0. Values count, so a row
    that occurs twice has the same draw both times, and a training input keeps its draw at
    prediction. For independent noise on every datum, duplicates included, use the GP's `jitter` or
    the noise of the likelihood.

    Examples
    --------
    >>> pg.kernels.White(0.5)(np.array([0.0, 1.0]), np.array([1.0])).tolist()
    [[0.0], [0.5]]
    """

    variance: ArrayLike = 1.0
    active_dims: ActiveDims = active_dims_field()

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        X1, X2 = input_pair(X1, X2, self.active_dims)
        equal = jnp.ones((X1.shape[0], X2.shape[0]), bool)
        for d in range(X1.shape[1]):
            equal &= X1[:, d, None] == X2[None, :, d]
        variance = variance_of(self)
        return jnp.where(equal, variance, 0.0).astype(jnp.result_type(X1, X2, variance))


# The Matern correlations as functions of r^2, with their derivatives given: each is the next
# rougher one, finite at r = 0, where differentiating through the square root would divide by zero.
# d/dr2 rho_5/2(r2) = -5/6 rho_3/2(5 r2 / 3),  d/dr2 rho_3/2(r2) = -3/2 rho_1/2(3 r2).


@jax.custom_jvp
def matern12(r2: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp(-r). Its derivative in r^2 is infinite at 0 and is set to 0 there: r does not change
    where x = x'.

    So it is for r^2 below machine epsilon too: the change of r^2 has a rounding error of about that
    size, which 1 / r would blow up. The error made is below sqrt(eps).
    """
    return jnp.exp(-safe_sqrt(r2))


@matern12.defjvp
def _matern12_jvp(primals, tangents):
    (r2,), (dr2,) = primals, tangents
    rho = matern12(r2)
    eps = jnp.finfo(r2.dtype).eps
    slope = -0.5 * rho / jnp.sqrt(jnp.maximum(r2, eps))
    return rho, jnp.where(r2 < eps, 0.0, slope) * dr2


@jax.custom_jvp
def matern32(r2: Float[Array, "..."]) -> Float[Array, "..."]:
    """(1 + s) exp(-s), s = sqrt(3) r."""
    s = safe_sqrt(3.0 * r2)
    return (1.0 + s) * jnp.exp(-s)


@matern32.defjvp
def _matern32_jvp(primals, tangents):
    (r2,), (dr2,) = primals, tangents
    return matern32(r2), -1.5 * matern12(3.0 * r2) * dr2


@jax.custom_jvp
def matern52(r2: Float[Array, "..."]) -> Float[Array, "..."]:
    """(1 + s + s^2 / 3) exp(-s), s = sqrt(5) r."""
    s = safe_sqrt(5.0 * r2)
    return (1.0 + s + s**2 / 3.0) * jnp.exp(-s)


@matern52.defjvp
def _matern52_jvp(primals, tangents):
    (r2,), (dr2,) = primals, tangents
    return matern52(r2), -(5.0 / 6.0) * matern32(5.0 / 3.0 * r2) * dr2


class Linear(Kernel):
    """Kernel of linear functions, f(x) = w . x with w_d ~ N(0, variance_d).

    Parameters
    ----------
    variance : float or array, default 1.0
        Of the weights: one number, or one per column, (D,).
    active_dims : int or tuple of int, default None
        The columns of X that are used. None is all.

    Notes
    -----
    `k(x, x') = sum_d variance_d x_d x'_d`. For an offset, add `Constant(...)`.

    Examples
    --------
    >>> pg.kernels.Linear(2.0)(np.array([1.0, 3.0]), np.array([2.0])).tolist()
    [[4.0], [12.0]]
    """

    finite_rank = True
    variance: ArrayLike = 1.0
    active_dims: ActiveDims = active_dims_field()

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        X1, X2 = input_pair(X1, X2, self.active_dims)
        variance = per_column(self.variance, X1.shape[1], "Linear(variance=...)")
        return product(X1 * variance, X2.T)

    def diag(self, X: ArrayLike) -> Float[Array, "N"]:
        X = as_inputs(X, self.active_dims)
        return jnp.sum(X**2 * per_column(self.variance, X.shape[1], "Linear(variance=...)"), 1)


def _degree(degree) -> int:
    if isinstance(degree, bool) or int(degree) != degree or degree < 1:
        raise DataError(f"Polynomial(degree={degree}) is no positive integer; give 1, 2, 3, ...")
    return int(degree)


class Polynomial(Kernel):
    """Kernel of polynomials of a given degree.

    Parameters
    ----------
    variance : float, default 1.0
        A factor of the kernel.
    degree : int, default 2
        Positive, and fixed when the kernel is made.
    offset : float, default 1.0
        One number that is not negative.
    active_dims : int or tuple of int, default None
        The columns of X that are used. None is all.

    Notes
    -----
    `k(x, x') = variance (x . x' + offset)^degree` (Rasmussen & Williams 2006, section 4.2.2).

    Examples
    --------
    >>> pg.kernels.Polynomial(1.0, degree=2)(np.array([1.0]), np.array([2.0])).tolist()
    [[9.0]]
    """

    finite_rank = True
    variance: ArrayLike = 1.0
    degree: int = eqx.field(default=2, static=True, converter=_degree)
    offset: ArrayLike = 1.0
    active_dims: ActiveDims = active_dims_field()

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Float[Array, "N1 N2"]:
        X1, X2 = input_pair(X1, X2, self.active_dims)
        return self._of_product(product(X1, X2.T))

    def diag(self, X: ArrayLike) -> Float[Array, "N"]:
        return self._of_product(jnp.sum(as_inputs(X, self.active_dims) ** 2, 1))

    def _of_product(self, inner):
        variance = scalar(self.variance, "Polynomial(variance=...)")
        return variance * (inner + scalar(self.offset, "Polynomial(offset=...)")) ** self.degree
