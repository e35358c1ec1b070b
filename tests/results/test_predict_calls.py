"""The ways in which users write a call: each gives the answer of the plain call, or a typed error
whose remedy runs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import multivariate_normal

import ppl_gp as pg
from ppl_gp.draws import Draws
from ppl_gp.errors import Result
from ppl_gp.results.fit import Fit
from ppl_gp.results.predict import prediction, scores

N = 12
X = np.linspace(0.0, 3.0, N)
COUNTS = np.random.default_rng(0).poisson(2.0, N)
NEW, SEEN, GROUP = X[:3] + 0.1, COUNTS[:3], np.arange(N) % 3


def counts(X, exposure, group, y=None):
    u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(exposure * jnp.exp(f + u[group])), obs=y)


def renamed(X, exposure, counts=None, seen=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        mask = True if seen is None else seen
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("n", dist.Poisson(exposure * jnp.exp(f)), obs=counts)


@pytest.fixture(scope="module")
def fit():
    return pg.fit(counts, pg.Laplace(), 0, X, np.full(N, 2.0), GROUP, y=COUNTS)


@pytest.mark.parametrize("number", [2.0, 2, np.float64(2.0), jnp.asarray(2.0)], ids=repr)
def test_a_number_stands_for_all_rows(fit, number):
    rows = {"group": GROUP[:3]}
    ask = {
        "predict": lambda e: fit.predict(NEW, exposure=e, **rows).mean,
        "log_density": lambda e: fit.log_density(NEW, SEEN, exposure=e, **rows),
        "components": lambda e: fit.components(NEW, exposure=e, **rows)["total"].mean,
        "sample": lambda e: fit.sample(0, NEW, 3, exposure=e, **rows).y,
        "tree": lambda e: (
            fit.to_datatree(num_draws=3, predictions={"X": NEW, "exposure": e, **rows})[
                "predictions"
            ]["y"].values
        ),
    }
    for name, verb in ask.items():
        np.testing.assert_allclose(verb(number), verb(np.full(3, 2.0)), rtol=1e-6, err_msg=name)


def test_a_number_stands_for_very_many_rows():
    model = pg.fit(renamed, pg.Laplace(), 0, X, np.full(N, 2.0), counts=COUNTS)
    many = np.linspace(0.0, 3.0, 10_050)
    found, some = (model.predict(x, exposure=jnp.asarray(2.0)).mean for x in (many, many[-3:]))
    np.testing.assert_allclose(found[-3:], some, rtol=1e-6)


def test_given_by_name_a_verb_s_own_argument_leaves_the_positions_to_the_model(fit):
    by_position, by_name = (np.full(3, 2.0), GROUP[:3]), {"exposure": 2.0, "group": GROUP[:3]}
    np.testing.assert_array_equal(
        fit.log_density(NEW, *by_position, y_new=SEEN), fit.log_density(NEW, SEEN, **by_name)
    )
    np.testing.assert_array_equal(
        fit.sample(0, NEW, *by_position, num_samples=3).y, fit.sample(0, NEW, 3, **by_name).y
    )
    with pytest.raises(TypeError, match="num_samples"):
        fit.sample(0, NEW, **by_name)


def test_observations_by_position_by_name_and_under_another_name(fit):
    rows = {"exposure": np.full(3, 2.0), "group": GROUP[:3]}
    want = fit.log_density(NEW, SEEN, **rows)
    np.testing.assert_array_equal(fit.log_density(NEW, y=SEEN, **rows), want)
    with pytest.raises(pg.DataError, match="given twice.*Give them once"):
        fit.log_density(NEW, SEEN, y=SEEN, **rows)
    with pytest.raises(pg.DataError, match="needs y_new"):
        fit.log_density(NEW, **rows)
    other = pg.fit(
        renamed, pg.Laplace(), 0, X, np.full(N, 2.0), counts=COUNTS, seen=np.ones(N, bool)
    )
    want = other.log_density(NEW, counts=SEEN, exposure=2.0)
    np.testing.assert_allclose(other.log_density(NEW, SEEN, exposure=2.0), want, rtol=1e-6)
    # without its mask nothing tells which of two arguments is the observations; the remedy runs
    other = pg.fit(renamed, pg.Laplace(), 0, X, np.full(N, 2.0), counts=COUNTS)
    with pytest.raises(pg.DataError, match=r"by name, counts=..., after X_new"):
        other.log_density(NEW, SEEN, exposure=2.0)
    np.testing.assert_allclose(other.log_density(NEW, counts=SEEN, exposure=2.0), want, rtol=1e-4)


def test_inputs_by_the_name_that_the_model_gives_them(fit):
    """They are taken so by `fit`, and were a bare TypeError of every verb."""
    rows = {"exposure": 2.0, "group": GROUP[:3]}
    for verb in (
        lambda *new, **named: fit.predict(*new, **rows, **named).mean,
        lambda *new, **named: fit.log_density(*new, y=SEEN, **rows, **named),
        lambda *new, **named: fit.sample(0, *new, num_samples=3, **rows, **named).y,
    ):
        np.testing.assert_array_equal(verb(X=NEW), verb(NEW))
        with pytest.raises(pg.DataError, match="by position and by keyword"):
            verb(NEW, X=NEW)


def test_the_posterior_of_several_functions_says_what_to_call():
    def two(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        g = numpyro.sample("g", pg.GP(pg.kernels.RBF(1.0, 3.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + g, 0.3), obs=y)

    fit = pg.fit(two, pg.Laplace(), 0, X, y=np.sin(X))
    with pytest.raises(pg.ModelError, match=r"fit.posterior\['f'\]\(X_new\)"):
        fit.posterior(NEW)
    assert fit.posterior["f"](NEW).mean.shape == (3,)


def days_and_doses(day, dose, group, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 3.0), day))
    with numpyro.plate("data", day.shape[0]):
        numpyro.sample("y", dist.Normal(f + b * dose + u[group], 0.3), obs=y)


@pytest.mark.parametrize("kind", [int, np.uint8, bool])
def test_columns_that_were_whole_in_training_take_any_new_number(kind):
    """They were rounded: a prediction for day 1.5 was that for day 2."""
    rng = np.random.default_rng(5)
    day, dose, group = np.arange(12), rng.integers(0, 2, 12), np.arange(12) % 3
    y, new = rng.normal(size=12), (np.array([1.5, 7.2, 20.0]), np.array([0.4, 0.0, 1.7]))

    def covariance(a, b):
        (s, c, g), (t, d, h) = a, b
        same = (np.asarray(g)[:, None] == np.asarray(h)) * 1.0
        return np.exp(-((s[:, None] - t) ** 2) / 18.0) + np.outer(c, d) + same

    old, there = (day, dose, group), (*new, np.array([0, 2, 1]))
    C, k = covariance(old, old) + 0.09 * np.eye(12), covariance(there, old)
    fit = pg.fit(days_and_doses, pg.Laplace(), 0, day, dose.astype(kind), group, y=y)
    found = fit.predict(*there)
    np.testing.assert_allclose(found.mean, k @ np.linalg.solve(C, y), atol=1e-5)
    explained = np.sum(k * np.linalg.solve(C, k.T).T, 1)
    np.testing.assert_allclose(found.f_variance, 2.0 + new[1] ** 2 - explained, atol=1e-5)
    with pytest.raises(pg.DataError, match="integer"):  # an index is no number
        fit.predict(*new, np.array([0.5, 1.0, 2.0]))


def times(X, e, y=None, kind="scale", has_function=True):
    """A parameter that an argument multiplies, which NumPyro takes in training."""
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X)) if has_function else b * X
    with numpyro.plate("data", X.shape[0]):
        if kind == "probs":
            numpyro.sample("y", dist.BernoulliProbs(e * jax.nn.sigmoid(f)), obs=y)
        elif kind == "total_count":
            numpyro.sample("y", dist.Binomial((9 * e).astype(int), logits=f), obs=y)
        elif kind == "inner scale":  # of a distribution in another one
            numpyro.sample("y", dist.TruncatedNormal(f, e, low=-9.0, high=9.0), obs=y)
        elif kind == "prior scale":  # of an effect that is integrated
            h = numpyro.sample("h", dist.Normal(0.0, e))
            numpyro.sample("y", dist.Poisson(jnp.exp(f + h)), obs=y)
        else:
            numpyro.sample("y", dist.Normal(f + b, 0.5 * e), obs=y)


REFUSING = [
    (pg.Laplace(), "scale", True),
    (pg.Laplace(), "probs", True),
    (pg.MeanField(), "scale", False),  # integrated exactly
    (pg.Laplace(), "inner scale", True),
    (pg.Laplace(), "prior scale", True),
    pytest.param(pg.Laplace(), "total_count", True, marks=pytest.mark.slow),
    pytest.param(pg.SVGP(num_inducing=4, max_steps=3), "prior scale", True, marks=pytest.mark.slow),
    pytest.param(pg.SVGP(num_inducing=4, max_steps=3), "inner scale", True, marks=pytest.mark.slow),
    pytest.param(pg.EP(), "prior scale", True, marks=pytest.mark.slow),
    pytest.param(pg.SVGP(num_inducing=4, max_steps=3), "scale", True, marks=pytest.mark.slow),
    pytest.param(pg.NUTS(num_warmup=3, num_samples=3), "probs", True, marks=pytest.mark.slow),
]
REFUSED = {"probs": [0.5, 2.5, 0.5]}  # the second row; of the others:
NEGATIVE = [1.0, -1.0, 1.0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "kind", "has_function"), REFUSING)
def test_a_parameter_that_numpyro_refuses_in_a_new_row(method, kind, has_function):
    """As in a fit: a variance is the scale's square, and p > 1 has a mean; neither is an answer."""
    args, rest = (X, np.full(N, 0.9)), {"kind": kind, "has_function": has_function}
    fit = pg.fit(times, method, 0, *args, y=(COUNTS > 2).astype(int), **rest, throw=False)
    bad, good = np.array(REFUSED.get(kind, NEGATIVE)), np.full(3, 0.9)
    name = kind.split()[-1]
    for verb in (
        lambda e: fit.predict(NEW, e).mean,
        lambda e: fit.log_density(NEW, (SEEN > 2).astype(int), e),
        lambda e: fit.sample(0, NEW, 2, e).y,
        lambda e: fit.predict(NEW, e).interval(0.9),
    ):
        assert np.all(np.isfinite(verb(good)))
        with pytest.raises(pg.DataError, match=rf"invalid {name} parameter.*\(times, line \d+\)"):
            verb(bad)


