"""The digest of one value: by content, the same in every process. No address and no `repr` of an
object enters.
"""

import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

_ROWS = 4096  # of a large array, where `strided`
_WHOLE = 1 << 24  # bytes up to which an array is digested whole, where `strided`
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")


class Entry:
    """The digest of one value. `reader` names the functions and classes that it meets
    (`reading.Reader`).
    """

    def __init__(self, reader):
        self.reader, self._hash = reader, hashlib.blake2b(digest_size=16)
        self._met: dict[int, tuple[int, Any]] = {}

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def put(self, text: str) -> None:
        """Some text, so that no two sequences of texts run together."""
        data = text.encode("utf-8", "surrogatepass")
        self._hash.update(b"%d:" % len(data) + data)

    def array(self, array: np.ndarray) -> None:
        """Shape, type and content."""
        self.put(f"{array.dtype} {array.shape}")
        if array.dtype.hasobject:
            self.value(array.tolist())
        else:
            self._hash.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def again(self, value) -> bool:
        """Whether this very object stands in this entry already; its place is put in its stead."""
        if id(value) in self._met:
            self.put(f"again {self._met[id(value)][0]}")
            return True
        self._met[id(value)] = len(self._met), value
        return False

    def value(self, value) -> None:
        """Any value."""
        if isinstance(value, Tracer):
            self.opaque(value)
        elif isinstance(value, jax.Array):
            _jax_array(value, self)
        else:
            _feed(value, self)

    def each(self, values) -> None:
        """A container's elements."""
        for x in values:
            self.value(x)

    def opaque(self, value) -> None:
        """By its type alone; `Keyed` compares identities."""
        self.put(f"opaque {type(value).__module__}.{type(value).__qualname__}")
        self.reader.unreadable.append(value)


@functools.singledispatch
def _feed(value, entry: Entry) -> None:
    if entry.again(value):
        return
    entry.put(f"object {entry.reader.label(type(value))}")
    wrapped = getattr(value, "__wrapped__", None)
    if callable(wrapped):
        entry.value(wrapped)
    if state := state_of(value):
        entry.value(state)
    elif not callable(wrapped):
        reduced = _reduced(value)
        entry.opaque(value) if reduced is None else entry.value(reduced)


@_feed.register(
    int | float | complex | str | bytes | range | type(None) | type(Ellipsis) | type(NotImplemented)
)
def _plain(value, entry):
    entry.put(f"{type(value).__qualname__} {value!r}")
    _subclass(value, entry)


def _subclass(value, entry):
    """A user's own subclass of a number or container: its methods read, too (`__missing__`)."""
    cls = type(value)
    if cls.__module__ != "builtins" and not entry.reader.is_installed(cls):
        entry.put(f"of {entry.reader.label(cls)}")
        entry.value(state_of(value))


