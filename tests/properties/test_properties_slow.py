"""Generated models: every answer is that of a second route, also at as many rows as some size of
the model.

As `test_properties.py`, which names the tools. Each part of a model by itself;
`test_properties_random_slow.py` has parts together.
"""

from dataclasses import replace

import jax.numpy as jnp
import method_checks as of_method
import numpy as np
import numpyro
import numpyro.distributions as dist
import property_checks as check
import pytest
import second_route as route
from generated_problem import LENGTHSCALE, Problem
from generated_properties import (  # noqa: F401
    _compiling_is_most_of_the_time,
    _few_compiled_functions,
    _seen,
    in_turn,
    test_a_rows_answers_do_not_depend_on_the_number_the_order_and_the_values_of_other_rows,
    test_evidence_and_posterior_of_f_are_those_of_a_second_route,
    test_log_densities_integrate_all_entries_of_a_row_on_a_fine_grid,
    test_predictions_integrate_the_likelihood_over_f_on_a_fine_grid,
)
from likelihood_families import FAMILIES
from model_generator import LAYOUTS, OUTPUTS, Spec, is_model

import ppl_gp as pg

pytestmark = pytest.mark.slow

_EQUAL = (("normal", 3), ("poisson", 5), ("bernoulli", 2))  # the number of outputs, of 5 rows
PARTS = [
    *(Spec(f, method=m) for f in FAMILIES for m in ("laplace", "ep", "vi")),
    *(
        Spec(f, layout, noise=noise, num=5, outputs=P, repeats=3)
        for layout in LAYOUTS
        for f, P in _EQUAL
        for noise in (("global", "outputs") if layout in OUTPUTS else ("global",))
    ),
    *(
        Spec("poisson", exposure=e)
        for e in ("positional", "keyword", "default", "default_keyword", "scalar")
    ),
    *(Spec("negative_binomial", exposure=e) for e in ("zero_dim", "option")),
    *(
        Spec("poisson", inputs=i, exposure="inside", columns=D)
        for i in ("dict", "tuple")
        for D in (2, 3)
    ),
    *(
        Spec("bernoulli", inputs=i, columns=3)
        for i in ("vector", "wide", "dict", "tuple", "float32")
    ),
    *(Spec(inputs="stations", groups=G, num=G) for G in (4, 7)),
    *(
        Spec(noise="table", layout=o, outputs=5, num=5)
        for o in ("outputs_inner", "outputs_outer", "bare_outer")
    ),
    *(
        Spec("poisson", o, mask=m)
        for m in ("handler", "obs_mask")
        for o in ("plain", "outputs_inner", "repeats_outer")
    ),
    *(
        Spec(layout=o, scale=s)
        for s in ("constant", "rows")
        for o in ("plain", "outputs_inner", "repeats_outer")
    ),
    *(
        Spec(f, factor=x)
        for f in ("normal", "bernoulli")
        for x in ("penalty", "shared", "observing")
    ),
    *(Spec(second=s, num=n) for s in ("blanks", "keyword", "dict", "tuple") for n in (5, 6)),
    *(Spec("poisson", effect="groups", groups=G, num=n) for G, n in ((3, 8), (6, 6))),
    *(Spec(inputs="wide", effect="columns", columns=D, num=n) for D, n in ((2, 8), (5, 5))),
    *(Spec("student_t", noise=n) for n in ("param", "constant")),
    Spec(factor="censored"),
]
SPECS = in_turn(PARTS)


@pytest.fixture(scope="module", params=SPECS, ids=str)
def spec(request):
    return request.param


def test_every_kind_of_size_is_a_number_of_rows_somewhere():
    asked = {name for s in SPECS for name in s.used if getattr(s, name) in s.rows}
    assert asked == {"num", "outputs", "repeats", "blanks", "groups", "columns"} and all(
        map(is_model, SPECS)
    )


