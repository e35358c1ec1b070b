"""The arguments of a prediction: new inputs checked against the training inputs, the other arguments completed."""

import inspect
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp

from ppl_gp.arguments import as_array, as_arrays
from ppl_gp.errors import DataError
from ppl_gp.factors import depends
from ppl_gp.gp import unwrap
from ppl_gp.results.layout import mask_of
from ppl_gp.tracing import is_factor, run

if TYPE_CHECKING:
    from ppl_gp.results.fit import Fit


def new_arguments(fit: "Fit", X_new, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """(positional, keyword) arguments of the model at new inputs, X_new first.

    Arguments of training that are not arrays (link="probit") are remembered; arrays, one entry a datum, are given
    again.
    Raises `DataError`: X_new with NaN, infinity, no rows, or other columns than in training; an array that is missing.
    """
    X = _checked_inputs(X_new, fit.args)
    args, kwargs = as_arrays(args, kwargs)
    args = _with_remembered(fit, (X, *args), kwargs)
    remembered = {k: v for k, v in fit.kwargs.items() if not eqx.is_array(v)}
    _require_arrays(fit, {*kwargs, *argument_names(fit.model, len(args))})
    return args, remembered | kwargs


def _checked_inputs(X_new, trained: tuple):
    if not trained:
        raise DataError(
            "the model was fitted without a positional argument, so X_new has no place; pass X positionally."
        )
    X = as_array("X_new", X_new)
    if not eqx.is_array(X) or not eqx.is_array(trained[0]):
        return X
    if X.ndim == 0 or 0 in X.shape:
        raise DataError(f"X_new has shape {X.shape}; give at least one row of inputs.")
    if X.shape[1:] != trained[0].shape[1:]:
        raise DataError(
            f"X_new has shape {X.shape}, and the training inputs {trained[0].shape}: only the rows may differ in number."
        )
    return _as_trained(X, trained[0].dtype)


def _as_trained(X, dtype):
    """In the training inputs' precision, so that one set of compiled functions serves; integers stay integers."""
    return X.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else X


def _with_remembered(fit, args, kwargs):
    """Positional arguments that were left out, from training where they are no arrays."""
    names = argument_names(fit.model, len(fit.args))
    optional = _optional_arguments(fit.model)
    for name, value in list(zip(names, fit.args, strict=True))[len(args) :]:
        if name in kwargs:
            break
        if eqx.is_array(value):
            if name in optional:
                break
            raise DataError(f"predicting needs '{name}' at the new inputs, an array that the model took in training.")
        args = (*args, value)
    return args


def argument_names(model, num: int) -> list[str]:
    """Names of the model's first `num` positional arguments, `arg<i>` where its signature does not tell."""
    try:
        parameters = list(inspect.signature(model).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [named[i] if i < len(named) else f"arg{i}" for i in range(num)]


def _optional_arguments(model) -> set[str]:
    try:
        return {n for n, p in inspect.signature(model).parameters.items() if p.default is not p.empty}
    except (TypeError, ValueError):
        return set()


def _require_arrays(fit, given):
    missing = [k for k, v in fit.kwargs.items() if eqx.is_array(v) and k not in given and k != "y"]
    if missing and (needed := sorted(shaping_arguments(fit).intersection(missing))):
        raise DataError(f"predicting needs {needed} at the new inputs, arrays that the model took in training.")


def shaping_arguments(fit: "Fit", *, masks: bool = False) -> set[str]:
    """Array arguments that distributions are computed from, not observations; with `masks`, masks and scales as well.

    Positional arguments by their name. One trace of the model an array.
    """
    names = argument_names(fit.model, len(fit.args))
    arrays = {k: v for k, v in {**dict(zip(names, fit.args, strict=True)), **fit.kwargs}.items() if eqx.is_array(v)}
    hyper = jax.tree.map(lambda x: x[0], fit.hyper) if fit.sampled else fit.hyper

    def distributions(name):
        def of(value):
            args = tuple(value if n == name else a for n, a in zip(names, fit.args, strict=True))
            kwargs = {k: value if k == name else v for k, v in fit.kwargs.items()}
            trace = run(fit.model, args, kwargs, hyper).values()
            sites = [s for s in trace if s["type"] == "sample" and not is_factor(s)]
            around = [(mask_of(s["fn"]), s["scale"]) for s in sites] if masks else []
            return [jnp.asarray(x) for x in jax.tree.leaves(([unwrap(s["fn"]) for s in sites], around))]

        return of

    return {name for name, value in arrays.items() if _shapes(distributions(name), value)}


def _shapes(distributions, value) -> bool:
    try:
        return depends(distributions, value)
    except jax.errors.JAXTypeError:  # the model looks at the array's values while it is traced
        return True
