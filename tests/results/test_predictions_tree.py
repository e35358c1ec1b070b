"""Trees with what is drawn at new inputs: ArviZ's groups predictions and predictions_constant_data,
their numbers by a second route, and their names.
"""

import json

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

import ppl_gp as pg
from ppl_gp.frames.opened import ArrayNames
from ppl_gp.results.tree_groups import with_columns

N, M, DRAWS, WARDS = 12, 5, 400, ["north", "south", "west"]
rng = np.random.default_rng(0)
AGE, WARD = np.linspace(20.0, 70.0, N), rng.integers(0, 3, N)
EXPOSURE, Y = np.ones(N), rng.poisson(3.0, N)
NEW_AGE, NEW_WARD, NEW_EXPOSURE = np.linspace(15.0, 80.0, M), np.arange(M) % 3, np.full(M, 2.0)


def frame(age, ward, rows):
    labels = pd.Categorical.from_codes(ward, WARDS)
    return pd.DataFrame({"age": age, "ward": labels}, index=rows)


TRAIN = frame(AGE, WARD, [f"patient {i}" for i in range(N)])
NEW = frame(NEW_AGE, NEW_WARD, list("abcde"))


def counts(X, exposure, y=None):
    level = numpyro.sample("level", dist.LogNormal(1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(0.3, 15.0), X[:, :1]))
    rate = numpyro.deterministic("rate", exposure * level * jnp.exp(f))
    with numpyro.plate("patient", X.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


@pytest.mark.slow
def test_groups_names_and_numbers():
    fit = pg.fit(counts, pg.Laplace(hyper=pg.Fixed({"level": 3.0})), 0, TRAIN, EXPOSURE, y=Y)
    given = {"X": NEW, "exposure": NEW_EXPOSURE}
    tree = fit.to_datatree(num_draws=DRAWS, predictions=given)
    found, inputs = tree["predictions"], tree["predictions_constant_data"]
    assert found["y"].dims == found["f"].dims == found["rate"].dims == ("chain", "draw", "patient")
    assert found.coords["patient"].values.tolist() == list("abcde")
    assert tree["posterior"].coords["patient"].values.tolist() == list(TRAIN.index)
    assert inputs.coords["X_dim_1"].values.tolist() == ["age", "ward"]
    assert json.loads(inputs["X"].attrs["levels"]) == {"ward": WARDS}
    np.testing.assert_array_equal(inputs["X"], np.stack([NEW_AGE, NEW_WARD], 1))
    np.testing.assert_array_equal(inputs["exposure"], NEW_EXPOSURE)
    assert inputs["ward"].dims == ("patient",) and inputs["ward"].attrs["levels"] == WARDS
    np.testing.assert_array_equal(tree["constant_data"]["age"], AGE)
    np.testing.assert_allclose(found["rate"], 6.0 * np.exp(found["f"]), rtol=1e-12)
    want, f = fit.predict(NEW, NEW_EXPOSURE), found["f"].values[0]
    assert np.all(np.abs(f.mean(0) - want.f_mean) < 5 * np.sqrt(want.f_variance / DRAWS))
    excess = np.abs(found["y"].values[0].mean(0) - want.mean)
    assert np.all(excess < 5 * np.sqrt(want.variance / DRAWS))
    turned = given | {"X": NEW[["ward", "age"]]}  # columns are selected by their names
    again = fit.to_datatree(num_draws=DRAWS, predictions=turned)
    np.testing.assert_array_equal(again["predictions"]["rate"], found["rate"])
    np.testing.assert_array_equal(again["predictions_constant_data"]["X"], inputs["X"])
    rows = fit.to_datatree(num_draws=2, predictions=given, pred_coords={"patient": range(M)})
    assert rows["predictions"].coords["patient"].values.tolist() == list(range(M))
    for bad, words in (
        ({"predictions": {"exposure": NEW_EXPOSURE}}, r"\{'X': the new inputs, \.\.\.\}"),
        ({"predictions": given | {"y": Y[:M]}}, "without y"),
        ({"predictions": NEW}, "predicting needs 'exposure'"),
        ({"predictions": given | {"X": NEW[["age"]]}}, "ward"),
        ({"predictions": given, "pred_coords": {"patient": ["a"]}}, "pred_coords="),
        ({"pred_coords": {"patient": list("abcde")}}, "give both"),
    ):
        with pytest.raises(pg.DataError, match=words):
            fit.to_datatree(num_draws=2, **bad)


def test_columns_that_are_no_variables_of_their_own():
    columns = ("age", "mg/l", "f", "", "X_dim_1", "patient")
    inputs, names = {"X": np.ones((4, 6))}, {"X": ArrayNames(columns, (None,) * 6)}
    found = with_columns("constant_data", inputs, {"X": ["patient", "X_dim_1"]}, names)
    # "f" is a site's name, and a variable of other groups
    assert list(found.groups["constant_data"]) == ["age", "f", "X"]
    assert found.dims["age"] == ["patient"]


CHAIN = {"num_warmup": 60, "num_samples": 100}
METHODS = {
    "ep": pg.EP(hyper=pg.Fixed({"level": 3.0})),
    "vi": pg.VI(hyper=pg.Fixed({"level": 3.0})),
    "sample": pg.Laplace(hyper=pg.Sample(**CHAIN)),
    "grid": pg.Laplace(hyper=pg.Grid()),
    "svgp": pg.SVGP(num_inducing=6, max_steps=60),
    "nuts": pg.NUTS(**CHAIN, num_chains=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_draws_go_with_the_posteriors(name):
    """Draw s of the rate is of the level of the posterior's draw s, whatever the method."""
    fit = pg.fit(counts, METHODS[name], 0, TRAIN, EXPOSURE, y=Y, throw=False)
    tree = fit.to_datatree(num_draws=100, predictions={"X": NEW, "exposure": NEW_EXPOSURE})
    found, posterior = tree["predictions"], tree["posterior"]
    assert found.sizes["chain"] == posterior.sizes["chain"] == (2 if name == "nuts" else 1)
    points = tree["point_estimates"].data_vars if "point_estimates" in tree.children else {}
    assert ("level" in points) == (name in ("ep", "vi", "svgp"))
    assert ("level" in points) != ("level" in posterior.data_vars)
    level = (points if "level" in points else posterior)["level"].values[..., None]
    np.testing.assert_allclose(found["rate"], 2.0 * level * np.exp(found["f"]), rtol=1e-9)
    want = fit.predict(NEW, NEW_EXPOSURE)
    spread = np.sqrt(np.asarray(want.variance) / found["y"][..., 0].size)
    assert np.all(np.abs(found["y"].values.mean((0, 1)) - want.mean) < 6 * spread)


def line(X, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    mean = numpyro.deterministic("mean", slope * X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, mean, 0.5), obs=y)


def classes(X, y=None):
    with numpyro.plate("class", 3):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 15.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


@pytest.mark.slow
def test_without_a_gp():
    x = (AGE - 45.0) / 25.0
    fit = pg.fit(line, pg.NUTS(60, 100), 0, x, y=x, throw=False)
    tree = fit.to_datatree(whole=True, predictions=np.array([0.5, 2.0]))
    slope = tree["posterior"]["slope"].values[..., None]
    assert tree["posterior"]["mean"].dims == ("chain", "draw", "data")
    np.testing.assert_allclose(tree["predictions"]["mean"], slope * [0.5, 2.0], rtol=1e-12)


@pytest.mark.slow
def test_of_several_functions(tmp_path):
    fit = pg.fit(classes, pg.SVGP(num_inducing=5, max_steps=30), 0, AGE, y=WARD, throw=False)
    labels = {"class": WARDS}
    found = fit.to_datatree(num_draws=50, predictions=NEW_AGE, coords=labels)["predictions"]
    assert found["f"].dims == ("chain", "draw", "class", "data")
    assert found["f"].sizes["data"] == M and found.coords["class"].values.tolist() == WARDS
    loaded = pg.load(fit.save(tmp_path / "several.fit"), classes)
    again = loaded.to_datatree(num_draws=50, predictions=NEW_AGE)["predictions"]
    assert again["y"].dims == ("chain", "draw", "data")
    np.testing.assert_allclose(again["f"], found["f"], rtol=1e-9)


@pytest.mark.slow
def test_of_a_predictor():
    """Where sites were integrated into a predictor, it is what is drawn."""
    fit = pg.fit(classes, pg.Laplace(), 0, AGE, y=WARD)
    tree = fit.to_datatree(num_draws=DRAWS, predictions=NEW_AGE)
    (name,) = fit.latent
    found, want = tree["predictions"], fit.predict(NEW_AGE)
    assert set(found.data_vars) == {name, "y"}
    assert found[name].dims == tree["posterior"][name].dims
    draws, spread = found[name].values[0], np.sqrt(want.f_variance / DRAWS)
    assert np.all(np.abs(draws.mean(0) - want.f_mean) < 5 * spread)
    share = (found["y"].values[0][..., None] == np.arange(3)).mean(0)
    assert np.all(np.abs(share - want.probs) < 5 * np.sqrt(0.25 / DRAWS))


@pytest.mark.slow
def test_arviz_draws_the_predictions():
    import matplotlib

    matplotlib.use("Agg")
    azp = pytest.importorskip("arviz_plots")
    fit = pg.fit(counts, pg.Laplace(), 0, TRAIN, EXPOSURE, y=Y)
    given = {"X": NEW, "exposure": NEW_EXPOSURE}
    tree = fit.to_datatree(num_draws=200, whole=True, predictions=given)
    some = {"x": "age", "y_obs": "y", "smooth": False, "backend": "matplotlib"}
    for group, y in (("posterior_predictive", "y"), ("predictions", "y"), ("posterior", "rate")):
        # arviz-plots 0.8.0 finds no observations of another name
        visuals = {"observed_scatter": False} if y == "rate" else {}
        drawn = azp.plot_lm(tree, y=y, group=group, visuals=visuals, **some)
        assert drawn is not None
    azp.plot_ppc_dist(tree, backend="matplotlib")
    matplotlib.pyplot.close("all")


@pytest.mark.slow
def test_columns_of_several_outputs_are_named_at_new_inputs_too():
    def outputs(X, y=None):
        with numpyro.plate("out", 2):
            f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("row", X.shape[0]):
            numpyro.sample("y", dist.Normal(f.T, 0.3).to_event(1), obs=y)

    x = np.linspace(-2.0, 2.0, 8)
    y = pd.DataFrame({"no2": np.sin(x), "o3": np.cos(x)})
    fit = pg.fit(outputs, pg.Laplace(hyper=pg.Fixed({})), 0, x, y=y)
    tree = fit.to_datatree(num_draws=4, predictions=x[:3])
    for group in ("observed_data", "predictions"):
        found = tree[group]["y"]
        assert found.coords[found.dims[-1]].values.tolist() == ["no2", "o3"]
