"""`NUTS`: the exact joint posterior, by NumPyro's sampler on the whitened model."""

from functools import lru_cache

import equinox as eqx

from ppl_gp.infer.chains import Kernel, run_chains, sampled_fit
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.mcmc.sampled_model import (
    missing_parts,
    require_plain_priors,
    require_samplable,
    self_contained,
    whitened,
)
from ppl_gp.infer.probes import first_trace
from ppl_gp.kept import FromDraws
from ppl_gp.reading.roles import require_gp, roles
from ppl_gp.results.fit import Fit
from ppl_gp.settings import require_settings


class NUTS(eqx.Module):
    """The exact posterior by NumPyro's NUTS, f whitened. `hyper` is sampled with f; nothing is
    approximated.

    Results: converged; not_mixed where r-hat of a hyperparameter or of f exceeds 1.05, the
    effective sample size falls below 10 draws a chain (or has no estimate), or more than 5 % of
    draws diverge; interrupted. `stats`: r_hat, ess (the worst over hyperparameters and f; quantiles
    want ESS of 100 draws a chain), divergences.

    `ModelError` for what has no density to sample: `numpyro.param` sites, discrete latents, plates
    that subsample.
    """

    num_warmup: int = eqx.field(default=500, static=True)
    num_samples: int = eqx.field(default=500, static=True)
    num_chains: int = eqx.field(default=2, static=True)
    target_accept_prob: float = eqx.field(default=0.8, static=True)
    max_tree_depth: int = eqx.field(default=10, static=True)

    def __check_init__(self):
        require_settings(self, "max_tree_depth")


@lru_cache(maxsize=64)
def _kernel(model, config: NUTS, sites: tuple[str, ...], missing: tuple[str, ...]):
    """One kernel a model and configuration, so that compiled code is found again."""
    options = {k: getattr(config, k) for k in ("target_accept_prob", "max_tree_depth")}
    return Kernel(whitened(self_contained(model, missing), sites), **options)


@run_method.register
def _fit_nuts(method: NUTS, model, rng_key, args, kwargs, progress) -> Fit:
    trace = first_trace(model, args, kwargs)
    found = roles(trace)
    require_samplable(model, trace, args, kwargs, "NUTS()")
    require_plain_priors(trace, found.gps, "NUTS()", scaled=True)
    if not (found.hyper or found.local_latents):
        require_gp(found, trace)  # nothing is random
    kernel = _kernel(model, method, found.gps, missing_parts(trace))
    draws = run_chains(kernel, method, rng_key, args, kwargs, progress=progress, label="NUTS")
    return fit_from_draws(method, model, args, kwargs, found, draws)


def fit_from_draws(method, model, args, kwargs, found, draws) -> Fit:
    """The `Fit` behind joint draws of f and the hyperparameters."""
    values, names = draws.flat, (*found.hyper, *found.local_latents, *found.gps)
    kept = {site: FromDraws(values[site]) for site in found.gps}
    hyper = {k: v for k, v in values.items() if k in (*found.hyper, *found.local_latents)}
    return sampled_fit(draws, names, method, model, args, kwargs, hyper, kept)
