"""Every picture: what is drawn is what the fits say, and the words that make it legible are
there.
"""

import functools

import matplotlib

matplotlib.use("Agg")

import jax.numpy as jnp  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import numpyro  # noqa: E402
import numpyro.distributions as dist  # noqa: E402
import pandas as pd  # noqa: E402
import pytest  # noqa: E402
from scipy.stats import norm  # noqa: E402
from small_fits import HYPER, classification, classifier, made_fit  # noqa: E402

import ppl_gp as pg  # noqa: E402
from models.regression import regression  # noqa: E402
from ppl_gp.errors import DataError  # noqa: E402
from ppl_gp.frames.names import arrays  # noqa: E402
from ppl_gp.frames.opened import ArrayNames  # noqa: E402
from ppl_gp.report import panels, slices  # noqa: E402
from ppl_gp.report import pictures as plots  # noqa: E402
from ppl_gp.report.slices import inputs_in_columns, slice_through
from ppl_gp.results.compare.compare import compare  # noqa: E402
from ppl_gp.results.predict import scores  # noqa: E402

X, y, X_test = classification()
y_test = np.array([0, 1, 1, 0, 1, 0, 1])


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def words(figure):
    """Every text in a figure."""
    figure.canvas.draw()
    return " ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def curve():
    """A fit of regression in one dimension, made by hand."""
    x = np.linspace(-1.0, 1.0, 9)[:, None]
    hyper = {"lengthscale": np.array([0.7]), "variance": 1.0, "noise_scale": 0.3}
    return made_fit(regression, hyper, x, y=np.sin(3 * x[:, 0])), x, np.sin(3 * x[:, 0])


def test_band():
    fit, x, values = curve()
    new = np.linspace(-1.2, 1.2, 7)[:, None]
    figure = pg.plot_predictions(
        {"ep": fit}, x, values, X_new=new, xlabel="time (s)", observed=False
    )
    (line, *_) = figure.axes[0].lines
    np.testing.assert_allclose(line.get_ydata(), fit.predict(new).f_mean)
    vertices = figure.axes[0].collections[0].get_paths()[0].vertices
    p = fit.predict(new)
    highest = np.max(p.f_mean + 1.959964 * np.sqrt(p.f_variance))
    np.testing.assert_allclose(vertices[:, 1].max(), highest, rtol=1e-6)
    assert all(
        word in words(figure) for word in ("ep", "time (s)", "95 % interval", "mean", "data")
    )
    observed = pg.plot_predictions(fit, x, values, X_new=new)
    np.testing.assert_allclose(observed.axes[0].lines[1].get_ydata(), values)
    assert "EP" in words(observed)


X_OF_ONE = np.linspace(-2.0, 2.0, 12)
INPUTS = {
    "array": X_OF_ONE,
    "column": X_OF_ONE[:, None],
    "series": pd.Series(X_OF_ONE, name="age"),
    "frame": pd.DataFrame({"age": X_OF_ONE}),
}


@pytest.mark.one_case
@pytest.mark.parametrize("kind", INPUTS)
def test_a_band_is_over_inputs_of_any_shape_that_was_fitted(kind):
    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    X, y = INPUTS[kind], np.sin(X_OF_ONE)
    fit = pg.fit(model, pg.Laplace(), 0, X, y=y)
    for X_new in (None, X[:5], X_OF_ONE[:5], X_OF_ONE[:5, None]):
        (ax,) = pg.plot_predictions(fit, X, y, X_new=X_new).axes
        (line,) = (x for x in ax.lines if x.get_label() == "mean")
        x, mean = line.get_data()
        at = x if np.ndim(X) == 1 else x[:, None]
        np.testing.assert_allclose(mean, fit.predict(at).mean, rtol=1e-5)


