"""Values that a user gives for hyperparameters, `Fixed({...})` and `MAP(init={...})`, checked
before any work.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers

from ppl_gp.errors import DataError, ModelError
from ppl_gp.hyperparameters import MAP, Fixed
from ppl_gp.infer.hyper.space import inside, support
from ppl_gp.reading.roles import cannot_be_drawn, roles
from ppl_gp.reading.tracing import run


def given(hyper) -> tuple[str, Mapping]:
    """(how the argument is called, the values that it gives) of any `hyper=`."""
    if isinstance(hyper, Fixed):
        return "Fixed(...)", hyper.values
    return "MAP(init=...)", (hyper.init or {}) if isinstance(hyper, MAP) else {}


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
    """The model at the values that `hyper=` gives, each checked as the model comes to it: so at the
    values before it.

    Sites that are not given and have no draws (improper priors) get some value in their support.
    Raises `DataError`.
    """
    label, values = given(hyper)

    def value(site):
        if (
            site["type"] in ("sample", "param")
            and site["name"] in values
            and not site.get("is_observed")
        ):
            return _checked(f"{label}['{site['name']}']", values[site["name"]], site)
        return (
            inside(site)
            if site["type"] == "sample" and site["value"] is None and cannot_be_drawn(site)
            else None
        )

    return handlers.substitute(model, substitute_fn=value)


def fixed_values(hyper, names, model, args, kwargs) -> dict:
    """{site: value} that `hyper=` gives, one for each of the hyperparameters `names`, checked, as
    arrays.

    Raises `ModelError` for names, `DataError` for values.
    """
    label, values = given(hyper)
    missing, unknown = [n for n in names if n not in values], [n for n in values if n not in names]
    if missing or unknown:
        raise ModelError(
            f"{label} = {dict(values)!r} does not fit the model's hyperparameters {list(names)}: "
            f"missing {missing}, unknown {unknown}. Give one constrained value for each. "
            "Gaussian sites are among them where they are not integrated, integrate=(...)."
        )
    trace = run(holding(model, hyper), args, kwargs)
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
        return jnp.asarray(
            np.asarray(value) if isinstance(value, list | tuple) else value, jnp.result_type(float)
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} = {value!r} is no array of numbers: {error}") from error


def _require_entries(name, value, shape, where):
    if value.shape != tuple(shape):
        same = (
            f"; for equal entries give numpy.full({tuple(shape)}, {value})"
            if value.ndim == 0
            else ""
        )
        raise DataError(f"{name} has shape {value.shape}, and the site {tuple(shape)}{same}.")
    if not bool(jnp.all(jnp.isfinite(value))):
        raise DataError(f"{name} = {value} is not finite.")
    if not bool(jnp.all(where(value))):
        raise DataError(f"{name} = {value} is outside its support, {where}.")
