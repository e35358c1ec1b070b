"""MAP estimates against the closed form of a Gaussian likelihood: where they end, from where, and
what they say of it.
"""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.module import eqx_module
from numpyro.distributions import constraints
from numpyro.infer.util import log_density
from scipy.stats import lognorm, multivariate_normal

import ppl_gp as pg
from ppl_gp.errors import DataError, ModelError, Result
from ppl_gp.infer.hyper import map as map_file
from ppl_gp.infer.hyper.map import _result
from ppl_gp.infer.hyper.restarts import Run, is_flat
from ppl_gp.infer.hyper.space import log_prior
from ppl_gp.results.compare.models import _maximised

N, JITTER = 14, 1e-9
RNG = np.random.default_rng(5)
X = RNG.normal(size=(N, 2))
Y = np.sin(2.0 * X[:, 0]) + 0.5 * X[:, 1] + 0.2 * RNG.normal(size=N)
NET = eqx.nn.Linear(2, "scalar", key=jax.random.key(2))


def evidence(y, mean, variance, lengthscale, noise, x=X):
    """log N(y; mean, RBF + noise^2), nats, by SciPy."""
    Z = np.reshape(x, (len(x), -1)) / lengthscale
    K = variance * np.exp(-0.5 * np.sum((Z[:, None] - Z) ** 2, -1))
    return multivariate_normal(
        mean, K + (noise**2 + JITTER) * np.eye(len(y)), allow_singular=True
    ).logpdf(y)


def slopes(objective, values, h=1e-5):
    """Central differences of objective(**values) in every entry of every value."""
    found = {}
    for name, x in values.items():
        x = np.asarray(x, float)
        steps = h * np.eye(x.size).reshape(x.size, *x.shape)
        found[name] = [
            (objective(**{**values, name: x + s}) - objective(**{**values, name: x - s})) / (2 * h)
            for s in steps
        ]
    return found


# --- one model with a hyperparameter of every kind
# -----------------------------------------------------------------------------


def priors():
    """A vector with its prior weighed by 1/2, one whose prior is masked out, one with an improper
    prior.
    """
    with handlers.scale(scale=0.5):
        lengthscale = numpyro.sample(
            "lengthscale", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1)
        )
    with handlers.mask(mask=False):
        variance = numpyro.sample("variance", dist.LogNormal(3.0, 0.1))
    return (
        lengthscale,
        variance,
        numpyro.sample("noise", dist.ImproperUniform(constraints.positive, (), ())),
    )


def every_kind(X, y=None):
    """Beside `priors`: a param, and a param that is a tree (a network as the mean), which have no
    prior.
    """
    lengthscale, variance, noise = priors()
    shift, net = (
        numpyro.param("shift", 0.1, constraint=constraints.positive),
        eqx_module("net", NET),
    )
    f = numpyro.sample(
        "f",
        pg.GP(
            pg.kernels.RBF(variance, lengthscale),
            X,
            lambda X: jax.vmap(net)(X) + shift**2,
            jitter=JITTER,
        ),
    )
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


INIT = {
    "lengthscale": [1, 2],
    "variance": np.float32(1.5),
    "noise": 1,
    "shift": np.float64(0.5),
    "net$params": NET,
}


def log_posterior(lengthscale, variance, noise, weight, bias):
    """What MAP of `every_kind` maximises; the mean's constant is bias + shift^2."""
    log_p = 0.5 * np.sum(
        -0.5 * np.log(lengthscale) ** 2 - np.log(lengthscale) - 0.5 * np.log(2 * np.pi)
    )
    return evidence(Y, X @ weight + bias, variance, lengthscale, noise) + log_p


def _values(hyper):
    net = hyper["net$params"]
    plain = {k: np.asarray(hyper[k]) for k in ("lengthscale", "variance", "noise")}
    return {
        **plain,
        "weight": np.asarray(net.weight)[0],
        "bias": np.asarray(net.bias) + np.asarray(hyper["shift"]) ** 2,
    }


@pytest.fixture(scope="module")
def fit():
    return pg.fit(every_kind, pg.Laplace(hyper=pg.MAP(init=INIT)), 0, X, y=Y, throw=False)


@pytest.mark.slow
def test_converged_means_stationary(fit):
    assert fit.result == Result.converged
    values = _values(fit.hyper)
    assert fit.stats["log_posterior"] == pytest.approx(log_posterior(**values), abs=1e-6)
    for name, slope in slopes(log_posterior, values).items():
        np.testing.assert_allclose(slope, 0.0, atol=2e-3, err_msg=name)


