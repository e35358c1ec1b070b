"""SVGP against GPflow, GPyTorch and GPJax, each in its own environment, on one clock (`peers/`); and our own large runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from tests.benchmarks.common import Row
from tests.benchmarks.peers.call import METHODS, available, run_peer

SIZES = ((100, 256), (200, 1000), (500, 1000))
LIMIT = 900.0


def problem(n: int, M: int, seed: int = 0) -> dict:
    """Binary data in the plane; inducing points at the first rows."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3.0, 3.0, (n, 2))
    y = (np.sin(2.0 * X[:, 0]) + X[:, 1] + 0.3 * rng.normal(size=n) > 0.0).astype(float)
    return {"X": X, "y": y, "Z": X[:M], "lengthscale": np.ones(2), "variance": np.array(2.0)}


def ask(given: dict, settings: dict, names) -> dict[str, dict]:
    """{library: answer}, one after the other, ours first; those that failed left out, with the reason printed."""
    answers = {name: run_peer(name, given, settings, LIMIT) for name in names}
    for name, answer in answers.items():
        if "error" in answer:
            print(f"{name}: {answer['error']}", flush=True)
    return {name: answer for name, answer in answers.items() if "error" not in answer}


def against_best(answers: dict[str, dict], unit: float, name: str) -> str:
    """Our time, the best peer's, and their ratio; only theirs if ours failed."""
    peers = {k: v["seconds"] for k, v in answers.items() if k != "ppl_gp"}
    if "ppl_gp" not in answers:
        return ", ".join(f"{k} {v * unit:.3g} {name}" for k, v in peers.items())
    ours = answers["ppl_gp"]["seconds"]
    if not peers:
        return f"{ours * unit:.3g} {name} (no peer installed: make bench-peers)"
    best = min(peers, key=peers.__getitem__)
    others = ", ".join(f"{k} {v * unit:.3g}" for k, v in peers.items())
    return f"{ours * unit:.3g} {name}; {others}: {ours / peers[best]:.2f} of the best peer's"


def rows() -> Iterator[Row]:
    """Every line of the sparse table."""
    names = ("ppl_gp", *available())
    yield _same_work(names)
    for M, B in SIZES:
        answers = ask(problem(10_000, M), {"task": "step", "batch": B, "steps": 20}, names)
        yield Row(f"SVGP, one Adam step, M = {M}, B = {B}", against_best(answers, 1e3, "ms"), "at most 0.5")
    single = ask(problem(10_000, 500), {"task": "step", "batch": 1000, "steps": 20, "dtype": "float32"}, names)
    yield Row("the same in float32, M = 500, B = 1000", against_best(single, 1e3, "ms"), "reported")
    natural = ask(
        problem(10_000, 500), {"task": "step", "batch": 1000, "steps": 20, "methods": ["natgrad"]}, ("ppl_gp",)
    )
    yield Row(
        "SVGP, one step with natural gradients, M = 500, B = 1000",
        f"{natural['ppl_gp']['seconds'] * 1e3:.3g} ms",
        "reported",
    )
    yield from _optimum(names)
    epoch = ask(problem(1_000_000, 200), {"task": "epoch", "batch": 1000, "every": 20}, names)
    yield Row("SVGP, one epoch of N = 1 000 000 (1000 Adam steps), M = 200", against_best(epoch, 1.0, "s"), "reported")
    peaks = ", ".join(
        f"{k} {v['peak_training_mib']:.0f} MiB (of which start-up {v['base_mib']:.0f})" for k, v in epoch.items()
    )
    yield Row("peak memory of that epoch", peaks, "reported")
    predict = ask(problem(10_000, 200), {"task": "predict"}, names)
    yield Row("mean and variance of f at 100 000 points, M = 200", against_best(predict, 1.0, "s"), "reported")
    yield Row(
        "pg.fit(SVGP()) on N = 1 000 000, 1000 steps, M = 200: wall time and peak memory", _whole_fit(), "reported"
    )


def _same_work(names) -> Row:
    """The bound at a random q(u): every library must have the same number."""
    given, rng = problem(800, 40), np.random.default_rng(1)
    given |= {"mean": rng.normal(size=40), "root": np.tril(0.1 * rng.normal(size=(40, 40))) + np.eye(40)}
    bounds = {k: v["bound"] for k, v in ask(given, {"task": "bound"}, names).items()}
    spread = max(bounds.values()) - min(bounds.values())
    if spread > 1e-3:
        raise RuntimeError(f"the libraries do not do the same work: bounds {bounds}")
    return Row(
        "SVGP bound at a random q(u), largest difference between libraries", f"{spread:.1e} nats", "at most 1e-3"
    )


def _optimum(names) -> Iterator[Row]:
    """Seconds to come within 1 nat per 1000 data of the bound that we reach in 15 s, from the same start."""
    given, limit = problem(10_000, 100), 15.0
    common = {"task": "optimum", "batch": 1000, "steps": 5000, "every": 25, "learning_rate": [0.05, 0.01]}
    common["seconds_limit"] = limit
    long = ask(given, common | {"methods": ["natgrad"]}, ("ppl_gp",))
    target = max(run.get("bound", -np.inf) for run in long["ppl_gp"]["runs"])
    answers = {}
    for name in names:
        answers |= ask(given, common | {"methods": METHODS[name], "target": target}, (name,))
    told = ", ".join(
        f"{k} {v['seconds']:.2f} s ({v['method']}, rate {v['learning_rate']:g}, {v['steps']} steps)"
        for k, v in answers.items()
        if v["reached"]
    )
    missed = [f"{k} {v.get('bound', np.nan):.0f}" for k, v in answers.items() if not v["reached"]]
    told += f"; not reached in {limit:.0f} s: {', '.join(missed)}" if missed else ""
    yield Row(
        f"SVGP to within 1 nat per 1000 data of {target:.0f} nats, N = 10 000, M = 100, each at its best",
        told,
        "the fastest",
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
given = problem(1_000_000, 200)
before = peak()
fit = pg.fit(flat, pg.SVGP(num_inducing=200, batch_size=1000, max_steps=1000), 0, given["X"], y=given["y"].astype(int))
print(json.dumps({"run": fit.stats["run_seconds"], "compile": fit.stats["compile_seconds"], "mib": (peak() - before) / 1024,
                  "bound": fit.log_evidence}))
"""


def _whole_fit() -> str:
    environment = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
    out = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True)
    got = json.loads(out.stdout.strip().splitlines()[-1])
    told = f"{got['run']:.0f} s and {got['compile']:.0f} s of compiling, {got['mib']:.0f} MiB beside the data"
    return f"{told}; bound {got['bound']:.0f} nats"
