"""Every member of `Result` is how some fit ends."""

import ast
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from ppl_gp.draws import Draws
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.hyper import grid
from ppl_gp.results.fit import Fit

X = np.linspace(-1.0, 1.0, 4)[:, None]
Y = np.array([0.3, -0.2, 0.5, 0.1])

# member -> a default test in which a fit ends so; `None`: a test below
ENDS = {
    "converged": "test_scales_and_statuses::test_a_scale_is_as_many_rows_under_the_local_bound",
    "max_steps": "test_scales_and_statuses::"
    "test_sweeps_are_counted_and_no_more_than_were_asked_for",
    "nonfinite": "test_map::test_a_density_that_is_never_finite_ends_at_once_as_nonfinite",
    "negative_curvature": "test_joint_mode::test_a_saddle_is_no_mode",
    "negative_cavity": "test_scales_and_statuses::"
    "test_an_improper_cavity_at_the_end_is_a_status_and_raises",
    "not_pointwise": None,
    "interrupted": "test_ctrl_c::test_a_map_fit_keeps_its_point_where_xla_changed_the_error",
    "not_mixed": None,
    "completed": "test_long_runs::test_streams_of_the_same_batches_give_the_same_fit",
    "stream_ended": "test_long_runs::test_generator_that_ends_early",
    "diverged": "test_long_runs::test_a_run_that_falls_below_its_start_has_diverged",
    "not_gaussian": None,
}
SAYS_NOTHING = ("test_a_scale_is_as_many_rows_under_the_local_bound",)  # it raises otherwise


def test_every_member_has_a_fit_that_ends_so():
    """In a test that runs by default, and that looks at the result."""
    assert set(ENDS) == {member.value for member in pg.Result}, (
        "no row for a result, or one too many"
    )
    for member, name in ENDS.items():
        if name is None:
            continue
        file, _, test = name.partition("::")
        (path,) = Path(__file__).parents[1].rglob(f"{file}.py")
        tree = ast.parse(path.read_text())
        (found,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == test)
        assert not any("mark.slow" in ast.unparse(d) for d in found.decorator_list), name
        assert test in SAYS_NOTHING or member in ast.unparse(found), name


def test_chains_of_five_draws_have_not_mixed():
    def mean(y):
        m = numpyro.sample("m", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(m, 1.0).expand([4]).to_event(1), obs=y)

    method = pg.NUTS(num_warmup=2, num_samples=5, num_chains=1)
    with pytest.raises(pg.FitError, match="not_mixed") as caught:
        pg.fit(mean, method, 0, Y)
    assert caught.value.fit.hyper["m"].shape == (5,)


def flat_topped(X, y=None):
    """A hyperparameter whose curvature at the mode says nothing of its width."""
    w = numpyro.sample("w", dist.Normal(0.0, 10.0))
    numpyro.factor("quartic", -(w**4))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


@pytest.mark.slow
def test_a_grid_about_a_flat_top_is_not_gaussian():
    fit = pg.fit(flat_topped, pg.Laplace(hyper=pg.Grid()), 0, X, y=Y, throw=False)
    assert fit.result is pg.Result.not_gaussian
    with pytest.raises(pg.FitError, match="not_gaussian"):
        pg.fit(flat_topped, pg.Laplace(hyper=pg.Grid()), 0, X, y=Y)


@pytest.mark.parametrize(
    ("reach", "result"),
    [
        ({}, "converged"),
        ({"grid_effective": 1.9}, "not_gaussian"),
        ({"grid_missing_mass": 0.11}, "not_gaussian"),
        ({"grid_stretch": np.array([1.0, 1.0 / 3.0])}, "not_gaussian"),
        ({"grid_stretch": np.array([2.9, 0.4])}, "converged"),
    ],
)
def test_a_grid_that_does_not_hold_the_posterior_is_not_gaussian(reach, result):
    told = {"grid_effective": 7.0, "grid_effective_gaussian": 10.0, "grid_missing_mass": 0.09}
    assert grid._ended(pg.Result.converged, told | reach, 0.0) == result
    assert grid._ended(pg.Result.max_steps, told | reach, 0.0) == "max_steps"
    assert grid._ended(pg.Result.converged, told | reach, -np.inf) == "nonfinite"


def test_a_method_of_ones_own_may_find_a_likelihood_that_is_not_pointwise():
    """No method of the package ends so: they raise `NotPointwiseError` before any work."""

    class Finds:
        """It looks at the likelihood on its way."""

    @run_method.register
    def _(method: Finds, model, rng_key, args, kwargs, progress) -> Fit:
        return Fit(
            model=model,
            method=method,
            args=args,
            kwargs=kwargs,
            draws=Draws.one({"m": jnp.zeros(())}, {}),
            log_evidence=None,
            result=pg.Result.not_pointwise,
            stats={},
        )

    def model(y):
        m = numpyro.sample("m", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(m, 1.0).expand([4]).to_event(1), obs=y)

    with pytest.raises(pg.FitError, match="not_pointwise") as caught:
        pg.fit(model, Finds(), 0, Y)
    assert "pg.check(model, ...) lists the methods" in str(
        caught.value
    ) and caught.value.help.endswith("#not_pointwise")
    used = [
        path.name
        for path in Path(pg.__file__).parent.rglob("*.py")
        if "Result.not_pointwise" in path.read_text()
    ]
    assert used == ["errors.py"], "a method ends so: give it a row above"
