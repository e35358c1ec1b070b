"""One-dimensional quadrature against a Gaussian, for a batch of data at once.

Nodes follow f = c + a sinh(t) with t equally spaced: dense (spacing about a h) around a chosen
centre c, wide enough for the Gaussian's tails. The trapezoidal rule on such a grid converges
geometrically for analytic integrands (Trefethen & Weideman 2014), and it resolves both a sharp
likelihood and a broad Gaussian, where Gauss-Hermite with nodes tied to the Gaussian's scale does
not (a logistic edge of width 1 under a standard deviation of 30).

Several centres (further modes, jumps and kinks: `numerics.modes`) share the nodes by t = sum_k
arcsinh((f - c_k) / a_k). Each costs nodes, so few nodes may leave many centres unresolved:
`trapezoid_error` compares the rule with its own halves and quarters.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.numerics.modes import (
    TAIL,
    Centres,
    densest_point,
    find_centres,
    normal_log_pdf,
    tilted_mode,
)

TOLERANCE = 1e-6  # nats: an estimated error above it is told
SAFETY = 10.0  # factor on the estimated error of a rule
_INVERSIONS = 150


def sinh_nodes(
    mean: Float[Array, "N"],
    variance: Float[Array, "N"],
    centres: Centres,
    num: int,
    tilt: float = 0.0,
) -> tuple[Float[Array, "Q N"], Float[Array, "Q N"]]:
    """(f, log_w) with sum_q exp(log_w) phi(f_q) = E_N(f; mean, variance)[phi(f)], dense within
    `scale` of each centre.

    Weights carry the Gaussian. Q = num. `tilt` widens the range for integrands that grow like
    exp(tilt |f|), whose mass under the Gaussian sits `tilt * variance` away from its mean.
    """
    first, scale = centres.at[0], centres.scale[0]
    reach = _reach(mean, variance, first, tilt)
    single = _spread(scale, reach, num)
    several = jnp.any(centres.used[1:])
    x, log_spacing = lax.cond(several, lambda: _shared(centres, reach, single), lambda: single)
    f = first + x
    return f, normal_log_pdf(f, mean, variance) + log_spacing


def _reach(mean, variance, centre, tilt):
    return TAIL * jnp.sqrt(variance) + tilt * variance + jnp.abs(centre - mean)


def _spread(scale, reach, num: int):
    """(distance from the centre, log spacing) of nodes that are dense within `scale` of it."""
    end = jnp.arcsinh(reach / scale)
    t = jnp.linspace(-1.0, 1.0, num, dtype=reach.dtype)[:, None] * end
    log_spacing = (
        jnp.log(scale) + jnp.logaddexp(t, -t) - jnp.log(2.0) + jnp.log(2.0 * end / (num - 1))
    )
    return scale * jnp.sinh(t), log_spacing


def nodes_around(mean, variance, centre, scale, num: int, tilt: float = 0.0):
    """As `sinh_nodes` with one centre, (N,), for all data."""
    x, log_spacing = _spread(scale, _reach(mean, variance, centre, tilt), num)
    f = centre + x
    return f, normal_log_pdf(f, mean, variance) + log_spacing


def _shared(centres: Centres, reach, single):
    """(f - c_0, log spacing) of the nodes where several centres share them; `single` for data that
    have one.
    """
    x, log_spacing = single
    num = x.shape[0]
    several = jnp.any(centres.used[1:], 0)
    distance = centres.at - centres.at[0]

    def over_centres(term):
        """sum_k term(f - c_k, a_k), of the shape of x, one centre at a time."""
        return lambda x: lax.fori_loop(
            0,
            centres.at.shape[0],
            lambda k, total: (
                total + jnp.where(centres.used[k], term(x - distance[k], centres.scale[k]), 0.0)
            ),
            jnp.zeros_like(x),
        )

    t_at = over_centres(lambda d, a: jnp.arcsinh(d / a))
    density_at = over_centres(lambda d, a: 1.0 / jnp.sqrt(a**2 + d**2))
    low, high = t_at(-reach), t_at(reach)
    wanted = jnp.linspace(0.0, 1.0, num, dtype=x.dtype)[:, None] * (high - low) + low
    ends = jnp.broadcast_to(-reach, x.shape), jnp.broadcast_to(reach, x.shape)

    tol = 1e3 * jnp.finfo(x.dtype).eps * num

    def step(state):
        x, below, above, _, steps = state
        miss = wanted - t_at(x)
        below, above = jnp.where(miss > 0, x, below), jnp.where(miss < 0, x, above)
        new = x + miss / density_at(x)
        # Newton alone may creep along the flanks between centres: every third step halves the
        # bracket.
        trusted = (new > below) & (new < above) & ((steps % 3 < 2) | (jnp.abs(miss) < 0.1))
        new = jnp.where(trusted, new, 0.5 * (below + above))
        off = jnp.max(jnp.where(several, jnp.abs(miss), 0.0))
        # A node that is there stays: its next step may round to an end of the bracket, and would be
        # halved far away.
        return jnp.where(jnp.abs(miss) > tol, new, x), below, above, off, steps + 1

    def running(state):
        return (state[3] > tol) & (state[4] < _INVERSIONS)

    off = jnp.asarray(jnp.inf, x.dtype)
    found = lax.while_loop(running, step, (x, *ends, off, jnp.zeros((), jnp.int32)))[0]
    spacing = (high - low) / (num - 1) / density_at(found)
    nodes = jnp.where(several, found, x), jnp.where(several, jnp.log(spacing), log_spacing)
    return jax.tree.map(lax.stop_gradient, nodes)  # the Gaussian's weights carry the derivatives


def likelihood_nodes(
    log_lik: Callable,
    mean,
    variance,
    *,
    num: int,
    power=1.0,
    tilt=0.0,
    breaks=True,
    concave: bool = False,
):
    """`sinh_nodes` where N(f; mean, variance) p(y|f)^power needs them; constants as far as
    derivatives go.

    `concave`: log p(y|f) is known to be smooth and log-concave, so that there is one mode and no
    scan, which halves compiling.
    """
    frozen = jax.tree.map(lax.stop_gradient, (mean, variance))
    if concave:
        centre = densest_point(
            log_lik, *tilted_mode(log_lik, *frozen, frozen[0], power), frozen[1], power
        )
        return nodes_around(mean, variance, *jax.tree.map(lax.stop_gradient, centre), num, tilt)
    centres = find_centres(log_lik, *frozen, power, breaks)
    return sinh_nodes(mean, variance, jax.tree.map(lax.stop_gradient, centres), num, tilt)


def trapezoid_error(terms: Float[Array, "Q N"], safety: float = SAFETY) -> Float[Array, "N"]:
    """Estimated error of sum_q terms, terms those of a trapezoidal rule with Q = 4 m nodes or so.

    The rule is the mean of two rules with every second node, of four with every fourth, of eight.
    Where their distances d from it fall geometrically the rule itself is off by d2 (d2 / d4)^2;
    across a jump they do not fall, and it is about d2. d2 counts as no smaller than d4 and d8 lead
    to expect, and all is taken `safety` times: a distance may be small by accident. An integrand
    with one smooth mode needs no such factor.
    """
    total = jnp.sum(terms, 0)

    padded = jnp.pad(terms, ((0, -terms.shape[0] % 8), (0, 0)))
    eighths = jnp.sum(jnp.reshape(padded, (-1, 8, *terms.shape[1:])), 0)

    def distance(m):
        return jnp.max(
            jnp.abs(m * jnp.sum(jnp.reshape(eighths, (-1, m, *terms.shape[1:])), 0) - total), 0
        )

    def ratio(a, b):
        return jnp.minimum(1.0, jnp.where(b > 0, a / jnp.where(b > 0, b, 1.0), 0.0))

    d2, d4, d8 = distance(2), distance(4), distance(8)
    d2 = jnp.maximum(d2, d4 * ratio(d4, d8) ** 2)
    return safety * d2 * ratio(d2, d4) ** 2


def log_sum_error(log_terms: Float[Array, "Q N"], safety: float = SAFETY) -> Float[Array, "N"]:
    """`trapezoid_error` of logsumexp(log_terms, 0), nats; infinite where nothing was found."""
    total = logsumexp(log_terms, 0)
    relative = trapezoid_error(
        jnp.exp(log_terms - jnp.where(jnp.isfinite(total), total, 0.0)), safety
    )
    return jnp.where(jnp.isfinite(total), relative, jnp.inf)


def gauss_hermite(mean: Float[Array, "N"], variance: Float[Array, "N"], num: int = 32):
    """(f (Q, N), weights (Q,)) of Gauss-Hermite quadrature for N(f; mean, variance)."""
    x, w = np.polynomial.hermite_e.hermegauss(num)
    f = mean + jnp.sqrt(variance) * jnp.asarray(x, mean.dtype)[:, None]
    return f, jnp.asarray(w / w.sum(), mean.dtype)
