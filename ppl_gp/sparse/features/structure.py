"""What features ask of a kernel: its terms, its factors, its scale, and that it is of a kind that
they fit.
"""

from math import prod
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.errors import ModelError
from ppl_gp.kernels import Constant, Product, Sum
from ppl_gp.kernels.inputs import as_inputs, per_column, scalar
from ppl_gp.kernels.stationary import Isotropic


def sum_terms(kernel: Any) -> list[Any]:
    """k = k_1 + k_2 + ...; a constant in front of a sum goes to each term."""
    if isinstance(kernel, Sum):
        return sum_terms(kernel.left) + sum_terms(kernel.right)
    scale, core = scaled(kernel)
    return (
        [Product(Constant(scale), term) for term in sum_terms(core)]
        if isinstance(core, Sum)
        else [kernel]
    )


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
    return (
        ([scalar(kernel.variance, "Constant(variance=...)")], [])
        if isinstance(kernel, Constant)
        else ([], [kernel])
    )


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
    return scale * scalar(core.variance, f"{type(core).__name__}(variance=...)"), core


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
    X = as_inputs(X, core.active_dims)
    lengthscale = per_column(
        core.lengthscale, X.shape[1], f"{type(core).__name__}(lengthscale=...)"
    )
    return X, jnp.broadcast_to(lengthscale, (X.shape[1],)).astype(jnp.result_type(X, lengthscale))
