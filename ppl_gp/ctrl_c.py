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


class _Press:
    """Whether Ctrl-C was pressed and nothing has ended by it yet, and whether a hook has it."""

    unanswered, in_hook = False, False


class _Verb(threading.local):
    """Of the verb that runs in this thread: whether a press has ended a part of it, and whether
    the next press waits instead of raising.
    """

    ended, waits = False, False


verb = _Verb()


@contextmanager
def heard() -> Iterator[None]:
    """Within, a press of Ctrl-C ends in KeyboardInterrupt, whatever became of the one that Python
    raised.

    Where the program handles the signal in its own way, or in a thread that gets none, nothing is
    changed.
    """
    handler, outer = signal.getsignal(signal.SIGINT), (verb.ended, verb.waits)
    ours = _in_main_thread() and handler in (signal.default_int_handler, _press)
    verb.ended = False
    with _listening(handler) if ours else nullcontext():
        try:
            yield
            if not verb.waits:
                arrive()
        except (KeyboardInterrupt, Exception) as error:
            if answered(error) and not isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise
        finally:
            verb.ended, verb.waits = outer


def answered(error: BaseException | None) -> bool:
    """Whether `error` is what became of Ctrl-C, which is then dealt with."""
    pressed = isinstance(error, KeyboardInterrupt) or (_in_main_thread() and _Press.unanswered)
    if pressed:
        _Press.unanswered, verb.ended = False, True
    return pressed


def arrive() -> None:
    """Raise the KeyboardInterrupt that has waited, or that something has dropped on its way."""
    if _in_main_thread() and _Press.unanswered:
        raise KeyboardInterrupt


def _press(signum, frame):
    waits = verb.waits and not (_Press.unanswered or verb.ended)
    _Press.unanswered = True
    if not waits:
        raise KeyboardInterrupt


def _press_again() -> None:
    """Once the main thread has left the hook, in which another press would be lost as well."""
    if _Press.in_hook:
        threading.Timer(_AGAIN, _press_again).start()
    elif _Press.unanswered:
        _thread.interrupt_main()


@contextmanager
def _listening(handler):
    """Python's own handler and its hook for errors that nobody can catch, replaced."""
    if handler is _press:  # inside another verb
        yield
        return
    _Press.unanswered, verb.waits, told = False, False, sys.unraisablehook

    def hook(unraisable):
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _Press.in_hook = True
            threading.Timer(_AGAIN, _press_again).start()
            _Press.in_hook = False
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
