"""One-dimensional quadrature against a Gaussian, for a batch of data at once.

Nodes follow f = c + a sinh(t) with t equally spaced: dense (spacing about a h) around a chosen
centre c, wide enough for the Gaussian's tails. The trapezoidal rule on such a grid converges
geometrically for analytic integrands (Trefethen & Weideman 2014), and it resolves both a sharp
likelihood and a broad Gaussian, where Gauss-Hermite with nodes tied to the Gaussian's scale does
not (a logistic edge of width 1 under a standard deviation of 30).

Several centres (further modes, jumps and kinks: `numerics.modes`) share the nodes by t = sum_k
arcsinh((f - c_k) / a_k). Each costs nodes, so few nodes may leave many centres unresolved. One or
two breaks may be ends of pieces instead. `panel_nodes`, a finer rule of another kind, judges both.

The standard normal's log distribution function and its inverse Mills ratio, accurate in both
tails to all orders.

`jax.scipy.special.log_ndtr` switches formulas: JAX 0.10 is wrong by 1 % in relative terms at x =
7.76, by 4e-9 at -20, and its second derivative loses x^4 eps in the lower tail. Here erfc serves
the line down to -5 (relative errors up to 1.6e-15), and below it Laplace's continued fraction.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import erfc, logsumexp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ppl_gp.numerics.modes import (
    TAIL,
    Centres,
    densest_point,
    find_centres,
    normal_log_pdf,
    tilted_mode,
)

_LOWER_TAIL = -5.0  # below it a continued fraction of this many levels is exact in float64
_LEVELS = 24


@jax.custom_jvp
def log_ndtr(x: ArrayLike) -> Float[Array, "..."]:
    """log Phi(x), the standard normal probability below x; finite for |x| < 1e150."""
    x = jnp.asarray(x)
    negative = x < 0.0
    below, above = jnp.where(negative, x, 0.0), jnp.where(negative, 0.0, x)
    lower = -0.5 * below**2 - jnp.log(jnp.sqrt(2.0 * jnp.pi) * inverse_mills(below))
    return jnp.where(negative, lower, jnp.log1p(-0.5 * erfc(above / jnp.sqrt(2.0))))


@log_ndtr.defjvp
def _log_ndtr_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return log_ndtr(x), inverse_mills(x) * dx


@jax.custom_jvp
def inverse_mills(x: ArrayLike) -> Float[Array, "..."]:
    """h(x) = N(x; 0, 1) / Phi(x), the derivative of log Phi; h' = -h (x + h). Near -x far below
    zero, 0 far above.
    """
    x = jnp.asarray(x)
    z = -jnp.maximum(x, _LOWER_TAIL) / jnp.sqrt(2.0)
    body = jnp.sqrt(2.0 / jnp.pi) * jnp.exp(-(z**2)) / erfc(z)
    return jnp.where(x < _LOWER_TAIL, _tail_sum(x) - x, body)


@inverse_mills.defjvp
def _inverse_mills_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    h = inverse_mills(x)
    # In the lower tail h -> -x, and the sum would cancel.
    return h, -h * jnp.where(x < _LOWER_TAIL, _tail_sum(x), x + h) * dx


def _tail_sum(x):
    """x + h(x) for x below `_LOWER_TAIL`: with t = -x it is 1 / (t + 2 / (t + 3 / (t + ...))).

    Laplace's continued fraction of the Mills ratio (Abramowitz & Stegun 26.2.14).
    """
    t = -jnp.minimum(x, _LOWER_TAIL)
    fraction = t
    for level in range(_LEVELS, 1, -1):
        fraction = t + level / fraction
    return 1.0 / fraction


NODES = {1: 96, 2: 24, 3: 14}  # {functions of a datum: nodes a direction}
POINTS = 8192  # of Sobol's for more functions, with their mirror images; they judge the others
TOLERANCE = 1e-4  # nats: an estimated error of a datum above it is told
SAFETY = 5.0  # factor on the distance to a finer rule, which has errors of its own at a jump
_INVERSIONS = 150
_BREAK = 1e-5  # standard deviations: a centre of a smaller scale is a jump or a kink
_PIECES = 3  # at most, of the range of one datum
_UNIFORM = 129  # nodes of a judging rule that depend on no likelihood


def sinh_nodes(
    mean: Float[Array, "N"],
    variance: Float[Array, "N"],
    centres: Centres,
    num: int,
    tilt: float = 0.0,
    split: bool = False,
) -> tuple[Float[Array, "Q N"], Float[Array, "Q N"]]:
    """(f, log_w) with sum_q exp(log_w) phi(f_q) = E_N(f; mean, variance)[phi(f)], dense within
    `scale` of each centre.

    Weights carry the Gaussian. Q = num. `tilt` widens the range for integrands that grow like
    exp(tilt |f|), whose mass under the Gaussian sits `tilt * variance` away from its mean.
    `split`: a datum with one mode and one or two breaks is integrated from break to break.
    """
    first, scale = centres.at[0], centres.scale[0]
    reach = _reach(mean, variance, first, tilt)
    single = _spread(scale, reach, num)
    if split and num >= 2 * _PIECES - 1:  # a node for each piece, and the breaks
        breaks = (centres.used & (centres.scale < _BREAK * jnp.sqrt(variance))).at[0].set(False)
        few = jnp.any(breaks, 0) & (jnp.sum(breaks, 0) < _PIECES)
        few &= ~jnp.any((centres.used & ~breaks)[1:], 0)
        pieces = lambda: _in_pieces(centres, breaks, few, reach, num)  # noqa: E731
        single = lax.cond(jnp.any(few), pieces, lambda: single)
        centres = centres._replace(used=centres.used & ~(few & breaks))
    several = jnp.any(centres.used[1:])
    x, log_spacing = lax.cond(several, lambda: _shared(centres, reach, single), lambda: single)
    # not of f - mean, which may have no digits
    return first + x, normal_log_pdf(x, mean - first, variance) + log_spacing


def _reach(mean, variance, centre, tilt):
    return TAIL * jnp.sqrt(variance) + tilt * variance + jnp.abs(centre - mean)


def _spread(scale, reach, num: int):
    """(distance from the centre, log spacing) of nodes that are dense within `scale` of it."""
    end = jnp.arcsinh(reach / scale)
    t = jnp.linspace(-1.0, 1.0, num, dtype=reach.dtype)[:, None] * end
    log_slope = jnp.log(scale) + jnp.logaddexp(t, -t) - jnp.log(2.0)
    return scale * jnp.sinh(t), log_slope + jnp.log(2.0 * end / (num - 1))


def _in_pieces(centres: Centres, breaks, split, reach, num: int):
    """As `_spread`, with Gauss and Legendre's nodes between the breaks of the data to be `split`:
    what is analytic from one break to the next is integrated as if it had none. The breaks are
    nodes too, without weight, so that `panel_nodes` has them.
    """
    scale, each = centres.scale[0], (num - _PIECES + 1) // _PIECES
    end = jnp.arcsinh(reach / scale)
    t_at = jnp.clip(jnp.arcsinh((centres.at - centres.at[0]) / scale), -end, end)
    low = jnp.min(jnp.where(breaks, t_at, jnp.inf), 0)
    high = jnp.max(jnp.where(breaks, t_at, -jnp.inf), 0)
    wide = jnp.where(low > 0, low - end, low + end) / 2  # the middle of the longer piece
    edges = jnp.sort(jnp.stack([-end, low, jnp.where(high > low, high, wide), end]), 0)
    middle, half = 0.5 * (edges[1:] + edges[:-1]), 0.5 * (edges[1:] - edges[:-1])

    at, weight = (jnp.asarray(a, reach.dtype)[:, None, None] for a in _legendre(each))
    t = jnp.reshape(middle + half * at, (-1, *scale.shape))
    log_w = jnp.log(scale) + jnp.logaddexp(t, -t) - jnp.log(2.0)
    log_w += jnp.reshape(jnp.log(half * weight), t.shape)
    inner = jnp.concatenate([edges[1:-1], jnp.zeros((num - len(t) - _PIECES + 1, *scale.shape))])
    x = scale * jnp.sinh(jnp.concatenate([t, inner]))
    log_w = jnp.concatenate([log_w, jnp.full_like(inner, -jnp.inf)])
    whole = _spread(scale, reach, num)
    return tuple(jnp.where(split, a, b) for a, b in zip((x, log_w), whole, strict=True))


@lru_cache(maxsize=32)
def _legendre(num: int):
    return np.polynomial.legendre.leggauss(num)


def nodes_of(functions: int, num: int | None) -> int:
    """`num_nodes` of a method: nodes a direction up to three functions, points above."""
    return NODES.get(functions, POINTS) if num is None else max(num, 1)


def tolerance(functions: int) -> float:
    """Nats: an estimated error of a datum above it is told. Points are no better than that."""
    return TOLERANCE if functions in NODES else 1e-2


def hermite(num: int, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """(nodes (num^dims, dims), weights) for N(0, I): the product of Gauss and Hermite's rules."""
    x, w = np.polynomial.hermite_e.hermegauss(num)
    z, weights = (np.meshgrid(*[a] * dims, indexing="ij") for a in (x, w / w.sum()))
    return np.stack(z, -1).reshape(-1, dims), np.prod(np.stack(weights), 0).ravel()


