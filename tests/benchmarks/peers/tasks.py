"""The tasks that a peer's engine (see `protocol`) is timed on, and the command line of the peers'
programs.
"""

import json
import pathlib
import sys
from itertools import product

import numpy as np
from protocol import batches, peak_mib, read, timed


def _first(make, problem, settings):
    """An engine of the first method, rate and gamma."""
    first = [np.atleast_1d(settings[name])[0] for name in ("methods", "learning_rate", "gamma")]
    return make(problem, settings, str(first[0]), float(first[1]), float(first[2]))


def bound(make, problem, settings):
    """The bound at the start: evaluated, and as training on all data sees it."""
    engine = _first(make, problem, settings | {"batch": len(problem.y)})
    return {
        "bound": engine.bound(),
        "training_bound": float(engine.run(np.zeros((1, 0), np.int32))[0]),
    }


def step(make, problem, settings):
    """Seconds per step: the median and least of repeated runs, after one run that compiles."""
    engine, rows = _first(make, problem, settings), batches(problem, settings, settings["steps"])
    first, bounds = timed(engine.run, rows)
    times = [timed(engine.run, rows)[0] / len(rows) for _ in range(settings["repeats"])]
    out = {
        "seconds": float(np.median(times)),
        "seconds_min": min(times),
        "first_call_seconds": first,
    }
    return out | {"first_bound": float(bounds[0]), "last_bound": float(bounds[-1])}


def deep_step(make, problem, settings):
    """As `step`, and what the first call took beyond its steps: compiling."""
    out = step(make, problem, settings)
    return out | {
        "compile_seconds": max(0.0, out["first_call_seconds"] - settings["steps"] * out["seconds"])
    }


def deep_bound(make, problem, settings):
    """The bound on all data at the start: the mean of repeated evaluations, and its standard
    error.
    """
    engine = _first(make, problem, settings)
    bounds = [engine.bound() for _ in range(settings["repeats"])]
    return {
        "bound": np.mean(bounds),
        "standard_error": np.std(bounds, ddof=1) / np.sqrt(len(bounds)),
    }


def epoch(make, problem, settings):
    """Seconds of one pass over the data, in compiled blocks of steps; the bound afterwards."""
    engine = _first(make, problem, settings)
    rows = batches(problem, settings, max(1, len(problem.y) // settings["batch"]))
    blocks = [rows[i : i + settings["every"]] for i in range(0, len(rows), settings["every"])]
    compiling = sum(timed(engine.run, b)[0] for b in {len(b): b for b in blocks}.values())
    engine.reset()
    seconds, peak = sum(timed(engine.run, block)[0] for block in blocks), peak_mib()
    out = {
        "seconds": seconds,
        "steps": len(rows),
        "first_call_seconds": compiling,
        "peak_training_mib": peak,
    }
    return out | {"bound": engine.bound()}


def predict(make, problem, settings):
    """Seconds for mean and variance of f at many points in the box of the data, warm."""
    engine = _first(make, problem, settings)
    low, high = problem.X.min(0), problem.X.max(0)
    at = np.random.default_rng(settings["seed"]).uniform(low, high, (settings["points"], len(low)))
    at = at.astype(settings["dtype"])
    engine.run(batches(problem, settings, settings["every"]))
    first, (mean, variance) = timed(engine.predict, at)
    times = [timed(engine.predict, at)[0] for _ in range(settings["repeats"])]
    out = {
        "seconds": float(np.median(times)),
        "seconds_min": min(times),
        "first_call_seconds": first,
    }
    return out | {"mean_square": float(np.mean(mean**2)), "mean_variance": float(np.mean(variance))}


def _race(engine, problem, settings, limit):
    """Train until the bound is close to the target or time is up. The bound is looked at off the
    clock, in compiled blocks of steps, whenever these have grown by a fifth since the last look.
    """
    every, steps = (
        settings["every"],
        max(1, settings["steps"] // settings["every"]) * settings["every"],
    )
    rows = batches(problem, settings, steps, seed=1)
    compiling = timed(engine.run, rows[:every])[0]
    engine.reset()
    goal = (
        np.inf
        if settings["target"] is None
        else settings["target"] - settings["tolerance"] * len(problem.y)
    )
    spent, looked, trace = 0.0, 0, [(0.0, engine.bound())]
    for done in range(every, steps + 1, every):
        spent += timed(engine.run, rows[done - every : done])[0]
        over = spent > limit or done == steps
        if over or done >= 1.2 * looked:
            looked, trace = done, [*trace, (spent, engine.bound())]
        if over or not trace[-1][1] < goal:
            break
    out = {
        "reached": bool(trace[-1][1] >= goal),
        "seconds": spent,
        "bound": trace[-1][1],
        "steps": done,
    }
    return out | {"first_call_seconds": compiling, "trace": trace}


def _attempt(make, problem, settings, run, limit):
    """`run`, which names a method and rates, with what came of it; a library may call a failed
    factor what it likes.
    """
    try:
        return run | _race(make(problem, settings, *run.values()), problem, settings, limit)
    except Exception as failure:
        return run | {"reached": False, "error": f"{type(failure).__name__}: {failure}"[:300]}


def optimum(make, problem, settings):
    """Every method with every rate and gamma from the same start; the fastest to the target, and
    all the runs.

    A run ends when it can no longer be the fastest, and all of them share `training_limit`.
    """
    runs, lists = (
        [],
        [np.atleast_1d(settings[name]) for name in ("methods", "learning_rate", "gamma")],
    )
    tried = dict.fromkeys(
        (str(m), float(r), 0.0 if m == "adam" else float(g)) for m, r, g in product(*lists)
    )
    limit, left = settings["seconds_limit"], settings["training_limit"]
    for each in tried:
        run = dict(zip(("method", "learning_rate", "gamma"), each, strict=True))
        runs.append(_attempt(make, problem, settings, run, min(limit, left)))
        left -= runs[-1].get("seconds", 0.0)
        limit = min(limit, runs[-1]["seconds"]) if runs[-1]["reached"] else limit
    best = min(runs, key=lambda run: run["seconds"] if run["reached"] else np.inf)
    if not best["reached"]:
        best = max(runs, key=lambda run: np.nan_to_num(run.get("bound", -np.inf), nan=-np.inf))
    return best | {"runs": runs}


def main(library: str, version: str, make):
    """`python PEER.py problem.npz out.json`."""
    problem, settings = read(sys.argv[1])
    base, known = peak_mib(), (bound, step, epoch, predict, optimum, deep_step, deep_bound)
    tasks = {t.__name__: t for t in known}
    out = tasks[settings["task"]](make, problem, settings)
    out |= {"library": library, "version": version, "task": settings["task"]}
    out |= {
        "base_mib": base,
        "peak_mib": peak_mib(),
        "shape": [*problem.X.shape, problem.Z.shape[-2]],
    }
    pathlib.Path(sys.argv[2]).write_text(json.dumps(out, default=float))
