"""Variational Fourier features: RKHS projections of a Matern process on sines and cosines.

Hensman, Durrande, Solin 2018, "Variational Fourier features for Gaussian processes", JMLR 18(151).
"""

from math import sqrt

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_gp.errors import DataError, ModelError
from ppl_gp.kernels import Matern12, Matern32, Matern52
from ppl_gp.numerics.linalg import product
from ppl_gp.sparse.features.structure import as_num, as_numbers, check_box, columns, fitting
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.root import LowRankRoot

# p of the Matern with smoothness p - 1/2: f is then a stochastic differential equation's solution,
# of order p.
_ORDERS = {Matern12: 1, Matern32: 2, Matern52: 3}
# S(w) = variance c_p rate^(2p-1) / (rate^2 + w^2)^p.
_DENSITY = {1: 2.0, 2: 4.0, 3: 16.0 / 3.0}


class FourierFeatures(InducingVariables):
    """u_m = <phi_m, f - m(.)> in the kernel's RKHS on the box [low, high], M = 2 num_frequencies +
    1 of them.

    phi = 1, cos(w_j (x - low)), sin(w_j (x - low)), w_j = 2 pi j / (high - low), j = 1 ..
    num_frequencies. For the Matern of order p (p = 1, 2, 3 for nu = 1/2, 3/2, 5/2), whose prior is
    (d/dt + rate)^p f = white noise with rate = sqrt(2 nu) / lengthscale, started with the
    stationary covariance P of s = (f, f', ..) at `low` (Hartikainen, Sarkka 2010), the inner
    product on the box is

    <g, h> = integral (Lg)(Lh) dt / density + s_g(low)^T P^-1 s_h(low),  L = (d/dt + rate)^p,

    so that K_uu = diag(alpha) + V P^-1 V^T with V = s_phi(low), alpha = (high - low) / 2 / S(w),
    twice that for the constant (the paper writes it out for each p), and K_uf = phi(x) in the box.
    Outside K_uf = V P^-1 Cov[s(end), f(x)] with the nearer end, which decays as the kernel does.
    All of it is exact, so that the bound holds for data and predictions anywhere. K_uf costs O(M
    B); K_uu is diagonal but for rank p, O(M).

    The error k_ff - q_ff has two parts: the tail of the spectrum, which falls as
    num_frequencies^-(2 nu), and one of rank p that no number of frequencies removes, since all phi
    are alike at both ends; it falls as exp(-2 rate d) with the distance d from the ends. So take
    the box a length scale or two wider than the data on both sides; its ends are fixed, not
    trained. u is a functional of f less its mean, so E[u] = 0.

    The kernel is a Matern12, Matern32 or Matern52 of one input column (`active_dims`), times
    constants; else `ModelError`. Sums and products of such: `Additive` and `Kronecker` of these.
    """

    num_frequencies: int = eqx.field(static=True)
    low: float = eqx.field(static=True)
    high: float = eqx.field(static=True)

    def __init__(self, num_frequencies, low, high):
        num, left, right = as_num(num_frequencies), as_numbers(low), as_numbers(high)
        if isinstance(num, tuple) or isinstance(left, tuple) or isinstance(right, tuple):
            raise DataError(
                f"FourierFeatures(num_frequencies={num_frequencies}, low={low}, high={high}) is "
                "for one input column: give three numbers, and combine several columns by "
                "Additive or Kronecker."
            )
        self.num_frequencies, self.low, self.high = num, left, right
        check_box(self.low, self.high, "FourierFeatures")

    @property
    def num(self):
        return 2 * self.num_frequencies + 1

    def root(self, prior) -> LowRankRoot:
        """A root of Cov[u], diagonal and a few columns (Hensman et al. 2018)."""
        variance, rate, order, _ = self._process(prior, prior.X)
        w = jnp.asarray(self._frequencies(), rate.dtype)
        density = variance * _DENSITY[order] * rate ** (2 * order - 1) / (rate**2 + w**2) ** order
        half = 0.5 * (self.high - self.low) / density
        alpha = jnp.concatenate([2.0 * half[:1], half[1:], half[1:]])
        return LowRankRoot(alpha, self._edge(rate, order) / jnp.sqrt(variance))

    def cross(self, prior, X) -> Float[Array, "M B"]:
        """Cov[u, f(X)]: the waves inside the interval, decaying outside of it."""
        _, rate, order, x = self._process(prior, X)
        nearest = jnp.clip(x, self.low, self.high)
        phase = jnp.asarray(self._frequencies(), x.dtype)[:, None] * (nearest - self.low)
        inside = jnp.concatenate([jnp.cos(phase), jnp.sin(phase[1:])])
        outside = product(self._edge(rate, order), _edge_covariance(order, rate, x - nearest))
        return jnp.where(x == nearest, inside, outside)

    def _process(self, prior, X):
        """(variance, rate, p, x (B,)): the kernel as a Markov process, and its input column."""
        variance, core = fitting(prior.kernel, tuple(_ORDERS), "FourierFeatures")
        order = _ORDERS[type(core)]
        X, lengthscale = columns(core, X)
        if X.shape[1] != 1:
            raise ModelError(
                f"FourierFeatures has no form for the kernel {core!r} of {X.shape[1]} input "
                "columns: give it active_dims=d, and combine several by Additive or Kronecker; "
                "or use Points(Z)."
            )
        return variance, sqrt(2 * order - 1) / lengthscale[0], order, X[:, 0]

    def _frequencies(self):
        return 2.0 * np.pi * np.arange(self.num_frequencies + 1) / (self.high - self.low)

    def _edge(self, rate, order):
        """V C, (M, p), C C^T = variance P^-1, V of (phi, phi' / rate, phi'' / rate^2) at an end."""
        w = jnp.asarray(self._frequencies(), rate.dtype) / rate
        one, zero = jnp.ones_like(w), jnp.zeros_like(w[1:])
        value, slope = jnp.concatenate([one, zero]), jnp.concatenate([0.0 * one, w[1:]])
        bend = jnp.concatenate([-(w**2), zero])
        return product(
            jnp.stack([value, slope, bend][:order], 1), _stationary_factor(order, rate.dtype)
        )


def _stationary_factor(order, dtype):
    """C, (p, p), C C^T = P^-1 of a process with variance and rate one; P = [[1, 0, -1/3], [0, 1/3,
    0], [-1/3, 0, 1]] for p = 3.
    """
    if order < 3:
        return jnp.eye(order, dtype=dtype)
    return jnp.array(
        [[sqrt(9 / 8), 0.0, 0.0], [0.0, sqrt(3.0), 0.0], [sqrt(1 / 8), 0.0, 1.0]], dtype
    )


def _edge_covariance(order, rate, beyond):
    """C^T Cov[s(edge), f(x)] / variance, (p, B), x at the signed distance `beyond` from the end."""
    z = rate * jnp.abs(beyond)
    # Derivatives of the correlation in z; those of f(edge) are in the edge, so the odd one turns
    # its sign to the left.
    shapes = {
        1: [jnp.ones_like(z)],
        2: [1.0 + z, -z],
        3: [1.0 + z + z**2 / 3.0, -(z + z**2) / 3.0, (z**2 - z - 1.0) / 3.0],
    }[order]
    signs = [jnp.ones_like(z), jnp.where(beyond > 0, -1.0, 1.0), jnp.ones_like(z)]
    jet = jnp.stack([s * shape for s, shape in zip(signs, shapes, strict=False)]) * jnp.exp(-z)
    return product(_stationary_factor(order, z.dtype).T, jet)
