"""The model that a method fits: Gaussian sites integrated into a predictor that they enter."""

from collections.abc import Mapping

import numpy as np

from ppl_gp.errors import DataError, ModelError, warn
from ppl_gp.local.method import LocalMethod
from ppl_gp.reading.predictor.collapse import collapse
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.reading import Declared
from ppl_gp.reading.roles import roles
from ppl_gp.reading.tracing import run
from ppl_gp.settings import GAUSSIAN


def with_effects(
    model: Declared,
    args: tuple,
    kwargs: dict,
    given: Mapping,
    maximised: bool = False,
    latents: bool = False,
) -> Declared:
    """The model that `SVGP` sees: effects beside GPs are integrated with them, those that stand one
    a datum where a datum sees one function. Several GPs alone keep a q(u) each.

    Where it does not integrate them they are hyperparameters, and a warning says so; `maximised`
    with the others (`MAP`), `ModelError` for effects of several values. `latents`: whether the user
    asked for a q(h) of what stands one a datum, which then stays as it is.
    """
    found = collapse(model, args, kwargs, given)
    if not isinstance(found, Collapsed):
        return model
    trace = run(model, args, kwargs, dict(given))
    gps = roles(trace).gps
    effects = sorted(set(found.plan.sites) - set(gps))
    own = sorted(set(dict(found.plan.axes)) - set(gps))  # one a datum: latents
    if not gps or not (effects or set(gps) & set(model.reading.looked_up)):
        return model
    if not own or (found.plan.functions == 1 and not latents):
        return found
    left = [k for k in effects if k not in own]
    why = f"{own} stand one a datum and have a q(h) each, as `latents` or `num_importance` asks"
    if not latents:
        why = f"{own} stand one a datum, which sees several functions"
    many = [k for k in left if np.size(trace[k]["value"]) > 1]
    if maximised and many:
        raise ModelError(
            f"SVGP(hyper=MAP()) would maximise {many}, effects of several values: {why}, and "
            "SVGP() does not integrate effects beside those. Laplace(), EP() and VI() integrate "
            "all of them; SVGP(hyper=AutoNormal), of numpyro.infer.autoguide, gives "
            "them a Gaussian beside the hyperparameters; or hold them, hyper=Fixed({...})."
        )
    if left:
        warn(
            f"SVGP() takes {left} as hyperparameters, points under MAP(): {why}, and it does "
            "not integrate effects beside those. EP(), VI() and Laplace() integrate all of them."
        )
    return model


def integrated(
    model: Declared, method: LocalMethod, args: tuple, kwargs: dict, given: Mapping | None = None
) -> Declared:
    """The model that `method` sees under its `integrate`; `given`: values of sites that are held.
    `DataError` for another `integrate`, `ModelError` for a site of it that cannot be integrated.
    """
    which, name = method.integrate, type(method).__name__
    if which == GAUSSIAN:
        return collapse(model, args, kwargs, given)
    if not isinstance(which, tuple) or not all(isinstance(k, str) for k in which):
        raise DataError(
            f"{name}(integrate={which!r}): give '{GAUSSIAN}' or a tuple of names of sites."
        )
    found = collapse(model, args, kwargs, given, only=which)
    whole = isinstance(found, Collapsed)
    inside = found.plan.sites if whole else roles(run(found, args, kwargs)).gps
    if left := [k for k in which if k not in inside]:
        held = ", or, as here, the model cannot be traced at another number of rows (it holds "
        held += "arrays of one entry per row, or writes their number down)"
        held *= not model.reading.grows
        raise ModelError(
            f"{name}(integrate={which!r}): {left} cannot be integrated with the others: such a "
            "site is no Gaussian site of the model, or a scale, a kernel or another prior is "
            "computed from it, or no array that is affine in it holds one entry per datum, or a "
            "numpyro.factor or an observation that holds no rows sees it as well, or a scale or "
            f"mask handler stands around its prior{held}. Leave it out, or use NUTS()."
        )
    return found
