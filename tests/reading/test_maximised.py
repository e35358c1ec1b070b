"""Gaussian effects that something beside the predictor keeps from being integrated are not silently
maximised.
"""

import ast
import re

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy.stats import multivariate_normal

import ppl_gp as pg
import ppl_gp.infer.local as local

RNG = np.random.default_rng(0)
N, GROUPS = 24, 6
G = RNG.integers(0, GROUPS - 1, N)
Y = RNG.normal(size=N)


def group_effects(g, y=None, factor=False, scale=1.0, mask=None, prior_info=False, noise=False):
    b = numpyro.sample("b", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    s = jnp.exp(numpyro.sample("log_noise", dist.Normal(-1.0, 1.0))) if noise else 0.5
    if noise:
        numpyro.factor("penalty", -(s**2))
    if prior_info:
        numpyro.sample("info", dist.Normal(b, 0.1), obs=0.3)
    prior = dist.Normal(0.0, 1.0)
    with handlers.scale(scale=scale), numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", prior if mask is None else prior.mask(jnp.asarray(mask)))
    if factor:
        numpyro.factor("sum_to_zero", dist.Normal(0.0, 0.01).log_prob(jnp.sum(z)))
    with numpyro.plate("data", len(g)):
        numpyro.sample("y", dist.Normal(b + tau * z[g], s), obs=y)


WAYS = {
    "factor": ({"factor": True}, "'sum_to_zero'"),
    "scale": ({"scale": 2.0}, "handler stands around the prior of 'z'"),
    "mask": ({"mask": [True] * 3 + [False] * 3}, "handler stands around the prior of 'z'"),
}


@pytest.mark.one_case
@pytest.mark.parametrize("way", WAYS)
def test_effects_are_refused_under_map(way):
    options, why = WAYS[way]
    with pytest.raises(pg.ModelError, match=why):
        pg.fit(group_effects, pg.Laplace(), 0, G, y=Y, **options)
    assert not pg.check(group_effects, G, y=Y, **options).ok


@pytest.mark.slow
def test_who_holds_or_names_the_sites_may_go_on():
    z = {"z": np.zeros(GROUPS), "tau": 1.0}
    held = pg.fit(group_effects, pg.Laplace(hyper=pg.Fixed(z)), 0, G, y=Y, factor=True)
    named = pg.fit(group_effects, pg.Laplace(integrate=("b",)), 0, G, y=Y, factor=True)
    assert held.result == "converged" and set(named.sites) == {"b"}


@pytest.mark.slow
def test_one_value_is_told():
    with pytest.warns(UserWarning, match="maximises 'b'.*'info'"):
        fit = pg.fit(group_effects, pg.Laplace(), 0, G, y=Y, prior_info=True)
    assert set(fit.sites) == {"z"} and "b" in fit.hyper


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Laplace")
def test_hyperparameters_with_normal_priors_and_penalties_are_what_they_are():
    fit = pg.fit(group_effects, pg.Laplace(), 0, G, y=Y, noise=True)
    assert set(fit.sites) == {"b", "z"} and {"log_noise", "tau"} <= set(fit.hyper)


def two_outcomes(x, g, y=None, other=None, scale=None):
    """Effects that two outcomes share, a function beside one of them: two functions a datum."""
    s = numpyro.sample("s", dist.HalfNormal(1.0)) if scale is None else scale
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), x))
    with numpyro.plate("groups", GROUPS):
        raw = numpyro.sample("raw", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(f + s * raw[g], 0.4), obs=y)
        numpyro.sample("other", dist.Normal(s * raw[g], 0.6), obs=other)


def test_effects_of_more_functions_than_gps_are_no_points_beside_their_scale():
    x = np.linspace(0.0, 5.0, N)
    with pytest.raises(
        pg.ModelError, match=r"'raw' .6 values. together with \['s'\].*integrate=\('f', 'raw'"
    ):
        pg.fit(two_outcomes, pg.Laplace(), 0, x, G, y=Y, other=Y)
    assert not pg.check(two_outcomes, x, G, y=Y, other=Y).ok


