"""Ctrl-C that arrives, also where it is pressed while JAX traces and compiles.

Python raises KeyboardInterrupt between two instructions of whatever runs. Callbacks of XLA and of
the garbage collector do not pass it on: they drop it, or raise a RuntimeError in its place.
"""

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

# seconds, after which a press that a callback dropped is made again: callbacks are shorter
_AGAIN = 0.01


class Press:
    """Whether Ctrl-C was pressed and nothing has ended by it yet. Of the verb that runs: whether a
    press has ended a part of it, and whether the next press waits instead of raising.
    """

    unanswered, in_hook, ended, waits = False, False, False, False


@contextmanager
def heard() -> Iterator[None]:
    """Within, a press of Ctrl-C ends in KeyboardInterrupt, whatever became of the one that Python
    raised.

    Where the program handles the signal in its own way, or in a thread that gets none, nothing is
    changed.
    """
    handler, outer = signal.getsignal(signal.SIGINT), (Press.ended, Press.waits)
    ours = _in_main_thread() and handler in (signal.default_int_handler, _press)
    Press.ended = False
    with _listening(handler) if ours else nullcontext():
        try:
            yield
            if not Press.waits:
                arrive()
        except (KeyboardInterrupt, Exception) as error:
            if answered(error) and not isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise
        finally:
            Press.ended, Press.waits = outer


def answered(error: BaseException | None) -> bool:
    """Whether `error` is what became of Ctrl-C, which is then dealt with."""
    pressed = isinstance(error, KeyboardInterrupt) or (_in_main_thread() and Press.unanswered)
    if pressed:
        Press.unanswered, Press.ended = False, True
    return pressed


def arrive() -> None:
    """Raise the KeyboardInterrupt that has waited, or that something has dropped on its way."""
    if _in_main_thread() and Press.unanswered:
        raise KeyboardInterrupt


def _press(signum, frame):
    waits = Press.waits and not (Press.unanswered or Press.ended)
    Press.unanswered = True
    if not waits:
        raise KeyboardInterrupt


def _press_again() -> None:
    """Once the main thread has left the hook, in which another press would be lost as well."""
    if Press.in_hook:
        threading.Timer(_AGAIN, _press_again).start()
    elif Press.unanswered:
        _thread.interrupt_main()


@contextmanager
def _listening(handler):
    """Python's own handler and its hook for errors that nobody can catch, replaced."""
    if handler is _press:  # inside another verb
        yield
        return
    Press.unanswered, told = False, sys.unraisablehook

    def hook(unraisable):
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            Press.in_hook = True
            threading.Timer(_AGAIN, _press_again).start()
            Press.in_hook = False
        else:
            told(unraisable)

    sys.unraisablehook = hook
    signal.signal(signal.SIGINT, _press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = told


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
