"""The hyperparameters as an unconstrained vector space: transforms, log prior, starts.

A support may depend on hyperparameters before it (`ls ~ Uniform(0, a)`), so values are transformed
as the model runs, site by site, each by the support that it has at the values so far.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform, biject_to

from ppl_gp.errors import ModelError
from ppl_gp.gp import unwrap
from ppl_gp.reading.roles import cannot_be_drawn, roles
from ppl_gp.reading.tracing import run

_MEDIAN_DRAWS = 101
_AT_BOUND = 1e-3


class Space(eqx.Module):
    """The hyperparameters `names` of a model, a site's value being an array or, of a param, a tree
    of arrays.

    `given`: values of other sites. Each call runs the model once, O(N), no factorisation.
    """

    model: Callable = eqx.field(static=True)
    names: tuple[str, ...] = eqx.field(static=True)
    args: tuple
    kwargs: dict[str, Any]
    given: dict[str, Any]

    def constrain(self, free: dict) -> dict:
        """Unconstrained -> declared coordinates."""

        def value(site):
            if site["name"] not in self.names or site["type"] not in ("sample", "param"):
                return None
            return jax.tree.map(transform(site), free[site["name"]])

        trace = run(
            handlers.substitute(self.model, substitute_fn=value), self.args, self.kwargs, self.given
        )
        return {k: trace[k]["value"] for k in self.names}

    def log_jacobian(self, free: dict) -> jax.Array:
        """log |d declared / d unconstrained|: what makes a density of declared values one of free
        ones.
        """
        trace = run(self.model, self.args, self.kwargs, {**self.given, **self.constrain(free)})

        def term(site, x):
            t = transform(site)
            return jnp.sum(t.log_abs_det_jacobian(x, t(x)))

        return sum([term(trace[k], free[k]) for k in self.names], jnp.zeros(()))

    def unconstrain(self, hyper: dict) -> dict:
        """Declared -> unconstrained coordinates."""
        return self.free_of(run(self.model, self.args, self.kwargs, {**self.given, **hyper}))

    def free_of(self, trace: dict) -> dict:
        """The unconstrained values of a trace."""

        def inverse(site):
            return jax.tree.map(
                lambda x: transform(site).inv(jnp.asarray(x, jnp.result_type(float))), site["value"]
            )

        return {k: inverse(trace[k]) for k in self.names}


def support(site: dict) -> constraints.Constraint:
    """Where a sample or param site's values may lie, at the values of the sites before it."""
    return (
        site["fn"].support
        if site["type"] == "sample"
        else site["kwargs"].get("constraint", constraints.real)
    )


def transform(site: dict) -> Transform:
    """From unconstrained values to a site's support."""
    return biject_to(support(site))


def require_draws(site: dict, remedy: str) -> None:
    """Raise `ModelError` for a hyperparameter whose prior has no draws to start from."""
    if cannot_be_drawn(site):
        raise ModelError(
            f"hyperparameter '{site['name']}' has the improper prior "
            f"{type(unwrap(site['fn'])).__name__}, which has no median and no draws to start "
            f"from; give {remedy}, or hyper=Fixed({{...}}), or a proper prior."
        )


def inside(site: dict):
    """Some value in the support of a site."""
    t, fn = transform(site), site["fn"]
    return t(jnp.zeros(t.inverse_shape(tuple(fn.shape()))))


def at_bounds(sp: Space, hyper: dict) -> dict:
    """{site on an interval: whether a value lies within `_AT_BOUND` of its length from an end}."""
    trace, found = run(sp.model, sp.args, sp.kwargs, {**sp.given, **hyper}), {}
    for name in sp.names:
        where: Any = support(trace[name])
        while hasattr(where, "base_constraint"):
            where = where.base_constraint
        if hasattr(where, "lower_bound") and hasattr(where, "upper_bound"):
            low, high = where.lower_bound, where.upper_bound
            edges = [
                jnp.minimum(x - low, high - x) < _AT_BOUND * (high - low)
                for x in jax.tree.leaves(hyper[name])
            ]
            found[name] = jnp.any(jnp.stack([jnp.any(e) for e in edges]))
    return found


def space(trace: dict, model, args, kwargs, given: dict | None = None) -> Space:
    """The space of a model's hyperparameters, from one trace; `ModelError` for a discrete one."""
    found = roles(trace)
    for name in found.hyper:
        if support(trace[name]).is_discrete:
            raise ModelError(
                f"hyperparameter '{name}' is discrete; fix it with hyper=Fixed({{'{name}': ...}})."
            )
    return Space(model, (*found.hyper, *found.params), args, kwargs, given or {})


def log_prior(model, args, kwargs, hyper: dict, names=None):
    """sum of scale x log p(hyperparameter), nats, in the declared coordinates; `numpyro.param`
    sites have none.

    `names`: over these alone.

    `handlers.scale` and `handlers.mask` around a site count, as in NumPyro's `log_density`.
    """
    trace = run(model, args, kwargs, hyper)

    def term(site):
        scale = 1.0 if site["scale"] is None else site["scale"]
        return jnp.sum(scale * site["fn"].log_prob(site["value"]))

    return sum(
        [term(trace[k]) for k in (roles(trace).hyper if names is None else names)], jnp.zeros(())
    )


def starts(sp: Space, rng_key, num: int) -> dict:
    """(num, ...) unconstrained starting points: the prior's median first, then prior draws.

    Params have no prior: the first start is their declared value, the others what they declare
    under further keys.
    """

    def refuse(site):
        if site["name"] in sp.names:
            require_draws(site, f"MAP(init={{'{site['name']}': ..., ...}}) with restarts=1")

    def draw(key):
        checked = handlers.substitute(sp.model, substitute_fn=refuse)
        trace = run(checked, sp.args, sp.kwargs, sp.given, key=key)
        free, params = sp.free_of(trace), roles(trace).params
        return {k: v for k, v in free.items() if k not in params}, {k: free[k] for k in params}

    drawn, declared = jax.vmap(draw)(random.split(rng_key, max(num, _MEDIAN_DRAWS)))
    first_then = lambda v: jnp.concatenate([jnp.median(v, 0)[None], v[: num - 1]])  # noqa: E731
    drawn = jax.tree.map(first_then, drawn)
    return {**drawn, **jax.tree.map(lambda v: v[:num], declared)}
