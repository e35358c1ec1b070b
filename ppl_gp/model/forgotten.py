"""Whether a model was given its observations."""

import inspect
from collections.abc import Callable
from typing import Any

from numpyro.primitives import Messenger

from ppl_gp.errors import ModelError
from ppl_gp.model.roles import Roles, is_observed, roles
from ppl_gp.model.tracing import bare_trace


def require_observations(model: Callable, args: tuple, kwargs: dict, trace: dict) -> None:
    """Raise `ModelError` where no site observes data, and some would if an argument that is `None`
    were given, or the model has a GP: no method has anything to learn from.

    What is left is a model without a GP that is a density of its own (a funnel, latents and a
    `numpyro.factor`), which samplers draw from. A trace for each argument and site, and only where
    nothing is observed.
    """
    found = roles(trace)
    if any(trace[k]["is_scored"] for k in found.observed):
        return
    left_out = _left_out(model, args, kwargs, trace)
    if left_out is None and (found.observed or not found.gps):
        return
    raise ModelError(observes_nothing(left_out, found))


def observes_nothing(left_out: str | None, found: Roles) -> str:
    """What is said of a model without observations."""
    if left_out is None:
        return (
            "the model observes nothing; pass the observations by keyword, y=..., and `obs=y` in "
            "the model. For draws of the prior there is numpyro.infer.Predictive."
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
    while isinstance(model, Messenger):
        model = model.fn
    try:
        bound = inspect.signature(model).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    bound.apply_defaults()
    absent = [p for p, value in bound.arguments.items() if value is None]
    found = roles(trace)
    free = (*found.local_latents, *found.hyper)
    shown = (p for p in absent for k in free if _is_observed_as(k, p, model, bound, trace))
    return next(shown, "y" if "y" in absent and not found.observed else None)


def _is_observed_as(site: str, argument: str, model, bound: Any, trace: dict) -> bool:
    """Whether the site observes the argument, where its own value is passed for that."""
    given = inspect.BoundArguments(
        bound.signature, {**bound.arguments, argument: trace[site]["value"]}
    )
    try:
        again = bare_trace(model, given.args, given.kwargs)
    except Exception:  # noqa: BLE001 - an option that is no array may raise anything
        return False
    return any(k in again and is_observed(again[k]) for k in (site, f"{site}_observed"))
