"""What compiled code of a model is keyed by: the function together with every value that it reads.

JAX finds compiled code by the function, and a function whose global, closure or attribute has
changed is the same
function: it would go on computing with the value that it was traced with. `keyed(model)` compares
by the values as well.
"""

import functools
import hashlib
import types
from collections.abc import Callable

from ppl_gp.model.captured import Reader

_LIBRARIES = {"ppl_gp", "numpyro", "jax", "equinox", "flax"}  # never the user's own package


def _walk(function: Callable) -> Reader:
    inner = function
    while not isinstance(inner, types.FunctionType):
        further = [
            getattr(inner, name)
            for name in ("func", "__func__", "__wrapped__")
            if hasattr(inner, name)
        ]
        if not further:
            break
        inner = further[0]
    home = inner.__globals__.get("__name__", "") if isinstance(inner, types.FunctionType) else ""
    own = home.partition(".")[0]
    reader = Reader(own if own and own not in _LIBRARIES else None)
    reader.root(function)
    return reader


def reads(function: Callable) -> dict[str, str]:
    """{what the function reads, in words ("global 'PRIOR'", "closure 'scale'"): digest of its
    value}.
    """
    return dict(_walk(_bare(function)).entries)


def fingerprint(function: Callable) -> str:
    """A digest of the function's code and of everything that it reads; the same in every process.

    Code: its own and that of the functions and classes that it reaches through globals, closures,
    attributes of modules and of objects. Values: numbers, strings, containers, arrays by content,
    objects by their attributes. Cost: about 0.1 ms for an ordinary model, and 1 ms for each MB of
    arrays.
    """
    return _digest(_walk(_bare(function)).entries)


def digest(tree) -> str:
    """A digest of arguments or options by value, the same in every process.

    Arrays of more than 16 MiB: shape, type, 4096 rows and the columns' sums; memory maps of that
    size without the sums.
    """
    reader = Reader(strided=True)
    reader.add("value", tree)
    reader.finish()
    return _digest(reader.entries)


def _digest(entries: dict[str, str]) -> str:
    told = hashlib.blake2b(digest_size=16)
    for name, value in entries.items():
        told.update(f"{name}\0{value}\0".encode("utf-8", "surrogatepass"))
    return told.hexdigest()


def _bare(function):
    return function.__wrapped__ if isinstance(function, Keyed) else function


class Keyed:
    """A model that equals another where code and everything that is read are equal, as they were at
    construction.

    So a cell of a notebook that is run again finds its compiled code, and a changed constant does
    not find the old one. Objects that cannot be read (a file, a lock, a tracer) have to be the same
    ones. Attributes are the function's.
    """

    def __init__(self, function: Callable):
        functools.update_wrapper(self, function, updated=())
        reader = _walk(function)
        self.__wrapped__ = function
        self._reads, self._unreadable = reader.entries, tuple(reader.unreadable)
        self._fingerprint, self._own = _digest(reader.entries), frozenset()

    @property
    def fingerprint(self) -> str:
        """The function's fingerprint at construction."""
        return self._fingerprint

    def __call__(self, *args, **kwargs):
        return self.__wrapped__(*args, **kwargs)

    def __getattr__(self, name):
        if name == "__wrapped__":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __hash__(self):
        return hash(self._fingerprint)

    def __eq__(self, other):
        if self is other:
            return True
        if not isinstance(other, Keyed) or self._fingerprint != other._fingerprint:
            return False
        return len(self._unreadable) == len(other._unreadable) and all(
            a is b for a, b in zip(self._unreadable, other._unreadable, strict=True)
        )

    def __repr__(self):
        return repr(self.__wrapped__)


def keyed(model: Callable) -> Keyed:
    """The model with what it reads at this moment; of a `Keyed`, its function read anew."""
    return Keyed(_bare(model))


def changed(model: Keyed) -> list[str]:
    """What the model reads that differs now from what it was at construction, in words; see also
    `settle`.
    """
    now, before = reads(model), {k: v for k, v in model._reads.items() if k not in model._own}
    return [k for k, v in before.items() if now.get(k, v) != v] or [
        k for k in before if k not in now
    ]


def settle(model: Keyed) -> None:
    """Call at the end of a fit: what has changed while it ran the model has written itself (a
    counter, a cache).

    `changed` leaves it out from now on.
    """
    model._own |= frozenset(changed(model))
