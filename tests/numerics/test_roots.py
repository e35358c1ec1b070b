"""Roots, inverses and determinants of batches (`numerics.roots`), and their written derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_gp.numerics.linalg import inverse, log_det, root

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("columns", [3, 12])
def test_values_in_any_units(columns):
    """Variances from 1e-20 to 1e20 in one block: those of the correlations, scaled."""
    A = RNG.normal(size=(columns, 2 * columns))
    R = np.corrcoef(A)
    scale = 10.0 ** np.linspace(-10, 10, columns)
    S = jnp.asarray(R * np.outer(scale, scale))
    L = root(S)
    np.testing.assert_allclose((L @ L.T) / np.outer(scale, scale), R, atol=1e-12)
    np.testing.assert_allclose(
        inverse(S) * np.outer(scale, scale), np.linalg.inv(R), rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize("columns", [1, 3, 12])
def test_first_and_second_derivatives_are_those_of_jax(columns):
    """Along a line of symmetric matrices of a batch, by JAX's own functions of the same names."""
    A = RNG.normal(size=(2, columns, 2 * columns))
    S = jnp.asarray(A @ np.swapaxes(A, -1, -2))
    B = RNG.normal(size=S.shape)
    V = jnp.asarray(B + np.swapaxes(B, -1, -2))
    C = jnp.asarray(RNG.normal(size=S.shape))

    def along(function):
        return lambda t: jnp.sum(C * function(S + t * V))

    pairs = [
        (root, jnp.linalg.cholesky),
        (inverse, jnp.linalg.inv),
        (lambda x: log_det(x)[:, None, None], lambda x: jnp.linalg.slogdet(x)[1][:, None, None]),
    ]
    for ours, theirs in pairs:
        first, second = jax.grad(along(ours)), jax.jit(jax.hessian(along(ours)))
        np.testing.assert_allclose(first(0.0), jax.grad(along(theirs))(0.0), rtol=1e-8)
        np.testing.assert_allclose(second(0.0), jax.hessian(along(theirs))(0.0), rtol=1e-7)


def test_the_gradient_is_of_a_symmetric_matrix():
    """d log|A| / dA = A^-1, also where it is taken backwards through a batch of large ones."""
    A = RNG.normal(size=(3, 12, 20))
    S = jnp.asarray(A @ np.swapaxes(A, -1, -2))
    np.testing.assert_allclose(
        jax.grad(lambda x: jnp.sum(log_det(x)))(S), np.linalg.inv(S), rtol=1e-8
    )


@pytest.mark.parametrize("columns", [1, 3, 12])
def test_nothing_is_the_inverse_of_zero(columns):
    """A precision of zero is no distribution, which whoever asks for its moments has to see; the
    other members of the batch are as they are.
    """
    S = jnp.stack([jnp.eye(columns), jnp.zeros((columns, columns))])
    found = inverse(S)
    np.testing.assert_allclose(found[0], np.eye(columns))
    assert not np.any(np.isfinite(jnp.diagonal(found[1])))
    assert not np.isfinite(log_det(S)[1])
