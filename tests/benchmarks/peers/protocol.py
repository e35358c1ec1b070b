"""What every peer is asked to do, in plain NumPy: the problems, the settings, the minibatches,
clock and memory.

An engine is built by `make(problem, settings, method, learning_rate, gamma)` and has
  run(indices)   as many training steps as rows, each on the data its row names (all data where rows
  are empty);
                 returns the bound of each step, scaled to the full data, when the work is finished,
  bound()        the bound on all data, with the current parameters,
  predict(X)     mean and variance of f at X, as NumPy arrays,
  reset()        back to the start: parameters and optimisers.
All start at q(v) = N(mean, root root^T), where u = chol(K(Z, Z)) v, at the given hyperparameters
and Z, and train all of them. The start of q is N(0, I) unless the problem says otherwise, which
only the method "adam" takes.

The engines of the tasks named "deep_..." take a `DeepProblem`, have no `predict`, and average every
bound over `num_draws` draws of the inner layer for each datum.
"""

import json
import pathlib
import sys
import time
from typing import NamedTuple

import numpy as np

DEFAULTS = {
    "task": "step",
    "batch": 256,
    "steps": 20,  # of a timed run; the most steps of an "optimum"
    "repeats": 5,
    "dtype": "float64",
    "jitter": 1e-6,
    "num_draws": 1,  # of the inner layer of a deep GP, for each datum
    # "optimum" tries every one, with every rate and every gamma (natural-gradient step)
    "methods": ["adam"],
    "learning_rate": 0.01,
    "gamma": 0.1,
    "target": None,  # of an "optimum"; without one it runs until time or steps are up
    "tolerance": 1e-3,  # nats per datum below the target
    "every": 10,  # steps in one compiled block; the bound is looked at between blocks
    "seconds_limit": 60.0,  # of training, for each run of an "optimum"
    "training_limit": 90.0,  # for all of them
    "points": 100_000,
    "chunk": 10_000,
    "seed": 0,
}


class Problem(NamedTuple):
    """Binary data and the start: inducing inputs, the RBF kernel's hyperparameters, and q(v)."""

    X: np.ndarray
    y: np.ndarray
    Z: np.ndarray
    lengthscale: np.ndarray
    variance: np.ndarray
    mean: np.ndarray
    root: np.ndarray


class DeepProblem(NamedTuple):
    """Data with Gaussian noise, and the start of a deep GP of two layers that doubly stochastic
    inference trains.

    D inner units with identity mean, which share Z[0] and one RBF kernel, feed one last unit with
    zero mean, Z[1] and a kernel of its own. Both q are whitened; roots are lower triangular.
    """

    X: np.ndarray  # (N, D)
    y: np.ndarray  # (N,)
    Z: np.ndarray  # (2, M, D)
    lengthscale: np.ndarray  # (2, D)
    variance: np.ndarray  # (2,), of the kernels
    noise: np.ndarray  # (), variance
    inner_mean: np.ndarray  # (D, M)
    inner_root: np.ndarray  # (D, M, M)
    mean: np.ndarray  # (M,), of the last unit
    root: np.ndarray  # (M, M)


def _start(Z: np.ndarray) -> dict[str, np.ndarray]:
    """q at the prior; of a deep GP's inner units, with a hundredth of its standard deviation, so
    that they start calm.
    """
    size, units = Z.shape[-2:]
    inner = {
        "inner_mean": np.zeros((units, size)),
        "inner_root": np.tile(0.01 * np.eye(size), (units, 1, 1)),
    }
    return {"mean": np.zeros(size), "root": np.eye(size), **inner}


def read(path: str) -> tuple[Problem | DeepProblem, dict]:
    """The problem in the wanted precision, and the settings with defaults filled in."""
    with np.load(path) as file:
        settings = DEFAULTS | json.loads(str(file["settings"]))
        start = _start(file["Z"]) | {name: file[name] for name in file.files}
    kind = DeepProblem if settings["task"].startswith("deep_") else Problem
    return kind(*[np.asarray(start[name], settings["dtype"]) for name in kind._fields]), settings


def peak_mib() -> float:
    """The most memory this process has held. VmHWM starts afresh at exec; ru_maxrss would count the
    caller's size.
    """
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return next(
            int(r.split()[1]) / 1024
            for r in status.read_text().splitlines()
            if r.startswith("VmHWM")
        )
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 1024
    )


def batches(problem: Problem, settings: dict, steps: int, seed: int = 0) -> np.ndarray:
    """Rows of indices, drawn without replacement within an epoch; empty rows if a batch is all the
    data.
    """
    rng, n, size = np.random.default_rng(settings["seed"] + seed), len(problem.y), settings["batch"]
    if size >= n:
        return np.zeros((steps, 0), np.int32)
    epochs = -(-steps // (n // size))
    rows = [rng.permutation(n)[: n // size * size].reshape(-1, size) for _ in range(epochs)]
    return np.concatenate(rows)[:steps].astype(np.int32)


def timed(work, *args):
    """(seconds, result)."""
    start = time.perf_counter()
    out = work(*args)
    return time.perf_counter() - start, out
