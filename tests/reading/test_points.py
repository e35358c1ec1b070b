"""What a fit keeps at one value is not shown as a distribution: in trees, tables and pictures. And
deterministic sites are in the tree of every fit.
"""

import html
import warnings
from xml.etree import ElementTree

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal
from scipy import stats

import ppl_gp as pg

N = 16
rng = np.random.default_rng(4)
X = np.linspace(-2.0, 2.0, N)
GROUP = np.arange(N) % 3
Y = np.sin(2.0 * X) + 0.5 * (GROUP == 1) + 0.3 * rng.normal(size=N)


def mixed(X, group, y=None):
    """A GP, effects of groups, a vector of hyperparameters, deterministic sites of each kind."""
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    shape = numpyro.sample("shape", dist.LogNormal(jnp.zeros(2), 0.5).to_event(1))
    precision = numpyro.deterministic("precision", noise**-2)
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(shape[0], shape[1]), X))
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0.0, 0.7))
    eta = numpyro.deterministic("eta", f + u[group])
    numpyro.deterministic("above", eta > -100.0)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(eta, precision**-0.5), obs=y)


SHORT = {"num_warmup": 30, "num_samples": 30, "num_chains": 2}
METHODS = {
    "laplace": pg.Laplace(),
    "fixed": pg.EP(hyper=pg.Fixed({"noise": 0.3, "shape": np.array([1.0, 0.8])})),
    "svgp": pg.SVGP(num_inducing=6, max_steps=30),
    "grid": pg.VI(hyper=pg.Grid()),
    "sample": pg.Laplace(hyper=pg.Sample(**SHORT)),
    "nuts": pg.NUTS(**SHORT),
    "guide": pg.SVGP(num_inducing=6, max_steps=30, hyper=AutoNormal),
}
POINTS = ("laplace", "fixed", "svgp")
# of the prior of a site, in its form: what is true of every fit of these
QUICK = ("laplace", "sample")


@pytest.fixture(scope="module")
def fitted():
    made = {}

    def fit(name):
        if name not in made:
            made[name] = pg.fit(mixed, METHODS[name], 0, X, GROUP, y=Y, throw=False)
        return made[name]

    return fit


every_method = pytest.mark.parametrize(
    "name", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in METHODS]
)


@every_method
def test_nothing_without_a_distribution_is_in_the_posterior(fitted, name):
    fit = fitted(name)
    tree = fit.to_datatree(num_draws=60, whole=True)
    posterior, points = tree["posterior"], tree.children.get("point_estimates", {})
    assert {*posterior.data_vars, *points} == {
        "noise",
        "shape",
        "precision",
        "f",
        "u",
        "eta",
        "above",
    } | ({fit.model.plan.name} if hasattr(fit.model, "plan") else set())
    want = {"noise", "shape", "precision"} if name in POINTS else set()
    assert set(points) == want and fit.points == want - {"precision"}
    for k in want - {"precision"}:
        np.testing.assert_array_equal(points[k], fit.hyper[k])
    if want:
        np.testing.assert_allclose(points["precision"], fit.hyper["noise"] ** -2, rtol=1e-6)
        assert points["shape"].dims == ("shape_dim_0",)
    for k in set(posterior.data_vars) - {"above"}:
        assert np.all(posterior[k].values.std((0, 1)) > 0), k
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        del posterior["above"]  # true in every draw, which is not a point
        assert np.all(arviz_stats.summary(tree)["sd"].astype(float) > 0)


@every_method
def test_deterministic_sites_are_those_of_the_draws(fitted, name):
    fit = fitted(name)
    tree = fit.to_datatree(num_draws=20)
    posterior = tree["posterior"]
    assert posterior["eta"].dims == posterior["above"].dims == ("chain", "draw", "data")
    eta = posterior["f"].values + posterior["u"].values[..., GROUP]
    np.testing.assert_allclose(posterior["eta"], eta, rtol=1e-4, atol=1e-5)
    if name not in POINTS:
        noise = posterior["noise"].values
        np.testing.assert_allclose(posterior["precision"], noise**-2, rtol=1e-5)