@pytest.mark.slow
def test_a_rug_calls_classes_by_their_labels_and_classes_have_no_mean():
    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    y = pd.Series(pd.Categorical.from_codes(np.arange(12) % 2, ["zebra", "ant"]))
    fit = pg.fit(model, pg.Laplace(), 0, X_OF_ONE, y=y)
    (ax,) = pg.plot_predictions(fit, X_OF_ONE, y, observed=False).axes
    assert {"zebra", "ant"} <= set(ax.get_legend_handles_labels()[1])

    def three(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        cuts = jnp.array([-1.0, 1.0])
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.OrderedLogistic(f, cuts), obs=y)

    codes = np.arange(12) % 3
    rows = X_OF_ONE[:, None]
    names = pd.Series(pd.Categorical.from_codes(codes, ["low", "middle", "high"]), name="mark")
    fit = pg.fit(three, pg.Laplace(), 0, rows, y=names)
    figure = pg.plot_predictions(fit, rows, names, X_new=rows)
    (ax,), probs = figure.axes, np.asarray(fit.predict(rows).probs)
    shown = {line.get_label(): line for line in ax.lines}
    for c, name in enumerate(["low", "middle", "high"]):
        np.testing.assert_allclose(shown[name].get_ydata(), probs[:, c])
    marks = [np.sort(line.get_xdata()) for line in ax.lines if line.get_marker() == "|"]
    for c, at in enumerate(marks):
        np.testing.assert_array_equal(at, np.sort(np.ravel(X_OF_ONE)[codes == c]))
    assert "Probability of each mark" in words(figure) and ax.get_ylabel().endswith("mark")
    cut = pg.plot_predictions(fit, rows, names, along=0)
    assert "Probability of each mark" in words(cut) and len(cut.axes[0].lines) == 6


@pytest.mark.slow
def test_a_forest_names_function_and_row_and_calibration_the_most_probable_class():
    """Three functions of 12 rows: the figure's last line is that of the last row of the third."""

    def three(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("classes", 3):
            f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

    y = np.minimum(np.arange(12) // 3, 2)
    fit = pg.fit(three, pg.Laplace(), 0, X_OF_ONE[:, None], y=y)
    figure = plots.plot_forest({"laplace": fit})
    assert "eta[0, 0]" in words(figure) and "eta[2, 11]" in words(figure)
    medians = {line.get_ydata()[0]: line.get_xdata()[0] for line in figure.axes[-1].lines[2::3]}
    f = np.median(np.asarray(fit.to_datatree().posterior["eta"]), (0, 1))
    assert f.shape == (3, 12)
    np.testing.assert_allclose([*medians.values()][-1], f[2, 11])
    sparse = pg.fit(three, pg.SVGP(num_inducing=3, max_steps=1), 0, X_OF_ONE[:, None], y=y)
    assert set(sparse.latent) == {"f"} and set(fit.latent) == {"eta"}
    both = words(plots.plot_forest({"laplace": fit, "svgp": sparse}))
    assert "variance" in both
    pictured = words(plots.plot_calibration(fit, X_OF_ONE[:, None], y))
    assert "probability of the most probable class" in pictured


def test_surface():
    fit = made_fit(classifier, HYPER, X, y=y)
    figure = plots.plot_surface(
        {"ep": fit}, X, y, labels=("width (cm)", "height (cm)"), classes=("no", "yes"), num=5
    )
    text = words(figure)
    assert all(
        word in text for word in ("ep", "width (cm)", "height (cm)", "p(yes)", "no", "boundary 1/2")
    )
    drawn = [
        c
        for c in figure.axes[0].collections
        if len(c.get_offsets()) in (np.sum(y == 0), np.sum(y == 1))
    ]
    np.testing.assert_allclose(drawn[-1].get_offsets(), X[y == 1])


@pytest.mark.slow
def test_evidence(small_fit):
    comparison = compare(
        {k: small_fit(k) for k in ("laplace", "ep", "nuts")},
        X_test,
        y_test,
        num_importance_samples=4000,
    )
    figure = plots.plot_evidence(comparison)
    values = [row["log_evidence"] for row in comparison.table[:2]]
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), values)
    gap = values[0] - comparison.table[0]["truth"]
    assert (
        f"{gap:+.2f}" in words(figure) and "nats" in words(figure) and "nuts" not in words(figure)
    )
    with pytest.raises(DataError, match="no fit has a log evidence"):
        plots.plot_evidence(compare({"nuts": small_fit("nuts")}, X_test, y_test))


