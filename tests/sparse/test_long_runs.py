"""Long sparse runs: minibatches add up to all data; memory maps, streams, checkpoints, Ctrl-C;
nothing computed is lost.
"""

import dataclasses
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from small_fits import classifier

import ppl_gp as pg
from ppl_gp.deep.bound import terms
from ppl_gp.deep.structure import Structure
from ppl_gp.errors import DataError, FitError, Result, StoreError
from ppl_gp.infer.sources import ArraySource, Stream
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp import final_bound
from ppl_gp.infer.svgp import run as long_run
from ppl_gp.infer.svgp import step as training
from ppl_gp.infer.svgp.look import look_at
from ppl_gp.infer.svgp.run import identity
from ppl_gp.sparse.bound import Batch, Variational
from ppl_gp.sparse.expectation import Expectation
from ppl_gp.sparse.families import FullGaussian

N, B, STEPS, CHUNK = 60, 20, 20, 5
METHOD = pg.SVGP(num_inducing=8, batch_size=B, max_steps=STEPS)
WHOLE_STEPS = pg.Training(natural_rate=1.0)
OF = Structure(("f",), (), (), (), ("f",))  # one GP at given inputs
HYPER = {"lengthscale": jnp.asarray(1.2), "variance": jnp.asarray(2.0)}


@pytest.fixture(scope="module", autouse=True)
def short_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_run, "CHUNK", CHUNK)
        yield


@functools.cache
def data():
    rng = np.random.default_rng(11)
    X = rng.normal(size=(N, 2))
    return X, (np.sin(2 * X[:, 0]) + X[:, 1] + 0.5 * rng.normal(size=N) > 0).astype(int)


X_NEW = np.random.default_rng(12).normal(size=(5, 2))


def batches(num=STEPS):
    """As a list: each three make an epoch in order."""
    X, y = data()
    return [(X[i : i + B], y[i : i + B]) for i in (B * (k % (N // B)) for k in range(num))]


def fitted(*args, method=METHOD, **kwargs):
    return pg.fit(classifier, method, 0, *args, **kwargs)


@functools.cache
def array_fit():
    X, y = data()
    return fitted(X, y=y)


@functools.cache
def stream_fit():
    return fitted(Stream(batches(3), N))


def same(a, b):
    """Whether two fits are equal to the last bit."""
    leaves = [(f.hyper, f.latent, f.stats["bounds"], f.predict(X_NEW).probs) for f in (a, b)]
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, leaves), strict=True))


def with_checkpoints(folder, **settings):
    config = pg.Checkpoint(
        folder, every=CHUNK, **{k: settings.pop(k) for k in ("keep", "resume") if k in settings}
    )
    return dataclasses.replace(METHOD, checkpoint=config, **settings)


def stopping_at(step, error):
    """Three batches in turn for ever, but `error` in place of the batch of a step."""

    def epochs():
        for k, batch in enumerate(batches(2 * STEPS)):
            if k == step:
                raise error
            yield batch

    return epochs


# Minibatches


def test_epochs_are_without_replacement():
    X, y = data()
    source = ArraySource((X,), {"y": y}, B, seed=1)
    epochs = [np.concatenate([source.indices(3 * e + k) for k in range(3)]) for e in range(2)]
    assert all(sorted(e) == list(range(N)) for e in epochs) and not np.array_equal(*epochs)
    np.testing.assert_array_equal(
        source.indices(4), ArraySource((X,), {"y": y}, B, seed=1).indices(4)
    )
    assert not np.array_equal(source.indices(4), ArraySource((X,), {"y": y}, B, seed=2).indices(4))


def test_remainder_of_an_epoch_is_random():
    X, y = data()
    source = ArraySource((X,), {"y": y}, 25, seed=1)
    left = [set(range(N)) - {*source.indices(2 * e), *source.indices(2 * e + 1)} for e in range(30)]
    assert all(len(rows) == 10 for rows in left) and set.union(*left) == set(range(N))


def test_arrays_with_n_rows_are_split_and_others_are_not():
    X, y = data()
    table, scalar = np.ones((3, N)), np.float64(2.0)
    source = ArraySource((X, table), {"y": y, "scalar": scalar, "word": "logit"}, B, seed=0)
    rows = next(source.batches(0))
    chosen = np.sort(source.indices(0))
    np.testing.assert_array_equal(rows.args[0], X[chosen])
    np.testing.assert_array_equal(rows.kwargs["y"], y[chosen])
    assert (
        rows.args[1] is table and rows.kwargs["scalar"] is scalar and rows.kwargs["word"] == "logit"
    )
    np.testing.assert_array_equal(rows.weights, np.full(B, N / B))


def subsampled(X, y=None):
    """`classifier` with the model's own minibatches."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    plate = numpyro.plate("data", X.shape[0], subsample_size=min(B, X.shape[0]))
    with plate:
        X = numpyro.subsample(X, event_dim=1)
        y = None if y is None else numpyro.subsample(y, event_dim=0)
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with plate:
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@eqx.filter_jit
def parts(model, batch):
    rng = np.random.default_rng(5)
    scale = np.tril(0.2 * rng.normal(size=(8, 8))) + 0.5 * np.eye(8)
    q = FullGaussian(jnp.asarray(rng.normal(size=8)), jnp.asarray(scale))
    inducing = Variational({"f": pg.Points(jnp.asarray(rng.normal(size=(8, 2))))}, {"f": q})
    found = terms(model, Expectation(), pg.Layers(), OF, HYPER, inducing, batch)
    return found.expected, found.bound


def evaluated(model, rows) -> tuple[float, float]:
    return tuple(map(float, parts(model, long_run.as_batch(rows, jax.random.key(0)))))


@functools.cache
def full_bound():
    X, y = data()
    batch = Batch((jnp.asarray(X),), {"y": jnp.asarray(y)}, jnp.ones(N), jax.random.key(0))
    return tuple(map(float, parts(classifier, batch)))


@pytest.mark.parametrize("kind", ["arrays", "plate", "stream"])
def test_average_of_minibatch_bounds_is_the_full_bound(kind):
    X, y = data()
    if kind == "stream":
        source, model = StreamSource(Stream(batches(3), N), classifier), classifier
    else:
        plate, model = (None, classifier) if kind == "arrays" else ("data", subsampled)
        source = ArraySource((X,), {"y": y}, B, 0, plate, N)
    epoch = source.batches(6)
    bounds = [evaluated(model, next(epoch))[1] for _ in range(N // B)]
    np.testing.assert_allclose(np.mean(bounds), full_bound()[1], rtol=1e-11)
    assert np.ptp(bounds) > 1.0


@pytest.mark.parametrize("kind", ["arrays", "plate", "stream"])
def test_sweep_sums_to_the_full_bound_whatever_the_sizes(kind):
    """60 rows in batches of 20 (plate) and 16."""
    X, y = data()
    if kind == "stream":
        items = [(X[i : i + 16], y[i : i + 16]) for i in range(0, N, 16)]
        source, model = StreamSource(Stream(items, N), classifier), classifier
    else:
        plate, model = (None, classifier) if kind == "arrays" else ("data", subsampled)
        source = ArraySource((X,), {"y": y}, B, 0, plate, N)
    rows = list(source.sweep(16))
    assert len(rows) == (3 if kind == "plate" else 4)
    np.testing.assert_allclose(
        sum(evaluated(model, r)[0] for r in rows), full_bound()[0], rtol=1e-11
    )


def test_sweep_of_a_subsampling_model_counts_overlapping_rows_once():
    """50 rows: the third batch of 20 repeats ten."""
    X, y = (a[:50] for a in data())
    rows = list(ArraySource((X,), {"y": y}, B, 0, "data", 50).sweep(B))
    whole = Batch((jnp.asarray(X),), {"y": jnp.asarray(y)}, jnp.ones(50), jax.random.key(0))
    want = float(parts(classifier, whole)[0])
    np.testing.assert_allclose(sum(evaluated(subsampled, r)[0] for r in rows), want, rtol=1e-11)


@eqx.filter_jit
def bound_of(hyper, latent):
    """The bound over all data at a fit's hyperparameters and q(u)."""
    X, y = map(jnp.asarray, data())
    q = FullGaussian(latent.mean, jnp.linalg.cholesky(jnp.eye(8) - latent.reduction))
    batch = Batch((X,), {"y": y}, jnp.ones(N), jax.random.key(0))
    inducing = Variational({"f": latent.inducing}, {"f": q})
    return terms(classifier, Expectation(), pg.Layers(), OF, hyper, inducing, batch).bound


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "plate", "stream"])
def test_log_evidence_is_the_bound_over_all_data(kind):
    X, y = data()
    fits = {
        "arrays": array_fit,
        "stream": stream_fit,
        "plate": lambda: pg.fit(subsampled, METHOD, 0, X, y=y),
    }
    fit = fits[kind]()
    assert fit.stats["batch_size"] == B and fit.result == Result.completed
    np.testing.assert_allclose(
        fit.log_evidence, float(bound_of(fit.hyper, fit.latent["f"].draw(0))), rtol=1e-8
    )


