"""SVGP against GPflow, GPyTorch and GPJax, each in its own environment, on one clock (`peers/`);
and our own large runs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tests.benchmarks.ask import Measured, against_best, ask, everyone
from tests.benchmarks.common import Row
from tests.benchmarks.fresh import fresh
from tests.benchmarks.peers.call import METHODS


class Size(NamedTuple):
    """N data, M inducing points, B rows of a minibatch, in that order where there are several."""

    n: int  # of the rows on steps, the optimum and predictions
    bound: tuple[int, int]  # N, M
    steps: tuple[tuple[int, int], ...]  # M, B; the last in float32 and by natural gradients too
    repeats: int
    optimum: tuple[int, int, int, float]  # M, B, the most steps, seconds
    rates: tuple[float, ...]  # Adam's, each tried for the optimum
    large: tuple[int, int, int]  # N, M, B
    predict: tuple[int, int]  # M, points
    cold: bool = True


FULL = Size(
    n=10_000,
    bound=(800, 40),
    steps=((100, 256), (200, 1000), (500, 1000)),
    repeats=5,
    optimum=(100, 1000, 5000, 15.0),
    rates=(0.05, 0.01),
    large=(10**6, 200, 1000),
    predict=(200, 10**5),
)
TOY = Size(
    n=20,
    bound=(20, 3),
    steps=((3, 10),),
    repeats=1,
    optimum=(3, 10, 25, 1.0),
    rates=(0.05,),
    large=(20, 3, 10),
    predict=(3, 20),
    cold=False,
)


def problem(n: int, M: int, seed: int = 0) -> dict:
    """Binary data in the plane; inducing points at the first rows."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3.0, 3.0, (n, 2))
    y = (np.sin(2.0 * X[:, 0]) + X[:, 1] + 0.3 * rng.normal(size=n) > 0.0).astype(float)
    return {"X": X, "y": y, "Z": X[:M], "lengthscale": np.ones(2), "variance": np.array(2.0)}


def rows(size: Size = FULL) -> Iterator[Row]:
    """Every line of the sparse table."""
    names = everyone()
    yield _same_work(size, names)
    yield from _steps(size, names)
    yield _optimum(size, names)
    yield from _epoch(size, names)
    M, points = size.predict
    settings = {"task": "predict", "points": points, "repeats": size.repeats}
    predict = against_best(ask(problem(size.n, M), settings, names), 1.0, "s")
    yield predict.row(f"mean and variance of f at {points} points, M = {M}")
    yield _whole_fit(size)


def _same_work(size: Size, names) -> Row:
    """The bound at a random q(u): every library must have the same number."""
    (n, M), rng = size.bound, np.random.default_rng(1)
    given = problem(n, M) | {
        "mean": rng.normal(size=M),
        "root": np.tril(0.1 * rng.normal(size=(M, M))) + np.eye(M),
    }
    bounds = {k: v["bound"] for k, v in ask(given, {"task": "bound"}, names).items()}
    spread = max(bounds.values()) - min(bounds.values())
    if spread > 1e-3:
        raise RuntimeError(f"the libraries do not do the same work: bounds {bounds}")
    what = "SVGP bound at a random q(u), largest difference between libraries"
    return Row(what, f"{spread:.1e} nats", "at most 1e-3", spread, "nats")


def _steps(size: Size, names) -> Iterator[Row]:
    """One step, by minibatch and number of inducing points; the last again in float32 and by
    natural gradients.
    """

    def measured(M, B, names, **more):
        settings = {"task": "step", "batch": B, "steps": 20, "repeats": size.repeats, **more}
        return against_best(ask(problem(size.n, M), settings, names), 1e3, "ms")

    for M, B in size.steps:
        yield measured(M, B, names).row(f"SVGP, one Adam step, M = {M}, B = {B}", "at most 0.5")
    yield measured(M, B, names, dtype="float32").row(f"the same in float32, M = {M}, B = {B}")
    seconds = measured(M, B, ("ppl_gp",), methods=["natgrad"])
    alone = seconds._replace(figure=f"{seconds.value:.3g} ms")  # nobody was asked beside us
    yield alone.row(f"SVGP, one step with natural gradients, M = {M}, B = {B}")


