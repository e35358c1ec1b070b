"""Where the integrand N(f; mean, variance) p(y|f)^power has its mass: modes, edges and kinks, for a
batch of data at once.

A coarse scan of the log integrand over the Gaussian's `TAIL` standard deviations shows further
modes (a narrow peak is a wide parabola there) and breaks: jumps and kinks. Each is then located on
its own. A likelihood that is log-concave and smooth has one mode and costs the scan, one Newton
iteration and one search for a flank.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from ppl_gp.quick import pruned

TAIL = 10.0  # standard deviations covered on each side
NEWTON_STEPS = 50
EDGE = 8.0  # standard deviations from the mode within which an edge of the likelihood is looked for
EDGE_BISECTIONS = 12
# points of the scan, which may miss what is narrower than sd / 6 and flat around
SCAN = 128
MAX_CENTRES = 20
RELEVANT = 20.0  # nats below the highest point: what lies lower adds about 1e-9
_FLOOR = 200.0  # nats below the highest point that stand for no density at all
_SHARPEST = 1e-9  # standard deviations: the nodes' scale at a jump, and so its relative error
_LOG_2PI = float(np.log(2 * np.pi))


def normal_log_pdf(x, mean, variance):
    """log N(x; mean, variance)."""
    return -0.5 * (_LOG_2PI + jnp.log(variance) + (x - mean) ** 2 / variance)


def derivatives(
    log_lik: Callable, f: Float[Array, "RN"], functions: int = 1
) -> tuple[Float[Array, "RN"], Float[Array, "..."]]:
    """Gradient and Hessian of a pointwise log-likelihood at f: its diagonal (N,), by one grad and
    one jvp, O(N); of R functions its blocks (R, R, N), by R jvps.

    f is nudged by a few roundings: NumPyro's logistic log-probabilities are written with |x| and
    max(x, 0), whose derivatives JAX gets wrong at exactly x = 0, and zero is where every Newton
    iteration starts.
    """
    f = f + 16 * jnp.finfo(f.dtype).eps * (1.0 + jnp.abs(f))
    slope = jax.grad(pruned(lambda f: jnp.sum(log_lik(f)), f))
    if functions == 1:
        return jax.jvp(slope, (f,), (jnp.ones_like(f),))
    each = jnp.repeat(jnp.eye(functions, dtype=f.dtype), f.size // functions, 1)
    g, h = jax.vmap(lambda d: jax.jvp(slope, (f,), (d,)), out_axes=(None, 0))(each)
    blocks = jnp.reshape(h, (functions, functions, -1))
    return g, 0.5 * (blocks + jnp.swapaxes(blocks, 0, 1))


class _Search(NamedTuple):
    f: Float[Array, "N"]
    low: Float[Array, "N"]  # brackets the mode: the slope is positive here
    high: Float[Array, "N"]
    limit: Float[Array, "N"]  # on the next step
    scale: Float[Array, "N"]
    settled: Array
    steps: Array


def tilted_mode(
    log_lik: Callable,
    mean: Float[Array, "N"],
    variance: Float[Array, "N"],
    start: Float[Array, "N"],
    power=1.0,
    bracket: tuple[Array, Array] | None = None,
    known: Array | None = None,
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """(mode, scale) of N(f; mean, variance) p(y|f)^power; scale is a standard deviation, from the
    curvature there.

    Newton's steps, and bisection where they leave the bracket of the mode or do not halve it soon
    enough (they cycle over a logistic edge under a broad Gaussian, and crawl down an exponential).
    Good to 1e-3 of the scale: the quadrature only needs to know where to be dense. Where the
    curvature is not negative the Gaussian's own is taken. `bracket`: ends between which the mode is
    looked for; `known`: data whose start is taken for the mode.
    """
    sd = jnp.sqrt(variance)

    def scale_from(h):
        total: Array = 1.0 / variance - power * h
        bent = jnp.isfinite(total) & (total > 0.25 / variance)
        return 1.0 / jnp.sqrt(jnp.where(bent, total, 1.0 / variance))

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
        inside = jnp.where(bisect, high - low, 0.5 * jnp.abs(move))
        limit = jnp.where(bracketed, inside, 2.0 * s.limit)
        return _Search(new, low, high, limit, scale, s.settled | settled, s.steps + 1)

    far = jnp.full_like(start, jnp.inf)
    low, high = (-far, far) if bracket is None else bracket
    settled = jnp.zeros_like(start, bool) if known is None else known
    first = _Search(start, low, high, sd, sd, settled, jnp.zeros((), jnp.int32))
    end = lax.while_loop(lambda s: ~jnp.all(s.settled) & (s.steps < NEWTON_STEPS), step, first)
    return end.f, end.scale


def densest_point(log_lik: Callable, mode: Array, scale: Array, variance, power=1.0):
    """(centre, scale) of the nodes: the mode, or the edge of the likelihood that lies within `EDGE`
    scales of it.

    A likelihood that is flat at the mode and falls off at some distance (a logistic on its right
    side) needs nodes where it has lost one nat; the Gaussian bulk beside that edge is resolved by
    the widening spacing.
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
    centre: Array = jnp.where(distance[0] < distance[1], edge[0], edge[1])
    g, h = derivatives(log_lik, centre)
    width = 1.0 / jnp.sqrt(1.0 / variance + (power * g) ** 2 + power * jnp.abs(h))
    found = jnp.isfinite(jnp.min(distance, 0)) & jnp.isfinite(width) & (width > 0)
    return jnp.where(found, centre, mode), jnp.where(found, jnp.minimum(width, scale), scale)