@every_method
def test_the_summary_has_every_number_once(fitted, name):
    fit = fitted(name)
    table = fit.summary()
    assert list(table.index[:3]) == ["noise", "shape[0]", "shape[1]"]
    assert set(table.index[3:]) == {f"u[{i}]" for i in range(3)}
    assert list(table.columns) == ["kind", "mean", "sd", "5 %", "95 %"]
    hyper, effects = table.iloc[:3], table.iloc[3:]
    assert np.all((hyper["kind"] == "point") == (name in POINTS))
    assert np.all(effects["kind"] != "point") and np.all(effects["sd"] > 0)
    assert np.all(hyper[["sd", "5 %", "95 %"]].isna() == (name in POINTS))
    if name in POINTS:
        np.testing.assert_allclose(hyper["mean"], [fit.hyper["noise"], *fit.hyper["shape"]])
    drawn = fit.to_datatree(num_draws=4000).posterior["u"].values.reshape(-1, 3)
    error = 6.0 * effects["sd"].to_numpy() / np.sqrt(len(drawn))
    assert np.all(np.abs(effects["mean"] - drawn.mean(0)) < error)
    if name == "laplace":  # a Gaussian marginal
        ends = stats.norm.ppf([[0.05], [0.95]], effects["mean"], effects["sd"])
        np.testing.assert_allclose(effects[["5 %", "95 %"]].T, ends, rtol=1e-5)


def table_of(shown):
    """The cells of a table in HTML, row by row."""
    xml = f"<div>{shown}</div>".replace("<style scoped>", "<style>")
    rows = ElementTree.fromstring(xml).iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


@every_method
def test_notebooks_show_the_headline_and_hyperparameters(fitted, name):
    fit = fitted(name)
    shown = fit._repr_html_()
    assert html.escape(fit.headline) in shown and fit.headline in repr(fit)
    _, *rows = table_of(shown)
    drawn = [f"u[{i}]" for i in range(3)] if name == "nuts" else []  # a sampler's draws of effects
    assert [row[0] for row in rows] == ["noise", "shape[0]", "shape[1]", *drawn]
    assert {row[1] for row in rows} == {"point" if name in POINTS else "draws"}
    means = [float(row[2]) for row in rows]
    np.testing.assert_allclose(means, fit.summary()["mean"].iloc[: len(rows)], rtol=1e-4)


def test_notebooks_show_predictions_without_asking_for_intervals(fitted):
    found = fitted("laplace").predict(X[:3], GROUP[:3])
    head, *rows = table_of(found._repr_html_())
    assert head == ["", "mean", "sd", "f_mean", "f_sd"]
    np.testing.assert_allclose([float(row[2]) for row in rows], found.sd, rtol=1e-4)
    assert jax.tree.map(lambda x: x, found)._repr_html_() is None


def test_notebooks_show_every_item_of_a_check_to_its_end():
    found = pg.check(mixed, X, GROUP, y=Y)
    assert table_of(found._repr_html_())[1:] == [list(map(str, item)) for item in found.items]
    assert repr(found) == str(found)


def test_a_picture_shows_points_as_points(fitted):
    plots = pytest.importorskip("ppl_gp.report.pictures")
    figure = plots.plot_forest({"map": fitted("laplace"), "sampled": fitted("sample")}, site="f")
    lines = figure.axes[0].get_lines()
    widths = [np.ptp(line.get_xdata()) for line in lines if len(line.get_xdata()) == 2]
    assert 0.0 in widths and max(widths) > 0.0


def test_points_at_new_inputs_are_no_distributions():
    def counts(X, y=None):
        level = numpyro.sample("level", dist.Normal(1.0, 1.0))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        numpyro.deterministic("base", jnp.exp(level))
        numpyro.deterministic("trend", level + 2.0 * X)
        rate = numpyro.deterministic("rate", jnp.exp(level + f))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    fit = pg.fit(counts, pg.Laplace(integrate=()), 0, X, y=np.arange(N) % 4)
    tree = fit.to_datatree(num_draws=20, predictions=X[:5] + 0.1)
    fixed, level = tree["predictions_constant_data"], fit.hyper["level"]
    assert tree["point_estimates"]["trend"].dims == fixed["trend"].dims == ("data",)
    np.testing.assert_allclose(fixed["trend"], level + 2.0 * (X[:5] + 0.1), rtol=1e-5)
    np.testing.assert_allclose(fixed["base"], np.exp(level), rtol=1e-5)
    assert set(tree["predictions"].data_vars) == {"f", "rate", "y"}


def test_values_that_obs_mask_puts_together_are_not_in_the_tree():
    def partly(X, seen=None, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y, obs_mask=seen)

    tree = pg.fit(partly, pg.Laplace(), 0, X, seen=np.arange(N) > 2, y=Y).to_datatree(num_draws=3)
    assert set(tree["posterior"].data_vars) == {"f"}
