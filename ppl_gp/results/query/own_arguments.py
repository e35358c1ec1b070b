"""Options of this package's calls beside a model's own arguments, which are passed in the same
call.
"""

from collections.abc import Iterable

from ppl_gp.errors import DataError
from ppl_gp.model.arguments import argument_of, parameters_of
from ppl_gp.results.record import Record


def observed_argument(model) -> str:
    """The name of the argument that holds the observations: `y`, or, of a model without one, the
    one optional argument that no distribution, mask or factor was computed from in training.
    """
    parameters, reading = parameters_of(model), model.reading
    used = {argument_of(p) for p in (*reading.shaping, *reading.masking, *reading.factored)}
    free = [k for k, p in parameters.items() if p.default is None and k not in used]
    if "y" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or not free:
        return "y"
    if len(free) > 1:
        raise DataError(
            f"y_new: the model has no argument y, and its observations may be any of {free}; give "
            f"them by name, log_density(X_new, {free[0]}=...)."
        )
    return free[0]


def require_no_such_argument(fit: Record, call: str, options: Iterable[str]) -> None:
    """Raise `DataError` where the model has an argument named as one of the call's options, which
    would never reach it.
    """
    parameters = parameters_of(fit.model)
    if taken := [name for name in options if name in parameters or name in fit.kwargs]:
        raise DataError(
            f"the model has arguments {taken}, which {call} takes as its own options; give the "
            "model's another name."
        )
