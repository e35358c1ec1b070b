"""Numbers that configurations are given: whole ones, and positive ones."""

import math
from numbers import Integral, Real

from ppl_gp.errors import DataError


def require_whole(owner: object, *names: str, least: int = 1) -> None:
    """Raise `DataError` unless the fields `names` are whole numbers from `least` on, or `None`
    where that is their default.
    """
    for name in names:
        value = getattr(owner, name)
        if value is None and getattr(type(owner), name, least) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:  # pyright: ignore[reportOperatorIssue]
            raise DataError(
                f"{type(owner).__name__}({name}={value!r}): give a whole number, at least {least}."
            )


def require_positive(owner: object, *names: str) -> None:
    """Raise `DataError` unless the fields `names` are positive, finite numbers."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, Real) or not 0.0 < float(value) < math.inf:
            raise DataError(
                f"{type(owner).__name__}({name}={value!r}): give a positive, finite number."
            )