# Memory maps


def on_disk(folder, X, y):
    for name, array in (("X", X), ("y", y)):
        np.save(folder / f"{name}.npy", array)
    return tuple(np.load(folder / f"{name}.npy", mmap_mode="r") for name in "Xy")


@pytest.mark.slow
def test_memory_map_gives_the_fit_of_arrays(tmp_path):
    X, y = on_disk(tmp_path, *data())
    fit = fitted(X, y=y)
    assert same(fit, array_fit()) and fit.log_evidence == array_fit().log_evidence
    assert isinstance(fit.args[0], np.memmap) and isinstance(fit.kwargs["y"], np.memmap)


def test_nan_late_in_a_memory_map_loses_nothing(tmp_path):
    X, y = (a.copy() for a in data())
    seed = array_seed()
    row = int(ArraySource((X,), {}, B, seed).indices(2)[0])
    assert row not in ArraySource((X,), {}, B, seed).indices(0)
    X[row, 1] = np.nan
    told = rf"batch 2 .*nan in positional argument 0 at row {row} of the data, column 1"
    with pytest.raises(FitError, match=told) as caught:
        fitted(
            on_disk(tmp_path, X, y)[0], y=y, method=dataclasses.replace(METHOD, inducing="kmeans")
        )
    fit = caught.value.fit
    assert (
        fit.result == Result.nonfinite
        and fit.stats["steps"] == 2
        and "batch 2" in fit.stats["bad_batch"]
    )
    assert np.isfinite(fit.predict(X_NEW).probs).all()


def array_seed():
    """The seed that `fitted` shuffles by."""
    key = jax.random.split(jax.random.key(0), 3)[0]
    return int(jax.random.randint(key, (), 0, 2**31 - 1))


def test_nan_in_the_first_batch_is_refused_before_any_work(tmp_path):
    X, y = (a.copy() for a in data())
    X[int(ArraySource((X,), {}, B, array_seed()).indices(0)[3])] = np.inf
    with pytest.raises(DataError, match="batch 0 .*inf in positional argument 0"):
        fitted(on_disk(tmp_path, X, y)[0], y=y)


def test_model_that_subsamples_a_memory_map_is_refused(tmp_path):
    X, y = on_disk(tmp_path, *data())
    with pytest.raises(DataError, match="plate 'data' subsamples"):
        pg.fit(subsampled, dataclasses.replace(METHOD, batch_size=30), 0, X, y=y)


def test_labels_outside_the_support_are_found_in_every_batch():
    X, y = data()
    y = y.copy()
    y[ArraySource((X,), {}, B, array_seed()).indices(2)[0]] = -1
    with pytest.raises(DataError, match="outside the support"):
        fitted(X, y=y)


