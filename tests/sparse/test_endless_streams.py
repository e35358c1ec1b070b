"""Fits of streams: each row counts once on average, however the batches come; the bound of a fit
whose batches are drawn anew is within its standard error of the bound on all data, and exact where
every pass has the same rows.
"""

import itertools
from contextlib import nullcontext

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.infer.svgp.final_bound import over_passes

N, B, S = 120, 24, 0.3
X = np.random.default_rng(0).uniform(0, 10, N)[:, None]
Y = np.sin(2 * X[:, 0]) + S * np.random.default_rng(1).standard_t(3, N)


def drawn(seed):
    """Batches of rows without end, each drawn from all."""
    rng = np.random.default_rng(seed)
    while True:
        i = rng.choice(N, B, replace=False)
        yield X[i], Y[i]


def shuffled(seed, size=B):
    """Pass after pass over all rows, without end; with `size` 32 each leaves out the last 24."""
    rng = np.random.default_rng(seed)
    while True:
        i = rng.permutation(N)[: N // size * size]
        yield from ((X[j], Y[j]) for j in i.reshape(-1, size))


def sum_and_error(batches, num_data=N):
    """Of y over the rows, as a bound is summed."""
    source = StreamSource(pg.Stream(batches, num_data), lambda X, y=None: None)
    sum_of = lambda sweep: np.array([np.sum(r.weights * r.kwargs["y"]) for r in sweep])  # noqa: E731
    return over_passes(source, False, sum_of)


def passes(batches):
    """Each call goes on with the next N rows."""
    return lambda: itertools.islice(batches, N // B)


REDRAWN = {
    "endless": lambda seed: lambda: drawn(seed),
    "passes": lambda seed: passes(drawn(seed)),
    "left out": lambda seed: lambda: shuffled(seed, 32),
    "object": drawn,
}


@pytest.mark.parametrize("kind", REDRAWN)
def test_the_error_of_a_sum_over_redrawn_rows_covers(kind):
    found, error = np.transpose([sum_and_error(REDRAWN[kind](seed)) for seed in range(60)])
    off = np.abs(found - Y.sum()) / error
    assert np.mean(off < 3.0) > 0.96
    if kind != "left out":  # where rows recur the error may be too large
        assert 0.5 < np.mean(off < 1.0) < 0.85


@pytest.mark.parametrize(
    "batches",
    [
        lambda: shuffled(0),
        shuffled(0),
        lambda: itertools.cycle([(X[i::5], Y[i::5]) for i in range(5)]),
        passes(shuffled(0)),
        [(X[i::5], Y[i::5]) for i in range(5)],
    ],
    ids=["endless", "object", "cycle", "passes", "list"],
)
def test_the_sum_over_the_same_rows_is_exact(batches):
    found, error = sum_and_error(batches)
    assert error is None and found == pytest.approx(Y.sum(), rel=1e-12)


def test_rows_behind_the_number_told_are_no_pass():
    rest = [(X[i : i + B], Y[i : i + B]) for i in range(0, N, B)]
    found, error = sum_and_error(lambda: iter(rest), N - B)
    assert error is None and found == pytest.approx(Y[: N - B].sum(), rel=1e-12)


@pytest.mark.parametrize("left", [0, 2, 5, 9, 10])
@pytest.mark.filterwarnings("error")
def test_the_rest_of_an_iterator_counts_from_two_passes_on(left):
    """One pass tells nothing about rows drawn anew, and less than a pass is not all data."""
    found, error = sum_and_error(itertools.islice(drawn(0), left))
    assert (found is None) is (left < 10) and (error is None) is (left < 10)


POINTS = np.linspace(0, 10, 12)[:, None]


def wave(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.2, 0.9), X, jitter=1e-9))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, S), obs=y)


def line(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(b * (X[:, 0] - 5.0), 3.0), obs=y)


def bound(mean, variance, s, q, prior):
    """At q(u), of f with these moments and noise s, by dense algebra."""
    expected = dist.Normal(mean, s).log_prob(Y) - variance / (2 * s**2)
    (m, V), K = q, np.asarray(prior)
    white = np.linalg.solve(K, V + np.outer(m, m))
    log_dets = np.linalg.slogdet(K)[1] - np.linalg.slogdet(V)[1]
    return float(expected.sum() - 0.5 * (np.trace(white) - len(K) + log_dets))


