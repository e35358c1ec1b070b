"""One-dimensional quadrature against a Gaussian, for a batch of data at once.

Nodes follow f = c + a sinh(t) with t equally spaced: dense (spacing about a h) around a chosen centre c, wide enough
for the Gaussian's tails. The trapezoidal rule on such a grid converges geometrically for analytic integrands
(Trefethen & Weideman 2014), and it resolves both a sharp likelihood and a broad Gaussian, where Gauss-Hermite with
nodes tied to the Gaussian's scale does not (a logistic edge of width 1 under a standard deviation of 30).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

TAIL = 10.0  # standard deviations covered on each side
NEWTON_STEPS = 50
EDGE = 8.0  # standard deviations from the mode within which an edge of the likelihood is looked for
EDGE_BISECTIONS = 12
_LOG_2PI = float(np.log(2 * np.pi))


def normal_log_pdf(x, mean, variance):
    """log N(x; mean, variance)."""
    return -0.5 * (_LOG_2PI + jnp.log(variance) + (x - mean) ** 2 / variance)


def derivatives(log_lik: Callable, f: Float[Array, "N"]) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Gradient and Hessian diagonal of a pointwise log-likelihood at f: one grad and one jvp, O(N).

    f is nudged by a few roundings: NumPyro's logistic log-probabilities are written with |x| and max(x, 0), whose
    derivatives JAX gets wrong at exactly x = 0, and zero is where every Newton iteration starts.
    """
    f = f + 16 * jnp.finfo(f.dtype).eps * (1.0 + jnp.abs(f))
    return jax.jvp(jax.grad(lambda f: jnp.sum(log_lik(f))), (f,), (jnp.ones_like(f),))


class _Search(NamedTuple):
    f: Float[Array, "N"]
    low: Float[Array, "N"]  # brackets the mode: the slope is positive here
    high: Float[Array, "N"]
    limit: Float[Array, "N"]  # on the next step
    scale: Float[Array, "N"]
    settled: Array
    steps: Array


