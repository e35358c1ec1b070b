"""A deep GP of two layers against GPflux and GPyTorch, each in its own environment, on one clock
(`peers/`).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

import ppl_gp as pg
from models.latent import latent
from models.latent_deep import latent_deep
from tests.benchmarks.ask import against_best, ask, everyone
from tests.benchmarks.common import Row


class Size(NamedTuple):
    """n data in D dimensions, M inducing points in each layer, B rows of a minibatch.

    `bound`: data, draws' repeats. `steps`: of a timed run and of the look at learning. `weighted`:
    the fewer and the more steps whose difference is timed, with K = `copies` of each latent.
    """

    n: int
    D: int
    M: int
    B: int
    bound: tuple[int, int]
    steps: tuple[int, int]
    repeats: int
    draws: tuple[int, ...]
    precisions: tuple[str, ...]
    models: dict[str, Callable]
    weighted: tuple[int, int]
    copies: tuple[int, ...]


FULL = Size(
    n=8192,
    D=8,
    M=100,
    B=1024,
    bound=(2000, 20),
    steps=(20, 50),
    repeats=5,
    draws=(1, 10),
    precisions=("float64", "float32"),
    models={"LV-GP": latent, "LV-DGP 9-9-1": latent_deep},
    weighted=(5, 35),
    copies=(1, 5, 20),
)
TOY = Size(
    n=20,
    D=2,
    M=3,
    B=10,
    bound=(20, 4),
    steps=(2, 2),
    repeats=1,
    draws=(1,),
    precisions=("float64",),
    models={"LV-GP": latent},
    weighted=(1, 2),
    copies=(1, 2),
)


def problem(n: int, M: int, D: int, seed: int = 0) -> dict:
    """A sine of one direction with noise; inducing points of both layers at the first rows; short
    inner steps.
    """
    rng = np.random.default_rng(seed)
    X, direction = rng.normal(size=(n, D)), rng.normal(size=D)
    y = np.sin(2.0 * X @ direction / np.linalg.norm(direction)) + 0.1 * rng.normal(size=n)
    kernels = {
        "lengthscale": np.full((2, D), 2.0),
        "variance": np.array([0.1, 1.0]),
        "noise": np.array(0.1),
    }
    return {"X": X, "y": y, "Z": np.stack([X[:M], X[:M]]), **kernels}


def elsewhere(given: dict, seed: int = 1) -> dict:
    """The problem with random q in both layers, where a wrong constant shows."""
    rng, (D, M) = np.random.default_rng(seed), (given["X"].shape[1], given["Z"].shape[1])
    roots = np.tril(0.02 * rng.normal(size=(D + 1, M, M))) + 0.5 * np.eye(M)
    means = rng.normal(size=(D + 1, M))
    q = {"inner_mean": means[:D], "inner_root": roots[:D], "mean": means[D], "root": roots[D]}
    return given | q


def rows(size: Size = FULL) -> Iterator[Row]:
    """Every line of the table for deep GPs."""
    names = everyone("deep")
    yield from _same_work(size, names)
    yield _learning(size, names)
    for draws in size.draws:
        for dtype in size.precisions:
            yield from _step(size, names, draws, dtype)
    yield from importance_weighted(size)


def _given(size: Size) -> dict:
    return problem(size.n, size.M, size.D)


def importance_weighted(size: Size = FULL) -> Iterator[Row]:
    """Steps with K copies of each datum's latents: natural gradients for the last layer, Adam for
    the encoder and the rest.
    """
    for name, model in size.models.items():
        times = {K: _weighted_step(size, model, K) for K in size.copies}
        first, *more = times.values()
        told = ", ".join(f"{1e3 * seconds:.3g} ms at K = {K}" for K, seconds in times.items())
        told += f": {' and '.join(f'{seconds / first:.1f}' for seconds in more)} times the first"
        what = f"{name}, one step with importance weighting, M = {size.M}, B = {size.B}"
        yield Row(
            what,
            told,
            "reported",
            more[-1] / first,
            f"times K = {size.copies[0]}, at K = {size.copies[-1]}",
        )


def _weighted_step(size: Size, model, K: int) -> float:
    """Seconds: the difference of two runs, so that what a run does once cancels."""
    given, (fewer, more) = _given(size), size.weighted
    fixed = {
        "inducing": "subset",
        "num_inducing": size.M,
        "batch_size": size.B,
        "layers": pg.Layers(num_importance=K),
    }

    def run(steps):
        method = pg.SVGP(**fixed, max_steps=steps)
        return pg.fit(model, method, 0, given["X"], y=given["y"], throw=False).stats["run_seconds"]

    for steps in size.weighted:
        run(steps)  # compiles
    return (run(more) - run(fewer)) / (more - fewer)


def _same_work(size: Size, names) -> Iterator[Row]:
    """The bound at a random q, whose inner layer draws, or hardly: every library must have the same
    number.
    """
    (n, repeats), settings = size.bound, {"task": "deep_bound", "num_draws": 10, "chunk": 1000}
    given = elsewhere(problem(n, size.M, size.D))
    calm = given | {"variance": np.array([1e-10, 1.0])}
    for what, at, jitter, slack in (
        ("", given, 1e-6, 0.0),
        (" that hardly draws", calm, 1e-12, 0.01),
    ):
        answers = ask(at, settings | {"jitter": jitter, "repeats": repeats}, names)
        bounds, errors = zip(
            *[(v["bound"], v["standard_error"]) for v in answers.values()], strict=True
        )
        spread, error = max(bounds) - min(bounds), np.hypot.reduce(errors)
        if spread > 4.0 * error + slack:
            raise RuntimeError(f"the libraries do not do the same work: bounds {answers}")
        told = f"{spread:.1g} nats, standard error {error:.1g}, of {np.mean(bounds):.0f}"
        name = f"deep GP, bound at a random q{what}, largest difference"
        yield Row(name, told, "at most 4 standard errors", float(spread / error), "standard errors")


def _learning(size: Size, names) -> Row:
    """The bounds before the first and the last step, from the same start and on the same
    minibatches.
    """
    settings = {"task": "deep_step", "batch": size.B, "steps": size.steps[1], "repeats": 1}
    answers = ask(_given(size), settings, names)
    told = ", ".join(
        f"{k} {v['first_bound']:.0f} to {v['last_bound']:.0f}" for k, v in answers.items()
    )
    what = f"the same, bound of a minibatch over {size.steps[1]} steps at rate 0.01"
    return Row(
        what, told, "reported", answers.get("ppl_gp", {}).get("last_bound"), "nats at the end"
    )


def _step(size: Size, names, draws: int, dtype: str) -> Iterator[Row]:
    """Time a step, and compiling."""
    settings = {
        "task": "deep_step",
        "batch": size.B,
        "steps": size.steps[0],
        "repeats": size.repeats,
    }
    answers = ask(_given(size), settings | {"num_draws": draws, "dtype": dtype}, names)
    layers, how = f"deep GP {size.D}-{size.D}-1", f"draws = {draws}, {dtype}"
    what = f"{layers}, one Adam step, M = {size.M}, B = {size.B}, {how}"
    yield against_best(answers, 1e3, "ms").row(
        what, "at most 0.5" if dtype == "float64" else "reported"
    )
    told = {k: v["compile_seconds"] for k, v in answers.items()}
    compiling = ", ".join(f"{k} {seconds:.1f} s" for k, seconds in told.items())
    yield Row(f"compiling for it, {how}", compiling, "reported", told.get("ppl_gp"), "s")
