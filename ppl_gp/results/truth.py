"""The log evidence that an approximation should have had, by importance sampling from a widened copy of it.

At the fit's hyperparameters, f = m + L v with v ~ N(0, I), and in the eigenbasis L^T T L = U diag(lambda) U^T of its
pseudo-likelihood q is N(v0, 1 / (1 + lambda)) in u = U^T v. The proposal is an equal mixture of such Gaussians with the
pseudo-likelihood's precision divided by s^2, s in `WIDTHS`: directions that the data inform are widened, the others
keep the prior's width, so that N need not be small. Each component gets the same number of draws, and weights take
the whole mixture as their denominator (Veach & Guibas 1995; Owen & Zhou 2000). The component s = 1 is q itself: its own weights
give q's k-hat. Weights are Pareto-smoothed (Vehtari et al. 2024) by ArviZ.

Cost: O(N^3) once for an eigendecomposition, then O(N^2) a draw, in batches of `BATCH` draws; memory num_samples N / 4.
"""

from typing import TYPE_CHECKING, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from arviz_stats.base import array_stats
from jax import lax, random
from jax.scipy.special import logsumexp

from ppl_gp.factors import read
from ppl_gp.results.inference_data import observed_names, training_sites
from ppl_gp.sparse.process import SparseLatent

if TYPE_CHECKING:
    from ppl_gp.results.fit import Fit

WIDTHS = (1.0, 1.4, 2.0, 4.0)
BATCH = 256
KHAT_LIMIT = 0.7  # above it importance sampling is not to be trusted (Vehtari et al. 2024)


class Truth(NamedTuple):
    """An importance-sampled log evidence at a fit's hyperparameters.

    - `log_evidence`, `standard_error`: nats; `None` where `reason` says why.
    - `khat`: Pareto k-hat of the widened proposal, on which the estimate stands.
    - `khat_q`: Pareto k-hat of q(f) itself against p(f | y) of the model, jointly over all f: the heaviness of its
      weights' tail, above 0.7 too heavy to correct q by weights. Estimated from a quarter of the draws, to about +-0.1.
    - `khat_loo`: Pareto k-hat of q(f) against the model without datum n, (N,): p(y, f) / (p(y_n|f_n) q(f)), the weights
      of leave-one-out by q (Magnusson et al. 2019).
    - `efficiency_q`: effective share of q's own draws, 1 / E[w^2] with E[w] = 1; 1 where q is exact.
    """

    log_evidence: float | None
    standard_error: float | None
    khat: float | None
    khat_q: float | None
    khat_loo: np.ndarray | None
    efficiency_q: float | None
    reason: str | None = None


def unavailable(reason: str) -> Truth:
    """No estimate, and why."""
    return Truth(None, None, None, None, None, None, reason)


def importance_sampling(fit: "Fit", rng_key=0, num_samples: int = 20_000) -> Truth:
    """Importance-sampled log evidence (nats) of a fit with one setting of the hyperparameters, and the k-hat of its
    q(f).

    Not available, with the reason given: hyperparameters or f were sampled; the fit was loaded without its training
    data; k-hat above 0.7. The standard error falls as 1 / sqrt(num_samples).
    """
    latent = next(iter(fit.latent.values()))
    if isinstance(latent, SparseLatent):
        return unavailable("importance sampling knows the local methods' q(f); LOO's k-hat judges this one")
    if fit.sampled or latent.sites is None:
        return unavailable("the hyperparameters were sampled: there is no one evidence to compare with")
    if not observed_names(training_sites(fit)):
        return unavailable("a loaded fit holds no observations")
    key = random.key(rng_key) if isinstance(rng_key, int) else rng_key
    weights = _log_weights(fit.model, fit.hyper, fit.args, fit.kwargs, latent.draw(0), key, num_samples)
    return summarise(*map(np.asarray, weights))


