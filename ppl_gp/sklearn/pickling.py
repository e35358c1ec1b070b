"""Fits inside of a pickled estimator: the bytes of `fit.save`, and the model by its name."""

import functools
import importlib
import types
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from ppl_gp.errors import StoreError
from ppl_gp.results.fit import Fit
from ppl_gp.results.load import load


def to_bytes(fit: Fit, model: Callable) -> bytes:
    """What `fit.save` writes. Raises `StoreError` for a model that another process could not
    import, as neither a file nor a pickle holds code.
    """
    require_importable(model)
    with TemporaryDirectory() as folder:
        return fit.save(Path(folder) / "fit").read_bytes()


def from_bytes(saved: bytes, model: Callable) -> Fit:
    """What `load` reads; its errors are those of a file called `fit`."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "fit"
        path.write_bytes(saved)
        return load(path, model)


def require_importable(model: Callable) -> None:
    """Raise `StoreError` for a function that does not stand in a module under its own name: a
    lambda, one that was made inside of another.
    """
    while isinstance(model, functools.partial):
        model = model.func
    if not isinstance(model, types.FunctionType) or _by_name(model) is model:
        return
    raise StoreError(
        f"the model {model.__module__}.{model.__qualname__} cannot be pickled, as it is not "
        "found in its module by that name: define it at the top level of a module, with "
        "functools.partial for its constants; or keep estimator.fit_result_.save(path)."
    )


def _by_name(function: types.FunctionType):
    try:
        found = importlib.import_module(function.__module__)
        for name in function.__qualname__.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    return found
