"""Kernels of the difference x - x'. `variance` is k(x, x), `lengthscale` is one number or one for
each input, (D,).

Kernels of the inner product x . x': linear and polynomial functions.
"""

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
    """k = variance exp(-r^2 / 2), the squared exponential (Rasmussen & Williams 2006, eq. 4.9)."""

    def correlation(self, r2: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.exp(-0.5 * r2)


class Matern12(Isotropic):
    """k = variance exp(-r), exponential (Rasmussen & Williams 2006, eq. 4.18 with gamma = 1)."""

    def correlation(self, r2: Float[Array, "..."]) -> Float[Array, "..."]:
        return matern12(r2)


class Matern32(Isotropic):
    """k = variance (1 + s) exp(-s), s = sqrt(3) r (Rasmussen & Williams 2006, eq. 4.17)."""

    def correlation(self, r2: Float[Array, "..."]) -> Float[Array, "..."]:
        return matern32(r2)


class Matern52(Isotropic):
    """k = variance (1 + s + s^2/3) exp(-s), s = sqrt(5) r (Rasmussen & Williams 2006, eq. 4.17)."""

    def correlation(self, r2: Float[Array, "..."]) -> Float[Array, "..."]:
        return matern52(r2)


class RationalQuadratic(Isotropic):
    """k = variance (1 + r^2 / (2 alpha))^(-alpha) (Rasmussen & Williams 2006, eq. 4.19): RBFs of
    many length scales.
    """

    alpha: ArrayLike = 1.0

    def correlation(self, r2: Float[Array, "..."]) -> Float[Array, "..."]:
        alpha = scalar(self.alpha, "RationalQuadratic(alpha=...)")
        return jnp.exp(-alpha * jnp.log1p(r2 / (2.0 * alpha)))


class Periodic(SameVariance):
    """k = variance exp(-2 sum_d sin^2(pi (x_d - x'_d) / period_d) / lengthscale_d^2).

    Rasmussen & Williams 2006, eq. 4.31. `period` is in units of x, `lengthscale` a pure number;
    each is one number or (D,). Computed as an RBF of points u on circles, |u - u'| = 2 |sin(pi (x -
    x') / period)|.
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
    """k(x, x') = variance where x and x' are equal in every (active) column, else 0.

    Equality of values, not of array objects, so the kernel means the same under jit and for any
    split of the data: a row that occurs twice has the same draw both times, and a training input
    met again at prediction keeps its draw. For independent noise on every datum, duplicates
    included, use the GP's `jitter` or the likelihood's own noise.
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
    """k(x, x') = sum_d variance_d x_d x'_d: f(x) = w . x with w_d ~ N(0, variance_d).

    `variance` is one number or one for each input, (D,). For an offset add `Constant(...)`.
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
    """k(x, x') = variance (x . x' + offset)^degree (Rasmussen & Williams 2006, section 4.2.2).

    `degree` is a positive integer, fixed when the kernel is made; `offset` >= 0 is one number.
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