def _optimum(size: Size, names) -> Row:
    """Seconds to come within 1 nat per 1000 data of the bound that we reach in the limit, from the
    same start.
    """
    M, B, steps, limit = size.optimum
    given = problem(size.n, M)
    common = {
        "task": "optimum",
        "batch": B,
        "steps": steps,
        "every": 25,
        "learning_rate": size.rates,
    }
    common["seconds_limit"] = limit
    long = ask(given, common | {"methods": ["natgrad"]}, ("ppl_gp",))
    target, answers = max(run.get("bound", -np.inf) for run in long["ppl_gp"]["runs"]), {}
    for name in names:
        answers |= ask(given, common | {"methods": METHODS[name], "target": target}, (name,))
    what = (
        f"SVGP to within 1 nat per 1000 data of our bound, N = {size.n}, M = {M}, each at its best"
    )
    return _race(answers, target, limit).row(what, "the fastest")


def _race(answers: dict[str, dict], target: float, limit: float) -> Measured:
    """Who reached the target, and when; the value is our time in seconds."""
    told = ", ".join(
        f"{k} {v['seconds']:.2f} s ({v['method']}, rate {v['learning_rate']:g}, {v['steps']} steps)"
        for k, v in answers.items()
        if v["reached"]
    )
    missed = [f"{k} {v.get('bound', np.nan):.0f}" for k, v in answers.items() if not v["reached"]]
    told += f"; not reached in {limit:.0f} s: {', '.join(missed)}" if missed else ""
    ours = answers.get("ppl_gp", {"reached": False})
    return Measured(
        f"to {target:.0f} nats: {told}", ours["seconds"] if ours["reached"] else None, "s"
    )


def _epoch(size: Size, names) -> Iterator[Row]:
    """Time and memory of one pass over the largest data."""
    n, M, B = size.large
    epoch = ask(problem(n, M), {"task": "epoch", "batch": B, "every": 20}, names)
    what = f"SVGP, one epoch of N = {n} ({n // B} Adam steps), M = {M}"
    yield against_best(epoch, 1.0, "s").row(what)
    peaks = ", ".join(
        f"{k} {v['peak_training_mib']:.0f} MiB (of which start-up {v['base_mib']:.0f})"
        for k, v in epoch.items()
    )
    yield Row(
        "peak memory of that epoch",
        peaks,
        "reported",
        epoch.get("ppl_gp", {}).get("peak_training_mib"),
        "MiB",
    )


_SCRIPT = """
import json, pathlib, re, time
import jax
jax.config.update("jax_enable_x64", True)
import ppl_gp as pg
from tests.benchmarks.common import flat
from tests.benchmarks.sparse import problem
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
n, M, B = {large}
given = problem(n, M)
before = peak()
method = pg.SVGP(num_inducing=M, batch_size=B, max_steps=n // B)
fit = pg.fit(flat, method, 0, given["X"], y=given["y"].astype(int), throw=False)
compiling, running = fit.stats["compile_seconds"], fit.stats["run_seconds"]
mib = (peak() - before) / 1024
print(json.dumps({{"run": running, "compile": compiling, "mib": mib, "bound": fit.log_evidence}}))
"""


def _whole_fit(size: Size) -> Row:
    """Our own call, compiling, choice of inducing points and all."""
    (n, M, B), got = size.large, fresh(_SCRIPT.format(large=size.large), size.cold)
    figure = (
        f"{got['run']:.0f} s and {got['compile']:.0f} s of compiling, {got['mib']:.0f} MiB "
        "beside the data"
    )
    what = f"pg.fit(SVGP()) on N = {n}, {n // B} steps, M = {M}: wall time and peak memory"
    return Row(
        what,
        f"{figure}; bound {got['bound']:.0f} nats",
        "reported",
        got["run"] + got["compile"],
        "s",
    )