class Centres(NamedTuple):
    """Where nodes are to be dense: at most `MAX_CENTRES` a datum, the main mode's first."""

    at: Float[Array, "C N"]
    scale: Float[Array, "C N"]
    used: Bool[Array, "C N"]


class _Scan(NamedTuple):
    x: Float[Array, "G N"]
    log_p: Float[Array, "G N"]  # the integrand
    # height of the mode that lies here, -inf where there is none or it has been located
    mode: Float[Array, "G N"]
    # size of a break between this point and the next, 0 where there is none or it has been located
    gap: Float[Array, "G N"]
    top: Float[Array, "N"]


def find_centres(log_lik: Callable, mean, variance, power=1.0, breaks=True) -> Centres:
    """All that `likelihood_nodes` has to resolve; without `breaks` modes only, which compiles in
    half the time.

    Cost: `SCAN` likelihood values per datum, and about 60 for each centre.
    """

    def log_integrand(f):
        return power * log_lik(f) + normal_log_pdf(f, mean, variance)

    scan = _scan(log_integrand, mean, variance, breaks)
    empty = jnp.zeros((MAX_CENTRES, *mean.shape), mean.dtype)
    blank = Centres(empty, empty + 1.0, jnp.zeros(empty.shape, bool))

    rows, places = jnp.arange(SCAN)[:, None], jnp.arange(MAX_CENTRES)[:, None]

    def centres_with(centres, k, *new):
        return jax.tree.map(lambda a, b: jnp.where(places == k, a, b), Centres(*new), centres)

    def more(state):
        k, scan, _ = state
        left = (jnp.max(scan.mode, 0) > scan.top - RELEVANT) | (jnp.max(scan.gap, 0) > 0)
        return (k == 0) | ((k < MAX_CENTRES) & jnp.any(left))

    def locate(state):
        k, scan, centres = state
        i = jnp.argmax(scan.mode, 0)
        a_mode = (_row(scan.mode, i) > scan.top - RELEVANT) | (k == 0)
        at, scale = _locate_mode(log_lik, scan, i, ~a_mode, mean, variance, power)
        scan = scan._replace(mode=jnp.where(a_mode & (rows == i), -jnp.inf, scan.mode))
        if not breaks:
            return k + 1, scan, centres_with(centres, k, at, scale, a_mode)
        j = jnp.argmax(scan.gap, 0)
        a_break = ~a_mode & (_row(scan.gap, j) > 0)
        at_break = lambda: _locate_break(log_lik, scan, j, mean, variance, power)  # noqa: E731
        edge, width = map(jnp.asarray, lax.cond(jnp.any(a_break), at_break, lambda: (at, scale)))
        at, scale = jnp.where(a_break, edge, at), jnp.where(a_break, width, scale)
        resolved = jnp.sqrt(centres.scale**2 + (at - centres.at) ** 2)
        sharper = scale < 0.05 * jnp.min(jnp.where(centres.used, resolved, jnp.inf), 0)
        # a break shows in its own gap and in both beside it
        step = scan.x[1] - scan.x[0]
        seen = a_break & ((rows == j) | (jnp.abs(scan.x + 0.5 * step - at) <= 1.5 * step))
        scan = scan._replace(gap=jnp.where(seen, 0.0, scan.gap))
        return k + 1, scan, centres_with(centres, k, at, scale, a_mode | (a_break & sharper))

    return lax.while_loop(more, locate, (jnp.zeros((), jnp.int32), scan, blank))[2]


def _row(x, i):
    """x[i_n, n], rows beyond the ends as the ends."""
    return jnp.take_along_axis(x, jnp.clip(i, 0, x.shape[0] - 1)[None], 0)[0]


