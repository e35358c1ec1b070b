"""`NUTS`: the exact joint posterior of f and the hyperparameters, by NumPyro's sampler on the whitened model."""

from functools import lru_cache

import equinox as eqx
import jax.numpy as jnp
import numpyro.infer
from numpyro import handlers

from ppl_gp.errors import ModelError
from ppl_gp.gp import Whiten
from ppl_gp.infer.boundary import first_trace
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.mcmc import diagnose, flatten, run_chains
from ppl_gp.posterior import Latent
from ppl_gp.results.fit import Fit
from ppl_gp.tracing import roles


class NUTS(eqx.Module):
    """The exact posterior by NumPyro's NUTS, f whitened. `hyper` is sampled with f; nothing is approximated.

    Results: converged; not_mixed where r-hat of a hyperparameter exceeds 1.05 (or more than 5 % of draws diverge);
    interrupted. `stats`: r_hat, ess (minimum over hyperparameters and f), divergences.
    """

    num_warmup: int = eqx.field(default=500, static=True)
    num_samples: int = eqx.field(default=500, static=True)
    num_chains: int = eqx.field(default=2, static=True)
    target_accept_prob: float = eqx.field(default=0.8, static=True)
    max_tree_depth: int = eqx.field(default=10, static=True)

    def __check_init__(self):
        if min(self.num_warmup, self.num_samples, self.num_chains) < 1:
            raise ValueError(f"{self}: num_warmup, num_samples and num_chains must be at least 1.")


@lru_cache(maxsize=64)
def _kernel(model, config: NUTS, sites: tuple[str, ...]):
    """One kernel a model and configuration, so that compiled code is found again."""
    whitened = handlers.reparam(model, config={site: Whiten() for site in sites})
    return numpyro.infer.NUTS(
        whitened, target_accept_prob=config.target_accept_prob, max_tree_depth=config.max_tree_depth
    )


@run_method.register
def _fit_nuts(method: NUTS, model, rng_key, args, kwargs, progress) -> Fit:
    found = roles(first_trace(model, args, kwargs))
    if not found.gps:
        raise ModelError("the model has no GP site; declare one: f = numpyro.sample('f', pg.GP(kernel, X)).")
    draws = run_chains(
        _kernel(model, method, found.gps),
        rng_key,
        args,
        kwargs,
        num_warmup=method.num_warmup,
        num_samples=method.num_samples,
        num_chains=method.num_chains,
        progress=progress,
        label="NUTS",
    )
    return fit_from_draws(method, model, args, kwargs, found, draws, method.num_chains)


def fit_from_draws(method, model, args, kwargs, found, draws, num_chains) -> Fit:
    """The `Fit` behind joint draws of f and the hyperparameters."""
    result, stats = diagnose(draws, (*found.hyper, *found.gps))
    values = flatten(draws.values)
    latent = {site: Latent(values[site], jnp.zeros_like(values[site]), None, None) for site in found.gps}
    hyper = {k: v for k, v in values.items() if k in (*found.hyper, *found.params, *found.local_latents)}
    return Fit(model, method, args, kwargs, hyper, latent, None, result, stats, num_chains, True)
