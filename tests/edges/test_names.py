"""Names in, names out: frames, columns and DataArrays are arrays to a model, and their names are
kept, checked and given back.
"""

import functools
import itertools
import json
import zipfile

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
import xarray as xr

import ppl_gp as pg
from ppl_gp.frames.names import Names, arrays
from ppl_gp.infer.fit import stopwatch
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.report import effects as part_plots
from ppl_gp.report import pictures as plots

NUM, WARDS = 12, ["north", "south", "west"]
rng = np.random.default_rng(0)
AGE, DOSE = rng.uniform(20, 70, NUM).round(1), rng.integers(0, 4, NUM)
WARD, SICK = rng.integers(0, 3, NUM), rng.integers(0, 2, NUM)
X = np.stack([AGE, DOSE, WARD], 1)
ROWS = [f"patient {i}" for i in range(NUM)]


def model(X, y=None, covariates=None):
    """A classifier with an effect of the ward, whose integer stands in X."""
    shift = 0.0 if covariates is None else covariates["shift"]
    effect = numpyro.sample("effect", dist.Normal(np.zeros(3), 1.0).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, np.array([20.0, 1.0])), X[:, :2]))
    with numpyro.plate("row", X.shape[0]):
        logits = f + effect[X[:, 2].astype(int)] + shift
        numpyro.sample("sick", dist.Bernoulli(logits=logits), obs=y)


def wards(codes, categories=WARDS):
    return pd.Categorical([WARDS[c] for c in codes], categories=categories)


def pandas_frame(rows=slice(None), categories=WARDS, index=ROWS):
    return pd.DataFrame(
        {"age": AGE, "dose": DOSE, "ward": wards(WARD, categories)}, index=index
    ).iloc[rows]


def pandas_answers():
    return pd.Series(pd.Categorical.from_codes(SICK, ["no", "yes"]), index=ROWS, name="sick")


@functools.cache
def fitted(named=True):
    given = (pandas_frame(), pandas_answers()) if named else (X, SICK)
    return pg.fit(model, pg.Laplace(hyper=pg.Fixed({})), 0, given[0], y=given[1])


