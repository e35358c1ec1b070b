"""The hyperparameters as an unconstrained vector space: transforms, log prior, starts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform, biject_to

from ppl_gp.errors import ModelError
from ppl_gp.tracing import roles, run

_MEDIAN_DRAWS = 101


class Space(NamedTuple):
    """Transforms from unconstrained values to the declared supports, by site."""

    transforms: dict[str, Transform]

    def constrain(self, free: dict) -> dict:
        """Unconstrained -> declared coordinates."""
        return {k: t(free[k]) for k, t in self.transforms.items()}

    def unconstrain(self, hyper: dict) -> dict:
        """Declared -> unconstrained coordinates."""
        return {k: t.inv(jnp.asarray(hyper[k], jnp.result_type(float))) for k, t in self.transforms.items()}


def space(trace: dict) -> Space:
    """The space of a model's hyperparameters, from one trace; `ModelError` for a discrete one."""
    found, transforms = roles(trace), {}
    for name in found.hyper:
        support = trace[name]["fn"].support
        if support.is_discrete:
            raise ModelError(f"hyperparameter '{name}' is discrete; fix it with hyper=Fixed({{'{name}': ...}}).")
        transforms[name] = biject_to(support)
    for name in found.params:
        transforms[name] = biject_to(trace[name]["kwargs"].get("constraint", constraints.real))
    return Space(transforms)


def log_prior(model, args, kwargs, hyper: dict):
    """sum of log p(hyperparameter), nats, in the declared coordinates, with `numpyro.handlers.scale`; `numpyro.param`s have none."""
    trace = run(model, args, kwargs, hyper)
    return sum([jnp.sum(_log_prob(trace[k])) for k in roles(trace).hyper], jnp.zeros(()))


def _log_prob(site):
    log_prob = site["fn"].log_prob(site["value"])
    return log_prob if site["scale"] is None else site["scale"] * log_prob


def starts(model, args, kwargs, sp: Space, rng_key, num: int) -> dict:
    """(num, ...) unconstrained starting points: the prior's median first, then prior draws."""

    def draw(key):
        trace = run(model, args, kwargs, key=key)
        return sp.unconstrain({k: trace[k]["value"] for k in sp.transforms})

    draws = jax.vmap(draw)(random.split(rng_key, max(num, _MEDIAN_DRAWS)))
    return {k: jnp.concatenate([jnp.median(v, 0)[None], v[: num - 1]]) for k, v in draws.items()}