@pytest.mark.slow
def test_with_a_known_scale_they_are_refused_and_integrated_where_they_are_named():
    x, data = np.linspace(0.0, 5.0, N), {"y": Y, "other": 0.5 * Y, "scale": 0.7}
    fixed = pg.Fixed({"raw": np.zeros(GROUPS)})
    with pytest.raises(pg.ModelError, match="maximise 'raw' .6 values.*integrate=.'f', 'raw'"):
        pg.fit(two_outcomes, pg.Laplace(), 0, x, G, **data)
    assert pg.fit(two_outcomes, pg.Laplace(hyper=fixed), 0, x, G, **data).result == "converged"
    fit = pg.fit(two_outcomes, pg.Laplace(integrate=("f", "raw")), 0, x, G, **data)
    K = np.exp(-0.5 * (x[:, None] - x) ** 2)
    B = np.eye(GROUPS)[G]
    both = np.kron(np.diag([1.0, 0.0]), K) + 0.49 * np.kron(np.ones((2, 2)), B @ B.T)
    C = both + np.diag([*[0.16] * N, *[0.36] * N])
    y = np.concatenate([Y, 0.5 * Y])
    evidence = -0.5 * y @ np.linalg.solve(C, y) - 0.5 * np.linalg.slogdet(2 * np.pi * C)[1]
    assert fit.log_evidence == pytest.approx(evidence, abs=1e-5)  # the GP's jitter


def noise_with_slopes(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(X @ b, jnp.exp(X @ h)), obs=y)


def noise_of_single_values(X, y=None):
    a, b = (numpyro.sample(k, dist.Normal(0.0, 2.0)) for k in "ab")
    c, d = (numpyro.sample(k, dist.Normal(0.0, 1.0)) for k in "cd")
    with numpyro.plate("data", len(X)):
        scale = jnp.exp(c * X[:, 0] + d * X[:, 1])
        numpyro.sample("y", dist.Normal(a * X[:, 0] + b * X[:, 1], scale), obs=y)


def evidence_of_slopes(X, y):
    """b by algebra, h by a sum over a grid."""

    def given(h):
        C = 4.0 * X @ X.T + np.diag(np.exp(2.0 * X @ h))
        normal = -0.5 * y @ np.linalg.solve(C, y) - 0.5 * np.linalg.slogdet(2 * np.pi * C)[1]
        return normal - 0.5 * h @ h - np.log(2 * np.pi)

    axis = np.linspace(-4.0, 3.0, 71)
    logs = np.array([[given(np.array([a, b])) for b in axis] for a in axis])
    return np.log(np.sum(np.exp(logs - logs.max()))) + logs.max() + 2 * np.log(axis[1] - axis[0])


@pytest.mark.parametrize(
    ("model", "points"),
    [
        (noise_with_slopes, "h"),
        pytest.param(noise_of_single_values, "cd", marks=pytest.mark.slow),
    ],
)
def test_the_remedy_for_a_second_function_leaves_no_site_a_point(model, points):
    """Taken word for word: only the named site was integrated, and the others became points. Single
    values that make up a function together were maximised in silence.
    """
    rng = np.random.default_rng(7)
    X = np.column_stack([np.ones(N), rng.normal(size=N)])
    y = X @ [1.0, 0.5] + np.exp(X @ [-0.5, 0.5]) * rng.normal(size=N)
    with pytest.raises(pg.ModelError, match=f"{', '.join(map(repr, points))} .2") as said:
        pg.fit(model, pg.Laplace(), 0, X, y=y)
    named = ast.literal_eval(re.search(r"integrate=(\(.*?\))", str(said.value))[1])
    assert set(named) == ({"b", "h"} if points == "h" else {*"abcd"})
    fit = pg.fit(model, pg.EP(integrate=named), 0, X, y=y)
    assert fit.log_evidence == pytest.approx(evidence_of_slopes(X, y), abs=0.1)


def stop_before_the_search(monkeypatch):
    def stopped(hyper, problem):
        raise InterruptedError

    monkeypatch.setattr(local, "infer_hyper", stopped)


@pytest.mark.parametrize("gp", [True, False])
@pytest.mark.parametrize("of_rows", [True, False])
def test_single_values_are_effects_where_they_make_up_a_function(gp, of_rows, monkeypatch):
    """A log noise and the log of degrees of freedom, each a function alone, are hyperparameters."""

    def heavy(x, y=None):
        b, c, d = (numpyro.sample(k, dist.Normal(0.0, 1.0)) for k in "bcd")
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), x)) if gp else b * x
        scale, df = (jnp.exp(c + d * x), 4.0) if of_rows else (jnp.exp(c), 2.0 + jnp.exp(d))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.StudentT(df, f, scale), obs=y)

    stop_before_the_search(monkeypatch)
    error, words = (pg.ModelError, r"'c', 'd' \(2 values\)") if of_rows else (InterruptedError, "")
    with pytest.raises(error, match=words):
        pg.fit(heavy, pg.Laplace(), 0, np.linspace(0.0, 5.0, N), y=Y)