def same(a, b):
    for name in ("f_mean", "f_variance", "mean", "probs"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.slow
def test_a_fit_by_a_frame_is_the_fit_by_its_array():
    fit, bare = fitted(), fitted(named=False)
    assert fit.log_evidence == bare.log_evidence and fit.model == bare.model
    assert jax.tree.all(jax.tree.map(np.array_equal, fit.draws, bare.draws))
    assert all(isinstance(x, jax.Array) for x in (*fit.args, *fit.kwargs.values()))
    assert fit.names["X"].columns == ("age", "dose", "ward") and not bare.names
    assert fit.names["X"].levels == (None, None, tuple(WARDS))
    assert fit.names["y"].levels == (("no", "yes"),) and fit.names["y"].rows == tuple(ROWS)
    want = bare.predict(X[:5])
    same(fit.predict(pandas_frame(slice(5))), want)
    same(fit.predict(X[:5]), want)  # bare arrays count as the columns in their order
    same(bare.predict(pandas_frame(slice(5)).assign(ward=WARD[:5])), want)


def test_names_compile_nothing_anew():
    method = pg.Laplace(hyper=pg.Fixed({}))
    # Here, not by `fitted`: compiled functions may be let go of between tests.
    pg.fit(model, method, 0, X, y=SICK)
    fit = pg.fit(model, method, 0, pandas_frame(), y=pandas_answers())
    fit.predict(X[:4])
    with stopwatch() as watch:
        fit.predict(pandas_frame(slice(4)))
    assert (fit.stats["compilations"], watch["compilations"]) == (0, 0)
    with stopwatch() as watch:
        fit.predict(pandas_frame(slice(3)))
    assert watch["compilations"] > 0  # of another shape: the watch sees what is compiled


def test_a_label_has_its_integer_whatever_the_frame_declares():
    fit, want = fitted(), fitted(named=False).predict(X[:5])
    same(fit.predict(pandas_frame(slice(5), WARDS[::-1])), want)
    few = pandas_frame(slice(5))
    same(fit.predict(few.assign(ward=few["ward"].cat.remove_unused_categories())), want)
    same(fit.predict(few.assign(ward=few["ward"].astype(str))), want)
    swapped = pd.Categorical.from_codes(1 - SICK[:5], ["yes", "no"])
    scores = fitted(named=False).log_density(X[:5], SICK[:5])
    np.testing.assert_array_equal(fit.log_density(few, swapped), scores)
    np.testing.assert_array_equal(fit.log_density(few, list(SICK[:5])), scores)


def test_columns_are_selected_by_name():
    fit, few = fitted(), pandas_frame(slice(5))
    want = fit.predict(few)
    more = few.assign(name="x", day=pd.Timestamp("2020-01-01"))  # neither is a number
    for table in (few[["dose", "age", "ward"]], more, more[more.columns[::-1]]):
        same(fit.predict(table), want)
    columns = {k: list(few[k]) for k in more.columns if k in few} | {"other": None}
    same(fit.predict(columns), want)
    alone = {k: few[k].iloc[0] for k in few}
    same(fit.predict(alone), fit.predict(few.iloc[:1]))
    with pytest.raises(pg.DataError, match=r"lacks the columns \['age'\]"):
        fit.predict({k: v for k, v in alone.items() if k != "age"})
    with pytest.raises(pg.DataError, match="X_new is a dict, and the training inputs"):
        fitted(named=False).predict(alone)


REFUSED = {
    "a row": (lambda f: f.iloc[0], r"is one row, a Series; give a frame, frame.iloc\[\[0\]\]"),
    "missing": (lambda f: f.drop(columns="dose"), r"lacks the columns \['dose'\]"),
    "other": (lambda f: f.rename(columns={"age": "Age"}), r"lacks .*\['age'\] and has .*\['Age'\]"),
    "unknown label": (
        lambda f: f.assign(ward=pd.Categorical(["north"] * 11 + ["east"])),
        r"column 'ward', has \['east'\] \(first in row 11\)",
    ),
    "numbers for labels": (lambda f: f.assign(ward=0), "column 'ward', holds int64 entries"),
    "labels for numbers": (lambda f: f.assign(dose="low"), "column 'dose', holds labels"),
    "no such place": (lambda f: np.where(X == X[0, 2], 7, X), "column 'ward', has 7"),
    "a fraction of a label": (lambda f: X + 0.5, "integers from 0 to 2"),
    "missing label": (
        lambda f: f.assign(ward=f["ward"].where(np.arange(NUM) != 3)),
        r"column 'ward', has no value in row 3 \(labelled 'patient 3'\)",
    ),
    "missing integer": (
        lambda f: f.assign(dose=pd.array([None, *DOSE[1:]], dtype="Int64")),
        "column 'dose', has no value in row 0",
    ),
    "NaN": (lambda f: f.assign(age=AGE * np.nan), r"nan at index \(0, 0\); drop or impute"),
    "dates": (
        lambda f: f.assign(age=pd.Timestamp("2020-01-01")),
        "column 'age', holds Datetime.*days since",
    ),
    "objects": (lambda f: f.assign(age=[(1,)] * NUM), "column 'age', holds .*categories"),
    "numbers as text": (lambda f: f.assign(age=AGE.astype(str)), "'age', holds numbers written as"),
    "one name twice": (lambda f: pd.concat([f, f], axis=1), "columns of one name"),
    "no columns": (lambda f: f[[]], "without columns"),
    "a data set": (lambda f: xr.Dataset.from_dataframe(f), "xarray Dataset; give one DataArray"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_by_name(case):
    change, words = REFUSED[case]
    with pytest.raises(pg.DataError, match=words):
        fitted().predict(change(pandas_frame()))


def test_a_fit_refuses_what_a_prediction_does():
    method = pg.Laplace(hyper=pg.Fixed({}))
    with pytest.raises(pg.DataError, match="label their rows otherwise: row 0 is 'patient 0'"):
        pg.fit(model, method, 0, pandas_frame(), y=pandas_answers().iloc[::-1])
    with pytest.raises(pg.DataError, match="column 'dose', has no value in row 2"):
        dose = pd.array([0, 1, None] * 4, dtype="Int64")
        pg.fit(model, method, 0, pandas_frame().assign(dose=dose), y=pandas_answers())
    with pytest.raises(pg.DataError, match="labels have no integers"):
        fitted(named=False).predict(pandas_frame())
    checked = pg.check(model, pandas_frame().assign(age=pd.Timestamp("2020")), y=SICK)
    assert not checked.ok and "column 'age'" in checked.items[0].message


def test_containers_paths_and_dtypes():
    args = ({"a": pd.Series([1, 2], name="a"), "b": (np.ones(2), pd.Index([3.0, 4.0]))}, "option")
    frame = pd.DataFrame({"i": [1, 2], "f": np.float32([0.5, 1.5]), "b": [True, False]})
    found, kwargs, names = arrays(["X", "o"], args, {"y": frame, "n": 3, "e": frame[["i", "b"]]})
    assert set(names) == {"X['a']", "X['b'][1]", "y", "e"}
    assert type(found[0]["a"]) is np.ndarray and found[0]["b"][0] is args[0]["b"][0]
    assert found[1] == "option" and kwargs["n"] == 3
    assert (kwargs["y"].dtype, kwargs["e"].dtype) == (np.float64, np.int64)
    np.testing.assert_array_equal(kwargs["y"], [[1, 0.5, 1], [2, 1.5, 0]])
    unnamed = pd.DataFrame(np.eye(2))
    assert arrays(["X"], (unnamed,), {})[2]["X"].columns is None
    again, _, _ = Names(tuple(names.items())).again(["X", "o"], found, {})
    assert again[0]["a"] is found[0]["a"]
    with pytest.raises(pg.DataError, match=r"argument 'X\['a'\]' lacks the columns \['a'\]"):
        names.again(["X", "o"], ({**args[0], "a": pd.Series([1, 2], name="c")}, "option"), {})


@pytest.mark.slow
def test_every_verb_takes_frames(monkeypatch):
    fit, bare = fitted(), fitted(named=False)
    frame, y = pandas_frame(slice(5)), pandas_answers().iloc[:5]
    drawn, want = fit.sample(0, frame, 3), bare.sample(0, X[:5], 3)
    np.testing.assert_array_equal(drawn.y, want.y)
    parts, want = fit.components(frame), bare.components(X[:5])
    np.testing.assert_array_equal(parts["effect"].mean, want["effect"].mean)
    places = fit.posterior(frame[["age", "dose"]]).mean
    np.testing.assert_array_equal(places, bare.posterior(X[:5, :2]).mean)
    read = pg.read(model, pandas_frame(), y=pandas_answers(), hyper={})
    bare_read, at = pg.read(model, X, y=SICK, hyper={}), jax.numpy.zeros(NUM)
    np.testing.assert_array_equal(read.log_lik(at), bare_read.log_lik(at))
    scores = bare.log_density(X[:5], SICK[:5])
    turned = pg.compare({"bare": bare, "named": fit}, frame[["ward", "dose", "age"]], y)
    assert turned.table[0]["log_density"] == pytest.approx(np.mean(scores))
    seen = {}
    monkeypatch.setattr(
        "ppl_gp.results.compare.compare.Comparison.add",
        lambda self, name, fit: seen.update({name: (self.X_test, self.y_test)}),
    )
    pg.compare({"bare": bare, "named": fit}, frame, y)
    for got in seen.values():
        np.testing.assert_array_equal(got[0], X[:5])
        np.testing.assert_array_equal(got[1], SICK[:5])


def test_trees_have_the_names():
    tree = fitted().to_datatree(num_draws=2)
    assert list(tree["posterior"]["f"].coords["row"].values) == ROWS
    inputs = tree["constant_data"]["X"]
    assert list(inputs.coords[inputs.dims[1]].values) == ["age", "dose", "ward"]
    assert json.loads(inputs.attrs["levels"]) == {"ward": WARDS}
    assert tree["observed_data"]["sick"].attrs["levels"] == ["no", "yes"]
    own = fitted().to_datatree(num_draws=2, coords={"row": range(NUM)})
    assert list(own["posterior"].coords["row"].values) == list(range(NUM))
    bare = fitted(named=False).to_datatree(num_draws=2)
    assert not bare["constant_data"]["X"].attrs and bare["posterior"]["f"].dims == (
        tree["posterior"]["f"].dims
    )


def test_a_saved_fit_keeps_them_but_for_the_rows(tmp_path):
    path = fitted().save(tmp_path / "named.fit")
    again = pg.load(path, model)
    assert "patient" not in zipfile.ZipFile(path).read("header.json").decode()
    assert again.names["X"].columns == ("age", "dose", "ward")
    assert again.names["X"].levels == (None, None, tuple(WARDS))
    assert again.names["y"].levels == (("no", "yes"),) and again.names["X"].rows is None
    same(again.predict(pandas_frame(slice(5), WARDS[::-1])), fitted().predict(X[:5]))
    same(again.predict(pandas_frame(slice(5))[["ward", "dose", "age"]]), fitted().predict(X[:5]))
    inputs = again.to_datatree(num_draws=2)["constant_data"]["X"]
    assert list(inputs.coords[inputs.dims[1]].values) == ["age", "dose", "ward"]
    assert not pg.load(fitted(named=False).save(tmp_path / "bare.fit"), model).names


@pytest.mark.parametrize(
    "told",
    [3, {"X": None}, {"X": {}}, {"X": {"columns": "age", "levels": [], "dims": None}}],
)
def test_damaged_names_are_a_store_error(told, tmp_path):
    path = fitted().save(tmp_path / "good.fit")
    with zipfile.ZipFile(path) as good, zipfile.ZipFile(tmp_path / "bad.fit", "w") as bad:
        for name in good.namelist():
            content = good.read(name)
            if name == "header.json":
                content = json.dumps({**json.loads(content), "names": told}).encode()
            bad.writestr(name, content)
    with pytest.raises(pg.StoreError, match="bad.fit.*damaged"):
        pg.load(tmp_path / "bad.fit", model)


def polars_frame(pl, kind, rows=NUM, shift=0):
    """Wards in a polars type; with `shift` other labels come first, which changes what polars'
    Categorical numbers them.
    """
    labels = [WARDS[(c + shift) % 3] for c in WARD]
    return pl.DataFrame({"age": AGE, "dose": DOSE, "ward": pl.Series(labels, dtype=kind)})[:rows]


def test_polars_is_the_same():
    pl = pytest.importorskip("polars")
    want = fitted(named=False)
    for kind in (pl.Enum(WARDS), pl.Categorical, pl.String):
        ward = polars_frame(pl, kind)
        (got,), _, names = arrays(["X"], (ward,), {})
        np.testing.assert_array_equal(got, X)
        assert names["X"].levels == (None, None, tuple(WARDS)) and names["X"].rows is None
        same(fitted().predict(ward[:5]), want.predict(X[:5]))
        turned = X.copy()
        turned[:, 2] = (WARD + 1) % 3
        same(fitted().predict(polars_frame(pl, kind, 5, 1)), want.predict(turned[:5]))
    y = pl.Series("sick", np.array(["no", "yes"])[SICK[:5]], dtype=pl.Enum(["yes", "no"]))
    np.testing.assert_array_equal(
        fitted().log_density(ward[:5], y), want.log_density(X[:5], SICK[:5])
    )
    same(fitted().predict(ward.select("dose", "age", "ward")), fitted().predict(ward))
    with pytest.raises(pg.DataError, match="column 'age', has no value in row 1"):
        fitted().predict(ward.with_columns(age=pl.Series([1.0, None] * 6)))
    with pytest.raises(pg.DataError, match=r"LazyFrame; call .collect\(\)"):
        fitted().predict(ward.lazy())


def test_xarray_is_the_same():
    def labelled(columns=("age", "dose", "ward"), dims=("patient", "measure"), rows=ROWS):
        return xr.DataArray(X, dims=dims, coords={dims[0]: rows, dims[1]: list(columns)})

    y = xr.DataArray(np.array(["no", "yes"])[SICK], dims="patient", coords={"patient": ROWS})
    (got,), kwargs, names = arrays(["X"], (labelled(),), {"y": y})
    np.testing.assert_array_equal(got, X)
    np.testing.assert_array_equal(kwargs["y"], SICK)
    assert names["X"].columns == ("age", "dose", "ward") and names["X"].rows == tuple(ROWS)
    assert names["y"].levels == (("no", "yes"),)
    with pytest.raises(pg.DataError, match="another order"):
        names.again(["X"], (labelled(("dose", "age", "ward")),), {})
    with pytest.raises(pg.DataError, match=r"the dimensions .* give .transpose"):
        names.again(["X"], (labelled().T,), {})
    _, _, turned = arrays(["X"], (labelled(rows=ROWS[::-1]),), {"y": y})
    with pytest.raises(pg.DataError, match="label their rows otherwise"):
        turned.require_same_rows(("X", "y"))
    bare = xr.DataArray(X[:5], dims=("patient", "measure"))
    same(fitted().predict(bare), fitted(named=False).predict(X[:5]))


def curve(X, y=None):
    """A regression over one input."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 20.0), X))
    with numpyro.plate("row", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def test_pictures_have_the_names():
    import matplotlib.pyplot as plt

    frame, y = pandas_frame()[["age"]], pd.Series(np.sin(AGE), index=ROWS, name="pulse")
    fit = pg.fit(curve, pg.Laplace(hyper=pg.Fixed({})), 0, frame, y=y)
    drawn = pg.plot_predictions(fit, frame, y).axes[0]
    assert (drawn.get_xlabel(), drawn.get_ylabel()) == ("age", "pulse")
    drawn = pg.plot_predictions(fit, AGE, np.asarray(y), xlabel="years", observed=False).axes[0]
    assert drawn.get_xlabel() == "years"
    forest = plots.plot_forest({"laplace": fit}, num_latents=2)
    ticks = [t.get_text() for ax in forest.axes for t in ax.get_yticklabels()]
    assert ticks == ["f[patient 0]", f"f[patient {NUM - 1}]"]
    whole = pandas_frame()
    panels = part_plots.plot_components(
        fitted(), whole, along={"effect": whole["ward"], "f": whole["age"]}
    ).axes
    assert [ax.get_xlabel() for ax in panels] == ["ward", "age"]
    assert [t.get_text() for t in panels[0].get_xticklabels()] == [
        WARDS[c] for c in np.unique(WARD)
    ]
    plt.close("all")


def effects(X, ward, y=None):
    """The ward as an argument of its own."""
    effect = numpyro.sample("effect", dist.Normal(np.zeros(3), 1.0).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 20.0), X))
    with numpyro.plate("row", X.shape[0]):
        numpyro.sample("sick", dist.Bernoulli(logits=f + effect[ward]), obs=y)


@functools.cache
def numbered():
    """A fit whose labels read as numbers: a label and its place are told apart by nothing else."""
    labels = pd.Series(pd.Categorical(WARD + 1), index=ROWS)
    ages, answers = pd.DataFrame({"age": AGE}, index=ROWS), pandas_answers()
    method = pg.Laplace(hyper=pg.Fixed({}))
    return ages, labels, pg.fit(effects, method, 0, ages, labels, y=answers)


@pytest.mark.parametrize("name", [None, "ward"])
@pytest.mark.parametrize("library", ["pandas", "polars", "frame"])
def test_a_column_of_numbers_does_not_stand_for_labels(library, name):
    ages, _, fit = numbered()
    if library == "polars":
        codes = pytest.importorskip("polars").Series(name or "", np.ones(2, int))
    else:
        codes = pd.Series(np.ones(2, int), name=name, index=ROWS[:2])
    codes = pd.DataFrame({0: np.ones(2, int)}) if library == "frame" else codes
    with pytest.raises(pg.DataError, match=r"made with the labels \['1', '2', '3'\]"):
        fit.predict(ages.iloc[:2], codes)


def test_every_argument_with_an_entry_a_row_labels_its_rows_alike():
    ages, labels, fit = numbered()
    with pytest.raises(pg.DataError, match="'ward' label their rows otherwise: row 0 is"):
        fit.predict(ages.iloc[:2], labels.iloc[[1, 0]])
    turned = labels.set_axis(ROWS[::-1])
    with pytest.raises(pg.DataError, match="'ward' label their rows otherwise"):
        pg.fit(effects, pg.Laplace(hyper=pg.Fixed({})), 0, ages, turned, y=pandas_answers())
    aligned = fit.predict(ages.iloc[[3, 1]], labels.iloc[[3, 1]]).probs
    np.testing.assert_allclose(aligned, fit.predict(ages, labels).probs[np.array([3, 1])])


def test_an_array_has_as_many_columns_as_the_frame_had():
    with pytest.raises(pg.DataError, match="has shape .* made with the 3 columns"):
        fitted().predict(X[:2, :2])


def test_observations_as_a_list_of_text_are_refused_as_text():
    ages, labels, fit = numbered()
    with pytest.raises(pg.DataError, match="U"):
        fit.log_density(ages.iloc[:2], ["no", "yes"], labels.iloc[:2])


def test_rows_left_out_are_called_as_they_were():
    left_out = fitted().loo().elpd_i
    assert left_out.coords["row"].values.tolist() == ROWS
    np.testing.assert_array_equal(left_out, fitted(named=False).loo().elpd_i)
    assert fitted(named=False).loo().elpd_i.coords["row"].values.tolist() == list(range(NUM))


def test_a_frame_of_one_column_is_told_from_the_column():
    ages, labels, _ = numbered()
    method = pg.Laplace(hyper=pg.Fixed({}))
    for column in (labels.to_frame("ward"), pd.DataFrame({"ward": WARD}, index=ROWS)):
        with pytest.raises(pg.DataError, match=r"shape.*'ward' came as a frame of one column"):
            pg.fit(effects, method, 0, ages, column, y=pandas_answers())
    with pytest.raises(pg.DataError, match=r"shape.*'y' came as a frame of one column"):
        pg.fit(effects, method, 0, ages, labels, y=pandas_answers().to_frame())


@pytest.mark.parametrize("named", [True, False])
def test_a_column_of_inputs_that_meets_rows_is_the_cause_and_not_y(named):
    """y was said to be (N, 1), where it is (N,) and X is (N, 1)."""

    def slope(X, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", X.shape[0]):
            numpyro.sample("y", dist.Normal(b * X, 0.3), obs=y)

    table = pd.DataFrame({"age": AGE})
    with pytest.raises(pg.DataError, match=r"an array of shape \(N, 1\) meets") as said:
        pg.fit(slope, pg.Laplace(), 0, table if named else table.to_numpy(), y=np.sin(AGE))
    assert " y of shape" not in str(said.value)
    assert ("'X' came as a frame of one column" in str(said.value)) == named
    assert pg.fit(slope, pg.Laplace(), 0, table["age"], y=np.sin(AGE)).result == "converged"


def inducing(X, y=None):
    """As `curve`, with the place of a ward in the second column."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 20.0), X[:, :1]))
    with numpyro.plate("row", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + 0.1 * X[:, 1], 0.3), obs=y)


def batches(wards_of=wards, columns=("age", "ward")):
    whole = pd.DataFrame({"age": AGE, "ward": wards_of(WARD)}, index=ROWS)[list(columns)]
    y = pd.Series(np.sin(AGE), index=ROWS, name="pulse")
    return [(whole.iloc[i : i + 6], y.iloc[i : i + 6]) for i in (0, 6)]


def test_names_of_a_streams_batches():
    source = StreamSource(pg.Stream(batches(), num_data=NUM), inducing)
    first = source.peek()
    np.testing.assert_array_equal(first.args[0], np.stack([AGE, WARD], 1)[:6])
    assert source.names["X"].columns == ("age", "ward") and source.names["X"].rows is None
    assert source.names["X"].levels == (None, tuple(WARDS)) and source.names["y"].columns == (
        "pulse",
    )
    turned = batches(lambda codes: wards(codes, WARDS[::-1]))
    mixed = StreamSource(pg.Stream([batches()[0], turned[1]], num_data=NUM), inducing)
    second = list(itertools.islice(mixed.batches(0), 2))[1]
    np.testing.assert_array_equal(second.args[0], np.stack([AGE, WARD], 1)[6:])
    for other, told in (
        (batches(lambda codes: ["east"] * NUM)[1], r"has \['east'\]"),
        ((batches()[1][0], batches()[1][1].iloc[::-1]), "label their rows otherwise"),
    ):
        source = StreamSource(pg.Stream([batches()[0], other], num_data=NUM), inducing)
        with pytest.raises(pg.DataError, match=told):
            list(itertools.islice(source.batches(0), 2))


@pytest.mark.slow
def test_a_fit_of_a_stream_has_its_names():
    method = pg.SVGP(num_inducing=3, max_steps=4, hyper=pg.Fixed({}))
    fit = pg.fit(inducing, method, 0, pg.Stream(batches(), num_data=NUM), throw=False)
    assert fit.names["X"].columns == ("age", "ward")
    new = pd.DataFrame({"age": AGE[:2], "ward": ["west", "north"]})
    found = fit.predict(new).f_mean
    np.testing.assert_array_equal(found, fit.predict(np.stack([AGE[:2], [2.0, 0.0]], 1)).f_mean)
    np.testing.assert_array_equal(found, fit.predict(new[["ward", "age"]]).f_mean)


def test_components_along_a_column():
    import matplotlib.pyplot as plt

    along, at = {"effect": "ward", "f": "age"}, {"dose": 1}
    panels = part_plots.plot_components(fitted(), pandas_frame(), along=along, at=at, num=5).axes
    assert [ax.get_xlabel() for ax in panels] == ["ward", "age"]
    assert [t.get_text() for t in panels[0].get_xticklabels()] == WARDS
    assert "dose = 1" in panels[0].get_title() and "age = " in panels[0].get_title()
    with pytest.raises(pg.DataError, match="names the column 'height'"):
        part_plots.plot_components(fitted(), pandas_frame(), along={"f": "height"})
    plt.close("all")


def test_pictures_take_the_middle_of_arguments_with_an_entry_per_row():
    """The grid is the picture's own: a column goes by its place too, and remedies run."""
    import matplotlib.pyplot as plt

    ages, labels, fit = numbered()
    code = int(np.argmax(np.bincount(WARD)))
    draw = functools.partial(part_plots.plot_components, fit, ages, along={"total": 0}, num=5)
    (ax,), (plain,) = draw(labels).axes, draw(code).axes
    np.testing.assert_allclose(ax.lines[0].get_ydata(), plain.lines[0].get_ydata())
    assert f"ward = {code + 1}" in ax.get_title() and ax.get_xlabel() == "age"
    held = fit.plot(along="age", num=5, ward=labels)
    assert f"ward = {code + 1}" in held.get_suptitle()
    curves = [f.axes[0].lines[0].get_ydata() for f in (held, fit.plot(num=5, ward=code))]
    np.testing.assert_allclose(*curves)
    with pytest.raises(pg.DataError, match=r"needs 'ward'.*fit.plot\(along='age', ward=1.0\)"):
        fit.plot(along="age", num=5)
    fit.plot(along="age", num=5, ward=1.0)
    with pytest.raises(pg.DataError, match=r"along=\{'total': 0\}, ward=1.0\)"):
        draw()
    draw(ward=1.0)
    with pytest.raises(pg.DataError, match=rf"'ward' has shape \(7,\), and X has {NUM} rows"):
        fit.plot(along="age", num=5, ward=WARD[:7])
    plt.close("all")


@pytest.mark.parametrize("is_frame", [True, False])
def test_remedies_for_a_single_column_lead_to_a_prediction(is_frame):
    """Following each message as it is written, from another column and from the other form."""

    def of_age(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 10.0), X))
        with numpyro.plate("patient", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    frame = pd.DataFrame({"age": AGE, "hour": AGE[::-1]})
    forms = {True: frame[["age"]], False: frame["age"]}
    fit = pg.fit(of_age, pg.Laplace(hyper=pg.Fixed({})), 0, forms[is_frame], y=np.sin(AGE))
    want = fit.predict(forms[is_frame]).mean
    other = frame[["hour"]] if is_frame else frame["hour"]
    with pytest.raises(pg.DataError, match=r"which the fit had not: .*Give these, frame") as error:
        fit.predict(other)
    remedy = str(error.value).split("Give these, ")[1].split("].")[0] + "]"
    np.testing.assert_array_equal(fit.predict(eval(remedy, {"frame": frame})).mean, want)
    with pytest.raises(pg.DataError, match=r"only the rows may differ.*Give") as error:
        fit.predict(forms[not is_frame])
    remedy = str(error.value).split("X_new[")[1].split("]")[0]
    array = np.asarray(forms[not is_frame])
    changed = eval(f"X_new[{remedy}]", {"X_new": array})
    np.testing.assert_array_equal(fit.predict(changed).mean, want)


def by_code(X, y=None):
    u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 10.0), X[:, 0]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[X[:, 1].astype(int)], 0.3), obs=y)


