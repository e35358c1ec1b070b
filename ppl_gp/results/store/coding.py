"""Python values as JSON beside NumPy arrays, and back: what the header of a saved fit is written
in.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import DataError, StoreError
from ppl_gp.results.store.storable import file_name, storable_modules
from ppl_gp.storage.archive import NUMBER_KINDS

_MARK = "$"  # begins the keys that stand for what JSON has no word for
_ARRAY, _TUPLE, _MODULE = "$array", "$tuple", "$module"


def encode(value: Any, arrays: dict, where: str, name: str) -> Any:
    """`value` as JSON, with arrays put into `arrays` under keys that begin with `where`."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, jax.Array | np.ndarray):
        arrays[where] = _plain_array(value, name)
        return {_ARRAY: where}
    if isinstance(value, dict) and all(
        isinstance(k, str) and not k.startswith(_MARK) for k in value
    ):
        return {k: encode(v, arrays, f"{where}/{k}", f"{name}['{k}']") for k, v in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        items = [encode(v, arrays, f"{where}/{i}", f"{name}[{i}]") for i, v in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if file_name(type(value)) is not None:
        return encode_module(value, arrays, where, name)
    raise DataError(
        f"{name} is a {type(value).__name__} and cannot be saved; pass numbers, strings, arrays, "
        "or lists, tuples and dictionaries of those (keys are strings that do not begin with "
        "'$'), and bind other objects to the model with functools.partial."
    )


def _plain_array(value, name: str) -> np.ndarray:
    is_key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )
    if is_key or np.asarray(value).dtype.kind not in NUMBER_KINDS:
        raise DataError(
            f"{name} is an array of {value.dtype} and cannot be saved; pass numbers, or a list of "
            "strings."
        )
    return np.asarray(value)


def decode(value: Any, arrays) -> Any:
    """The inverse of `encode`. Each array is taken out of `arrays`, so that none is used twice."""
    if isinstance(value, list):
        return [decode(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_ARRAY}:
        return jnp.asarray(arrays.pop(value[_ARRAY]))
    if set(value) == {_TUPLE}:
        return tuple(decode(v, arrays) for v in value[_TUPLE])
    if _MODULE in value:
        return _decode_module(value, arrays)
    return {k: decode(v, arrays) for k, v in value.items()}


def encode_module(value: Any, arrays: dict, where: str, name: str) -> dict:
    """One of our own modules (inducing variables, q(u)) as the name of its class and its fields."""
    fields = (
        value._asdict()
        if hasattr(value, "_fields")
        else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    )
    return {
        _MODULE: file_name(type(value)),
        **{k: encode(v, arrays, f"{where}/{k}", f"{name}.{k}") for k, v in fields.items()},
    }


def _decode_module(value: dict, arrays) -> Any:
    cls = storable_modules().get(value[_MODULE])
    if cls is None:
        raise StoreError(
            f"the file holds a '{value[_MODULE]}', which this installation does not know; upgrade "
            "ppl-gp."
        )
    fields = {k: decode(v, arrays) for k, v in value.items() if k != _MODULE}
    declared = (
        getattr(cls, "_fields", ())
        if issubclass(cls, tuple)
        else tuple(f.name for f in dataclasses.fields(cls))
    )
    if set(fields) != set(declared):
        raise StoreError(
            f"a {cls.__name__} has the fields {list(declared)}, and the file gives {list(fields)}."
        )
    if issubclass(cls, tuple):
        return cls(**fields)
    # its arrays have an axis of draws, which a constructor would not expect
    module = object.__new__(cls)
    for k, v in fields.items():
        object.__setattr__(module, k, v)
    return module
