"""Inter-domain inducing variables and derivatives: against integrals, closed forms, dense algebra,
exact regression.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree
from often import some

import ppl_gp as pg
from ppl_gp import kernels, means
from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP
from ppl_gp.kernels.derivative import (
    MeanWithDerivatives,
    WithDerivatives,
    derivative_inputs,
    value_inputs,
)
from ppl_gp.sparse.families import Whitened
from ppl_gp.sparse.features import (
    Additive,
    Concatenated,
    Derivatives,
    FourierFeatures,
    Kronecker,
    LaplacianFeatures,
    MercerFeatures,
)
from ppl_gp.sparse.features.structure import multi_indices
from ppl_gp.sparse.inducing import Points
from ppl_gp.sparse.process import sparse_process

MATERN = {1: kernels.Matern12, 2: kernels.Matern32, 3: kernels.Matern52}
RNG = np.random.default_rng(0)
LINE = np.linspace(0.3, 2.7, 9)
PLANE = RNG.uniform(0.2, 1.8, (12, 2))


def prior(kernel, X, **options):
    return GP(kernel, X, **options)


@eqx.filter_jit
def covariance(features, gp):
    """K_uu, (M, M), from the root's own product."""
    R = features.root(gp).color(jnp.eye(features.num))
    return R @ R.T


@eqx.filter_jit
def cross(features, gp, X):
    return features.cross(gp, X)


@eqx.filter_jit
def explained(features, gp, X):
    """Q_ff = K_fu K_uu^-1 K_uf."""
    A = features.root(gp).whiten(features.cross(gp, X))
    return A.T @ A


@eqx.filter_jit
def computed(features, gp, X):
    """What the tests of every kind look at, compiled once."""
    root, C = features.root(gp), features.cross(gp, X)
    R, A = root.color(jnp.eye(features.num)), root.whiten(C)
    K = gp.kernel(X, X)
    return {
        "K_uu": R @ R.T,
        "C": C,
        "again": root.color(A),
        "Q": A.T @ A,
        "K": K,
        "diag": gp.kernel.diag(X),
        "added": root.added,
    }


def smallest_eigenvalue(A):
    return np.linalg.eigvalsh(np.asarray(A)).min()


CASES = {
    "fourier12": (FourierFeatures(5, 0.0, 3.0), kernels.Matern12(1.3, 0.7), LINE),
    "fourier32": (FourierFeatures(5, 0.0, 3.0), 2.0 * kernels.Matern32(1.3, 0.7), LINE),
    "fourier52": (FourierFeatures(5, 0.5, 2.0), kernels.Matern52(1.3, np.array([0.7])), LINE),
    "mercer": (MercerFeatures(9, 1.5, 0.8), kernels.RBF(1.3, 0.7), LINE),
    "mercer2": (
        MercerFeatures((4, 3), (1.0, 0.8), 0.8),
        3.0 * kernels.RBF(1.3, np.array([0.7, 0.5])),
        PLANE,
    ),
    "laplacian2": (
        LaplacianFeatures(11, -1.0, (3.0, 4.0)),
        kernels.Matern32(1.3, np.array([0.7, 1.1])),
        PLANE,
    ),
    "additive": (
        Additive(
            [
                FourierFeatures(3, 0.0, 2.0),
                MercerFeatures(4, 1.0, 0.5),
                Points(jnp.asarray(PLANE[:1])),
            ]
        ),
        2.0 * (kernels.Matern32(1.3, 0.7, active_dims=0) + kernels.RBF(0.4, 0.9, active_dims=1))
        + 0.3,
        PLANE,
    ),
    "kronecker": (
        Kronecker([FourierFeatures(2, 0.0, 2.0), Points(jnp.asarray(PLANE[:4]))]),
        kernels.Matern32(1.3, 0.7, active_dims=0) * kernels.RBF(0.4, 0.9, active_dims=1) * 1.5,
        PLANE,
    ),
    "derivatives": (
        Derivatives(jnp.asarray(PLANE[:5]), 1),
        kernels.Matern52(1.3, np.array([0.7, 0.5])),
        PLANE,
    ),
    "concatenated": (
        Concatenated([Points(jnp.asarray(PLANE[:4])), Derivatives(jnp.asarray(PLANE[3:6]), 0)]),
        kernels.RBF(1.3, 0.4),
        PLANE,
    ),
    "trend": (
        Concatenated([FourierFeatures(3, 0.0, 3.0), Points(jnp.asarray(LINE[::4]))]),
        kernels.Matern52(1.3, 0.7),
        LINE,
    ),
}
APPROXIMATE = {"laplacian2"}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    return request.param, *CASES[request.param]