def test_forest(small_fit):
    figure = plots.plot_forest({k: small_fit(k) for k in ("ep", "nuts")}, num_latents=3)
    text = words(figure)
    assert all(
        word in text for word in ("lengthscale", "variance", "ep", "nuts", "intervals", "12")
    )


def test_calibration():
    fit = made_fit(classifier, HYPER, X, y=y)
    figure = plots.plot_calibration({"ep": fit}, X_test, y_test)
    stated, observed, rows = scores.reliability(fit.predict(X_test), y_test)
    upper, lower = figure.axes
    np.testing.assert_allclose(upper.lines[1].get_xydata(), np.stack([stated, observed], 1))
    np.testing.assert_allclose(lower.lines[0].get_xydata(), np.stack([stated, rows], 1))
    assert rows.sum() == len(y_test)
    assert "ECE" in words(figure) and "7 test rows" in words(figure)
    fit, x, values = curve()
    figure = plots.plot_calibration(fit, x, values)
    p = fit.predict(x)
    z = (values - np.asarray(p.mean)) / np.sqrt(np.asarray(p.variance))
    inside = np.abs(z)[:, None] <= norm.ppf(0.5 + 0.5 * scores.LEVELS)
    np.testing.assert_allclose(figure.axes[0].lines[1].get_ydata(), inside.mean(0))
    assert "coverage" in words(figure)


def test_bars_are_wide_where_a_bin_has_few_rows():
    few, many = np.array([1.0, 2.0]), np.array([100.0, 200.0])
    for share in (0.0, 0.5, 1.0):
        low, high = plots._share_interval(share * few, few)
        inner_low, inner_high = plots._share_interval(share * many, many)
        assert np.all(low <= share) and np.all(high >= share)
        assert np.all(high - low > 5 * (inner_high - inner_low))
    # one of one happened: the fifth percentile of Beta(1.5, 0.5)
    np.testing.assert_allclose(plots._share_interval(1.0, 1.0)[0], 0.2285, atol=1e-4)


def test_at_most_seven_methods_share_a_panel():
    fit = made_fit(classifier, HYPER, X, y=y)
    figure = plots.plot_calibration({f"method {i}": fit for i in range(9)}, X_test, y_test)
    drawn = [ax.lines[1:] for ax in figure.axes[:2]]
    assert [len(lines) for lines in drawn] == [7, 2] and "method 8" in words(figure)
    assert len({line.get_color() for line in drawn[0]}) == 7
    assert len({line.get_marker() for line in drawn[0]}) == 7


def test_wrong_dimensions():
    fit = made_fit(classifier, HYPER, X, y=y)
    with pytest.raises(DataError, match=r"has the columns \['x0', 'x1'\]; give along="):
        pg.plot_predictions(fit, X, y, observed=False)
    with pytest.raises(DataError, match=r"shape \(25, 1\)"):
        plots.plot_surface(fit, X[:, :1], y)


def test_surface_is_for_binary_observations():
    hyper = {"lengthscale": np.array([0.7, 0.7]), "variance": 1.0, "noise_scale": 0.3}
    fit = made_fit(regression, hyper, X, y=np.sin(X[:, 0]))
    with pytest.raises(DataError, match="binary observations"):
        plots.plot_surface(fit, X, y, num=4)


HELD = pd.DataFrame(
    {
        "dose": X[:, 0],
        "age": 40.0 + 10.0 * X[:, 1],
        "ward": pd.Categorical.from_codes(np.arange(25) % 3, ["north", "south", "west"]),
    }
)