def wave_fit(stream):
    method = pg.SVGP(inducing=POINTS, train_inducing=False, hyper=pg.Fixed({}), max_steps=200)
    fit = pg.fit(wave, method, 0, stream)
    f, u = fit.posterior(X), fit.posterior(POINTS, joint=True)
    K = pg.kernels.RBF(1.2, 0.9)(POINTS, POINTS) + 1e-9 * np.eye(len(POINTS))
    q = np.asarray(u.mean), np.asarray(u.covariance_matrix)
    return fit, bound(np.asarray(f.mean), np.asarray(f.variance), S, q, K)


def line_fit(stream):
    fit = pg.fit(line, pg.MeanField(max_steps=50), 0, stream)
    b, x = fit.sites["b"], jnp.asarray(X[:, 0] - 5.0)
    m, v = np.reshape(b.mean, 1), np.reshape(b.variance, (1, 1))
    return fit, bound(m * x, v[0] * x**2, 3.0, (m, v), np.eye(1))


@pytest.mark.parametrize("fitted", [wave_fit, line_fit])
def test_the_bound_of_an_endless_stream_is_that_of_all_data(fitted):
    """At the fit's own q, over seeds; and to rounding where passes have the same rows."""
    off = []
    for seed in range(5):
        batches = drawn(seed)  # a generator serves as the function that makes it
        fit, truth = fitted(pg.Stream(batches if seed % 2 else lambda b=batches: b, N))
        error = fit.stats["log_evidence_se"]
        off.append((fit.log_evidence - truth) / error)
        assert f"(se {error:.2g})" in repr(fit)
    assert np.sum(np.square(off)) < 25.0  # 5 are expected: one run in some thousand is above
    fit, truth = fitted(pg.Stream(lambda: shuffled(0), N))
    assert "log_evidence_se" not in fit.stats
    assert fit.log_evidence == pytest.approx(truth, abs=1e-5)


# How much of the data a batch stands for

ROWS = 60


def cut(sizes, rows=None):
    """One pass over `rows`, in batches of these sizes."""
    rows = np.arange(ROWS) if rows is None else rows
    return [(X[i], Y[i]) for i in np.split(rows, np.cumsum(sizes)[:-1])]


def equal(size):
    """The sizes of a pass whose last batch is what is left."""
    return [min(size, ROWS - i) for i in range(0, ROWS, size)]