MODES = [
    Spec("poisson", exposure="keyword", num=6),
    Spec("bernoulli", "repeats_outer", num=6, method="ep"),
    Spec("gamma", "outputs_outer", noise="outputs", num=6, outputs=2),
    Spec("normal", "outputs_inner", noise="outputs", num=6, outputs=6),
    Spec("negative_binomial", noise="param", num=6),
    Spec(second="blanks", num=5, method="vi"),
    Spec("poisson", effect="columns", inputs="wide", num=6, columns=2),
    Spec("probit", factor="shared", num=6),
]


@pytest.mark.parametrize("mode_of", MODES, ids=str)
def test_the_mode_of_the_evidence_times_the_priors_has_no_slope_and_restarts_keep_the_best(mode_of):
    of_method.check_mode(mode_of, restarts=4)


SAMPLED = [
    Spec(layout="outputs_outer", noise="outputs", outputs=3, num=6, rows=(3, 4)),
    Spec("poisson", exposure="default", num=5, rows=(5, 2)),
    Spec("bernoulli", "event_inner", noise="outputs", outputs=2, num=6, rows=(2, 3)),
    Spec("poisson", effect="groups", groups=3, num=6, rows=(3, 4)),
    Spec(inputs="wide", effect="columns", columns=2, num=6, rows=(2, 3)),
    Spec(noise="table", layout="outputs_inner", outputs=4, num=4, rows=(4, 3)),
]


@pytest.mark.parametrize(
    "method", [pg.NUTS(30, 20, 1), pg.EllipticalSlice(30, 20, 1)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("sampled", SAMPLED, ids=str)
def test_answers_of_samplers_are_the_mixture_over_their_own_draws_at_every_number_of_rows(
    sampled, method
):
    of_method.check_mixture(sampled, method)


_GAUSSIAN = [
    s for s in PARTS if s.family == "normal" and s.layout in ("plain", *OUTPUTS) and s.num == 5
]
SPARSE = [replace(s, num=6) for s in _GAUSSIAN[:6]]


@pytest.mark.parametrize("sparse", SPARSE, ids=str)
def test_inducing_variables_at_the_data_reach_their_optimum_at_every_number_of_rows(sparse):
    problem = Problem(sparse)
    rows = np.arange(sparse.num)
    method = pg.SVGP(
        inducing=jnp.asarray(problem.x[rows]),
        train_inducing=False,
        hyper=pg.Fixed(problem.hyper),
        max_steps=30,
    )
    optimum = check.inducing_posterior_of(problem)
    of_method.check_sparse(problem, check.fit_of(problem, method), optimum)


def level_and_spread(X, y=None):
    """Two functions a datum: its level and the logarithm of its standard deviation."""
    kernel = pg.kernels.RBF(1.0, LENGTHSCALE)
    f, g = (numpyro.sample(name, pg.GP(kernel, X)) for name in ("f", "g"))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g - 1.0)), obs=y)


def test_answers_with_two_functions_are_integrals_over_both_at_every_number_of_rows():
    problem = Problem(Spec())
    X, y = problem.x, problem.y[:, 0, 0]
    fit = pg.fit(
        level_and_spread,
        pg.SVGP(num_inducing=6, max_steps=60, batch_size=None),
        0,
        X[:12],
        y=y[:12],
    )
    for M in (1, 2, 3):
        rows = np.arange(10, 10 + M)
        found = fit.predict(X[rows])
        m, v = ({k: np.asarray(x[k]) for k in "fg"} for x in (found.f_mean, found.f_variance))
        g, weights = route.on_grid(m["g"], v["g"])
        spread = np.exp(2 * g - 2.0)
        given_g = np.exp(-0.5 * (y[rows] - m["f"]) ** 2 / (v["f"] + spread)) / np.sqrt(
            2 * np.pi * (v["f"] + spread)
        )
        density = np.sum(weights * given_g, 0)
        # f may be drawn too
        error = np.sqrt(np.sum(weights * (given_g - density) ** 2, 0) / 1000) / density + 0.06
        np.testing.assert_array_less(
            np.abs(fit.log_density(X[rows], y[rows]) - np.log(density)), 4 * error
        )
        noise = np.sum(weights * spread, 0)
        allowed = 5 * np.sqrt(2.0 / 1000) * (v["f"] + 3 * noise)
        np.testing.assert_array_less(np.abs(found.variance - v["f"] - noise), allowed)