@pytest.mark.one_case
def test_every_kind_is_whitened_exactly_and_explains_a_part_of_the_prior(case):
    name, features, kernel, X = case
    # Beyond the box too, where Fourier features decay and Laplacian ones are zero.
    X = np.concatenate([X, X + 1.7, X - 1.7])
    got = {key: np.asarray(value) for key, value in computed(features, prior(kernel, X), X).items()}
    C = got["C"]
    assert C.shape == (features.num, len(X)) and got["added"] == 0.0
    # whiten is the inverse of color, and Q is what dense algebra makes of K_uu.
    np.testing.assert_allclose(got["again"], C, atol=1e-8 * np.abs(C).max())
    np.testing.assert_allclose(got["Q"], C.T @ np.linalg.solve(got["K_uu"], C), atol=1e-6)
    if name in APPROXIMATE:
        assert np.min(np.diagonal(got["K"] - got["Q"])) > -1e-12
    else:
        assert smallest_eigenvalue(got["K"] - got["Q"]) > -1e-7
    assert np.max(np.diagonal(got["Q"]) / got["diag"]) > 0.3


@pytest.mark.one_case
def test_gradients_against_finite_differences(case):
    _, features, kernel, X = case
    weights = jnp.asarray(RNG.normal(size=(len(X), len(X))))
    flat, unflatten = ravel_pytree(
        jax.tree_util.tree_map(lambda leaf: jnp.asarray(leaf, float), kernel)
    )
    h = 1e-5 * jnp.eye(flat.size)

    def total(flat):
        return jnp.sum(weights * explained(features, prior(unflatten(flat), X), X))

    values, gradient = jax.jit(
        lambda flat: (
            jax.lax.map(total, jnp.concatenate([flat + h, flat - h])),
            jax.grad(total)(flat),
        )
    )(flat)
    up, down = jnp.split(values, 2)
    np.testing.assert_allclose(gradient, (up - down) / 2e-5, rtol=1e-5, atol=1e-5)
    assert np.abs(gradient).min() > 1e-4


@pytest.mark.parametrize("order", MATERN)
def test_fourier_covariances_are_rkhs_inner_products(order):
    # <g, h> is the limit of g(T)^T K(T, T)^-1 h(T) on grids T of the box, and <phi, k(., x)> with
    # it, x anywhere.
    kernel, features = MATERN[order](1.7, 0.8), FourierFeatures(3, -0.5, 1.5)
    outside = np.array([-1.3, -0.6, 1.55, 2.4])
    gp = prior(kernel, outside)

    def on_grid(n):
        T = np.linspace(-0.5, 1.5, n)
        phi = np.asarray(cross(features, gp, T))
        weights = np.linalg.solve(np.asarray(kernel(T, T)), phi.T)
        return phi @ weights, weights.T @ np.asarray(kernel(T, outside))

    # The error on a grid is of order h^2 for the first and h for the others, whose slope at the
    # ends has to be found.
    q = 2 if order == 1 else 1
    limits = [
        (2**q * fine - coarse) / (2**q - 1)
        for coarse, fine in zip(on_grid(101), on_grid(201), strict=True)
    ]
    K = np.asarray(covariance(features, gp))
    sd = np.sqrt(np.diag(K))
    np.testing.assert_allclose(K / sd / sd[:, None], limits[0] / sd / sd[:, None], atol=1e-3)
    np.testing.assert_allclose(cross(features, gp, outside), limits[1], rtol=1e-2, atol=5e-3)
    x = np.array([-0.5, 0.1, 1.2])
    w = np.pi * (x + 0.5)
    np.testing.assert_allclose(
        cross(features, gp, x)[jnp.array([0, 2, 4])],
        [1 + 0 * w, np.cos(2 * w), np.sin(w)],
        atol=1e-12,
    )


