"""Gradients of the log evidence against finite differences of the re-converged evidence, in kernel
and likelihood parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from toy_models import ROWS, evidence, hyper, padded, solve, switched

import ppl_gp as pg
from ppl_gp import kernels
from ppl_gp.errors import Result

METHODS = {"laplace": pg.Laplace(), "ep": pg.EP(), "vi": pg.VI()}
STEP = 1e-4


def _finite_difference(value, at: dict, name: str):
    """Fourth-order central difference of value(hyper) in one hyperparameter."""

    def moved(steps):
        return float(value({**at, name: at[name] + steps * STEP}))

    return (8 * (moved(1) - moved(-1)) - (moved(2) - moved(-2))) / (12 * STEP)


def _observations(name, n=20):
    rng = np.random.default_rng(8)
    X = rng.normal(size=(n, 2))
    f = 1.5 * np.sin(X[:, 0]) + X[:, 1]
    y = {
        "logit": (rng.uniform(size=n) < 1 / (1 + np.exp(-2 * f))).astype(float),
        "poisson": rng.poisson(np.exp(f)).astype(float),
        "student_t": f + 0.4 * rng.standard_t(2, size=n),
        "gaussian": f + 0.4 * rng.normal(size=n),
    }[name]
    return X, y


@pytest.mark.slow
@pytest.mark.parametrize(
    "likelihood, scale", [("logit", 2.5), ("poisson", 1.0), ("student_t", 1.0), ("gaussian", 1.0)]
)
@pytest.mark.parametrize("method", METHODS)
def test_gradient_is_the_finite_difference(method, likelihood, scale):
    X, y = _observations(likelihood)
    args = padded(X, y, likelihood, scale)
    at = hyper(variance=1.3, lengthscale=0.9, s=0.45, slope=0.2)
    solved = solve(switched, METHODS[method], at, *args)
    assert Result.from_code(solved.solution.code) == "converged"
    for name in at:
        wanted = _finite_difference(
            lambda h: solve(switched, METHODS[method], h, *args).log_z, at, name
        )
        np.testing.assert_allclose(solved.gradient[name], wanted, rtol=1e-6, atol=2e-6)
    used = {"variance", "lengthscale", "slope"} | (
        {"s"} if likelihood in ("student_t", "gaussian") else set()
    )
    assert all(abs(float(solved.gradient[name])) > 1e-3 for name in used)


@pytest.mark.slow
def test_student_t_has_sites_of_negative_precision():
    X, y = _observations("student_t")
    y = y.copy()
    y[4] += 6.0
    args = padded(X, y, "student_t")
    for method in METHODS.values():
        at = hyper(variance=1.3, lengthscale=0.9, s=0.45)
        solved = solve(switched, method, at, *args)
        assert float(solved.solution.sites.nat2[4]) < 0
        wanted = _finite_difference(
            lambda h, method=method: solve(switched, method, h, *args).log_z, at, "s"
        )
        np.testing.assert_allclose(solved.gradient["s"], wanted, rtol=1e-6, atol=2e-6)


def affine_logit(X, y=None, weight=1.0):
    """Logits a f + b: parameters inside the likelihood that the local bound reads off."""
    at = {k: numpyro.sample(k, dist.LogNormal()) for k in ("variance", "lengthscale", "a")}
    b = numpyro.sample("b", dist.Normal())
    f = numpyro.sample(
        "f", pg.GP(kernels.RBF(at["variance"], at["lengthscale"]), X, lambda X: 0.3 * X[:, 1])
    )
    with numpyro.plate("data", X.shape[0]), numpyro.handlers.scale(scale=weight):
        numpyro.sample("y", dist.Binomial(total_count=3, logits=at["a"] * f + b), obs=y)


def test_local_bound_gradient_in_every_parameter():
    X, y = _observations("poisson")
    at = {"variance": 1.3, "lengthscale": 0.9, "a": 0.7, "b": -0.4}
    at = {k: jnp.asarray(v) for k, v in at.items()}
    kwargs = {"y": jnp.minimum(jnp.asarray(y), 3), "weight": jnp.asarray(1.7)}
    solved = solve(affine_logit, pg.LocalBound(), at, jnp.asarray(X), **kwargs)
    for name in at:
        wanted = _finite_difference(
            lambda h: solve(affine_logit, pg.LocalBound(), h, jnp.asarray(X), **kwargs).log_z,
            at,
            name,
        )
        np.testing.assert_allclose(solved.gradient[name], wanted, rtol=1e-6, atol=2e-6)
        assert abs(wanted) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_second_derivative_raises_instead_of_being_wrong(method):
    X, y = _observations("logit")
    args = padded(X, y, "logit")

    def gradient(variance):
        at = {**hyper(), "variance": variance}
        return jax.grad(lambda h: evidence.__wrapped__(switched, method, h, *args)[0])(at)[
            "variance"
        ]

    for derivative in (jax.grad, jax.jacfwd):
        with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError)):
            jax.eval_shape(derivative(gradient), jnp.asarray(1.0))


@pytest.mark.slow
def test_gradient_in_the_inputs():
    X, y = _observations("logit")
    inputs, data = padded(X, y, "logit")

    @jax.jit
    def value(inputs):
        return evidence.__wrapped__(switched, pg.Laplace(), hyper(), inputs, data)[0]

    gradient = jax.grad(value)(inputs)
    move = jnp.zeros((ROWS, 2)).at[2, 0].set(STEP)
    difference = (
        8 * (value(inputs + move) - value(inputs - move))
        - (value(inputs + 2 * move) - value(inputs - 2 * move))
    ) / 12
    np.testing.assert_allclose(gradient[2, 0], difference / STEP, rtol=1e-6, atol=2e-6)


def _three(X, a, y=None):
    """A kernel parameter, a likelihood parameter and an argument."""
    length, s = (numpyro.sample(k, dist.LogNormal(0.0, 1.0)) for k in ("length", "s"))
    f = numpyro.sample("f", pg.GP(kernels.RBF(1.0, length), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + a, s), obs=y)


def _three_logits(X, a, y=None):
    """As `_three`, of zeros and ones."""
    length, s = (numpyro.sample(k, dist.LogNormal(0.0, 1.0)) for k in ("length", "s"))
    f = numpyro.sample("f", pg.GP(kernels.RBF(1.0, length), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.BernoulliLogits(s * f + a), obs=y)


KINDS = {
    "Python": float,
    "NumPy": np.float64,
    "weak": jax.jit(lambda x: x),
    "strong": lambda x: jnp.asarray(x, jnp.float64),
}


@pytest.mark.one_case
@pytest.mark.parametrize(
    "method", [pg.Laplace(), pg.EP(), pg.VI(), pg.LocalBound()], ids=lambda m: type(m).__name__
)
def test_the_gradient_does_not_depend_on_the_kind_of_number(method):
    """Of a kernel parameter, a likelihood parameter and an argument, each against differences."""
    X = np.linspace(0.0, 5.0, 8)
    is_bound = isinstance(method, pg.LocalBound)
    model = _three_logits if is_bound else _three
    y = (np.sin(2.0 * X) > 0.0).astype(float) if is_bound else np.sin(2.0 * X)

    def value(h):
        read = pg.read(model, X, h["a"], y=y, hyper={k: h[k] for k in ("length", "s")})
        return pg.log_evidence(method, read)[0]

    at, compiled = {"length": 0.8, "s": 0.3, "a": 0.2}, jax.jit(value)
    wanted = {k: _finite_difference(compiled, at, k) for k in at}
    assert all(abs(x) > 1e-2 for x in wanted.values())
    assert [getattr(make(1.0), "weak_type", None) for make in KINDS.values()][2:] == [True, False]
    for kind, make in KINDS.items():
        for moved in ({*at}, {"s"}):  # the others are then constants
            rest = {k: make(x) for k, x in at.items() if k not in moved}
            found = jax.grad(lambda h, rest=rest: value({**h, **rest}))(
                {k: make(at[k]) for k in moved}
            )
            for k in moved:
                np.testing.assert_allclose(
                    found[k], wanted[k], rtol=1e-6, atol=2e-6, err_msg=f"{kind} {k}"
                )
