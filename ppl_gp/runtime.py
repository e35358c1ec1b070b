"""What the process that runs a model needs: Ctrl-C, threads, seconds, room for programs, and the
loop around long work, with a bar, LAPACK kept to itself and a state that is whole.

Ctrl-C arrives also if it is pressed while JAX traces and compiles. Python raises KeyboardInterrupt
between two instructions of whatever runs. Callbacks of XLA and of the garbage collector do not pass
it on: they drop it, or raise a RuntimeError in its place.

NumPyro's handler stack is one list for all threads; ppl_gp gives each its own. Every verb that runs
a model holds one lock, and hears Ctrl-C while it does.

Seconds of JAX's tracing and compiling are counted separately from running. Each program takes some
dozens of the process's memory maps, of which Linux allows 65 530 by default; beyond them LLVM ends
the process. A loop of fits that each compile (other numbers of rows, a Python number among the
arguments) gets there in some hundred fits, with 40 MiB of memory for each. JAX can forget its
programs, and compiles again what is wanted again; the C library gives memory back when it is asked
to.
"""

import _thread
import ctypes
import functools
import signal
import sys
import threading
import time
from collections import UserList
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from numpyro import primitives
from rich import progress as bars
from rich.console import Console
from threadpoolctl import threadpool_limits

from ppl_gp.errors import warn

_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_spent: dict[str, float] = {"compile_seconds": 0.0, "compilations": 0}
_counting = False
_MAPS, _MOST = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_PAGES, _PAGE = Path("/proc/self/statm"), 4096
_FULL = 0.7  # of what the system allows: a fit and its questions take a few thousand
_GROWN = 2**31  # bytes of memory since the last time: some fifty fits
_EVERY = 100  # programs between two looks, which take some hundredths of a second
_compiled = {"seen": 0}


def _listen(event: str, duration: float, **_):
    if event in _EVENTS:
        _spent["compile_seconds"] += duration
        _spent["compilations"] += event == _EVENTS[-1]


@contextmanager
def stopwatch():
    """Yields a dict that holds, at the end, `seconds`, `compile_seconds`, `run_seconds` and
    `compilations`. Before the work there is room made for what it compiles.
    """
    make_room(int(_spent["compilations"]))
    global _counting
    if not _counting:
        jax.monitoring.register_event_duration_secs_listener(_listen)  # pyright: ignore[reportArgumentType]
        _counting = True
    begin, before, out = time.perf_counter(), dict(_spent), {}
    try:
        yield out
    finally:
        seconds = time.perf_counter() - begin
        # Nested traces are reported by each level, so their sum can exceed the wall clock.
        compiling = min(_spent["compile_seconds"] - before["compile_seconds"], seconds)
        out.update(
            seconds=seconds,
            compile_seconds=compiling,
            run_seconds=seconds - compiling,
            compilations=_spent["compilations"] - before["compilations"],
        )


def make_room(compilations: int) -> bool:
    """Let JAX forget its compiled programs, with a warning, where maps are nearly used up or the
    process has grown by 2 GiB since it last did; whether it did. `compilations` so far: looks are
    rare.
    """
    if compilations - _compiled["seen"] < _EVERY:
        return False
    _compiled["seen"] = compilations
    (taken, most), memory = _counts(), _resident()
    grown = memory - _compiled.setdefault("memory", memory)
    if taken < _FULL * most and grown < _GROWN:
        return False
    jax.clear_caches()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # what was freed, which glibc keeps
    _compiled["memory"] = _resident()
    told = (
        f"{taken} of the {most:.0f} memory maps that the system allows a process are taken, nearly "
        "all by compiled programs"
        if taken >= _FULL * most
        else f"the process has grown by {grown / 2**30:.1f} GiB while it compiled many programs"
    )
    warn(
        f"{told}; JAX's are forgotten now, and compiled again where they are wanted. Fits in a "
        "loop compile anew where shapes or Python numbers among the arguments change: pass numbers "
        "as arrays, np.array(0.3), and keep the number of rows."
    )
    return True


def _resident() -> int:
    """Bytes of memory that the process takes."""
    try:
        return int(_PAGES.read_text().split()[1]) * _PAGE
    except (OSError, ValueError):
        return 0