@pytest.mark.one_case
@pytest.mark.parametrize("order", MATERN)
def test_fourier_features_converge_at_the_rate_of_the_spectrum(order):
    kernel, x, M = MATERN[order](2.0, 0.5), np.array([4.9, 5.0, 5.3]), 100
    gp = prior(kernel, x)
    errors = [
        kernel.diag(x) - jnp.diagonal(explained(FourierFeatures(m, 0.0, 10.0), gp, x))
        for m in (M, 2 * M)
    ]
    np.testing.assert_allclose(np.log2(errors[0] / errors[1]), 2 * order - 1, rtol=0.1)


def test_fourier_error_at_an_end_stays():
    # All features are alike at both ends: f(low) - f(high) is orthogonal to them.
    kernel, ends = kernels.Matern12(1.0, 0.5), np.array([0.0, 3.0])
    gp = prior(kernel, ends)
    Q = explained(FourierFeatures(300, 0.0, 3.0), gp, ends)
    np.testing.assert_allclose(Q[0] - Q[1], 0.0, atol=1e-10)


def test_additive_sums_and_kronecker_multiplies():
    k1, k2 = kernels.Matern32(1.3, 0.7, active_dims=0), kernels.Matern52(0.4, 0.9, active_dims=1)
    parts = [FourierFeatures(3, 0.0, 2.0), FourierFeatures(2, -0.5, 2.5)]
    Q1, Q2 = (
        explained(part, prior(k, PLANE), PLANE) for part, k in zip(parts, (k1, k2), strict=True)
    )
    np.testing.assert_allclose(
        explained(Additive(parts), prior(2.0 * (k1 + k2), PLANE), PLANE), 2 * (Q1 + Q2), rtol=1e-9
    )
    kronecker = prior(k1 * k2 * 3.0, PLANE)
    np.testing.assert_allclose(
        explained(Kronecker(parts), kronecker, PLANE), 3 * Q1 * Q2, rtol=1e-9
    )
    assert Additive(parts).num == 12 and Kronecker(parts).num == 35
    K1, K2 = (covariance(part, prior(k, PLANE)) for part, k in zip(parts, (k1, k2), strict=True))
    np.testing.assert_allclose(
        covariance(Kronecker(parts), prior(k1 * k2, PLANE)), np.kron(K1, K2), atol=1e-9
    )


def hermite_rule(mean, scale, n=150):
    z, w = np.polynomial.hermite_e.hermegauss(n)
    return mean + scale * z, w / w.sum()


def test_mercer_features_are_eigenfunctions():
    lengthscale, mean, scale = 0.6, 0.4, 1.2
    kernel, features = kernels.RBF(1.9, lengthscale), MercerFeatures(12, mean, scale)
    t, w = hermite_rule(mean, scale)
    gp = prior(kernel, t)
    at_t, at_x = np.asarray(features.cross(gp, t)), np.asarray(features.cross(gp, LINE))
    a, b = 1 / (4 * scale**2), 1 / (2 * lengthscale**2)
    A = a + b + np.sqrt(a**2 + 2 * a * b)
    eigenvalues = 1.9 * np.sqrt(2 * a / A) * (b / A) ** np.arange(12)
    np.testing.assert_allclose((at_t * w) @ at_t.T, np.diag(eigenvalues), atol=1e-12)
    image = np.asarray(kernel(LINE, t)) @ (at_t * w).T
    np.testing.assert_allclose(image.T, eigenvalues[:, None] * at_x, atol=1e-12)
    # The lost variance, integrated, is the sum of the eigenvalues left out.
    lost = w @ (1.9 - np.sum(at_t**2, 0))
    np.testing.assert_allclose(lost, 1.9 - eigenvalues.sum(), rtol=1e-9)


def test_mercer_recurrence_survives_high_order_and_underflow():
    kernel, features = kernels.RBF(1.0, 0.05), MercerFeatures(200, 0.0, 1.0)
    x = np.array([0.0, 0.3, 2.5, 4.0])
    double = features.cross(prior(kernel, x), x)
    single = features.cross(
        prior(kernels.RBF(np.float32(1.0), np.float32(0.05)), x.astype("f4")), x.astype("f4")
    )
    assert (
        single.dtype == jnp.float32
        and double[0, 3] < 1e-60
        and np.abs(double[150:, 3]).max() > 1e-3
    )
    np.testing.assert_allclose(single, double, atol=2e-4)
    # m = 100 against an independent form: orthogonal under the measure, with the eigenvalue as its
    # norm.
    t = np.linspace(-15.0, 15.0, 8001)
    w = np.exp(-0.5 * t**2) / np.sqrt(2 * np.pi) * (t[1] - t[0])
    rows = np.asarray(MercerFeatures(101, 0.0, 1.0).cross(prior(kernels.RBF(1.0, 0.4), t), t))
    c = np.sqrt(0.25**2 + 0.5 * 3.125)
    eigenvalue = np.sqrt(0.5 / (0.25 + 3.125 + c)) * (3.125 / (0.25 + 3.125 + c)) ** 100
    np.testing.assert_allclose((rows[100] * w) @ rows[100], eigenvalue, rtol=1e-6)
    # Long length scales: eigenvalues underflow, and neither values nor gradients become NaN.
    loss = lambda ell: jnp.sum(MercerFeatures(300).cross(prior(kernels.RBF(1.0, ell), x), x))  # noqa: E731
    assert np.all(np.isfinite(jax.value_and_grad(loss)(50.0)))