def _scan(log_integrand, mean, variance, breaks) -> _Scan:
    grid = jnp.linspace(-TAIL, TAIL, SCAN, dtype=mean.dtype)[:, None]
    x = mean + jnp.sqrt(variance) * grid
    raw = jax.vmap(log_integrand)(x)
    log_p: Array = jnp.where(jnp.isnan(raw), -jnp.inf, raw)
    edge = jnp.full_like(log_p[:1], -jnp.inf)
    left, right = jnp.concatenate([edge, log_p[:-1]]), jnp.concatenate([log_p[1:], edge])
    # A parabola through three points tells the height of a peak far narrower than their distance.
    bend = 2.0 * log_p - left - right
    raised = (right - left) ** 2 / (8.0 * jnp.where(bend > 0, bend, 1.0))
    height = jnp.where(jnp.isfinite(raised) & (bend > 0), log_p + raised, log_p)
    mode = jnp.where((log_p > left) & (log_p >= right), height, -jnp.inf)
    top = jnp.max(mode, 0)
    gap = _breaks(log_p, normal_log_pdf(x, mean, variance), top) if breaks else jnp.zeros_like(x)
    return _Scan(x, log_p, mode, gap, top)


def _third(values):
    return jnp.abs(values[3:] - 3.0 * values[2:-1] + 3.0 * values[1:-2] - values[:-3])


def _breaks(log_p, log_normal, top):
    """Third difference of the log-likelihood around each gap, where it stands out from those three
    points away: at jumps of the value, slope and curvature. 0 where no density is near.
    """
    floored = jnp.maximum(log_p, top - _FLOOR)
    size = jnp.pad(_third(floored - log_normal), ((1, 2), (0, 0)))
    around = jnp.pad(size, ((3, 3), (0, 0)))
    around = jnp.maximum(around[:-6], around[6:])
    near = jnp.maximum(log_p, jnp.concatenate([log_p[1:], log_p[-1:]]))
    noise = 1e3 * jnp.finfo(log_p.dtype).eps * (1.0 + jnp.abs(floored))
    stands_out = size > 4.0 * around + jnp.maximum(1e-5, noise)
    none = jnp.isneginf(log_p)
    ends = none != jnp.concatenate([none[1:], none[-1:]])  # of the support: each shows by itself
    return jnp.where((stands_out | ends) & (near > top - RELEVANT), size, 0.0)


def _locate_mode(log_lik, scan: _Scan, i, known, mean, variance, power):
    inside = jnp.isfinite(_row(scan.log_p, i))
    start: Array = jnp.where(inside, _row(scan.x, i), mean)
    low = jnp.where(inside & (i > 0), _row(scan.x, i - 1), -jnp.inf)
    high = jnp.where(inside & (i < SCAN - 1), _row(scan.x, i + 1), jnp.inf)
    mode, scale = tilted_mode(log_lik, mean, variance, start, power, (low, high), known)
    return densest_point(log_lik, mode, scale, variance, power)


def _locate_break(log_lik, scan: _Scan, j, mean, variance, power):
    """(place, scale) of a jump of the log-likelihood, its slope or its curvature, or of a flank
    narrower than the scan's spacing.

    Four points around it close in on the largest third difference: at each halving of their
    distance it falls eightfold where the likelihood is smooth, which ends the search, and more
    slowly at a break of any of the three kinds.
    """
    sd = jnp.sqrt(variance)

    def value(f):
        log_normal = normal_log_pdf(f, mean, variance)
        log_p = power * log_lik(f) + log_normal
        log_p = jnp.where(jnp.isnan(log_p), -jnp.inf, log_p)
        return jnp.maximum(log_p, scan.top - _FLOOR) - log_normal

    def closer(state: tuple[Array, ...]):
        middle, step, values, size, done = state
        half = jax.vmap(lambda k: value(middle + k * step))(jnp.array([-1.0, 0.0, 1.0], step.dtype))
        seven = jnp.stack([values[0], half[0], values[1], half[1], values[2], half[2], values[3]])
        sizes = _third(seven)
        best = jnp.argmax(sizes, 0)
        new = _row(sizes, best)
        ended = done | (new < 0.18 * size) | (new < 1e-9) | (step < _SHARPEST * sd)
        moved = middle + (best - 1.5) * step / 2
        chosen = jnp.take_along_axis(seven, best + jnp.arange(4)[:, None], 0)
        keep, go = (middle, step, values, size), (moved, step / 2, chosen, new)
        return (*(jnp.where(ended, a, b) for a, b in zip(keep, go, strict=True)), ended)

    step = scan.x[1] - scan.x[0]
    middle = _row(scan.x, j) + 0.5 * step
    seen = jnp.maximum(scan.log_p, scan.top - _FLOOR) - normal_log_pdf(scan.x, mean, variance)
    values = jnp.take_along_axis(seen, jnp.clip(j + jnp.arange(-1, 3)[:, None], 0, SCAN - 1), 0)
    start = (middle, step, values, _third(values)[0], jnp.zeros_like(middle, bool))
    middle, step, *_ = lax.while_loop(lambda state: ~jnp.all(state[-1]), closer, start)
    rounding = 8.0 * jnp.finfo(middle.dtype).eps * jnp.abs(middle)
    return middle, jnp.maximum(step, jnp.maximum(_SHARPEST * sd, rounding))