# Streams


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter(batches()),
        lambda: (batch for batch in batches()),
        lambda: lambda: iter(batches(3)),
        lambda: [{"X": jnp.asarray(X), "y": list(y)} for X, y in batches(3)],
        lambda: [[X, y == 1] for X, y in batches(3)],
    ],
    ids=["iterator", "generator", "function", "dictionaries", "booleans"],
)
def test_streams_of_the_same_batches_give_the_same_fit(make):
    fit = fitted(Stream(make(), N))
    assert same(fit, stream_fit()) and fit.result == Result.completed
    assert fit.log_evidence is None or fit.log_evidence == stream_fit().log_evidence


def test_stream_gives_the_fit_of_arrays():
    """The batches that arrays are cut into, as a stream."""
    X, y = data()
    source = ArraySource((X,), {"y": y}, B, array_seed())
    items = [
        (r.args[0], r.kwargs["y"]) for _, r in zip(range(STEPS), source.batches(0), strict=False)
    ]
    # Of a stream one batch is known at the start: the points' scales would differ.
    method = dataclasses.replace(METHOD, inducing=X[:8], train_inducing=False)
    stream, arrays = fitted(Stream(items, N), method=method), fitted(X, y=y, method=method)
    np.testing.assert_allclose(stream.stats["bounds"], arrays.stats["bounds"], rtol=1e-12)
    np.testing.assert_allclose(stream.predict(X_NEW).probs, arrays.predict(X_NEW).probs, rtol=1e-12)


def test_generator_that_ends_early():
    with pytest.raises(FitError, match="stream_ended") as caught:
        fitted(Stream(iter(batches(7)), N))
    fit = caught.value.fit
    assert (
        fit.result == Result.stream_ended and fit.stats["steps"] == 7 and fit.log_evidence is None
    )
    np.testing.assert_allclose(fit.stats["bounds"], stream_fit().stats["bounds"][:7], rtol=1e-12)
    assert np.isfinite(fit.predict(X_NEW).probs).all()
    with pytest.raises(DataError, match="None; .*if a Stream does not end early"):
        pg.compare_models({"ended": fit, "again": fit})


def test_smaller_last_batch_counts_as_its_rows_do():
    """45 rows in batches of 20: each row stands for three, and the average over a pass is the full
    bound.
    """
    X, y = (a[:45] for a in data())
    source = StreamSource(
        Stream([(X[i : i + B], y[i : i + B]) for i in range(0, 45, B)], 45), classifier
    )
    rows = [batch for _, batch in zip(range(3), source.batches(0), strict=False)]
    assert rows[-1].args[0].shape == (B, 2) and np.count_nonzero(rows[-1].weights) == 5
    whole = Batch((jnp.asarray(X),), {"y": jnp.asarray(y)}, jnp.ones(45), jax.random.key(0))
    want = float(parts(classifier, whole)[1])
    np.testing.assert_allclose(
        np.mean([evaluated(classifier, r)[1] for r in rows]), want, rtol=1e-11
    )


def regression(X, y=None, shift=0.0, table=None, order=None, place=None, scaled=False):
    """GP regression of unit scales; what else it may be given, and what its batches must not do."""
    inputs = X if place is None else table[place]
    inputs = (inputs - inputs.mean(0)) / inputs.std(0) if scaled == "inputs" else inputs
    f = numpyro.sample(
        "f", pg.GP(pg.kernels.RBF(1.0, X.std() if scaled == "kernel" else 1.0), inputs)
    )
    f = f if order is None else f[order]
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + jax.tree.reduce(jnp.add, shift), 0.5), obs=y)


@functools.cache
def line():
    rng = np.random.default_rng(3)
    x = np.sort(rng.normal(size=32))
    return x[:, None], np.sin(2 * x) + 0.3 * rng.normal(size=32)


def held(X, **options):
    """q(u) alone is trained, with points at some inputs."""
    return pg.SVGP(
        inducing=X[::4], train_inducing=False, hyper=pg.Fixed({}), **{"max_steps": 300, **options}
    )


@pytest.mark.slow
def test_an_outlier_that_ends_a_stream_counts_once():
    """The last batch has one row: it weighed as much as the other 32."""
    X, y = (np.append(a, [b], 0) for a, b in zip(line(), ([0.0], 3.0), strict=True))
    items = [(X[i : i + 16], y[i : i + 16]) for i in (0, 16, 32)]
    stream = pg.fit(regression, held(X[:32]), 0, Stream(items, 33))
    whole = pg.fit(regression, held(X[:32]), 0, X, y=y)
    at = np.zeros((1, 1))
    assert abs(stream.predict(at).f_mean[0] - whole.predict(at).f_mean[0]) < 0.1
    assert abs(stream.log_evidence - whole.log_evidence) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_covariates_in_containers_are_split_with_the_rows(kind):
    X, y = line()
    shift = {"a": 2.0 * np.cos(3 * y), "b": (1.0, X[:, 0] ** 2)}
    whole = pg.fit(regression, held(X), 0, X, y=y, shift=shift)
    if kind == "arrays":
        part = pg.fit(regression, held(X, batch_size=8), 0, X, y=y, shift=shift)
    else:
        cut = lambda i: jax.tree.map(lambda v: v[i::4] if np.ndim(v) else v, (X, y, shift))  # noqa: E731
        part = pg.fit(regression, held(X), 0, Stream([cut(i) for i in range(4)], 32))
    np.testing.assert_allclose(
        part.predict(X, shift=shift).f_mean, whole.predict(X, shift=shift).f_mean, atol=0.05
    )


@pytest.mark.slow
def test_observations_with_the_data_last_are_split_along_the_data():
    def outputs(X, y=None):
        with numpyro.plate("units", 3):
            f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    X, y = line()
    Y = np.stack([y, -y, 2 * y])
    part, whole = (pg.fit(outputs, held(X, batch_size=b), 0, X, y=Y) for b in (8, 32))
    np.testing.assert_allclose(part.latent["f"].mean, whole.latent["f"].mean, atol=0.05)
    assert abs(part.log_evidence - whole.log_evidence) < 0.05


