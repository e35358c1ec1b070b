"""Evidences and gradients of data with next to no noise, by dense algebra: what the log partition
and the sites have in common is f^2 over the noise's variance, and is never computed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.optimize import minimize

import ppl_gp as pg
from ppl_gp.deep.bound import terms
from ppl_gp.deep.structure import Structure
from ppl_gp.local.method import log_evidence
from ppl_gp.reading.factors import read
from ppl_gp.sparse.bound import Batch, Variational, collapsed
from ppl_gp.sparse.expectation import Expectation
from ppl_gp.sparse.families import FullGaussian
from ppl_gp.sparse.inducing import Points

rng = np.random.default_rng(0)
X = np.sort(rng.uniform(0.0, 30.0, 40))
JITTER = 1e-8
# y, and the length scale of the kernel
DATA = {"smooth": (np.sin(X), 1.0), "rough": (30.0 * np.sin(X) + 5.0 * rng.normal(size=40), 0.3)}


def model(X, y=None, log_noise=0.0, lengthscale=1.0):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(log_noise)), obs=y)


def dense(y, lengthscale, noise):
    """(log N(y; 0, K + noise^2 I), its slope in log noise, nats)."""
    K = np.exp(-0.5 * (X[:, None] - X) ** 2 / lengthscale**2) + JITTER * np.eye(40)
    C = np.linalg.inv(K + noise**2 * np.eye(40))
    a = C @ y
    value = -0.5 * (y @ a - np.linalg.slogdet(C / (2.0 * np.pi))[1])
    return value, noise**2 * (a @ a - np.trace(C))


@pytest.fixture(scope="module")
def solved():
    """(method, data, noise) -> (evidence, slope in log noise, Solution), compiled once a method."""

    def value(method, y, lengthscale, log_noise):
        factors = read(model, jnp.asarray(X), y=y, log_noise=log_noise, lengthscale=lengthscale)
        return log_evidence(method, factors)

    compiled = {
        m: jax.jit(jax.value_and_grad(lambda *a, m=m: value(m(), *a), 2, has_aux=True))
        for m in (pg.Laplace, pg.EP, pg.VI)
    }

    def at(method, name, noise):
        y, lengthscale = DATA[name]
        (value, solution), slope = compiled[method](
            jnp.asarray(y), jnp.asarray(lengthscale), jnp.log(noise)
        )
        return float(value), float(slope), solution

    return at


def is_an_answer(solution):
    """It converged, and no error of quadrature was told."""
    error = solution.quadrature_error
    return solution.code == pg.Result.converged.code and (error is None or error < 1e-6)


@pytest.mark.one_case
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("method", [pg.Laplace, pg.EP, pg.VI])
def test_what_converged_is_the_dense_formula(method, name, solved):
    """Down to a billionth of f; evidences were off by 16 nats at 1e-6 and by 1e8 at 1e-9,
    `converged`.
    """
    least = 1.0
    for noise in (1e-1, 1e-3, 1e-5, 1e-6, 1e-7, 1e-9, 1e-12, 1e-15, 1e-25):
        value, slope, solution = solved(method, name, noise)
        exact, wanted = dense(*DATA[name], noise)
        if is_an_answer(solution):
            assert abs(value - exact) < 1e-8 * abs(exact) + 1e-5
            assert abs(slope - wanted) < 1e-8 * abs(wanted) + 1e-4
            least = noise
    assert least <= {pg.Laplace: 1e-7, pg.VI: 1e-6, pg.EP: 1e-3}[method]


@pytest.mark.one_case
@pytest.mark.parametrize("method", [pg.Laplace, pg.EP, pg.VI])
def test_a_noise_without_digits_is_no_result(method, solved):
    for name in DATA:
        for noise in (1e-15, 1e-25):
            assert not is_an_answer(solved(method, name, noise)[2])


def noisy(X, y=None):
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def test_a_noise_that_wants_to_vanish_is_followed_to_where_it_does_not_matter():
    """The maximum over the noise is at zero: the evidence found is that of no noise."""
    fit = pg.fit(noisy, pg.Laplace(), 0, X, y=np.sin(X) / 3.0)
    value, _ = dense(np.sin(X) / 3.0, 0.3, 1e-12)
    prior = float(dist.HalfNormal(1.0).log_prob(fit.hyper["noise"]))
    assert fit.result == "converged" and abs(fit.log_evidence - value) < 1e-2
    assert np.isfinite(prior) and fit.hyper["noise"] < 1e-2


# --- the default jitter follows the kernel's variance, and so does its derivative
# -----------------------------------------------------------------------------

LINE = np.linspace(0.0, 5.0, 30)
WAVE = np.sin(LINE) + 0.3 * np.cos(2.3 * LINE)


def smooth(X, noise, y=None):
    """A smooth f of large variance, with the default jitter."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def many_trials(X, noise, y=None):
    """Counts that know f as precisely as that noise does: the local bound's kind of data."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Binomial(4.0 / noise**2, logits=f), obs=y)


def local(method, model):
    def value(hyper, noise, y):
        return log_evidence(method, read(model, LINE, noise, hyper=hyper, y=y))[0]

    return value


def sparse(hyper, noise, y):
    """The bound of `SVGP` at a q(u) that does not move."""
    inducing = Points(jnp.asarray(LINE[::2] + 0.05))
    q = FullGaussian(jnp.linspace(-1.0, 1.0, inducing.num), 0.1 * jnp.eye(inducing.num))
    at, of = Variational({"f": inducing}, {"f": q}), Structure(("f",), (), (), (), ("f",))
    args = (Expectation(16), pg.Layers(), of, hyper, at, _batch(noise, y))
    return terms(smooth, *args).bound


def collapsed_bound(hyper, noise, y):
    variables = {"f": Points(jnp.asarray(LINE[::2] + 0.05))}
    return collapsed(smooth, hyper, variables, _batch(noise, y)).bound


def _batch(noise, y):
    return Batch((jnp.asarray(LINE), noise), {"y": y}, jnp.ones(len(LINE)), jax.random.key(0))


VALUES = {
    "laplace": local(pg.Laplace(), smooth),
    "collapsed": collapsed_bound,
    "ep": local(pg.EP(), smooth),
    "vi": local(pg.VI(), smooth),
    "bound": local(pg.LocalBound(), many_trials),
    "sparse": sparse,
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", VALUES)
def test_the_slope_in_the_variance_is_that_of_the_value(name):
    """With the derivative of the jitter stopped it is off by N jitter / (2 (noise^2 + jitter))."""

    def value(log_variance, noise):
        y = WAVE if name != "bound" else jnp.round(4.0 / noise**2 / (1.0 + jnp.exp(-WAVE)))
        hyper = {"variance": jnp.exp(log_variance), "lengthscale": jnp.asarray(1.0)}
        return VALUES[name](hyper, noise, y)

    both = jax.jit(jax.value_and_grad(value))
    for noise in (1e-1, 1e-2, 1e-3):
        at = lambda h: both(jnp.log(50.0) + h, jnp.asarray(noise))  # noqa: B023, E731
        moved = [float(at(h)[0]) for h in (2e-3, 1e-3, -1e-3, -2e-3)]
        wanted = (8.0 * (moved[1] - moved[2]) - (moved[0] - moved[3])) / 12e-3
        assert abs(float(at(0.0)[1]) - wanted) < 1e-3 * (1.0 + abs(wanted)), noise


def test_a_search_ends_at_the_optimum_of_a_dense_one():
    """With the derivative of the jitter stopped the search ended elsewhere."""
    for noise in (1e-2, 1e-3):
        fit = pg.fit(smooth, pg.Laplace(), 0, LINE, noise, y=WAVE)
        best = minimize(
            _negative_log_posterior, np.zeros(2), (noise,), "Nelder-Mead", options=EXACT
        )
        assert fit.result == "converged"
        assert abs(fit.stats["log_posterior"] + best.fun) < 1e-6


EXACT = {"xatol": 1e-7, "fatol": 1e-9, "maxiter": 4000}


def _negative_log_posterior(log_hyper, noise):
    variance, lengthscale = np.exp(log_hyper)
    K = variance * np.exp(-0.5 * (LINE[:, None] - LINE) ** 2 / lengthscale**2)
    L = np.linalg.cholesky(K + (JITTER * variance + noise**2) * np.eye(30))
    white = np.linalg.solve(L, WAVE)
    log_p = -0.5 * white @ white - np.sum(np.log(np.diag(L))) - 15.0 * np.log(2.0 * np.pi)
    prior = 0.5 * log_hyper @ log_hyper + np.log(2.0 * np.pi) + np.sum(log_hyper)
    return prior - log_p
