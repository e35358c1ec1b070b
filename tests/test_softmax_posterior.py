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
from ppl_gp.local.factor import Root
from ppl_gp.local.forms import asked
from ppl_gp.local.natural import MinusRankOne, as_general
from ppl_gp.local.softmax import SoftmaxRoot
from ppl_gp.numerics.blocks import matrix_of
from ppl_gp.numerics.independent import Independent
from ppl_gp.posterior import OfFunctions
from ppl_gp.results.query.query import case_at
from ppl_gp.softmax_posterior import OfSoftmax, coloured
from ppl_gp.wrappers import unwrap

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


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (0, 1, 2), (2, 0, 1)], ids=["two", "three", "permuted"])
def test_a_fit_predicts_as_with_the_blocks_written_out(order):
    """Of C = 2 and 3, permuted, with a mask; at the training rows, new ones and one."""
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(9, 2)), rng.integers(0, len(order), 9)
    given = {"mask": np.arange(9) % 4 != 1, "order": order}
    fit = pg.fit(classes, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=y, **given)
    slow = in_blocks(fit)
    ((site, kept),) = fit.latent.items()
    assert type(kept.sites) is MinusRankOne
    assert type(fit.process) is OfSoftmax and type(slow.process) is OfFunctions
    for new in (X, rng.normal(size=(5, 2)), rng.normal(size=(1, 2))):
        at = {"order": order}
        ours, theirs = (f.predict(new, **at) for f in (fit, slow))
        for name in ("f_mean", "f_variance", "probs"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-10)
        case = case_at(fit, X_new=new, args=(), kwargs=at)
        prior = unwrap(case.trace(fit.draws.at(0), {})[site]["fn"])
        for ask in ("within", "joint", "marginals"):
            a, b = (jax.tree.leaves(getattr(f.process, ask)(prior)) for f in (fit, slow))
            for one, other in zip(a, b, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-10)
    for k, process in fit.posterior.items():
        for joint in (False, True):
            a, b = process(X[:4] + 0.1, joint), slow.posterior[k](X[:4] + 0.1, joint)
            np.testing.assert_allclose(a.mean, b.mean, atol=1e-10)
            np.testing.assert_allclose(a.variance, b.variance, atol=1e-10)
    parts, others = (f.components(X[:3] + 0.1, order=order) for f in (fit, slow))
    for k in parts:
        np.testing.assert_allclose(parts[k].variance, others[k].variance, atol=1e-10)
    np.testing.assert_allclose(*(f.loo().elpd_i for f in (fit, slow)), atol=1e-8)