@pytest.mark.one_case
@pytest.mark.parametrize(
    "kwargs, words",
    [
        (
            {"order": np.arange(32)[::-1].copy()},
            "depends on values at other rows than its own",
        ),
        ({"scaled": "inputs"}, "the inputs or the mean of 'f' see other rows"),
        ({"scaled": "kernel"}, "the kernel of 'f' sees other rows"),
    ],
    ids=["lookup", "normalised", "heuristic"],
)
def test_models_whose_rows_do_not_stand_alone_get_no_minibatches(kwargs, words):
    X, y = line()
    with pytest.raises(pg.NotPointwiseError, match=words):
        pg.fit(regression, held(X, batch_size=8), 0, X, y=y, **kwargs)
    if "order" not in kwargs:  # all data in a step are what the model says
        assert pg.fit(regression, held(X, max_steps=5), 0, X, y=y, **kwargs).result == "completed"


@pytest.mark.slow
def test_a_table_with_as_many_rows_as_data_is_no_minibatch():
    """It is looked up, so that it need not grow with the data."""
    X, y = line()
    table = {"table": X, "place": np.arange(32)[::-1].copy()}
    part, whole = (pg.fit(regression, held(X, batch_size=b), 0, X, y=y, **table) for b in (8, 32))
    np.testing.assert_allclose(part.latent["f"].mean, whole.latent["f"].mean, atol=0.05)


def inflated(X, y=None):
    """Zero-inflated counts: not additive in rate and gate, as they meet at y = 0."""
    with numpyro.plate("functions", 2):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.ZeroInflatedPoisson(jax.nn.sigmoid(f[1]), jnp.exp(f[0])), obs=y)


def test_additive_is_what_is_proved_whatever_the_data():
    """Also of a first batch without zeros."""
    X, y = line()[0], np.arange(1, 33)
    stream = Stream([(X[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)], 32)
    assert not look_at(held(X), inflated, (stream,), {}, 0).additive
    assert not look_at(held(X, batch_size=8), inflated, (X,), {"y": y}, 0).additive

    def apart(X, y=None):
        with numpyro.plate("functions", 2):
            f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f.T)).to_event(1), obs=y)

    both = np.stack([y, y], 1)
    assert look_at(held(X, batch_size=8), apart, (X,), {"y": both}, 0).additive


def test_a_run_that_falls_below_its_start_has_diverged():
    X, y = line()
    items = [(X[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)]
    wild = held(X, training=pg.Training(natural=False), learning_rate=_wild, max_steps=40)
    fit = pg.fit(regression, wild, 0, Stream(items, 32), throw=False)
    assert fit.result == Result.diverged and fit.stats["bounds"][-1] < fit.stats["bounds"][0]
    assert fit.stats["first_batch_only"] is True
    with pytest.raises(FitError, match="far below its start"):
        pg.fit(regression, wild, 0, Stream(items, 32))


def _wild(step):
    return 30.0


@pytest.mark.parametrize(
    "stream, words",
    [
        (lambda: Stream([], N), "holds no batch"),
        (lambda: Stream(batches(3), 0), "num_data=0"),
        (lambda: Stream([{"inputs": data()[0]}], N), "does not fit the model's arguments"),
        (lambda: Stream([(*data(), 1, 2)], N), "too many positional"),
        (lambda: Stream([data()[0]], N), "of type ndarray"),
        (lambda: Stream([()], N), "missing a required argument"),
        (lambda: Stream([(data()[0][:0], data()[1][:0])], N), "0 rows"),
        (lambda: Stream([(data()[0].astype(str), data()[1])], N), "convert them to numbers"),
        (lambda: Stream([(data()[0], data()[1] - 5)], N), "outside the support"),
    ],
)
def test_first_batches_that_cannot_be_used(stream, words):
    with pytest.raises(DataError, match=words):
        fitted(stream())


@pytest.mark.parametrize(
    "bad, words",
    [
        (lambda X, y: (data()[0], data()[1]), r"60 rows, and the first one 20"),
        (lambda X, y: (X[:, :1], y), r"shapes .*\(20, 1\)"),
        (lambda X, y: (X, y[:-1]), r"shapes .*\(19,\)"),
        (lambda X, y: (X,), "shapes"),
        (lambda X, y: {"Z": X}, "does not fit the model's arguments"),
    ],
)
def test_late_batches_that_cannot_be_used_lose_nothing(bad, words):
    items = batches(14)
    items[7] = bad(*items[7])
    with pytest.raises(FitError, match=f"batch 7 .*{words}") as caught:
        fitted(Stream(iter(items), N))
    fit = caught.value.fit
    assert fit.stats["steps"] == 7 and np.isfinite(fit.predict(X_NEW).probs).all()


@pytest.mark.parametrize(
    "bad", [lambda X, y: (X[:, :1], y), lambda X, y: (X * np.nan, y)], ids=["shape", "nan"]
)
def test_bad_batch_of_a_list_loses_nothing(bad):
    """Which would be met again where the bound is summed over all data."""
    items = batches(9)
    items[7] = bad(*items[7])
    with pytest.raises(FitError, match="batch 7 ") as caught:
        fitted(Stream(items, 9 * B))
    fit = caught.value.fit
    assert (
        fit.stats["steps"] == 7
        and fit.log_evidence is None
        and np.isfinite(fit.predict(X_NEW).probs).all()
    )


def test_error_of_the_users_stream_loses_nothing():
    gone = OSError("shard 3 is gone")
    with pytest.raises(FitError, match="batch 12 .*OSError: shard 3 is gone") as caught:
        fitted(Stream(iter(stopping_at(12, gone)()), N))
    assert caught.value.fit.stats["steps"] == 12
    assert caught.value.__cause__ is gone and "stream_error" not in caught.value.fit.stats


@pytest.mark.slow
@pytest.mark.parametrize(
    "which, name", [(0, "positional argument 0 at row 4 of the batch, column 1"), (1, "y at row 4")]
)
def test_nan_late_in_a_stream_loses_nothing(which, name):
    items = [(X.copy(), y.astype(float)) for X, y in batches(14)]
    items[8][which][(4, 1)[: 2 - which]] = np.nan
    with pytest.raises(FitError, match=f"batch 8 .*nan in {name}") as caught:
        fitted(Stream(iter(items), N))
    fit = caught.value.fit
    assert (
        fit.result == Result.nonfinite
        and fit.stats["steps"] == 8
        and name in fit.stats["bad_batch"]
    )
    np.testing.assert_allclose(fit.stats["bounds"], stream_fit().stats["bounds"][:8], rtol=1e-12)
    assert np.isfinite(fit.predict(X_NEW).probs).all()


@pytest.mark.slow
def test_keywords_beside_a_stream_reach_the_model():
    probit = fitted(Stream(batches(3), N), link="probit")
    assert probit.kwargs["link"] == "probit"
    assert abs(probit.log_evidence - stream_fit().log_evidence) > 1e-3
    with pytest.raises(DataError, match="only positional argument"):
        fitted(Stream(batches(3), N), data()[0])


def test_numbers_that_differ_from_batch_to_batch_are_not_shared():
    """A number in a stream's batch is that batch's own."""
    X, y = batches(1)[0]
    source = StreamSource(Stream([(X, y, s) for s in (0.5, 2.0)], N), lambda X, y, s: None)
    rows = [r for _, r in zip(range(2), source.batches(0), strict=False)]
    constant, varying = long_run.stack(rows, jax.random.split(jax.random.key(0), 2))
    assert constant.kwargs["s"] is None
    np.testing.assert_array_equal(varying.kwargs["s"], [0.5, 2.0])


def test_stream_with_fewer_rows_than_told_warns():
    with pytest.warns(UserWarning, match="60 rows, and num_data=100"):
        list(StreamSource(Stream(batches(3), 100), classifier).sweep(B))


def test_sweep_leaves_a_stream_without_end():
    endless = Stream(lambda: itertools.cycle(batches(3)), 50)
    rows = list(StreamSource(endless, classifier).sweep(B))
    assert sum(r.weights.sum() for r in rows) == 50


@pytest.mark.parametrize("made", [batches, lambda num: lambda: iter(batches(num))])
@pytest.mark.parametrize("num_data", [20, 30, 59, 61, 100])
def test_another_number_of_rows_than_told_is_told_with_what_it_does(made, num_data):
    """By steps, whatever the stream is; the factor is that between the weights of the rows, behind
    the first pass.
    """
    source = StreamSource(Stream(made(3), num_data), classifier)
    right = StreamSource(Stream(made(3), N), classifier).peek().weights[0]
    with pytest.warns(UserWarning, match=f"60 rows, and num_data={num_data}") as told:
        rows = [r for r, _ in zip(source.batches(0), range(10), strict=False)]
    assert len(told) == 1
    factor = float(str(told[0].message).split("weigh ")[1].split(" times")[0])
    np.testing.assert_allclose(rows[-1].weights / right, factor, rtol=1e-2)  # of three digits


def test_a_list_of_more_rows_than_told_is_told_by_one_pass():
    with pytest.warns(UserWarning, match="60 rows, and num_data=20"):
        rows = list(StreamSource(Stream(batches(3), 20), classifier).sweep(B))
    assert sum(r.weights.sum() for r in rows) == 20


# Checkpoints


def test_checkpoints_change_nothing_and_keep_the_newest(tmp_path):
    X, y = data()
    fit = fitted(X, y=y, method=with_checkpoints(tmp_path, keep=3))
    assert same(fit, array_fit()) and "checkpoint_error" not in fit.stats
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        f"step-{n:09d}.ckpt" for n in (10, 15, 20)
    ]


