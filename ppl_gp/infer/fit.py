"""`fit`: one verb for every method."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import singledispatch

import jax
import numpy as np

from ppl_gp.errors import LISTED, DataError, FitError, ModelError, Result
from ppl_gp.frames.names import Names, explained
from ppl_gp.infer.sources import Stream
from ppl_gp.reading.arguments import (
    Leaves,
    argument_names,
    as_arrays,
    named_arrays,
    require_no_such_argument,
)
from ppl_gp.reading.fingerprint import settle
from ppl_gp.reading.reading import declare, own_function
from ppl_gp.reading.refusals import of_the_model, require_drawn
from ppl_gp.results.fit import Fit
from ppl_gp.runtime import one_at_a_time, stopwatch, verb, was_interrupt
from ppl_gp.settings import as_key, require_known

_APART = 1e3  # scales of two columns that a fit that failed names

# (model, args, kwargs) -> a sentence that names the methods that take it; `infer.checklist` puts it
_fitting: list[Callable[..., str]] = []


def list_methods_by(function: Callable[..., str]) -> None:
    """Let errors of `fit` name methods for a model by this function of (model, args, kwargs)."""
    _fitting[:] = [function]


def _is_stream(args) -> bool:
    return bool(args) and isinstance(args[0], Stream)


@contextmanager
def _listing(model, args, kwargs):
    """Puts the methods that take the model into a message that asks for them."""
    try:
        yield
    except ModelError as error:
        if LISTED not in str(error) or not _fitting or _is_stream(args):
            raise
        error.args = (str(error).replace(LISTED, _fitting[0](model, args, kwargs)),)
        raise


@singledispatch
def run_method(method, model, rng_key, args, kwargs, progress: bool) -> Fit:
    """How a method fits a model: register an implementation for a new method's class."""
    raise DataError(
        f"method={method!r} is no inference method; give Laplace(), EP(), VI(), LocalBound(), "
        "NUTS() ..."
    )


@one_at_a_time
@of_the_model
def fit(
    model: Callable,
    method,
    rng_key,
    *args,
    throw: bool = True,
    progress: bool = False,
    tables=(),
    **kwargs,
) -> Fit:
    """Fit a model to data by any inference method.

    Every method returns the same kind of object, a `Fit`, which you query through the same calls.

    Parameters
    ----------
    model : callable
        A NumPyro model `model(X, ..., y=None)`. Its first positional argument contains the inputs,
        and its keyword `y` the observations.
    method : object
        An instance that configures the method, such as `Laplace()`, `SVGP()` or `NUTS()`.
    rng_key : int or jax.Array
        A seed or a `jax.random.key`.
    *args, **kwargs
        The arguments of the model: arrays, or frames and columns of pandas and polars, or xarray's
        DataArrays. `fit.names` remembers the names of columns, categories and rows, and predictions
        check new inputs against them. Methods that take batches accept a `Stream`.
    throw : bool, default True
        False returns a failed fit instead of raising `FitError`.
    progress : bool, default False
        Show a progress bar.
    tables : sequence of str, default ()
        Names of array arguments that are lookup tables without rows of data, such as `("Z",)`. They
        are remembered at new inputs. ppl_gp works this out from the model: use `tables` only if it
        asks for an array that should be remembered.

    Returns
    -------
    Fit
        The fitted model. `fit.result` says how the run ended.

    Raises
    ------
    DataError
        Before any work, if an argument cannot be used.
    ModelError
        Before any work, if the method cannot fit the model.
    FitError
        At the end, if the method did not succeed. The fit is in `error.fit`.

    Notes
    -----
    Ctrl-C returns what the search has reached, with the result `interrupted`. It raises
    `KeyboardInterrupt` before the first step is done and in the warm-up of a sampler. It also does
    with `hyper=Fixed`, which does not search, and if you press it twice after the search.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x))
    >>> print(fit.result)
    converged
    """
    if isinstance(method, type):
        raise DataError(
            f"method={method.__name__} is a class; give an instance, {method.__name__}()."
        )
    if not callable(model):
        raise DataError(f"model={model!r} is no function; the order is fit(model, method, key, X).")
    require_known(method)
    require_no_such_argument(model, "fit", ("throw", "progress", "tables"))
    key = as_key(rng_key, "fit(model, method, 0, X, y=y)")
    if _is_stream(args) and not hasattr(method, "batch_size"):
        raise DataError(
            f"{type(method).__name__}() was given a Stream and takes all data at once: give "
            "arrays. The methods that take streams are SVGP() and MeanField()."
        )
    if _is_stream(args) and tables:
        raise DataError(f"tables={tables!r}: of a Stream, what its batches hold are the rows.")
    args, kwargs, names = named_arrays(model, args, kwargs)
    args, kwargs = as_arrays(args, kwargs)
    arrays = Leaves(model, args, kwargs).arrays
    with stopwatch() as watch, explained(names, arrays, argument_names(model, 1)[0]):
        if not _is_stream(args):
            require_drawn(own_function(model), Leaves(model, args, kwargs))
            model = declare(own_function(model), args, kwargs, tables)
            names.require_same_rows(model.reading.row_axes)
        with _listing(model, args, kwargs):
            result = run_method(method, model, key, args, kwargs, progress)
        jax.block_until_ready(result.latent)
    result.stats.update(watch)
    result.names = Names((*result.names.arguments, *names.arguments))  # a stream has its own
    settle(result.model.function)
    if (was_interrupt(None) or verb.ended) and result.result is not Result.nonfinite:
        result.result = Result.interrupted
    cause = result.stats.pop("stream_error", None)  # an exception, which no file keeps
    if result.result not in (Result.converged, Result.completed, Result.interrupted):
        if "caution" not in result.stats and (apart := _scales(result, arrays)):
            result.stats["caution"] = apart
        if not throw:
            return result
        caution = f"But {result.stats['caution']}. " if "caution" in result.stats else ""
        told = result.stats.get("bad_batch") or result.result.message
        raise FitError(
            f"{type(method).__name__} ended as '{result.result}': {told.rstrip('.')}. "
            f"{caution}Figures: {_figures(result.stats)}. The fit is in error.fit; "
            "throw=False returns it.",
            result,
        ) from cause
    return result


def _scales(fit: Fit, arrays) -> str:
    """In words, the columns of the smallest and the largest scale, if they are far apart."""
    sds = []
    for path in fit.model.reading.row_axes:
        x = arrays.get(path)
        if path != "y" and isinstance(x, jax.Array) and x.dtype.kind == "f" and x.ndim in (1, 2):
            known = fit.names[path].columns if path in fit.names else None
            columns = [f"column {c!r} of '{path}'" for c in known or range(x[:1].size)]
            labels = columns if x.ndim == 2 else [f"'{path}'"]
            sds += zip(np.atleast_1d(np.std(x, 0)), labels, strict=True)
    sds = sorted(x for x in sds if x[0] > 0)
    if not sds or sds[-1][0] < _APART * sds[0][0]:
        return ""
    (a, small), (b, large) = sds[0], sds[-1]
    return (
        f"the scale of {small} (sd {a:.1g}) and that of {large} (sd {b:.1g}) are far apart: scale "
        "both to sd 1, and the priors of their coefficients with them"
    )


def _figures(stats):
    said = ("caution", "bad_batch", "stream")
    shown = {k: v for k, v in stats.items() if isinstance(v, int | float | str) and k not in said}
    written = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in shown.items()}
    return ", ".join(f"{k}={v}" for k, v in written.items())
