"""The multinomial probit: the largest of several noisy functions wins."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample

from ppl_gp.errors import DataError
from ppl_gp.numerics.normal import log_ndtr
from ppl_gp.observations.binary_and_ordinal import enumerated, floating

_NODES = 24  # log p to 1e-9 and better, see tests
_STEPS = (
    8  # of Newton's method towards the integrand's mode; the rule forgives a centre that is off
)


class MultinomialProbit(Distribution):
    """y = argmax_c (f_c + e_c) in {0, ..., C - 1}, e_c ~ N(0, 1) independent (Girolami & Rogers
    2006; Riihimaki, Jylanki & Vehtari 2013, eq. 3):

    p(y = c | f) = E_{u ~ N(0, 1)} prod_{j != c} Phi(u + f_c - f_j).

    `f` is (..., C), as the logits of a `Categorical`; two classes are `BernoulliProbit((f_1 - f_0)
    / sqrt(2))`. The integral over u by Gauss-Hermite nodes about the mode of its log-concave
    integrand, so that log p and its derivatives are accurate however unlikely c is. O(C) for each
    of 24 nodes. Raises `DataError` for f without an axis of two classes or more.
    """

    arg_constraints = {"f": constraints.real_vector}
    pytree_data_fields = ("f",)
    has_enumerate_support = True

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

    @constraints.dependent_property(is_discrete=True, event_dim=0)  # pyright: ignore[reportArgumentType]
    def support(self):
        return constraints.integer_interval(0, self.num_classes - 1)

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
        others = jnp.arange(self.num_classes) != value
        return _log_all_below(own - f, others)

    @property
    def probs(self) -> Float[Array, "... C"]:
        """p(y = c | f) of every class; they sum to one up to the quadrature."""
        classes = jnp.reshape(jnp.arange(self.num_classes), (-1,) + (1,) * len(self.batch_shape))
        return jnp.moveaxis(jnp.exp(self.log_prob(classes)), 0, -1)

    def enumerate_support(self, expand: bool = True) -> Int[Array, "..."]:
        return enumerated(self.num_classes, self.batch_shape, expand)


def _log_all_below(d, mask):
    """log E_{u ~ N(0, 1)} prod_j Phi(u + d_j) over the j of a mask, (..., C) -> (...).

    The nodes' centre and scale are held in derivatives: of a rule that integrates well about any of
    them, the derivative is the rule's of the derivative.
    """

    def log_g(u, d):
        terms = log_ndtr(u[..., None] + d)
        return -0.5 * u**2 + jnp.sum(jnp.where(mask, terms, 0.0), -1)

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
    step = lambda _, u: u - slope(u) / curvature(u)  # noqa: E731
    centre = lax.fori_loop(0, _STEPS, step, start)
    return lax.stop_gradient((centre, lax.rsqrt(-curvature(centre))))