def test_a_parameter_that_numpyro_refuses_at_some_draws():
    def model(X, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(0.0, 1.0 + slope * X), obs=y)

    method = pg.NUTS(num_warmup=50, num_samples=50, num_chains=1)
    fit = pg.fit(model, method, 0, 0.1 * X, y=np.sin(X))
    share = np.mean(1.0 - 0.7 * np.asarray(fit.hyper["slope"]) <= 0.0)
    assert 0.0 < share < 1.0
    with pytest.warns(UserWarning, match=f"refuses parameters .* at {share:.0%} of the draws"):
        fit.predict(np.array([-0.7]))


def test_observations_that_some_draws_exclude_have_a_density():
    """y was held against the support of the first draw alone."""

    def model(X, y=None):
        top = numpyro.sample("top", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Uniform(0.0, top), obs=y)

    draws = Draws.equal({"top": jnp.array([1.0, 4.0])}, {})
    known = {"model": model, "method": pg.NUTS(), "args": (X,), "kwargs": {"y": X**2}, "stats": {}}
    fit = Fit(draws=draws, log_evidence=None, result=Result.completed, sampled=True, **known)
    found, _ = fit.log_density(NEW[:2], np.array([0.5, 2.0]), with_error=True)
    np.testing.assert_allclose(found, np.log([(1.0 + 0.25) / 2.0, 0.25 / 2.0]), rtol=1e-12)


