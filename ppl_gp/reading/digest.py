"""The digest of one value: by content, the same in every process. No address and no `repr` of an
object enters. And a distribution as the arrays that it has, and the distribution again.

These arrays are the attributes of the instance, not the leaves of NumPyro's tree. The leaves are
what the class declares (`arg_constraints`, `pytree_data_fields`), and a user's class may declare
nothing. NumPyro also counts some arrays as static: the totals of a multinomial.
"""

import functools
import hashlib
import inspect
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.core import Tracer
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import Transform
from numpyro.distributions.util import lazy_property

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, unwrap
from ppl_gp.quick import quick_jit

_ROWS = 4096  # of a large array, where `strided`
_WHOLE = 1 << 24  # bytes up to which an array is digested whole, where `strided`
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")
_ARRAYS = np.ndarray | np.generic | jax.Array
_PLAIN = int | float | complex | str | bytes | range | None | type(...) | type(NotImplemented)
_CODE = ("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags")
_NAMES = ("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_consts")

# {types: (value, reader) -> its head, and the values that it consists of}
_PARTS = {
    _PLAIN: lambda v, _: (f"{_name(v)} {v!r}", ()),
    list | tuple: lambda v, _: (f"{_name(v)} {len(v)}", v),
    defaultdict: lambda v, _: (
        f"{_name(v)} {len(v)}",
        (v.default_factory, *chain.from_iterable(v.items())),
    ),
    Mapping: lambda v, _: (f"{_name(v)} {len(v)}", chain.from_iterable(v.items())),
    set | frozenset: lambda v, r: (f"{_name(v)} {sorted(Entry(r).value(x) for x in v)}", ()),
    slice: lambda v, _: ("slice", (v.start, v.stop, v.step)),
    types.CodeType: lambda v, _: (
        "code " + " ".join(str(getattr(v, k)) for k in _CODE),
        (v.co_code, v.co_exceptiontable, *(getattr(v, k) for k in _NAMES)),
    ),
    type: lambda v, r: (f"class {r.label(v)}", ()),
    types.FunctionType: lambda v, r: (f"function {r.label(v)}", ()),
    types.BuiltinFunctionType: lambda v, _: (
        f"builtin {v.__module__}.{v.__qualname__}",  # bound to a value: `values.append`
        () if isinstance(v.__self__, types.ModuleType | type | None) else (v.__self__,),
    ),
    types.MethodType: lambda v, _: ("method", (v.__func__, v.__self__)),
    functools.partial: lambda v, _: ("partial", (v.func, v.args, v.keywords)),
    staticmethod | classmethod: lambda v, _: (_name(v), (v.__func__,)),
    property: lambda v, _: ("property", (v.fget, v.fset)),
    types.ModuleType: lambda v, r: (f"module {r.module(v)}", ()),
}


@functools.lru_cache(maxsize=4096)
def _kind(cls: type):
    return next((k for k in (Tracer, _ARRAYS, *_PARTS) if issubclass(cls, k)), None)


def _name(value) -> str:
    return type(value).__qualname__


