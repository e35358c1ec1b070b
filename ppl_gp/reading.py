"""The walk behind `fingerprint`: what a function's code reads, as {name for people: digest of the value}.

From the function it follows globals, closures, defaults, attributes, arguments of partials and bound objects to values, and to
further functions and classes. Code that is installed (the standard library, site-packages, this package) counts by its name and
its closures alone, except for the model's own package. No address and no `repr` of an object enters: processes agree.
What is looked up by a computed name (`globals()[name]`, `eval`) and what a file holds is not seen.
"""

import dis
import functools
import hashlib
import site
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

_ROWS = 4096  # of a large array, where `strided`
_WHOLE = 1 << 24  # bytes up to which an array is digested whole, where `strided`
_PACKAGE = __name__.partition(".")[0]
_CLASS_STATE = {"_abc_impl"}  # caches of `abc`


class Loads(NamedTuple):
    """Names that code reads: globals, attributes (of whatever object), modules that it imports as it runs."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]
    imports: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def loads(code: types.CodeType) -> Loads:
    """What a code object loads, with those inside it."""
    found: tuple[dict, dict, dict] = ({}, {}, {})
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            found[0][instruction.argval] = None
        elif name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            found[1][instruction.argval] = None
        elif name == "IMPORT_NAME":
            found[2][instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            found[1][constant] = None  # getattr(config, "PRIOR")
        if isinstance(constant, types.CodeType):
            for names, more in zip(found, loads(constant), strict=True):
                names.update(dict.fromkeys(more))
    return Loads(*map(tuple, found))


@functools.cache
def _installed_roots() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple({Path(p).resolve() for p in (*folders, *site.getsitepackages(), Path(__file__).parent)})


@functools.lru_cache(maxsize=4096)
def _is_installed_file(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith("<frozen")
    path = Path(file).resolve()
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or any(
        path.is_relative_to(root) for root in _installed_roots()
    )


class Reader:
    """One walk. `entries`: {name: digest}; `unreadable`: objects that count by their type (and identity) alone."""

    def __init__(self, own: str | None = None, strided: bool = False):
        self.entries: dict[str, str] = {}
        self.unreadable: list = []
        self.strided, self.own = strided, own
        self._labels: dict[int, tuple[str, Any]] = {}  # holds the objects, so that no other gets their id
        self._queue: deque = deque()
        self._attributes: dict[str, None] = {}
        self._modules: dict[int, types.ModuleType] = {}
        self._main: types.FunctionType | None = None

    def add(self, name: str, value) -> None:
        """Digest a value under a name."""
        entry = _Entry(self)
        entry.value(value)
        self.entries[name] = entry.hexdigest()

    def root(self, value) -> None:
        """Digest a callable with everything that it reads."""
        if isinstance(value, functools.partial):
            named = {**{str(i): x for i, x in enumerate(value.args)}, **value.keywords}
            for name, x in named.items():
                self.add(f"argument '{name}' of the partial", x)
            self.root(value.func)
        elif isinstance(value, types.MethodType):
            self._object(value.__self__)
            self.root(value.__func__)
        elif isinstance(value, types.FunctionType):
            self.label(value)
        else:
            self._object(value)
        self.finish()

    def _object(self, value) -> None:
        state = {} if isinstance(value, type) else _state(value)
        if not state:
            self.add(f"callable '{type(value).__qualname__}'", value)
            return
        self.label(type(value))
        for name, x in state.items():
            self.add(f"attribute '{name}'", x)

    def finish(self) -> None:
        """Walk what was met: functions, classes, and the attributes of modules by every name that some code reads."""
        done = set()
        while self._queue or len(done) < len(self._modules) * len(self._attributes):
            while self._queue:
                met = self._queue.popleft()
                self._class(met) if isinstance(met, type) else self._function(met)
            for module in tuple(self._modules.values()):
                for name in tuple(self._attributes):
                    if (id(module), name) not in done and name in vars(module):
                        self.add(f"attribute '{module.__name__}.{name}'", vars(module)[name])
                    done.add((id(module), name))

    def label(self, met) -> str:
        """The name of a function or class; it is put in the queue where it is met for the first time."""
        if id(met) in self._labels:
            return self._labels[id(met)][0]
        name = met.__qualname__
        if self.is_installed(met):
            name = f"{_home(met)}.{name}"
        same = sum(label.partition("#")[0] == name for label, _ in self._labels.values())
        label = f"{name}#{same + 1}" if same else name
        self._labels[id(met)] = label, met
        self._queue.append(met)
        return label

    def is_installed(self, met) -> bool:
        """Whether a function, class or module belongs to a library."""
        module = _home(met)
        top = module.partition(".")[0]
        if top == self.own or top == "__main__":
            return False
        if isinstance(met, types.FunctionType) and not met.__code__.co_filename.startswith("<"):
            return _is_installed_file(met.__code__.co_filename)
        file = getattr(sys.modules.get(module), "__file__", None)
        return top in sys.stdlib_module_names or top == _PACKAGE or (file is not None and _is_installed_file(file))

    def module(self, module: types.ModuleType) -> None:
        """A module of the user's is read by name, attribute by attribute."""
        if not self.is_installed(module):
            self._modules[id(module)] = module

    def _function(self, function: types.FunctionType) -> None:
        label = self._labels[id(function)][0]
        if self._main is None and not self.is_installed(function):
            self._main = function
        of = "" if function is self._main else f" of '{label}'"
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.add(f"closure '{name}'{of}", _content(cell))
        if self.is_installed(function):
            return
        self.add(f"code of '{label}'", function.__code__)
        for name, x in _defaults(function).items():
            self.add(f"default '{name}'{of}", x)
        for name, x in vars(function).items():
            self.add(f"attribute '{label}.{name}'", x)
        self._globals(function)

    def _globals(self, function) -> None:
        found, scope = loads(function.__code__), function.__globals__
        self._attributes |= dict.fromkeys(found.attributes)
        prefix = "" if self._main and scope is self._main.__globals__ else f"{scope.get('__name__')}."
        for name in found.globals:
            if name in scope and (entry := f"global '{prefix}{name}'") not in self.entries:
                self.entries[entry] = ""  # a function that reads itself
                self.add(entry, scope[name])
        for name in found.imports:
            for full in (name, f"{scope.get('__package__')}.{name}".rstrip(".")):
                parts = full.split(".")
                for module in (sys.modules.get(".".join(parts[: i + 1])) for i in range(len(parts))):
                    self.module(module) if module else None

    def _class(self, cls: type) -> None:
        if self.is_installed(cls):
            return
        members = {k: x for k, x in vars(cls).items() if k not in _CLASS_STATE and (k[:2] != "__" or callable(x))}
        members = {k: x for k, x in members.items() if k not in ("__class__", "__wrapped__")}
        self.add(f"class '{self._labels[id(cls)][0]}'", (cls.__mro__[1:], members))