def panel_nodes(nodes: Float[Array, "Q N"], mean, variance):
    """(f, log_w) as of `sinh_nodes`, by a rule to judge another one's `nodes` by: four nodes of
    Gauss and Legendre between any two of them, and of `_UNIFORM` more that are equally spaced.
    """
    even = jnp.linspace(-TAIL, TAIL, _UNIFORM, dtype=nodes.dtype)[:, None]
    edges = jnp.sort(jnp.concatenate([nodes - mean, jnp.sqrt(variance) * even]), 0)
    at, weight = (jnp.asarray(a, nodes.dtype)[:, None, None] for a in _legendre(4))
    half = 0.5 * (edges[1:] - edges[:-1])
    x = 0.5 * (edges[1:] + edges[:-1]) + half * at
    log_w = normal_log_pdf(x, 0.0, variance) + jnp.log(half * weight)
    return tuple(jnp.reshape(a, (-1, *nodes.shape[1:])) for a in (mean + x, log_w))


def nodes_around(mean, variance, centre, scale, num: int, tilt: float = 0.0):
    """As `sinh_nodes` with one centre, (N,), for all data."""
    x, log_spacing = _spread(scale, _reach(mean, variance, centre, tilt), num)
    return centre + x, normal_log_pdf(x, mean - centre, variance) + log_spacing


