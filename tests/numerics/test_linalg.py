"""Factors, the jitter policy and triangular inverses."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from ppl_gp.numerics.linalg import (
    MAX_RAISES,
    add_diagonal,
    cholesky,
    default_jitter,
    half_log_det,
    robust_cholesky,
    solve_lower,
    tril_inverse,
)


def _spd(n, seed=0):
    A = np.random.default_rng(seed).normal(size=(n, n))
    return jnp.asarray(A @ A.T / n + 0.5 * np.eye(n))


def test_robust_cholesky_adds_nothing_where_nothing_is_needed():
    K = _spd(7)
    L, added = robust_cholesky(K, default_jitter(jnp.diagonal(K)))
    np.testing.assert_allclose(L, np.linalg.cholesky(K), atol=1e-12)
    assert float(added) == 0.0


def test_robust_cholesky_raises_the_jitter_and_says_by_how_much():
    K = jnp.ones((6, 6)) - 3e-7 * jnp.eye(6)  # smallest eigenvalue -3e-7
    unit = default_jitter(jnp.diagonal(K))
    L, added = robust_cholesky(K, unit)
    assert float(unit) < 3e-7 < float(added) <= float(unit) * 10.0 ** (MAX_RAISES - 1)
    np.testing.assert_allclose(L @ L.T, K + added * jnp.eye(6), atol=1e-12)


@pytest.mark.parametrize("K", [-jnp.eye(4), jnp.full((4, 4), jnp.nan)], ids=["negative", "nan"])
def test_a_hopeless_matrix_gives_nan(K):
    L, _ = robust_cholesky(K, jnp.asarray(1e-8))
    assert bool(jnp.isnan(L[-1, -1]))


@pytest.mark.parametrize("raised", [False, True])
def test_robust_cholesky_gradient(raised):
    base = _spd(5) if not raised else jnp.ones((5, 5)) - 1e-6 * jnp.eye(5)
    direction, unit = _spd(5, 1), jnp.asarray(1e-3)

    def value(t):
        L, added = robust_cholesky(base + t * direction, unit * jnp.exp(10.0 * t))
        return jnp.sum(jnp.sin(L)) + half_log_det(L) + added

    step = 1e-6 if not raised else 1e-7
    difference = (value(step) - value(-step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(value)(0.0), difference, rtol=1e-5)
    np.testing.assert_allclose(jax.jvp(value, (0.0,), (1.0,))[1], difference, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 5, 300])
def test_tril_inverse(n):
    L = jnp.asarray(np.linalg.cholesky(_spd(n)))
    inverse = tril_inverse(L)
    np.testing.assert_allclose(inverse @ L, np.eye(n), atol=1e-9)
    assert bool(jnp.all(jnp.triu(inverse, 1) == 0))


def test_half_log_det():
    K = _spd(6)
    np.testing.assert_allclose(half_log_det(cholesky(K)), 0.5 * np.linalg.slogdet(K)[1], rtol=1e-12)


def test_cholesky_of_an_indefinite_matrix_is_nan_and_of_a_batch_one_by_one():
    K = jnp.stack([_spd(4), -jnp.eye(4)])
    L = jax.vmap(cholesky)(K)
    assert bool(jnp.all(jnp.isfinite(L[0]))) and bool(jnp.isnan(L[1][-1, -1]))


@pytest.mark.one_case
@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("columns", [(), (3,)])
def test_triangular_solve_alone_and_in_batches(trans, columns):
    L = jnp.stack([jnp.linalg.cholesky(_spd(5, seed)) for seed in (0, 1)])
    b = random.normal(random.key(0), (2, 5, *columns))

    def dense(L, b):
        return jnp.linalg.solve(L.T if trans else L, b)

    def solve(L, b):
        return solve_lower(L, b, trans=trans)

    def total(solve):
        return lambda L, b: jnp.sum(jnp.sin(solve(jnp.tril(L), b)))

    np.testing.assert_allclose(solve(L[0], b[0]), dense(L[0], b[0]), rtol=1e-10)
    for axes in ((0, 0), (None, 0), (0, None)):
        args = [x if axis == 0 else x[0] for x, axis in zip((L, b), axes, strict=True)]
        np.testing.assert_allclose(
            jax.vmap(solve, axes)(*args), jax.vmap(dense, axes)(*args), rtol=1e-10
        )
        gradient, wanted = (
            jax.vmap(jax.grad(total(f), (0, 1)), axes)(*args) for f in (solve, dense)
        )
        for a, w in zip(gradient, wanted, strict=True):
            np.testing.assert_allclose(a, w, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_several_batched_factors_in_one_program_come_to_an_end():
    # With jax.numpy.linalg.cholesky in its place this program never ends on two cores (jaxlib
    # 0.10.2).
    code = """
import jax, jax.numpy as jnp
from ppl_gp.numerics.linalg import cholesky
def six(A):
    return sum(cholesky(A @ A.T + (i + 1.0) * jnp.eye(200)) for i in range(6))
batch = jax.random.normal(jax.random.key(0), (16, 200, 200))
together = jax.jit(jax.vmap(six))
for _ in range(20):
    jax.block_until_ready(together(batch))
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "ended", done.stderr


def test_default_jitter_follows_scale_and_precision():
    variance = jnp.array([1.0, 3.0])
    np.testing.assert_allclose(default_jitter(variance), 2e-8)
    np.testing.assert_allclose(default_jitter(1e6 * variance), 2e-2)
    np.testing.assert_allclose(default_jitter(variance.astype(jnp.float32)), 2e-5, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(default_jitter)(variance), 0.5e-8)


def test_add_diagonal_takes_a_number_or_a_vector():
    np.testing.assert_array_equal(add_diagonal(jnp.zeros((2, 2)), 3.0), 3.0 * np.eye(2))
    np.testing.assert_array_equal(
        add_diagonal(jnp.zeros((2, 2)), jnp.array([1.0, 2.0])), np.diag([1.0, 2.0])
    )