@eqx.filter_jit
def _log_weights(model, hyper, args, kwargs, latent, key, num: int):
    """log p(y, f) / proposal of every draw, (S,); of the draws from q itself log p(y, f) / q and log p(y_n|f_n), (.,
    N)."""
    factors = read(model, *args, hyper=hyper, **kwargs)
    prior, log_lik = factors.prior, factors.log_lik
    L = prior.scale_tril
    strength, U = jnp.linalg.eigh((L.T * latent.sites.nat2) @ L)
    R, mean = L @ U, prior.mean
    centre = R.T @ latent.alpha  # u at q's mean, as alpha = K^-1 (mean - m)
    widths = jnp.array(WIDTHS, L.dtype)[:, None]
    # A pseudo-likelihood of negative precision has strength > -1 where q is proper; rounding must not undo that.
    precision = jnp.maximum(1.0 + strength / widths**2, jnp.finfo(L.dtype).eps)

    def weigh(component, key):
        noise = random.normal(key, centre.shape, L.dtype)
        u = centre + noise / jnp.sqrt(precision[component])
        log_q = 0.5 * jnp.sum(jnp.log(precision) - precision * (u - centre) ** 2, 1)
        terms = log_lik(mean + R @ u)
        log_p = jnp.sum(terms) - 0.5 * u @ u
        return log_p - logsumexp(log_q) + jnp.log(len(WIDTHS)), log_p - log_q[0], terms

    keys = random.split(key, (len(WIDTHS), -(-num // len(WIDTHS))))
    from_q = lax.map(lambda key: weigh(0, key), keys[0], batch_size=BATCH)
    wider = jnp.repeat(jnp.arange(1, len(WIDTHS)), keys.shape[1])
    from_wider = lax.map(lambda entry: weigh(*entry)[0], (wider, keys[1:].ravel()), batch_size=BATCH)
    return jnp.concatenate([from_q[0], from_wider]) + log_lik.shared(), *from_q[1:]


def summarise(log_w: np.ndarray, log_w_q: np.ndarray, log_lik_q: np.ndarray) -> Truth:
    """The estimate, its standard error and the k-hats from log weights; no estimate where k-hat exceeds 0.7."""
    usable = np.isfinite(log_w)
    if not usable.any() or np.isnan(log_w).any() or np.isposinf(log_w).any():
        return unavailable("the model's density is not finite at the draws")
    smoothed, khat = smooth(log_w)
    smoothed_q, khat_q = smooth(log_w_q)
    efficiency_q = float(1.0 / np.sum(np.exp(2.0 * smoothed_q)) / log_w_q.size)
    khat_loo = array_stats.psislw((log_lik_q - log_w_q[:, None]).T)[1]
    # ArviZ normalises the weights; those outside the tail are otherwise unchanged, which gives the constant back.
    lowest = int(np.argmin(np.where(usable, log_w, np.inf)))
    log_evidence = float(log_w[lowest] - smoothed[lowest] - np.log(log_w.size))
    standard_error = float(np.std(np.exp(smoothed + np.log(log_w.size))) / np.sqrt(log_w.size))
    if not khat <= KHAT_LIMIT:
        reason = f"Pareto k-hat of the proposal is {khat:.2f}, above {KHAT_LIMIT}"
        return Truth(None, None, khat, khat_q, khat_loo, efficiency_q, reason)
    return Truth(log_evidence, standard_error, khat, khat_q, khat_loo, efficiency_q)


def smooth(log_w: np.ndarray) -> tuple[np.ndarray, float]:
    """(Pareto-smoothed normalised log weights, k-hat); k-hat is -inf where all weights are equal, as for an exact q."""
    if np.ptp(log_w[np.isfinite(log_w)]) < 1e-6:
        w = np.exp(log_w - log_w.max())
        return np.log(w / w.sum()), -np.inf
    smoothed, khat = array_stats.psislw(-log_w)
    return np.asarray(smoothed), float(khat)