@_feed.register(np.ndarray)
def _numpy_array(value, entry):
    entry.put(f"array {type(value).__qualname__}")
    if isinstance(value, np.ma.MaskedArray):
        entry.array(np.ma.getmaskarray(value))
    on_disk = isinstance(value, np.memmap)
    if not (entry.reader.strided or on_disk) or value.nbytes <= _WHOLE or not value.ndim:
        return entry.array(np.asarray(value))
    entry.put(f"{value.shape}")
    entry.array(np.asarray(value[:: max(1, len(value) // _ROWS)]))
    if not on_disk and not value.dtype.hasobject:
        entry.array(np.sum(value, axis=0, keepdims=True))


@_feed.register(np.generic)
def _numpy_scalar(value, entry):
    entry.put(type(value).__qualname__)
    entry.array(np.asarray(value))


def _jax_array(value, entry):
    entry.put(f"jax {getattr(value, 'weak_type', False)}")
    if value.is_deleted() or not value.is_fully_addressable:
        entry.opaque(value)
    elif jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        entry.put(str(value.dtype))
        entry.value(np.asarray(jax.random.key_data(value)))
    else:
        entry.value(np.asarray(value))


@_feed.register(list | tuple)
def _sequence(value, entry):
    if isinstance(value, list) and entry.again(value):
        return
    entry.put(f"{type(value).__qualname__} {len(value)}")
    entry.each(value)
    _subclass(value, entry)


@_feed.register(Mapping)
def _mapping(value, entry):
    if not entry.again(value):
        entry.put(f"{type(value).__qualname__} {len(value)}")
        entry.each(x for pair in value.items() for x in pair)
        _subclass(value, entry)


@_feed.register(set | frozenset)
def _set(value, entry):
    digests = []
    for x in value:
        one = Entry(entry.reader)
        one.value(x)
        digests.append(one.hexdigest())
    entry.put(f"{type(value).__qualname__} {sorted(digests)}")
    _subclass(value, entry)


@_feed.register(slice)
def _slice(value, entry):
    entry.put("slice")
    entry.each((value.start, value.stop, value.step))


@_feed.register(types.CodeType)
def _code(value, entry):
    entry.put(
        f"code {value.co_argcount} {value.co_posonlyargcount} {value.co_kwonlyargcount} "
        f"{value.co_flags}"
    )
    names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
    entry.each((value.co_code, getattr(value, "co_exceptiontable", b""), *names, value.co_consts))


@_feed.register(types.FunctionType | type)
def _function(value, entry):
    entry.put(f"{'class' if isinstance(value, type) else 'function'} {entry.reader.label(value)}")


@_feed.register(types.BuiltinFunctionType)
def _builtin(value, entry):
    entry.put(f"builtin {value.__module__}.{value.__qualname__}")
    if value.__self__ is not None and not isinstance(value.__self__, types.ModuleType | type):
        entry.value(value.__self__)  # such as `values.append`


@_feed.register(types.MethodType)
def _method(value, entry):
    entry.put("method")
    entry.each((value.__func__, value.__self__))


@_feed.register(functools.partial)
def _partial(value, entry):
    entry.put("partial")
    entry.each((value.func, value.args, value.keywords))


@_feed.register(staticmethod | classmethod)
def _bound_later(value, entry):
    entry.put(type(value).__qualname__)
    entry.value(value.__func__)


@_feed.register(property)
def _property(value, entry):
    entry.put("property")
    entry.each((value.fget, value.fset))


@_feed.register(types.ModuleType)
def _module(value, entry):
    entry.put(f"module {value.__name__}")
    entry.reader.module(value)


def state_of(value) -> dict:
    """Attributes of an instance, without those that a descriptor of its class caches there.

    {} for a class that says itself what pickle keeps.
    """
    cls = type(value)
    if any(getattr(cls, k, None) is not getattr(object, k, None) for k in _PICKLING):
        return {}
    slots = [
        n
        for c in cls.__mro__
        for n in _names(getattr(c, "__slots__", ()))
        if n[:2] != "__" and hasattr(value, n)
    ]
    fields = {
        n: x
        for n, x in getattr(value, "__dict__", {}).items()
        if n[:2] != "__" and not _is_cache(cls, n)
    }
    # flax's modules carry identifiers of the process beside their fields.
    if any(c.__module__.partition(".")[0] == "flax" for c in cls.__mro__):
        fields = {n: x for n, x in fields.items() if n in getattr(cls, "__dataclass_fields__", {})}
    return {**{n: getattr(value, n) for n in slots}, **fields}


def _names(slots):
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_cache(cls, name) -> bool:
    stands = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
    return hasattr(stands, "__get__") and not isinstance(stands, types.FunctionType)


def _reduced(value):
    """What pickle would keep of an object, where it can tell."""
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # anything may be raised by a class that cannot be pickled
        return None
    return (
        reduced
        if isinstance(reduced, str)
        else [list(x) if hasattr(x, "__next__") else x for x in reduced]
    )
