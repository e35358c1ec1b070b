"""Kernels of the inner product x . x': linear and polynomial functions."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ppl_gp.errors import DataError
from ppl_gp.kernels.base import (
    ActiveDims,
    Kernel,
    active_dims_field,
    as_inputs,
    input_pair,
    per_column,
    scalar,
)
from ppl_gp.numerics.linalg import product


class Linear(Kernel):
    """k(x, x') = sum_d variance_d x_d x'_d: f(x) = w . x with w_d ~ N(0, variance_d).

    `variance` is one number or one for each input, (D,). An offset is `Linear(...) +
    Constant(...)`.
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
        raise DataError(
            f"Polynomial(degree={degree}) is no positive integer; give degree = 1, 2, 3, ..."
        )
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