def interrupted(folder, step=12, **settings):
    fit = fitted(
        Stream(stopping_at(step, KeyboardInterrupt()), N),
        method=with_checkpoints(folder, **settings),
    )
    assert fit.result == Result.interrupted and fit.stats["steps"] == step // CHUNK * CHUNK
    return fit


@pytest.mark.one_case
@pytest.mark.parametrize(
    "settings", [{}, {"expectation": pg.Expectation(num_draws=3)}], ids=["quadrature", "draws"]
)
def test_resumed_run_has_the_numbers_of_an_uninterrupted_one(settings, tmp_path):
    interrupted(tmp_path, **settings)
    fit = fitted(Stream(batches(3), N), method=with_checkpoints(tmp_path, **settings))
    whole = fitted(Stream(batches(3), N), method=dataclasses.replace(METHOD, **settings))
    assert same(fit, whole) and fit.log_evidence == whole.log_evidence


def test_run_that_was_killed_is_resumed(tmp_path):
    """SIGKILL in the middle of a run in another process."""
    code = (
        "import sys, time; sys.path[:0] = ['tests/support', 'tests/sparse']\n"
        "import test_long_runs as t, ppl_gp as "
        "pg; from ppl_gp.infer.svgp import run as long_run; long_run.CHUNK = t.CHUNK\ndef "
        "slow():\n    for batch in t.batches(3):\n        yield batch; "
        "time.sleep(0.3)\nt.fitted(t.Stream(slow, t.N), method=t.with_checkpoints(sys.argv[1]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2], env=os.environ
    )
    deadline = time.monotonic() + 120
    while (
        not list(tmp_path.glob("*10.ckpt"))
        and time.monotonic() < deadline
        and process.poll() is None
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL and not list(tmp_path.glob("*20.ckpt"))
    fit = fitted(Stream(batches(3), N), method=with_checkpoints(tmp_path))
    assert same(fit, stream_fit()) and fit.log_evidence == stream_fit().log_evidence


_SLOW = """
import os, sys, time
sys.path[:0] = ["tests/support", "tests/sparse"]
import test_long_runs as t
from ppl_gp.infer.svgp import run as long_run
long_run.CHUNK, fsync = t.CHUNK, os.fsync
os.fsync = lambda file: (time.sleep(0.2), fsync(file))
def slow():
    print("running", flush=True)
    for batch in t.batches(3):
        yield batch
        time.sleep(0.1)
t.fitted(t.Stream(slow, t.N), method=t.with_checkpoints(sys.argv[1]))
"""


@pytest.mark.slow
def test_ten_kills_lose_nothing(tmp_path):
    """SIGKILL at random moments, of writing too; the last run has the numbers of a whole one."""
    rng, killed = np.random.default_rng(0), 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", _SLOW, str(tmp_path)],
            cwd=Path(__file__).parents[2],
            env=os.environ,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stdout.readline() == b"running\n"
        time.sleep(rng.uniform(0.0, 1.5))
        process.kill()
        killed += process.wait(30) == -signal.SIGKILL
    assert killed >= 5
    fit = fitted(Stream(batches(3), N), method=with_checkpoints(tmp_path))
    assert same(fit, stream_fit()) and fit.log_evidence == stream_fit().log_evidence
    assert not list(tmp_path.glob(".*"))


def test_finished_run_is_not_run_again(tmp_path):
    """Neither one that made all steps nor one that had ended by itself."""
    X, y = data()
    method = with_checkpoints(tmp_path, patience=3, training=WHOLE_STEPS, learning_rate=5.0)
    first = fitted(X, y=y, method=method)
    assert first.result == Result.converged and first.stats["steps"] < STEPS
    again = fitted(X, y=y, method=method)
    assert same(first, again) and again.result == Result.converged


def test_resume_false_starts_anew_and_replaces_the_old_files(tmp_path):
    X, y = data()
    method = with_checkpoints(tmp_path)
    fitted(X, y=y, method=method)
    anew = with_checkpoints(tmp_path, resume=False, learning_rate=0.01)
    fit = fitted(Stream(stopping_at(12, KeyboardInterrupt()), N), method=anew)
    assert fit.stats["steps"] == 10
    assert [p.name for p in sorted(tmp_path.iterdir())] == [f"step-{n:09d}.ckpt" for n in (5, 10)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a finished run's newest checkpoint; to be copied."""
    folder = tmp_path_factory.mktemp("saved")
    X, y = data()
    fitted(X, y=y, method=with_checkpoints(folder, keep=1))
    return folder / f"step-{STEPS:09d}.ckpt"


def copied(saved, folder) -> Path:
    path = folder / saved.name
    path.write_bytes(saved.read_bytes())
    return path


def _is_in_first_batch(X, y):
    source = ArraySource((X,), {"y": y}, B, array_seed())
    return np.isin(np.arange(N), source.indices(0))


def with_prior(scale):
    """A model that reads a number from its closure."""

    def model(X, y=None, link="logit"):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(scale, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    return model


def run_of(model, y=None, **options):
    X, known = data()
    method = dataclasses.replace(METHOD, **options)
    return identity(method, model, ((X,), {"y": known if y is None else y}), N, jax.random.key(0))


@pytest.mark.parametrize(
    "ours, same, other",
    [
        (lambda: with_prior(0.1), lambda: with_prior(0.1), lambda: with_prior(3.0)),
        (
            lambda: functools.partial(with_prior(0.1), link="logit"),
            lambda: functools.partial(with_prior(0.1), link="logit"),
            lambda: functools.partial(with_prior(0.1), link="probit"),
        ),
    ],
    ids=["closure", "partial"],
)
def test_a_run_is_known_by_the_code_of_its_model_and_what_that_reads(ours, same, other):
    assert run_of(ours()) == run_of(same()) != run_of(other())


@pytest.mark.parametrize(
    "ours, same, other",
    [
        [{"learning_rate": optax.constant_schedule(r)} for r in (0.01, 0.01, 0.2)],
        [{"training": pg.Training(natural_rate=lambda step, r=r: r)} for r in (0.01, 0.01, 0.2)],
        [
            {"training": pg.Training(optimiser=functools.partial(optax.sgd, momentum=r))}
            for r in (0.5, 0.5, 0.9)
        ],
        [{"hyper": pg.MAP(init={"variance": r, "lengthscale": 1.0})} for r in (0.5, 0.5, 0.9)],
        [
            {"layers": pg.Layers(latents={"h": pg.Free(init=np.full(3, r))})}
            for r in (0.5, 0.5, 0.9)
        ],
    ],
    ids=["schedule", "lambda", "optimiser", "start", "latents"],
)
def test_a_run_is_known_by_its_settings_and_not_by_where_they_stand_in_memory(ours, same, other):
    first, again, changed = (run_of(classifier, **options) for options in (ours, same, other))
    assert first == again != changed


def classifier_too(X, y=None):
    classifier(X, y)


def with_header(path, change):
    """The same file with another header."""
    with zipfile.ZipFile(path) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    members["header.json"] = json.dumps(change(json.loads(members["header.json"]))).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_checkpoint_of_another_run(saved, tmp_path):
    X, y = data()
    copied(saved, tmp_path)
    method = with_checkpoints(tmp_path)
    others = {
        "model was .*classifier.*classifier_too": lambda: pg.fit(classifier_too, method, 0, X, y=y),
        "data was": lambda: fitted(X + 1.0, y=y, method=method),
        "num_data was 60 and is 59": lambda: fitted(X[1:], y=y[1:], method=method),
        "method was .*max_steps=20.*max_steps=19": lambda: fitted(
            X, y=y, method=dataclasses.replace(method, max_steps=19)
        ),
        r"method was .*natural_rate=None.* and is .*natural_rate=0\.5": lambda: fitted(
            X, y=y, method=dataclasses.replace(method, training=pg.Training(natural_rate=0.5))
        ),
        r"method was .*num_paths=1.* and is .*num_paths=2": lambda: fitted(
            X, y=y, method=dataclasses.replace(method, layers=pg.Layers(num_paths=2))
        ),
        "method was .*learning_rate": lambda: fitted(
            X, y=y, method=dataclasses.replace(method, learning_rate=0.1)
        ),
        "data was .* and": lambda: fitted(X, y=y, link="probit", method=method),
        "inducing=greedy.* and is .*inducing=kmeans": lambda: fitted(
            X, y=y, method=dataclasses.replace(method, inducing="kmeans")
        ),
        "inducing=greedy.* and is .*inducing=": lambda: fitted(
            X, y=y, method=dataclasses.replace(method, inducing=X[:8])
        ),
        "key was": lambda: pg.fit(classifier, method, 1, X, y=y),
        "model was .*": lambda: pg.fit(
            functools.partial(classifier, link="probit"), method, 0, X, y=y
        ),
        "data was  *.*": lambda: fitted(
            X, y=np.where(_is_in_first_batch(X, y), y, 1 - y), method=method
        ),
    }
    for words, call in others.items():
        with pytest.raises(
            StoreError, match=rf"step-0+20.ckpt belongs to another run.*{words}.*resume=False"
        ):
            call()


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-500]), "damaged"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.write_bytes(b"PK of another program"), "damaged"),
        (
            lambda path: with_header(path, lambda h: {**h, "version": 99}),
            "version 99 .*upgrade ppl-gp",
        ),
        (
            lambda path: with_header(path, lambda h: {**h, "format": "other"}),
            "its format is 'other'",
        ),
        (lambda path: with_header(path, lambda h: [h]), "damaged"),
    ],
    ids=["truncated", "empty", "foreign", "version", "format", "list"],
)
def test_checkpoint_that_cannot_be_read(damage, words, saved, tmp_path):
    X, y = data()
    damage(copied(saved, tmp_path))
    with pytest.raises(
        StoreError, match=rf"step-0+20.ckpt .*{words}.*Give another folder, delete this one"
    ):
        fitted(X, y=y, method=with_checkpoints(tmp_path))


