"""EP's and VI's view of one datum that sees R functions: expectations and tilted moments over R
dimensions, for all data at once.

Nodes are the tensor product of Gauss-Hermite rules up to three functions, and Sobol points above,
the same at every step, so that an iteration has a fixed point. Of expectations under q they are
scaled by q's own covariance; of a tilted distribution by the Gaussian at its mode, with the ratio
as weights (importance sampling by nodes: Naylor & Smith 1982). Of four functions or more that are
not proved log-concave, points are also drawn at a second mode and under the cavity itself. At the
end, other rules judge; the factors are measured (tests/test_error_estimates.py).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float
from scipy.special import ndtri

from ppl_gp.local.natural import Marginals, PseudoLikelihood
from ppl_gp.local.tilted import Cavity, front, joined, rows_times, split
from ppl_gp.numerics import blocks as small
from ppl_gp.numerics.blocks import times
from ppl_gp.numerics.modes import derivatives
from ppl_gp.numerics.quadrature import NODES, POINTS, SAFETY, hermite, nodes_of

_BATCH = 64  # nodes at once: memory is that many likelihoods of all data
_STEPS = 30
_FRACTIONS = (1.0, 0.5, 0.2, 0.05, 0.01)  # of a Newton step that are tried


class Rule(NamedTuple):
    """Nodes (Q, R) of N(0, I) and their weights (Q,)."""

    z: Float[np.ndarray, "Q R"]
    w: Float[np.ndarray, "Q"]


@lru_cache(maxsize=32)
def rule(functions: int, num: int | None = None, points: bool = False) -> Rule:
    """The rule of `num_nodes` for R functions; `points`: Sobol's in any case."""
    num = nodes_of(functions, num)
    if functions in NODES and not points:
        return Rule(*hermite(num, functions))
    from scipy.stats import qmc  # takes half a second, which others need not wait for

    num = max(num // 2, 1)
    u = qmc.Sobol(functions, scramble=False).random(num) + 0.5 / num  # midpoints of its cells
    z = ndtri(np.concatenate([u, 1.0 - u]))  # odd moments vanish
    e, V = np.linalg.eigh(z.T @ z / len(z))
    z = z @ (V / np.sqrt(e)) @ V.T  # second moments are exact
    return Rule(z, np.full(len(z), 1.0 / len(z)))


def expected_log_lik(
    log_lik: Callable, mean, covariance: Float[Array, "R R N"], nodes: Rule
) -> Float[Array, "N"]:
    """E_N(f; mean, covariance)[log p(y_n | f_n)], (N,), differentiable in both. O(Q N)."""
    R = covariance.shape[0]
    z, w = (jnp.asarray(x, mean.dtype) for x in nodes)
    L = small.lower_root(front(covariance))
    centre = split(mean, R)

    def at(node):
        return log_lik(joined(centre + L @ node))

    return jnp.tensordot(w, lax.map(jax.checkpoint(at), z, batch_size=_BATCH), 1)


def variational_target(
    log_lik: Callable, q: Marginals, sites: PseudoLikelihood, num: int | None = None
) -> tuple[PseudoLikelihood, Array]:
    """(the natural-gradient target nat2 = -2 dE/dV, nat1 = dE/dmu + nat2 mu; E_n)."""
    nodes = rule(sites.functions, num)
    total = lambda m, V: (lambda e: (jnp.sum(e), e))(expected_log_lik(log_lik, m, V, nodes))  # noqa: E731
    (_, expected), (slope, curve) = jax.value_and_grad(total, (0, 1), has_aux=True)(
        q.mean, q.variance
    )
    nat2 = -(curve + jnp.swapaxes(curve, 0, 1))
    return sites.like(slope + times(nat2, q.mean), nat2), expected


def expectation_error(log_lik: Callable, q: Marginals, expected, num: int | None = None):
    """Estimated error of E_n, nats, (N,)."""
    away = lambda nodes: expected_log_lik(log_lik, q.mean, q.variance, nodes) - expected  # noqa: E731
    return _judged(away, away, q.variance.shape[0], num)


def _judged(away: Callable, away_wide: Callable | None, R: int, num: int | None):
    """`SAFETY` times the distance to fewer nodes and to more, or twice that to points where it is
    beyond their scatter: something narrow lies between nodes. Of points, four times their scatter.
    """
    num = nodes_of(R, num)
    if R not in NODES:
        return 4.0 * _of_parts(away, rule(R, max(num, 16)).z)[1]
    near = SAFETY * jnp.abs(away(rule(R, num - num // 4)))
    if away_wide is None:
        return near
    near = jnp.maximum(near, SAFETY * jnp.abs(away_wide(rule(R, num + num // 2 + 1))))
    mean, scatter = _of_parts(away_wide, rule(R, POINTS, points=True).z)
    return jnp.maximum(near, jnp.where(mean <= 3.0 * scatter, 0.0, 2.0 * mean))


def _of_parts(away: Callable, z: Float[np.ndarray, "Q R"]):
    """(|mean|, standard error), (N,), of 8 parts of points with their mirror images."""
    size = len(z) // 16
    parts = np.reshape(z, (2, -1, z.shape[1]))[:, : 8 * size].reshape(2, 8, size, -1)
    parts = np.reshape(np.swapaxes(parts, 0, 1), (8, 2 * size, -1))
    far = lax.map(lambda z: away(Rule(z, np.full(len(z), 1.0 / len(z)))), parts)
    return jnp.abs(jnp.mean(far, 0)), jnp.std(far, 0, ddof=1) / np.sqrt(8)


class TiltedMoments(NamedTuple):
    """log normaliser, mean and covariance; the Gaussians N(centre, half half^T) of the nodes."""

    log_z: Float[Array, "N"]
    mean: Float[Array, "RN"]
    covariance: Float[Array, "N R R"]
    centres: Float[Array, "K N R"]
    halves: Float[Array, "K N R R"]

    def error(self, log_lik, without: Cavity, power: float, num: int | None = None):
        """Estimated error of log_z, nats, (N,)."""
        (K, _, R), own = self.centres.shape, (self.centres, self.halves)
        cavity = split(without.mean, R)[None], _wide(without)[None]
        both = tuple(jnp.concatenate(pair) for pair in zip(own, cavity, strict=True))

        def away(nodes, at=own):
            return jnp.expm1(_moments(log_lik, without, power, *at, nodes)[0] - self.log_z)

        if K > 1:
            return jnp.log1p(6.0 * jnp.abs(away(rule(R, nodes_of(R, num) // 8))))
        wide = None if getattr(log_lik, "is_concave", False) else lambda nodes: away(nodes, both)
        return jnp.log1p(_judged(away, wide, R, num))


def _wide(without: Cavity):
    """L with L L^T the cavity's covariance, (N, R, R)."""
    return jnp.swapaxes(small.lower_inverse(small.lower_root(without.precision)), -1, -2)


def tilted_moments(
    log_lik: Callable, without: Cavity, power: float, num: int | None = None
) -> TiltedMoments:
    """Of cavity x p(y_n | f_n)^power, by nodes at its mode. O(Q N)."""
    R, starts = without.precision.shape[-1], without.mean[None]
    several_modes = R not in NODES and not getattr(log_lik, "is_concave", False)
    if several_modes:
        # a narrow mode that the cavity's mean does not lead to, and mass far from any
        wide = _wide(without)
        at = lambda node: joined(split(without.mean, R) + wide @ node)  # noqa: E731
        z = jnp.asarray(rule(R, nodes_of(R, num) // 4).z, wide.dtype)
        heights: Array = lax.map(lambda node: log_lik(at(node)), z, batch_size=_BATCH)
        best = jnp.argmax(jnp.where(jnp.isfinite(heights), heights, -jnp.inf), 0)
        there = split(without.mean, R) + rows_times(wide, z[best])
        starts = jnp.stack([without.mean, joined(there)])
    centres, halves = jax.vmap(lambda start: _mode(log_lik, without, power, start))(starts)
    if several_modes:
        centres = jnp.concatenate([centres, without.mean[None]])
        halves = jnp.concatenate([halves, wide[None]])
    centres = jax.vmap(lambda c: split(c, R))(centres)
    proposals = lax.stop_gradient((centres, halves))
    nodes = rule(R, nodes_of(R, num) // 2 if several_modes else num)
    return TiltedMoments(*_moments(log_lik, without, power, *proposals, nodes), *proposals)


def _log_tilted(log_lik, without: Cavity, power):
    """f (R N,) -> log N(f; cavity) p^power, (N,)."""
    R = without.precision.shape[-1]
    constant = 0.5 * small.log_det(without.precision) - 0.5 * R * jnp.log(2 * jnp.pi)

    def at(f):
        d = split(f - without.mean, R)
        square = jnp.einsum("na,nab,nb->n", d, without.precision, d)
        return power * log_lik(f) + constant - 0.5 * square

    return at


def _mode(log_lik, without: Cavity, power, start):
    """(mode (R N,), L with L L^T the inverse curvature there, (N, R, R)): Newton's steps, the best
    of some fractions of each, every datum for itself. L moves with the curvature without jumps, and
    the nodes with it. Where less than a quarter of the cavity's precision is left, the likelihood's
    curvature is replaced by one above it.
    """
    R = without.precision.shape[-1]
    objective = _log_tilted(log_lik, without, power)

    def curvature(f):
        g, h = derivatives(log_lik, f, R)
        bend: Array = -power * front(jnp.where(jnp.isfinite(h), h, 0.0))
        enough = small.is_definite(0.75 * without.precision + bend)[:, None, None]
        H = without.precision + jnp.where(enough, bend, small.majorant(bend))
        return g, small.lower_inverse(small.lower_root(H))

    def step(_, f):
        g, half = curvature(f)
        pull = rows_times(without.precision, split(without.mean - f, R))
        slope = power * split(jnp.where(jnp.isfinite(g), g, 0.0), R) + pull
        move = jnp.einsum("nia,nib,nb->na", half, half, slope)
        fractions = jnp.asarray((0.0, *_FRACTIONS), f.dtype)
        trials = jax.vmap(lambda t: f + joined(t * move))(fractions)
        heights: Array = jax.vmap(objective)(trials)
        best = jnp.argmax(jnp.where(jnp.isfinite(heights), heights, -jnp.inf), 0)
        return f + joined(fractions[best][:, None] * move)

    mode = lax.fori_loop(0, _STEPS, step, start)
    return mode, jnp.swapaxes(curvature(mode)[1], -1, -2)


def _moments(log_lik, without: Cavity, power, centres, halves, nodes: Rule):
    """(log normaliser, mean, covariance) by nodes under each of K Gaussians N(c, L L^T), (K, N, R)
    and (K, N, R, R), with their mixture as the weights' denominator.
    """
    K, _, R = centres.shape
    z, w = (jnp.asarray(x, halves.dtype) for x in nodes)
    objective = _log_tilted(log_lik, without, power)
    log_scale = jnp.sum(jnp.log(jnp.diagonal(halves, axis1=-2, axis2=-1)), -1)
    flip = lambda a: jnp.swapaxes(a, -1, -2)  # noqa: E731
    back = flip(small.lower_inverse(flip(halves))) if K > 1 else halves

    def at(entry):
        node, weight = entry
        f = centres + halves @ node  # (K, N, R)

        def one(k):
            away = [node if j == k else rows_times(back[j], f[k] - centres[j]) for j in range(K)]
            log_q = [-0.5 * jnp.sum(a**2, -1) - log_scale[j] for j, a in enumerate(away)]
            log_q = logsumexp(jnp.stack(log_q), 0) - np.log(K) - 0.5 * R * np.log(2 * np.pi)
            return objective(joined(f[k])) - log_q + jnp.log(weight / K)

        return jnp.stack([one(k) for k in range(K)])

    log_p = lax.map(jax.checkpoint(at), (z, w), batch_size=_BATCH)
    log_z = logsumexp(log_p, (0, 1))
    p = jnp.exp(log_p - log_z)
    share = jnp.sum(p, 0)[..., None]
    along = jnp.einsum("knab,qkn,qb->kna", halves, p, z)
    mean = jnp.sum(share * centres + along, 0)
    away = centres - mean
    spread = halves @ jnp.einsum("qkn,qa,qb->knab", p, z, z) @ jnp.swapaxes(halves, -1, -2)
    cross = away[..., None] * along[..., None, :]
    spread += cross + jnp.swapaxes(cross, -1, -2)
    spread += (share * away)[..., None] * away[..., None, :]
    return log_z, joined(mean), jnp.sum(spread, 0)