def _effects(X, a, b, y=None, scale=1.0, seen=None):
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    mask = True if seen is None else seen > 0
    with numpyro.plate("data", X.shape[0]), numpyro.handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(scale * (f + beta * (a + b)), 0.5), obs=y)


TRUE, OTHER = np.arange(N) % 2 == 0, np.arange(N) % 3 == 0
FIXED = pg.EP(hyper=pg.Fixed({}))


def test_truth_values_add_up_as_truth_values():
    """They were numbers in the predictor's prior: 2 for True + True, 15 nats off."""
    y = np.sin(X)
    fit = pg.fit(_effects, FIXED, 0, X, TRUE, OTHER, y=y)
    d = np.asarray(TRUE | OTHER, float)
    K = np.asarray(pg.kernels.RBF(1.0, 1.0)(X, X)) + 1e-8 * np.eye(N)
    C = K + 4.0 * np.outer(d, d) + 0.25 * np.eye(N)
    assert abs(fit.log_evidence - multivariate_normal(np.zeros(N), C).logpdf(y)) < 1e-7
    with pytest.raises(pg.DataError, match="'a' was bool in training and has 0.5 now"):
        fit.predict(NEW, np.full(3, 0.5), OTHER[:3])


def test_an_argument_that_training_left_out_is_refused():
    """A model with a predictor ignored it."""
    fit = pg.fit(_effects, FIXED, 0, X, X, X**2, y=np.sin(X))
    for left_out in ({"scale": 3.0}, {"scale": np.full(3, 3.0)}, {"scales": 3.0}):
        with pytest.raises(pg.DataError, match="not given in training"):
            fit.predict(NEW, NEW, NEW**2, **left_out)


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_mask_by_numbers_that_are_left_out_counts_every_new_row(first):
    """It was that of training's first row, of this fit or of one before."""
    seen = np.where(np.arange(N) == 0, first, 1.0)
    fit = pg.fit(_effects, FIXED, 0, X, X, X**2, y=np.sin(X), seen=seen)
    given = fit.log_density(NEW, np.sin(NEW), a=NEW, b=NEW**2, seen=np.ones(3))
    found = fit.log_density(NEW, np.sin(NEW), a=NEW, b=NEW**2)
    np.testing.assert_allclose(found, given, rtol=1e-10)
    assert np.all(np.asarray(given) != 0)


