"""A method's own settings among an estimator's parameters: `method__max_steps`,
`method__hyper__restarts`, by scikit-learn's rule for nested names.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ppl_gp.errors import DataError

_BETWEEN = "__"


def settings(value: Any, name: str) -> dict[str, Any]:
    """{name of a setting, `name` and its path in front: value} of a configuration; empty for what
    is none.
    """
    found = {}
    for field in _fields(value):
        inner = name + _BETWEEN + field
        found |= {inner: getattr(value, field), **settings(getattr(value, field), inner)}
    return found


def with_settings(value: Any, name: str, changes: Mapping[str, Any]) -> Any:
    """The configuration with other settings, by names as `settings` gives them: a new one, as
    configurations are not changed. A whole (`method__hyper`) is set before what is in it.

    Raises `DataError` for a name that it has not.
    """
    for path in sorted(changes, key=lambda path: path.count(_BETWEEN)):
        value = _with_one(value, name, path.split(_BETWEEN)[1:], changes[path])
    return value


def _with_one(value, name: str, path: list[str], new) -> Any:
    if not path:
        return new
    if path[0] not in _fields(value):
        raise DataError(
            f"set_params({name}{_BETWEEN}{path[0]}=...): {value!r} has no such setting; it has "
            f"{_fields(value) or 'none'}."
        )
    inner = _with_one(getattr(value, path[0]), f"{name}{_BETWEEN}{path[0]}", path[1:], new)
    return dataclasses.replace(value, **{path[0]: inner})


def _fields(value) -> list[str]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return []
    return [field.name for field in dataclasses.fields(value) if field.init]