def test_multi_indices():
    degree = lambda d, j: float(j)  # noqa: E731
    np.testing.assert_array_equal(
        multi_indices(4, 2, degree, "F"), [[0, 0], [0, 1], [1, 0], [0, 2]]
    )
    np.testing.assert_array_equal(
        multi_indices((2, 2), 2, degree, "F"), [[0, 0], [0, 1], [1, 0], [1, 1]]
    )
    # On a box four times as wide in column 1 the first eigenvalues vary along it.
    box = lambda d, j: ((j + 1) / (1.0, 4.0)[d]) ** 2  # noqa: E731
    np.testing.assert_array_equal(multi_indices(4, 2, box, "F"), [[0, 0], [0, 1], [0, 2], [0, 3]])


@pytest.mark.parametrize(
    "kernel", [kernels.RBF, kernels.Matern12, kernels.Matern32, kernels.Matern52]
)
def test_laplacian_features_approximate_the_kernel(kernel):
    k, num = kernel(1.4, np.array([0.8, 1.2])), 40
    X = RNG.uniform(-1.0, 1.0, (6, 2))
    gp = prior(k, X)
    near = explained(LaplacianFeatures((num, num), -6.0, 6.0), gp, X)
    tolerance = {"RBF": 1e-8, "Matern12": 0.15, "Matern32": 8e-3, "Matern52": 1e-3}[kernel.__name__]
    np.testing.assert_allclose(near, k(X, X), atol=tolerance)
    assert not LaplacianFeatures(3, 0.0, 1.0).is_exact


@pytest.mark.parametrize("order", MATERN)
def test_laplacian_features_converge_at_the_rate_of_the_spectrum(order):
    kernel, x, M = MATERN[order](2.0, 0.5), np.array([-0.37, 0.41, 0.9]), 120
    gp = prior(kernel, x)
    errors = [
        kernel.diag(x) - jnp.diagonal(explained(LaplacianFeatures(m, -5.0, 5.0), gp, x))
        for m in (M, 2 * M)
    ]
    np.testing.assert_allclose(np.log2(errors[0] / errors[1]), 2 * order - 1, rtol=0.1)


def test_what_holds_for_laplacian_features():
    # Variances never exceed the prior's, in a box of any width; only for Matern12 is u a functional
    # of f.
    x = np.linspace(-1.0, 1.0, 41)
    for kernel in (kernels.RBF, kernels.Matern12, kernels.Matern32, kernels.Matern52):
        for lengthscale in (0.3, 1.0, 5.0):
            k = kernel(1.0, lengthscale)
            lost = k(x, x) - explained(LaplacianFeatures(200, -1.0, 1.0), prior(k, x), x)
            assert np.min(jnp.diagonal(lost)) > -1e-12
            if kernel is kernels.Matern12:
                assert smallest_eigenvalue(lost) > -1e-10
        k = kernel(1.0, 1.0)
        lost = k(x, x) - explained(LaplacianFeatures(200, -1.0, 1.0), prior(k, x), x)
        assert (smallest_eigenvalue(lost) < -1e-3) == (kernel is not kernels.Matern12)
    features, gp = LaplacianFeatures(5, -1.0, 1.0), prior(kernels.RBF(), x)
    np.testing.assert_array_equal(features.cross(gp, np.array([-1.2, 1.5])), np.zeros((5, 2)))


RBF2, LENGTHS = kernels.RBF(1.7, np.array([0.6, 1.3])), np.array([0.6, 1.3])