def test_checkpoint_with_other_arrays(saved, tmp_path):
    """Arrays that this run's state does not have, or of other shapes."""
    state = {"a": jnp.zeros(3)}
    files = long_run.Checkpoints(pg.Checkpoint(tmp_path), {"model": "m"})
    files.save(state, np.zeros(4), 4, last=True)
    again = long_run.Checkpoints(pg.Checkpoint(tmp_path), {"model": "m"})
    assert again.restore(state)[1].shape == (4,)
    with pytest.raises(StoreError, match=r"array 'leaf-1' is None, and should be"):
        again.restore({**state, "b": jnp.zeros(2)})
    with pytest.raises(StoreError, match=r"\['<f8', \[3\]\], and should be .*\[4\]"):
        again.restore({"a": jnp.zeros(4)})
    with pytest.raises(StoreError, match="<f8.*and should be .*<f4"):
        again.restore({"a": jnp.zeros(3, jnp.float32)})


@pytest.mark.parametrize("what", ["replace", "fsync"])
def test_full_disk_does_not_end_the_run(what, tmp_path, monkeypatch):
    X, y = data()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, what, full)
    with pytest.warns(
        UserWarning, match="cannot write a checkpoint.*No space left.*The run goes on"
    ):
        fit = fitted(X, y=y, method=with_checkpoints(tmp_path))
    assert same(fit, array_fit())
    assert "No space left" in fit.stats["checkpoint_error"] and list(tmp_path.iterdir()) == []


