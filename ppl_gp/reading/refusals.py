"""What is refused before any work, and what a user's model raises while it is run, as errors of
this package that say what to change.
"""

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import core, random
from numpyro import handlers
from numpyro.distributions import Distribution
from numpyro.primitives import Messenger

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP, unwrap
from ppl_gp.kernels.pairs import pair_fault
from ppl_gp.quick import is_traced
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.dependence import depends
from ppl_gp.reading.digest import arrays_of, own_kinds
from ppl_gp.reading.fingerprint import by_shapes
from ppl_gp.reading.roles import Roles, is_factor, is_missing_part, is_observed, roles
from ppl_gp.reading.tracing import bare_trace, run

VALUE_WANTED = (
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
# methods of a distribution that NumPyro's base class, or a user's, leaves to others
_WANTED = {
    "sample": (
        ", and what was asked for is drawn: give the class sample(self, key, sample_shape=()); or "
        "leave `sample` out of it, for answers that need no draw"
    ),
    "log_prob": ": give the class log_prob(self, value), the log density of each entry",
}
_MISSING = "_unobserved"  # what obs_mask adds to a site's name
_OURS = "ppl_gp jax jaxlib numpyro equinox numpy functools contextlib threading".split()


def of_the_model(function: Callable) -> Callable:
    """The same function; NumPy on a traced array becomes a `ModelError`, a mask of numbers, a
    distribution's parameter out of range, or a plate of size zero, a `DataError`.
    """

    @functools.wraps(function)
    def told(*args, **kwargs):
        outside = DataError(
            f"{function.__name__} was called under jax.jit, jax.vmap or jax.grad: call it outside "
            "of them, as it compiles its own work. Inside of them a model with a GP has "
            "fit.posterior(X_new).mean and .variance, of f."
        )
        if any(isinstance(x, core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            raise outside
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if isinstance(error, VALUE_WANTED) and is_traced():
                raise outside from error
            if (said := _explained(error)) is None:
                raise
            raise said from error

    return told


# {what to say: (an error's class, what its text holds, the class to raise)}
_SAID = {
    "the model asks for the values of an array while it is compiled{line}: NumPy was applied to an "
    "argument or a site's value, or `if`, a loop or an index depends on one. Use jax.numpy there: "
    "jnp.asarray(table)[index] for table[index], jnp.where for np.where and `if`.": (
        (VALUE_WANTED, "", ModelError)
    ),
    "the model keeps an array of an earlier run{line}: a function, or a method of a distribution's "
    "class, encloses it. Keep each array that a distribution uses as an attribute, self.loc = "
    "loc.": (jax.errors.UnexpectedTracerError, "", ModelError),
    "a mask of the model holds numbers{line}, or is left out at new rows: make it boolean there, "
    "mask=seen.astype(bool) or obs_mask=seen.astype(bool); and let it be left out, "
    "mask=True if seen is None else seen.": ((ValueError, "should be a bool array", DataError)),
    "{error}": (ValueError, "has a delta distribution", ModelError),
    "{error}: a distribution of the model refuses it{line}; check the arguments of the model.": (
        (ValueError, "distribution got invalid", DataError)
    ),
    "a plate of the model has size zero{line}: give it at least one element (a row of the data, a "
    "group, a component), or leave it out where there is none.": (
        (AssertionError, "size of plate", DataError)
    ),
}


def _explained(error: Exception) -> Exception | None:
    """What to raise in place of an error of JAX or NumPyro."""
    for text, (kind, held, raised) in _SAID.items():
        if isinstance(error, kind) and held in str(error):
            return raised(text.format(error=error, line=_line(error)))
    if isinstance(error, NotImplementedError):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        name, own = frame.f_code.co_name, frame.f_locals.get("self")
        if name in _WANTED and isinstance(own, Distribution):
            site = f"{type(own).__name__}, the distribution of a site{_line(error)}"
            return ModelError(f"{site}, has no `{name}`{_WANTED[name]}.")
    return integers_wanted(error) if isinstance(error, TypeError) else None


def integers_wanted(error: Exception) -> DataError | None:
    """What to say of an index that is not of integers, the model's own or NumPyro's binomial's."""
    if "Indexer must have integer" not in str(error):
        return None
    frames = traceback.walk_tb(error.__traceback__)
    if any(f.f_code.co_name == "_binomial_dispatch" for f, _ in frames):
        told = "NumPyro draws from a binomial whose total_count is of integers alone"
        return DataError(f"{told}{_line(error)}: write total_count=n.astype(int) in the model.")
    return DataError(
        f"the model looks something up by numbers that are no integers{_line(error)}: "
        f"{str(error).split('.')[0]}. Give an index of integers, group.astype(int)."
    )


def _line(error: Exception) -> str:
    """Where in the user's code it happened."""
    own = [
        f" ({f.f_code.co_name}, line {line})"
        for f, line in traceback.walk_tb(error.__traceback__)
        if f.f_globals.get("__name__", "").split(".")[0] not in _OURS
    ]
    return own[-1] if own else ""


def require_observations(model: Callable, args: tuple, kwargs: dict, trace: dict) -> None:
    """Raise `ModelError` where no site observes data, and some would if an argument that is `None`
    were given, or `y` is and nothing is computed from it, or the model has a GP: no method has
    anything to learn from. Also where observations that are missing enter another site.

    What is left is a model without a GP that is a density of its own (a funnel, latents and a
    `numpyro.factor`), which samplers draw from. Traces only where nothing is observed.
    """
    found = roles(trace)
    for name in (k for k in trace if is_missing_part(k, trace)):
        if is_used(model, name, args, kwargs):
            raise ModelError(
                f"the values that obs_mask leaves open at site '{name.removesuffix(_MISSING)}' "
                "enter another site, and no method integrates them; declare them by a "
                "numpyro.sample of their own."
            )
    if any(trace[k]["is_scored"] for k in found.observed):
        return
    left_out = _left_out(model, args, kwargs, trace)
    is_density = not (found.gps or _is_ignored("y", model, args, kwargs))
    if left_out is None and (found.observed or is_density):
        return
    raise ModelError(observes_nothing(left_out, found))


@by_shapes
def is_used(model, name: str, args: tuple, kwargs: dict) -> bool:
    """Whether the density of any other site is computed from a site's value."""

    def densities(value):
        again = run(model, args, kwargs, {name: value})
        others = [s for k, s in again.items() if s["type"] == "sample" and k != name]
        return [
            (arrays_of(s["fn"]), s["scale"], s["value"] if is_observed(s) else ()) for s in others
        ]

    return bool(depends(densities, run(model, args, kwargs)[name]["value"]))


def _is_ignored(argument: str, model: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an argument is given, and no distribution is computed from it."""
    given = Leaves(model, args, kwargs).leaves.get(argument) is not None
    return given and argument not in model.reading.shaping


def observes_nothing(left_out: str | None, found: Roles) -> str:
    """What is said of a model without observations."""
    if left_out is None:
        return (
            "the model observes nothing; pass the observations by keyword, y=..., and write obs=y "
            "in their site. For draws of the prior there is numpyro.infer.Predictive."
        )
    sites = [*found.gps, *found.hyper, *found.local_latents]
    return (
        f"the model observes nothing: its argument '{left_out}' was not given, so that all of its "
        f"sites {sites} are latent; pass {left_out}=..., the observations, by keyword. For draws "
        "of the prior there is numpyro.infer.Predictive."
    )


def _left_out(model: Callable, args: tuple, kwargs: dict, trace: dict) -> str | None:
    """The argument that is `None` and would be observed, shown by a run with it given; `y`, as
    observations are called by convention, where that cannot be shown and there is no factor.
    """
    (bound, absent), found = _absent(model, args, kwargs), roles(trace)
    free = (*found.local_latents, *found.hyper)
    shown = (p for p in absent for k in free if _is_observed_as(k, p, model, bound, trace))
    return next(shown, "y" if "y" in absent and not found.observed else None)


def _absent(model: Callable, args: tuple, kwargs: dict) -> tuple[Any, list[str]]:
    """(the arguments bound to the model's signature, which of them are `None`)."""
    try:
        bound = inspect.signature(model).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None, []
    bound.apply_defaults()
    return bound, [p for p, value in bound.arguments.items() if value is None]


def with_outputs(model: Any, args: tuple, kwargs: dict, trace: dict) -> tuple[tuple, dict]:
    """The arguments, with observations in place of `None` where a site that no other site sees
    would observe them; a run with its own value given shows it.
    """
    bound, absent = _absent(model, args, kwargs)
    free = [k for k, s in trace.items() if s["type"] == "sample" and not is_observed(s)]
    for p in absent:
        shown = (k for k in free if _is_observed_as(k, p, model, bound, trace))
        if own := next((k for k in shown if not is_used(model, k, args, kwargs)), None):
            bound.arguments[p] = trace[own]["value"]
            free.remove(own)
    return (bound.args, bound.kwargs) if absent else (args, kwargs)


def _is_observed_as(site: str, argument: str, model, bound: Any, trace: dict) -> bool:
    """Whether the site observes the argument, where its own value is passed for that."""
    arguments: Any = {**bound.arguments, argument: trace[site]["value"]}
    given = inspect.BoundArguments(bound.signature, arguments)
    try:
        again = bare_trace(model, given.args, given.kwargs)
    except Exception:  # noqa: BLE001 - an option that is no array may raise anything
        return False
    return any(k in again and is_observed(again[k]) for k in (site, f"{site}_observed"))


_OTHER = {"integers": int, "floats": float}


def require_dtype(name: str, site: dict, given: Leaves | str) -> None:
    """Raise `DataError` where log p of an observed site, or its gradient, exists for observations
    of another dtype alone: class labels that are floats, proportions that are integers. `given`:
    the arguments, one of which may be the observations, or how these are called.
    """
    fn, value = site["fn"], site["value"]
    dtype = jnp.result_type(value)
    whole = jnp.issubdtype(dtype, jnp.integer)
    if is_factor(site) or (whole == fn.support.is_discrete and not own_kinds(fn)):
        return  # NumPyro's families take what they draw
    why, kind = _refusal(fn, jnp.shape(value), dtype), "floats" if whole else "integers"
    if not isinstance(why, TypeError) or _refusal(fn, jnp.shape(value), _OTHER[kind]) is not None:
        return  # the dtype is not at fault
    path = given
    if isinstance(given, Leaves):
        path = next((p for p, x in given.arrays.items() if np.array_equal(x, value)), "values")
    raise DataError(
        f"site '{name}' observes {path} of dtype {dtype}, and the density of "
        f"{type(unwrap(fn)).__name__} takes {kind}; convert: "
        f"{path}.astype({_OTHER[kind].__name__})."
    ) from why


def _refusal(fn, shape: tuple, dtype) -> Exception | None:
    """What log p raises at observations of this dtype, differentiated in its parameters."""
    leaves, structure = jax.tree.flatten(fn)
    moving = {i: x for i, x in enumerate(leaves) if eqx.is_inexact_array(x)}

    def total(parameters, value):
        entries = [parameters.get(i, x) for i, x in enumerate(leaves)]
        return jnp.sum(jax.tree.unflatten(structure, entries).log_prob(value))

    try:
        value = jax.ShapeDtypeStruct(shape, jnp.zeros((), dtype).dtype)
        jax.eval_shape(jax.grad(total), moving, value)
    except Exception as error:  # noqa: BLE001 - a user's own distribution may raise anything
        return error
    return None


class _Named(Messenger):
    """Notes the unobserved sites that have a value already, before anybody draws one, and "" where
    `block` asks for the key of a site that it hides.
    """

    def __init__(self, fn, found: list[str]):
        self.found = found
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["value"] is not None and not msg["is_observed"]:
            self.found.append(msg["name"])
        elif msg["type"] == "prng_key":
            self.found.append("")


def require_drawn(model, leaves: Leaves) -> None:
    """Raise `ModelError` where handlers around the model hide a site that is drawn, or substitute
    or replay its value: it is still random, and the model ignores whatever value an inference gives
    it. Values of params are theirs to give. One abstract trace, where there is a handler; those
    that are entered inside the model's function are not seen.
    """
    kinds = (handlers.substitute, handlers.replay, handlers.block)
    if not any(isinstance(h, kinds) for h in _handlers(model)):
        return
    given = _with_values(model, leaves)
    if "" in given:
        raise ModelError(
            "handlers.block around the model hides sites that are drawn: a fit would hold each at "
            "one random value. Take the block off, and hold sites by hyper=Fixed({...})."
        )
    held = [h for h in _handlers(model) if isinstance(h, kinds[:2])]
    named = {k for h in held for k in (h.trace if isinstance(h, handlers.replay) else h.data or ())}
    every = any(getattr(h, "substitute_fn", None) is not None for h in held)
    # a scope around a handler puts its own name before the site's
    if found := [k for k in given if every or k.split("/")[-1] in named]:
        raise ModelError(
            f"sites {found} have their values from handlers.{type(held[0]).__name__} around the "
            "model, and are random all the same: what is inferred of them would be ignored. Hold "
            "them by hyper=Fixed({...}), or make data of them by handlers.condition."
        )


def _handlers(model) -> list:
    """Around a function, the outermost first."""
    found = []
    while True:
        inner = model.func if isinstance(model, functools.partial) else getattr(model, "fn", None)
        if inner is None:
            return found
        found.append(model)
        model = inner


def _with_values(model, leaves: Leaves) -> list[str]:
    """Unobserved sites that have a value before one is drawn, those of a scan included."""
    found: list[str] = []

    def trace(arrays):
        found.clear()
        with handlers.block():
            args, kwargs = leaves.replaced(arrays)
            handlers.seed(_Named(model, found), random.key(0))(*args, **kwargs)

    try:
        jax.eval_shape(trace, leaves.arrays)
    except jax.errors.JAXTypeError:  # the model looks at values
        trace(leaves.arrays)
    return found


def unpaired(priors: Mapping[str, GP]) -> dict[str, str]:
    """{GP site whose kernel is no function of two rows, and so has none with new ones: why}."""
    faults = {k: pair_fault(prior.kernel, prior.X) for k, prior in priors.items()}
    return {k: fault for k, fault in faults.items() if fault is not None}


def require_pairs(faults: Mapping[str, str]) -> None:
    """Raise `ModelError` where other rows have no covariance with the training rows."""
    for name, fault in faults.items():
        raise ModelError(
            f"the kernel of GP site '{name}' is no function k(X1, X2) -> (N1, N2) of any rows: "
            f"{fault}. So other rows have no covariance with the training rows. Laplace, EP, VI "
            f"and NUTS fit the model; f at the training rows is in fit.latent['{name}']."
        )


def require_none_tied(sites: list[str], there: str = "fit.sites") -> None:
    """Raise `ModelError` for sites of training rows alone; their posterior is in `there`."""
    if sites:
        raise ModelError(
            f"site(s) {sites} have an entry for each row of the data and covariances between "
            "them (a random walk, or a matrix, over the rows themselves), so that other rows have "
            "none of it. Declare a GP over inputs, pg.GP(kernel, X), or entries for all times "
            f"that rows index, z[time]. The posterior at the training rows is in {there}."
        )
