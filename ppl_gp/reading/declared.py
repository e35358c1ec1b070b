"""A declared model: the user's function together with what was read off it, which compiled
functions are keyed by.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

from ppl_gp.errors import DataError, ModelError, PplGpError
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.fingerprint import Keyed, changed, keyed
from ppl_gp.reading.reading import Reading, read_off


@dataclass(unsafe_hash=True, repr=False)
class Declared:
    """A model that knows which of its axes are the data's, and what it read when it was declared
    (globals, closures).

    It is called as the model is. Equal to another one of the same code, with the same constants and
    the same reading: so compiled code is found again, and not after a constant has changed.
    """

    function: Keyed
    reading: Reading

    def __post_init__(self):
        update_wrapper(self, self.function, updated=())

    def __call__(self, *args, **kwargs) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self):
        own = self.function.__wrapped__
        return f"Declared({getattr(own, '__qualname__', repr(own))})"


def declare(model: Callable, args: tuple, kwargs: dict, tables=()) -> Declared:
    """Read a model off its training arguments; a model that was declared before stays as it is.
    `tables`: arguments that are looked up, where the user says so.

    Raises `DataError` where the arguments do not fit together.
    """
    if isinstance(model, Declared):
        return model
    try:
        function = keyed(model)
        return Declared(function, read_off(function, args, kwargs, tables))
    except (TypeError, ValueError) as error:
        if lists := [
            k for k, v in {**dict(enumerate(args)), **kwargs}.items() if isinstance(v, list)
        ]:
            raise DataError(
                f"the model does not run: {error} Arguments {lists} are lists, which are options; "
                "give arrays."
            ) from error
        lengths = {x.shape[0] for x in Leaves(model, args, kwargs).arrays.values() if len(x.shape)}
        if isinstance(error, PplGpError) or len(lengths) <= 1:
            raise
        raise DataError(
            f"the arguments' leading lengths {sorted(lengths)} do not fit together: {error}"
        ) from error


def own_function(model: Callable) -> Callable:
    """The user's function behind a declared model."""
    return model.function.__wrapped__ if isinstance(model, Declared) else model


def require_unchanged(model: Declared) -> None:
    """Raise `ModelError` where something that the model reads differs from what it was when it was
    declared.
    """
    if differing := changed(model.function):
        raise ModelError(
            f"what the model reads has changed since the fit: {differing}. A prediction would mix "
            "old and new values: put the old value back, fit again, or make it an argument of "
            "the model, which a fit remembers."
        )
