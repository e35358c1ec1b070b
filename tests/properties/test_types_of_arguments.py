"""The type of an array of whole numbers is no part of its values."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

import ppl_gp as pg

RNG = np.random.default_rng(8)
K = RNG.integers(0, 4, 24)
Y = np.array([3.0, 1.0, -1.0, -3.0])[K] + 0.3 * RNG.normal(size=24)
X = RNG.normal(size=24)
NEW = {"signed": np.array([-1, 0, 3]), "any": np.array([1, 0, 3])}
TYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int64", "UInt8", "Int64"]
METHODS = {
    "Laplace": pg.Laplace(),
    "joint": pg.Laplace(integrate=()),
    "MeanField": pg.MeanField(),
}
LONG = {
    "NUTS": pg.NUTS(num_warmup=50, num_samples=50),
    "SVI": pg.SVI(num_steps=50),
    "EllipticalSlice": pg.EllipticalSlice(num_warmup=20, num_samples=20),
    "SVGP": pg.SVGP(max_steps=20),
}


def number(x, k, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 3.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(b * (k - 2), 0.3), obs=y)


def number_and_index(x, k, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(0.1, 1.0), x))
    b = numpyro.sample("b", dist.Normal(0.0, 3.0))
    d = numpyro.sample("d", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f + b * (k - 2) + d[k], 0.3), obs=y)


def index(x, k, y=None):
    d = numpyro.sample("d", dist.Normal(0.0, 3.0).expand([4]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(d[k], 0.3), obs=y)


def as_type(values, dtype):
    return pd.Series(values, dtype=dtype) if dtype[0] in "UI" else values.astype(dtype)


def exact():
    """(log evidence, mean of b) of `number`."""
    S = 9.0 * np.outer(K - 2, K - 2) + 0.09 * np.eye(24)
    log_evidence = -0.5 * (
        Y @ np.linalg.solve(S, Y) + np.linalg.slogdet(S)[1] + 24 * np.log(2 * np.pi)
    )
    return log_evidence, 9.0 * (K - 2) @ np.linalg.solve(S, Y)


@pytest.mark.parametrize(
    "method", ["Laplace", "joint", pytest.param("MeanField", marks=pytest.mark.slow)]
)
def test_columns_of_any_type_are_the_same_numbers(method):
    """uint8 wrapped around: k - 2 was 254, and the evidence -362.0 for -108.0."""
    log_evidence, b = exact()
    for trained in TYPES if method == "joint" else TYPES[:1]:
        fit = pg.fit(number, METHODS[method], 0, X, as_type(K, trained), y=Y)
        assert fit.log_evidence == pytest.approx(log_evidence, rel=0, abs=1e-6)
        for dtype in TYPES:
            new = NEW["any" if dtype[0] in "uU" else "signed"]
            found = fit.predict(X[:3], as_type(new, dtype)).mean
            np.testing.assert_allclose(found, b * (new - 2.0), atol=1e-6)
    fit = pg.fit(number, METHODS[method], 0, X, K.astype(float), y=Y)
    found = fit.predict(X[:3], NEW["any"].astype("uint8")).mean
    np.testing.assert_allclose(found, b * (NEW["any"] - 2.0), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS | LONG)
@pytest.mark.parametrize("model", [number, number_and_index])
def test_every_method_answers_by_values(method, model):
    if method in ("EllipticalSlice", "SVGP") and model is number:
        pytest.skip("no GP")
    if method in ("joint", "MeanField", "SVI") and model is number_and_index:
        pytest.skip("has a GP")
    chosen = (METHODS | LONG)[method]
    new = np.array([1, 0, 3])

    def answers(dtype):
        fit = pg.fit(model, chosen, 0, X, as_type(K, dtype), y=Y, throw=False)
        return [fit.predict(X[:3], as_type(new, t)).mean for t in ("int64", dtype)]

    wanted = answers("int64")[0]
    for dtype in TYPES:
        for found in answers(dtype):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "dtype", ["uint8", *(pytest.param(t, marks=pytest.mark.slow) for t in ("int16", "uint32"))]
)
def test_a_negative_index_is_the_last_level_whatever_its_type_in_training(dtype):
    fits = [pg.fit(index, pg.Laplace(), 0, X, K.astype(t), y=Y) for t in (dtype, "int64")]
    with pytest.warns(UserWarning, match="negative indices"):
        found, wanted = (fit.predict(X[:3], NEW["signed"]).mean for fit in fits)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)
    assert wanted[0] == pytest.approx(wanted[2])


def flagged(x, flag, y=None, negated=True):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        shift = jnp.where(~flag, 1.0, 0.0) if negated else 2.0 * flag
        numpyro.sample("y", dist.Normal(b * x + shift, 0.3), obs=y)


@pytest.mark.parametrize("method", ["Laplace", "joint"])
def test_numbers_that_are_no_truth_values_are_not_cast_to_them(method):
    """2, 7 and -1 counted as True where the model has ~flag."""
    fit = pg.fit(flagged, METHODS[method], 0, X, K > 1, y=Y)
    wanted = fit.predict(X[:2], np.array([True, False])).mean
    for same in ([1, 0], [1.0, 0.0], [True, False]):
        np.testing.assert_array_equal(fit.predict(X[:2], np.array(same)).mean, wanted)
    for other in (2, 7, -1, 0.5):
        with pytest.raises(pg.DataError, match=f"'flag' was bool .* and has {other}.* now"):
            fit.predict(X[:2], np.array([other, 0]))


def test_truth_values_in_arithmetic_are_numbers():
    fit = pg.fit(flagged, pg.Laplace(), 0, X, K > 1, y=Y, negated=False)
    low, high = (fit.predict(X[:2], np.array(v)).mean for v in ([0, 0], [2, -1]))
    np.testing.assert_allclose(high - low, [4.0, -2.0], atol=1e-9)


def test_reading_and_saved_fits_take_values_too(tmp_path):
    log_evidence, b = exact()
    with_gp = lambda x, k, y=None: number_and_index(x, k, y)  # noqa: E731
    hyper = {"d": np.zeros(4), "b": 1.0}
    found = [
        pg.log_evidence(pg.Laplace(), pg.read(with_gp, X, K.astype(t), y=Y, hyper=hyper))[0]
        for t in ("uint8", "int64")
    ]
    assert found[0] == pytest.approx(float(found[1]), rel=0, abs=1e-10)
    fit = pg.fit(number, pg.MeanField(), 0, X, K.astype("uint8"), y=Y)
    fit.save(tmp_path / "a.fit")
    again = pg.load(tmp_path / "a.fit", number).predict(X[:3], NEW["any"].astype("uint8")).mean
    np.testing.assert_allclose(again, b * (NEW["any"] - 2.0), atol=1e-6)


def test_streams_and_files_on_disk_take_values_too(tmp_path):
    def bound(k):
        fit = pg.fit(small, pg.SVGP(max_steps=3, batch_size=8), 0, X, k, y=Y, throw=False)
        return float(fit.log_evidence)

    def small(x, k, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(0.1, 1.0), x))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(f - 1.5 * (k - 2), 0.3), obs=y)

    on_disk = np.memmap(tmp_path / "k", np.uint8, "w+", shape=24)
    on_disk[:] = K
    wanted = bound(K)
    assert bound(on_disk) == pytest.approx(wanted, rel=0, abs=1e-10)

    def streamed(dtype):
        rows = [
            dict(x=X[i : i + 8], k=K[i : i + 8].astype(dtype), y=Y[i : i + 8]) for i in (0, 8, 16)
        ]
        stream = pg.Stream(lambda: rows, num_data=24)
        fit = pg.fit(small, pg.SVGP(max_steps=3), 0, stream, throw=False)
        return float(fit.log_evidence)

    assert streamed("uint8") == pytest.approx(streamed("int64"), rel=0, abs=1e-10)


def test_integers_beyond_jax_are_refused():
    wrong = K.astype("uint64") + np.uint64(2**63)
    with pytest.raises(
        pg.DataError, match=r"argument 1 has integers beyond int64.*astype\(float\)"
    ):
        pg.fit(number, pg.Laplace(), 0, X, wrong, y=Y)


def logic(x, seen, k, y=None):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    d = numpyro.sample("d", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(a * jnp.where(~seen, 1.0, x) + d[k], 0.4), obs=y)


@pytest.mark.parametrize("method", ["Laplace", pytest.param("MeanField", marks=pytest.mark.slow)])
def test_whole_numbers_are_what_they_were_in_training(method):
    seen, new = K > 1, np.array([True, False, True])
    fit = pg.fit(logic, METHODS[method], 0, X, seen, K, y=Y)
    wanted = fit.predict(X[:3], new, NEW["any"]).mean
    for kind in (int, float, np.uint8, "Float64"):
        k = pd.Series(NEW["any"], dtype=kind) if kind == "Float64" else NEW["any"].astype(kind)
        found = fit.predict(X[:3], new.astype(float if kind == "Float64" else kind), k).mean
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(
        pg.DataError, match=r"'seen' was bool in training and has 0.5 now.*that type"
    ):
        fit.predict(X[:3], np.array([0.5, 0.0, 1.0]), NEW["any"])
    with pytest.raises(pg.DataError, match=r"'k' was int64 in training and has 2.5 now.*that type"):
        fit.predict(X[:3], new, np.array([2.5, 0.0, 1.0]))


def votes(x, n, y=None, whole=False):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        total = n.astype(int) if whole else n
        numpyro.sample("y", dist.Binomial(total, logits=b * x), obs=y)


def test_totals_that_are_floats_are_named_and_the_remedy_runs():
    """NumPyro draws with integers alone: an index or a missing row was given as the cause."""
    n, x = K + 1.0, X[:3]
    fit, right = (pg.fit(votes, pg.Laplace(), 0, X, n, y=K, whole=w) for w in (False, True))
    verbs = [
        lambda fit: fit.predict(x, n[:3]).mean,
        lambda fit: fit.log_density(x, K[:3], n[:3]),
        lambda fit: fit.sample(0, x, n[:3], num_samples=2).y,
        lambda fit: fit.to_datatree(num_draws=2, whole=True)["posterior"],
    ]
    for verb in verbs:
        with pytest.raises(pg.DataError, match=r"(?s)total_count.*n.astype.int.") as said:
            verb(fit)
        assert "look" not in str(said.value) and "one entry per row" not in str(said.value)
        verb(right)
    assert fit.log_evidence == right.log_evidence


def smooth(x, y=None):
    length = numpyro.sample("length", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, length), x))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.parametrize("option", [pg.Fixed, lambda v: pg.MAP(init=v), lambda v: pg.Grid(init=v)])
def test_a_traced_option_is_named_and_the_remedy_runs(option):
    def value(length):
        hyper = option({"length": length})
        return pg.fit(smooth, pg.Laplace(hyper=hyper), 0, X, y=Y).log_evidence

    for traced in (jax.grad(value), jax.jit(value), lambda v: jax.vmap(value)(jnp.array([v, v]))):
        with pytest.raises(pg.DataError, match=r"(Fixed|MAP|Grid)\((values|init)=.*pg.read"):
            traced(0.9)

    def evidence(length):
        factors = pg.read(smooth, X, y=Y, hyper={"length": length})
        return pg.log_evidence(pg.Laplace(), factors)[0]

    by_hand = (evidence(0.9 + 1e-5) - evidence(0.9 - 1e-5)) / 2e-5
    assert jax.grad(evidence)(0.9) == pytest.approx(float(by_hand), rel=1e-5)


@pytest.mark.parametrize("kind", [int, float, np.uint8])
@pytest.mark.parametrize("way", ["handler", "obs_mask"])
def test_a_mask_of_numbers_is_refused_with_the_words_that_help(kind, way):
    def masked(x, seen, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", x.shape[0]):
            if way == "handler":
                with numpyro.handlers.mask(mask=seen):
                    numpyro.sample("y", dist.Normal(b * x, 0.3), obs=y)
            else:
                numpyro.sample("y", dist.Normal(b * x, 0.3), obs=y, obs_mask=seen)

    with pytest.raises(pg.DataError, match=r"masked, line \d+.*seen.astype\(bool\)"):
        pg.fit(masked, pg.Laplace(), 0, X, (K > 0).astype(kind), y=Y)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, bool])
def test_read_takes_every_width_while_jax_traces(dtype):
    """The check of the narrowed integers asked a traced array for its values."""

    def log_evidence(scale, k):
        factors = pg.read(number, X, k, y=scale * Y, hyper={})
        return pg.log_evidence(pg.Laplace(), factors)[0]

    k = (K % 2 if dtype is bool else K).astype(dtype)
    whole = log_evidence(1.0, k.astype(np.int64))
    for held in (k, jnp.asarray(k)):
        traced = jax.jit(lambda scale, held=held: log_evidence(scale, held))(1.0)
        np.testing.assert_allclose(traced, whole, rtol=1e-12)
