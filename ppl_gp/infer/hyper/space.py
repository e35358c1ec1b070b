"""The hyperparameters as an unconstrained vector space: transforms, log prior, starts; and values
that a user gives, `Fixed({...})` and `MAP(init={...})`, checked before any work. A support may
depend on hyperparameters before it (`ls ~ Uniform(0, a)`), so values are transformed as the model
runs, each by the support that it has at the values so far.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform, biject_to

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import unwrap
from ppl_gp.reading.roles import cannot_be_drawn, roles
from ppl_gp.reading.tracing import run
from ppl_gp.settings import MAP, Fixed, Grid

_MEDIAN_DRAWS = 101
_AT_BOUND = 1e-3


class Space(eqx.Module):
    """The hyperparameters `names` of a model, a site's value being an array or, of a param, a tree.
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

        given = handlers.substitute(self.model, substitute_fn=value)
        trace = run(given, self.args, self.kwargs, self.given)
        return {k: trace[k]["value"] for k in self.names}

    def log_jacobian(self, free: dict) -> jax.Array:
        """log |d declared / d unconstrained|."""
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
            values = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(float)), site["value"])
            return jax.tree.map(transform(site).inv, values)

        return {k: inverse(trace[k]) for k in self.names}


def support(site: dict) -> constraints.Constraint:
    """Where a sample or param site's values may lie, at the values of the sites before it."""
    if site["type"] == "sample":
        return site["fn"].support
    return site["kwargs"].get("constraint", constraints.real)


def transform(site: dict) -> Transform:
    """From unconstrained values to a site's support; `ModelError` where there is no such map."""
    where = support(site)
    try:
        return biject_to(where)
    except NotImplementedError as error:
        name, other = site["name"], f"has support {where}, with no unconstrained coordinates"
        told = "is discrete" if where.is_discrete else other
        raise ModelError(
            f"hyperparameter '{name}' {told}; fix it with hyper=Fixed({{'{name}': ...}})."
        ) from error


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
            ends = [jnp.minimum(x - low, high - x) for x in jax.tree.leaves(hyper[name])]
            found[name] = jnp.any(jnp.stack([jnp.any(e < _AT_BOUND * (high - low)) for e in ends]))
    return found


def space(trace: dict, model, args, kwargs) -> Space:
    """The space of a model's hyperparameters, from one trace; `ModelError` as of `transform`."""
    found = roles(trace)
    for name in found.hyper:
        transform(trace[name])
    return Space(model, (*found.hyper, *found.params), args, kwargs, {})


def log_prior(model, args, kwargs, hyper: dict, names=None):
    """sum of scale x log p(hyperparameter), nats, in the declared coordinates, over `names` if any;
    `numpyro.param` sites have none. `handlers.scale` and `mask` around a site count, as in NumPyro.
    """
    trace = run(model, args, kwargs, hyper)

    def term(site):
        scale = 1.0 if site["scale"] is None else site["scale"]
        return jnp.sum(scale * site["fn"].log_prob(site["value"]))

    of = roles(trace).hyper if names is None else names
    return sum([term(trace[k]) for k in of], jnp.zeros(()))


def starts(sp: Space, rng_key, num: int) -> dict:
    """(num, ...) unconstrained starting points: the prior's median first, then prior draws. Of
    params the declared value, then what they declare under further keys.
    """

    def refuse(site):
        if site["name"] in sp.names:
            require_draws(site, f"hyper=MAP(init={{'{site['name']}': ..., ...}}, restarts=1)")

    def draw(key):
        checked = handlers.substitute(sp.model, substitute_fn=refuse)
        trace = run(checked, sp.args, sp.kwargs, sp.given, key=key)
        free, params = sp.free_of(trace), roles(trace).params
        return {k: v for k, v in free.items() if k not in params}, {k: free[k] for k in params}

    drawn, declared = jax.vmap(draw)(random.split(rng_key, max(num, _MEDIAN_DRAWS)))
    drawn = jax.tree.map(lambda v: jnp.concatenate([jnp.median(v, 0)[None], v[: num - 1]]), drawn)
    return {**drawn, **jax.tree.map(lambda v: v[:num], declared)}


