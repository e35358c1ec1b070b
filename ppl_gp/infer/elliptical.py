"""`EllipticalSlice`: f by elliptical slice sampling, the hyperparameters by NUTS given f, alternated.

Murray, Adams & MacKay 2010 (algorithm of figure 2) in the whitened coordinates v ~ N(0, I), all GP sites at once: an
update needs the likelihood alone, no gradient and no step size. Given v, one NUTS transition of the hyperparameters
(Murray & Adams 2010: whitened variables make that conditional broad). NumPyro's HMCGibbs is not
used because its Gibbs step cannot see the model's arguments, so that new data would compile anew.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.infer
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.mcmc import MCMCKernel

from ppl_gp.errors import ModelError
from ppl_gp.gp import Whiten
from ppl_gp.infer.boundary import first_trace
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.mcmc import run_chains
from ppl_gp.infer.nuts import fit_from_draws
from ppl_gp.results.fit import Fit
from ppl_gp.tracing import is_observed, roles

_MAX_SHRINKS = 100


class EllipticalSlice(eqx.Module):
    """Elliptical slice sampling of f within Gibbs. `num_slices` updates of f for each update of the hyperparameters.

    Slower mixing than `NUTS()` where f and the hyperparameters are strongly coupled; needs no gradient of the
    likelihood. Local latents are not supported (`ModelError`). Results and `stats` as `NUTS`.
    """

    num_warmup: int = eqx.field(default=500, static=True)
    num_samples: int = eqx.field(default=500, static=True)
    num_chains: int = eqx.field(default=2, static=True)
    num_slices: int = eqx.field(default=5, static=True)
    target_accept_prob: float = eqx.field(default=0.8, static=True)

    def __check_init__(self):
        if min(self.num_warmup, self.num_samples, self.num_chains, self.num_slices) < 1:
            raise ValueError(f"{self}: num_warmup, num_samples, num_chains and num_slices must be at least 1.")


def elliptical_slice(key, v, log_lik):
    """One update of v ~ N(0, I) x exp(log_lik(v)), v any pytree; O(1) likelihood evaluations, about 5 on average.

    The bracket shrinks towards the current point, which always lies on the slice; `_MAX_SHRINKS` bounds the loop.
    """
    flat, unravel = ravel_pytree(v)
    key_nu, key_height, key_angle, key_loop = random.split(key, 4)
    nu = random.normal(key_nu, flat.shape, flat.dtype)
    height = log_lik(v) + jnp.log(random.uniform(key_height, dtype=flat.dtype))
    first = random.uniform(key_angle, minval=0.0, maxval=2 * jnp.pi, dtype=flat.dtype)

    def at(angle):
        return unravel(flat * jnp.cos(angle) + nu * jnp.sin(angle))

    def outside(state):
        angle, _, _, shrinks, _ = state
        return ~(log_lik(at(angle)) > height) & (shrinks < _MAX_SHRINKS)

    def shrink(state):
        angle, low, high, shrinks, key = state
        low, high = jnp.where(angle < 0, angle, low), jnp.where(angle < 0, high, angle)
        key, sub = random.split(key)
        return random.uniform(sub, minval=low, maxval=high, dtype=flat.dtype), low, high, shrinks + 1, key

    start = (first, first - 2 * jnp.pi, first, jnp.int32(0), key_loop)
    angle, _, _, shrinks, _ = lax.while_loop(outside, shrink, start)
    return jax.tree.map(lambda new, old: jnp.where(shrinks < _MAX_SHRINKS, new, old), at(angle), v)


def _observed_log_prob(whitened, args, kwargs, values):
    with handlers.block():
        seeded = handlers.substitute(handlers.seed(whitened, random.key(0)), data=values)
        trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    total = jnp.zeros(())
    for site in trace.values():
        if is_observed(site):
            log_prob = site["fn"].log_prob(site["value"])
            total = total + jnp.sum(log_prob if site["scale"] is None else site["scale"] * log_prob)
    return total


class _GibbsState(NamedTuple):
    z: dict  # {"whites": ..., "hyper": ...}, the latter unconstrained
    hmc_state: Any
    rng_key: jax.Array


class _SliceWithinGibbs(MCMCKernel):
    """`num_slices` updates of the whitened sites, then one NUTS transition of the hyperparameters, if there are any."""

    sample_field = "z"

    def __init__(self, whitened, config: EllipticalSlice, base_sites, has_hyper: bool):
        self._whitened, self._config, self._base_sites, self._has_hyper = whitened, config, base_sites, has_hyper
        self._nuts = numpyro.infer.NUTS(self._given_whites, target_accept_prob=config.target_accept_prob)

    def _given_whites(self, *args, _whites, **kwargs):
        return handlers.condition(self._whitened, data=_whites)(*args, **kwargs)

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        """Start f at zero in whitened coordinates and the hyperparameters where NUTS starts them."""
        del init_params
        with handlers.block():
            seeded = handlers.seed(self._whitened, rng_key)
            trace = handlers.trace(seeded).get_trace(*model_args, **model_kwargs)
        whites = {k: jnp.zeros_like(trace[k]["value"]) for k in self._base_sites}
        inner = None
        if self._has_hyper:
            inner = self._nuts.init(rng_key, num_warmup, None, model_args, {**model_kwargs, "_whites": whites})
        return _GibbsState({"whites": whites, "hyper": inner.z if inner else {}}, inner, rng_key)

    def sample(self, state, model_args, model_kwargs):
        """One Gibbs sweep."""
        key, key_slice = random.split(state.rng_key)
        whites, inner = state.z["whites"], state.hmc_state
        hyper = self._constrained(state.z, model_args, model_kwargs)

        def log_lik(v):
            return _observed_log_prob(self._whitened, model_args, model_kwargs, {**hyper, **v})

        def update(v, k):
            return elliptical_slice(k, v, log_lik), None

        whites, _ = lax.scan(update, whites, random.split(key_slice, self._config.num_slices))
        if self._has_hyper:
            given = {**model_kwargs, "_whites": whites}
            energy, gradient = jax.value_and_grad(self._nuts.get_potential_fn(model_args, given))(inner.z)
            inner = inner._replace(potential_energy=energy, z_grad=gradient)
            inner = self._nuts.sample(inner, model_args, given)
        return _GibbsState({"whites": whites, "hyper": inner.z if self._has_hyper else {}}, inner, key)

    def _constrained(self, z, args, kwargs):
        if not self._has_hyper:
            return {}
        values = self._nuts.postprocess_fn(args, {**kwargs, "_whites": z["whites"]})(z["hyper"])
        # Not the deterministic sites: f, substituted beside the whites, would pin the likelihood that the slices see.
        return {k: values[k] for k in z["hyper"]}

    def postprocess_fn(self, model_args, model_kwargs):
        """(z) -> constrained hyperparameters, and f."""

        def transform(z):
            values = self._constrained(z, model_args, model_kwargs)
            with handlers.block():
                given = handlers.substitute(
                    handlers.seed(self._whitened, random.key(0)), data={**values, **z["whites"]}
                )
                trace = handlers.trace(given).get_trace(*model_args, **model_kwargs)
            return {k: s["value"] for k, s in trace.items() if s["type"] in ("sample", "deterministic")}

        return transform


@lru_cache(maxsize=64)
def _kernel(model, config: EllipticalSlice, sites: tuple[str, ...], has_hyper: bool):
    """One kernel a model and configuration, so that compiled code is found again."""
    whitened = handlers.reparam(model, config={site: Whiten() for site in sites})
    return _SliceWithinGibbs(whitened, config, tuple(f"{s}_base" for s in sites), has_hyper)


@run_method.register
def _fit_elliptical(method: EllipticalSlice, model, rng_key, args, kwargs, progress) -> Fit:
    found = roles(first_trace(model, args, kwargs))
    if not found.gps or found.local_latents:
        raise ModelError(
            f"EllipticalSlice() needs GP sites and no local latents; the model has GP sites {list(found.gps)} and local "
            f"latents {list(found.local_latents)}. Use NUTS()."
        )
    draws = run_chains(
        _kernel(model, method, found.gps, bool(found.hyper)),
        rng_key,
        args,
        kwargs,
        num_warmup=method.num_warmup,
        num_samples=method.num_samples,
        num_chains=method.num_chains,
        progress=progress,
        label="elliptical slice",
    )
    return fit_from_draws(method, model, args, kwargs, found, draws, method.num_chains)
