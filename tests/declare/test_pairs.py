"""A kernel is a function of two rows: what reads one row per datum beside them has a training
covariance and no prediction.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from ppl_gp import kernels
from ppl_gp.kernels.pairs import pair_fault
from ppl_gp.sparse.inducing import select

N = 6
X = np.linspace(0.0, 4.0, N)
Y = np.array([0, 1, 3, 2, 1, 0])
D = np.abs(X[:, None] - X)
W = np.linspace(0.5, 1.0, N)
K = kernels.Matern12(0.8, 1.0)
FIXED = pg.Laplace(hyper=pg.Fixed({}))
INPUTS = jnp.asarray(X)[:, None]


def counts(kernel, X, y, **options):
    f = numpyro.sample("f", pg.GP(kernel, X, **options))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def plain(X, y=None):
    counts(K, X, y)


def rivers(X, D, y=None):
    counts(lambda A, B: 0.8 * jnp.exp(-D), X, y)


def weighted(X, w, y=None):
    counts(lambda A, B: w[:, None] * w * K(A, B), X, y)


def table(X, A, y=None):
    counts(lambda P, Q: A[P[:, 0].astype(int)][:, Q[:, 0].astype(int)], X, y)


def closures_of_the_mean_and_the_noise(X, w, y=None):
    counts(K, X, y, mean=lambda x: 0.3 + w, jitter=w**2)


PAIRS = {  # functions of two rows
    "own": K * 2.0 + kernels.White(0.1) + kernels.Periodic(1.0, 1.0, 1.0) * kernels.Linear(1.0),
    "a callable": lambda A, B: jnp.exp(-jnp.abs(A - B.T)),
    "composed with a callable": K + (lambda A, B: jnp.ones((len(A), len(B)))),
    "a table": lambda A, B: jnp.asarray(D)[A[:, 0].astype(int)][:, B[:, 0].astype(int)],
    "narrow, by inner products": lambda A, B: jnp.exp(
        -1e6 * ((A**2).sum(1)[:, None] + (B**2).sum(1) - 2.0 * A @ B.T)
    ),
    "derivatives": kernels.WithDerivatives(kernels.RBF(1.0, 1.0)),
}
NO_PAIRS = {
    "distances": lambda A, B: jnp.exp(-D),
    "distances in a product": K * (lambda A, B: jnp.exp(-jnp.asarray(D))),
    "weights": lambda A, B: W[:, None] * W * K(A, B),
    "the first rows": lambda A, B: jnp.exp(-D[: len(A), : len(B)]),
    "rows by number": lambda A, B: jnp.exp(
        -jnp.asarray(D)[jnp.arange(len(A))][:, jnp.arange(len(B))]
    ),
    "the mean of the rows": lambda A, B: (A - A.mean(0)) @ (B - B.mean(0)).T,
    "the number of rows": lambda A, B: K(A, B) / len(A),
    "noise where shapes are equal": lambda A, B: (
        K(A, B) + (0.3 * jnp.eye(len(A)) if A.shape == B.shape else 0.0)
    ),
}


@pytest.mark.parametrize("kernel", PAIRS.values(), ids=PAIRS)
def test_functions_of_two_rows_are_told(kernel):
    inputs = kernels.value_inputs(INPUTS) if isinstance(kernel, kernels.WithDerivatives) else INPUTS
    assert pair_fault(kernels.as_kernel(kernel), jnp.asarray(inputs)) is None


@pytest.mark.parametrize("kernel", NO_PAIRS.values(), ids=NO_PAIRS)
def test_what_reads_more_than_two_rows_is_told(kernel):
    assert pair_fault(kernels.as_kernel(kernel), INPUTS)


def test_tinygp_kernels_are_functions_of_two_rows():
    tinygp = pytest.importorskip("tinygp")
    assert pair_fault(kernels.as_kernel(2.0 * tinygp.kernels.Matern32(1.0)), INPUTS) is None


@pytest.fixture(scope="module")
def by_distances():
    return pg.fit(rivers, FIXED, 0, X, D, y=Y)


@pytest.mark.slow
def test_given_distances_are_fitted_and_not_predicted(by_distances, tmp_path):
    fit, same = by_distances, pg.fit(plain, FIXED, 0, X, y=Y)
    np.testing.assert_allclose(fit.log_evidence, same.log_evidence, rtol=1e-9)
    np.testing.assert_allclose(fit.latent["f"].variance, same.latent["f"].variance, rtol=1e-6)
    loaded = pg.load(fit.save(tmp_path / "a.fit"), rivers)
    ask = (
        lambda: fit.predict(X + 10.0, D),
        lambda: fit.predict(X[:3], D[:3, :3]),
        lambda: fit.log_density(X + 10.0, Y, D),
        lambda: fit.sample(0, X + 10.0, 2, D),
        lambda: fit.posterior(X + 10.0),
        lambda: loaded.predict(X + 10.0, D),
    )
    for question in ask:
        with pytest.raises(pg.ModelError, match="kernel of GP site 'f' is no function .* of X"):
            question()
    np.testing.assert_allclose(fit.loo().elpd, same.loo().elpd, rtol=1e-6)


def test_weights_of_the_rows_are_refused_by_every_method():
    fit = pg.fit(weighted, FIXED, 0, X, W, y=Y)
    np.testing.assert_allclose(
        kernels.as_kernel(NO_PAIRS["weights"]).diag(INPUTS), 0.8 * W**2, rtol=1e-12
    )
    with pytest.raises(pg.ModelError, match="kernel of GP site 'f'"):
        fit.predict(X, W)
    with pytest.raises(pg.ModelError, match="kernel of GP site 'f'"):
        pg.fit(weighted, pg.SVGP(inducing=X, hyper=pg.Fixed({}), max_steps=1), 0, X, W, y=Y)
    assert any(
        "kernel of GP site 'f'" in item.message for item in pg.check(weighted, X, W, y=Y).items
    )


@pytest.mark.slow
def test_one_datum_cannot_hide_what_a_kernel_reads():
    fit = pg.fit(weighted, FIXED, 0, X[:1], W[:1], y=Y[:1])
    assert fit.predict(X[1:2]).f_mean.shape == (1,)  # a constant, as far as one row tells
    for rows in (slice(0, 3), slice(2, 3)):
        with pytest.raises(pg.DataError, match="kernel of GP site 'f' .*'w'"):
            fit.predict(X[rows], W[rows] + 0.1)


@pytest.mark.slow
def test_tables_closures_and_larger_tables_are_answered():
    species = np.arange(N)[:, None]
    larger = np.exp(-np.abs(np.arange(8)[:, None] - np.arange(8.0)))
    fit = pg.fit(table, FIXED, 0, species, larger[:N, :N], y=Y)
    expected = fit.predict(species[2:4]).f_mean
    np.testing.assert_allclose(fit.predict(species[2:4], larger).f_mean, expected, rtol=1e-12)
    with pytest.raises(pg.DataError, match="kernel of GP site 'f' .*'A'"):
        fit.predict(species[2:4], 2.0 * larger)
    fit = pg.fit(closures_of_the_mean_and_the_noise, FIXED, 0, X, W, y=Y)
    assert fit.predict(X[:2] + 10.0, W[:2]).f_mean == pytest.approx(0.3 + W[:2], abs=1e-2)


def test_a_mean_or_a_jitter_of_the_training_rows_is_none_of_new_rows():
    """`fit.posterior(x + 10)` had the mean of the training rows, without a word."""
    fit, new = pg.fit(closures_of_the_mean_and_the_noise, FIXED, 0, X, W, y=Y), X + 10.0
    for rows in (new, new[:1], new[:3]):
        with pytest.raises(pg.ModelError, match="one entry for each training row.*fit.predict"):
            fit.posterior(rows)
    there = pg.GP(K, new, mean=lambda x: 0.3 + 2.0 * W, jitter=W**2)
    np.testing.assert_allclose(
        fit.posterior(there).mean, fit.predict(new, 2.0 * W).f_mean, rtol=1e-9
    )


def test_the_noise_of_rows_is_none_of_inducing_points():
    """A jitter with one entry per row was added to the covariance of u, of another size."""
    noisy, Z = pg.GP(K, X, jitter=W**2), X[:3] + 0.1
    root = pg.Points(jnp.asarray(Z)).root(noisy)
    np.testing.assert_array_equal(root.W, pg.Points(jnp.asarray(Z)).root(pg.GP(K, X)).W)
    assert len(select("greedy", noisy, X[1:], 3, 0)) == 3


@pytest.mark.parametrize("shape", [(), (N,)])
def test_a_kernel_that_gives_no_matrix_is_named(shape):
    def model(X, y=None):
        counts(lambda A, B: jnp.ones(shape), X, y)

    with pytest.raises(pg.ModelError, match="kernel of GP site 'f' gives no covariance matrix"):
        pg.fit(model, FIXED, 0, X, y=Y)
