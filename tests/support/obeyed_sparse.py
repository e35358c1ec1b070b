"""Options of `SVGP` and of what it is given."""

from dataclasses import fields
from inspect import unwrap
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer.autoguide import AutoNormal
from obeyed import Caught, X, Y, by, by_slow, caught
from small_fits import HYPER, classifier

import ppl_gp as pg
from ppl_gp.infer.svgp import fit as svgp
from ppl_gp.infer.svgp import prepare
from ppl_gp.infer.svgp.problem import is_trained
from ppl_gp.infer.svgp.run import LongRun
from ppl_gp.infer.svgp.start import initial_latents
from ppl_gp.infer.svgp.step import Reached
from ppl_gp.sparse import families
from ppl_gp.sparse.bound import Batch
from ppl_gp.sparse.families import NaturalGaussian

RUNS = "test_long_runs::test_"


def latents(X, y=None):
    with numpyro.plate("data", X.shape[0]):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), jnp.stack([X[:, 0], h], 1)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


class Run(NamedTuple):
    """A run of `SVGP` before its first step."""

    problem: Any
    source: Any
    tol: float
    patience: int | None
    state: Any


def sparse(**options) -> pg.SVGP:
    """`SVGP` with each option where it belongs."""
    parts = {"training": pg.Training, "layers": pg.Layers, "expectation": pg.Expectation}
    for name, of in parts.items():
        own = {f.name for f in fields(of)} & options.keys()
        options[name] = of(**{k: options.pop(k) for k in own})
    return pg.SVGP(**options)


def begun(t, model=classifier, **options) -> Run:
    """A short run as it would begin; the width of q(u) is left as it is."""

    def started(problem, trace, hyper, variational, batch):
        return variational

    class Stopped:
        def __init__(self, *args):
            self.given = args

        def go(self):
            begun, *_ = self.given
            source, method = begun.subject.source, begun.method
            run = Run(begun.problem, source, method.tol, method.patience, begun.state)
            raise Caught((run,), {})

    hyper = pg.Fixed(HYPER if model is classifier else {})
    method = sparse(**{"num_inducing": 4, "inducing": "subset", "hyper": hyper, **options})
    with t.patch.context() as patch, pytest.raises(Caught) as found:
        patch.setattr(svgp, "LongRun", Stopped)
        patch.setattr(prepare, "started", started)
        pg.fit(model, method, 0, X, y=Y)
    return found.value.given[0]


def q_of(run: Run):
    return run.state.variational.q["f"]


def svgp_points(t):
    for num in (3, 5):
        assert begun(t, num_inducing=num).state.variational.variables["f"].num == num
    Z = np.ones((3, 2)) * [[1.0], [2.0], [3.0]]
    for train in (True, False):
        run = begun(t, inducing=Z, train_inducing=train)
        found = run.state.variational.variables["f"]
        np.testing.assert_array_equal(found.Z, Z)
        marks = is_trained(run.problem, run.state.free, run.state.variational)[1]
        assert marks.variables["f"].Z is train


def svgp_forms(t):
    made = {
        families.DiagonalGaussian: {"covariance": "diagonal"},
        families.FullGaussian: {"natural": False},
        NaturalGaussian: {},
    }
    for kind, options in made.items():
        assert type(q_of(begun(t, **options))) is kind


