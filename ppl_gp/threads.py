"""One lock around NumPyro's handler stack, which is one list for all threads: every verb that runs
a model holds it, and hears Ctrl-C while it does.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

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