class _Entry:
    """The digest of one value."""

    def __init__(self, reader: Reader):
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
        if isinstance(value, jax.core.Tracer):
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
def _feed(value, entry: _Entry) -> None:
    if entry.again(value):
        return
    entry.put(f"object {entry.reader.label(type(value))}")
    wrapped = getattr(value, "__wrapped__", None)
    if callable(wrapped):
        entry.value(wrapped)
    if state := _state(value):
        entry.value(state)
    elif not callable(wrapped):
        reduced = _reduced(value)
        entry.opaque(value) if reduced is None else entry.value(reduced)


@_feed.register(int | float | complex | str | bytes | range | type(None) | type(Ellipsis) | type(NotImplemented))
def _plain(value, entry):
    entry.put(f"{type(value).__qualname__} {value!r}")


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


@_feed.register(Mapping)
def _mapping(value, entry):
    if not entry.again(value):
        entry.put(f"{type(value).__qualname__} {len(value)}")
        entry.each(x for pair in value.items() for x in pair)


@_feed.register(set | frozenset)
def _set(value, entry):
    digests = []
    for x in value:
        one = _Entry(entry.reader)
        one.value(x)
        digests.append(one.hexdigest())
    entry.put(f"{type(value).__qualname__} {sorted(digests)}")


@_feed.register(slice)
def _slice(value, entry):
    entry.put("slice")
    entry.each((value.start, value.stop, value.step))


@_feed.register(types.CodeType)
def _code(value, entry):
    entry.put(f"code {value.co_argcount} {value.co_posonlyargcount} {value.co_kwonlyargcount} {value.co_flags}")
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


def _home(met) -> str:
    """The module in which a function, a class or a module stands (a decorator copies `__module__` of what it wraps)."""
    if isinstance(met, types.ModuleType):
        return met.__name__
    return (met.__globals__.get("__name__") if isinstance(met, types.FunctionType) else met.__module__) or ""


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _defaults(function: types.FunctionType) -> dict:
    values = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return dict(zip(names[len(names) - len(values) :], values, strict=True)) | (function.__kwdefaults__ or {})


def _state(value) -> dict:
    """Attributes of an instance, without those that a descriptor of its class caches there; {} for a class with its own pickling."""
    cls = type(value)
    if any(getattr(cls, k, None) is not getattr(object, k, None) for k in ("__reduce__", "__reduce_ex__", "__getstate__")):
        return {}
    slots = [n for c in cls.__mro__ for n in _names(getattr(c, "__slots__", ())) if n[:2] != "__" and hasattr(value, n)]
    fields = {n: x for n, x in getattr(value, "__dict__", {}).items() if n[:2] != "__" and not _is_cache(cls, n)}
    if any(c.__module__.partition(".")[0] == "flax" for c in cls.__mro__):  # its modules carry identifiers of the process
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
    return reduced if isinstance(reduced, str) else [list(x) if hasattr(x, "__next__") else x for x in reduced]


