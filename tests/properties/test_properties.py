"""Thirty generated models: every answer is that of a second route in NumPy, also where two sizes
are equal by chance.

`model_generator.Spec` names the parts of a model, `generated_problem.Problem` is the model and its
mathematics, `property_checks` compares. `test_properties_slow.py` asks more of more models.
"""

import copy

import jax.numpy as jnp
import method_checks as of_method
import numpy as np
import numpyro
import numpyro.distributions as dist
import property_checks as check
import pytest
import second_route as route
from generated_problem import JITTER, LENGTHSCALE, VARIANCE, Problem
from model_generator import Spec

import ppl_gp as pg

# One number of new rows each: one that a plate, a table, an event or the columns of X have too.
SPECS = [
    Spec(layout="outputs_inner", noise="outputs", rows=(3,)),
    Spec("poisson", "outputs_outer", noise="outputs", exposure="keyword", outputs=4, rows=(4,)),
    Spec("bernoulli", "event_inner", noise="outputs", rows=(3,)),
    Spec("gamma", "bare_inner", noise="outputs", rows=(3,)),
    Spec("student_t", "bare_outer", noise="outputs", num=6, outputs=6, rows=(6,)),
    Spec(layout="repeats_and_outputs", noise="outputs", rows=(3,)),
    Spec("probit", "repeats_outer", exposure="positional", repeats=3, rows=(3,)),
    Spec("negative_binomial", "repeats_inner", repeats=5, num=5, rows=(5,)),
    Spec(layout="outputs_inner", noise="table", outputs=5, num=5, rows=(5,)),
    Spec(layout="outputs_outer", noise="outputs", mask="handler", outputs=5, num=5, rows=(5,)),
    Spec("bernoulli", "outputs_inner", mask="obs_mask", outputs=2, rows=(2,)),
    Spec("lognormal", "one_event", rows=(1,)),
    Spec("poisson", exposure="default", rows=(3,)),
    Spec("poisson", exposure="default_keyword", inputs="wide", rows=(2,)),
    Spec("binomial", exposure="inside", inputs="dict", rows=(2,)),
    Spec("poisson", exposure="inside", inputs="tuple", rows=(3,)),
    Spec("weibull", exposure="zero_dim", inputs="vector", rows=(1,)),
    Spec("beta", exposure="option", rows=(2,)),
    Spec("ordinal", exposure="scalar", rows=(3,)),
    Spec(inputs="float32", noise="param", rows=(2,)),
    Spec("zero_inflated", inputs="stations", groups=5, num=5, rows=(5,)),
    Spec("categorical", effect="groups", rows=(3,)),
    Spec(inputs="wide", effect="columns", columns=4, num=4, rows=(4,)),
    Spec("bernoulli", scale="rows", factor="penalty", rows=(1,)),
    Spec(factor="censored", rows=(2,)),
    Spec(second="blanks", factor="none", rows=(5,)),
    Spec("poisson", second="keyword", mask="handler", rows=(2,)),
    Spec(second="dict", layout="outputs_outer", rows=(3,)),
    Spec("bernoulli", second="tuple", method="ep", rows=(2,)),
    Spec("saturating", method="vi", noise="outputs", layout="outputs_inner", rows=(3,)),
]


@pytest.fixture(scope="module", params=SPECS, ids=str)
def spec(request):
    return request.param


def test_evidence_and_posterior_of_f_are_those_of_a_second_route(spec):
    check.check_posterior(spec)


def test_predictions_integrate_the_likelihood_over_f_on_a_fine_grid(spec):
    check.check_predictions(spec)


@pytest.mark.one_case
def test_log_densities_integrate_all_entries_of_a_row_on_a_fine_grid(spec):
    check.check_log_densities(spec)