def rbf_closed_form(x, i, y, j):
    """Cov[D_i f(x), D_j f(y)] of RBF2, i and j from 0 (none) to 2."""
    d, k = (x - y) / LENGTHS**2, 1.7 * np.exp(-0.5 * np.sum((x - y) ** 2 / LENGTHS**2))
    if i and j:
        return k * ((i == j) / LENGTHS[i - 1] ** 2 - d[i - 1] * d[j - 1])
    return k * (-d[i - 1] if i else d[j - 1] if j else 1.0)


def test_derivative_kernel_closed_form_rbf():
    X = np.concatenate([value_inputs(PLANE[:3]), derivative_inputs(PLANE[1:4])])
    assert X.shape == (9, 3) and list(X[:, 2]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    k = WithDerivatives(RBF2)
    K, diag = eqx.filter_jit(lambda X: (k(X, X), k.diag(X)))(X)
    truth = [[rbf_closed_form(a[:2], int(a[2]), b[:2], int(b[2])) for b in X] for a in X]
    np.testing.assert_allclose(K, truth, atol=1e-12)
    np.testing.assert_allclose(diag, np.diag(truth), atol=1e-12)


def test_derivative_kernel_closed_form_matern():
    x, ell = np.array([0.0, 0.0, 0.4, 1.5]), 0.7
    D, V = derivative_inputs(x), value_inputs(x)
    k = WithDerivatives(kernels.Matern52(1.3, ell))
    difference = x[:, None] - x
    s = np.sqrt(5) * np.abs(difference) / ell
    first = -1.3 * 5 / ell**2 * difference * (1 + s) / 3 * np.exp(-s)
    np.testing.assert_allclose(k(D, V), first, atol=1e-12)
    np.testing.assert_allclose(k(V, D), -first, atol=1e-12)
    np.testing.assert_allclose(
        k(D, D), 1.3 * 5 / (3 * ell**2) * (1 + s - s**2) * np.exp(-s), atol=1e-12
    )
    # Once differentiable in mean square: Var[f'] = 3 variance / lengthscale^2, and finite at equal
    # points.
    k, s = WithDerivatives(kernels.Matern32(1.3, ell)), np.sqrt(3) * np.abs(difference) / ell
    np.testing.assert_allclose(k(D, D), 1.3 * 3 / ell**2 * (1 - s) * np.exp(-s), atol=1e-6)


@pytest.mark.parametrize(
    "base",
    [
        kernels.Periodic(1.2, 0.8, 1.1) * kernels.Linear(0.7)
        + kernels.RationalQuadratic(0.5, 0.9, 2.0),
        kernels.Polynomial(0.3, 3, 0.5, active_dims=1)
        + 2.0 * kernels.Matern52(1.0, 0.6, active_dims=0),
    ],
)
def test_derivative_kernel_against_differences(base):
    # Cov of central differences of f, which are values of f: the base kernel alone.
    h, unit = 1e-3, np.array([[0.0, 1.0]])
    X, Y = PLANE[:3], PLANE[3:6]
    k, compiled = WithDerivatives(base), eqx.filter_jit(lambda k, X, Y: k(X, Y))
    base = partial(compiled, base)
    one = (base(X + h * unit, Y) - base(X - h * unit, Y)) / (2 * h)
    np.testing.assert_allclose(
        compiled(k, derivative_inputs(X, 1), value_inputs(Y)), one, rtol=1e-4, atol=1e-4
    )
    other = lambda Y: (base(X + h * unit, Y) - base(X - h * unit, Y)) / (2 * h)  # noqa: E731
    two = (other(Y + h * unit) - other(Y - h * unit)) / (2 * h)
    np.testing.assert_allclose(
        compiled(k, derivative_inputs(X, 1), derivative_inputs(Y, 1)), two, rtol=1e-4, atol=1e-4
    )
    both = np.concatenate([value_inputs(X), derivative_inputs(X)])
    np.testing.assert_allclose(
        eqx.filter_jit(k.diag)(both), np.diagonal(compiled(k, both, both)), atol=1e-10
    )


def test_training_moves_inputs_and_leaves_the_column():
    Z = jnp.concatenate([value_inputs(PLANE[:3]), derivative_inputs(PLANE[:2], 0)])
    k = WithDerivatives(kernels.Matern32(1.0, 0.5))
    gradient = jax.jit(jax.grad(lambda Z: jnp.sum(jnp.sin(k(Z, Z)) + k.diag(Z)[:, None])))(Z)
    assert (
        np.all(np.isfinite(gradient))
        and np.all(gradient[:, 2] == 0)
        and np.abs(gradient[:, :2]).max() > 0.1
    )
    # A column that is slightly off, as after a step of weight decay, means the same.
    K = jax.jit(lambda Z2: k(Z2, Z))
    np.testing.assert_array_equal(K(Z * jnp.array([1.0, 1.0, 0.9])), K(Z))


def test_mean_with_derivatives():
    X = np.concatenate([value_inputs(PLANE[:2]), derivative_inputs(PLANE[:2])])
    mean = MeanWithDerivatives(lambda X: jnp.sin(X[:, 0]) * X[:, 1])
    got = jax.jit(lambda mean: mean(X))(mean)
    x, y = PLANE[:2].T
    np.testing.assert_allclose(
        got, np.concatenate([np.sin(x) * y, np.cos(x) * y, np.sin(x)]), atol=1e-12
    )
    np.testing.assert_array_equal(MeanWithDerivatives(means.Constant(2.0))(X), [2, 2, 0, 0, 0, 0])


SLOPE = np.array([0.5, -2.0])


def observing_gradients(X, y=None):
    f = numpyro.sample(
        "f", GP(WithDerivatives(RBF2), X, MeanWithDerivatives(means.Linear(SLOPE)), jitter=0.0)
    )
    numpyro.sample("y", dist.Normal(f, jnp.where(X[:, -1] == 0, 0.1, 0.3)), obs=y)


def test_joint_covariances_of_features_that_are_not_functionals_are_those_of_what_they_explain():
    """k - Q need not be a covariance: rows share Q alone, and have the rest each by itself."""
    features, gp = LaplacianFeatures(5, -1.0, 1.0), prior(kernels.RBF(), LINE)
    A = np.asarray(features.root(gp).whiten(features.cross(gp, LINE)))
    nothing = Whitened(jnp.zeros(5), jnp.zeros((5, 5)), jnp.zeros(()))
    _, S = sparse_process(gp, features, nothing).joint(gp)
    Q = A.T @ A
    wanted = Q + np.diag(np.maximum(np.asarray(gp.variance) - np.diag(Q), 0.0))
    np.testing.assert_allclose(S, wanted, atol=1e-12)


@pytest.mark.slow
def test_regression_on_values_and_gradients_is_exact_conditioning():
    values, slopes = PLANE[:4], PLANE[4:7]
    X = jnp.concatenate([value_inputs(values), derivative_inputs(slopes)])
    y = RNG.normal(size=10)
    new = jnp.concatenate([value_inputs(PLANE[7:9]), derivative_inputs(PLANE[9:10], 1)])
    fit = pg.fit(observing_gradients, pg.Laplace(), jax.random.key(0), X, y=y)
    got = fit.posterior(new)

    def truth(A, B):
        return np.array(
            [[rbf_closed_form(a[:2], int(a[2]), b[:2], int(b[2])) for b in B] for a in A]
        )

    A, B, noise = np.asarray(X), np.asarray(new), np.diag([0.1**2] * 4 + [0.3**2] * 6)
    gain = np.linalg.solve(truth(A, A) + noise, truth(A, B)).T
    m_A, m_B = (
        np.concatenate([values @ SLOPE, np.repeat(SLOPE, 3)]),
        np.array([*(PLANE[7:9] @ SLOPE), SLOPE[1]]),
    )
    np.testing.assert_allclose(got.mean, m_B + gain @ (y - m_A), atol=1e-7)
    np.testing.assert_allclose(got.variance, np.diag(truth(B, B) - gain @ truth(A, B)), atol=1e-7)


SLOPED = np.concatenate([value_inputs(LINE[:3]), derivative_inputs(LINE[1:5])])
METHODS = {
    "laplace": (pg.Laplace(), 1e-6),
    "ep": (pg.EP(), 1e-6),
    "vi": (pg.VI(), 1e-6),
    "svgp": (pg.SVGP(inducing=SLOPED, train_inducing=False, max_steps=30), 1e-4),
    "collapsed": (pg.CollapsedSVGP(inducing=SLOPED, train_inducing=False), 1e-4),
    "minibatch": (
        pg.SVGP(inducing=SLOPED, train_inducing=False, batch_size=4, max_steps=1000),
        0.02,
    ),
    "nuts": (pg.NUTS(200, 400, 1), None),  # as its draws allow
}


def observing_slopes(X, y=None):
    f = numpyro.sample("f", GP(WithDerivatives(kernels.RBF(1.4, 0.9)), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(METHODS, "ep", "svgp", "nuts"))
def test_every_verb_takes_derivatives_and_agrees_with_dense_algebra(name, tmp_path):
    """What is checked before a prediction asks the kernel for no inputs that nobody gave."""
    method, tol = METHODS[name]
    y = np.concatenate([np.sin(LINE[:3]), np.cos(LINE[1:5])])
    new = np.concatenate([value_inputs(LINE[5:7]), derivative_inputs(LINE[5:7])])
    k = WithDerivatives(kernels.RBF(1.4, 0.9))
    gain = np.linalg.solve(k(SLOPED, SLOPED) + 0.01 * np.eye(7), k(SLOPED, new)).T
    mean, variance = gain @ y, np.diag(k(new, new) - gain @ k(SLOPED, new)) + 0.01
    fit = pg.fit(observing_slopes, method, 0, SLOPED, y=y, throw=False)
    fit.save(tmp_path / "q.fit")
    # five standard errors, of variance one
    share = 0.0 if tol is not None else 5.0 / np.sqrt(fit.independent_draws)
    allowed = tol or 0.0
    for known in (fit, pg.load(tmp_path / "q.fit", observing_slopes)):
        got = known.predict(new)
        assert np.all(np.abs(got.mean - mean) <= allowed + share * np.sqrt(variance))
        assert np.all(np.abs(got.variance - variance) <= allowed + share * np.sqrt(2.0) * variance)
        density, error = known.log_density(new, mean, with_error=True)
        exact = -0.5 * np.log(2 * np.pi * variance)
        assert np.all(
            np.abs(density - exact) <= max(allowed, 1e-3) + (5.0 * error if share else 0.0)
        )
    assert np.all(np.isfinite(fit.loo().elpd))


@pytest.mark.slow
def test_the_checklist_says_that_rows_of_derivatives_stand_alone():
    y = np.zeros(7)
    assert "NO" not in str(pg.check(observing_slopes, SLOPED, y=y))


def test_derivative_inducing_variables_are_those_of_the_joint_process():
    Z, Z2 = jnp.asarray(PLANE[:4]), jnp.asarray(PLANE[3:6])
    gp = prior(RBF2, PLANE, mean=means.Linear(np.array([2.0, -3.0]), 1.0))
    joint, kernel = (
        jnp.concatenate([value_inputs(Z), derivative_inputs(Z2, 1)]),
        WithDerivatives(RBF2),
    )
    both = Concatenated([Points(Z), Derivatives(Z2, 1)])
    K, C = jax.jit(lambda joint: (kernel(joint, joint), kernel(joint, value_inputs(PLANE))))(joint)
    got = computed(both, gp, PLANE)
    np.testing.assert_allclose(got["K_uu"], K, atol=1e-6)
    np.testing.assert_allclose(got["C"], C, atol=1e-12)
    np.testing.assert_allclose(covariance(Derivatives(Z2, 1), gp), K[4:, 4:], atol=1e-6)


def test_inducing_derivatives_can_be_trained():
    gp, Z = prior(kernels.Matern32(1.0, 0.6), LINE), jnp.array([0.5, 1.4, 2.6])

    def total(Z):
        return jnp.sum(jnp.cos(explained(Derivatives(Z), gp, LINE)))

    shift = 1e-5 * jnp.array([1.0, -2.0, 0.5])
    slope = jax.jit(jax.grad(total))(Z) @ shift
    np.testing.assert_allclose(slope, (total(Z + shift) - total(Z - shift)) / 2, rtol=1e-5)


def test_concatenated_features_and_points_explain_more_than_either():
    features, points = FourierFeatures(3, 0.0, 3.0), Points(jnp.asarray(LINE[::4]))
    gp = prior(kernels.Matern52(1.3, 0.7), LINE)
    both = Concatenated([points, features])
    K, Q = (computed(both, gp, LINE)[key] for key in ("K_uu", "Q"))
    np.testing.assert_allclose(K[:3, 3:], cross(features, gp, LINE[::4]).T, atol=1e-7)
    np.testing.assert_allclose(K[3:, 3:], covariance(features, gp), rtol=1e-6, atol=1e-6)
    for part in (features, points):
        less = explained(part, gp, LINE)
        assert smallest_eigenvalue(Q - less) > -1e-7 and np.trace(Q) > np.trace(less) + 0.05


def test_absolute_jitter_is_on_values_alone():
    gp = prior(RBF2, PLANE, jitter=0.5)
    K = covariance(
        Concatenated([Points(jnp.asarray(PLANE[:2])), Derivatives(jnp.asarray(PLANE[:2]), 0)]), gp
    )
    np.testing.assert_allclose(np.diag(K), [2.2, 2.2, 1.7 / 0.36, 1.7 / 0.36], rtol=1e-6)


ODD = prior(kernels.RationalQuadratic(), PLANE)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: FourierFeatures(3, 1.0, 1.0), DataError, "low=1.0"),
        (lambda: FourierFeatures(0, 0.0, 1.0), DataError, "positive integer"),
        (lambda: FourierFeatures(3, (0.0, 0.0), 1.0), DataError, "Additive"),
        (
            lambda: jax.jit(lambda x: FourierFeatures(3, x, 1.0).num)(0.0),
            DataError,
            "outside of jit",
        ),
        (lambda: FourierFeatures(3, 0, 1).root(ODD), ModelError, "RationalQuadratic.*Points"),
        (
            lambda: FourierFeatures(3, 0, 1).cross(prior(kernels.Matern12(), PLANE), PLANE),
            ModelError,
            "active_dims",
        ),
        (
            lambda: FourierFeatures(3, 0, 1).root(
                prior(kernels.Matern12() + kernels.Matern12(), LINE)
            ),
            ModelError,
            "Additive",
        ),
        (
            lambda: MercerFeatures(3).root(prior(kernels.RBF() * kernels.RBF(), LINE)),
            ModelError,
            "Kronecker",
        ),
        (lambda: MercerFeatures(3, 0.0, -1.0), DataError, "scale=-1.0"),
        (
            lambda: MercerFeatures((3, 2)).cross(prior(kernels.RBF(), LINE), LINE),
            DataError,
            "2 input column",
        ),
        (
            lambda: MercerFeatures(3, (0.0, 1.0)).cross(prior(kernels.RBF(), LINE), LINE),
            DataError,
            "2 numbers",
        ),
        (lambda: LaplacianFeatures(3, 0.0, 1.0).cross(ODD, PLANE), ModelError, "RationalQuadratic"),
        (
            lambda: Additive([MercerFeatures(3)] * 3).root(prior(kernels.RBF() + 1.0, LINE)),
            ModelError,
            r"3 part\(s\)",
        ),
        (lambda: Kronecker([]), DataError, "no parts"),
        (
            lambda: Concatenated([MercerFeatures(3), FourierFeatures(3, 0, 1)]),
            DataError,
            "at most one",
        ),
        (lambda: Concatenated([LaplacianFeatures(3, 0, 1)]), DataError, "is_exact"),
        (lambda: Derivatives(jnp.ones((2, 2)), 2), DataError, "dim=2"),
        (lambda: Derivatives(jnp.ones((0, 2))), DataError, "M >= 1"),
        (
            lambda: Derivatives(jnp.ones(2)).root(prior(2.0 * kernels.Matern12(), LINE)),
            ModelError,
            "Matern12",
        ),
        (
            lambda: Derivatives(jnp.ones(2)).root(prior(WithDerivatives(kernels.RBF()), PLANE)),
            ModelError,
            "Points",
        ),
        (lambda: WithDerivatives(kernels.RBF() + kernels.White()), ModelError, "White"),
        (lambda: WithDerivatives(kernels.RBF())(LINE, LINE), DataError, "value_inputs"),
        (lambda: WithDerivatives(kernels.RBF()).diag(np.array([[0.0, 2.0]])), DataError, "2.0"),
        (lambda: derivative_inputs(PLANE, 2), DataError, "dim=2"),
        (lambda: MeanWithDerivatives(2.0), DataError, "Constant"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_traced_column_that_is_no_column_gives_nan():
    k = jax.jit(WithDerivatives(kernels.RBF()))
    K = k(jnp.array([[0.0, 0.0], [0.0, 2.0], [0.0, jnp.nan]]), value_inputs(LINE))
    np.testing.assert_array_equal(np.isnan(K).all(1), [False, True, True])
    assert lax.stop_gradient(K[0]).shape == LINE.shape