def _counts() -> tuple[int, float]:
    """(maps that are taken, maps that are allowed)."""
    try:
        with _MAPS.open("rb") as lines:
            return sum(1 for _ in lines), float(_MOST.read_text())
    except (OSError, ValueError):
        return 0, float("inf")


# seconds, after which a press that a callback dropped is made again: callbacks are shorter
_AGAIN = 0.01


class _Press:
    """Whether Ctrl-C was pressed and nothing has ended by it yet, and whether a hook has it."""

    unanswered, in_hook = False, False


class _Verb(threading.local):
    """Of this thread's verb: whether a press ended a part of it, and whether the next one waits."""

    ended, waits = False, False


verb = _Verb()


@contextmanager
def heard() -> Iterator[None]:
    """Within, a press of Ctrl-C ends in KeyboardInterrupt, whatever became of the one that Python
    raised. Nothing changes where the program handles the signal itself, or in threads that get
    none.
    """
    handler, outer = signal.getsignal(signal.SIGINT), (verb.ended, verb.waits)
    ours = _in_main_thread() and handler in (signal.default_int_handler, _press)
    verb.ended = False
    with _listening(handler) if ours else nullcontext():
        try:
            yield
            if not verb.waits:
                check_interrupt()
        except (KeyboardInterrupt, Exception) as error:
            if was_interrupt(error) and not isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise
        finally:
            verb.ended, verb.waits = outer


def was_interrupt(error: BaseException | None) -> bool:
    """Whether `error` is what became of Ctrl-C, which is then dealt with."""
    pressed = isinstance(error, KeyboardInterrupt) or (_in_main_thread() and _Press.unanswered)
    if pressed:
        _Press.unanswered, verb.ended = False, True
    return pressed


def check_interrupt() -> None:
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


_HANDLERS = threading.RLock()


def one_at_a_time(verb: Callable) -> Callable:
    """The verb, which waits until no other thread runs a model; its own thread may go on."""

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


S = TypeVar("S")


class Stage(NamedTuple, Generic[S]):
    """A state that is whole, after `done` steps; the bar says `text` behind them."""

    state: S
    done: int
    text: str = ""
    keep: bool = True  # False: no result can be made of it yet


def interruptible(
    stages: Iterator[Stage[S]], label: str, total: int, progress: bool
) -> tuple[S, bool]:
    """The last state of `stages`, and whether Ctrl-C ended them.

    `stages` is a generator: it yields where the work starts, then does it stage by stage, and ends
    where the work does. Of a stage that Ctrl-C meets halfway nothing remains; where no stage before
    it is to be kept, it propagates.
    """
    with _bar(label, total, progress) as update, one_blas_thread():
        last = next(stages)

        def advance() -> None:
            nonlocal last
            update(last.done, last.text)
            for stage in stages:
                # at once: arrays that are still being computed are no state to keep
                last = jax.block_until_ready(stage)
                update(last.done, last.text)
                check_interrupt()

        _, stopped = unless_stopped(advance, None)
        if stopped and not last.keep:
            raise KeyboardInterrupt
    return last.state, stopped


def unless_stopped(work: Callable[[], S], otherwise: S) -> tuple[S, bool]:
    """(what `work` gives, or `otherwise` if Ctrl-C ended it, and whether that was so). Afterwards
    there is a state to keep, and a press waits: other work of this kind does not begin, and the
    rest of the fit is completed. A second press raises, as that may take long.
    """
    verb.waits = False
    try:
        check_interrupt()
        found = jax.block_until_ready(work())
        check_interrupt()
        verb.waits = True
        return found, False
    except (KeyboardInterrupt, Exception) as error:
        verb.waits = True
        if not was_interrupt(error):
            raise
        return otherwise, True


@contextmanager
def _bar(label: str, total: int, show: bool):
    """Yields update(completed, text) of a bar of `total` steps on stderr."""
    if not show:
        yield lambda completed, text="": None
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=24),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[text]}"),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, text="")
        yield lambda completed, text="": bar.update(task, completed=completed, text=text)


# One thread for OpenBLAS, which factors small matrices between products that XLA spreads over all
# cores. Its own threads spin in wait for work and take the cores away: steps at M = 500 took 1.5
# times as long on two cores.
one_blas_thread = partial(threadpool_limits, 1, user_api="blas")
