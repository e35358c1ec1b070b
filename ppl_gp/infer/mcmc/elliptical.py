"""`EllipticalSlice`: f by elliptical slice sampling, the hyperparameters by NUTS given f,
alternated.

Murray, Adams & MacKay 2010 (algorithm of figure 2) in the whitened coordinates v ~ N(0, I), all GP
sites at once: an update needs the likelihood alone, no gradient and no step size. Given v, one NUTS
transition of the hyperparameters (Murray & Adams 2010: whitened variables make that conditional
broad). NumPyro's HMCGibbs is not used because its Gibbs step cannot see the model's arguments, so
that new data would compile anew.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import constrain_fn, potential_energy

from ppl_gp.errors import LISTED, ModelError
from ppl_gp.infer.chains import Kernel, run_chains
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.mcmc import nuts
from ppl_gp.infer.probes import first_trace
from ppl_gp.reading.predictor.predictor import require_gp
from ppl_gp.reading.roles import roles
from ppl_gp.results.fit import Fit
from ppl_gp.settings import require_settings

_MAX_SHRINKS = 100


class EllipticalSlice(eqx.Module):
    """Elliptical slice sampling of f, in turn with NUTS for the hyperparameters.

    It needs no gradient of the likelihood by f. It mixes more slowly than `NUTS()` if f and the
    hyperparameters are strongly coupled.

    Parameters
    ----------
    num_warmup, num_samples, num_chains : int, default 500, 500, 2
        As in `NUTS`.
    num_slices : int, default 5
        Updates of f per update of the hyperparameters.
    target_accept_prob : float, default 0.8
        Acceptance probability of the updates of the hyperparameters, in (0, 1).

    Raises
    ------
    DataError
        For numbers out of range.
    ModelError
        In `fit`, for models without a GP, with latents per row, with a scaled prior of f, and as in
        `NUTS`.

    Notes
    -----
    `fit.result` and `stats` are those of `NUTS`. An update of f takes about 5 evaluations of the
    likelihood, at O(N^3) per evaluation. Source: Murray, Adams & MacKay (2010).

    Examples
    --------
    >>> pg.EllipticalSlice(num_slices=10).num_samples
    500
    """

    num_warmup: int = eqx.field(default=500, static=True)
    num_samples: int = eqx.field(default=500, static=True)
    num_chains: int = eqx.field(default=2, static=True)
    num_slices: int = eqx.field(default=5, static=True)
    target_accept_prob: float = eqx.field(default=0.8, static=True)

    def __check_init__(self):
        require_settings(self, "num_slices")


def elliptical_slice(key, v, log_lik):
    """One update of v ~ N(0, I) x exp(log_lik(v)), v any pytree; about 5 likelihood evaluations.
    The bracket shrinks towards the current point, which always lies on the slice, `_MAX_SHRINKS`
    times at most.
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
        angle = random.uniform(sub, minval=low, maxval=high, dtype=flat.dtype)
        return angle, low, high, shrinks + 1, key

    start = (first, first - 2 * jnp.pi, first, jnp.int32(0), key_loop)
    angle, _, _, shrinks, _ = lax.while_loop(outside, shrink, start)
    return jax.tree.map(lambda new, old: jnp.where(shrinks < _MAX_SHRINKS, new, old), at(angle), v)


class _GibbsState(NamedTuple):
    z: dict  # {"whites": ..., "hyper": ...}, the latter unconstrained
    hmc_state: Any
    rng_key: jax.Array


class _SliceWithinGibbs(MCMCKernel):
    """`num_slices` updates of the whitened sites, then a NUTS transition of hyperparameters."""

    sample_field = "z"

    def __init__(self, model, config: EllipticalSlice, base_sites, has_hyper: bool):
        self._model, self._config = model, config
        self._base_sites, self._has_hyper = base_sites, has_hyper
        self._nuts = Kernel(self._given_whites, target_accept_prob=config.target_accept_prob)

    def _given_whites(self, *args, _whites, **kwargs):
        return handlers.condition(self._model, data=_whites)(*args, **kwargs)

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        """Start f at zero (whitened), and the hyperparameters where NUTS starts them."""
        del init_params
        with handlers.block():
            seeded = handlers.seed(self._model, rng_key)
            # improper priors have no draws
            begun = handlers.substitute(seeded, substitute_fn=init_to_uniform)
            trace = handlers.trace(begun).get_trace(*model_args, **model_kwargs)
        whites = {k: jnp.zeros_like(trace[k]["value"]) for k in self._base_sites}
        inner, given = None, {**model_kwargs, "_whites": whites}
        if self._has_hyper:
            inner = self._nuts.init(rng_key, num_warmup, None, model_args, given)
        return _GibbsState({"whites": whites, "hyper": inner.z if inner else {}}, inner, rng_key)

    def sample(self, state, model_args, model_kwargs):
        key, key_slice = random.split(state.rng_key)
        whites, inner = state.z["whites"], state.hmc_state

        def log_lik(v):
            # the joint density but N(v): a prior, or its support, may be computed from f too
            energy = self._energy(v, state.z["hyper"], model_args, model_kwargs)
            return -energy - sum(dist.Normal().log_prob(x).sum() for x in v.values())

        def update(v, k):
            return elliptical_slice(k, v, log_lik), None

        whites, _ = lax.scan(update, whites, random.split(key_slice, self._config.num_slices))
        if self._has_hyper:
            own = jax.value_and_grad(lambda z: self._energy(whites, z, model_args, model_kwargs))
            energy, gradient = own(inner.z)
            inner = inner._replace(potential_energy=energy, z_grad=gradient)
            inner = self._nuts.sample(inner, model_args, {**model_kwargs, "_whites": whites})
        hyper = inner.z if self._has_hyper else {}
        return _GibbsState({"whites": whites, "hyper": hyper}, inner, key)

    def _energy(self, whites, z, args, kwargs):
        """-log p(v, z, data), nats, z the unconstrained hyperparameters."""
        return potential_energy(self._given_whites, args, {**kwargs, "_whites": whites}, z)

    def postprocess_fn(self, model_args, model_kwargs):
        """(z) -> constrained hyperparameters, and f."""

        def transform(z):
            given = {**model_kwargs, "_whites": z["whites"]}
            return constrain_fn(
                self._given_whites, model_args, given, z["hyper"], return_deterministic=True
            )

        return transform


@lru_cache(maxsize=64)
def _kernel(model, config: EllipticalSlice, sites, missing: tuple[str, ...], has_hyper: bool):
    """One kernel a model and configuration, so that compiled code is found again."""
    model = nuts.whitened(nuts.self_contained(model, missing), sites)
    return _SliceWithinGibbs(model, config, tuple(f"{s}_base" for s in sites), has_hyper)


@run_method.register
def _fit_elliptical(method: EllipticalSlice, model, rng_key, args, kwargs, progress) -> Fit:
    trace = first_trace(model, args, kwargs)
    found = roles(trace)
    nuts.require_samplable(model, trace, args, kwargs, "EllipticalSlice()")
    nuts.require_plain_priors(trace, found.gps, "EllipticalSlice()")
    require_gp(found, trace)
    if found.local_latents:
        raise ModelError(
            "EllipticalSlice() takes no local latents, and the model has "
            f"{list(found.local_latents)}. {LISTED}"
        )
    kernel = _kernel(model, method, found.gps, nuts.missing_parts(trace), bool(found.hyper))
    label = "elliptical slice"
    draws = run_chains(kernel, method, rng_key, args, kwargs, progress=progress, label=label)
    return nuts.fit_from_draws(method, model, args, kwargs, found, draws)