@pytest.mark.slow
def test_a_param_that_is_a_tree_stays_one(fit):
    net = fit.hyper["net$params"]
    assert jax.tree.structure(net) == jax.tree.structure(eqx.filter(NET, eqx.is_inexact_array))
    assert not np.allclose(net.weight, NET.weight)
    again = pg.fit(every_kind, pg.Laplace(hyper=pg.Fixed(fit.hyper)), 0, X, y=Y)
    assert again.log_evidence == pytest.approx(fit.log_evidence, abs=1e-8)
    np.testing.assert_allclose(again.predict(X[:3]).mean, fit.predict(X[:3]).mean, rtol=1e-6)


def test_a_param_that_is_a_tree_is_told_by_its_leaves(fit):
    net, name = fit.hyper["net$params"], "net$params.weight"
    table = fit.summary()
    assert table.loc[f"{name}[0,1]", "mean"] == net.weight[0, 1]
    told = fit.to_datatree(num_draws=2)["point_estimates"]
    np.testing.assert_array_equal(told[name], net.weight)
    assert _maximised(fit) == sum(np.size(x) for x in jax.tree.leaves(fit.hyper))
    stopped = replace(fit, result=Result.max_steps)
    assert np.all(np.isfinite(stopped.predict(X[:2]).mean))
    draws = eqx.tree_at(lambda d: d.hyper["net$params"].bias, fit.draws, np.array([np.nan]))
    with pytest.raises(pg.FitError, match=r"what it has of \['net\$params.bias'\]"):
        replace(stopped, draws=draws).predict(X[:2])


def test_log_prior_is_the_target_of_nuts(fit):
    hyper = {k: fit.hyper[k] for k in ("lengthscale", "variance", "noise")}
    expected = log_density(priors, (), {}, hyper)[0]
    assert float(log_prior(every_kind, (X,), {"y": Y}, fit.hyper)) == pytest.approx(
        float(expected), abs=1e-10
    )
    assert expected != 0.0


def test_a_warm_start_and_another_start_end_at_the_same_optimum(fit):
    pg.fit(
        every_kind, pg.Laplace(hyper=pg.MAP(init=INIT)), 0, X, y=Y
    )  # compiled functions may be let go of between tests
    other = {**INIT, "lengthscale": [0.7, 4.0], "noise": 0.1, "variance": 3.0}
    again = pg.fit(
        every_kind, pg.Laplace(hyper=pg.MAP(init=other, tol=1e-5, max_steps=300)), 0, X, y=Y
    )
    assert again.stats["compilations"] == 0, "starts and settings are no part of what is compiled"
    assert again.log_evidence == pytest.approx(fit.log_evidence, abs=1e-4)
    values = _values(again.hyper)
    mean = X @ values.pop("weight") + values.pop("bias")
    assert again.log_evidence == pytest.approx(evidence(Y, mean, **values), abs=1e-6)


def test_reading_a_model_with_an_improper_prior(fit):
    factors = pg.read(every_kind, X, hyper=fit.hyper, y=Y)
    assert factors.prior.variance.shape == (N,)


@pytest.mark.parametrize(
    "hyper",
    [pg.MAP(), pg.MAP(init=INIT, restarts=2), pg.Sample(2, 2, 1)],
    ids=["MAP", "restarts", "Sample"],
)
def test_an_improper_prior_has_nothing_to_start_from(hyper):
    with pytest.raises(ModelError, match="'noise' has the improper prior ImproperUniform.*init="):
        pg.fit(every_kind, pg.Laplace(hyper=hyper), 0, X, y=Y)


@pytest.mark.parametrize(
    "make", [pg.Fixed, lambda values: pg.MAP(init=values)], ids=["Fixed", "MAP"]
)
@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"lengthscale": 1.0},
            DataError,
            r"\['lengthscale'\] has shape \(\), and the site \(2,\); .*numpy.full",
        ),
        ({"lengthscale": [1.0, 2.0, 3.0]}, DataError, r"has shape \(3,\), and the site \(2,\)"),
        ({"lengthscale": [1.0, -2.0]}, DataError, r"\['lengthscale'\] = .* is outside its support"),
        ({"noise": np.nan}, DataError, r"\['noise'\] = nan is not finite"),
        ({"shift": -1.0}, DataError, r"\['shift'\] = -1.0 is outside its support"),
        ({"shift": "a"}, DataError, r"\['shift'\] = 'a' is no array of numbers"),
        ({"net$params": 1.0}, DataError, "is float; the param is the tree"),
        ({"nosie": 1.0}, ModelError, r"unknown \['nosie'\]"),
    ],
    ids=str,
)
def test_given_values_are_checked_before_any_work(make, change, error, message):
    with pytest.raises(error, match=message):
        pg.fit(every_kind, pg.Laplace(hyper=make({**INIT, **change})), 0, X, y=Y)