def test_disk_that_is_full_for_a_while(tmp_path, monkeypatch):
    X, y = data()
    replace, calls = os.replace, []

    def full_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        replace(*args)

    monkeypatch.setattr(os, "replace", full_once)
    with pytest.warns(UserWarning, match="cannot write"):
        fit = fitted(X, y=y, method=with_checkpoints(tmp_path))
    assert "checkpoint_error" not in fit.stats
    assert [p.name for p in sorted(tmp_path.iterdir())] == [f"step-{n:09d}.ckpt" for n in (15, 20)]


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    X, y = data()
    with pytest.warns(UserWarning, match="cannot write a checkpoint"):
        fit = fitted(X, y=y, method=with_checkpoints(tmp_path / "file"))
    assert same(fit, array_fit()) and "checkpoint_error" in fit.stats


def test_half_written_files_of_a_killed_run_are_removed(saved, tmp_path):
    copied(saved, tmp_path)
    half = tmp_path / ".step-000000020.ckpt.0123456789abcdef"
    half.write_bytes(saved.read_bytes()[:1000])
    X, y = data()
    assert (
        same(fitted(X, y=y, method=with_checkpoints(tmp_path)), array_fit()) and not half.exists()
    )


# How a run ends


@functools.cache
def interrupted_fit():
    return fitted(Stream(stopping_at(12, KeyboardInterrupt()), N))


def test_interrupted_fit_predicts():
    fit = interrupted_fit()
    assert fit.result == Result.interrupted and fit.stats["steps"] == 10
    np.testing.assert_array_equal(fit.stats["bounds"], stream_fit().stats["bounds"][:10])
    assert np.isfinite(fit.predict(X_NEW).probs).all()


