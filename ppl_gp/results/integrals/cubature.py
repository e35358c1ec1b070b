"""Integrals over two or three functions a datum, by nodes that follow the integrand; over more by
weighted draws.

In whitened coordinates f = m + sd z, z ~ N(0, I), the mode z* of g(z) N(z; 0, I) and the
eigenvectors V of the curvature there give axes along which N(0, I) stays a product. Along each of
them go the nodes of `numerics.quadrature.nodes_around`, centred on the mode and scaled by the
curvature: adaptive quadrature (Naylor & Smith 1982; Liu & Pierce 1994) that keeps the Gaussian's
tails in sight. Two functions are integrated one inside the other. Each rule is compared with its
own half, which says how far it can be trusted. Draws come from the Gaussian at the mode and from
N(0, I), half each, with their mixture as the weights' denominator (Hesterberg 1995).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.numerics import blocks as small
from ppl_gp.numerics.quadrature import nodes_around
from ppl_gp.quick import pruned
from ppl_gp.results.integrals.likelihood import log_expectation
from ppl_gp.results.query.mixture import Moments

MAX_DIMENSIONS = 3
# Nodes of each axis, odd, by "many": what an average over draws blurs need not be resolved.
PAIR_NODES = {True: 25, False: 49}
TRIPLE_NODES = {True: 11, False: 25}
INNER_BATCH = 7  # outer nodes at once
NEWTON_STEPS = 40
FRACTIONS = (1.0, 0.5, 0.2, 0.05, 0.005)  # of a Newton step that are tried
_NUDGE = 1e-6  # off zero, where NumPyro's logistic log-probabilities have wrong second derivatives
LEAST_CURVATURE = 0.25  # of the integrand, as a share of the Gaussian's own


class Bulk(NamedTuple):
    """Where the integrand lives: its mode (D, M), axes V (M, D, D) in columns, a standard deviation
    along each, (M, D).
    """

    mode: Float[Array, "D M"]
    axes: Float[Array, "M D D"]
    scale: Float[Array, "M D"]


def bulk(log_g: Callable, dims: int, like: Float[Array, "M"]) -> Bulk:
    """Newton's method on log g(z) - |z|^2 / 2 for each datum, log_g: (D, M) -> (M,). O(D) gradients
    a step.
    """

    def objective(z):
        return log_g(z) - 0.5 * jnp.sum(z**2, 0)

    zero = jnp.zeros((dims, *like.shape), like.dtype)
    slope = jax.grad(pruned(lambda z: jnp.sum(objective(z)), zero))

    def curvature(z):
        """Eigenvalues (M, D) and vectors (M, D, D) of minus the Hessian, the former raised to where
        a step can be made.
        """
        columns = jax.vmap(lambda e: jax.jvp(slope, (z,), (e[:, None] * jnp.ones_like(z),))[1])(
            jnp.eye(dims, dtype=z.dtype)
        )
        H = -jnp.moveaxis(columns, -1, 0)
        finite = jnp.all(jnp.isfinite(H), (1, 2))[:, None, None]
        values, V = jnp.linalg.eigh(
            jnp.where(finite, 0.5 * (H + jnp.swapaxes(H, 1, 2)), jnp.eye(dims, dtype=z.dtype))
        )
        return jnp.maximum(jnp.abs(values), LEAST_CURVATURE), V

    def step(state):
        z, _, steps = state
        values, V = curvature(z)
        along = jnp.einsum("mij,im->mj", V, jnp.nan_to_num(slope(z)))
        direction = jnp.einsum("mij,mj->im", V, along / values)
        trials = jnp.concatenate(
            [z[None], z + jnp.array(FRACTIONS, z.dtype)[:, None, None] * direction]
        )
        best = jnp.argmax(jnp.nan_to_num(jax.vmap(objective)(trials), nan=-jnp.inf), 0)
        new = jnp.take_along_axis(trials, best[None, None], 0)[0]
        return new, jnp.max(jnp.sum(((new - z) ** 2), 0) * values[:, -1]), steps + 1

    start = jnp.full((dims, like.shape[0]), _NUDGE, like.dtype)
    moved = lambda state: (state[1] > 1e-6) & (state[2] < NEWTON_STEPS)  # noqa: E731
    z, _, _ = lax.while_loop(moved, step, (start, jnp.asarray(jnp.inf, like.dtype), 0))
    values, V = curvature(z)
    return jax.tree.map(lax.stop_gradient, Bulk(z, V, 1.0 / jnp.sqrt(values)))


class Nodes(NamedTuple):
    """A product of grids in rotated coordinates, made point by point: `grid`, `log_w` (Q, D, M)."""

    grid: Float[Array, "Q D M"]
    log_w: Float[Array, "Q D M"]
    axes: Float[Array, "M D D"]

    def fold(self, function: Callable, combine: Callable, empty):
        """Fold combine(total, function(z, log_w)) over slices of the grid; function gets z (P, D,
        M), log_w (P, M).
        """
        Q, D, _ = self.grid.shape
        rest = jnp.stack(jnp.meshgrid(*[jnp.arange(Q)] * (D - 1), indexing="ij"), -1).reshape(
            -1, D - 1
        )

        def slice_at(total, q):
            chosen = jnp.concatenate([jnp.full((rest.shape[0], 1), q), rest], 1)  # (P, D)
            w = jnp.stack([self.grid[chosen[:, k], k] for k in range(D)], 1)
            log_w = sum(self.log_w[chosen[:, k], k] for k in range(D))
            return combine(total, function(jnp.einsum("mij,pjm->pim", self.axes, w), log_w)), None

        return lax.scan(slice_at, empty, jnp.arange(Q))[0]

    def coarse(self) -> "Nodes":
        """Every second node: the same rule with twice the spacing."""
        return Nodes(self.grid[::2], self.log_w[::2] + jnp.log(2.0), self.axes)


def product_nodes(log_g: Callable, dims: int, like: Float[Array, "M"], num: int) -> Nodes:
    """Nodes for an integrand g: `num` along each axis."""
    at = bulk(log_g, dims, like)
    centre = jnp.einsum("mij,im->jm", at.axes, at.mode)
    zero = jnp.zeros(centre.size, like.dtype)
    grid, log_w = nodes_around(
        zero, jnp.ones_like(zero), jnp.ravel(centre), jnp.ravel(at.scale.T), num
    )
    return Nodes(*(jnp.reshape(x, (num, dims, -1)) for x in (grid, log_w)), at.axes)


def log_integral(log_g: Callable, dims: int, like: Float[Array, "M"], many: bool):
    """(log E[g(z)], squared relative error), z ~ N(0, I_D), (M,) each, for D = 2, 3. `many`: an
    average will be taken over it.

    The error is the difference to the same rule with half of the nodes, which is larger than the
    rule's own.
    """
    if dims == 2:
        return _iterated(log_g, like, PAIR_NODES[many])
    nodes = product_nodes(log_g, dims, like, TRIPLE_NODES[many])

    def part(z, log_w):
        values = log_w + jax.vmap(log_g)(z)
        return logsumexp(jnp.where(jnp.isnan(values), -jnp.inf, values), 0)

    empty = jnp.full(like.shape, -jnp.inf, like.dtype)
    return _with_error(*(n.fold(part, jnp.logaddexp, empty) for n in (nodes, nodes.coarse())))


def _iterated(log_g: Callable, like: Float[Array, "M"], num: int):
    """One axis inside the other, each way round, and the better of both for each datum.

    The inner nodes follow the integrand at every outer node, so that a ridge whose width changes
    along it (a noise scale that is a function too) is resolved, where the ridge is crossed by the
    inner axis.
    """
    at = bulk(log_g, 2, like)
    spread = jnp.sqrt(jnp.einsum("mij,mj->im", at.axes**2, at.scale**2))
    zero, one = jnp.zeros_like(like), jnp.ones_like(like)

    def way(outer):
        pick = lambda x: jnp.where(outer == 0, x[0], x[1])  # noqa: E731
        x, log_w = nodes_around(zero, one, pick(at.mode), pick(spread), num)

        def inside(x):
            def log_inner(i):
                return log_g(jnp.where(outer == 0, jnp.stack([x, i]), jnp.stack([i, x])))

            return log_expectation(log_inner, Moments(zero, one), num - 1, concave=True)

        values = log_w + lax.map(inside, x, batch_size=INNER_BATCH)
        values = jnp.where(jnp.isnan(values), -jnp.inf, values)
        return _with_error(logsumexp(values, 0), logsumexp(values[::2], 0) + jnp.log(2.0))

    log_p, error = lax.map(way, jnp.arange(2))
    best = jnp.argmin(error, 0)[None]
    return jnp.take_along_axis(log_p, best, 0)[0], jnp.take_along_axis(error, best, 0)[0]


def _with_error(fine, coarse):
    """(log integral, squared relative error)."""
    return fine, jnp.where(jnp.isfinite(fine), jnp.expm1(coarse - fine) ** 2, jnp.inf)


def moments(
    mean: Callable, variance: Callable, dims: int, like: Float[Array, "M"], many: bool
) -> Moments:
    """Mean and variance of y from those given z, (M,) each, by the law of total variance; nodes
    where E[y^2] lives.
    """

    def log_square(z):
        return jnp.log(variance(z) + mean(z) ** 2 + jnp.finfo(z.dtype).tiny)

    nodes = product_nodes(
        log_square, dims, like, PAIR_NODES[many] if dims == 2 else TRIPLE_NODES[many]
    )
    base = mean(jnp.zeros((dims, like.shape[0]), like.dtype))  # about which sums cancel little
    base = jnp.where(jnp.isfinite(base), base, 0.0)

    def part(z, log_w):
        w, first, spread = jnp.exp(log_w), jax.vmap(mean)(z) - base, jax.vmap(variance)(z)
        total = lambda x: jnp.sum(jnp.where(w > 0, w * x, 0.0), 0)  # noqa: E731
        return total(first), total(spread), total(first**2)

    zero = jnp.zeros_like(base)
    first, spread, square = nodes.fold(
        part, lambda a, b: jax.tree.map(jnp.add, a, b), (zero, zero, zero)
    )
    return Moments(base + first, spread + jnp.maximum(square - first**2, 0.0))


def log_integral_of_quadratic(log_g: Callable, dims: int, like: Float[Array, "M"]):
    """(log E[g(z)], 0), z ~ N(0, I_D), (M,) each, of log g a quadratic: with slope b and Hessian -A
    at 0 it is log g(0) + b^T (I + A)^-1 b / 2 - log|I + A| / 2; NaN where I + A is not positive
    definite. D gradients, O(M D^3).
    """
    zero = jnp.zeros((dims, *like.shape), like.dtype)
    slope = jax.grad(pruned(lambda z: jnp.sum(log_g(z)), zero))
    along = lambda e: jax.jvp(slope, (zero,), (e[:, None] * jnp.ones_like(zero),))[1]  # noqa: E731
    eye = jnp.eye(dims, dtype=like.dtype)
    P, b = eye - jnp.moveaxis(jax.vmap(along)(eye), -1, 0), slope(zero)
    log_p = log_g(zero) - 0.5 * small.log_det(P)
    log_p = log_p + 0.5 * jnp.einsum("im,mij,jm->m", b, small.inverse(P), b)
    return jnp.where(small.is_definite(P), log_p, jnp.nan), jnp.zeros_like(like)


def log_integral_by_draws(log_g: Callable, dims: int, like: Float[Array, "M"], num: int, key):
    """(log E[g(z)], relative variance of the estimate of E[g(z)]), (M,) each, by `num` weighted
    draws.
    """
    at = bulk(log_g, dims, like)
    spread = at.axes * at.scale[:, None, :]
    log_scale = jnp.sum(jnp.log(at.scale), 1)

    def draw(key, from_prior):
        noise = random.normal(
            key, (dims, 1), like.dtype
        )  # the same for all data: an answer may not depend on its companions
        z = jnp.where(from_prior, noise, at.mode + jnp.einsum("mij,jm->im", spread, noise))
        along = jnp.einsum("mij,im->jm", at.axes, z - at.mode) / at.scale.T
        log_prior, log_bulk = -0.5 * jnp.sum(z**2, 0), -0.5 * jnp.sum(along**2, 0) - log_scale
        return log_g(z) + log_prior - (jnp.logaddexp(log_prior, log_bulk) - jnp.log(2.0))

    log_w = lax.map(
        lambda x: draw(*x), (random.split(key, num), jnp.arange(num) % 2 == 0), batch_size=64
    )
    return mean_and_error(log_w)


def mean_and_error(log_w: Float[Array, "S ..."]):
    """(log mean weight, variance of the mean weight over its square) of weights with a leading axis
    of S draws.
    """
    log_w = jnp.where(jnp.isnan(log_w), -jnp.inf, log_w)
    num = log_w.shape[0]
    first = logsumexp(log_w, 0) - jnp.log(num)
    second = logsumexp(2.0 * log_w, 0) - jnp.log(num)
    return first, relative_variance(first, second, num)


def relative_variance(log_first, log_second, num: int):
    """Var[mean of w] / E[w]^2 from log E[w] and log E[w^2] over `num` draws; infinite where no draw
    has weight.
    """
    ratio = jnp.exp(log_second - 2.0 * log_first)
    return jnp.where(jnp.isfinite(log_first), jnp.maximum(ratio - 1.0, 0.0) / num, jnp.inf)
