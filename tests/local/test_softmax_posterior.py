"""The structured root of a softmax's predictions, against that of the blocks written out and dense
inverses.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

import ppl_gp as pg
from ppl_gp.gp import unwrap
from ppl_gp.local.factor import Root
from ppl_gp.local.natural import MinusRankOne, as_general, asked
from ppl_gp.local.softmax import SoftmaxRoot
from ppl_gp.numerics.blocks import matrix_of
from ppl_gp.numerics.low_rank import Independent
from ppl_gp.posterior import Posterior, SoftmaxProcess, coloured
from ppl_gp.results.query.query import query_at

R, N, M = 3, 7, 4
RNG = np.random.default_rng(3)


def covariance(*X):
    """Of functions whose length scales differ, (R, ...), without jitter."""
    a, b = X
    apart = np.sum((a[:, None] - b) ** 2, -1)
    return np.stack([(1.0 + r) * np.exp(-0.5 * apart / (0.7 + r)) for r in range(R)])


@pytest.fixture(scope="module")
def problem():
    """K, k, d with a row of no weight, and the dense (K + T^-1)^-1."""
    X, new = RNG.normal(size=(N, 2)), RNG.normal(size=(M, 2))
    K, k = covariance(X, X) + 1e-6 * np.eye(N), covariance(X, new)
    d = RNG.uniform(0.05, 1.0, (R, N))
    d[:, 2] = 0.0
    T = np.asarray(matrix_of(jnp.asarray(d)))
    whole = jax.scipy.linalg.block_diag(*K)
    dense = T @ np.linalg.inv(np.eye(R * N) + whole @ T)
    return K, k, covariance(new, new), d, dense


def root_of(K, d, written_out=False):
    sites = MinusRankOne(jnp.zeros(R * N), jnp.asarray(d))
    if written_out:
        sites = as_general(sites)
    return asked(Independent(jnp.asarray(K)), sites, lambda factor: factor.root())


def test_the_precision_is_the_dense_one(problem):
    K, _, _, d, dense = problem
    sites = MinusRankOne(jnp.zeros(R * N), jnp.asarray(d))
    R_ = asked(Independent(jnp.asarray(K)), sites, lambda factor: factor.inverse().precision())
    x = jnp.asarray(RNG.normal(size=R * N))
    np.testing.assert_allclose(R_ @ x, dense @ x, atol=1e-10)
    for r, block in enumerate(R_.blocks()):
        mine = slice(r * N, (r + 1) * N)
        np.testing.assert_allclose(block, dense[mine, mine], atol=1e-10)


def test_the_root_is_the_dense_precision(problem):
    K, k, _, d, dense = problem
    root = root_of(K, d)
    assert isinstance(root, SoftmaxRoot) and isinstance(root_of(K, d, True), Root)
    C = jnp.asarray(RNG.normal(size=(R * N, 5)))
    np.testing.assert_allclose(root.quadratic(C), C.T @ dense @ C, atol=1e-10)
    np.testing.assert_allclose(root.explained(C), np.diag(C.T @ dense @ C), atol=1e-10)
    a, c = (jnp.asarray(RNG.normal(size=shape)) for shape in ((R, N), (N, 3)))
    stacked = np.concatenate([a[r, :, None] * c for r in range(R)])
    for found in (root.of_sum(a), root_of(K, d, True).of_sum(a)):
        np.testing.assert_allclose(found.quadratic(c), stacked.T @ dense @ stacked, atol=1e-10)
        np.testing.assert_allclose(
            found.explained(c), np.diag(stacked.T @ dense @ stacked), atol=1e-10
        )
    # of a covariance that couples the functions the form is written out, and the same
    coupled = jax.scipy.linalg.block_diag(*K)
    known = MinusRankOne(jnp.zeros(R * N), jnp.asarray(d))
    other = asked(jnp.asarray(coupled), known, lambda factor: factor.root())
    np.testing.assert_allclose(other.quadratic(C), root.quadratic(C), atol=1e-10)


def test_draws_have_the_covariance_of_the_dense_formula(problem):
    """L_r z_r + G_r^T z, its matrix by what it makes of unit vectors: no draw is needed."""
    K, k, Kss, d, dense = problem
    columns = np.asarray(jax.scipy.linalg.block_diag(*k))
    exact = jax.scipy.linalg.block_diag(*Kss) - columns.T @ dense @ columns
    A, G = root_of(K, d).left(jnp.asarray(Kss), jnp.asarray(k))
    shared = np.concatenate([*G], 1)
    np.testing.assert_allclose(
        jax.scipy.linalg.block_diag(*A) + shared.T @ shared, exact, atol=1e-10
    )
    drawn = coloured(A, G, jnp.asarray(1e-8), random.key(0), 40_000)
    flat = np.reshape(drawn, (len(drawn), -1))
    se = np.sqrt((np.outer(np.diag(exact), np.diag(exact)) + exact**2) / len(flat))
    assert np.all(np.abs(flat.T @ flat / len(flat) - exact) < 5.0 * se)


def classes(X, y=None, mask=None, order=(0, 1, 2)):
    num = len(order)
    with numpyro.plate("classes", num):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.3, 0.9), X))
    mask = jnp.ones(len(X), bool) if mask is None else mask
    with numpyro.plate("data", X.shape[0]), numpyro.handlers.mask(mask=mask):
        numpyro.sample("y", dist.Categorical(logits=f.T[:, jnp.asarray(order)]), obs=y)


def in_blocks(fit):
    """The fit as it was kept before, with the blocks written out."""
    kept = {k: dataclasses.replace(v, sites=as_general(v.sites)) for k, v in fit.latent.items()}
    draws = dataclasses.replace(fit.draws, kept=kept)
    return dataclasses.replace(fit, draws=draws)


def asked_of(fit, new, order):
    """Moments, covariances within rows and jointly of the scores, and of each class's process."""
    ((site, _),) = fit.latent.items()
    case = query_at(fit, X_new=new, args=(), kwargs={"order": order})
    parts = fit.posterior

    @jax.jit
    def found(new):
        prior = unwrap(case.trace(fit.draws.at(0), {})[site]["fn"])
        scores = [getattr(fit.process, ask)(prior) for ask in ("within", "joint", "marginals")]
        return scores, {k: p.joint(pg.GP(p.prior.kernel, new)) for k, p in parts.items()}

    return found(new)


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (0, 1, 2), (2, 0, 1)], ids=["two", "three", "permuted"])
def test_a_fit_predicts_as_with_the_blocks_written_out(order):
    """Of C = 2 and 3, permuted, with a mask; at the training rows, new ones and one."""
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(9, 2)), rng.integers(0, len(order), 9)
    given = {"mask": np.arange(9) % 4 != 1, "order": order}
    fit = pg.fit(classes, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=y, **given)
    slow = in_blocks(fit)
    (kept,) = fit.latent.values()
    assert type(kept.sites) is MinusRankOne
    assert type(fit.process) is SoftmaxProcess and type(slow.process) is Posterior
    new = rng.normal(size=(9, 2))
    for at in (X, new, new[:1]):
        ours, theirs = (jax.tree.leaves(asked_of(f, jnp.asarray(at), order)) for f in (fit, slow))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-10)
    ours, theirs = (f.predict(new, order=order) for f in (fit, slow))
    for name in ("f_mean", "f_variance", "probs"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-9)