def test_ctrl_c_in_a_compiled_step(monkeypatch):
    calls, real = [], long_run.advance

    def advance(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(long_run, "advance", advance)
    X, y = data()
    fit = fitted(X, y=y)
    assert fit.result == Result.interrupted and fit.stats["steps"] == 10
    assert np.isfinite(fit.log_evidence) and np.isfinite(fit.predict(X_NEW).probs).all()


def test_ctrl_c_while_the_bound_is_summed_keeps_the_steps(monkeypatch):
    """The sum over all data is of what would be said of q, which is whole before it."""

    def stopping(*args):
        raise KeyboardInterrupt

    X, y = data()
    whole = fitted(X, y=y)
    monkeypatch.setattr(final_bound, "total_bound", stopping)
    fit = fitted(X, y=y)
    assert fit.result == Result.interrupted and fit.log_evidence is None
    np.testing.assert_array_equal(fit.predict(X_NEW).probs, whole.predict(X_NEW).probs)


@pytest.mark.slow
def test_ctrl_c_that_is_dropped_while_the_bound_is_summed_keeps_the_steps(monkeypatch):
    """Something inside catches all: the press is answered there, and not by the loss of the fit."""
    real = final_bound.total_bound

    def dropping(*args):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
        return real(*args)

    X, y = data()
    whole = fitted(X, y=y)
    monkeypatch.setattr(final_bound, "total_bound", dropping)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fit = fitted(X, y=y)
    finally:
        signal.signal(signal.SIGINT, before)
    assert fit.result == Result.interrupted and fit.log_evidence is None
    np.testing.assert_array_equal(fit.predict(X_NEW).probs, whole.predict(X_NEW).probs)


def sized(sizes):
    """Batches of these sizes, one after another."""
    X, y = data()
    ends = np.cumsum([0, *sizes])
    return [(X[a:b], y[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def test_a_smaller_batch_may_be_before_others():
    """Their bounds average to that of all rows, which they counted too little for."""
    stream = Stream(sized([8, 3, 8, 5]), 24)
    rows = list(itertools.islice(StreamSource(stream, classifier).batches(4), 4))
    assert [int(np.sum(r.weights > 0)) for r in rows] == [8, 3, 8, 5]
    X, y = (jnp.asarray(a[:24]) for a in data())
    whole = float(parts(classifier, Batch((X,), {"y": y}, jnp.ones(24), jax.random.key(0)))[1])
    bounds = [evaluated(classifier, r)[1] for r in rows]
    np.testing.assert_allclose(np.mean(bounds), whole, rtol=1e-11)


@pytest.mark.parametrize("step", [0, 2, 4])
def test_the_last_batch_of_a_pass_may_be_smaller_without_end_too(step):
    pass_of = sized([8, 8, 3])
    for stream in (Stream(pass_of, 19), Stream(lambda: itertools.cycle(pass_of), 19)):
        source = StreamSource(stream, classifier)
        source.peek()
        rows = itertools.islice(source.batches(step), 7)
        sizes = [int(np.sum(r.weights > 0)) for r in rows]
        assert sizes == ([8, 8, 3] * 5)[step : step + 7]


def test_every_step_has_its_own_key(monkeypatch):
    keys, real = [], long_run.advance

    def advance(problem, state, constant, varying):
        keys.append(jax.random.key_data(varying.key))
        return real(problem, state, constant, varying)

    monkeypatch.setattr(long_run, "advance", advance)
    X, y = data()
    fitted(X, y=y)
    assert len(np.unique(np.concatenate(keys), axis=0)) == STEPS


def test_patience_ends_a_run_that_no_longer_gains():
    """The bound's average over three steps fell: by a learning rate that is far too large."""
    X, y = data()
    fit = fitted(
        X,
        y=y,
        method=dataclasses.replace(METHOD, patience=3, training=WHOLE_STEPS, learning_rate=5.0),
    )
    bounds = fit.stats["bounds"]
    assert fit.result == Result.converged and len(bounds) < STEPS
    assert np.mean(bounds[-3:]) <= np.mean(bounds[-6:-3])
    assert fit.stats["ended"] == "the bound stopped rising"
    patient = fitted(X, y=y, method=dataclasses.replace(METHOD, patience=STEPS)).stats
    assert patient["steps"] == STEPS and patient["ended"] == "all steps made"


@pytest.mark.slow
def test_warm_up_holds_hyperparameters_and_inducing_points():
    X, y = data()
    start, Z = {"lengthscale": 0.7, "variance": 1.3}, X[:8]
    method = dataclasses.replace(
        METHOD, hyper=pg.MAP(init=start), inducing=Z, training=pg.Training(warm_up=STEPS)
    )
    held = fitted(X, y=y, method=method)
    np.testing.assert_allclose([held.hyper[k] for k in start], list(start.values()), rtol=1e-12)
    np.testing.assert_allclose(held.inducing.Z, Z, rtol=1e-12)
    assert (
        held.stats["bounds"][-1] > held.stats["bounds"][0]
        and np.abs(held.latent["f"].mean).max() > 0.1
    )
    moved = fitted(
        X, y=y, method=dataclasses.replace(method, training=pg.Training(warm_up=STEPS - 1))
    )
    assert (
        abs(moved.hyper["lengthscale"] - 0.7) > 1e-4 and np.abs(moved.inducing.Z - Z).max() > 1e-4
    )


def _constant(step):
    return 0.05


@pytest.mark.slow
def test_schedules():
    """An optax schedule that says what a number does gives the same run; another gives another."""
    X, y = data()
    plain = array_fit().stats["bounds"]
    cosine = optax.cosine_decay_schedule(0.05, STEPS, alpha=0.01)
    decay = optax.exponential_decay(0.1, STEPS, 0.1)
    training = pg.Training(natural_rate=decay)
    same_rates = dataclasses.replace(METHOD, learning_rate=cosine, training=training)
    np.testing.assert_allclose(fitted(X, y=y, method=same_rates).stats["bounds"], plain, rtol=1e-10)
    other = fitted(X, y=y, method=dataclasses.replace(METHOD, learning_rate=_constant)).stats[
        "bounds"
    ]
    np.testing.assert_allclose(other[:2], plain[:2], rtol=1e-10)
    assert np.abs(other[-1] - plain[-1]) > 1e-4


def test_progress_is_drawn_on_stderr_when_asked(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a bar is drawn on a terminal
    monkeypatch.setenv("TERM", "xterm")
    X, y = data()
    fitted(X, y=y)
    assert capsys.readouterr() == ("", "")
    fitted(X, y=y, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "SVGP" in err and "20/20" in err


def test_chunks():
    """All batches once, in order; a chunk's length has a divisor near the largest, or single steps
    at the end.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_run, "CHUNK", 20)
        assert [long_run.chunk_size(n) for n in (3000, 997, 1, 7, 30, 34)] == [20, 20, 1, 7, 15, 17]


def test_second_fit_does_not_trace_the_step_again():
    X, y = data()
    pg.fit(classifier, METHOD, 0, X, y=y)  # here: compiled functions may be let go of between tests
    before = training.advance.outermost()._cached._cache_size()
    again = pg.fit(classifier, METHOD, 3, X + 0.1, y=1 - y)
    assert (
        training.advance.outermost()._cached._cache_size() == before
        and again.stats["compilations"] == 0
    )
    assert not np.allclose(again.stats["bounds"], array_fit().stats["bounds"])
