"""Variational Fourier features: RKHS projections of a Matern process on sines and cosines.

Hensman, Durrande, Solin 2018, "Variational Fourier features for Gaussian processes", JMLR 18(151).

Laplacian eigenfunctions on a box: the Hilbert-space approximation of a stationary kernel as
inducing variables.

Solin, Sarkka 2020, "Hilbert space methods for reduced-rank Gaussian process regression", Statistics
and Computing 30; Riutort-Mayol et al. 2023 on the choice of the box.

Eigenfunctions of the RBF kernel under a Gaussian input measure: orthogonal inducing variables in
closed form.

Rasmussen & Williams 2006, section 4.3.1; Zhu, Williams, Rohwer, Morciniec 1998; Burt, Rasmussen,
van der Wilk 2019 for their use as inducing variables.
"""

from functools import reduce
from math import sqrt
from operator import mul

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float
from numpyro.contrib.hsgp.spectral_densities import (
    spectral_density_matern,
    spectral_density_squared_exponential,
)

from ppl_gp.errors import DataError, ModelError
from ppl_gp.kernels import RBF, Matern12, Matern32, Matern52
from ppl_gp.kernels.base import safe_sqrt
from ppl_gp.numerics.linalg import product
from ppl_gp.sparse.families import LowRankRoot
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
from ppl_gp.sparse.inducing import InducingVariables

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
