"""A deep GP of two layers against GPflux and GPyTorch, each in its own environment, on one clock (`peers/`)."""

from collections.abc import Iterator

import numpy as np

import ppl_gp as pg
from models.latent import latent
from models.latent_deep import latent_deep
from tests.benchmarks.common import Row
from tests.benchmarks.peers.call import available
from tests.benchmarks.sparse import against_best, ask


def problem(n: int = 8192, M: int = 100, D: int = 8, seed: int = 0) -> dict:
    """A sine of one direction with noise; inducing points of both layers at the first rows; short inner steps."""
    rng = np.random.default_rng(seed)
    X, direction = rng.normal(size=(n, D)), rng.normal(size=D)
    y = np.sin(2.0 * X @ direction / np.linalg.norm(direction)) + 0.1 * rng.normal(size=n)
    kernels = {"lengthscale": np.full((2, D), 2.0), "variance": np.array([0.1, 1.0]), "noise": np.array(0.1)}
    return {"X": X, "y": y, "Z": np.stack([X[:M], X[:M]]), **kernels}


def elsewhere(given: dict, seed: int = 1) -> dict:
    """The problem with random q in both layers, where a wrong constant shows."""
    rng, (D, M) = np.random.default_rng(seed), (given["X"].shape[1], given["Z"].shape[1])
    roots = np.tril(0.02 * rng.normal(size=(D + 1, M, M))) + 0.5 * np.eye(M)
    means = rng.normal(size=(D + 1, M))
    q = {"inner_mean": means[:D], "inner_root": roots[:D], "mean": means[D], "root": roots[D]}
    return given | q


def rows() -> Iterator[Row]:
    """Every line of the table for deep GPs."""
    names = ("ppl_gp", *available("deep"))
    yield from _same_work(names)
    yield _learning(names)
    for draws in (1, 10):
        for dtype, target in (("float64", "at most 0.5"), ("float32", "reported")):
            yield from _step(names, draws, dtype, target)
    yield from importance_weighted()


def importance_weighted() -> Iterator[Row]:
    """Steps with K copies of each datum's latents: natural gradients for the last layer, Adam for the encoder and the rest."""
    for name, model in (("LV-GP", latent), ("LV-DGP 9-9-1", latent_deep)):
        times = {K: _weighted_step(model, K) for K in (1, 5, 20)}
        told = ", ".join(f"{1e3 * seconds:.3g} ms at K = {K}" for K, seconds in times.items())
        told += f": {times[5] / times[1]:.1f} and {times[20] / times[1]:.1f} times the first"
        yield Row(f"{name}, one step with importance weighting, M = 100, B = 1024", told, "reported")


def _weighted_step(model, K: int, fewer: int = 5, more: int = 35) -> float:
    """Seconds: the difference of two runs, so that what a run does once cancels."""
    given = problem()
    X, y = given["X"], given["y"]

    def run(steps):
        method = pg.SVGP(inducing="subset", num_inducing=100, batch_size=1024, num_importance=K, max_steps=steps)
        return pg.fit(model, method, 0, X, y=y, throw=False).stats["run_seconds"]

    for steps in (fewer, more):
        run(steps)  # compiles
    return (run(more) - run(fewer)) / (more - fewer)


def _same_work(names) -> Iterator[Row]:
    """The bound at a random q, whose inner layer draws, or hardly: every library must have the same number."""
    given, settings = elsewhere(problem(2000)), {"task": "deep_bound", "num_draws": 10, "repeats": 20, "chunk": 1000}
    calm = given | {"variance": np.array([1e-10, 1.0])}
    for what, at, jitter, slack in (("", given, 1e-6, 0.0), (" that hardly draws", calm, 1e-12, 0.01)):
        answers = ask(at, settings | {"jitter": jitter}, names)
        bounds, errors = zip(*[(v["bound"], v["standard_error"]) for v in answers.values()], strict=True)
        spread, error = max(bounds) - min(bounds), np.hypot.reduce(errors)
        if spread > 4.0 * error + slack:
            raise RuntimeError(f"the libraries do not do the same work: bounds {answers}")
        told = f"{spread:.1g} nats, standard error {error:.1g}, of {np.mean(bounds):.0f}"
        yield Row(f"deep GP, bound at a random q{what}, largest difference", told, "at most 4 standard errors")


def _learning(names) -> Row:
    """The bounds before the first and the fiftieth step, from the same start and on the same minibatches."""
    settings = {"task": "deep_step", "batch": 1024, "steps": 50, "repeats": 1}
    told = ", ".join(
        f"{k} {v['first_bound']:.0f} to {v['last_bound']:.0f}" for k, v in ask(problem(), settings, names).items()
    )
    return Row("the same, bound of a minibatch over 50 steps at rate 0.01", told, "reported")


def _step(names, draws: int, dtype: str, target: str) -> Iterator[Row]:
    """Time a step, and compiling."""
    settings = {"task": "deep_step", "batch": 1024, "steps": 20, "num_draws": draws, "dtype": dtype}
    answers = ask(problem(), settings, names)
    what = f"deep GP 8-8-1, one Adam step, M = 100, B = 1024, draws = {draws}, {dtype}"
    yield Row(what, against_best(answers, 1e3, "ms"), target)
    compiling = ", ".join(f"{k} {v['compile_seconds']:.1f} s" for k, v in answers.items())
    yield Row("compiling for it", compiling, "reported")
