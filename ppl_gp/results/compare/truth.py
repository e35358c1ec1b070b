"""The log evidence that q should have had, by importance sampling from a widened copy of it.

At the fit's hyperparameters, f = m + L v with v ~ N(0, I), and in the eigenbasis L^T T L = U
diag(lambda) U^T of its pseudo-likelihood q is N(v0, 1 / (1 + lambda)) in u = U^T v. The proposal is
an equal mixture of such Gaussians with the pseudo-likelihood's precision divided by s^2, s in
`WIDTHS`: directions that the data inform are widened, the others keep the prior's width, so that N
need not be small. Each component gets the same number of draws, and weights take the whole mixture
as their denominator (Veach & Guibas 1995; Owen & Zhou 2000). The component s = 1 is q itself: its
own weights give q's k-hat. Weights are Pareto-smoothed (Vehtari et al. 2024) by ArviZ.

No weight can tell of a mode that no draw meets. So other modes are looked for by ascents from draws
of the prior and from q's mean mirrored; each with more than `SMALL_SHARE` of the evidence adds a
Gaussian to the proposals. A mode that no ascent ends in stays unseen. The ascents are Newton's in
u, with the likelihood's curvature where it is positive, shortened until the density rises.

Cost: O(N^3) once for an eigendecomposition and for each Newton step of `STARTS` ascents, then
O(N^2) a draw, in batches of `BATCH` draws; memory num_samples N / 4.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.numerics.blocks import positive_part, times
from ppl_gp.numerics.linalg import add_diagonal, cholesky, half_log_det, tril_inverse
from ppl_gp.numerics.modes import derivatives
from ppl_gp.quick import full_jit
from ppl_gp.reading.factors import functions_of, read
from ppl_gp.results.datatree import training_sites
from ppl_gp.results.left_out import khats
from ppl_gp.results.query.layout import observed_names
from ppl_gp.results.record import Record
from ppl_gp.settings import as_key

WIDTHS = (1.0, 1.4, 2.0, 4.0)
MODE_WIDTHS = (1.0, 2.0)  # of the Gaussians at other modes
PRIOR_SHARE = 0.25  # draws of the prior, as a share of those about q
BATCH = 256
KHAT_LIMIT = 0.7  # above it importance sampling is not to be trusted (Vehtari et al. 2024)
STARTS = 6  # draws of the prior, beside q's mean and its mirror image
STEPS = 40
FRACTIONS = (1.0, 0.5, 0.2, 0.05, 0.005)  # of a Newton step that are tried
SMALL_SHARE = 1e-3  # of the evidence by Laplace's approximation, below which a mode is left out
MAX_MODES = 4
_APART = 1e-2  # of the root of N, in u, beyond which two ends of ascents are two modes


class Truth(NamedTuple):
    """An importance-sampled log evidence at a fit's hyperparameters.

    - `log_evidence`, `standard_error`: nats; `None` where `reason` says why.
    - `khat`: Pareto k-hat of the widened proposal, on which the estimate stands.
    - `khat_q`: Pareto k-hat of q(f) itself against p(f | y) of the model, jointly over all f: the
      heaviness of its weights' tail, above 0.7 too heavy to correct q by weights. From a quarter of
      the draws, to about +-0.1; small where nearly all of them count.
    - `khat_loo`: Pareto k-hat of q(f) against the model without datum n, (N,): p(y, f) /
      (p(y_n|f_n) q(f)), the weights of leave-one-out by q (Magnusson et al. 2019).
    - `efficiency_q`: effective share of q's own draws, 1 / E[w^2] with E[w] = 1; 1 for an exact q.
    - `other_modes`: modes of p(f | y) that were found away from q, and `share_q`: the share of the
      evidence that q's own draws meet (1 where no other mode was found).
    """

    log_evidence: float | None = None
    standard_error: float | None = None
    khat: float | None = None
    khat_q: float | None = None
    khat_loo: np.ndarray | None = None
    efficiency_q: float | None = None
    reason: str | None = None
    other_modes: int = 0
    share_q: float | None = None


def importance_sampling(fit: Record, rng_key=0, num_samples: int = 20_000) -> Truth:
    """Importance-sampled log evidence (nats) of a fit with one setting of the hyperparameters, and
    the k-hat of its q(f); or the reason why there is none: hyperparameters or f were sampled, a q
    of all sites of a model without a GP, a loaded fit, k-hat above 0.7.
    """
    if fit.sampled:
        return Truth(reason=_why_not(fit))
    kept = next(iter(fit.latent.values()))
    if not kept.has_sites:
        why = "importance sampling knows the local methods' q(f); LOO's k-hat judges this one"
        return Truth(reason=why)
    if not observed_names(training_sites(fit)):
        return Truth(reason="a loaded fit holds no observations")
    key, own = random.split(as_key(rng_key, "compare(fits, X, y, rng_key=0)"))
    given = fit.model, fit.hyper, fit.args, fit.kwargs
    factors, R, centre, strength = _coordinates(*given, kept.draw(0))
    mean = jnp.ravel(factors.prior.mean)
    modes = other_modes(factors.log_lik, mean, R, centre, own)
    weights = _log_weights(factors, R, centre, strength, jnp.asarray(modes), key, num_samples)
    return summarise(*map(np.asarray, weights), num_modes=len(modes))


def _why_not(fit: Record) -> str:
    if fit.latent or fit.by_chains:
        return "the hyperparameters were sampled: there is no one evidence to compare with"
    told = "importance sampling knows a q(f) of the local methods, and this q is of all sites"
    weighed = "; stats['pareto_k'] and stats['importance_gain'] have what its own draws weigh"
    return told + (weighed if "importance_gain" in fit.stats else "")


@full_jit
def _coordinates(model, hyper, args, kwargs, latent):
    """(factors, R, centre, strength): f = mean + R u, and q(u) = N(centre, 1 / (1 + strength))."""
    factors = read(model, *args, hyper=hyper, **kwargs)
    L = factors.prior.scale_tril
    strength, U = jnp.linalg.eigh(L.T @ times(latent.sites.nat2, L))
    R = L @ U
    return factors, R, R.T @ latent.alpha, strength  # alpha = K^-1 (mean - m)


@full_jit
def _log_weights(factors, R, centre, strength, modes, key, num: int):
    """log p(y, f) / proposal of every draw, (S,); of q's own log p(y, f) / q and log p(y_n | f_n).

    Proposals: q and its widened copies with `num` draws, Gaussians at `modes` (K, N) with as many
    each, and the prior with `PRIOR_SHARE` of `num`.
    """
    log_lik, mean, dtype = factors.log_lik, jnp.ravel(factors.prior.mean), R.dtype
    widths = jnp.array(WIDTHS, dtype)[:, None]
    # a proper q with negative precisions has strength > -1, also after rounding
    precision = jnp.maximum(1.0 + strength / widths**2, jnp.finfo(dtype).eps)
    factor = lambda u, w: precision_factor(log_lik, mean, R, u, w)  # noqa: E731
    tall = [factor(u, w) for u in modes for w in MODE_WIDTHS]
    at = [u for u in modes for _ in MODE_WIDTHS]
    each, few = -(-num // len(WIDTHS)), max(1, int(num * PRIOR_SHARE))
    counts = jnp.array([each] * (len(WIDTHS) + len(at)) + [few], dtype)

    def weigh(u):
        log_q = 0.5 * jnp.sum(jnp.log(precision) - precision * (u - centre) ** 2, 1)
        away = lambda C, m: half_log_det(C) - 0.5 * jnp.sum((C.T @ (u - m)) ** 2)  # noqa: E731
        elsewhere = jnp.array([away(C, m) for C, m in zip(tall, at, strict=True)], dtype)
        log_prior, terms = -0.5 * u @ u, log_lik(mean + R @ u)
        every = jnp.concatenate([log_q, elsewhere, log_prior[None]])
        log_p = jnp.sum(terms) + log_prior
        proposal = logsumexp(every + jnp.log(counts / jnp.sum(counts)))
        return log_p - proposal, log_p - log_q[0], terms

    def batch(make, keys):
        one = lambda key: weigh(make(random.normal(key, centre.shape, dtype)))  # noqa: E731
        return lax.map(one, keys, batch_size=BATCH)

    key_q, key_prior, *keys_at = random.split(key, 2 + len(at))
    draws: list[Any] = [  # q first
        (keys, lambda z, p=p: centre + z / jnp.sqrt(p))
        for keys, p in zip(random.split(key_q, (len(WIDTHS), each)), precision, strict=True)
    ]
    for C, m, key in zip(tall, at, keys_at, strict=True):
        own, inverse = random.split(key, each), tril_inverse(C)
        draws.append((own, lambda z, inverse=inverse, m=m: m + inverse.T @ z))
    draws.append((random.split(key_prior, few), lambda z: z))
    found = [batch(make, keys) for keys, make in draws]
    shared, (_, log_w_q, log_lik_q) = log_lik.shared(), found[0]
    return jnp.concatenate([log_w for log_w, *_ in found]) + shared, log_w_q + shared, log_lik_q


def summarise(
    log_w: np.ndarray, log_w_q: np.ndarray, log_lik_q: np.ndarray, num_modes: int = 0
) -> Truth:
    """Estimate, standard error and k-hats from log weights; no estimate if k-hat exceeds 0.7."""
    usable = np.isfinite(log_w)
    if not usable.any() or np.isnan(log_w).any() or np.isposinf(log_w).any():
        return Truth(reason="the model's density is not finite at the draws")
    smoothed, khat = smooth(log_w)
    smoothed_q, khat_q = smooth(log_w_q)
    efficiency_q = float(1.0 / np.sum(np.exp(2.0 * smoothed_q)) / log_w_q.size)
    khat_loo = khats((log_lik_q - log_w_q[:, None]).T)
    # outside of the tail ArviZ only normalises the weights, which gives the constant back
    lowest = int(np.argmin(np.where(usable, log_w, np.inf)))
    log_evidence = float(log_w[lowest] - smoothed[lowest] - np.log(log_w.size))
    standard_error = float(np.std(np.exp(smoothed + np.log(log_w.size))) / np.sqrt(log_w.size))
    share = min(1.0, float(np.exp(_log_mean(log_w_q) - _log_mean(log_w)))) if num_modes else 1.0
    found = khat, khat_q, khat_loo, efficiency_q
    if not khat <= KHAT_LIMIT:
        reason = f"Pareto k-hat of the proposal is {khat:.2f}, above {KHAT_LIMIT}"
        return Truth(None, None, *found, reason, num_modes, share)
    return Truth(log_evidence, standard_error, *found, None, num_modes, share)


def _log_mean(log_w: np.ndarray) -> float:
    return float(np.logaddexp.reduce(log_w) - np.log(log_w.size))


def smooth(log_w: np.ndarray) -> tuple[np.ndarray, float]:
    """(Pareto-smoothed normalised log weights, k-hat); k-hat is -inf if the largest fifth of the
    weights are equal, as they are for an exact q, and at most what all weights show (`_most`).
    """
    if np.ptp(np.sort(log_w)[-max(2, len(log_w) // 5) :]) < 1e-6:
        return log_w - np.logaddexp.reduce(log_w), -np.inf
    from arviz_stats.base import array_stats

    smoothed, khat = array_stats.psislw(-log_w)
    return np.asarray(smoothed), min(float(khat), _most(log_w))


def _most(log_w: np.ndarray) -> float:
    """The shape of Pareto weights that vary as much as these do, 1 - E[w]^2 / E[w^2]; infinite from
    shape 1 on. The tail's fit sees no size: of nearly equal weights it gives the shape of rare
    draws that carry almost nothing. Largest of S weights: (S / 3)^k, exceeded in 95 % of samples.
    """
    quantiles = np.log(np.arange(3, log_w.size + 3) / log_w.size)
    shapes = np.linspace(0.0, 1.0, 21)
    varied = [_varied(-k * quantiles) for k in shapes]
    return float(np.interp(_varied(log_w), varied, shapes, right=np.inf))


def _varied(log_w: np.ndarray) -> float:
    w = np.exp(log_w - np.max(log_w))
    return float(np.std(w) / np.sqrt(np.mean(w**2)))


def precision_factor(log_lik, mean, R, u, width=1.0) -> Float[Array, "N N"]:
    """Lower factor of I + R^T D R / width^2, D the likelihood's positive curvature at u. O(N^3)."""
    h = derivatives(log_lik, mean + R @ u, functions_of(log_lik))[1]
    D = positive_part(jnp.where(jnp.isfinite(h), -h, 0.0)) / width**2
    return cholesky(add_diagonal(R.T @ times(D, R), 1.0))