def test_one_new_row_beside_a_large_covariate_is_as_with_others():
    """The smaller of two functions was cut off by the rounding of the larger one."""

    def model(X, t, y=None):
        f, g = (numpyro.sample(k, pg.GP(pg.kernels.RBF(1.0, 1.0), X)) for k in "fg")
        beta = numpyro.sample("beta", dist.Normal(0.0, 1e-8))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + beta * t, jnp.exp(g)), obs=y)

    t = 1e8 * np.cos(X)
    fit = pg.fit(model, pg.VI(hyper=pg.Fixed({})), 0, X, t, y=np.sin(X), throw=False)
    alone, beside = fit.predict(X[:1], t[:1]), fit.predict(X[:2], t[:2])
    np.testing.assert_allclose(alone.sd, beside.sd[:1], rtol=1e-6)


@pytest.mark.parametrize("level", [False, True])
def test_a_site_that_sees_the_observations_of_another_is_drawn_with_it(level):
    """It was predicted at one draw of them."""

    def model(X, y=None, z=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        if level:
            f = f + numpyro.sample("level", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            seen = numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
            numpyro.sample("z", dist.Normal(2.0 * seen, 0.1), obs=z)

    data = {"y": np.sin(X), "z": 2.0 * np.sin(X)}
    if level:  # the integrated model runs the two sites apart
        with pytest.raises(pg.DataError, match="site 'y' observes: a fit by pg.NUTS"):
            pg.fit(model, FIXED, 0, X, **data).predict(NEW)
    method = pg.NUTS(num_warmup=100, num_samples=100, num_chains=1)
    fit = pg.fit(model, method if level else FIXED, 0, X, **data)
    with pytest.raises(pg.DataError, match="Draw them together"):
        fit.predict(NEW)
    y, z = (np.asarray(fit.sample(0, NEW, 4000).y[k]) for k in "yz")
    np.testing.assert_allclose(np.std(z - 2.0 * y, axis=0), 0.1, rtol=0.05)


def test_many_rows_of_binomials_and_a_long_table_are_as_few(monkeypatch):
    """Chunks with one total had outcomes, others none; a first argument that is a table was asked
    for in chunks that were as long, without end.
    """
    monkeypatch.setattr(prediction, "ROWS", 7)
    monkeypatch.setattr(scores, "ROWS", 7, raising=False)

    def shares(X, n, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Binomial(n, logits=w * X), obs=y)

    n = np.where(np.arange(N) < 7, 3, 4)
    fit = pg.fit(shares, FIXED, 0, X, n, y=np.ones(N))
    found, few = fit.predict(X, n), fit.predict(X[-3:], n[-3:])
    assert found.probs is None and found.mean.shape == (N,)
    np.testing.assert_allclose(found.mean[-3:], few.mean, rtol=1e-6)

    def looked_up(table, item, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 3.0))
        with numpyro.plate("data", item.shape[0]):
            numpyro.sample("y", dist.Normal(table[item] * w, 0.3), obs=y)

    table, item = np.linspace(0.0, 1.0, 20), np.arange(N)
    fit = pg.fit(looked_up, FIXED, 0, table, item, y=np.sin(X))
    found = fit.predict(table, np.array([1, 2, 3]))
    np.testing.assert_allclose(found.mean, fit.predict(table, item).mean[1:4], rtol=1e-10)


def test_a_warning_names_rows_of_the_whole_table(fit, monkeypatch):
    """It named their places in a chunk, and rows of two chunks twice."""

    def few_draws_at_nine(fit, num_draws, X, observed, kwargs):
        y, *_ = observed
        return jnp.zeros(len(y)), jnp.zeros(len(y)), jnp.where(y == 9, 1.0, 0.0)

    monkeypatch.setattr(prediction, "ROWS", 7)
    monkeypatch.setattr(scores, "_scores", few_draws_at_nine)
    y = np.where(np.arange(N) == N - 2, 9, 0)
    with pytest.warns(UserWarning, match=rf"row\(s\) \[{N - 2}\] rest on very few draws"):
        fit.log_density(X, y, exposure=np.ones(N), group=GROUP)


def test_a_mask_by_the_observations_of_another_site_is_no_chain():
    """A hurdle: whether anything was bought, and how much of what was."""

    def hurdle(X, bought=None, amount=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            any_ = numpyro.sample("bought", dist.Bernoulli(logits=f), obs=bought)
            with numpyro.handlers.mask(mask=any_ == 1):
                numpyro.sample("amount", dist.LogNormal(f, 0.3), obs=amount)

    bought = (COUNTS > 1).astype(int)
    fit = pg.fit(hurdle, FIXED, 0, X, bought=bought, amount=np.exp(np.sin(X)))
    found = fit.predict(NEW)
    np.testing.assert_allclose(
        found.mean["amount"], np.exp(found.f_mean + 0.5 * (found.f_variance + 0.09)), rtol=1e-4
    )


def test_observations_by_position_are_those_by_name():
    """A picture said that there are no training data, and a list was an option."""

    def curve(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    held = pg.Laplace(hyper=pg.Fixed({}))
    fit = pg.fit(curve, held, 0, X, np.sin(X).tolist())
    assert fit.log_evidence == pg.fit(curve, held, 0, X, y=np.sin(X)).log_evidence
    assert list(fit.kwargs) == ["y"] and len(fit.plot().axes) == 1


def test_a_decorator_may_take_the_observations_by_position_alone():
    @functools.wraps(counts)
    def wrapper(*args):
        return counts(*args)

    held = pg.Laplace(hyper=pg.Fixed({}))
    given = X, np.full(N, 2.0), GROUP
    found = pg.fit(wrapper, held, 0, *given, COUNTS)
    assert found.log_evidence == pg.fit(counts, held, 0, *given, y=COUNTS).log_evidence


def test_observations_of_other_rows_are_refused_however_many_rows_there_are(fit, monkeypatch):
    """Chunks of rows have the length that they are cut to, whatever came in."""
    monkeypatch.setattr(prediction, "ROWS", 4)
    new, rows = np.linspace(0.0, 3.0, 10), {"exposure": 2.0, "group": np.arange(10) % 3}
    assert fit.log_density(new, np.zeros(10, int), **rows).shape == (10,)
    for wrong in (np.zeros(14, int), np.zeros(6, int)):
        with pytest.raises(pg.DataError):
            fit.log_density(new, wrong, **rows)
    with pytest.raises(pg.DataError):
        fit.log_density(new, np.zeros(10, int), **(rows | {"exposure": np.ones(14)}))


def test_arguments_called_as_an_option_are_refused(fit):
    def thrown(X, throw=None, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(throw * jnp.exp(f)), obs=y)

    def totals(X, num_samples, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Binomial(num_samples, logits=f), obs=y)

    with pytest.raises(pg.DataError, match=r"\['throw'\], which fit takes"):
        pg.fit(thrown, pg.Laplace(), 0, X, throw=True, y=COUNTS)
    with pytest.raises(pg.DataError, match=r"\['num_samples'\], which sample_prior takes"):
        pg.sample_prior(totals, 0, X, 8)
    own = pg.fit(totals, pg.Laplace(), 0, X, np.full(N, 9), y=np.minimum(COUNTS, 9))
    assert own.predict(NEW, 9).mean.shape == (3,)
    with pytest.raises(pg.DataError, match=r"\['num_samples'\], which sample takes"):
        own.sample(1, NEW, 100, num_samples=5)


def test_a_picture_has_both_inputs_and_observations_or_those_of_training(fit):
    for given in ({"X": NEW}, {"y": SEEN}):
        with pytest.raises(pg.DataError, match="both X and y"):
            fit.plot(**given)


def test_values_for_read_are_those_of_sites_and_of_all_params():
    def own(X, y=None):
        noise = numpyro.param("noise", 1.0)
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    with pytest.raises(pg.ModelError, match=r"names \['nosie'\]"):
        pg.read(own, X, y=X, hyper={"nosie": 0.1})
    with pytest.raises(pg.ModelError, match=r"give \['noise'\]"):
        pg.read(own, X, y=X)
    found, _ = pg.log_evidence(pg.Laplace(), pg.read(own, X, y=X, hyper={"noise": 0.1}))
    K = np.exp(-0.5 * (X[:, None] - X) ** 2) + (0.01 + 1e-8) * np.eye(N)
    want = multivariate_normal(np.zeros(N), K).logpdf(X)
    np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.parametrize("wrong", [0.4, 1.3, 2.0])
def test_a_derivative_is_counted_by_a_whole_number(wrong):
    kernel = pg.kernels.WithDerivatives(pg.kernels.RBF(1.0, 1.0))
    inputs = np.array([[0.1, 0.0], [0.2, wrong]])
    with pytest.raises(pg.DataError, match=f"holds {wrong}"):
        kernel(inputs, inputs)
    K = jax.jit(kernel)(inputs, inputs)
    np.testing.assert_array_equal(np.isnan(K), [[False, True], [True, True]])
