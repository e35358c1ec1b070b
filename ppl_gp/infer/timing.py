"""Seconds of a piece of work, with JAX's tracing and compiling counted separately from running; and
room for compiled programs.

Each program takes some dozens of the process's memory maps, of which Linux allows 65 530 by
default; beyond them LLVM ends the process. A loop of fits that each compile (other numbers of rows,
a Python number among the arguments) gets there in some hundred fits, with 40 MiB of memory for
each. JAX can forget its programs, and compiles again what is wanted again; the C library gives
memory back when it is asked to.
"""

import ctypes
import time
from contextlib import contextmanager
from pathlib import Path

import jax

from ppl_gp.errors import warn

_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_spent: dict[str, float] = {"compile_seconds": 0.0, "compilations": 0}
_listening = False
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
    global _listening
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_listen)  # pyright: ignore[reportArgumentType]
        _listening = True
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
    """Let JAX forget its compiled programs, with a warning, where the maps are nearly used up or
    the process has grown by 2 GiB since the first look or the last time; whether it did.
    `compilations`: how many the process has made, so that looks are rare. Nothing where the system
    does not tell.
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