def given(hyper) -> tuple[str, Mapping]:
    """(how the argument is called, the values that it gives) of any `hyper=`."""
    if isinstance(hyper, Fixed):
        return "Fixed(...)", hyper.values
    values = (hyper.init or {}) if isinstance(hyper, MAP | Grid) else {}
    return f"{type(hyper).__name__}(init=...)", values


def held(hyper, trace: dict) -> dict:
    """{site: its value in the trace} of sites that are not integrated: those that `Fixed` gives,
    and those that `MAP` is to maximise; `ModelError` if the latter are not the model's.
    """
    named, sites = getattr(hyper, "maximise", ()), roles(trace).hyper
    if unknown := [k for k in named if k not in sites]:
        raise ModelError(
            f"MAP(maximise={named!r}): {unknown} are not among the sites that can be maximised, "
            f"{list(sites)}."
        )
    names = hyper.values if isinstance(hyper, Fixed) else named
    return {k: trace[k]["value"] for k in names if k in trace}


def holding(model: Callable, hyper) -> Callable:
    """The model at the values that `hyper=` gives, each checked (`DataError`) at the values before
    it. Others that have no draws (improper priors) get some value in their support.
    """
    label, values = given(hyper)

    def value(site):
        if site["type"] not in ("sample", "param"):
            return None
        if (name := site["name"]) in values and not site.get("is_observed"):
            return _checked(f"{label}['{name}']", values[name], site)
        return inside(site) if site["value"] is None and cannot_be_drawn(site) else None

    return handlers.substitute(model, substitute_fn=value)


def fixed_values(hyper, sp: Space) -> dict:
    """{name of a space: what `hyper=` gives}, checked. `ModelError` for names, else `DataError`."""
    (label, values), names = given(hyper), sp.names
    missing, unknown = [n for n in names if n not in values], [n for n in values if n not in names]
    if missing or unknown:
        raise ModelError(
            f"{label} = {dict(values)!r} does not fit the model's hyperparameters {list(names)}: "
            f"missing {missing}, unknown {unknown}. Give one constrained value for each. "
            "Gaussian sites are among them where they are not integrated, integrate=(...)."
        )
    trace = run(holding(sp.model, hyper), sp.args, sp.kwargs)
    return {n: trace[n]["value"] for n in names}


def _checked(name, value, site):
    """A value as arrays: of the site's shape, finite, and in its support."""
    expected = _shapes(site)
    discrete = support(site).is_discrete
    if jax.tree.structure(expected) == jax.tree.structure(0):
        value = _as_array(name, value)
    elif jax.tree.structure(value) != jax.tree.structure(expected):
        raise DataError(
            f"{name} is {type(value).__name__}; the param is the tree "
            f"{jax.tree.structure(expected)}."
        )
    else:
        value = jax.tree.map(lambda x: _as_array(name, x), value)
    jax.tree.map(lambda x, e: _require_entries(name, x, e.shape, support(site)), value, expected)
    return jax.tree.map(lambda x: x.astype(int) if discrete else x, value)


def _shapes(site):
    if site["type"] == "sample":
        return jax.ShapeDtypeStruct(tuple(site["fn"].shape()), jnp.result_type(float))
    with handlers.block(), handlers.seed(rng_seed=random.key(0)):
        return jax.eval_shape(lambda: site["fn"](*site["args"], **site["kwargs"]))


def _as_array(name, value):
    try:
        value = np.asarray(value) if isinstance(value, list | tuple) else value
        return jnp.asarray(value, jnp.result_type(float))
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} = {value!r} is no array of numbers: {error}") from error


def _require_entries(name, value, shape, where):
    if value.shape != tuple(shape):
        same = f"; for equal entries give numpy.full({tuple(shape)}, {value})"
        told = f"{name} has shape {value.shape}, and the site {tuple(shape)}"
        raise DataError(f"{told}{same * (value.ndim == 0)}.")
    if not bool(jnp.all(jnp.isfinite(value))):
        raise DataError(f"{name} = {value} is not finite.")
    if not bool(jnp.all(where(value))):
        raise DataError(f"{name} = {value} is outside its support, {where}.")