BY_NUMBER = [
    Spec(layout="outputs_inner", noise="outputs", outputs=2, rows=(4, 2)),
    Spec("bernoulli", second="blanks", blanks=3, rows=(4, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", BY_NUMBER, ids=str)
def test_a_rows_answers_do_not_depend_on_the_number_the_order_and_the_values_of_other_rows(spec):
    check.check_companions(spec)


ROW_WISE = [
    Spec("poisson", exposure=e) for e in ("positional", "keyword", "default", "default_keyword")
]


@pytest.mark.parametrize("spec", ROW_WISE, ids=str)
def test_a_row_wise_argument_that_is_not_given_again_is_asked_for_by_name(spec):
    problem, fit = check.fitted(spec)
    with pytest.raises(pg.DataError, match=r"\be\b"):
        fit.predict(problem.x[:3])
    with pytest.raises(pg.DataError, match=r"\be\b"):
        fit.log_density(problem.x[:3], problem.to_site(problem.y[:3]))


@pytest.mark.one_case
@pytest.mark.parametrize("layout", ["plain", "outputs_outer"])
def test_masks_can_be_left_out_at_prediction_and_then_every_entry_counts(layout):
    spec = Spec(mask="handler", layout=layout, rows=(4,))
    problem, fit = check.fitted(spec)
    rows = check.rows_of(spec, 4)
    masked, free = check.predicted(problem, fit, rows), fit.predict(problem.x[rows])
    np.testing.assert_allclose(free.mean, masked.mean, rtol=1e-10)
    unmasked = copy.copy(problem)
    unmasked.mask = np.ones_like(problem.mask)
    expected = check.integrated_density(unmasked, rows, free.f_mean, free.f_variance)
    check.close(
        fit.log_density(problem.x[rows], problem.to_site(problem.y[rows])),
        expected,
        spec,
        "log density",
    )


@pytest.mark.slow
def test_densities_of_a_model_with_a_penalty_integrate_to_one():
    spec = Spec(factor="penalty")
    problem, fit = check.fitted(spec)
    y = np.linspace(-12.0, 12.0, 241)
    X = np.repeat(problem.x[:1], len(y), 0)
    assert np.sum(np.exp(fit.log_density(X, y))) * (y[1] - y[0]) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.slow
def test_draws_have_the_predictions_moments():
    spec = Spec("poisson", "outputs_outer", noise="outputs", outputs=3)
    problem, fit = check.fitted(spec)
    rows, num = check.rows_of(spec, 3), 4000
    args, kwargs = problem.arguments(rows)
    draws = np.asarray(fit.sample(0, args[0], num, *args[1:], **kwargs).y)
    mean, variance = at_second_route(spec, rows)
    np.testing.assert_array_less(np.abs(draws.mean(0) - mean), 5 * np.sqrt(variance / num))
    fourth = np.mean((draws - draws.mean(0)) ** 4, 0)
    np.testing.assert_array_less(np.abs(draws.var(0) - variance), 6 * np.sqrt(fourth / num))


def at_second_route(spec, rows):
    """(mean, variance) of y in the site's shape, the posterior in NumPy as well."""
    problem = Problem(spec)
    f = check.at_new_rows(problem, check.second_posterior(spec), rows)
    return [problem.to_site(m) for m in check.integrated_moments(problem, rows, *f)]


@pytest.mark.slow
def test_the_mode_of_the_evidence_times_the_priors_has_no_slope_and_restarts_keep_the_best():
    spec = Spec("student_t", "outputs_inner", noise="outputs", num=8, outputs=2)
    of_method.check_mode(spec, restarts=2)


def two_modes(X, y=None):
    """The evidence knows a^2 only, so that the mode that is found is the one on the side of the
    start.
    """
    a = numpyro.sample("a", dist.Normal(0.0, 2.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(VARIANCE, LENGTHSCALE), X, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + a**2, 0.3), obs=y)


@pytest.mark.parametrize("start", [1.5, -1.5])
def test_the_search_starts_where_init_says(start):
    problem = Problem(Spec())
    X, y = problem.x[:8], problem.y[:8, 0, 0] + 3.0
    found = float(
        pg.fit(two_modes, pg.Laplace(hyper=pg.MAP(init={"a": start})), 0, X, y=y).hyper["a"]
    )
    assert found * start > 1.0


def effects_of_groups(X, group, y=None):
    """Effects with a scale that is sampled too: jointly, their density has no bound where both go
    to zero.
    """
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(VARIANCE, LENGTHSCALE), X))
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0.0, tau))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[group], 0.3), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [pg.Laplace(), pg.EP(), pg.VI(), pg.SVGP(num_inducing=4, max_steps=5)],
    ids=lambda m: type(m).__name__,
)
def test_effects_are_not_maximised_together_with_their_scale(method):
    problem = Problem(Spec())
    data = (problem.x[:9], problem.group[:9])
    fit = pg.fit(effects_of_groups, method, 0, *data, y=problem.y[:9, 0, 0])
    assert "u" not in fit.hyper and set(fit.sites) == {"u"}


NOISE = 0.3


def test_a_number_that_the_model_reads_from_outside_is_that_of_the_fit_and_not_of_an_earlier_one(
    monkeypatch,
):
    variance = VARIANCE

    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, LENGTHSCALE), X, jitter=JITTER))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    problem = Problem(Spec())
    X, y = problem.x[:8], problem.y[:8, 0, 0]
    for variance, noise in ((1.3, 0.3), (4.0, 0.3), (4.0, 0.6)):  # noqa: B007  (the closure reads it)
        monkeypatch.setitem(globals(), "NOISE", noise)
        found = pg.fit(model, pg.Laplace(hyper=pg.Fixed()), 0, X, y=y).log_evidence
        assert found == pytest.approx(exact_evidence(X, y, variance, noise), abs=1e-6)


def exact_evidence(X, y, variance, noise):
    """log N(y; 0, K + noise^2 I), nats."""
    K = variance * np.exp(-0.5 * (X - X.T) ** 2 / LENGTHSCALE**2) + (JITTER + noise**2) * np.eye(
        len(y)
    )
    return -0.5 * (y @ np.linalg.solve(K, y) + np.linalg.slogdet(K)[1] + len(y) * np.log(2 * np.pi))


@pytest.mark.slow
def test_answers_of_nuts_are_the_mixture_over_its_own_draws_at_every_number_of_rows():
    spec = Spec(layout="outputs_inner", noise="outputs", outputs=2, num=6, rows=(2,))
    of_method.check_mixture(spec, pg.NUTS(30, 20, 1))


@pytest.mark.slow
def test_inducing_variables_at_the_data_reach_their_optimum_at_every_number_of_rows():
    spec = Spec(layout="outputs_inner", noise="outputs", outputs=3, num=6, rows=(3,))
    problem = Problem(spec)
    method = pg.SVGP(
        inducing=jnp.asarray(problem.x[:6]),
        train_inducing=False,
        hyper=pg.Fixed(problem.hyper),
        max_steps=30,
    )
    optimum = check.inducing_posterior_of(problem)
    of_method.check_sparse(problem, check.fit_of(problem, method), optimum)


def test_the_second_route_itself_is_exact_for_a_gaussian_likelihood():
    problem = Problem(Spec())
    X, y = problem.x[:9], problem.y[:9, 0, 0]
    exact = exact_evidence(X, y, VARIANCE, problem.s[0])
    for method in route.METHODS.values():
        q = method(check.prior_of(problem), np.zeros(9), problem.log_lik(np.arange(9)))
        assert q.log_evidence == pytest.approx(exact, abs=1e-8)