def other_modes(log_lik, mean, R, centre, key) -> np.ndarray:
    """Modes (K, N) in u but that of q's centre: at most `MAX_MODES`, of `SMALL_SHARE` or more."""
    ends, log_shares = map(np.asarray, _ascents(log_lik, mean, R, centre, key))
    found, enough = [0], np.nanmax(log_shares) + np.log(SMALL_SHARE)
    for i in np.argsort(-log_shares):
        far = min(np.linalg.norm(ends[i] - ends[j]) for j in found) > _APART * np.sqrt(len(centre))
        if far and enough < log_shares[i] < np.inf:
            found.append(i)
    return ends[found[1 : 1 + MAX_MODES]]


@full_jit
def _ascents(log_lik, mean, R, centre, key):
    """(ends (STARTS + 2, N), log evidence there by Laplace); the first starts at `centre`."""

    def objective(u):
        return jnp.sum(log_lik(mean + R @ u)) - 0.5 * u @ u

    def step(state):
        u, _, steps = state
        g = R.T @ jnp.nan_to_num(derivatives(log_lik, mean + R @ u)[0]) - u
        inverse = tril_inverse(precision_factor(log_lik, mean, R, u))
        direction = inverse.T @ (inverse @ g)
        trials = u + jnp.array((0.0, *FRACTIONS), u.dtype)[:, None] * direction
        new = trials[jnp.argmax(jnp.nan_to_num(jax.vmap(objective)(trials), nan=-jnp.inf))]
        return new, jnp.max(jnp.abs(new - u)), steps + 1

    def ascend(start):
        moves = lambda state: (state[1] > 1e-6) & (state[2] < STEPS)  # noqa: E731
        u, _, _ = lax.while_loop(moves, step, (start, jnp.asarray(jnp.inf, start.dtype), 0))
        return u, objective(u) - half_log_det(precision_factor(log_lik, mean, R, u))

    far = random.normal(key, (STARTS, *centre.shape), centre.dtype)
    return lax.map(ascend, jnp.concatenate([centre[None], -centre[None], far]))
