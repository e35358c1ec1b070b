"""Mean functions: values, shapes, what `as_mean` accepts, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_gp import means
from ppl_gp.errors import DataError

X = np.arange(6.0).reshape(3, 2)


def test_values_shapes_and_dtypes():
    np.testing.assert_array_equal(means.Zero()(X), np.zeros(3))
    np.testing.assert_array_equal(means.Constant(2)(X), np.full(3, 2.0))
    np.testing.assert_allclose(means.Linear(np.array([2.0, -1.0]), 0.5)(X), [-0.5, 1.5, 3.5])
    np.testing.assert_allclose(means.Linear(2.0)(X[:, 0]), [0.0, 4.0, 8.0])
    single = jnp.asarray(X, jnp.float32)
    assert means.Constant(1.5)(single).dtype == means.Zero()(single).dtype == jnp.float32
    assert means.Constant(3)(np.arange(4)).dtype == jnp.result_type(float)


def test_parameters_are_differentiable_leaves():
    def total(mean):
        return jnp.sum(mean(X) ** 2)

    gradient = jax.jit(jax.grad(total))(means.Linear(jnp.array([1.0, 0.0]), jnp.array(0.0)))
    # mean(X) = X[:, 0] = (0, 2, 4): d/dslope = 2 X' m, d/dintercept = 2 sum m.
    np.testing.assert_allclose(gradient.slope, [40.0, 52.0])
    np.testing.assert_allclose(gradient.intercept, 12.0)
    batch = jax.vmap(lambda c: means.Constant(c)(X))(jnp.array([1.0, 2.0]))
    np.testing.assert_array_equal(batch, [[1.0] * 3, [2.0] * 3])


def test_as_mean_takes_none_numbers_and_callables():
    assert isinstance(means.as_mean(None), means.Zero)
    np.testing.assert_array_equal(means.as_mean(1.5)(X), np.full(3, 1.5))
    np.testing.assert_array_equal(jax.jit(lambda c: means.as_mean(c)(X))(2), np.full(3, 2.0))

    def mine(X):
        return X[:, 0] ** 2

    np.testing.assert_array_equal(jax.jit(lambda m: m(X))(means.as_mean(mine)), X[:, 0] ** 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: means.as_mean(np.ones(3)), r"array of shape \(3,\).*give a function of X"),
        (lambda: means.as_mean("zero"), "mean='zero'"),
        (lambda: means.as_mean(means.Zero), "Zero"),
        (lambda: means.Linear(np.ones(3))(X), r"Linear\(slope.*2 input"),
        (lambda: means.Constant(np.ones(2))(X), r"Constant\(c"),
        (lambda: means.Zero()(X[None]), r"X has shape \(1, 3, 2\)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(DataError, match=message):
        call()
