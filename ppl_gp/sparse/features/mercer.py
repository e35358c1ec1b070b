"""Eigenfunctions of the RBF kernel under a Gaussian input measure: orthogonal inducing variables in
closed form.

Rasmussen & Williams 2006, section 4.3.1; Zhu, Williams, Rohwer, Morciniec 1998; Burt, Rasmussen,
van der Wilk 2019 for their use as inducing variables.
"""

from functools import reduce
from operator import mul

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.errors import DataError
from ppl_gp.kernels import RBF
from ppl_gp.sparse.features.structure import (
    Eigenfunctions,
    Numbers,
    as_num,
    as_numbers,
    columns,
    fitting,
    multi_indices,
    per_dimension,
)


class MercerFeatures(Eigenfunctions):
    """u_m = lambda_m^(-1/2) integral (f(x) - m(x)) phi_m(x) N(x; mean, scale^2) dx: Cov[u] = I,
    E[u] = 0.

    phi_m are the kernel's eigenfunctions under that measure, integral k(x, t) phi_m(t) p(t) dt =
    lambda_m phi_m(x), so Cov[u_m, f(x)] = sqrt(lambda_m) phi_m(x); scaled by lambda_m^(-1/2), since
    lambda_m itself underflows for large m. These are true functionals of f: the bound is strict,
    wherever the data are. It is tight where the measure puts the data; k_nn - q_nn summed over the
    measure is the sum of the eigenvalues left out, which fall as B^m (eq. 4.39).

    In D dimensions eigenvalues and eigenfunctions are products. `num` as an integer takes the M
    multi-indices of lowest total degree, ties in lexicographic order: those of the M largest
    eigenvalues where the columns' ratios of length scale to `scale` are alike, and independent of
    the hyperparameters, which are traced. `num` as a tuple takes the full grid, with more functions
    for the columns that need more. `mean` and `scale` are one number or one a column, and are
    fixed; take the data's mean and standard deviation, or somewhat more.

    The kernel is an RBF (length scales for each column and `active_dims` included), times
    constants; else `ModelError`. K_uf costs O(D M B); nothing is factored.
    """

    kinds = (RBF,)
    measure_mean: Numbers = eqx.field(static=True)
    scale: Numbers = eqx.field(static=True)

    def __init__(self, num, mean=0.0, scale=1.0):
        self.size, self.measure_mean, self.scale = as_num(num), as_numbers(mean), as_numbers(scale)
        if np.any(np.asarray(self.scale) <= 0):
            raise DataError(
                f"MercerFeatures(scale={scale}) is not positive; give the inputs' standard "
                "deviation."
            )

    def cross(self, prior, X) -> Float[Array, "M B"]:
        """Cov[u, f(X)]: eigenfunctions times roots of the eigenvalues."""
        variance, core = fitting(prior.kernel, self.kinds, "MercerFeatures")
        X, lengthscale = columns(core, X)
        D = X.shape[1]
        mean = per_dimension(self.measure_mean, D, "MercerFeatures(mean=...)")
        scale = per_dimension(self.scale, D, "MercerFeatures(scale=...)")
        index = multi_indices(self.size, D, lambda d, j: float(j), "MercerFeatures")

        def factor(d):
            x, num = X[:, d] - float(mean[d]), int(index[:, d].max()) + 1
            return eigenfunctions(x, lengthscale[d], float(scale[d]), num)[index[:, d]]

        return jnp.sqrt(variance) * reduce(mul, map(factor, range(D)))


def eigenfunctions(
    x: Float[Array, "B"], lengthscale: Float[Array, ""], scale: float, num: int
) -> Float[Array, "{num} B"]:
    """sqrt(lambda_m) phi_m(x), m = 0 .. num - 1, of exp(-(x - x')^2 / (2 lengthscale^2)) under N(0,
    scale^2).

    With a = 1 / (4 scale^2), b = 1 / (2 lengthscale^2), c = sqrt(a^2 + 2ab), B = b / (a + b + c), z
    = sqrt(2c) x (R&W 4.39, 4.40, normalised): row 0 is (2c / (a + b + c))^(1/4) exp(-(c - a) x^2),
    and the recurrence of Hermite polynomials gives row m + 1 = sqrt(2 B / (m + 1)) z row m - B
    sqrt(m / (m + 1)) row m-1. Every row is at most 1 in size, but row 0 may underflow where later
    ones do not: two rows are carried along, and their scale in log.
    """
    a, b = 0.25 / scale**2, 0.5 / lengthscale**2
    c = jnp.sqrt(a**2 + 2.0 * a * b)
    ratio = b / (a + b + c)
    step = jnp.sqrt(2.0 * ratio) * jnp.sqrt(2.0 * c) * x
    log_first = 0.25 * jnp.log(2.0 * c / (a + b + c)) - 2.0 * a * b / (a + c) * x**2

    def advance(carry, m):
        previous, current, log_scale = carry
        following = step * current / jnp.sqrt(m + 1.0) - ratio * jnp.sqrt(m / (m + 1.0)) * previous
        # Any positive number serves as the scale; held fixed, it drops out of the derivative too.
        size = lax.stop_gradient(jnp.maximum(jnp.abs(current), jnp.abs(following)))
        size = jnp.maximum(size, jnp.finfo(x.dtype).tiny)
        row = current * jnp.exp(log_scale)
        return (current / size, following / size, log_scale + jnp.log(size)), row

    start = (jnp.zeros_like(step), jnp.ones_like(step), log_first)
    return lax.scan(advance, start, jnp.arange(num, dtype=x.dtype))[1]