def tilted_mode(
    log_lik: Callable, mean: Float[Array, "N"], variance: Float[Array, "N"], start: Float[Array, "N"], power=1.0
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """(mode, scale) of N(f; mean, variance) p(y|f)^power; scale is a standard deviation, from the curvature there.

    Newton's steps, and bisection where they leave the bracket of the mode or do not halve it soon enough (they cycle over
    a logistic edge under a broad Gaussian, and crawl down an exponential). Good to 1e-3 of the scale: the quadrature only
    needs to know where to be dense. Where the curvature is not negative the Gaussian's own is taken.
    """
    sd = jnp.sqrt(variance)

    def scale_from(h):
        total = 1.0 / variance - power * h
        return 1.0 / jnp.sqrt(jnp.where(jnp.isfinite(total) & (total > 0.25 / variance), total, 1.0 / variance))

    def step(s: _Search) -> _Search:
        g, h = derivatives(log_lik, s.f)
        slope, scale = power * g - (s.f - mean) / variance, scale_from(h)
        low, high = jnp.where(slope > 0, s.f, s.low), jnp.where(slope < 0, s.f, s.high)
        newton = slope * scale**2
        settled = ~(jnp.abs(newton) > 1e-3 * scale)  # NaN settles: no step can be made
        move = jnp.where(jnp.isnan(newton), 0.0, jnp.clip(newton, -s.limit, s.limit))
        bracketed = jnp.isfinite(high - low)
        new = s.f + move
        bisect = bracketed & ~settled & ((new <= low) | (new >= high) | (jnp.abs(newton) > s.limit))
        new = jnp.where(bisect, 0.5 * (low + high), new)
        # Outside a bracket steps may grow; inside, a Newton step must be half the last one.
        limit = jnp.where(bracketed, jnp.where(bisect, high - low, 0.5 * jnp.abs(move)), 2.0 * s.limit)
        return _Search(new, low, high, limit, scale, s.settled | settled, s.steps + 1)

    far = jnp.full_like(start, jnp.inf)
    zero = jnp.zeros((), jnp.int32)
    first = _Search(start, -far, far, sd, sd, jnp.zeros_like(start, bool), zero)
    end = lax.while_loop(lambda s: ~jnp.all(s.settled) & (s.steps < NEWTON_STEPS), step, first)
    return end.f, end.scale


def densest_point(log_lik: Callable, mode, scale, variance, power=1.0):
    """(centre, scale) of the nodes: the mode, or the edge of the likelihood that lies within `EDGE` scales of it.

    A likelihood that is flat at the mode and falls off at some distance (a logistic on its right side) needs nodes where
    it has lost one nat; the Gaussian bulk beside that edge is resolved by the widening spacing.
    """
    level = power * log_lik(mode) - 1.0
    end = mode + scale * jnp.array([-EDGE, EDGE])[:, None]

    def halve(_, bracket):
        inside, outside = bracket
        middle = 0.5 * (inside + outside)
        fallen = power * jax.vmap(log_lik)(middle) < level
        return jnp.where(fallen, inside, middle), jnp.where(fallen, middle, outside)

    _, edge = lax.fori_loop(0, EDGE_BISECTIONS, halve, (jnp.broadcast_to(mode, end.shape), end))
    distance = jnp.where(edge == end, jnp.inf, jnp.abs(edge - mode))
    left = distance[0] < distance[1]
    centre = jnp.where(left, edge[0], edge[1])
    g, h = derivatives(log_lik, centre)
    width = 1.0 / jnp.sqrt(1.0 / variance + (power * g) ** 2 + power * jnp.abs(h))
    found = jnp.isfinite(jnp.min(distance, 0)) & jnp.isfinite(width) & (width > 0)
    return jnp.where(found, centre, mode), jnp.where(found, jnp.minimum(width, scale), scale)


def sinh_nodes(
    mean: Float[Array, "N"],
    variance: Float[Array, "N"],
    centre: Float[Array, "N"],
    scale: Float[Array, "N"],
    num: int,
    tilt: float = 0.0,
) -> tuple[Float[Array, "Q N"], Float[Array, "Q N"]]:
    """(f, log_w) with sum_q exp(log_w) phi(f_q) = E_N(f; mean, variance)[phi(f)], dense within `scale` of `centre`.

    Weights carry the Gaussian. Q = num. `tilt` widens the range for integrands that grow like exp(tilt |f|), whose mass
    under the Gaussian sits `tilt * variance` away from its mean.
    """
    reach = TAIL * jnp.sqrt(variance) + tilt * variance + jnp.abs(centre - mean)
    end = jnp.arcsinh(reach / scale)
    t = jnp.linspace(-1.0, 1.0, num, dtype=mean.dtype)[:, None] * end
    f = centre + scale * jnp.sinh(t)
    log_jacobian = jnp.log(scale) + jnp.logaddexp(t, -t) - jnp.log(2.0)
    return f, normal_log_pdf(f, mean, variance) + log_jacobian + jnp.log(2.0 * end / (num - 1))


def likelihood_nodes(log_lik: Callable, mean, variance, *, num: int, start=None, power=1.0, tilt=0.0):
    """`sinh_nodes` where N(f; mean, variance) p(y|f)^power needs them; constants as far as derivatives go."""
    frozen = jax.tree.map(lax.stop_gradient, (mean, variance, mean if start is None else start))
    mode, scale = tilted_mode(log_lik, *frozen, power=power)
    centre, scale = densest_point(log_lik, mode, scale, frozen[1], power)
    return sinh_nodes(mean, variance, lax.stop_gradient(centre), lax.stop_gradient(scale), num, tilt)


def gauss_hermite(mean: Float[Array, "N"], variance: Float[Array, "N"], num: int = 32):
    """(f (Q, N), weights (Q,)) of Gauss-Hermite quadrature for N(f; mean, variance)."""
    x, w = np.polynomial.hermite_e.hermegauss(num)
    f = mean + jnp.sqrt(variance) * jnp.asarray(x, mean.dtype)[:, None]
    return f, jnp.asarray(w / w.sum(), mean.dtype)
