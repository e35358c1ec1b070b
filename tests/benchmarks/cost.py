"""First-call compile time of each method (n = 300) and peak memory at n = 4000, each in a process
of its own.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tests.benchmarks.common import Row
from tests.benchmarks.fresh import fresh

_SCRIPT = """
import json, pathlib, re
import jax
jax.config.update("jax_enable_x64", True)
import ppl_gp as pg
from tests.benchmarks.common import binary, two_moons_like
methods = {methods}
def peak():
    # Not getrusage, whose peak a process inherits from the one that started it.
    return int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
n = {n}
X, y = two_moons_like(n)
before = peak()
fit = pg.fit(binary, eval(methods, {{"pg": pg}}), 0, X, y=y, throw=False)
after = peak()
compiling, running = fit.stats["compile_seconds"], fit.stats["run_seconds"]
print(json.dumps({{"compile": compiling, "run": running, "kib": after, "base": before}}))
"""
_FIXED = "pg.Fixed({'variance': 4.0, 'lengthscale': 1.0})"
_LOCAL = ("Laplace", "EP", "VI", "LocalBound")


class Size(NamedTuple):
    """The methods whose compiling is timed, by n data; those whose memory is measured, by `large`
    data.

    Only a `cold` process, which finds nothing compiled before, has a compile time that means
    anything.
    """

    n: int
    compiled: tuple[str, ...]
    large: int
    measured: tuple[str, ...]
    cold: bool = True


FULL = Size(
    300,
    (
        *(f"pg.{m}(hyper={_FIXED})" for m in _LOCAL),
        *(f"pg.{m}()" for m in _LOCAL),
        "pg.NUTS(20, 20, 1)",
    ),
    4000,
    ("Laplace", "EP"),
)
TOY = Size(20, (f"pg.Laplace(hyper={_FIXED})",), 20, ("Laplace",), cold=False)


def rows(size: Size = FULL) -> Iterator[Row]:
    """Seconds of tracing and compiling at first use; mebibytes at the largest exact size."""
    yield from (_compiling(text, size) for text in size.compiled)
    yield from (_memory(name, size) for name in size.measured)


def _measure(method: str, n: int, size: Size) -> dict:
    return fresh(_SCRIPT.format(methods=repr(method), n=n), size.cold)


def _compiling(text: str, size: Size) -> Row:
    label = text.replace(_FIXED, "Fixed(...)").replace("pg.", "").replace("()", "(hyper=MAP())")
    value = _measure(text, size.n, size)["compile"]
    what = f"{label}: compile time of the first fit, n = {size.n}"
    return Row(what, f"{value:.1f} s", "reported", value, "s")


def _memory(name: str, size: Size) -> Row:
    matrix, got = (
        size.large**2 * 8 / 2**20,
        _measure(f"pg.{name}(hyper={_FIXED})", size.large, size),
    )
    peak = (got["kib"] - got["base"]) / 1024
    figure = f"{peak:.0f} MiB = {peak / matrix:.1f} matrices of n x n"
    what = f"{name}: peak memory of a fit, n = {size.large}"
    return Row(what, figure, "reported", peak / matrix, "matrices of n x n")
