"""EP's and VI's view of one datum that sees R functions: expectations and tilted moments over R
dimensions, for all data at once.

Nodes are the tensor product of Gauss-Hermite rules up to three functions, and Sobol points above,
the same at every step, so that an iteration has a fixed point. Of expectations under q they are
scaled by q's own covariance; of a tilted distribution by the Gaussian at its mode, with the ratio
as weights (importance sampling by nodes: Naylor & Smith 1982). A rule of fewer nodes says how far
they can be trusted.
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

from ppl_gp.local.natural import Marginals, PseudoLikelihood, at_mean
from ppl_gp.numerics import small
from ppl_gp.numerics.blocks import times
from ppl_gp.numerics.modes import derivatives
from ppl_gp.numerics.quadrature import TOLERANCE

NODES = {1: 96, 2: 24, 3: 14}  # a direction; the rule that judges it has three quarters of them
POINTS = 8192  # of Sobol's above, with their mirror images; half of them judge
_BATCH = 64  # nodes at once: memory is that many likelihoods of all data
_STEPS = 30
_FRACTIONS = (1.0, 0.5, 0.2, 0.05, 0.01)  # of a Newton step that are tried


class Rule(NamedTuple):
    """Nodes (Q, R) of N(0, I) and their weights (Q,)."""

    z: Float[np.ndarray, "Q R"]
    w: Float[np.ndarray, "Q"]


def nodes_of(functions: int, num: int | None) -> int:
    """What `num_nodes` of a method stands for: nodes a direction up to three functions, points
    above.
    """
    return num or NODES.get(functions, POINTS)


def tolerance(functions: int) -> float:
    """Nats: an estimated error of a datum above it is told. Points are no better than that."""
    if functions == 1:
        return TOLERANCE
    return 1e-4 if functions in NODES else 1e-2


@lru_cache(maxsize=32)
def rule(functions: int, num: int | None = None, fine: bool = True) -> Rule:
    """The rule of `num_nodes` for R functions, or the coarser one that judges it."""
    num = nodes_of(functions, num)
    if functions in NODES:
        x, w = np.polynomial.hermite_e.hermegauss(num if fine else num - num // 4)
        z = np.stack(np.meshgrid(*[x] * functions, indexing="ij"), -1).reshape(-1, functions)
        weights = np.prod(np.stack(np.meshgrid(*[w / w.sum()] * functions, indexing="ij")), 0)
        return Rule(z, weights.ravel())
    from scipy.stats import qmc  # takes half a second, which others need not wait for

    num = max(num // (2 if fine else 4), 1)
    u = qmc.Sobol(functions, scramble=False).random(num) + 0.5 / num  # midpoints of its cells
    z = ndtri(np.concatenate([u, 1.0 - u]))  # odd moments vanish
    e, V = np.linalg.eigh(z.T @ z / len(z))
    z = z @ (V / np.sqrt(e)) @ V.T  # second moments are exact
    return Rule(z, np.full(len(z), 1.0 / len(z)))


def _split(x, R: int):
    """(R N,) as (N, R)."""
    return jnp.reshape(x, (R, -1)).T


def _joined(x):
    """(N, R) as (R N,)."""
    return jnp.ravel(x.T)


def _front(T):
    """Blocks (R, R, N) as (N, R, R)."""
    return jnp.moveaxis(T, -1, 0)


def _back(T):
    return jnp.moveaxis(T, 0, -1)


def expected_log_lik(
    log_lik: Callable,
    mean,
    covariance: Float[Array, "R R N"],
    num: int | None = None,
    fine: bool = True,
):
    """E_N(f; mean, covariance)[log p(y_n | f_n)], (N,), differentiable in both. O(Q N)."""
    R = covariance.shape[0]
    z, w = (jnp.asarray(x, mean.dtype) for x in rule(R, num, fine))
    L = small.lower_root(_front(covariance))
    centre = _split(mean, R)

    def at(node):
        return log_lik(_joined(centre + L @ node))

    return jnp.tensordot(w, lax.map(jax.checkpoint(at), z, batch_size=_BATCH), 1)


def variational_target(
    log_lik: Callable, q: Marginals, sites: PseudoLikelihood, num: int | None = None
) -> tuple[PseudoLikelihood, Array, Array]:
    """(the natural-gradient target nat2 = -2 dE/dV, nat1 = dE/dmu + nat2 mu; E_n; its estimated
    error, nats).
    """
    total = lambda m, V: (lambda e: (jnp.sum(e), e))(expected_log_lik(log_lik, m, V, num))  # noqa: E731
    (_, expected), (slope, curve) = jax.value_and_grad(total, (0, 1), has_aux=True)(
        q.mean, q.variance
    )
    nat2 = -(curve + jnp.swapaxes(curve, 0, 1))
    coarse = expected_log_lik(log_lik, q.mean, q.variance, num, fine=False)
    error = lax.stop_gradient(jnp.abs(expected - coarse))
    return sites.like(slope + times(nat2, q.mean), nat2), expected, error


class Cavity(NamedTuple):
    """q without a share of its sites: precision (N, R, R), mean (R N,), and whether it is a
    Gaussian.
    """

    precision: Float[Array, "N R R"]
    mean: Float[Array, "RN"]
    proper: Array


def cavity(q: Marginals, sites: PseudoLikelihood, power: float) -> Cavity:
    """Of every datum; where it is improper the whole of q."""
    R = sites.functions
    whole = small.inverse(_front(q.variance))
    proper = small.is_definite(whole - power * _front(sites.nat2))
    share = jnp.where(proper, power, 0.0)
    precision = whole - share[:, None, None] * _front(sites.nat2)
    pulled = jnp.einsum("nab,nb->na", whole, _split(q.mean, R))
    nat1 = pulled - share[:, None] * _split(sites.nat1, R)
    mean = jnp.einsum("nab,nb->na", small.inverse(precision), nat1)
    return Cavity(precision, _joined(mean), proper)


class TiltedMoments(NamedTuple):
    """log normaliser (N,), mean (R N,), covariance (N, R, R), estimated error of log_z (N,)."""

    log_z: Float[Array, "N"]
    mean: Float[Array, "RN"]
    covariance: Float[Array, "N R R"]
    error: Float[Array, "N"]


def tilted_moments(
    log_lik: Callable, without: Cavity, power: float, num: int | None = None
) -> TiltedMoments:
    """Of cavity x p(y_n | f_n)^power, by nodes at its mode. O(Q N)."""
    R = without.precision.shape[-1]
    mode, spread = lax.stop_gradient(_mode(log_lik, without, power))
    log_z, mean, covariance = _moments(log_lik, without, power, mode, spread, rule(R, num))
    coarse, *_ = _moments(log_lik, without, power, mode, spread, rule(R, num, fine=False))
    return TiltedMoments(log_z, mean, covariance, lax.stop_gradient(jnp.abs(log_z - coarse)))


def _log_tilted(log_lik, without: Cavity, power):
    """f (R N,) -> log N(f; cavity) p^power, (N,)."""
    R = without.precision.shape[-1]
    constant = 0.5 * small.log_det(without.precision) - 0.5 * R * jnp.log(2 * jnp.pi)

    def at(f):
        d = _split(f - without.mean, R)
        return (
            power * log_lik(f)
            + constant
            - 0.5 * jnp.einsum("na,nab,nb->n", d, without.precision, d)
        )

    return at


def _mode(log_lik, without: Cavity, power):
    """(mode (R N,), L with L L^T the inverse curvature there, (N, R, R)): Newton's steps, the best
    of some fractions of each, every datum for itself. L moves with the curvature without jumps, and
    the nodes with it. Where less than a quarter of the cavity's precision is left, the likelihood's
    curvature is replaced by one above it.
    """
    R = without.precision.shape[-1]
    objective = _log_tilted(log_lik, without, power)

    def curvature(f):
        g, h = derivatives(log_lik, f, R)
        bend = -power * jnp.where(jnp.isfinite(h), h, 0.0)
        bend = jnp.moveaxis(bend, -1, 0)
        enough = small.is_definite(0.75 * without.precision + bend)[:, None, None]
        H = without.precision + jnp.where(enough, bend, small.majorant(bend))
        return g, small.lower_inverse(small.lower_root(H))

    def step(_, f):
        g, half = curvature(f)
        pull = jnp.einsum("nab,nb->na", without.precision, _split(without.mean - f, R))
        slope = power * _split(jnp.where(jnp.isfinite(g), g, 0.0), R) + pull
        move = jnp.einsum("nia,nib,nb->na", half, half, slope)
        fractions = jnp.asarray((0.0, *_FRACTIONS), f.dtype)
        trials = jax.vmap(lambda t: f + _joined(t * move))(fractions)
        heights = jax.vmap(objective)(trials)
        best = jnp.argmax(jnp.where(jnp.isfinite(heights), heights, -jnp.inf), 0)
        return f + _joined(fractions[best][:, None] * move)

    mode = lax.fori_loop(0, _STEPS, step, without.mean)
    return mode, jnp.swapaxes(curvature(mode)[1], -1, -2)


def _moments(log_lik, without: Cavity, power, mode, L, nodes: Rule):
    R = L.shape[-1]
    z, w = (jnp.asarray(x, mode.dtype) for x in nodes)
    objective, centre = _log_tilted(log_lik, without, power), _split(mode, R)
    log_det = jnp.sum(jnp.log(jnp.diagonal(L, axis1=-2, axis2=-1)), -1)

    def at(entry):
        node, weight = entry
        # N(z; 0, I) is what the weights stand for
        log_n = -0.5 * node @ node - 0.5 * R * jnp.log(2 * jnp.pi)
        return objective(_joined(centre + L @ node)) - log_n + log_det + jnp.log(weight)

    log_p = lax.map(jax.checkpoint(at), (z, w), batch_size=_BATCH)
    log_z = logsumexp(log_p, 0)
    p = jnp.exp(log_p - log_z)
    first = p.T @ z
    second = jnp.einsum("qn,qa,qb->nab", p, z, z) - first[:, :, None] * first[:, None]
    mean = centre + jnp.einsum("nab,nb->na", L, first)
    return log_z, _joined(mean), L @ second @ jnp.swapaxes(L, -1, -2)


def matched_sites(
    moments: TiltedMoments, without: Cavity, sites: PseudoLikelihood, power: float
) -> PseudoLikelihood:
    """The sites whose product with the cavities has the tilted moments; where a cavity is improper,
    the old ones.
    """
    R = sites.functions
    whole = small.inverse(moments.covariance)
    nat2 = (whole - without.precision) / power
    pulled = jnp.einsum("nab,nb->na", whole, _split(moments.mean, R))
    centred = jnp.einsum("nab,nb->na", without.precision, _split(without.mean, R))
    nat1 = (pulled - centred) / power
    keep = without.proper
    return sites.like(
        jnp.where(jnp.tile(keep, R), _joined(nat1), sites.nat1),
        jnp.where(keep, _back(nat2), sites.nat2),
    )


def tilted_terms(
    q: Marginals, without: Cavity, sites: PseudoLikelihood, log_z, power: float
) -> Float[Array, "N"]:
    """(1/power) [log int cavity p^power - log int cavity site^power] + log site at q's mean. As
    cavity site^power is q times a constant, the last two are (1/power) times the log ratio of q to
    the cavity at q's mean.
    """
    R = without.precision.shape[-1]
    away = _split(q.mean - without.mean, R)
    ratio = 0.5 * (
        jnp.einsum("na,nab,nb->n", away, without.precision, away)
        - small.log_det(without.precision)
        - small.log_det(_front(q.variance))
    )
    return jnp.where(without.proper, (log_z + ratio) / power, at_mean(q, sites))


def is_usable(q: Marginals) -> Array:
    """Whether every block of a posterior covariance is positive definite."""
    return jnp.all(small.is_definite(_front(q.variance)))
