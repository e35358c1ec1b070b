"""The names of a fit as JSON and back. Rows' labels are left out: they belong to the training
table, of which a file holds what prediction needs.
"""

from typing import Any

from ppl_gp.errors import StoreError
from ppl_gp.frames.names import Names
from ppl_gp.frames.table import ArrayNames


def encode_names(names: Names) -> dict | None:
    """`None` where nothing had names."""
    told = {
        path: {"columns": _list(n.columns), "levels": _lists(n.levels), "dims": _list(n.dims)}
        for path, n in names.items()
    }
    return told or None


def decode_names(told: dict | None) -> Names:
    """The inverse. Raises `StoreError` for anything that `encode_names` does not write."""
    try:
        found = [
            (
                path,
                ArrayNames(
                    _names(n["columns"]),
                    tuple(map(_names, n["levels"])),
                    None,
                    _names(n["dims"]),
                ),
            )
            for path, n in (told or {}).items()
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"is damaged: its names cannot be read ({error!r}).") from error
    return Names(tuple(found))


def _list(names) -> list | None:
    return None if names is None else list(names)


def _lists(levels) -> list:
    return [_list(x) for x in levels]


def _names(told: Any) -> tuple[str, ...] | None:
    if told is None:
        return None
    if not isinstance(told, list) or not all(isinstance(x, str) for x in told):
        raise ValueError(f"{str(told)[:80]} is no list of names")
    return tuple(told)
