"""A frame of one column where a model wants the column: (N, 1) in place of (N,)."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ppl_gp.errors import DataError, ModelError


@contextmanager
def explained(names: Iterable[str], arrays: Mapping[str, Any]) -> Iterator[None]:
    """Errors about shapes say which arguments came as frames of one column.

    `names`: paths of arguments that came with names, but for the inputs, which are (N, 1) by right;
    `arrays`: {path: array}. Nothing is refused that a model can use.
    """
    try:
        yield
    except (DataError, ModelError) as error:
        single = [p for p in names if p in arrays and arrays[p].shape[1:] == (1,)]
        if type(error) not in (DataError, ModelError) or "shape" not in str(error) or not single:
            raise
        raise type(error)(
            f"{error} The argument{'s' * (len(single) > 1)} {', '.join(map(repr, single))} came as "
            f"a frame of one column, which is an array of shape {arrays[single[0]].shape}: where "
            "the model wants one entry a row, an index of groups, say, give the column, "
            "frame['name'], not frame[['name']]."
        ) from error
