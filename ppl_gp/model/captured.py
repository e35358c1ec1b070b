"""The walk behind `fingerprint`: what a function's code reads, as {name for people: digest of the
value}.

From the function it follows globals, closures, defaults, attributes, arguments of partials and
bound objects to values, and to further functions and classes. Code that is installed (the standard
library, site-packages, this package) counts by its name and its closures alone, except for the
model's own package. What is looked up by a computed name (`globals()[name]`, `eval`) and what a
file holds is not seen.
"""

import dis
import functools
import site
import sys
import sysconfig
import types
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from ppl_gp.model.contents import Entry, state_of

_PACKAGE = __name__.partition(".")[0]
_PACKAGE_ROOT = Path(__file__).parents[1]  # where it is installed editable, no library
_CLASS_STATE = {"_abc_impl"}  # caches of `abc`


class Loads(NamedTuple):
    """Names that code reads: globals, attributes (of whatever object), modules that it imports as
    it runs.
    """

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
    return tuple({Path(p).resolve() for p in (*folders, *site.getsitepackages(), _PACKAGE_ROOT)})


@functools.lru_cache(maxsize=4096)
def _is_installed_file(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith("<frozen")
    path = Path(file).resolve()
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or any(
        path.is_relative_to(root) for root in _installed_roots()
    )


class Reader:
    """One walk. `entries`: {name: digest}; `unreadable`: objects that count by their type (and
    identity) alone.
    """

    def __init__(self, own: str | None = None, strided: bool = False):
        self.entries: dict[str, str] = {}
        self.unreadable: list = []
        self.strided, self.own = strided, own
        # holds the objects, so that no other gets their id
        self._labels: dict[int, tuple[str, Any]] = {}
        self._queue: deque = deque()
        self._attributes: dict[str, None] = {}
        self._modules: dict[int, types.ModuleType] = {}
        self._main: types.FunctionType | None = None

    def add(self, name: str, value) -> None:
        """Digest a value under a name."""
        entry = Entry(self)
        try:
            entry.value(value)
        except RecursionError:  # a chain of thousands of links
            entry.opaque(value)
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
        state = {} if isinstance(value, type) else state_of(value)
        if not state:
            self.add(f"callable '{type(value).__qualname__}'", value)
            return
        self.label(type(value))
        for name, x in state.items():
            self.add(f"attribute '{name}'", x)

    def finish(self) -> None:
        """Walk what was met: functions, classes, and the attributes of modules by every name that
        some code reads.
        """
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
        """The name of a function or class; it is put in the queue where it is met for the first
        time.
        """
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
        files = [
            getattr(sys.modules.get(name), "__file__", None) for name in (module, top)
        ]  # a C extension's own has none
        file = files[0] or files[1]
        return (
            top in sys.stdlib_module_names
            or top == _PACKAGE
            or (file is not None and _is_installed_file(file))
        )

    def module(self, module: types.ModuleType) -> None:
        """A module of the user's is read by name, attribute by attribute."""
        if not self.is_installed(module):
            self._modules[id(module)] = module

    def _function(self, function: types.FunctionType) -> None:
        label = self._labels[id(function)][0]
        if self._main is None and not self.is_installed(function):
            self._main = function
        of = "" if function is self._main else f" of '{label}'"
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
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
        prefix = (
            "" if self._main and scope is self._main.__globals__ else f"{scope.get('__name__')}."
        )
        for name in found.globals:
            if name in scope and (entry := f"global '{prefix}{name}'") not in self.entries:
                self.entries[entry] = ""  # a function that reads itself
                self.add(entry, scope[name])
        for name in found.imports:
            for full in (name, f"{scope.get('__package__')}.{name}".rstrip(".")):
                parts = full.split(".")
                for module in (
                    sys.modules.get(".".join(parts[: i + 1])) for i in range(len(parts))
                ):
                    self.module(module) if module else None

    def _class(self, cls: type) -> None:
        if self.is_installed(cls):
            return
        members = {
            k: x
            for k, x in vars(cls).items()
            if k not in _CLASS_STATE and (k[:2] != "__" or callable(x))
        }
        members = {k: x for k, x in members.items() if k not in ("__class__", "__wrapped__")}
        above = () if self.is_installed(type(cls)) else (type(cls),)
        self.add(f"class '{self._labels[id(cls)][0]}'", (cls.__mro__[1:], members, *above))


def _home(met) -> str:
    """The module in which a function, a class or a module stands (a decorator copies `__module__`
    of what it wraps).
    """
    if isinstance(met, types.ModuleType):
        return met.__name__
    if isinstance(met, types.FunctionType):
        return met.__globals__.get("__name__") or ""
    module = met.__module__ or ""
    return module if isinstance(module, str) else "builtins"  # a metaclass in C has a descriptor


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _defaults(function: types.FunctionType) -> dict:
    values = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return dict(zip(names[len(names) - len(values) :], values, strict=True)) | (
        function.__kwdefaults__ or {}
    )
