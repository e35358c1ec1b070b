"""Kernels (covariance functions) and their sums and products.

The order of parameters is variance, length scale, and then what is particular to the kernel.
"""

from ppl_gp.kernels.base import CallableKernel, Constant, Kernel, Product, Sum, as_kernel
from ppl_gp.kernels.derivative import (
    MeanWithDerivatives,
    WithDerivatives,
    derivative_inputs,
    value_inputs,
)
from ppl_gp.kernels.stationary import (
    RBF,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Polynomial,
    RationalQuadratic,
    White,
)

__all__ = [
    "RBF",
    "Matern12",
    "Matern32",
    "Matern52",
    "RationalQuadratic",
    "Periodic",
    "Linear",
    "Polynomial",
    "Constant",
    "White",
    "WithDerivatives",
    "MeanWithDerivatives",
    "value_inputs",
    "derivative_inputs",
    "Sum",
    "Product",
    "Kernel",
    "CallableKernel",
    "as_kernel",
]
