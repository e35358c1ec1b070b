"""What compiled code of a model is keyed by: the function together with every value that it reads.

JAX finds compiled code by the function, and a function whose global has changed is the same one: it
would go on computing with the value that it was traced with. A model counts by its code, its
defaults, its closure and the globals that its code names; functions and classes of the user's own
that these reach count in the same way, and those of libraries by their names and closures. A user's
module counts by the attributes that any of this code names. Values count by content where they can
be read (`digest.py`), and otherwise by identity.
"""

import dis
import functools
import hashlib
import os
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.reading.digest import Entry, state_of

_LIBRARIES = {"ppl_gp", "numpyro", "jax", "jaxlib", "equinox", "flax"}
_FOLDERS = [f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")]
_FOLDERS += [os.path.dirname(os.__file__) + os.sep]
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_ATTRIBUTES = frozenset(
    {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_NAME", "IMPORT_FROM"}
)
_NOT_READ = {"_abc_impl", "__class__", "__wrapped__"}  # of a class
OPTIONS = (bool, int, float, complex, str, bytes)  # that nobody can change
_T = TypeVar("_T")


class Keyed:
    """A model that equals another where code and everything that is read are equal, as they were at
    construction: a cell of a notebook that is run again finds its compiled code, and a changed
    constant does not find the old one.
    """

    def __init__(self, function: Callable):
        functools.update_wrapper(self, function)
        self.__wrapped__, reader = function, _walk(function)
        self._reads, self._held, self._own = reader.entries, reader.held, frozenset()
        self._digest = _digest(reader.entries)

    def __call__(self, *args, **kwargs):
        return self.__wrapped__(*args, **kwargs)

    def __hash__(self):
        return hash(self._digest)  # not kept: strings hash differently in another process

    def __eq__(self, other):
        return self is other or (isinstance(other, Keyed) and self._reads == other._reads)


def keyed(model: Callable) -> Keyed:
    """The model with what it reads at this moment; of a `Keyed`, its function read anew."""
    return Keyed(model.__wrapped__ if isinstance(model, Keyed) else model)


def changed(model: Keyed) -> list[str]:
    """What the model reads that is another now than at construction, in words; see `settle`."""
    now = _walk(model).entries
    before = {k: v for k, v in model._reads.items() if k not in model._own}
    others = [k for k, v in before.items() if now.get(k, v) != v]
    return others or [k for k in before if k not in now]


def settle(model: Keyed) -> None:
    """Call at the end of a fit: what has changed while it ran the model has written itself (a
    counter, a cache). `changed` leaves it out from now on.
    """
    model._own |= frozenset(changed(model))


def by_shapes(function: Callable[..., _T]) -> Callable[..., _T]:
    """`function(model, *more)`, kept for models that are equal, arrays of the same shapes and
    types, and options of the same values. What it finds holds no arrays.

    It is given tracers in place of arrays, so that no value can decide. Where it asks for one, or
    an option is an object, which may change, it is given what was passed, and nothing is kept.
    """

    @functools.lru_cache(maxsize=128)
    def kept(model, structure, shapes, options, floats) -> list[_T]:
        found: list[_T] = []

        def look(arrays):
            rest = iter(arrays)
            leaves = [next(rest) if x is None else x[1] for x in options]
            found.append(function(model, *jax.tree.unflatten(structure, leaves)))

        jax.eval_shape(look, shapes)
        return found

    @functools.wraps(function)
    def asked(model, *more) -> _T:
        leaves, structure = jax.tree.flatten(more)
        pairs = [(x, isinstance(x, np.ndarray | jax.Array)) for x in leaves]
        is_keyed = isinstance(getattr(model, "function", model), Keyed)
        if is_keyed and all(a or type(x) in OPTIONS for x, a in pairs):
            shapes = tuple(_shape(x) for x, a in pairs if a)
            options = tuple(None if a else (type(x), x) for x, a in pairs)
            with suppress(Exception):  # the function says the same, or more, of the arrays
                return kept(model, structure, shapes, options, jnp.result_type(float))[-1]
        return function(model, *more)

    return asked


def _shape(x) -> jax.ShapeDtypeStruct:
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct(x.shape, dtype, weak_type=getattr(x, "weak_type", False))


def reads(function: Callable) -> dict[str, str]:
    """{what the function reads ("global 'PRIOR'", "closure 'scale'"): digest of its value}."""
    return {k: v[0] for k, v in _walk(function).entries.items()}


def fingerprint(function: Callable) -> str:
    """A digest of the function's code and of everything that it reads; the same in every process.
    An ordinary model takes about 0.1 ms, and each MB of arrays 1 ms.
    """
    return _digest(_walk(function).entries)


def digest(tree) -> str:
    """A digest of arguments or options by value, the same in every process. Arrays of more than 16
    MiB: shape, type, 4096 rows and the columns' sums; memory maps of that size without the sums.
    """
    reader = _Reader(strided=True)
    reader.add("value", tree)
    reader.finish()
    return _digest(reader.entries)


def _digest(entries: dict[str, tuple]) -> str:
    told = hashlib.blake2b(digest_size=16)
    for name, (value, *_) in entries.items():
        told.update(f"{name}\0{value}\0".encode("utf-8", "surrogatepass"))
    return told.hexdigest()


def _walk(function: Callable) -> "_Reader":
    reader = _Reader()
    reader.root(function.__wrapped__ if isinstance(function, Keyed) else function)
    reader.finish()
    return reader


class _Reader:
    """One walk. `entries`: {name for people: (digest, ids of what counts by identity)}."""

    def __init__(self, strided: bool = False):
        self.entries: dict[str, tuple] = {}
        self.unreadable: list = []  # of the entry that is being read
        self.held: list = []  # the unreadable objects of all entries, so that no other gets an id
        self.strided, self.own = strided, {"__main__"}  # `own`: the user's, even where installed
        self._labels: dict[int, tuple] = {}  # {id: (label, the function or class)}
        self._queue: list = []
        self._attributes: dict[str, None] = {}
        self._modules: dict[str, types.ModuleType] = {}
        self._main: types.FunctionType | None = None

    def add(self, name: str, value) -> None:
        """Digest a value under a name."""
        self.unreadable, entry = [], Entry(self)
        try:
            told = entry.value(value)
        except RecursionError:  # a chain of thousands of links
            told, self.unreadable = "", [value]
        self.entries[name] = (told, *map(id, self.unreadable))
        self.held += self.unreadable

    def root(self, value) -> None:
        """Digest a callable."""
        home = _home(value if isinstance(value, types.FunctionType) else type(value))
        self.own |= {home.partition(".")[0]} - _LIBRARIES - sys.stdlib_module_names
        if isinstance(value, types.FunctionType):
            self.label(value)
        elif isinstance(value, functools.partial):
            for name, x in {**dict(enumerate(value.args)), **value.keywords}.items():
                self.add(f"argument '{name}' of the partial", x)
            self.root(value.func)
        elif isinstance(value, types.MethodType):
            self._object(value.__self__)
            self.root(value.__func__)
        else:
            self._object(value)

    def _object(self, value) -> None:
        if isinstance(value, type) or not (state := state_of(value)):
            return self.add(f"callable '{type(value).__qualname__}'", value)
        self.label(type(value))
        for name, x in state.items():
            self.add(f"attribute '{name}'", x)

    def finish(self) -> None:
        """Digest what was met: functions, classes, and modules' attributes that any code names."""
        done = -1
        while done < len(self.entries):
            done = len(self.entries)
            while self._queue:
                met = self._queue.pop(0)
                self._class(met) if isinstance(met, type) else self._function(met)
            for module in tuple(self._modules.values()):
                for name in [n for n in self._attributes if n in vars(module)]:
                    if (entry := f"attribute '{module.__name__}.{name}'") not in self.entries:
                        self.add(entry, vars(module)[name])

    def label(self, met) -> str:
        """The name of a function or class, which is read where it is met for the first time."""
        if id(met) not in self._labels:
            name = f"{_home(met)}." * self.is_installed(met) + met.__qualname__
            same = sum(label.partition("#")[0] == name for label, _ in self._labels.values())
            self._labels[id(met)] = f"{name}#{same + 1}" if same else name, met
            self._queue.append(met)
        return self._labels[id(met)][0]

    def module(self, module: types.ModuleType) -> str:
        """The name of a module; if it is the user's, its attributes are read by name."""
        if not self.is_installed(module):
            self._modules[module.__name__] = module
        return module.__name__

    def is_installed(self, met) -> bool:
        """Whether a function, class or module belongs to a library."""
        module = _home(met)
        top = module.partition(".")[0]
        if top in self.own or top in _LIBRARIES:
            return top not in self.own
        files = [getattr(sys.modules.get(name), "__file__", None) for name in (module, top)]
        file = files[0] or files[1]  # an extension's own module may have none
        return any(f in file for f in _FOLDERS) if file else top in sys.stdlib_module_names

    def _function(self, function: types.FunctionType) -> None:
        label, code = self.label(function), function.__code__
        is_installed = self.is_installed(function)
        self._main = self._main or (None if is_installed else function)
        of = "" if function is self._main else f" of '{label}'"
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if cell != types.CellType():  # an empty one
                self.add(f"closure '{name}'{of}", cell.cell_contents)
        if is_installed:
            return
        self.add(f"code of '{label}'", code)
        values = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
        defaults = dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})
        for name, x in defaults.items():
            self.add(f"default '{name}'{of}", x)
        for name, x in vars(function).items():
            self.add(f"attribute '{label}.{name}'", x)
        self._globals(function.__globals__, code)

    def _globals(self, scope: dict, code: types.CodeType) -> None:
        attributes = _names(code, _ATTRIBUTES)
        self._attributes |= attributes
        for name in attributes:  # modules that the function imports as it runs
            for full in (name, f"{scope.get('__package__')}.{name}".rstrip(".")):
                if isinstance(sys.modules.get(full), types.ModuleType):
                    self.module(sys.modules[full])
        of = "" if self._main and scope is self._main.__globals__ else f"{scope.get('__name__')}."
        for name in _names(code, _GLOBALS):
            if name in scope and (entry := f"global '{of}{name}'") not in self.entries:
                self.add(entry, scope[name])

    def _class(self, cls: type) -> None:
        if not self.is_installed(cls):
            members = {k: x for k, x in vars(cls).items() if k not in _NOT_READ}
            members = {k: x for k, x in members.items() if k[:2] != "__" or callable(x)}
            above = () if self.is_installed(type(cls)) else (type(cls),)
            self.add(f"class '{self.label(cls)}'", (cls.__mro__[1:], members, *above))


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType, operations: frozenset) -> dict[str, None]:
    """The names that a code object and those inside it load by some operations."""
    found = [i.argval for i in dis.get_instructions(code) if i.opname in operations]
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return dict.fromkeys([*found, *(n for c in inner for n in _names(c, operations))])


def _home(met) -> str:
    """The module of a function, a class or a module (a decorator copies `__module__`)."""
    if isinstance(met, types.ModuleType):
        return met.__name__
    if isinstance(met, types.FunctionType):
        return met.__globals__.get("__name__") or ""
    return met.__module__ if isinstance(met.__module__, str) else "builtins"
