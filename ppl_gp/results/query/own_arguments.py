"""Options of this package's calls beside a model's own arguments, which are passed in the same
call.
"""

import inspect
from collections.abc import Iterable

from ppl_gp.errors import DataError
from ppl_gp.results.record import Record


def require_no_such_argument(fit: Record, call: str, options: Iterable[str]) -> None:
    """Raise `DataError` where the model has an argument named as one of the call's options, which
    would never reach it.
    """
    try:
        parameters = inspect.signature(fit.model).parameters
    except (TypeError, ValueError):
        parameters = {}
    if taken := [name for name in options if name in parameters or name in fit.kwargs]:
        raise DataError(
            f"the model has arguments {taken}, which {call} takes as its own options; give the "
            "model's another name."
        )