def on_wards(X, y=None):
    """A GP over two columns, and a known effect of the third, whose integers are labels."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, np.array([1.0, 10.0])), X[:, :2]))
    shift = jnp.asarray([0.0, 1.0, 2.0])[X[:, 2].astype(int)]
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + shift, 0.5), obs=y)


@functools.cache
def on_wards_fit():
    codes = np.column_stack([HELD["dose"], HELD["age"], np.arange(25) % 3])
    fit = made_fit(on_wards, {}, codes, y=np.sin(X[:, 0]))
    fit.names = arrays(["X"], (HELD,), {})[2]
    return fit, codes


def test_a_slice_holds_the_other_inputs():
    fit, codes = on_wards_fit()
    cut = slice_through(inputs_in_columns(fit, HELD), "dose", {"ward": "south"}, 7)
    middle = np.sort(codes[:, 1])[12]
    want = np.column_stack([np.linspace(X[:, 0].min(), X[:, 0].max(), 7), [middle] * 7, [1.0] * 7])
    np.testing.assert_array_equal(cut.X, want)
    assert cut.held == {"age": f"{middle:.4g}", "ward": "south"} and cut.along.name == "dose"
    by_label = slice_through(inputs_in_columns(fit, codes, {"dose": (1.0, 2.0)}), 2, {0: 0.5}, 7)
    np.testing.assert_array_equal(by_label.X[:, 2], [0, 1, 2])
    np.testing.assert_allclose(by_label.X[:, 0], -0.25)
    assert by_label.held["dose"] == "0.5" and by_label.along.labels == ("north", "south", "west")
    assert slice_through(inputs_in_columns(fit, HELD), "dose", {}, 7).held["ward"] == "north"
    scaled = slice_through(inputs_in_columns(fit, HELD, {"dose": (1.0, 2.0)}), "dose", {}, 7)
    np.testing.assert_allclose(scaled.along.values, 1.0 + 2.0 * scaled.X[:, 0])
    for along, at, told in (
        ("sex", {}, r"names the column 'sex'; the inputs are \['dose', 'age', 'ward'\]"),
        ("dose", {"ward": "east"}, r"the labels are \['north', 'south', 'west'\]"),
        ("dose", {"dose": 1.0}, "'dose', which varies"),
        ("dose", {"age": "old"}, "holds numbers"),
        ("dose", {7: 1.0}, "names the column 7"),
    ):
        with pytest.raises(DataError, match=told):
            slice_through(inputs_in_columns(fit, HELD), along, at, 7)
    with pytest.raises(DataError, match=r"'X' is of shape \(25,\)"):
        inputs_in_columns(made_fit(regression_of_one, {}, X[:, 0], y=y), X[:, 0])


def regression_of_one(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def test_slices():
    fit, _ = on_wards_fit()
    figure = pg.plot_predictions(
        {"ep": fit}, HELD, X[:, 0], along="dose", at={"age": 41.5}, num=9, observed=False
    )
    (line, *_) = figure.axes[0].lines
    rows = pd.DataFrame({"dose": line.get_xdata(), "age": 41.5, "ward": ["north"] * 9})
    np.testing.assert_allclose(line.get_ydata(), fit.predict(rows).f_mean)
    assert "at age = 41.5, ward = north" in words(figure) and "dose" in words(figure)
    both = pg.plot_predictions(
        fit, HELD, X[:, 0], along="dose", at={"ward": ["north", "west"]}, num=9, observed=False
    )
    assert "ward = north" in words(both) and "ward = west" in words(both)
    assert "at age" in words(both) and "at age = 41.5" not in words(both)
    labels = pg.plot_predictions(fit, HELD, X[:, 0], along="ward")
    ticks = [t.get_text() for t in labels.axes[0].get_xticklabels()]
    assert ticks == ["north", "south", "west"]
    with pytest.raises(DataError, match="one column may have several"):
        pg.plot_predictions(
            fit, HELD, y, along="dose", at={"ward": ["north"], "age": [1.0, 2.0]}, observed=False
        )


def test_truth_values_and_small_counts_among_floats_are_points():
    """A frame turns them into floats; standardised ones are points in their own units."""
    truth, visits, dose = np.arange(6) % 2.0, np.array([0.0, 1, 3, 1, 0, 3]), 100.0 * np.arange(6)
    scaled = panels.Column((truth - 0.3) / 0.7, "scaled", shift=0.3, scale=0.7)
    drawn = {"truth": truth, "visits": visits, "dose": dose}
    columns = [*(panels.Column(x, name) for name, x in drawn.items()), scaled]
    for name, values in (("truth", [0, 1]), ("visits", [0, 1, 3]), ("scaled", [0, 1])):
        cut = slice_through(columns, name, {}, 50)
        np.testing.assert_allclose(cut.along.values, values, atol=1e-9)
        assert cut.along.labels == tuple(map(str, values)) and len(cut.X) == len(values)
    assert slice_through(columns, "dose", {}, 50).along.labels is None


def test_the_median_is_drawn_where_a_distribution_has_no_mean():
    """y = 1 - 2 (f + noise), whose median is 1 - 2 E[f]."""

    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        turned = dist.transforms.AffineTransform(1.0, -2.0)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.TransformedDistribution(dist.Normal(f, 0.5), turned), obs=y)

    fit = made_fit(model, {}, X_OF_ONE, y=np.sin(X_OF_ONE))
    assert fit.predict(X_OF_ONE).mean is None
    figure = fit.plot()
    (line,) = (x for x in figure.axes[0].lines if x.get_label() == "median")
    at, median = line.get_data()
    np.testing.assert_allclose(median, 1.0 - 2.0 * fit.predict(at).f_mean, atol=1e-6)
    assert "Median of y" in words(figure) and "mean" not in words(figure).lower()


def test_the_median_is_drawn_where_the_mean_is_not_a_number():
    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Cauchy(f, 0.5), obs=y)

    figure = made_fit(model, {}, X_OF_ONE, y=np.sin(X_OF_ONE)).plot()
    (line,) = (x for x in figure.axes[0].lines if x.get_label() == "median")
    assert np.isfinite(line.get_ydata()).all() and "Median of y" in words(figure)


def test_the_middle_of_an_argument_is_that_of_each_column():
    rows = np.array([[0.0, 3.0], [1.0, 5.0], [7.0, 4.0], [9.0, 9.0]])
    middle, told = slices._middle("W", rows, ArrayNames())
    np.testing.assert_array_equal(middle, [[1.0, 4.0]])
    assert told == "1, 4"
    wards = ArrayNames(("ward",), (("north", "south", "west"),))
    assert slices._middle("ward", np.array([0, 2, 2, 1]), wards)[1] == "west"


def test_classes_are_called_by_their_names_where_a_rug_shows_them():
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1]})
    labels = pd.Series(np.where(y == 1, "yes", "no"), dtype="category")
    fit = pg.fit(classifier, pg.Laplace(hyper=pg.Fixed(HYPER)), 0, frame, y=labels)
    (legend,) = pg.plot_predictions(fit, frame, labels, along="a", observed=False).legends
    assert {t.get_text() for t in legend.get_texts()} >= {"no", "yes"}


def test_a_fit_draws_itself():
    x = np.linspace(-1.0, 1.0, 9)
    hyper = {"lengthscale": np.array([0.7]), "variance": 1.0, "noise_scale": 0.3}
    fit = made_fit(regression, hyper, x[:, None], y=np.sin(3 * x))
    (ax,) = fit.plot().axes
    (points,) = (line for line in ax.lines if line.get_label() == "data")
    np.testing.assert_allclose(points.get_ydata(), np.sin(3 * x))
    (ax,) = fit.plot(x[:3, None], x[:3]).axes
    (points,) = (line for line in ax.lines if line.get_label() == "data")
    np.testing.assert_allclose(points.get_ydata(), x[:3])
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    ends = fit.predict(np.linspace(-1.0, x[2], 100)[:, None]).interval(0.95)
    np.testing.assert_allclose(band.max(), np.max(ends), rtol=1e-6)
    del fit.kwargs["y"]
    with pytest.raises(DataError, match=r"holds no training data.*fit.plot\(X, y\)"):
        fit.plot()


def test_effects_have_their_intervals():
    def model(group, y=None):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 5.0))
        with numpyro.plate("data", group.shape[0]):
            numpyro.sample("y", dist.Normal(b + u[group], 0.5), obs=y)

    fit = pg.fit(model, pg.Laplace(), 0, np.arange(12) % 3, y=np.arange(12.0) % 3)
    table = fit.summary()
    (ax,) = pg.plot_effects(fit, ["u"]).axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["u[0]", "u[1]", "u[2]"]
    (bars,) = ax.containers[0].lines[2]
    ends = np.array([segment[:, 0] for segment in bars.get_segments()])
    np.testing.assert_allclose(ends, table.loc[["u[0]", "u[1]", "u[2]"], ["5 %", "95 %"]])
    assert [a.get_title() for a in pg.plot_effects(fit).axes] == list(fit.sites)
    with pytest.raises(DataError, match=r"no intervals of \['f'\]"):
        pg.plot_effects(fit, ["f"])


def test_the_only_column_may_hold_labels():
    def model(ward, y=None):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("data", ward.shape[0]):
            numpyro.sample("y", dist.Normal(u[ward], 0.5), obs=y)

    ward = pd.Series(np.array(["A", "B", "C"])[np.arange(12) % 3], name="ward")
    fit = pg.fit(model, pg.Laplace(), 0, ward, y=np.arange(12.0) % 3)
    (ax,) = fit.plot().axes
    assert [t.get_text() for t in ax.get_xticklabels()] == ["A", "B", "C"]
    points = ax.containers[0].lines[0].get_ydata()
    np.testing.assert_allclose(points, fit.predict(pd.Series(["A", "B", "C"])).mean)


def test_lines_of_large_numbers_are_told_apart():
    """202101 and 202106 were both 2.021e+05, and one line was drawn."""
    X = np.stack([np.linspace(20.0, 80.0, 12), 202101.0 + np.arange(12) % 6], 1)
    fit = pg.fit(regression_of_one, pg.Laplace(), 0, X, y=np.sin(X[:, 0] / 20.0))
    figure = pg.plot_predictions(fit, X, np.zeros(12), along="x0", at={"x1": [202101, 202106]})
    drawn = [line.get_label() for line in figure.axes[0].lines]
    assert [k.rpartition(" = ")[2] for k in drawn if "=" in k] == ["202101", "202106"]


@pytest.mark.parametrize("order", [("nuts", "laplace"), ("laplace", "nuts")])
def test_a_forest_has_what_all_fits_have(order):
    """What one method integrates was a KeyError where another one came first."""

    def model(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        level = numpyro.sample("level", dist.Normal(0.0, 3.0))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, scale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(level + f, 0.3), obs=y)

    methods = {"laplace": pg.Laplace(), "nuts": pg.NUTS(num_warmup=20, num_samples=20)}
    x = np.linspace(0.0, 3.0, 8)
    fits = {k: pg.fit(model, methods[k], 0, x, y=np.sin(x), throw=False) for k in order}
    text = words(pg.plot_forest(fits))
    assert "scale" in text and "level" not in text


def test_bars_reach_the_ends_of_an_interval_that_is_mirrored_or_beside_the_mean():
    _, ax = plt.subplots()
    panels.draw_bars(ax, np.arange(2), np.array([1.0, 9.0]), np.array([[0.5, 2.0], [3.0, 4.0]]))
    (bars,) = ax.containers[0].lines[2]
    assert [s[:, 1].tolist() for s in bars.get_segments()] == [[0.5, 3.0], [2.0, 4.0]]


def test_the_band_of_f_has_its_quantiles_where_latents_make_it_a_mixture():
    """Of a function of two branches at -1 and 1 it was twice too wide, mean and 1.96 sd."""

    def branches(X, y=None):
        data = numpyro.plate("data", X.shape[0])
        with data:
            h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), jnp.concatenate([X, h], -1)))
        with data:
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    rng = np.random.default_rng(1)
    x = rng.uniform(-1.5, 1.5, (40, 1))
    y = rng.choice([-1.0, 1.0], 40) * np.sin(2.0 * x[:, 0])
    method = pg.SVGP(num_inducing=10, max_steps=100, hyper=pg.Fixed({}))
    fit, new = pg.fit(branches, method, 1, x, y=y, throw=False), np.array([[0.785]])
    (ax,) = pg.plot_predictions(fit, x, y, X_new=new, observed=False).axes
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    ends = np.ravel(fit.predict(new).f_interval(0.95))
    np.testing.assert_allclose([band.min(), band.max()], ends, rtol=1e-6)
