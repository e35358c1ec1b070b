"""Seconds of a piece of work, with JAX's tracing and compiling told apart from running."""

import time
from contextlib import contextmanager

import jax

from ppl_gp.memory_maps import make_room

_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_spent: dict[str, float] = {"compile_seconds": 0.0, "compilations": 0}
_listening = False


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