def two_outcomes_with_levels(x, g, c=None, d=None):
    """Single values beside effects that two outcomes share: a level, a slope, the log of a noise,
    and a slope that the predictor is bent in."""
    level, slope = (numpyro.sample(k, dist.Normal(0.0, 2.0)) for k in ("level", "slope"))
    noise, bent = (numpyro.sample(k, dist.Normal(-1.0, 0.5)) for k in ("noise", "bent"))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(0.0, 0.8))
    with numpyro.plate("data", len(x)):
        numpyro.sample("c", dist.Normal(level + u[g], jnp.exp(noise)), obs=c)
        numpyro.sample("d", dist.Normal(slope * x + 1.5 * u[g] + jnp.exp(bent) * x**2, 0.5), obs=d)


LEVELS = {"x": (LINE := np.linspace(-1.0, 1.5, N)), "g": G, "c": Y, "d": 0.5 * Y + LINE}


def test_the_remedy_names_single_values_beside_the_effects():
    """One of them was left a point in silence; those that are hyperparameters stay so."""
    with pytest.raises(pg.ModelError, match="maximise 'slope', 'u' .7") as said:
        pg.fit(two_outcomes_with_levels, pg.Laplace(), 0, **LEVELS)
    named = re.search(r"integrate=(\(.*?\))", str(said.value))[1]
    assert named == "('level', 'slope', 'u')"


@pytest.mark.slow
def test_what_that_remedy_integrates_is_what_dense_algebra_has():
    method = pg.Laplace(
        integrate=("level", "slope", "u"), hyper=pg.Fixed({"noise": -0.5, "bent": -1.0})
    )
    fit = pg.fit(two_outcomes_with_levels, method, 0, **LEVELS)
    x, zero, B = LEVELS["x"], np.zeros(N), np.eye(GROUPS)[G]
    A = np.block([[np.ones((N, 1)), zero[:, None], B], [zero[:, None], x[:, None], 1.5 * B]])
    S = A @ np.diag([4.0, 4.0, *[0.64] * GROUPS]) @ A.T + np.diag(
        [*[np.exp(-1.0)] * N, *[0.25] * N]
    )
    y = np.concatenate([LEVELS["c"], LEVELS["d"] - np.exp(-1.0) * x**2])
    evidence = -0.5 * y @ np.linalg.solve(S, y) - 0.5 * np.linalg.slogdet(2 * np.pi * S)[1]
    assert fit.log_evidence == pytest.approx(evidence, abs=1e-6)