def test_a_dictionary_of_columns_takes_one_label_for_all_rows_and_known_codes():
    """The crash was pandas', and the code, a label of the fit, was told to be a number."""
    age = np.linspace(20.0, 80.0, 12)
    table = pd.DataFrame(
        {"age": age, "code": np.array(["250.01", "401", "V57"])[np.arange(12) % 3]}
    )
    fit = pg.fit(by_code, pg.Laplace(), 0, table, y=np.sin(age / 20.0))
    few = fit.predict({"age": age[:4], "code": "401"})
    whole = fit.predict(pd.DataFrame({"age": age[:4], "code": ["401"] * 4}))
    np.testing.assert_array_equal(few.mean, whole.mean)
    backwards = pd.Series(["401"] * 4, index=[3, 2, 1, 0])  # by place, as arrays are
    again = fit.predict({"age": pd.Series(age[:4]), "code": backwards})
    np.testing.assert_array_equal(again.mean, whole.mean)
    again = fit.predict({"age": age[:4], "code": pd.Categorical(["401"] * 4)})
    np.testing.assert_array_equal(again.mean, whole.mean)
    with pytest.raises(pg.DataError, match=r"columns \['code'\] have not as many entries"):
        fit.predict({"age": age[:4], "code": ["401"] * 3})


def test_a_label_without_a_class_has_no_probability():
    """It had that of the last class."""

    def model(X, y=None, num=2):
        with numpyro.plate("classes", num):
            f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

    x, y = np.linspace(0.0, 3.0, 8), pd.Series(pd.Categorical(list("abababab"), list("abc")))
    fixed = pg.Laplace(hyper=pg.Fixed({}))
    with pytest.raises(pg.DataError, match="3 labels.* observes 2 classes"):
        pg.fit(model, fixed, 0, x, y=y).predict(x).to_frame()
    named = pd.Categorical(list("abababab"), categories=["a", "b"])
    table = pg.fit(model, fixed, 0, x, y=named).predict(x).to_frame()
    np.testing.assert_allclose(table[["p(a)", "p(b)"]].sum(axis=1), 1.0)
