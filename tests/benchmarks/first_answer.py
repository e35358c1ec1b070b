"""Seconds from the start of a fresh process to its answer: import, fit of binary data in the plane,
predictions.

Peers maximise the evidence or its bound, without priors; our methods take the mode under log-normal
priors, and NUTS draws. The mean log density of held-out labels beside each time shows that all of
them answer the same question.
"""

from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from tests.benchmarks.ask import LIMIT
from tests.benchmarks.common import Row, two_moons_like
from tests.benchmarks.peers.call import OWN, available, run_peer

# seconds, nothing compiled before
TARGETS = {"Laplace": 3.5, "EP": 4.5, "VI": 4.5, "SVGP": 6.5, "NUTS": 10.0}
FILLED = 3.0  # seconds, everything compiled before
PEERS = {
    "sklearn": "scikit-learn, GaussianProcessClassifier (Laplace)",
    "gpflow": "GPflow, VGP by L-BFGS",
    "gpytorch": "GPyTorch, SVGP by Adam, M = {M}, {steps} steps",
    "gpjax": "GPJax, SVGP by Adam, M = {M}, {steps} steps",
}


class Size(NamedTuple):
    """Training data, held-out data, our methods, and what they and the peers' optimisers are
    allowed.

    `repeats`: processes of which the one with the median total is reported.
    """

    n: int
    new: int
    methods: tuple[str, ...]
    inducing: int
    draws: int
    steps: int  # of our SVGP, at most
    peer_steps: int  # of Adam
    iterations: int  # of GPflow's L-BFGS, at most
    repeats: int
    # where it is not, JAX may look into its own cache, and the first answer is none
    cold: bool = True


FULL = Size(300, 100, tuple(TARGETS), 50, 200, 3000, 200, 1000, 3)
TOY = Size(20, 5, ("Laplace",), 5, 10, 5, 5, 5, 1, cold=False)


def rows(size: Size = FULL) -> Iterator[Row]:
    """Ours with nothing compiled before, ours with everything compiled before, and the peers."""
    for name in size.methods:
        answer = _median(size, "ppl_gp", {"method": name})
        yield _row(_what(size, name), answer, f"at most {TARGETS[name]:g} s")
    for name in size.methods:
        with TemporaryDirectory() as folder:
            settings = {"method": name, "cache": folder}
            _answer(size, "ppl_gp", settings)  # fills it
            yield _row(
                f"{_what(size, name)}, filled cache",
                _median(size, "ppl_gp", settings),
                f"at most {FILLED:g} s",
            )
    yield from _peers(size)


def _what(size: Size, name: str) -> str:
    told = {
        "NUTS": f", {size.draws} + {size.draws} draws, 1 chain",
        "SVGP": f", M = {size.inducing}",
    }
    return f"{name}{told.get(name, '')}"


def _peers(size: Size) -> Iterator[Row]:
    """Those that are installed; the others are named on the terminal."""
    for name, what in PEERS.items():
        if name not in (*OWN, *available("first")):
            print(f"{name} is not installed: make bench-peers", flush=True)
            continue
        answer = _median(size, name, {"method": "peer"})
        yield _row(what.format(M=size.inducing, steps=size.peer_steps), answer, "reported")


def _problem(size: Size) -> tuple[dict, np.ndarray]:
    """The arrays of `protocol` with X_new, and the labels at X_new."""
    (X, y), (X_new, y_new) = two_moons_like(size.n), two_moons_like(size.new, seed=1)
    start = {"lengthscale": np.ones(2), "variance": np.array(1.0)}
    return {"X": X, "y": y.astype(float), "Z": X[: size.inducing], "X_new": X_new, **start}, y_new


def _answer(size: Size, name: str, settings: dict) -> dict:
    """Seconds of a process: in all, and of import (with the interpreter's start), fit and
    predictions; the log density.

    Raises `RuntimeError` where the process failed.
    """
    given, labels = _problem(size)
    steps = size.steps if name == "ppl_gp" else size.peer_steps
    asked = {
        "task": "first",
        "cache": None,
        "inducing": size.inducing,
        "draws": size.draws,
        "steps": steps,
    }
    asked |= {"iterations": size.iterations, "learning_rate": 0.05, **settings}
    got = run_peer(name, given, asked, LIMIT, size.cold)
    if "error" in got:
        raise RuntimeError(f"{name} gave no first answer: {got['error']}")
    stamps = [got[k] for k in ("started", "imported", "fitted", "answered")]
    probs = np.clip(got["probs"], 1e-12, 1.0 - 1e-12)
    score = float(np.mean(np.log(np.where(labels == 1, probs, 1.0 - probs))))
    return {"total": stamps[-1] - stamps[0], "parts": np.diff(stamps), "score": score}


def _median(size: Size, name: str, settings: dict) -> dict:
    """The process in the middle, by total."""
    answers = [_answer(size, name, settings) for _ in range(size.repeats)]
    return sorted(answers, key=lambda a: a["total"])[len(answers) // 2]


def _row(what: str, answer: dict, target: str) -> Row:
    parts = ", ".join(
        f"{k} {v:.1f}" for k, v in zip(("import", "fit", "predict"), answer["parts"], strict=True)
    )
    figure = f"{answer['total']:.1f} s ({parts}); log density {answer['score']:.3f}"
    return Row(what, figure, target, answer["total"], "s")