@pytest.mark.slow
def test_what_else_asks_for_the_root(tmp_path):
    """Terms of the predictor, cavities, and a file, which keeps the form."""
    rng = np.random.default_rng(2)
    X, y = rng.normal(size=(9, 2)), rng.integers(0, 3, 9)
    fit = pg.fit(classes, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=y)
    slow = in_blocks(fit)
    ours, theirs = (f.components(X[:4]) for f in (fit, slow))
    for k in ours:
        np.testing.assert_allclose(ours[k].mean, theirs[k].mean, atol=1e-10)
        np.testing.assert_allclose(ours[k].variance, theirs[k].variance, atol=1e-10)
    np.testing.assert_allclose(*(f.loo().elpd_i for f in (fit, slow)), atol=1e-9)
    loaded = pg.load(fit.save(tmp_path / "softmax.fit"), classes)
    (kept,) = loaded.latent.values()
    assert type(kept.sites) is MinusRankOne
    np.testing.assert_allclose(loaded.components(X[:4])["total"].variance, ours["total"].variance)


@pytest.mark.slow
def test_draws_at_the_training_rows_are_of_the_dense_covariance():
    rng = np.random.default_rng(4)
    X, y = rng.normal(size=(6, 2)), rng.integers(0, 3, 6)
    fit = pg.fit(classes, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=y)
    found, exact = (
        np.cov(np.reshape(f.sample(5, X, 20_000).f, (20_000, -1)).T) for f in (fit, in_blocks(fit))
    )
    se = np.sqrt(2.0 * (np.outer(np.diag(exact), np.diag(exact)) + exact**2) / 20_000)
    assert np.all(np.abs(found - exact) < 5.0 * se)


def repeated(X, y=None, seen=True):
    with numpyro.plate("classes", 2):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.0, 1.0), X))
    repeats = numpyro.plate("repeats", 10 if y is None else len(y), dim=-2)
    with repeats, numpyro.plate("data", X.shape[0]), numpyro.handlers.mask(mask=seen):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


def test_each_label_of_a_row_counts_in_the_curvature():
    """Ten labels counted as one: evidence .97 nats a row too high, variances 2.67 for 2.10."""
    held, x = pg.Laplace(hyper=pg.Fixed({})), 10.0 * np.arange(4)
    y = np.repeat([0, 1], 5)[:, None] * np.ones((1, 4), int)
    each = pg.fit(repeated, held, 0, np.repeat(x, 10), y=y.T.reshape(1, -1))
    for seen in (True, np.ones(y.shape, bool)):
        found = pg.fit(repeated, held, 0, x, y=y, seen=seen)
        assert found.log_evidence == pytest.approx(each.log_evidence, abs=1e-5)
        np.testing.assert_allclose(
            found.predict(x).f_variance, each.predict(x).f_variance, rtol=1e-5
        )