def _shared(centres: Centres, reach, single):
    """(f - c_0, log spacing) where several centres share the nodes; `single` where one has all."""
    x, log_spacing = single
    num = x.shape[0]
    several = jnp.any(centres.used[1:], 0)
    distance = centres.at - centres.at[0]

    def over_centres(term, x):
        """sum_k term(f - c_k, a_k), of the shape of x, one centre at a time."""

        def add(k, total):
            return total + jnp.where(centres.used[k], term(x - distance[k], centres.scale[k]), 0.0)

        return lax.fori_loop(0, len(distance), add, jnp.zeros_like(x))

    t_at = partial(over_centres, lambda d, a: jnp.arcsinh(d / a))
    density_at = partial(over_centres, lambda d, a: 1.0 / jnp.sqrt(a**2 + d**2))
    low, high = t_at(-reach), t_at(reach)
    wanted = jnp.linspace(0.0, 1.0, num, dtype=x.dtype)[:, None] * (high - low) + low
    ends = jnp.broadcast_to(-reach, x.shape), jnp.broadcast_to(reach, x.shape)

    tol = 1e3 * jnp.finfo(x.dtype).eps * num

    def step(state):
        x, below, above, _, steps = state
        miss = wanted - t_at(x)
        below, above = jnp.where(miss > 0, x, below), jnp.where(miss < 0, x, above)
        new = x + miss / density_at(x)
        # Newton may creep along the flanks between centres: every third step halves the bracket
        trusted = (new > below) & (new < above) & ((steps % 3 < 2) | (jnp.abs(miss) < 0.1))
        new = jnp.where(trusted, new, 0.5 * (below + above))
        off = jnp.max(jnp.where(several, jnp.abs(miss), 0.0))
        # a node that is there stays: a step may round to an end of the bracket, to be halved away
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
    split: bool = False,
):
    """`sinh_nodes` where N(f; mean, variance) p(y|f)^power needs them; constants as far as
    derivatives go.

    `concave`: log p(y|f) is known to be smooth and log-concave, so that there is one mode and no
    scan, which halves compiling.
    """
    frozen = jax.tree.map(lax.stop_gradient, (mean, variance))
    if concave:
        mode, scale = tilted_mode(log_lik, *frozen, frozen[0], power)
        centre = densest_point(log_lik, mode, scale, frozen[1], power)
        return nodes_around(mean, variance, *jax.tree.map(lax.stop_gradient, centre), num, tilt)
    centres = find_centres(log_lik, *frozen, power, breaks or split)
    return sinh_nodes(mean, variance, jax.tree.map(lax.stop_gradient, centres), num, tilt, split)


def log_integral_error(log_g: Callable, value, nodes, mean, variance) -> Float[Array, "N"]:
    """Estimated error of `value`, a log E[exp log_g(f)] by `nodes`, nats: `SAFETY` times its
    distance to that of `panel_nodes`; infinite where nothing was found. O(N Q).
    """
    f, log_w = panel_nodes(nodes, mean, variance)
    terms: Array = jax.vmap(log_g)(f) + log_w
    finer = logsumexp(jnp.where(jnp.isnan(terms), -jnp.inf, terms), 0)
    return jnp.where(jnp.isfinite(value), SAFETY * jnp.abs(value - finer), jnp.inf)
