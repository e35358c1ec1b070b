"""`NUTS`: the exact joint posterior, by NumPyro's sampler on the whitened model; and a model as
samplers see it: what is refused, and what is kept from them.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import random
from numpyro import handlers
from numpyro.primitives import Messenger

from ppl_gp.errors import ModelError
from ppl_gp.gp import Whiten, unwrap
from ppl_gp.infer.chains import Kernel, run_chains, sampled_fit
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.probes import first_trace
from ppl_gp.kept import FromDraws
from ppl_gp.numerics.linalg import half_log_det
from ppl_gp.reading.predictor.predictor import require_gp
from ppl_gp.reading.refusals import is_used
from ppl_gp.reading.roles import is_missing_part, require_no_subsampling, roles
from ppl_gp.results.fit import Fit
from ppl_gp.settings import require_settings


def require_samplable(model: Callable, trace: dict, args, kwargs, method: str) -> None:
    """Raise `ModelError` for what `method` cannot sample: plates that subsample, params, discrete
    latents, state. A param that nothing depends on is left alone: `random_eqx_module` declares one
    beside the priors of its weights. No factorisation.
    """
    require_no_subsampling(trace, method)
    if state := [k for k, site in trace.items() if site["type"] == "mutable"]:
        raise ModelError(
            f"{method} cannot follow the state that numpyro.mutable sites {state} carry from call "
            "to call."
        )
    found = roles(trace)
    for name in (*found.hyper, *found.local_latents):
        if trace[name]["fn"].support.is_discrete:
            raise ModelError(
                f"latent site '{name}' is discrete, and {method} samples real numbers; sum it "
                "out, for instance with numpyro.distributions.MixtureSameFamily."
            )
    for name in found.params:
        if is_used(model, name, args, kwargs):
            raise ModelError(
                f"site '{name}' is a numpyro.param, which has no prior: {method} would leave it "
                f"at its initial value. Declare it by numpyro.sample('{name}', prior), or fit by "
                "a method with hyper=MAP()."
            )


def missing_parts(trace: dict) -> tuple[str, ...]:
    """Names of NumPyro's `<y>_unobserved`: what `obs_mask` leaves open."""
    return tuple(k for k in trace if is_missing_part(k, trace))


def require_plain_priors(trace: dict, gps, method: str, scaled: bool = False) -> None:
    """`ModelError` where handlers mask a GP site, or (unless `scaled` may be) scale its prior."""
    for name in gps:
        site = trace[name]
        fn = site["fn"]
        while fn is not unwrap(fn):
            if not np.all(np.asarray(getattr(fn, "_mask", True))):
                raise ModelError(
                    f"numpyro.handlers.mask takes the prior away from GP site '{name}'; mask the "
                    "observed sites alone."
                )
            fn = fn.base_dist
        if site["scale"] is not None and np.any(np.asarray(site["scale"]) != 1.0) and not scaled:
            raise ModelError(
                f"numpyro.handlers.scale scales the prior of GP site '{name}', and {method} needs "
                "it as declared; scale the observed sites alone, or use NUTS()."
            )


class self_contained(Messenger):
    """Keeps from the outer handlers what a sampler does not sample; every run of the model makes
    these anew: params that nothing depends on (NumPyro's kernels would carry their values from one
    compiled function into another) and missing observations, which integrate to one at any value.
    """

    def __init__(self, fn=None, missing: tuple[str, ...] = ()):
        self.missing = missing
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "prng_key" and msg["value"] is None:
            msg["value"] = random.key(0)
        if msg["type"] == "param":
            msg["kwargs"]["rng_key"] = random.key(0)
        if msg.get("name") in self.missing:
            msg["value"] = msg["fn"].sample(random.key(0))
        msg["stop"] = msg.get("stop") or msg["type"] == "param" or msg.get("name") in self.missing


class whitened(handlers.reparam):
    """f = m + L v at GP sites (`Whiten`), the density of f kept where a handler scales the prior:
    N(f)^s df = N(v)^s |L|^(1 - s) dv, of the base site the first factor, of a factor the second.
    """

    def __init__(self, fn, sites: tuple[str, ...]):
        super().__init__(fn, config={site: Whiten() for site in sites})

    def process_message(self, msg):
        fn, scale = cast(Any, msg.get("fn")), msg.get("scale")
        is_white = msg["type"] == "sample" and msg["name"] in self.config and not msg["is_observed"]
        super().process_message(msg)
        if is_white and scale is not None:
            # The factor is scaled as well, and plates expand it to the batch shape.
            count = np.prod(fn.shape()) / np.prod(fn.event_shape[-1:]) / np.prod(fn.batch_shape)
            volume = (1.0 / scale - 1.0) * int(count) * half_log_det(unwrap(fn).scale_tril)
            numpyro.factor(f"{msg['name']}_volume", jnp.broadcast_to(volume, fn.batch_shape))


class NUTS(eqx.Module):
    """The exact posterior by NumPyro's NUTS, with f whitened.

    Samples f, latents and hyperparameters together. Its only error is that of its draws, so use it
    as a reference, on a few hundred rows.

    Parameters
    ----------
    num_warmup : int, default 500
        Transitions per chain that adapt and are dropped.
    num_samples : int, default 500
        Draws per chain that are kept.
    num_chains : int, default 2
        Number of chains.
    target_accept_prob : float, default 0.8
        Acceptance probability to adapt to, in (0, 1). Raise it if draws diverge.
    max_tree_depth : int, default 10
        A transition takes at most 2^max_tree_depth leapfrog steps.

    Raises
    ------
    DataError
        For numbers out of range.
    ModelError
        In `fit`, for what has no density to sample: `numpyro.param` sites, discrete latents, and
        plates that subsample.

    Notes
    -----
    `fit.result` is `converged`, `interrupted` or `not_mixed`. The last means that r-hat of a
    hyperparameter or of f is above 1.05, or its effective sample size below 10 per chain or without
    an estimate. More than 5 % of divergent draws have the same effect. `stats` has "r_hat" and
    "ess", the worst over hyperparameters and f, and "divergences". Quantiles need an effective
    sample size of about 100 per chain. A leapfrog step costs O(N^3). Source: Hoffman & Gelman
    (2014).

    Examples
    --------
    >>> pg.NUTS(num_samples=1000, num_chains=4).target_accept_prob
    0.8
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
