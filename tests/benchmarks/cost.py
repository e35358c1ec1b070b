"""First-call compile time of each method (n = 300) and peak memory at n = 4000, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from tests.benchmarks.common import Row

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
print(json.dumps({{"compile": fit.stats["compile_seconds"], "run": fit.stats["run_seconds"], "kib": after, "base": before}}))
"""
_FIXED = "pg.Fixed({'variance': 4.0, 'lengthscale': 1.0})"


def _measure(method: str, n: int) -> dict:
    environment = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
    script = _SCRIPT.format(methods=repr(method), n=n)
    out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return json.loads(out.stdout.strip().splitlines()[-1])


def rows() -> Iterator[Row]:
    """Seconds of tracing and compiling at first use; mebibytes at the largest exact size."""
    methods = ("Laplace", "EP", "VI", "LocalBound")
    for text in [f"pg.{m}(hyper={_FIXED})" for m in methods] + [f"pg.{m}()" for m in methods] + ["pg.NUTS(20, 20, 1)"]:
        label = text.replace(_FIXED, "Fixed(...)").replace("pg.", "").replace("()", "(hyper=MAP())")
        got = _measure(text, 300)
        yield Row(f"{label}: compile time of the first fit, n = 300", f"{got['compile']:.1f} s", "reported")
    matrix = 4000**2 * 8 / 2**20
    for name in ("Laplace", "EP"):
        got = _measure(f"pg.{name}(hyper={_FIXED})", 4000)
        peak = (got["kib"] - got["base"]) / 1024
        figure = f"{peak:.0f} MiB = {peak / matrix:.1f} matrices of n x n"
        yield Row(f"{name}: peak memory of a fit, n = 4000", figure, "reported")