class Entry:
    """The digest of one value. `reader` names functions and classes, and keeps the unreadable."""

    def __init__(self, reader):
        self.reader, self._hash = reader, hashlib.blake2b(digest_size=16)
        self._met: dict[int, tuple[int, Any]] = {}

    def value(self, value) -> str:
        """Any value; returns the digest."""
        if (kind := _kind(type(value))) is Tracer:
            self._opaque(value)
        elif kind is _ARRAYS:
            self._array(value)
        elif kind is not None:
            self._parts(value, *_PARTS[kind](value, self.reader))
        elif not self._again(value):
            self._object(value)
        return self._hash.hexdigest()

    def _opaque(self, value) -> None:
        """By its type, and in the reader by its identity."""
        self._put(f"opaque {type(value).__module__}.{_name(value)}")
        self.reader.unreadable.append(value)

    def _put(self, text: str) -> None:
        """Some text, so that no two sequences of texts run together."""
        data = text.encode("utf-8", "surrogatepass")
        self._hash.update(b"%d:" % len(data) + data)

    def _again(self, value) -> bool:
        """Whether the entry has met this very object before; its number is put in its place."""
        if id(value) in self._met:
            self._put(f"again {self._met[id(value)][0]}")
            return True
        self._met[id(value)] = len(self._met), value
        return False

    def _bytes(self, array: np.ndarray) -> None:
        self._put(f"{array.dtype} {array.shape}")
        if array.dtype.hasobject:
            self.value(array.tolist())
        else:
            self._hash.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _array(self, value) -> None:
        if isinstance(value, jax.Array):
            self._put(f"jax {getattr(value, 'weak_type', False)}")
            if value.is_deleted() or not value.is_fully_addressable:
                return self._opaque(value)
            if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
                self._put(str(value.dtype))
                value = jax.random.key_data(value)
            value = np.asarray(value)
        self._put("array " * isinstance(value, np.ndarray) + _name(value))
        if (cls := type(value)).__module__.partition(".")[0] != "numpy":  # numbers with a unit, say
            self._put(self.reader.label(cls))
            self.value(getattr(value, "__dict__", None))
        if isinstance(value, np.ma.MaskedArray):
            self._bytes(np.ma.getmaskarray(value))
        on_disk = isinstance(value, np.memmap)
        if not (self.reader.strided or on_disk) or value.nbytes <= _WHOLE or not value.ndim:
            return self._bytes(np.asarray(value))
        self._put(f"{value.shape}")
        self._bytes(np.asarray(value[:: max(1, len(value) // _ROWS)]))
        if not on_disk and not value.dtype.hasobject:
            self._bytes(np.sum(value, axis=0, keepdims=True))

    def _parts(self, value, head: str, parts) -> None:
        if isinstance(value, list | Mapping) and self._again(value):
            return
        self._put(head)
        for x in parts:
            self.value(x)
        cls = type(value)
        ours = cls.__module__ == "builtins" or isinstance(value, type)
        if not ours and not self.reader.is_installed(cls):
            self._put(f"of {self.reader.label(cls)}")  # its methods are read, too (`__missing__`)
            self.value(state_of(value))

    def _object(self, value) -> None:
        self._put(f"object {self.reader.label(type(value))}")
        if wrapped := callable(getattr(value, "__wrapped__", None)):
            self.value(value.__wrapped__)
        if state := state_of(value):
            self.value(state)
        elif not wrapped:
            before = len(self.reader.unreadable)
            try:  # what pickle would keep
                reduced = value.__reduce_ex__(2)
            except Exception:  # anything may be raised by a class that cannot be pickled
                return self._opaque(value)
            if not isinstance(reduced, str):
                reduced = [list(x) if hasattr(x, "__next__") else x for x in reduced]
            self.value(reduced)
            if len(self.reader.unreadable) > before:  # parts that may be made anew by each call
                self.reader.unreadable[before:] = [value]


def state_of(value) -> dict:
    """As `attributes_of`; {} for a class that says itself what pickle keeps, but for NumPyro's
    transforms, which keep more of it once their inverse is used.
    """
    given = any(getattr(type(value), k, None) is not getattr(object, k) for k in _PICKLING)
    is_own = given and not isinstance(value, dist.transforms.Transform)
    return {} if is_own else attributes_of(value)


def attributes_of(value) -> dict:
    """Attributes of an instance, without those that a descriptor of its class caches there."""
    cls, raw = type(value), object.__getstate__(value)
    fields, slots = raw if isinstance(raw, tuple) else (raw if isinstance(raw, dict) else {}, {})
    if any(c.__module__.partition(".")[0] == "flax" for c in cls.__mro__):
        declared = getattr(cls, "__dataclass_fields__", {})  # without identifiers of the process
        fields = {n: x for n, x in (fields or {}).items() if n in declared}
    own = {n: x for n, x in (fields or {}).items() if n[:2] != "__" and not _is_cache(cls, n)}
    own.pop("_intervener_id", None)  # an address, in NumPyro's `do`
    if isinstance(own.get("_inv"), weakref.ref):  # of a transform's inverse, once used
        del own["_inv"]
    return {**slots, **own}


def _is_cache(cls: type, name: str) -> bool:
    stands = inspect.getattr_static(cls, name, None)  # one with a `__set__` keeps its value there
    is_getter = hasattr(stands, "__get__") and not hasattr(stands, "__set__")
    # the default of a field may be called, and be bound: jnp.exp, which is compiled, or a method
    is_called = callable(stands) or isinstance(stands, classmethod)
    return is_getter and (isinstance(stands, lazy_property) or not is_called)


class _Opened(NamedTuple):
    kind: type
    fields: dict[str, Any]


def opened(tree):
    """The tree with every distribution and transformation replaced by its attributes."""
    return jax.tree.map(_open, tree, is_leaf=lambda x: isinstance(x, dist.Distribution | Transform))


def _open(x):
    if not isinstance(x, dist.Distribution | Transform):
        return x
    own = {k: v for k, v in attributes_of(x).items() if not isinstance(v, weakref.ref)}
    try:
        return _Opened(type(x), opened(own))
    except (RecursionError, ValueError) as error:
        raise ModelError(
            f"{type(x).__name__}, a distribution of the model, has an attribute that is no tree of "
            "arrays: it holds itself, or is a dictionary whose keys cannot be sorted. Keep arrays "
            "as attributes, in lists, or in dictionaries with names as keys."
        ) from error


def closed(tree):
    """As `opened` was given it."""
    return jax.tree.map(_close, tree, is_leaf=lambda x: isinstance(x, _Opened))


def _close(x):
    if not isinstance(x, _Opened):
        return x
    made = object.__new__(x.kind)
    for name, value in closed(x.fields).items():
        object.__setattr__(made, name, value)
    return made


_PLAIN = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, str, type)


def at_once(function: Callable, *args):
    """function(*args), a tree that may hold distributions, by one compiled program that the next
    call finds again; operation by operation where the function looks at values, or where an
    attribute of a distribution is a function or an object, which may close over some.
    """
    with suppress(Exception):  # the function says the same, or more, of the arrays
        if (found := _compiled(function, *args)) is not None:
            return closed(found)
    return function(*args)


@quick_jit
def _compiled(function: Callable, *args):
    found = function(*args)
    return opened(found) if _is_plain(opened(distributions(found))) else None


def _is_plain(x) -> bool:
    """Whether what a distribution keeps holds no function, and no object that may hold one. Of a
    model that was declared nothing is an array of a function that is compiled.
    """
    if isinstance(x, list | tuple):
        return all(map(_is_plain, x))
    if isinstance(x, dict):
        return all(map(_is_plain, x.values()))
    if hasattr(x, "reading"):
        return True
    ours = isinstance(x, eqx.Module) and type(x).__module__.startswith("ppl_gp.")
    if ours or isinstance(x, Constraint):
        return all(map(_is_plain, vars(x).values()))
    return x is None or isinstance(x, _PLAIN)


def distributions(tree) -> list:
    """Those in a tree, without those inside of them."""
    is_one = lambda x: isinstance(x, dist.Distribution)  # noqa: E731
    return [x for x in jax.tree.leaves(tree, is_leaf=is_one) if is_one(x)]


class Bones(NamedTuple):
    """Distributions, and what else is in a tree, without their arrays."""

    structure: Any
    leaves: tuple  # `None`, which is no leaf of JAX's, in place of an array

    @classmethod
    def of(cls, tree) -> tuple[list, "Bones"]:
        """(arrays, the rest)."""
        leaves, structure = jax.tree.flatten(opened(tree))
        static = tuple(None if isinstance(x, jax.Array) else x for x in leaves)
        return arrays_of(tree), cls(structure, static)

    def with_arrays(self, arrays: list):
        left = iter(arrays)
        leaves = [next(left) if x is None else x for x in self.leaves]
        return closed(jax.tree.unflatten(self.structure, leaves))


def arrays_of(tree) -> list:
    """The arrays of all distributions in a tree, and of what else is in it."""
    return [x for x in jax.tree.leaves(opened(tree)) if isinstance(x, jax.Array)]


def own_kinds(fn) -> list[type]:
    """The user's classes that a distribution, which is not a GP, is of or is made of."""
    parts = [] if isinstance(unwrap(fn), GP) else jax.tree.leaves(opened(fn))
    foreign = lambda x: x.__module__.partition(".")[0] not in ("numpyro", "ppl_gp")  # noqa: E731
    return [x for x in parts if isinstance(x, type) and foreign(x)]


def own_density(fn, value):
    """What a user's class says of zeros in place of a value, () for another distribution; `None` if
    it raises, as it does for arrays that do not fit together (NumPyro's raise as they are made).
    """
    with suppress(Exception):
        return fn.log_prob(jnp.zeros(fn.shape(), jnp.result_type(value))) if own_kinds(fn) else ()
