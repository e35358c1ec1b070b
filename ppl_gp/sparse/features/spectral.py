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

# p of the Matern with smoothness p - 1/2: f solves a stochastic differential equation of order p
_ORDERS = {Matern12: 1, Matern32: 2, Matern52: 3}
# S(w) = variance c_p rate^(2p-1) / (rate^2 + w^2)^p.
_DENSITY = {1: 2.0, 2: 4.0, 3: 16.0 / 3.0}


class FourierFeatures(InducingVariables):
    """Fourier features of a Matern kernel of one input column, on an interval.

    Projections of f on a constant, sines and cosines. Their covariance is nearly diagonal, so
    nothing of size M x M is factored, and the bound is exact for data and predictions anywhere.

    Parameters
    ----------
    num_frequencies : int
        Number of frequencies. There are M = 2 num_frequencies + 1 features.
    low, high : float
        Ends of the interval, in the units of the input. They are fixed. Take them one or two length
        scales beyond the data on each side.

    Raises
    ------
    DataError
        Unless `low < high`, and all are single numbers.
    ModelError
        In `fit`, unless the kernel is a `Matern12`, `Matern32` or `Matern52` of one column
        (`active_dims`), times constants. For sums and products use `Additive` and `Kronecker`.

    Notes
    -----
    `u_m = <phi_m, f - mean>` in the kernel's reproducing-kernel Hilbert space, so E[u] = 0, with
    `phi = 1, cos(w_j (x - low)), sin(w_j (x - low))` and `w_j = 2 pi j / (high - low)`. Inside the
    interval `Cov[u, f(x)] = phi(x)`. Outside, it decays as the kernel does. Cov[u] is diagonal plus
    rank p, for p = 1, 2, 3 in the order of the kernels above. Cov[u, f] costs O(M B) for B rows.

    What the features miss has two parts. The tail of the spectrum falls as num_frequencies^-(2 nu),
    for smoothness nu = p - 1/2. The other part stays for any number of frequencies, because all phi
    are alike at both ends. It falls as exp(-2 sqrt(2 nu) d / lengthscale) with the distance d from
    the ends.

    Source: Hensman, Durrande & Solin (2018).

    Examples
    --------
    >>> waves = pg.features.FourierFeatures(40, -5.0, 15.0)
    >>> method = pg.CollapsedSVGP(inducing=waves)
    >>> waves.num
    81
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
        """A root of Cov[u]: diagonal and a few columns (Hensman et al. 2018)."""
        variance, rate, order, _ = self._process(prior, prior.X)
        w = jnp.asarray(self._frequencies(), rate.dtype)
        density = variance * _DENSITY[order] * rate ** (2 * order - 1) / (rate**2 + w**2) ** order
        half = 0.5 * (self.high - self.low) / density
        alpha = jnp.concatenate([2.0 * half[:1], half[1:], half[1:]])
        return LowRankRoot(alpha, self._edge(rate, order) / jnp.sqrt(variance))

    def cross(self, prior, X) -> Float[Array, "M B"]:
        """Cov[u, f(X)]: the waves inside the interval, and a decay outside."""
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
        V = jnp.stack([value, slope, bend][:order], 1)
        return product(V, _stationary_factor(order, rate.dtype))


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
    """Eigenfunctions of the Laplacian on a box: a reduced-rank stationary kernel.

    The kernel is approximated, so the bound is one for the approximate kernel, and `is_exact` is
    False.

    Parameters
    ----------
    num : int or tuple of int
        Number M of features: those of the lowest eigenvalues. A tuple takes the full grid, with one
        number per input column.
    low, high : float or tuple of float
        Edges of the box, in the units of the inputs, one number or one per column. They are fixed.
        Take them one or two length scales beyond the data on each side.

    Raises
    ------
    DataError
        Unless `num` is positive and `low < high` in each column.
    ModelError
        In `fit`, unless the kernel is an `RBF` or Matern, times constants. Length scales per column
        and `active_dims` are allowed.

    Notes
    -----
    `k(x, x') ~ sum_j S(w_j) phi_j(x) phi_j(x')` with the spectral density S of the kernel,
    `phi_j(x) = prod_d sqrt(2 / (high_d - low_d)) sin(w_jd (x_d - low_d))` and `w_jd = pi j_d /
    (high_d - low_d)`. So Cov[u] = I and `Cov[u_j, f(x)] = sqrt(S(w_j)) phi_j(x)` in the box.
    Outside it is 0, and q(f) is the prior. Cov[u, f] costs O(D M B) for B rows, and nothing is
    factored.

    The bound is strict for the GP whose covariance is that sum, with the lost variance added as
    independent noise on each value of f. No marginal variance is negative. A joint covariance of
    several values may be indefinite, and the approximate kernel's is used there. Errors come from
    M, and from the edges, where f is pulled to 0 over about a length scale. The highest frequency
    should be above about 3 / lengthscale.

    Sources: Solin & Särkkä (2020), eqs. 20 and 56; Riutort-Mayol et al. (2023) on the choice of the
    box.

    Examples
    --------
    >>> boxes = pg.features.LaplacianFeatures((8, 8), low=-3.0, high=(3.0, 5.0))
    >>> boxes.num, boxes.is_exact
    (64, False)
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
        # an RBF's density underflows to 0, where a plain root has no derivative
        return safe_sqrt(density)[:, None] * _eigenfunctions(w, low, high, X)


def _frequencies(size, width):
    """w, (M, D)."""
    cost = lambda d, j: ((j + 1) * width.min() / width[d]) ** 2  # noqa: E731
    return np.pi * (multi_indices(size, len(width), cost, "LaplacianFeatures") + 1) / width


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
    """Eigenfunctions of the RBF kernel under a Gaussian measure of the inputs.

    Their covariance is the identity, and the bound is strict wherever the data are. It is tight if
    the inputs are roughly Gaussian.

    Parameters
    ----------
    num : int or tuple of int
        Number M of features: those of the lowest total degree. A tuple takes the full grid, with
        one number per input column, for example more for the columns with shorter length scales.
    mean, scale : float or tuple of float, default 0.0, 1.0
        Mean and standard deviation of the measure, in the units of the inputs, one number or one
        per column. They are fixed. Take those of the data, or a somewhat larger scale.

    Raises
    ------
    DataError
        Unless `num` and `scale` are positive.
    ModelError
        In `fit`, unless the kernel is an `RBF`, times constants. Length scales per column and
        `active_dims` are allowed.

    Notes
    -----
    `u_m = lambda_m^(-1/2) int (f(x) - m(x)) phi_m(x) N(x; mean, scale^2) dx` with eigenvalues
    lambda_m and eigenfunctions phi_m of the kernel, so Cov[u] = I, E[u] = 0 and `Cov[u_m, f(x)] =
    sqrt(lambda_m) phi_m(x)`. The variance that is missing, averaged over the measure, is the sum of
    the eigenvalues left out, which fall geometrically. The lowest total degrees are the largest
    eigenvalues if the ratios of length scale to `scale` are alike in all columns. Cov[u, f] costs
    O(D M B) for B rows, and nothing is factored.

    Sources: Rasmussen & Williams (2006), section 4.3.1; Zhu et al. (1998); Burt, Rasmussen & van
    der Wilk (2019).

    Examples
    --------
    >>> pg.features.MercerFeatures(30, mean=5.0, scale=2.0).num
    30
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
