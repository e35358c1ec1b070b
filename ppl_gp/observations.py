"""Distributions of observations that NumPyro lacks: binary, ordinal and multinomial probit."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp, ndtr
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample

from ppl_gp.errors import DataError
from ppl_gp.kernels.base import floating
from ppl_gp.numerics.quadrature import log_ndtr

__all__ = ["BernoulliProbit", "MultinomialProbit", "OrdinalProbit"]


class OfClasses(Distribution):
    """y in {0, ..., num_classes - 1}."""

    has_enumerate_support = True
    num_classes: int

    @constraints.dependent_property(is_discrete=True, event_dim=0)  # pyright: ignore[reportArgumentType]
    def support(self):
        return constraints.integer_interval(0, self.num_classes - 1)

    def enumerate_support(self, expand: bool = True) -> Int[Array, "..."]:
        values = jnp.arange(self.num_classes).reshape((-1,) + (1,) * len(self.batch_shape))
        return jnp.broadcast_to(values, (self.num_classes, *self.batch_shape)) if expand else values


class BernoulliProbit(OfClasses):
    """Binary observations with a probit link: p(y = 1 | f) = Phi(f).

    Parameters
    ----------
    f : array
        The function at each row, of the batch shape.
    validate_args : bool, default None
        Whether NumPyro checks values.

    Notes
    -----
    Phi is the standard normal distribution function. log p = log Phi((2 y - 1) f) is computed
    without a probability. It and its first two derivatives are finite and accurate for |f| < 1e150
    in float64. For labels that are flipped with probability e, mix it with `Bernoulli(0.5)` at
    weight 2 e.

    Examples
    --------
    >>> observed = pg.observations.BernoulliProbit(jnp.array([0.0, 1.0]))
    >>> jnp.exp(observed.log_prob(jnp.array([1, 1]))).round(2).tolist()
    [0.5, 0.84]
    """

    arg_constraints = {"f": constraints.real}
    support = constraints.boolean  # pyright: ignore[reportAssignmentType]
    pytree_data_fields = ("f",)
    num_classes = 2

    def __init__(self, f: ArrayLike, *, validate_args: bool | None = None):
        self.f = floating(f)
        super().__init__(batch_shape=jnp.shape(self.f), validate_args=validate_args)

    def sample(self, key: jax.Array, sample_shape: tuple[int, ...] = ()) -> Int[Array, "..."]:
        draws = random.bernoulli(key, ndtr(self.f), sample_shape + self.batch_shape)
        return draws.astype(jnp.result_type(int))

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Float[Array, "..."]:
        return log_ndtr((2.0 * jnp.asarray(value, self.f.dtype) - 1.0) * self.f)

    @property
    def mean(self) -> Float[Array, "..."]:
        return ndtr(self.f)

    @property
    def variance(self) -> Float[Array, "..."]:
        return ndtr(self.f) * ndtr(-self.f)


class OrdinalProbit(OfClasses):
    """Ordered outcomes 0, ..., K - 1: the interval between cutpoints into which a noisy f falls.

    Parameters
    ----------
    f : array
        The function at each row, of the batch shape.
    cutpoints : array
        (..., K - 1), increasing.
    validate_args : bool, default None
        Whether NumPyro checks values.

    Notes
    -----
    `p(y = k | f) = Phi(c_k - f) - Phi(c_{k-1} - f)`, with c_{-1} = -inf and c_{K-1} = inf (Chu &
    Ghahramani 2005, equations 2-4). It is computed in log space, in the tail in which the
    difference does not cancel. The log density and its derivatives stay finite however far f is
    from the interval, while c - f tells the cutpoints apart. For a noise scale s, divide f and
    cutpoints by s.

    Examples
    --------
    >>> observed = pg.observations.OrdinalProbit(jnp.zeros(1), jnp.array([-1.0, 1.0]))
    >>> jnp.exp(observed.log_prob(jnp.array([1]))).round(2).tolist()
    [0.68]
    """

    arg_constraints = {"f": constraints.real, "cutpoints": constraints.ordered_vector}
    pytree_data_fields = ("f", "cutpoints")

    def __init__(self, f: ArrayLike, cutpoints: ArrayLike, *, validate_args: bool | None = None):
        f, cutpoints = floating(f), floating(cutpoints)
        if cutpoints.shape[-1:] in ((), (0,)):
            raise DataError(
                f"OrdinalProbit(cutpoints=...) has shape {cutpoints.shape}; K >= 2 classes need "
                "(..., K - 1)."
            )
        batch_shape = lax.broadcast_shapes(jnp.shape(f), jnp.shape(cutpoints)[:-1])
        self.f = jnp.broadcast_to(f, batch_shape)
        self.cutpoints = jnp.broadcast_to(cutpoints, batch_shape + cutpoints.shape[-1:])
        super().__init__(batch_shape=batch_shape, validate_args=validate_args)

    @property
    def num_classes(self) -> int:
        """K."""
        return self.cutpoints.shape[-1] + 1

    def sample(self, key: jax.Array, sample_shape: tuple[int, ...] = ()) -> Int[Array, "..."]:
        noisy = self.f + random.normal(key, sample_shape + self.batch_shape, self.f.dtype)
        return jnp.sum(noisy[..., None] > self.cutpoints, -1)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Float[Array, "..."]:
        """log p(y = k | f) in nats, accurate in both tails."""
        value = jnp.asarray(value, int)
        last = self.cutpoints.shape[-1]
        upper = self._cutpoint(jnp.clip(value, 0, last - 1)) - self.f
        lower = self._cutpoint(jnp.clip(value - 1, 0, last - 1)) - self.f
        inside = (value > 0) & (value < last)
        ends = jnp.where(inside, lower, -1.0), jnp.where(inside, upper, 1.0)
        between = _log_ndtr_difference(*ends)
        return jnp.where(inside, between, log_ndtr(jnp.where(value == 0, upper, -lower)))

    def _cutpoint(self, index):
        shape = lax.broadcast_shapes(jnp.shape(index), self.cutpoints.shape[:-1])
        cutpoints = jnp.broadcast_to(self.cutpoints, shape + self.cutpoints.shape[-1:])
        return jnp.take_along_axis(cutpoints, jnp.broadcast_to(index, shape)[..., None], -1)[..., 0]

    @property
    def mean(self) -> Float[Array, "..."]:
        return jnp.sum(self._exceedance(), -1)

    @property
    def variance(self) -> Float[Array, "..."]:
        # E[y^2] = sum_k (2 k + 1) P(y > k).
        P = self._exceedance()
        return jnp.sum((2.0 * jnp.arange(P.shape[-1]) + 1.0) * P, -1) - jnp.sum(P, -1) ** 2

    def _exceedance(self):
        """P(y > k), (..., K - 1)."""
        return ndtr(self.f[..., None] - self.cutpoints)


def _log_ndtr_difference(a, b):
    """log(Phi(b) - Phi(a)), a < b, in the lower tail: log Phi(b) + log(1 - Phi(a) / Phi(b))."""
    mirrored = a + b > 0.0
    a, b = jnp.where(mirrored, -b, a), jnp.where(mirrored, -a, b)
    log_b = log_ndtr(b)
    return log_b + jnp.log(-jnp.expm1(log_ndtr(a) - log_b))


_NODES = 24  # log p to 1e-9 and better, see tests
_STEPS = 8  # of Newton's method to the integrand's mode; the rule forgives a centre that is off


class MultinomialProbit(OfClasses):
    """Classes 0, ..., C - 1 with a probit link: the largest of C noisy functions wins.

    Parameters
    ----------
    f : array
        The functions, (..., C), like the logits of a `Categorical`.
    validate_args : bool, default None
        Whether NumPyro checks values.

    Raises
    ------
    DataError
        If f does not have a last axis of two or more classes.

    Notes
    -----
    `y = argmax_c (f_c + e_c)` with independent `e_c ~ N(0, 1)`. `p(y = c | f) = E_u prod_{j != c}
    Phi(u + f_c - f_j)` with `u ~ N(0, 1)`. The integral over u uses 24 Gauss-Hermite nodes about
    the mode of its log-concave integrand, in O(C) each. The log density and its derivatives are
    accurate however unlikely c is. Two classes are `BernoulliProbit((f_1 - f_0) / sqrt(2))`.
    Sources: Girolami & Rogers (2006); Riihimaki, Jylanki & Vehtari (2013), equation 3.

    Examples
    --------
    >>> observed = pg.observations.MultinomialProbit(jnp.array([[0.0, 0.0, 1.0]]))
    >>> observed.probs.round(2).tolist()
    [[0.18, 0.18, 0.63]]
    """

    arg_constraints = {"f": constraints.real_vector}
    pytree_data_fields = ("f",)

    def __init__(self, f: ArrayLike, *, validate_args: bool | None = None):
        self.f = floating(f)
        if self.f.ndim == 0 or self.f.shape[-1] < 2:
            raise DataError(
                f"MultinomialProbit(f) has shape {self.f.shape}; C >= 2 classes need (..., C)."
            )
        super().__init__(batch_shape=self.f.shape[:-1], validate_args=validate_args)

    @property
    def num_classes(self) -> int:
        """C."""
        return self.f.shape[-1]

    def sample(self, key: jax.Array, sample_shape: tuple[int, ...] = ()) -> Int[Array, "..."]:
        noise = random.normal(key, sample_shape + self.f.shape, self.f.dtype)
        return jnp.argmax(self.f + noise, -1)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Float[Array, "..."]:
        """log p(y = c | f), nats."""
        shape = lax.broadcast_shapes(jnp.shape(value), self.batch_shape)
        f = jnp.broadcast_to(self.f, (*shape, self.num_classes))
        value = jnp.broadcast_to(jnp.asarray(value, int), shape)[..., None]
        own = jnp.take_along_axis(f, value, -1)
        return _log_all_below(own - f, jnp.arange(self.num_classes) != value)

    @property
    def probs(self) -> Float[Array, "... C"]:
        """p(y = c | f) of every class. They sum to one up to the error of quadrature."""
        return jnp.moveaxis(jnp.exp(self.log_prob(self.enumerate_support(expand=False))), 0, -1)


def _log_all_below(d, mask):
    """log E_{u ~ N(0, 1)} prod_j Phi(u + d_j) over the j of a mask, (..., C) -> (...).

    The nodes' centre and scale are held in derivatives: of a rule that integrates well about any of
    them, the derivative is the rule's of the derivative.
    """

    def log_g(u, d):
        return -0.5 * u**2 + jnp.sum(jnp.where(mask, log_ndtr(u[..., None] + d), 0.0), -1)

    centre, scale = _mode(lambda u: log_g(u, lax.stop_gradient(d)), jnp.zeros_like(d[..., 0]))
    x, w = np.polynomial.hermite_e.hermegauss(_NODES)
    # int g(u) du = scale sum_i w_i g(centre + scale x_i) exp(x_i^2 / 2)
    log_w = jnp.asarray(np.log(w) + 0.5 * x**2 - 0.5 * np.log(2.0 * np.pi), d.dtype)
    nodes = jax.vmap(lambda x: log_g(centre + scale * x, d))(jnp.asarray(x, d.dtype))
    log_w = jnp.reshape(log_w, (-1,) + (1,) * centre.ndim)
    return jnp.log(scale) + logsumexp(log_w + nodes, axis=0)


def _mode(log_g, start):
    """(the mode of concave functions of one variable each, their standard deviations there)."""
    slope = jax.grad(lambda u: jnp.sum(log_g(u)))
    curvature = jax.grad(lambda u: jnp.sum(slope(u)))
    centre = lax.fori_loop(0, _STEPS, lambda _, u: u - slope(u) / curvature(u), start)
    return lax.stop_gradient((centre, lax.rsqrt(-curvature(centre))))
