"""The bound of a fit on a stream whose batches are drawn anew: within its standard error of the
bound on all data, and exact where every pass has the same rows.
"""

import itertools

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