def test_a_missing_value_is_named():
    with pytest.raises(ModelError, match=r"missing \['noise'\]"):
        pg.fit(
            every_kind,
            pg.Laplace(hyper=pg.Fixed({k: v for k, v in INIT.items() if k != "noise"})),
            0,
            X,
            y=Y,
        )


def test_configurations_with_arrays_compare_by_value():
    for make in (pg.Fixed, lambda values: pg.MAP(init=values)):
        a, b = np.array([1.0, 2.0]), np.array([1.0, 3.0])
        assert make({"a": a}) == make({"a": a.copy()}) != make({"a": b})
        assert hash(make({"a": a})) == hash(make({"a": a.copy()}))
        one = make({"a": a})
        a[0] = 9.0
        assert one == make({"a": np.array([1.0, 2.0])}), "it keeps a copy of its own"
    assert pg.MAP() == pg.MAP() != pg.MAP(restarts=2) and pg.Fixed({}) != pg.MAP()


# --- two basins, and a model that cannot be evaluated
# ----------------------------------------------------------------------------


def two_basins(X, shift, y=None):
    """A constant mean with a prior of two modes, the wider one (weight 0.3) near -3; a `shift`
    below -1 spoils the kernel.
    """
    modes = dist.Normal(jnp.array([-3.0, 3.0]), 0.5)
    level = numpyro.sample(
        "level", dist.MixtureSameFamily(dist.Categorical(jnp.array([0.3, 0.7])), modes)
    )
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0 + shift, 1.0), X, pg.means.Constant(level)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 3.0), obs=y)


def _basin(shift=0.0, **settings):
    method = pg.Laplace(hyper=pg.MAP(**settings))
    return pg.fit(two_basins, method, 3, X, jnp.asarray(shift), y=np.full(N, 0.4), throw=False)


@pytest.mark.slow
def test_the_given_start_decides_the_basin_and_restarts_keep_the_best():
    low, high = _basin(init={"level": -2.0}), _basin(init={"level": 2.0})
    assert low.result == high.result == Result.converged
    assert float(low.hyper["level"]) < -2.0 and float(high.hyper["level"]) > 2.0
    assert high.stats["log_posterior"] > low.stats["log_posterior"] + 0.5
    many = _basin(restarts=6)
    ends = many.stats["restart_log_posteriors"]
    assert np.ptp(ends) > 0.5, "the restarts end in both basins"
    assert (
        many.stats["log_posterior"]
        == ends.max()
        == pytest.approx(high.stats["log_posterior"], abs=1e-4)
    )
    np.testing.assert_allclose(many.hyper["level"], high.hyper["level"], atol=1e-3)


def test_a_density_that_is_never_finite_ends_at_once_as_nonfinite():
    fit = _basin(-100.0, init={"level": 2.0})
    assert fit.result == Result.nonfinite and fit.stats["map_steps"] == 1


def test_how_the_best_restart_ended_counts():
    def ended(losses, done):
        nothing, losses = jnp.zeros(2), jnp.asarray(losses)
        sites = SimpleNamespace(nat1=jnp.zeros((2, 1)))
        return _result(
            Run({}, {}, None, sites, nothing, losses, nothing, nothing, jnp.asarray(done)),
            int(np.argmin(losses)),
            bool(is_flat(0.0, jnp.min(losses), 1)),
        )

    assert ended([1.0, 5.0], [True, False]) == Result.converged
    assert ended([5.0, 1.0], [True, False]) == Result.max_steps


# --- a support that depends on another hyperparameter
# ----------------------------------------------------------------------------

LINE = np.linspace(-2.0, 2.0, 12)


def dependent(X, scale, y=None):
    """The length scale lies below a, which lies near `scale`."""
    a = numpyro.sample("a", dist.LogNormal(jnp.log(scale), 0.3))
    lengthscale = numpyro.sample("lengthscale", dist.Uniform(0.0, a))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def _on_a_grid(scale, y):
    """(log posterior, a, length scale) of the best point of a fine grid."""
    a, share = np.exp(np.linspace(-2.0, 1.6, 181)), np.linspace(0.01, 1.0, 100)
    lengthscales = np.exp(np.linspace(-3.0, 1.6, 1500))
    values = np.array([evidence(y, np.zeros(len(y)), 1.0, x, 0.1, LINE) for x in lengthscales])
    log_e = np.interp(np.log(a[:, None] * share), np.log(lengthscales), values)
    log_a = dist.LogNormal(np.log(scale), 0.3).log_prob(a) - np.log(a)
    total = log_e + np.asarray(log_a)[:, None]
    i, j = np.unravel_index(np.argmax(total), total.shape)
    return total[i, j], a[i], a[i] * share[j]


