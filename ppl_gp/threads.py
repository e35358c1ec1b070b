"""Threads: NumPyro's handler stack is one list for all of them, and ppl_gp gives each its own. One
lock is held by every verb that runs a model, and hears Ctrl-C while it does.
"""

import functools
import sys
import threading
from collections import UserList
from collections.abc import Callable
from typing import Any

from numpyro import primitives

from ppl_gp.ctrl_c import heard

_HANDLERS = threading.RLock()


def one_at_a_time(verb: Callable) -> Callable:
    """The verb, which waits until no other thread runs a model. A thread that holds the lock may
    enter again.
    """

    @functools.wraps(verb)
    def locked(*args, **kwargs) -> Any:
        with _HANDLERS, heard():
            return verb(*args, **kwargs)

    return locked


class _OfThisThread(threading.local, UserList):
    """A list that each thread has for itself."""


def _own_handlers() -> None:
    """A model that another thread runs, without this package too, neither sees the handlers of a
    fit nor is seen by it. Where a NumPyro keeps them in another way nothing is changed.
    """
    shared = getattr(primitives, "_PYRO_STACK", None)
    if type(shared) is not list:
        return
    own = _OfThisThread()
    own.extend(shared)
    for name, module in tuple(sys.modules.items()):
        if name.startswith("numpyro.") and getattr(module, "_PYRO_STACK", None) is shared:
            module._PYRO_STACK = own  # pyright: ignore[reportAttributeAccessIssue]


_own_handlers()
