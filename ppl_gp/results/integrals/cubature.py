"""Integrals over the independent functions that decide an entry of y, f (D, M) ~ N(mean, variance):
log E[g(f)], the moments of y, and p(y <= t), each by nodes that follow its integrand; and how
finely predictions and log densities integrate.

One function has the nodes of `numerics.quadrature.likelihood_nodes`, centred on the integrand, so
that a logistic edge of width 1 under a standard deviation of 30 is resolved, and so is exp(2 f).

Two or three: in whitened coordinates f = m + sd z, z ~ N(0, I), the mode z* of g(z) N(z; 0, I) and
the eigenvectors V of the curvature there give axes along which N(0, I) stays a product. Along each
of them go the nodes of `numerics.quadrature.nodes_around`, centred on the mode and scaled by the
curvature: adaptive quadrature (Naylor & Smith 1982; Liu & Pierce 1994) that keeps the Gaussian's
tails in sight. Two functions are integrated one inside the other. Each rule is compared with its
own half, which says how far it can be trusted. More: draws from the Gaussian at the mode and from
N(0, I), half each, with their mixture as the weights' denominator (Hesterberg 1995).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.draws import Moments, mixture
from ppl_gp.numerics import blocks as small
from ppl_gp.numerics.quadrature import likelihood_nodes, log_integral_error, nodes_around
from ppl_gp.quick import pruned
from ppl_gp.reading.tracing import run
from ppl_gp.results.query.query import Query, drawn_runs

MAX_DIMENSIONS = 3
# Nodes of each axis, odd, by "many": what an average over draws blurs need not be resolved.
_AXIS_NODES = {2: {True: 25, False: 49}, 3: {True: 11, False: 25}}
INNER_BATCH = 7  # outer nodes at once
NEWTON_STEPS = 40
FRACTIONS = (1.0, 0.5, 0.2, 0.05, 0.005)  # of a Newton step that are tried
_NUDGE = 1e-6  # off zero, where NumPyro's logistic log-probabilities have wrong second derivatives
LEAST_CURVATURE = 0.25  # of the integrand, as a share of the Gaussian's own


class Effort(NamedTuple):
    """Static: nodes of one function, whether `many` integrals are averaged, draws above three."""

    nodes: int
    many: bool
    draws: int


def floored(f: Moments) -> Moments:
    """With variances large enough for nodes to differ from the mean: 50 rounding errors of its
    square. In float32 the standard deviation is some 250 rounding errors of the mean.
    """
    unit = min(50 * float(jnp.finfo(f.mean.dtype).eps), 1e-9)
    scale = f.mean**2 + jnp.mean(f.variance) + jnp.finfo(f.mean.dtype).tiny ** 0.5
    return Moments(f.mean, jnp.maximum(f.variance, unit * scale))


def log_expectation(
    log_g: Callable, f: Moments, num_nodes: int, concave: bool = False
) -> Float[Array, "M"]:
    """log E[exp log_g(f)_n] under one f_n ~ N(mean_n, variance_n), (M,), nats. O(M num_nodes)."""
    return _along_one(log_g, f, num_nodes, concave)[0]


def log_expectation_and_error(log_g: Callable, f: Moments, num_nodes: int, concave: bool):
    """(`log_expectation`, log of its estimated error in nats: -inf where concave), (M,) each."""
    value, nodes = _along_one(log_g, f, num_nodes, concave)
    if concave:
        return value, jnp.full_like(value, -jnp.inf)
    return value, jnp.log(log_integral_error(log_g, value, nodes, f.mean, floored(f).variance))


def _along_one(log_g, f: Moments, num: int, concave: bool):
    nodes, log_w = likelihood_nodes(log_g, f.mean, floored(f).variance, num=num, concave=concave)
    return logsumexp(log_w + jax.vmap(log_g)(nodes), 0), nodes


class Nodes(NamedTuple):
    """A product of grids (Q, D, M), made point by point, which `at` brings to f (P, D, M)."""

    grid: Float[Array, "Q D M"]
    log_w: Float[Array, "Q D M"]
    at: Callable

    def log_total(self, log_g: Callable) -> Float[Array, "M"]:
        """The log of the weighted sum of exp(log_g(f)); points without a density count nothing."""

        def part(f, log_w):
            values: Array = log_w + jax.vmap(log_g)(f)
            return logsumexp(jnp.where(jnp.isnan(values), -jnp.inf, values), 0)

        return self._folded(part, jnp.logaddexp, -jnp.inf)

    def total(self, function: Callable) -> Any:
        """The weighted sum of the arrays (M,) that function(f) gives."""

        def part(f, log_w):
            w = jnp.exp(log_w)
            weighed = lambda x: jnp.sum(jnp.where(w > 0, jnp.multiply(w, x), 0.0), 0)  # noqa: E731
            return jax.tree.map(weighed, jax.vmap(function)(f))

        return self._folded(part, jnp.add, 0.0)

    def _folded(self, part: Callable, combine: Callable, empty: float):
        """part(f (P, D, M), log_w (P, M)), summed over the nodes of the first of several axes."""
        Q, D, _ = self.grid.shape
        if D == 1:
            return part(self.at(self.grid), self.log_w[:, 0])
        rest = jnp.indices((Q,) * (D - 1)).reshape(D - 1, -1).T

        def of_slice(q):
            chosen = jnp.concatenate([jnp.full((len(rest), 1), q), rest], 1)  # (P, D)
            points, log_w = (x[chosen, jnp.arange(D)] for x in (self.grid, self.log_w))
            return part(self.at(points), jnp.sum(log_w, 1))

        shapes = jax.eval_shape(of_slice, 0)
        start = jax.tree.map(lambda s: jnp.full(s.shape, empty, s.dtype), shapes)
        add = lambda total, q: (jax.tree.map(combine, total, of_slice(q)), None)  # noqa: E731
        return lax.scan(add, start, jnp.arange(Q))[0]

    def coarse(self) -> "Nodes":
        """Every second node: the same rule with twice the spacing."""
        return self._replace(grid=self.grid[::2], log_w=self.log_w[::2] + jnp.log(2.0))


def nodes_of(log_g: Callable, f: Moments, effort: Effort, concave: bool = False) -> Nodes:
    """Nodes for an integrand g of one to three functions, log_g: (D, M) -> (M,)."""
    if len(f.mean) == 1:
        one = floored(Moments(f.mean[0], f.variance[0]))
        along, log_w = likelihood_nodes(
            lambda x: log_g(x[None]), *one, num=effort.nodes, concave=concave
        )
        return Nodes(along[:, None], log_w[:, None], lambda points: points)
    at, zero = _whitened(f), jnp.zeros_like(f.mean)
    mode, axes, scale = bulk(lambda z: log_g(at(z)), zero)
    centre, flat = jnp.einsum("mij,im->jm", axes, mode), jnp.zeros(zero.size, zero.dtype)
    along = flat, jnp.ones_like(flat), jnp.ravel(centre), jnp.ravel(scale.T)
    rule = nodes_around(*along, _AXIS_NODES[len(zero)][effort.many])
    grid, log_w = (jnp.reshape(x, (-1, *zero.shape)) for x in rule)
    return Nodes(grid, log_w, lambda points: at(jnp.einsum("mij,pjm->pim", axes, points)))


def _whitened(f: Moments) -> Callable:
    """z ~ N(0, I) -> f."""
    sd = jnp.sqrt(f.variance)
    return lambda z: f.mean + sd * z


def log_integral(
    log_g: Callable,
    f: Moments,
    effort: Effort,
    key=None,
    *,
    concave: bool = False,
    quadratic: bool = False,
) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
    """(log E[g(f)], squared relative error), (M,) each: of two or three functions the difference to
    the same rule with half of the nodes, which is larger than the rule's own. `concave`,
    `quadratic`: log_g is known to be; `key`: for draws, of more than three functions.
    """
    if len(f.mean) == 1:
        one = Moments(f.mean[0], f.variance[0])
        found = log_expectation(lambda x: log_g(x[None]), one, effort.nodes, concave)
        return found, jnp.zeros_like(found)
    at, zero = _whitened(f), jnp.zeros_like(f.mean)
    white = lambda z: log_g(at(z))  # noqa: E731
    if quadratic:
        return _of_quadratic(white, zero)
    if len(zero) > MAX_DIMENSIONS:
        return _by_draws(white, zero, effort.draws, key)
    if len(zero) == 2:
        return _iterated(white, zero, _AXIS_NODES[2][effort.many])
    nodes = nodes_of(log_g, f, effort)
    return _with_error(nodes.log_total(log_g), nodes.coarse().log_total(log_g))


def moments(both: Callable, f: Moments, effort: Effort, concave: bool = False) -> Moments:
    """Of y from its mean and variance given f, both(f): (M,) each, by the law of total variance;
    nodes where E[y^2] lives. Infinite or NaN where y has no such moment.
    """

    def log_square(x):
        mean, variance = both(x)
        return jnp.log(variance + mean**2 + jnp.finfo(x.dtype).tiny)

    base, _ = both(f.mean)  # about which sums cancel little
    base = jnp.where(jnp.isfinite(base), base, 0.0)

    def parts(x):
        mean, variance = both(x)
        return mean - base, variance, (mean - base) ** 2

    first, spread, square = nodes_of(log_square, f, effort, concave).total(parts)
    return Moments(base + first, spread + jnp.maximum(square - first**2, 0.0))


def share_below(
    log_p: Callable, below: Callable, f: Moments, effort: Effort, concave: bool = False
) -> Float[Array, "M"]:
    """p(y <= t) from p(y <= t | f), nodes where p(y = t | f) lives: there it changes with f. They
    reach over all of the Gaussian, and their weights add up to one.
    """
    nodes = nodes_of(log_p, f, effort, concave)
    total, weight = nodes.total(lambda x: (below(x), jnp.ones_like(x[0])))
    return total / weight


def bulk(log_g: Callable, zero: Float[Array, "D M"]) -> tuple[Array, Array, Array]:
    """Where log g(z) - |z|^2 / 2 lives: its mode (D, M) by Newton's method, axes (M, D, D) in
    columns, a standard deviation along each (M, D). O(D) gradients a step.
    """

    def objective(z):
        return log_g(z) - 0.5 * jnp.sum(z**2, 0)

    slope = jax.grad(pruned(lambda z: jnp.sum(objective(z)), zero))
    eye = jnp.eye(len(zero), dtype=zero.dtype)

    def curvature(z):
        """Eigenvalues, raised to where a step can be made, and vectors of minus the Hessian."""
        H = minus_hessian(slope, z)
        finite = jnp.all(jnp.isfinite(H), (1, 2))[:, None, None]
        values, V = jnp.linalg.eigh(jnp.where(finite, 0.5 * (H + jnp.swapaxes(H, 1, 2)), eye))
        return jnp.maximum(jnp.abs(values), LEAST_CURVATURE), V

    def step(state):
        z, _, steps = state
        values, V = curvature(z)
        along = jnp.einsum("mij,im->mj", V, jnp.nan_to_num(slope(z)))
        direction = jnp.einsum("mij,mj->im", V, along / values)
        shares = jnp.array(FRACTIONS, z.dtype)[:, None, None]
        trials = jnp.concatenate([z[None], z + shares * direction])
        best = jnp.argmax(jnp.nan_to_num(jax.vmap(objective)(trials), nan=-jnp.inf), 0)
        new = jnp.take_along_axis(trials, best[None, None], 0)[0]
        return new, jnp.max(jnp.sum(((new - z) ** 2), 0) * values[:, -1]), steps + 1

    moved = lambda state: (state[1] > 1e-6) & (state[2] < NEWTON_STEPS)  # noqa: E731
    start = jnp.full_like(zero, _NUDGE), jnp.asarray(jnp.inf, zero.dtype), 0
    z, _, _ = lax.while_loop(moved, step, start)
    values, V = curvature(z)
    return lax.stop_gradient((z, V, 1.0 / jnp.sqrt(values)))


def minus_hessian(slope: Callable, z: Float[Array, "D M"]) -> Float[Array, "M D D"]:
    """Of the sum over data of a function with this gradient. D derivatives."""
    along = lambda e: jax.jvp(slope, (z,), (e[:, None] * jnp.ones_like(z),))[1]  # noqa: E731
    return -jnp.moveaxis(jax.vmap(along)(jnp.eye(len(z), dtype=z.dtype)), -1, 0)


def _iterated(log_g: Callable, zero: Float[Array, "2 M"], num: int):
    """One axis inside the other, each way round, and the better of both for each datum.

    The inner nodes follow the integrand at every outer node, so that a ridge whose width changes
    along it (a noise scale that is a function too) is resolved, where the ridge is crossed by the
    inner axis.
    """
    mode, axes, scale = bulk(log_g, zero)
    spread = jnp.sqrt(jnp.einsum("mij,mj->im", axes**2, scale**2))
    standard = Moments(zero[0], jnp.ones_like(zero[0]))

    def way(outer):
        pick = lambda x: jnp.where(outer == 0, x[0], x[1])  # noqa: E731
        x, log_w = nodes_around(*standard, pick(mode), pick(spread), num)

        def inside(x):
            def log_inner(i):
                return log_g(jnp.where(outer == 0, jnp.stack([x, i]), jnp.stack([i, x])))

            return log_expectation(log_inner, standard, num - 1, concave=True)

        values: Array = log_w + lax.map(inside, x, batch_size=INNER_BATCH)
        values = jnp.where(jnp.isnan(values), -jnp.inf, values)
        return _with_error(logsumexp(values, 0), logsumexp(values[::2], 0) + jnp.log(2.0))

    log_p, error = lax.map(way, jnp.arange(2))
    best = jnp.argmin(error, 0)[None]
    return jnp.take_along_axis(log_p, best, 0)[0], jnp.take_along_axis(error, best, 0)[0]


def _with_error(fine, coarse):
    """(log integral, squared relative error)."""
    return fine, jnp.where(jnp.isfinite(fine), jnp.expm1(coarse - fine) ** 2, jnp.inf)


def _of_quadratic(log_g: Callable, zero: Float[Array, "D M"]):
    """(log E[g(z)], 0) of log g a quadratic: with slope b and Hessian -A at 0 it is
    log g(0) + b^T (I + A)^-1 b / 2 - log|I + A| / 2; NaN where I + A is not positive definite. D
    gradients, O(M D^3).
    """
    slope = jax.grad(pruned(lambda z: jnp.sum(log_g(z)), zero))
    P = jnp.eye(len(zero), dtype=zero.dtype) + minus_hessian(slope, zero)
    b = slope(zero)
    log_p: Array = log_g(zero) - 0.5 * small.log_det(P)
    log_p = log_p + 0.5 * jnp.einsum("im,mij,jm->m", b, small.inverse(P), b)
    return jnp.where(small.is_definite(P), log_p, jnp.nan), jnp.zeros_like(log_p)


def _by_draws(log_g: Callable, zero: Float[Array, "D M"], num: int, key):
    """(log E[g(z)], relative variance of its estimate: infinite where no draw has weight)."""
    mode, axes, scale = bulk(log_g, zero)
    spread, log_scale = axes * scale[:, None, :], jnp.sum(jnp.log(scale), 1)

    def draw(key, from_prior):
        # the same for all data: an answer may not depend on its companions
        noise = random.normal(key, (len(zero), 1), zero.dtype)
        z = jnp.where(from_prior, noise, mode + jnp.einsum("mij,jm->im", spread, noise))
        along = jnp.einsum("mij,im->jm", axes, z - mode) / scale.T
        log_prior, log_bulk = -0.5 * jnp.sum(z**2, 0), -0.5 * jnp.sum(along**2, 0) - log_scale
        return log_g(z) + log_prior - (jnp.logaddexp(log_prior, log_bulk) - jnp.log(2.0))

    log_w: Array = lax.map(
        lambda x: draw(*x), (random.split(key, num), jnp.arange(num) % 2 == 0), batch_size=64
    )
    log_w = jnp.where(jnp.isnan(log_w), -jnp.inf, log_w)
    first, second = (logsumexp(k * log_w, 0) - jnp.log(num) for k in (1.0, 2.0))
    error = jnp.maximum(jnp.exp(second - 2.0 * first) - 1.0, 0.0) / num
    return first, jnp.where(jnp.isfinite(first), error, jnp.inf)


# by "many draws": what a mixture averages away need not be resolved
NODES = {True: 192, False: 384}
MIN_DRAWS = 1000  # Monte Carlo draws in all
LATENT_DRAWS = 4000  # of latents, which are weighted

OF_LAYERS = Effort(32, True, 32)  # at each of at least 1000 draws of the last layer's inputs
# draws of the hyperparameters from which several functions at each are integrated with fewer nodes
MANY = 30
SEVERAL_NODES = {True: 64, False: 192}


def num_nodes(query: Query) -> int:
    return NODES[query.draws.num > 1]


def effort_of(query: Query, num_draws: int = MIN_DRAWS) -> Effort:
    """For the functions at each draw of the hyperparameters."""
    many = query.draws.num >= MANY
    nodes = SEVERAL_NODES[many] if query.site is None else num_nodes(query)
    return Effort(nodes, many, repeats(query, num_draws))


def repeats(query: Query, num_draws: int) -> int:
    """Draws of f, and of what lies below, a posterior draw."""
    return math.ceil(num_draws / query.draws.num)


def above(query: Query, trace: dict) -> Callable:
    """{outer GP site: f} -> the model's trace, all that a run has below them given."""
    known = (*query.draws.hyper, *query.layout.local_latents, *query.layout.inner)
    below = {k: trace[k]["value"] for k in known if k in trace}
    return lambda f: run(query.model, query.new_args, query.new_kwargs, below, f)


def average(query: Query, quantity: Callable):
    """Mix quantity(trace, moments of f) over runs, several a posterior draw if those are few."""

    def component(draw, keys):
        run = drawn_runs(query, draw)
        return mixture(lambda key: quantity(*run(key)), keys)

    return query.mixture(component, keys_of(query, MIN_DRAWS))


def keys_of(query: Query, num_draws: int):
    return random.split(random.key(0), (query.draws.num, repeats(query, num_draws)))