@pytest.mark.one_case
@pytest.mark.parametrize(
    "scale, at_bound", [(3.0, []), (0.3, ["lengthscale"])], ids=["inside", "at the edge"]
)
def test_a_support_that_depends_on_a_hyperparameter(scale, at_bound):
    y = np.sin(2.0 * LINE)
    fit = pg.fit(dependent, pg.Laplace(), 0, LINE[:, None], jnp.asarray(scale), y=y)
    best, a, lengthscale = _on_a_grid(scale, y)
    assert fit.result == Result.converged and fit.stats["at_bound"] == at_bound
    # a grid has no better point, and it is coarse
    assert best - 1e-3 < fit.stats["log_posterior"] < best + 0.02
    np.testing.assert_allclose(
        [fit.hyper["a"], fit.hyper["lengthscale"]], [a, lengthscale], rtol=0.02
    )


def test_fixed_values_are_checked_against_the_support_that_they_have():
    y, scale = np.sin(2.0 * LINE), jnp.asarray(1.0)
    fit = pg.fit(
        dependent,
        pg.Laplace(hyper=pg.Fixed({"a": 5.0, "lengthscale": 3.0})),
        0,
        LINE[:, None],
        scale,
        y=y,
    )
    assert fit.log_evidence == pytest.approx(
        evidence(y, np.zeros(12), 1.0, 3.0, 0.1, LINE), abs=1e-5
    )
    with pytest.raises(DataError, match=r"\['lengthscale'\] = 3.0 is outside its support"):
        pg.fit(
            dependent,
            pg.Laplace(hyper=pg.Fixed({"a": 2.0, "lengthscale": 3.0})),
            0,
            LINE[:, None],
            scale,
            y=y,
        )


# --- what a converged search says of itself
# -----------------------------------------------------------------------------

EFFECTS, ERRORS = [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], [15, 10, 16, 11, 9, 11, 10, 18]


def schools(error, y=None):
    """Eight schools (Rubin 1981; Gelman et al. 2013, section 5.5)."""
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("data", error.shape[0]):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, error), obs=y)


def test_a_spread_that_leans_on_zero_is_said():
    """Its sds of theta were .6 of the truth, in silence; with a known spread nothing is said."""
    error = np.asarray(ERRORS, float)
    with pytest.warns(UserWarning, match=r"hardly determine 'tau': .*0.87 of the right.*Grid\(\)"):
        pg.fit(schools, pg.Laplace(), 0, error, y=np.asarray(EFFECTS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pg.fit(schools, pg.Laplace(), 0, error, y=20.0 * np.asarray(EFFECTS))


GROUP = np.arange(N) % 4


def effects_beside_a_gp(x, group, y=None):
    """Two scales of effects, before and behind them; a variance and a length scale of a GP."""
    names = ("variance", "lengthscale", "noise", "tau", "sigma")
    v, ell, noise, tau, sigma = (numpyro.sample(k, dist.LogNormal(0.0, 1.0)) for k in names)
    u = numpyro.sample("u", dist.Normal(0.0, tau).expand([4]).to_event(1))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(v, ell), x))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[group] + sigma * w * x[:, 0], noise), obs=y)


def test_scales_of_effects_are_told_from_those_of_a_gp(monkeypatch):
    seen = {}
    keep = lambda trace, hyper, sds, scales: seen.update(scales=scales, sds=sds)  # noqa: E731
    monkeypatch.setattr(map_file, "weakly_known", keep)
    pg.fit(effects_beside_a_gp, pg.Laplace(), 0, X[:, :1], GROUP, y=Y)
    assert seen["scales"] == {"tau", "sigma"}
    assert seen["sds"].keys() == {"variance", "lengthscale", "noise", "tau", "sigma"}