def falling(size):
    """The sizes of a pass of ever smaller batches."""
    left, sizes = ROWS - size, [size]
    while left:
        sizes.append(min(left, max(1, sizes[-1] // 2)))
        left -= sizes[-1]
    return sizes


def forever(sizes, seed=0, **options):
    """Batches without end; each of rows drawn from all (`replace=`), or in shuffled passes."""
    rng = np.random.default_rng(seed)
    while True:
        if not options:
            yield from cut(sizes, rng.permutation(ROWS)[: sum(sizes)])
        for size in sizes if options else ():
            i = rng.choice(ROWS, size, **options)
            yield X[i], Y[i]


KINDS = {
    "list": lambda size: cut(equal(size)),
    "function": lambda size: lambda: iter(cut(equal(size))),
    "shuffled": lambda size: forever(equal(size)),
    "left out": lambda size: lambda: forever([size] * (ROWS // size)),
    "drawn": lambda size: forever([size], replace=False),
    "drawn, function": lambda size: lambda: forever([size], replace=False),
    "drawn, replaced": lambda size: forever([size], replace=True),
    "sizes, list": lambda size: cut(falling(size)),
    "sizes, shuffled": lambda size: forever(falling(size)),
    "sizes, drawn": lambda size: forever([size, size // 2, 3], replace=True),
}
SAME_ROWS = ("list", "function", "shuffled", "sizes, list", "sizes, shuffled")


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize("size", [*map(slow, (20, 40, 60)), 31, 59])
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_of_any_stream_counts_once_on_average(kind, size):
    """Behind the first pass, which is dropped as at a restart; exact where passes have the same
    rows. Sizes that are drawn are known after some passes.
    """
    source = StreamSource(pg.Stream(KINDS[kind](size), ROWS), lambda X, y=None: None)
    assert np.sum(source.peek().weights) == pytest.approx(ROWS)
    length = len(falling(size) if kind.startswith("sizes") else equal(size))
    length = 3 if kind == "sizes, drawn" else length
    dropped = 300 if kind == "sizes, drawn" else length
    found = [
        (r.weights, r.kwargs["y"]) for r in itertools.islice(source.batches(dropped), 30 * length)
    ]
    total, sums = (
        np.reshape(x, (-1, length)).mean(1)
        for x in zip(*[(w.sum(), w @ y) for w, y in found], strict=True)
    )
    close = 3e-3 if kind == "sizes, drawn" else 1e-12
    np.testing.assert_allclose(total.mean(), ROWS, rtol=close)
    if kind in SAME_ROWS:
        np.testing.assert_allclose(sums, Y[:ROWS].sum(), rtol=1e-12)
    off = np.mean(sums) - Y[:ROWS].sum()
    assert abs(off) < 4.0 * np.std(sums) / np.sqrt(len(sums)) + 1e-9


def sparse_variance(X_new):
    """Of f under the best q(u), by dense algebra (Titsias 2009)."""
    k = pg.kernels.RBF(1.2, 0.9)
    K, at, seen = k(POINTS, POINTS) + 1e-9 * np.eye(len(POINTS)), k(X_new, POINTS), X[:ROWS]
    inner = K + k(POINTS, seen) @ k(seen, POINTS) / S**2
    explained = jnp.linalg.solve(K, at.T) - jnp.linalg.solve(inner, at.T)
    return jnp.diagonal(k(X_new, X_new)) - jnp.sum(at * explained.T, 1)


SEVERAL = [
    (k, n) if (k, n) == ("drawn, function", 59) else slow(k, n) for k in KINDS for n in (31, 59)
]


@pytest.mark.filterwarnings("ignore:SVGP.*more inducing")
@pytest.mark.parametrize("kind, size", SEVERAL)
def test_q_of_a_stream_is_as_wide_as_all_data_say(kind, size):
    method = pg.SVGP(inducing=POINTS, train_inducing=False, hyper=pg.Fixed({}), max_steps=400)
    fit = pg.fit(wave, method, 0, pg.Stream(KINDS[kind](size), ROWS))
    X_new = np.array([[1.0], [3.3], [6.0], [8.7]])
    ratio = np.asarray(fit.predict(X_new).f_variance) / np.asarray(sparse_variance(X_new))
    np.testing.assert_allclose(ratio, 1.0, atol=0.1)


@pytest.mark.parametrize("kind, size", SEVERAL)
def test_the_mean_field_of_a_stream_is_as_wide_as_all_data_say(kind, size):
    """Against the conjugate posterior."""
    fit = pg.fit(line, pg.MeanField(max_steps=200), 0, pg.Stream(KINDS[kind](size), ROWS))
    exact = 1.0 / (1.0 + np.sum((X[:ROWS] - 5.0) ** 2) / 9.0)
    assert float(fit.sites["b"].variance) / exact == pytest.approx(1.0, abs=0.1)


# What is known before the first step


def lost(Z, rows=slice(ROWS)):
    """By how much the best bound with points Z is below the evidence, by dense algebra."""
    k, y = pg.kernels.RBF(1.2, 0.9), Y[rows]
    at, K = np.asarray(k(X[rows], Z)), np.asarray(k(Z, Z)) + 1e-9 * np.eye(len(Z))
    whole, part = np.asarray(k(X[rows], X[rows])), at @ np.linalg.solve(K, at.T)
    noise = S**2 * np.eye(len(y))
    whole_p, part_p = (
        dist.MultivariateNormal(np.zeros(len(y)), C + noise).log_prob(y) for C in (whole, part)
    )
    return float(whole_p - part_p + 0.5 * np.trace(whole - part) / S**2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["function", slow("shuffled"), slow("drawn")])
@pytest.mark.parametrize("size", [slow(6), 4])
def test_small_batches_give_as_many_points_as_are_asked_for(kind, size):
    method = pg.SVGP(num_inducing=30, train_inducing=False, hyper=pg.Fixed({}), max_steps=40)
    fit = pg.fit(wave, method, 0, pg.Stream(KINDS[kind](size), ROWS))
    assert lost(X[:size]) > 100.0 and lost(np.asarray(fit.inducing.Z)) < 0.5
    assert fit.stats["inducing_gap"] < 0.6  # 1 nat per 100 rows is told


@pytest.mark.parametrize("kind", ["function", slow("object")])
def test_points_of_the_first_batches_alone_are_told(kind):
    """Rows in order: the gap is of all rows, and a bound; the remedy closes it."""
    order = np.argsort(X[:, 0])
    batches = lambda: iter([(X[i], Y[i]) for i in order.reshape(-1, 6)])  # noqa: E731
    again = itertools.chain.from_iterable(batches() for _ in range(6))
    options = {"train_inducing": False, "hyper": pg.Fixed({}), "max_steps": 40}
    method, stream = pg.SVGP(num_inducing=4, **options), batches if kind == "function" else again
    with pytest.warns(UserWarning, match="points of all the data in inducing=") as told:
        fit = pg.fit(wave, method, 0, pg.Stream(stream, N))
    missing = lost(np.asarray(fit.inducing.Z), slice(N))
    assert missing > 100.0 and "num_inducing=8" in str(told[0].message)
    assert fit.stats["inducing_gap"] > missing
    better = pg.SVGP(inducing=POINTS, **options)
    closed = pg.fit(wave, better, 0, pg.Stream(batches, N))
    assert closed.stats["inducing_gap"] < 0.05 * fit.stats["inducing_gap"]


@pytest.mark.parametrize("bad", [None, 2, 4])
def test_what_is_looked_at_comes_again(bad):
    """All of an iterator, up to what it raises, and in its order."""

    def stopping():
        for i, batch in enumerate(cut([5] * 12)):
            if i == bad:
                raise OSError("gone")
            yield batch

    source = StreamSource(pg.Stream(stopping(), ROWS), lambda X, y=None: None)
    source.look(source.peek(), 17)
    assert len(source.looked.weights) == 20 if bad != 2 else 10
    np.testing.assert_array_equal(source.looked.kwargs["y"], Y[: len(source.looked.weights)])
    found = [next(batches := source.batches(0)).kwargs["y"]]
    if bad is None:  # a run of one step leaves the others to the passes behind it
        batches = itertools.chain.from_iterable(source.passes(False))
    try:
        found += (r.kwargs["y"] for r in batches)
    except OSError:
        assert bad is not None
    np.testing.assert_array_equal(np.ravel(found), Y[: 5 * (12 if bad is None else bad)])


@pytest.mark.filterwarnings("ignore:SVGP.*more inducing")
def test_a_model_of_one_batch_size_takes_streams():
    """What is looked at has its number of rows too."""

    def twenties(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.2, 0.9), X, jitter=1e-9))
        with numpyro.plate("data", 20):
            numpyro.sample("y", dist.Normal(f, S * np.ones(20)), obs=y)

    method = pg.SVGP(num_inducing=15, hyper=pg.Fixed({}), max_steps=20)
    fits = [pg.fit(m, method, 0, pg.Stream(cut([20] * 3), ROWS)) for m in (twenties, wave)]
    assert all(f.result == "completed" for f in fits) and fits[0].stats["inducing_gap"] > 0.0


def test_what_is_looked_at_in_a_pass_is_few_rows_all_over_it():
    items = lambda: ((np.arange(i, i + 10.0), np.zeros(10)) for i in range(0, 4000, 10))  # noqa: E731
    source = StreamSource(pg.Stream(items, 4000), lambda X, y=None: None)
    assert sum(r.weights.sum() for r in source.sweep(10)) == 4000
    np.testing.assert_array_equal(source.looked.args[0], np.arange(0, 4000, 2))


def test_a_method_of_all_data_takes_no_stream():
    """It ended in an error about the shape of a kernel's inputs."""
    for method, name in ((pg.Laplace(), "Laplace"), (pg.CollapsedSVGP(), "CollapsedSVGP")):
        with pytest.raises(pg.DataError, match=rf"^{name}\(\) was given a Stream.* SVGP\(\)"):
            pg.fit(lambda X, y=None: None, method, 0, pg.Stream([], num_data=3))


@pytest.mark.filterwarnings("ignore:SVGP.*more inducing")
def test_fits_of_one_generator_object_are_not_compared():
    """The second fit has other rows, those behind the first one's: the odds were 16 nats off."""
    method = pg.SVGP(num_inducing=5, hyper=pg.Fixed({}), max_steps=2)
    passes = (b for _ in range(9) for b in cut([20] * 3))
    generator, again = pg.Stream(passes, ROWS), pg.Stream(cut([20] * 3), ROWS)
    for stream, refused in ((generator, True), (again, False)):
        a, b = (pg.fit(wave, method, 0, stream, throw=False) for _ in range(2))
        expected = pytest.raises(pg.DataError, match="not all of the same one")
        with expected if refused else nullcontext():
            pg.compare_models({"a": a, "b": b})