def svgp_collapsed(t):
    def regression(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    def begun(**options):
        method = pg.CollapsedSVGP(**{"num_inducing": 4, "inducing": "subset", **options})
        run = lambda: pg.fit(regression, method, 0, X, y=1.0 * Y)  # noqa: E731
        return caught(t, svgp, "climb", run).given

    problem, _, variables, _, tol, _ = begun(tol=0.02, max_steps=17, train_inducing=False)
    assert (problem.max_steps, problem.train_inducing, tol) == (17, False, 0.02)
    assert variables["f"].num == 4 and begun(inducing=X[:3])[2]["f"].num == 3
    points = [np.asarray(begun(inducing=k)[2]["f"].Z) for k in ("subset", "farthest")]
    assert not np.array_equal(*points)
    assert problem.fixed == {}
    assert float(begun(hyper=pg.Fixed({"variance": 2.0}))[0].fixed["variance"]) == 2.0


def svgp_hyper(t):
    fixed = begun(t)
    assert set(fixed.problem.fixed) == set(HYPER) and fixed.state.free == {}
    point = begun(t, hyper=pg.MAP(init=HYPER))
    assert point.problem.fixed == {}
    np.testing.assert_allclose([np.exp(point.state.free[k]) for k in HYPER], list(HYPER.values()))
    assert point.problem.guide is None
    drawn = begun(t, hyper=AutoNormal)
    assert drawn.problem.draws_hyper


def svgp_numbers(t):
    """Rates and sizes as numbers."""
    run = begun(
        t,
        batch_size=4,
        max_steps=77,
        learning_rate=0.02,
        natural_rate=0.3,
        warm_up=5,
        tol=0.125,
        patience=6,
        num_nodes=7,
        num_draws=8,
        beta=2.5,
    )
    problem = run.problem
    assert (run.source.batch_size, run.tol, run.patience) == (4, 0.125, 6)
    assert (problem.max_steps, problem.warm_up) == (77, 5)
    assert (problem.expectation.num_nodes, problem.expectation.num_draws) == (7, 8)
    assert float(problem.beta) == 2.5
    np.testing.assert_allclose(run.problem.learning_rate(0), 0.02)
    np.testing.assert_allclose(run.problem.natural_rate(0), 0.3)
    plain = begun(t)
    assert plain.source.batch_size == 9 and plain.problem.max_steps == 3000


def svgp_schedules(t):
    run = begun(
        t,
        learning_rate=lambda step: 0.5 + step,
        natural_rate=lambda step: 0.25 / (1 + step),
        optimiser=lambda rate: optax.sgd(rate),
    )
    assert float(run.problem.learning_rate(2)) == 2.5
    assert float(run.problem.natural_rate(4)) == 0.05
    optimiser, slope = run.problem.optax(jnp.asarray(2)), {"x": jnp.asarray(2.0)}
    step, _ = optimiser.update(slope, optimiser.init(slope), slope)
    np.testing.assert_allclose(step["x"], -5.0)


def svgp_tolerance(t):
    problem, *_, state = begun(t)  # whose slope and gap are zero
    bounds = np.linspace(0.0, 1e-3, 20)
    for tol, ended in ((1e-2, pg.Result.converged), (1e-5, None)):
        method = SimpleNamespace(tol=tol, patience=None)
        run = SimpleNamespace(problem=problem, begun=SimpleNamespace(method=method))
        assert unwrap(LongRun._ended)(run, Reached(state, bounds)) is ended


def svgp_devices(t):
    method = pg.SVGP(devices=1, num_inducing=4, inducing="subset")
    run = lambda: pg.fit(classifier, method, 0, X, y=Y)  # noqa: E731
    assert caught(t, prepare, "placement", run).given[0] == 1


def svgp_latents(t):
    free = begun(t, latents, latents=pg.Free()).state.variational.latents["h"]
    assert set(vars(free)) == {"packed"}
    run = begun(
        t, latents, num_importance=3, num_paths=4, expected_last=False, latents=pg.Amortised()
    )
    told = pg.Layers(num_importance=3, num_paths=4, expected_last=False)
    assert run.problem.layers == told
    assert hasattr(run.state.variational.latents["h"], "encoder")
    twice = begun(t, latents, num_importance=3, doubly_reparameterised=True)
    assert twice.problem.layers.doubly_reparameterised
    plain = begun(t, latents).problem
    assert plain.layers == pg.Layers() and float(plain.beta) == 1.0


def q_of_latents(t):
    with handlers.seed(rng_seed=0):
        trace = handlers.trace(latents).get_trace(jnp.asarray(X))
    batch = Batch((jnp.asarray(X),), {"y": jnp.asarray(Y)}, jnp.ones(9), None)
    data = (jax.random.key(1), 9, batch, True)
    site = trace["h"] | {"data_axis": -1}
    made = lambda config: initial_latents(config, site, *data)  # noqa: E731
    given = np.arange(9.0)[:, None]
    packed = made(pg.Free(init=given, scale=0.25)).packed
    np.testing.assert_allclose(packed, np.concatenate([given, np.full((9, 1), np.log(0.25))], 1))
    assert np.abs(made(pg.Free()).packed[:, 0]).max() < 1.0
    encoder = made(pg.Amortised(sees="x", width=5, depth=3))
    weights = [x.shape for x in jax.tree.leaves(encoder) if np.ndim(x) == 2]
    assert encoder.sees == "x" and weights == [(5, 2), (5, 5), (5, 5), (2, 5)]
    own = lambda row: jnp.zeros(2)  # noqa: E731
    assert made(pg.Amortised(encoder=own)).encoder is own
    assert made(pg.Amortised()).sees == "xy"


ROWS: dict[str, dict[str, list]] = {
    "SVGP": {
        **dict.fromkeys(("num_inducing", "inducing", "train_inducing"), [svgp_points]),
        "hyper": [svgp_hyper],
        **dict.fromkeys(("batch_size", "max_steps"), [svgp_numbers]),
        "learning_rate": [svgp_numbers, svgp_schedules],
        "tol": [svgp_numbers, svgp_tolerance],
        "patience": [svgp_numbers, by(RUNS + "patience_ends_a_run_that_no_longer_gains")],
        "training": [svgp_numbers, svgp_forms],
        "layers": [svgp_numbers, svgp_latents],
        "expectation": [svgp_numbers],
        "devices": [svgp_devices, by_slow("test_sharding::test_eight_devices")],
        "checkpoint": [by(RUNS + "checkpoints_change_nothing_and_keep_the_newest")],
    },
    "CollapsedSVGP": dict.fromkeys(
        ("num_inducing", "inducing", "train_inducing", "hyper", "max_steps", "tol"),
        [svgp_collapsed],
    ),
    "Training": {
        **dict.fromkeys(("covariance", "natural"), [svgp_forms]),
        "natural_rate": [svgp_numbers, svgp_schedules],
        "optimiser": [svgp_schedules],
        "warm_up": [
            svgp_numbers,
            by(
                "test_scales_and_statuses::test_the_optimiser_begins_anew_at_the_end_of_the_warm_up"
            ),
        ],
    },
    "Layers": {
        **dict.fromkeys(("latents", "num_paths", "num_importance"), [svgp_latents]),
        "expected_last": [svgp_latents],
        "doubly_reparameterised": [svgp_latents],
        "beta": [
            svgp_numbers,
            by("test_latent::test_paths_average_and_beta_is_linear_at_one_copy"),
        ],
    },
    "Expectation": {
        **dict.fromkeys(("num_nodes", "num_draws"), [svgp_numbers]),
        "additive": [by("test_layer_results::test_outputs_of_their_own_share_their_nodes")],
    },
    "Checkpoint": {
        **dict.fromkeys(
            ("folder", "every", "keep"),
            [by(RUNS + "checkpoints_change_nothing_and_keep_the_newest")],
        ),
        "resume": [by(RUNS + "resume_false_starts_anew_and_replaces_the_old_files")],
    },
    "Free": dict.fromkeys(("init", "scale"), [q_of_latents]),
    "Amortised": dict.fromkeys(("encoder", "sees", "width", "depth"), [q_of_latents]),
}