def test_sds_at_the_mode_are_those_of_the_curvature(monkeypatch):
    """By second differences of the closed form."""
    seen = {}
    monkeypatch.setattr(
        map_file, "weakly_known", lambda trace, hyper, sds, scales: seen.update(sds)
    )
    error, y = np.asarray(ERRORS, float), 20.0 * np.asarray(EFFECTS)
    fit = pg.fit(schools, pg.Laplace(), 0, error, y=y)

    def log_posterior(log_tau):
        tau = np.exp(log_tau)
        K = tau**2 * np.eye(8) + 25.0 + np.diag(error**2)
        prior = float(dist.HalfCauchy(5.0).log_prob(tau))
        return multivariate_normal(np.zeros(8), K).logpdf(y) + prior

    at, h = np.log(float(fit.hyper["tau"])), 1e-3
    bend = (log_posterior(at + h) - 2 * log_posterior(at) + log_posterior(at - h)) / h**2
    assert seen["tau"].item() == pytest.approx(1.0 / np.sqrt(-bend), rel=0.02)


def periodic(X, y=None):
    period = numpyro.sample("period", dist.LogNormal(1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.Periodic(1.0, 1.0, period), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def _best_period(X, y):
    """Log posterior of the best of 4000 periods, nats."""
    wave = np.abs(X[:, None] - X)

    def log_posterior(period):
        K = np.exp(-2.0 * np.sin(np.pi * wave / period) ** 2) + 0.3**2 * np.eye(len(X))
        log_prior = float(lognorm(1.0, scale=np.e).logpdf(period))
        return multivariate_normal(np.zeros(len(X)), K).logpdf(y) + log_prior

    return max(log_posterior(p) for p in np.geomspace(0.15, 60.0, 4000))


def test_one_start_for_a_period_is_said_and_more_starts_are_better():
    """The data's period is 1; from the prior's median, 2.7, a search ends at 2."""
    X = np.linspace(0.0, 6.0, 40)
    y = np.sin(2.0 * np.pi * X)
    with pytest.warns(UserWarning, match=r"\['period'\] is a period.*restarts=8"):
        one = pg.fit(periodic, pg.Laplace(), 3, X, y=y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="the process has grown")  # of other tests
        many = pg.fit(periodic, pg.Laplace(hyper=pg.MAP(restarts=8)), 3, X, y=y)
    best = _best_period(X, y)
    assert one.stats["log_posterior"] < best - 1.0
    assert best - 1e-3 < many.stats["log_posterior"] < best + 0.02
    assert "period" in one.stats["hint"] and "hint" not in many.stats


def test_a_search_survives_a_first_value_without_digits():
    """The start that was asked for has no value; the prior's median and draws have."""
    fit = _basin(0.0, init={"level": 1e200})
    assert fit.result == Result.converged
    assert fit.stats["log_posterior"] >= _basin(0.0).stats["log_posterior"] - 1e-6


def constrained(floor):
    def model(x, y=None):
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        numpyro.factor("floor", jnp.where(s < floor, -jnp.inf, 0.0))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), x))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(f, s), obs=y)

    return model


def test_a_constraint_of_hyperparameters_is_not_judged_at_one_draw():
    """The maximum lies inside, where the constraint changes nothing; one that holds nowhere is
    named, and no row of the data.
    """
    x = np.linspace(0.0, 3.0, 12)
    y = np.sin(x) + 0.6 * np.random.default_rng(0).normal(size=12)
    free, inside = (pg.fit(constrained(s), pg.Laplace(), 0, x, y=y) for s in (0.0, 0.25))
    np.testing.assert_allclose(inside.hyper["s"], free.hyper["s"], rtol=1e-4)
    np.testing.assert_allclose(inside.log_evidence, free.log_evidence, atol=1e-6)
    with pytest.raises(pg.DataError, match=r"site\(s\) \['floor'\], .* at any of 20 draws"):
        pg.fit(constrained(50.0), pg.Laplace(), 0, x, y=y)


def test_what_is_hardly_known_is_said_of_the_point_that_is_returned(monkeypatch):
    """Not of the first search's end too, where noise explains all and f's variance is unknown."""
    said = []
    monkeypatch.setattr(map_file, "warn_if_weakly_known", lambda *told: said.append(told[4]))
    x = np.linspace(0.0, 3.4, 100)

    def model(x, y=None):
        v = numpyro.sample("v", dist.HalfNormal(1.0))
        ell = numpyro.sample("ell", dist.LogNormal(0.0, 1.0))
        s = numpyro.sample("s", dist.LogNormal(-2.0, 1.0))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(v, ell), x))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(f, s), obs=y)

    y = np.sin(25.0 * x) + 0.1 * np.random.default_rng(0).normal(size=100)
    fit = pg.fit(model, pg.Laplace(), 0, x, y=y)
    assert len(said) == 1 and float(said[0]["ell"]) == float(fit.hyper["ell"]) < 0.1