def of_units(X, y=None, size=None, shared=False, bend=False):
    """An effect a row, in a plate whose size may be written down; or one level for all."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    a = jnp.zeros(13) if size else jnp.zeros(X.shape[0] + 1)  # an array of the model's own
    if shared:
        u = numpyro.sample("u", dist.Normal(0.0, 0.5)) + a[:-1]
    else:
        with numpyro.plate("units", size or X.shape[0]):
            u = numpyro.sample("u", dist.Normal(0.0, 0.5))
    eta = f * jnp.exp(u) if bend else f + u
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


ROWS = np.linspace(0.0, 4.0, 12)
FEW = RNG.poisson(3.0, 12)


@pytest.mark.parametrize("method", [pg.Laplace(), pg.EP()], ids=["Laplace", "EP"])
def test_effects_of_a_model_with_its_size_written_down_are_not_maximised(method):
    """It cannot be traced at another number of rows, so that no predictor is found in it."""
    with pytest.raises(pg.ModelError, match="cannot be traced at another number of rows"):
        pg.fit(of_units, method, 0, ROWS, y=FEW, size=12)
    shown = str(pg.check(of_units, ROWS, y=FEW, size=12))
    assert "NO  maximum" in shown


def test_the_same_effects_are_integrated_where_the_size_is_taken_from_the_data():
    """As the GP with their variance on its diagonal."""

    def whole(X, y=None):
        kernel = pg.kernels.RBF(1.0, 1.0) + pg.kernels.White(0.25)
        f = numpyro.sample("f", pg.GP(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    fit = pg.fit(of_units, pg.Laplace(), 0, ROWS, y=FEW)
    other = pg.fit(whole, pg.Laplace(), 0, ROWS, y=FEW)
    np.testing.assert_allclose(fit.log_evidence, other.log_evidence, rtol=1e-6)


def test_who_says_what_to_integrate_has_the_rest_maximised():
    with pytest.raises(pg.ModelError, match="the model cannot be traced at another"):
        pg.fit(of_units, pg.Laplace(integrate=("f", "u")), 0, ROWS, y=FEW, size=12)
    fit = pg.fit(of_units, pg.Laplace(integrate=("f",)), 0, ROWS, y=FEW, size=12)
    assert fit.hyper["u"].shape == (12,)


@pytest.mark.parametrize("size", [20, None])
def test_effects_of_a_model_that_subsamples_are_refused_by_that_cause(size):
    """The cause was another predictor for other numbers of rows, or a raw error of shapes."""

    def model(X, g, y=None):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
        data = numpyro.plate("data", X.shape[0], subsample_size=size or X.shape[0] // 10)
        with data as i:
            X, g = X[i], g[i]
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with data:
            numpyro.sample("y", dist.Normal(f + u[g], 0.3), obs=None if y is None else y[i])

    X, g = np.linspace(0.0, 6.0, 200), np.arange(200) % 5
    with pytest.raises(pg.ModelError, match=r"plates \['data'\] subsample"):
        pg.fit(model, pg.SVGP(num_inducing=5, max_steps=5), 0, X, g, y=np.sin(X))


def test_a_single_value_of_such_a_model_is_told_of():
    with pytest.warns(UserWarning, match="another number of rows"):
        pg.fit(of_units, pg.Laplace(), 0, ROWS, y=FEW, size=12, shared=True)


VISITS, SUBJECT = np.linspace(0.0, 1.0, 24), np.repeat(np.arange(6), 4)
VALUES = 1.0 + 0.5 * VISITS + np.array([0.9, -0.7, 0.3, 1.1, -0.4, 0.1])[SUBJECT]
DEATHS = np.array([0.5, 2.1, 0.9, 0.3, 1.7, 1.2])


def visits_and_deaths(t, subject, v=None, d=None):
    a = numpyro.sample("a", dist.Normal(0.0, 2.0))
    s = numpyro.sample("s", dist.Normal(0.0, 2.0))
    with numpyro.plate("subjects", 6):
        u = numpyro.sample("u", dist.Normal(0.0, 0.8))
    with numpyro.plate("subjects again", 6):
        numpyro.sample("d", dist.Exponential(jnp.exp(0.5 * u)), obs=d)
    with numpyro.plate("visits", t.shape[0]):
        numpyro.sample("v", dist.Normal(a + s * t + u[subject], 0.4), obs=v)


def log_evidence_of_visits_and_deaths() -> float:
    """a and s are integrated with the visits; given the six numbers u the rest is a density."""
    design = np.stack([np.ones(24), VISITS, *np.eye(6)[SUBJECT].T], 1)
    prior = np.diag([4.0, 4.0, *[0.64] * 6])
    K = design @ prior @ design.T + 0.16 * np.eye(24)
    gain = prior @ design.T @ np.linalg.inv(K)
    mean, cov = gain @ VALUES, prior - gain @ design @ prior
    quadratic = VALUES @ np.linalg.solve(K, VALUES) + np.linalg.slogdet(2.0 * np.pi * K)[1]
    u = np.random.default_rng(0).multivariate_normal(mean[2:], cov[2:, 2:], 200_000)
    deaths = np.sum(0.5 * u - DEATHS * np.exp(0.5 * u), 1)
    return -0.5 * quadratic + np.log(np.mean(np.exp(deaths)))


def test_effects_that_other_observations_see_have_remedies_that_are_right():
    """The message sent to `integrate=("a", "s")`: 11 nats too high, without a warning."""
    data = (VISITS, SUBJECT), {"v": VALUES, "d": DEATHS}
    said = r"maximise 'u' .*Laplace\(integrate=\(\)\); hyper=MAP\(maximise=\('u',\)\)"
    with pytest.raises(pg.ModelError, match=said):
        pg.fit(visits_and_deaths, pg.Laplace(), 0, *data[0], **data[1])
    fit = pg.fit(visits_and_deaths, pg.Laplace(integrate=()), 0, *data[0], **data[1])
    np.testing.assert_allclose(fit.log_evidence, log_evidence_of_visits_and_deaths(), atol=0.05)
    points = pg.Laplace(hyper=pg.MAP(maximise=("u",)))
    found = pg.fit(visits_and_deaths, points, 0, *data[0], **data[1])
    assert found.hyper["u"].shape == (6,) and found.log_evidence > fit.log_evidence + 5.0
    with pytest.warns(UserWarning, match=r"loo\(\) scores each row.*\['d'\] belong to none"):
        assert fit.loo().n_data_points == 24
    with pytest.warns(UserWarning, match=r"log_density\(\) scores each row.*\['d'\]"):
        fit.log_density(VISITS[:3], v=VALUES[:3], d=DEATHS, subject=SUBJECT[:3])


def of_single_values(X, g, y=None, names=("u",), prior=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    u = [numpyro.sample(k, prior) for k in names]
    size = numpyro.sample("size", dist.HalfNormal(1.0))  # multiplies the function: no effect
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(size * f + jnp.stack(u)[g], 0.5), obs=y)


@pytest.mark.parametrize(
    ("prior", "names"),
    [
        (dist.StudentT(4.0, 0.0, 1.0), ("u",)),
        pytest.param(dist.StudentT(4.0, 0.0, 1.0), ("u", "v"), marks=pytest.mark.slow),
        pytest.param(dist.Uniform(-3.0, 3.0), ("u",), marks=pytest.mark.slow),
        pytest.param(dist.HalfNormal(2.0), ("u", "v", "w"), marks=pytest.mark.slow),
    ],
)
def test_single_values_that_a_normal_prior_would_integrate_are_told(prior, names):
    """They were maximised in silence, in a plate of one and in a loop of four."""
    X = np.linspace(0.0, 3.0, 12)
    said = (
        ", ".join(f"'{k}'" for k in names) + f" with .*the prior of '{names[0]}'.* is not Gaussian"
    )
    with pytest.warns(UserWarning, match=f"maximises {said}.*1.7 nats too high"):
        g = np.arange(12) % len(names)
        fit = pg.fit(of_single_values, pg.Laplace(), 0, X, g, y=np.sin(X), names=names, prior=prior)
    assert {*names, "size"} <= set(fit.hyper)


def level_and_function(x, y=None, z=None, w=None, noise=False):
    """z sees the level alone, and w the function, so that a datum sees two functions if both are
    integrated.
    """
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), x))
    with numpyro.plate("data", x.shape[0]):
        if noise:
            numpyro.sample("y", dist.Normal(f, jnp.exp(m)), obs=y)
        else:
            numpyro.sample("y", dist.Normal(m + f, 0.6), obs=y)
            numpyro.sample("z", dist.Normal(m, 0.9), obs=z)
            if w is not None:
                numpyro.sample("w", dist.Normal(f, 0.7), obs=w)


def test_a_level_that_would_add_a_function_is_not_maximised_in_silence(recwarn):
    x, one = np.linspace(0.0, 4.0, 10), np.ones((10, 10))
    K = np.exp(-0.5 * (x[:, None] - x) ** 2)
    whole = np.block([[K + one, one, K], [one, one, 0.0 * K], [K, 0.0 * K, K]])
    whole += np.diag(np.repeat([0.36, 0.81, 0.49], 10))
    data = {"y": Y[:10], "z": Y[10:20], "w": Y[:10] ** 2}
    for num in (2, 3):
        given = dict([*data.items()][:num])
        with pytest.warns(UserWarning, match=r"maximises 'm'.* with integrate=\('f', 'm'\)"):
            pg.fit(level_and_function, pg.EP(), 0, x, **given)
        fit = pg.fit(level_and_function, pg.EP(integrate=("f", "m")), 0, x, **given)
        K = whole[: 10 * num, : 10 * num]
        truth = multivariate_normal(np.zeros(10 * num), K).logpdf(np.concatenate([*given.values()]))
        assert fit.log_evidence == pytest.approx(truth, abs=1e-5)  # the jitter of f
    recwarn.clear()
    pg.fit(level_and_function, pg.EP(), 0, x, y=Y[:10], noise=True)
    assert not recwarn.list  # the logarithm of a noise is a predictor of its own
