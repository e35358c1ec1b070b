"""Laplacian eigenfunctions on a box: the Hilbert-space approximation of a stationary kernel as
inducing variables.

Solin, Sarkka 2020, "Hilbert space methods for reduced-rank Gaussian process regression", Statistics
and Computing 30; Riutort-Mayol et al. 2023 on the choice of the box.
"""

from functools import reduce
from operator import mul

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.contrib.hsgp.spectral_densities import (
    spectral_density_matern,
    spectral_density_squared_exponential,
)

from ppl_gp.kernels import RBF, Matern12, Matern32, Matern52
from ppl_gp.kernels.distance import safe_sqrt
from ppl_gp.sparse.features.structure import (
    Eigenfunctions,
    Numbers,
    as_num,
    as_numbers,
    check_box,
    columns,
    fitting,
    multi_indices,
    per_dimension,
)

_SMOOTHNESS = {Matern12: 0.5, Matern32: 1.5, Matern52: 2.5}


class LaplacianFeatures(Eigenfunctions):
    """Cov[u] = I and Cov[u_j, f(x)] = sqrt(S(w_j)) phi_j(x), taken as the approximation k ~ sum_j
    S(w_j) phi_j phi_j.

    phi_j(x) = prod_d sqrt(2 / (high_d - low_d)) sin(w_jd (x_d - low_d)), w_jd = pi j_d / (high_d -
    low_d), j_d >= 1 (eq. 56); S is the kernel's spectral density (eq. 20). In the box; outside
    cov[u, f] = 0, so that q(f) is the prior.

    **What holds.** u is no functional of f under k: the joint covariance of u and f is not positive
    semi-definite, except for a Matern12 of one column; hence `is_exact` is False and the bound is
    none on the evidence under k. With q_xx' = Cov[f(x), u] Cov[u, f(x')] it is a strict bound on
    the evidence of a GP with another kernel, q_xx' + [x = x'] (k_xx - q_xx): the reduced-rank one
    with the lost variance put back as independent noise on each value of f. That is a GP as k_xx >=
    q_xx at every x, for these kernels and any M: in one column, by images, q_xx <= k(0) + 2 sum_n
    k(4nL) - sum_n k(2x + 2L + 4nL) <= k(0) with L the half width, x from the middle; all four
    kernels are positive mixtures of products of such. So no marginal variance is negative, but a
    joint covariance of several values, k_xx' - A^T P A, may be indefinite: take the other kernel's
    there. The approximation's error comes from M and from the edges, where f is pulled to 0 over
    about a length scale. Take a box wider than the data by one or two length scales on each side,
    and w_M lengthscale > 3 or so.

    `num` as an integer takes the M lowest eigenvalues of the box's Laplacian; as a tuple, the full
    grid (j_d <= num_d). `low`, `high` are one number or one a column, and fixed. The kernel is an
    RBF or Matern (length scales for each column and `active_dims` included), times constants; else
    `ModelError`. K_uf costs O(D M B); nothing is factored.
    """

    kinds = (RBF, *_SMOOTHNESS)
    is_exact = False
    low: Numbers = eqx.field(static=True)
    high: Numbers = eqx.field(static=True)

    def __init__(self, num, low, high):
        self.size, self.low, self.high = as_num(num), as_numbers(low), as_numbers(high)
        check_box(self.low, self.high, "LaplacianFeatures")

    def cross(self, prior, X) -> Float[Array, "M B"]:
        """Cov[u, f(X)]: eigenfunctions times roots of the spectral density."""
        variance, core = fitting(prior.kernel, self.kinds, "LaplacianFeatures")
        X, lengthscale = columns(core, X)
        D, name = X.shape[1], "LaplacianFeatures' box"
        low, high = (per_dimension(edge, D, name) for edge in (self.low, self.high))
        w = _frequencies(self.size, high - low)
        density = _spectral_density(core, jnp.asarray(w, X.dtype), variance, lengthscale)
        # safe_sqrt: an RBF's density underflows to 0 at high frequencies, where a plain root has no
        # derivative.
        return safe_sqrt(density)[:, None] * _eigenfunctions(w, low, high, X)


def _frequencies(size, width):
    """w, (M, D)."""
    cost = lambda d, j: ((j + 1) * width.min() / width[d]) ** 2  # noqa: E731
    index = multi_indices(size, len(width), cost, "LaplacianFeatures")
    return np.pi * (index + 1) / width


def _spectral_density(core, w, variance, lengthscale):
    D = w.shape[1]
    if isinstance(core, RBF):
        return spectral_density_squared_exponential(D, w, variance, lengthscale)
    return spectral_density_matern(D, _SMOOTHNESS[type(core)], w, variance, lengthscale)


def _eigenfunctions(w, low, high, X):
    w, low, high = (jnp.asarray(a, X.dtype) for a in (w, low, high))
    wave = lambda d: jnp.sin(w[:, d, None] * (X[:, d] - low[d]))  # noqa: E731
    phi = (jnp.sqrt(2.0 / (high[d] - low[d])) * wave(d) for d in range(len(low)))
    return jnp.where(jnp.all((X >= low) & (X <= high), 1), reduce(mul, phi), 0.0)
