"""Latents of new data, h* given (x*, y*): importance resampling from an encoder, or from a Gaussian fitted to each datum."""

from typing import TYPE_CHECKING, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.deep.latents import Encoded, FreeGaussian, latent_form, latent_size
from ppl_gp.errors import DataError, ModelError
from ppl_gp.results.case import Case, case_at, drawn_trace
from ppl_gp.results.observations import observations_at
from ppl_gp.results.predictive import log_lik_above
from ppl_gp.tracing import log_prob_per_datum, run

if TYPE_CHECKING:
    from ppl_gp.results.fit import Fit

_STEPS, _RATE, _DRAWS = 300, 0.05, 4  # of the Gaussian that is fitted where no encoder sees y


class LatentDraws(NamedTuple):
    """`draws`: {latent site: (num_samples, ...)} in the site's own shape at the new inputs. `ess`: effective number of proposals
    behind each datum's draws, (M,); a few mean that the draws repeat each other."""

    draws: dict[str, Array]
    ess: Float[Array, "M"]


def infer_latents(
    fit: "Fit", rng_key, X_new, y_new, *args, num_samples: int = 200, num_proposals: int = 1000, **kwargs
) -> LatentDraws:
    """p(h* | x*, y*, data) of each new datum, proportional to p(h) E_q(f)[p(y* | f([x*, h]))].

    Proposals come from q(h | x*, y*) where the fit has an encoder that sees y, else from a Gaussian that is fitted to each datum by
    Adam; every other one from the prior, which bounds the weights (a defensive mixture: Hesterberg 1995). They are weighted by the
    model and resampled, so that the draws are right as `num_proposals` grows. O(num_proposals M N_u^2)
    for N_u inducing variables. Raises `ModelError` for a fit without q(h) (draws of NUTS are of the training data), `DataError` as
    `log_density`.
    """
    if min(num_samples, num_proposals) < 1:
        raise DataError(
            f"infer_latents(num_samples={num_samples}, num_proposals={num_proposals}): give at least 1 each."
        )
    if not fit.local or fit.sampled:
        raise ModelError(f"{type(fit.method).__name__} has no q(h) of latents; fit a model with latents by SVGP().")
    case = case_at(fit, X_new, args, kwargs)
    observations = observations_at(case, y_new)
    key = random.key(rng_key) if isinstance(rng_key, int) else rng_key
    encoders = {k: q for k, q in fit.local.items() if isinstance(q, Encoded)}
    return LatentDraws(*_infer(case, encoders, observations, key, num_samples, num_proposals))


@eqx.filter_jit
def _infer(case: Case, encoders, observations, key, num_samples: int, num_proposals: int):
    hyper, latents = jax.tree.map(lambda x: x[0], case.draws)
    kwargs = {**case.new_kwargs, **observations}
    sites = run(case.model, case.new_args, kwargs, case.new_hyper(hyper))
    key_fit, key_propose, key_choose = random.split(key, 3)
    log_joint = _log_joint(case, hyper, latents, observations, key_fit)
    free = {k: latent_size(sites[k], case.layout.num) for k in case.layout.local_latents if k not in encoders}
    q = {k: guide.at(sites[k], None, case.new_args, kwargs) for k, guide in encoders.items()}
    q |= {
        k: v.at(sites[k], None, (), {}) for k, v in _fitted(free, q, log_joint, sites, case.layout.num, key_fit).items()
    }

    prior = {k: sites[k]["fn"] for k in q}

    def propose(key, from_prior):
        h = {
            k: jnp.where(from_prior, prior[k].sample(random.fold_in(key, i)), q[k].sample(random.fold_in(key, i)))
            for i, k in enumerate(sorted(q))
        }
        log_q, log_p = (sum(_log_q(sites[k], d[k], h[k], case.layout.num) for k in q) for d in (q, prior))
        return h, log_joint(h) - (jnp.logaddexp(log_q, log_p) - jnp.log(2.0))

    halves = jnp.arange(num_proposals) % 2 == 0
    h, log_w = lax.map(lambda x: propose(*x), (random.split(key_propose, num_proposals), halves))
    log_w = log_w - logsumexp(log_w, 0)
    chosen = random.categorical(key_choose, log_w, axis=0, shape=(num_samples, case.layout.num))
    return {k: _choose(v, chosen, latent_form(sites[k], case.layout.num)[0]) for k, v in h.items()}, jnp.exp(
        -logsumexp(2 * log_w, 0)
    )


def _log_joint(case: Case, hyper, latents, observations, key):
    """h -> log p(y* | h) + log p(h), (M,)."""
    conditionals = case.conditionals(hyper, latents)

    def of(h):
        trace, f = drawn_trace(case, hyper, conditionals, key, joint=False, latents=h, **observations)
        prior = sum(log_prob_per_datum({**trace[k], "scale": None}, case.layout.num) for k in h)
        return log_lik_above(case, trace, f, observations) + prior

    return of


def _log_q(site, q, h, num):
    return log_prob_per_datum({**site, "fn": q, "value": h, "scale": None}, num)


def _fitted(sizes: dict, others: dict, log_joint, sites, num: int, key) -> dict[str, FreeGaussian]:
    """Gaussians for the latents that no encoder knows: the ELBO of each datum, everything but h held."""
    if not sizes:
        return {}
    optimiser = optax.adam(_RATE)
    start = {
        k: FreeGaussian(jnp.concatenate([jnp.zeros((num, n)), jnp.full((num, n), jnp.log(0.5))], 1))
        for k, n in sizes.items()
    }

    def loss(guides, key):
        q = {**others, **{k: g.at(sites[k], None, (), {}) for k, g in guides.items()}}

        def one(key):
            h = {k: d.sample(random.fold_in(key, i)) for i, (k, d) in enumerate(sorted(q.items()))}
            return jnp.sum(sum(_log_q(sites[k], q[k], h[k], num) for k in guides) - log_joint(h))

        return jnp.mean(jax.vmap(one)(random.split(key, _DRAWS)))

    def step(state, key):
        guides, memory = state
        updates, memory = optimiser.update(jax.grad(loss)(guides, key), memory)
        return (optax.apply_updates(guides, updates), memory), None

    (guides, _), _ = lax.scan(step, (start, optimiser.init(start)), random.split(key, _STEPS))
    return cast(dict[str, FreeGaussian], guides)


def _choose(values, chosen, axis: int):
    """values (proposals, ..., M at `axis`, ...) at each datum's chosen proposals, (samples, ...)."""
    moved = jnp.moveaxis(values, 1 + axis, 1)  # (proposals, M, ...)
    return jnp.moveaxis(moved[chosen, jnp.arange(moved.shape[1])], 1, 1 + axis)
