"""Kernels against closed forms in NumPy loops, their algebra, and derivatives that are finite and
right everywhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tinygp

from ppl_gp import kernels as K
from ppl_gp.errors import DataError
from ppl_gp.kernels.base import squared_distance

rng = np.random.default_rng(0)
X1, X2 = rng.normal(size=(7, 3)), rng.normal(size=(5, 3))
X2[:2] = X1[:2]  # equal rows: distance zero, where derivatives go wrong
ARD = np.array([0.6, 1.1, 2.3])
VARIANCE = 1.7


def r(x, z):
    return np.sqrt(np.sum(((x - z) / ARD) ** 2))


def matern32(x, z):
    return (1 + np.sqrt(3) * r(x, z)) * np.exp(-np.sqrt(3) * r(x, z))


def matern52(x, z):
    s = np.sqrt(5) * r(x, z)
    return (1 + s + s**2 / 3) * np.exp(-s)


def periodic(x, z):
    return np.exp(-2 * np.sum(np.sin(np.pi * (x - z) / 0.8) ** 2 / ARD**2))


# name: (the kernel, its correlation at two points)
CASES = {
    "RBF": (K.RBF(VARIANCE, ARD), lambda x, z: np.exp(-(r(x, z) ** 2) / 2)),
    "Matern12": (K.Matern12(VARIANCE, ARD), lambda x, z: np.exp(-r(x, z))),
    "Matern32": (K.Matern32(VARIANCE, ARD), matern32),
    "Matern52": (K.Matern52(VARIANCE, ARD), matern52),
    "RationalQuadratic": (
        K.RationalQuadratic(VARIANCE, ARD, 0.7),
        lambda x, z: (1 + r(x, z) ** 2 / 1.4) ** -0.7,
    ),
    "Periodic": (K.Periodic(VARIANCE, ARD, 0.8), periodic),
    "Linear": (K.Linear(VARIANCE), lambda x, z: x @ z),
    "LinearARD": (K.Linear(VARIANCE * ARD), lambda x, z: np.sum(ARD * x * z)),
    "Polynomial": (K.Polynomial(VARIANCE, 3, 0.4), lambda x, z: (x @ z + 0.4) ** 3),
    "Constant": (K.Constant(VARIANCE), lambda x, z: 1.0),
    "White": (K.White(VARIANCE), lambda x, z: float(np.all(x == z))),
}
SMOOTH = [name for name in CASES if name not in ("White", "Constant")]


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@jax.jit
def evaluate(kernel, X1, X2):
    return kernel(X1, X2), kernel.diag(X1), kernel(X1, X1)


def test_closed_form_diagonal_and_positive_semidefinite(case):
    kernel, correlation = case
    matrix, diag, gram = evaluate(kernel, X1, X2)
    expected = VARIANCE * np.array([[correlation(x, z) for z in X2] for x in X1])
    np.testing.assert_allclose(matrix, expected, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(diag, [VARIANCE * correlation(x, x) for x in X1], rtol=1e-14)
    np.testing.assert_allclose(np.diag(gram), diag, rtol=1e-14)
    np.testing.assert_allclose(gram, gram.T, rtol=1e-14)
    assert np.linalg.eigvalsh(gram).min() > -1e-12


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_restricts_itself_to_active_dims(name):
    make = getattr(K, name.removesuffix("ARD"))
    parameters = (VARIANCE * ARD[:2],) if name == "LinearARD" else ()
    active = make(*parameters, active_dims=(2, 0))
    picked = make(*parameters)
    np.testing.assert_array_equal(active(X1, X2), picked(X1[:, [2, 0]], X2[:, [2, 0]]))
    np.testing.assert_array_equal(active.diag(X1), picked.diag(X1[:, [2, 0]]))


def test_one_dimensional_inputs_integers_and_defaults():
    x = np.array([1851, 1852, 1860])
    expected = np.exp(-0.5 * (x[:, None] - x[None, :]) ** 2)
    np.testing.assert_allclose(K.RBF()(x, x), expected, rtol=1e-14)
    np.testing.assert_array_equal(K.RBF()(x[:, None], x), K.RBF()(x, x))
    assert K.Matern32(active_dims=0)(x, x[:2]).shape == (3, 2)
    assert K.White(2).diag(x).dtype == jnp.result_type(float)
    single = jnp.asarray(x, jnp.float32)
    assert (
        K.RBF(1.0, 2.0)(single, single).dtype == jnp.float32 == K.RBF(1.0, 2.0).diag(single).dtype
    )


def test_algebra_is_pointwise_and_takes_numbers_from_both_sides():
    a, b = K.RBF(0.5, 1.3), K.Matern32(2.0, 0.7, active_dims=1)
    A, B = a(X1, X2), b(X1, X2)
    for kernel, expected in [
        (a + b, A + B),
        (a * b, A * B),
        (2.5 * a + b * np.float64(0.3) + 1, 2.5 * A + 0.3 * B + 1.0),
        (np.float64(0.3) * a, 0.3 * A),
        (jnp.array(2.0) * (a + b) * a, 2.0 * (A + B) * A),
        (sum([a, b]), A + B),
        (K.Product(2.0, a), 2.0 * A),
        (K.Sum(a, lambda A, B: 3.0 * b(A, B)), A + 3.0 * B),
    ]:
        assert isinstance(kernel, K.Sum | K.Product)
        np.testing.assert_allclose(kernel(X1, X2), expected, rtol=1e-14)
        np.testing.assert_allclose(kernel.diag(X1), np.diag(kernel(X1, X1)), rtol=1e-14)


def test_white_sees_values_not_array_objects():
    kernel = K.White(0.4)
    np.testing.assert_array_equal(kernel(X1, X1.copy()), 0.4 * np.eye(7))
    np.testing.assert_array_equal(jax.jit(kernel)(X1, X1), 0.4 * np.eye(7))
    doubled = np.concatenate([X1, X1[:1]])
    assert kernel(doubled, doubled)[0, 7] == 0.4


def slope(function, x, step=2e-4):
    """Central difference of fourth order: its error is about 1e-9 for the functions here."""
    near, far = (
        function(x + step) - function(x - step),
        function(x + 2 * step) - function(x - 2 * step),
    )
    return (8 * near - far) / (12 * step)


@pytest.mark.one_case
@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_match_finite_differences_and_are_finite_at_equal_rows(name):
    leaves, structure = jax.tree_util.tree_flatten(CASES[name][0])
    leaves = [jnp.asarray(leaf, float) for leaf in leaves]
    weight = jnp.asarray(rng.normal(size=(7, 5)))

    def value(log_scale, shift):
        # All parameters move with exp(log_scale), X1 moves with shift; at shift = 0 some rows of X1
        # and X2 are equal.
        kernel = jax.tree_util.tree_unflatten(
            structure, [leaf * jnp.exp(log_scale) for leaf in leaves]
        )
        return jnp.vdot(weight, kernel(X1 + shift * X1[:, ::-1], X2))

    # Compiled, since XLA computes a distance anew for every use of it, and must get away with
    # rounding it differently.
    value, gradient, hessian = (
        jax.jit(f) for f in (value, jax.grad(value, (0, 1)), jax.hessian(value, (0, 1)))
    )
    for shift in (0.0, 0.05):
        by_scale = gradient(0.1, shift)[0]
        np.testing.assert_allclose(
            by_scale, slope(lambda s, x=shift: value(s, x), 0.1), rtol=1e-8, atol=1e-9
        )
        numeric = slope(lambda s, x=shift: gradient(s, x)[0], 0.1)
        np.testing.assert_allclose(hessian(0.1, shift)[0][0], numeric, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(
        gradient(0.1, 0.05)[1], slope(lambda s: value(0.1, s), 0.05), rtol=1e-8, atol=1e-9
    )
    assert np.all(np.isfinite(hessian(0.1, 0.0)))


@pytest.mark.parametrize(
    "kernel", [K.RBF(VARIANCE, 0.6), K.Matern32(VARIANCE, 0.6), K.Matern52(VARIANCE, 0.6)]
)
def test_derivative_process_has_its_variance_at_equal_inputs(kernel):
    # Var f'(x) = d^2 k / dx dx' at x = x' is -2 rho'(0) variance / lengthscale^2, with rho' taken
    # in r^2.
    factor = {"RBF": 1.0, "Matern32": 3.0, "Matern52": 5.0 / 3.0}[type(kernel).__name__]

    def k(x, z):
        return kernel(x[None], z[None])[0, 0]

    mixed = jax.jit(jax.jacfwd(jax.grad(k), 1))(0.3, 0.3)
    np.testing.assert_allclose(mixed, factor * VARIANCE / 0.36, rtol=1e-12)


def test_jit_eager_and_a_batch_of_kernels_agree():
    variances, lengthscales = jnp.array([0.5, 2.0]), jnp.array([[0.4, 1.0, 3.0], [1.5, 0.2, 0.9]])

    def build(v, ell):
        return K.RBF(v, ell) * K.Periodic(v, 1.0, 2.0) + K.Matern12(v, ell) + 0.1

    eager = jnp.stack(
        [build(v, ell)(X1, X2) for v, ell in zip(variances, lengthscales, strict=True)]
    )
    batched = jax.vmap(lambda v, ell: build(v, ell)(X1, X2))(variances, lengthscales)
    np.testing.assert_allclose(batched, eager, rtol=1e-14)
    # A kernel with batched parameters is itself something to map over.
    mapped = jax.jit(jax.vmap(lambda kernel: kernel(X1, X2)))(K.RBF(variances, lengthscales))
    direct = jnp.stack(
        [K.RBF(v, ell)(X1, X2) for v, ell in zip(variances, lengthscales, strict=True)]
    )
    np.testing.assert_allclose(mapped, direct, rtol=1e-14)


@pytest.mark.parametrize("D", [16, 17, 40])
def test_distance_formulas_agree_far_from_the_origin(D):
    A, B = rng.normal(size=(6, D)) + 1e3, rng.normal(size=(4, D)) + 1e3
    expected = np.sum((A[:, None] - B[None]) ** 2, -1)
    np.testing.assert_allclose(
        squared_distance(jnp.asarray(A), jnp.asarray(B)), expected, rtol=1e-12
    )
    itself = squared_distance(jnp.asarray(A), jnp.asarray(A), True)
    assert np.all(np.diag(itself) == 0.0) and np.all(itself >= 0.0)
    # The derivative's products and the difference written out, in forward and in reverse mode.
    weight, tangent = rng.normal(size=(6, 4)), rng.normal(size=(6, D))
    value, pullback = jax.vjp(squared_distance, jnp.asarray(A), jnp.asarray(B))
    difference = 2 * (A[:, None] - B[None])
    by_A, by_B = pullback(jnp.asarray(weight))
    np.testing.assert_allclose(
        by_A, np.einsum("ij,ijd->id", weight, difference), rtol=1e-10, atol=1e-10
    )
    np.testing.assert_allclose(
        by_B, -np.einsum("ij,ijd->jd", weight, difference), rtol=1e-10, atol=1e-10
    )
    forward = jax.jvp(
        lambda A: squared_distance(A, jnp.asarray(B)), (jnp.asarray(A),), (jnp.asarray(tangent),)
    )[1]
    np.testing.assert_allclose(
        forward, np.einsum("ijd,id->ij", difference, tangent), rtol=1e-10, atol=1e-10
    )


def test_many_columns_keep_the_diagonal_exact():
    X = rng.normal(size=(6, 64))
    kernel = K.Matern12(1.3, 5.0)
    np.testing.assert_array_equal(np.diag(jax.jit(lambda X: kernel(X, X))(X)), kernel.diag(X))


def test_nan_inputs_are_not_hidden():
    X = X1.copy()
    X[2, 1] = np.nan
    for kernel in (
        K.RBF(),
        K.Matern12(),
        K.Matern32(),
        K.Matern52(),
        K.Periodic(),
        K.RationalQuadratic(),
    ):
        matrix = np.asarray(kernel(X, X))
        assert np.all(np.isnan(matrix[2])) and np.isfinite(matrix[0, 0])


TINY = 1.7 * tinygp.kernels.Matern32(scale=0.8, distance=tinygp.kernels.distance.L2Distance())


def test_tinygp_kernel_serves_as_a_kernel_and_keeps_its_parameters():
    kernel, ours = K.as_kernel(TINY), K.Matern32(1.7, 0.8)
    np.testing.assert_allclose(kernel(X1, X2), ours(X1, X2), rtol=1e-13)
    np.testing.assert_allclose(kernel.diag(X1), ours.diag(X1), rtol=1e-13)
    np.testing.assert_allclose((ours * TINY + 1.0)(X1, X2), ours(X1, X2) ** 2 + 1.0, rtol=1e-13)

    def slope(make):
        return jax.grad(lambda s: jnp.sum(K.as_kernel(make(s))(X1[:, 0], X1[:, 0])))(0.8)

    np.testing.assert_allclose(
        slope(tinygp.kernels.ExpSquared), slope(lambda s: K.RBF(1.0, s)), rtol=1e-12
    )
    # Its parameters are leaves: the wrapped kernel crosses jit as an argument.
    np.testing.assert_allclose(evaluate(kernel, X1, X2)[0], ours(X1, X2), rtol=1e-13)


def test_plain_functions_and_foreign_objects_serve_as_kernels():
    def cosine(A, B):
        return jnp.cos(jnp.sum(A, 1)[:, None] - jnp.sum(B, 1)[None, :])

    wrapped = K.as_kernel(cosine)
    np.testing.assert_allclose(wrapped.diag(X1), np.ones(7), rtol=1e-15)
    np.testing.assert_allclose(
        evaluate(wrapped + K.RBF(), X1, X2)[0], cosine(X1, X2) + K.RBF()(X1, X2), rtol=1e-14
    )

    class Foreign:
        def __call__(self, X1, X2):
            return cosine(X1, X2)

        def diag(self, X):
            return jnp.ones(X.shape[0])

    foreign = Foreign()
    assert K.as_kernel(foreign) is foreign
    assert K.as_kernel(K.RBF()) == K.RBF()
    np.testing.assert_allclose((2.0 * K.RBF() + foreign).diag(X1), np.full(7, 3.0), rtol=1e-15)


def test_the_diagonal_has_the_noise_that_a_callable_adds_to_itself():
    """By `is`: `diag` was 1.0 where k(X, X) has 1.3, so that marginals lacked what joints had."""
    A = jnp.asarray(X1)
    noisy = K.as_kernel(lambda A, B: K.RBF()(A, B) + 0.3 * jnp.eye(len(A)) * (A is B))
    np.testing.assert_allclose(noisy.diag(A), np.diag(noisy(A, A)), rtol=1e-14)
    np.testing.assert_allclose(noisy.diag(A), np.full(7, 1.3), rtol=1e-14)


BAD = {
    "length scales for other columns": (
        lambda: K.RBF(1.0, np.ones(2))(X1, X2),
        r"lengthscale.*shape \(2,\).*3 input",
    ),
    "length scales and active_dims": (
        lambda: K.RBF(1.0, ARD, active_dims=0)(X1, X2),
        r"lengthscale.*1 input column",
    ),
    "a vector of variances": (
        lambda: K.Matern32(np.ones(4))(X1, X2),
        r"Matern32\(variance.*shape \(4,\).*vmap",
    ),
    "a vector of variances, diagonal": (lambda: K.White(np.ones(4)).diag(X1), r"White\(variance"),
    "period": (lambda: K.Periodic(1.0, 1.0, np.ones(2))(X1, X2), r"Periodic\(period"),
    "alpha": (
        lambda: K.RationalQuadratic(1.0, 1.0, np.ones(3))(X1, X2),
        r"RationalQuadratic\(alpha",
    ),
    "linear variances": (lambda: K.Linear(np.ones(2)).diag(X1), r"Linear\(variance"),
    "columns differ": (lambda: K.RBF()(X1, X2[:, :2]), "X1 has 3.*X2 has 2"),
    "active_dims out of range": (
        lambda: K.RBF(active_dims=3)(X1, X2),
        r"active_dims=\(3,\).*3 column",
    ),
    "active_dims negative": (
        lambda: K.Linear(active_dims=(0, -1)).diag(X1),
        r"active_dims=\(0, -1\)",
    ),
    "active_dims empty": (lambda: K.RBF(active_dims=()), r"active_dims=\(\)"),
    "active_dims as a mask": (lambda: K.RBF(active_dims=X1[0] > 0), r"np\.flatnonzero\(mask\)"),
    "active_dims as a slice": (lambda: K.RBF(active_dims=slice(2)), "give different column"),
    "active_dims twice": (lambda: K.RBF(active_dims=(0, 0)), r"\(0, 0\): give different column"),
    "active_dims of a fraction": (lambda: K.RBF(active_dims=(1.7,)), "as integers"),
    "three axes": (lambda: K.RBF()(X1[None], X1[None]), r"X1 has shape \(1, 7, 3\)"),
    "no axis": (lambda: K.RBF().diag(1.0), r"X has shape \(\)"),
    "no columns": (lambda: K.RBF()(X1[:, :0], X2[:, :0]), r"X1 has shape \(7, 0\)"),
    "complex": (lambda: K.RBF().diag(X1 * 1j), "complex128"),
    "degree": (lambda: K.Polynomial(1.0, 1.5), "degree=1.5"),
    "not a kernel": (lambda: K.as_kernel(3.0), "kernel=3.0"),
    "a class, not an object": (lambda: K.as_kernel(K.RBF), "is no kernel"),
    "added text": (lambda: K.RBF() + "white", "'white'"),
    "multiplied by a vector": (lambda: K.RBF() * np.ones(2), r"shape \(2,\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, message = BAD[name]
    with pytest.raises(DataError, match=message):
        call()
