"""`Grid()`: a few weighted points in place of the posterior of the hyperparameters, against
quadrature over them.
"""

import warnings

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import digamma, gammaln, polygamma
from scipy.stats import multivariate_normal

import ppl_gp as pg
from ppl_gp.draws import Moments, mixture
from ppl_gp.infer.hyper import grid
from ppl_gp.infer.hyper.grid import (
    ASKED_AT,
    MOST,
    REGULAR,
    compared,
    composite,
    effective,
    grow,
    half_widths,
    stretched,
)

N = 20
RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(-3.0, 3.0, N))
Y = np.sin(X) + 0.3 * RNG.normal(size=N)
NEW = np.array([-1.0, 0.5, 4.0])


def asked(log_p, d):
    """How far a log density with mode 0 and curvature 1 falls, and slopes by differences."""

    def slopes(z):
        steps = 1e-5 * np.eye(d)
        return np.stack([(log_p(z - h) - log_p(z + h)) / 2e-5 for h in steps], 1)

    return lambda z: (-log_p(z), slopes(z))


def grown(log_p, values, d):
    return grow(asked(log_p, d), values, d)


def gaussian(z):
    return -0.5 * np.sum(z**2, 1)


@pytest.mark.parametrize("d", range(1, MOST + 1))
def test_a_design_integrates_a_gaussian_and_its_moments(d):
    if d <= REGULAR:
        found = grown(gaussian, lambda z: z, d)
        z, log_w = found.points, found.log_design
    else:
        z, log_w = composite(d)
    w = np.exp(log_w + gaussian(z))
    loose = {1: 1e-3, 2: 5e-3, 3: 1e-2}.get(d, 1e-12)  # a grid ends somewhere
    np.testing.assert_allclose(w.sum(), 1.0, atol=loose)
    np.testing.assert_allclose(w @ z, 0.0, atol=1e-12)
    np.testing.assert_allclose((z.T * w) @ z, np.eye(d), atol=5 * loose)
    assert len(np.unique(z.round(9), axis=0)) == len(z) <= (93 if d == REGULAR else 49)


def test_a_composite_design_follows_a_skewed_density():
    """Of the logarithm of a gamma variable beside two Gaussians: mean and standard deviation come
    nearer, and the mass by half of its error and more.
    """
    shape = 1.5
    mean = np.sqrt(shape) * (digamma(shape) - np.log(shape))
    sd = np.sqrt(shape * polygamma(1, shape))
    log_mass = shape - (shape - 0.5) * np.log(shape) + gammaln(shape) - 0.5 * np.log(2 * np.pi)

    def log_p(z):  # mode 0, curvature 1 at it
        t = z[:, 0] / np.sqrt(shape)
        return shape * (t - np.exp(t) + 1.0) - 0.5 * np.sum(z[:, 1:] ** 2, 1)

    points, log_weights = composite(3)
    widths = half_widths(-log_p(ASKED_AT * np.concatenate([np.eye(3), -np.eye(3)])))
    np.testing.assert_allclose(widths[[1, 2, 4, 5]], 1.0, rtol=1e-12)
    assert widths[0] < 1.0 < widths[3]
    errors = []
    for z, w in ((points, log_weights), stretched(points, log_weights, widths)):
        weights = np.exp(log_p(z) + w)
        mass = weights.sum()
        found = weights @ z[:, 0] / mass
        spread = np.sqrt(weights @ (z[:, 0] - found) ** 2 / mass)
        errors.append(np.abs([(found - mean) / sd, np.log(spread / sd), np.log(mass) - log_mass]))
    before, after = errors
    assert after[0] < 0.13 and np.all(after < before) and after[2] < 0.5 * before[2]


def inverse_gamma(shape):
    """(log density, values) of its logarithm: a tail of `shape` nats per unit."""
    sd = 1.0 / np.sqrt(shape)
    return lambda z: shape * (1.0 - z * sd - np.exp(-z * sd)), lambda z: np.exp(z * sd)


def gamma(shape):
    log_p, values = inverse_gamma(shape)
    return lambda z: log_p(-z), lambda z: 1.0 / values(-z)


def exact(log_p, value):
    """Mean and sd by sums over a fine grid."""
    z = np.linspace(-60.0, 60.0, 200_001)
    p = np.exp(log_p(z))
    p /= p.sum()
    mean = p @ value(z)
    return mean, np.sqrt(p @ (value(z) - mean) ** 2)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "parts",
    [(inverse_gamma(3.0),), (gamma(1.5),), (inverse_gamma(4.0), gamma(2.0))]
    + [(inverse_gamma(3.0), gamma(1.0), gamma(2.0)), (inverse_gamma(4.0), *2 * (gamma(4.0),))],
)
def test_a_lattice_reaches_where_skewed_and_heavy_densities_end(parts, turned):
    """Along axes of the lattice, and turned away from them."""
    d = len(parts)
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(d, d)))[0] if turned else np.eye(d)

    def each(k, z):
        return np.stack([part[k](x) for part, x in zip(parts, (z @ turn).T, strict=True)], 1)

    found = grown(lambda z: each(0, z).sum(1), lambda z: each(1, z), d)
    p = np.exp(each(0, found.points).sum(1))
    p, values = p / p.sum(), each(1, found.points)
    mean, sd = np.transpose([exact(*part) for part in parts])
    off = np.sqrt(p @ (values - p @ values) ** 2) / sd
    np.testing.assert_allclose(p @ values, mean, atol=0.03 * np.max(sd))
    np.testing.assert_allclose(off, 1.0, atol=0.05)
    assert found.mass < 0.02 and found.spread < 0.15


def test_a_tail_along_a_curve_is_followed():
    """A ridge that bends: sd of the second coordinate 1.79, of which straight axes see 1."""

    def log_p(z):
        return -0.5 * z[:, 0] ** 2 - 0.5 * (z[:, 1] - 1.05 * (z[:, 0] ** 2)) ** 2

    found = grown(log_p, lambda z: z, 2)
    p = np.exp(log_p(found.points))
    p, z = p / p.sum(), found.points
    np.testing.assert_allclose(p @ z[:, 1], 1.05, rtol=0.03)
    sd = np.sqrt(1.0 + 2.0 * 1.05**2)
    np.testing.assert_allclose(np.sqrt(p @ (z[:, 1] - p @ z[:, 1]) ** 2), sd, rtol=0.04)


@pytest.mark.parametrize("d", [4, 6])
@pytest.mark.parametrize("turned", [False, True])
def test_what_a_composite_design_leaves_out_of_a_variance(d, turned):
    """Of an inverse gamma variable, along an axis or turned away from the axes; of Gaussians next
    to nothing.
    """
    log_t, value = inverse_gamma(3.0)
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(d, d)))[0] if turned else np.eye(d)

    def found_of(log_p):
        ask = asked(lambda z: log_p(z @ turn), d)
        fall = ask(ASKED_AT * np.concatenate([np.eye(d), -np.eye(d)]))[0]
        points, log_w = stretched(*composite(d), half_widths(fall))
        w = np.exp(log_w + log_p(points @ turn))
        w, x = w / w.sum(), value((points @ turn)[:, 0])
        # coordinates whose rows are the variables' own: theta = turn^T z
        found = compared(ask, lambda z: values_of(z @ turn), points, log_w, turn.T)
        return found, np.sqrt(w @ (x - w @ x) ** 2)

    def values_of(t):
        return np.column_stack([value(t[:, 0]), np.exp(0.3 * t[:, 1:])])

    found, sd = found_of(lambda t: log_t(t[:, 0]) + gaussian(t[:, 1:]))
    missing = 1.0 - (sd / exact(log_t, value)[1]) ** 2
    assert found.worst == 0 and abs(found.spread - missing) < 0.05 and missing > 0.25
    assert found_of(gaussian)[0].spread < 0.15


def test_a_constant_entry_has_no_variance_to_leave_out():
    """Such as the first row of a Cholesky factor: the shares are those without it."""
    values, ask = (lambda z: np.exp(0.5 * z)), asked(gaussian, 4)
    with_one = lambda z: np.column_stack([np.zeros(len(z)), values(z)])  # noqa: E731
    plain, more = (compared(ask, v, *composite(4), np.eye(4)) for v in (values, with_one))
    assert 0.02 < plain.spread == more.spread and more.worst == plain.worst + 1


@pytest.mark.slow
def test_a_correlation_s_constant_entries_are_not_judged():
    """Ones up to rounding: the shares are those of the same model in the same coordinate, the
    inverse hyperbolic tangent of the correlation.
    """
    sites = {
        "tanh": (dist.Logistic(0.0, 0.5), lambda x: jnp.eye(2) + jnp.tanh(x) * jnp.eye(2)[::-1]),
        "Cholesky": (dist.LKJCholesky(2, 1.0), lambda L: L @ L.T),
        "matrix": (dist.LKJ(2, 1.0), lambda R: R),
    }
    which, found = np.arange(N) % 2, {}
    for name, (prior, correlation) in sites.items():

        def model(X, which, y=None, prior=prior, correlation=correlation):
            R = correlation(numpyro.sample("R", prior))
            sd = numpyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
            length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
            B = sd[:, None] * R * sd

            def kernel(a, b):
                i, j = a[:, 1].astype(int), b[:, 1].astype(int)
                return B[i][:, j] * pg.kernels.RBF(1.0, length)(a[:, :1], b[:, :1])

            f = numpyro.sample("f", pg.GP(kernel, jnp.column_stack([X, which])))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

        y = Y * (1.0 - 1.7 * which)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit = pg.fit(model, pg.Laplace(hyper=pg.Grid()), 0, X, which, y=y)
        assert not [x for x in told if "the tail of 'R'" in str(x.message)]
        found[name] = fit.stats["grid_missing_variance"]
    assert 0.05 < found["tanh"] < 0.5
    np.testing.assert_allclose([*found.values()], found["tanh"], rtol=1e-6)


HEAVY = {
    "InverseGamma": (dist.InverseGamma(3.0, 3.0), lambda t: -3.0 * t - 3.0 * np.exp(-t)),
    "HalfCauchy": (dist.HalfCauchy(3.0), lambda t: t - np.log1p(np.exp(2.0 * t) / 9.0)),
}


@pytest.mark.parametrize("prior", HEAVY)
def test_a_heavy_tail_of_a_length_scale_is_reached_or_reported(prior, recwarn):
    """Against quadrature of a smooth curve that hardly bounds its length scale from above."""

    def model(X, y=None):
        length = numpyro.sample("length", HEAVY[prior][0])
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, length), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    y = 0.5 + 0.1 * X + 0.3 * np.random.default_rng(3).normal(size=N)
    fit = pg.fit(model, pg.Laplace(hyper=pg.Grid()), 0, X, y=y)
    t = np.linspace(-2.0, 12.0, 700)
    covariances = Quadrature.kernel(X, X, 1.0, np.exp(t)[:, None, None]) + 0.09 * np.eye(N)
    log_p = -0.5 * np.linalg.slogdet(covariances)[1] + HEAVY[prior][1](t)
    log_p -= 0.5 * np.einsum("n,tn->t", y, np.linalg.solve(covariances, y[:, None])[..., 0])
    w, found = np.exp(log_p - log_p.max()), np.exp(fit.draws.log_weights)
    w /= w.sum()

    def moments(weights, x):
        mean = weights @ x
        return mean, np.sqrt(weights @ (x - mean) ** 2)

    assert fit.stats["grid_missing_mass"] < 0.01
    np.testing.assert_allclose(
        moments(found, np.log(fit.hyper["length"])), moments(w, t), rtol=0.02, atol=0.01
    )
    told = [str(x.message) for x in recwarn if "the tail of 'length'" in str(x.message)]
    if prior == "InverseGamma":
        mean, sd = moments(found, fit.hyper["length"])
        np.testing.assert_allclose((mean, sd), moments(w, np.exp(t)), rtol=0.03)
        assert not told
    else:
        assert len(told) == 1 and "hyper=Sample()" in told[0]


@pytest.mark.slow
def test_three_hyperparameters_with_a_heavy_tail_are_as_by_quadrature():
    """A length scale that the data hardly bound, by sums over 38 x 34 x 24 values of logarithms."""
    priors = dist.InverseGamma(3.0, 3.0), dist.HalfNormal(1.0), dist.LogNormal(-1.0, 1.0)

    def model(X, y=None):
        length, s, noise = map(numpyro.sample, ("length", "s", "noise"), priors)
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(s**2, length), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    y = 0.5 + 0.1 * X + 0.3 * np.random.default_rng(3).normal(size=N)
    fit = pg.fit(model, pg.Laplace(hyper=pg.Grid()), 0, X, y=y)
    ends = (-3.5, 5.8, 38), (-5.5, 4.4, 34), (-2.6, 0.7, 24)
    logs = np.stack(np.meshgrid(*(np.linspace(*e) for e in ends)), -1).reshape(-1, 3)
    values = np.exp(logs)
    length, s2, n2 = values[:, 0], values[:, 1] ** 2, values[:, 2] ** 2
    log_p = logs.sum(1)
    log_p += np.sum([p.log_prob(x) for p, x in zip(priors, values.T, strict=True)], 0)
    moments = []
    for i, (v, scale, noise2) in enumerate(zip(s2, length, n2, strict=True)):
        k = Quadrature.kernel(NEW, X, v, scale)
        S = Quadrature.kernel(X, X, v, scale) + (noise2 + 1e-8 * v) * np.eye(N)
        solved = np.linalg.solve(S, np.column_stack([y, k.T]))
        log_p[i] -= 0.5 * np.linalg.slogdet(S)[1] + 0.5 * y @ solved[:, 0]
        moments.append((k @ solved[:, 0], v - np.sum(k.T * solved[:, 1:], 0)))
    w, found = np.exp(log_p - log_p.max()), np.exp(fit.draws.log_weights)
    w /= w.sum()
    for name, exact in zip(("length", "s", "noise"), values.T, strict=True):
        mean, at = w @ exact, np.asarray(fit.hyper[name])
        sd = np.sqrt(w @ (exact - mean) ** 2)
        assert abs(found @ at - mean) < 0.02 * sd, name
        np.testing.assert_allclose(np.sqrt(found @ (at - found @ at) ** 2), sd, rtol=0.06)
    means, variances = (np.array(x) for x in zip(*moments, strict=True))
    mean, got = w @ means, fit.predict(NEW)
    sd = np.sqrt(w @ (variances + (means - mean) ** 2))
    np.testing.assert_allclose((got.f_mean - mean) / sd, 0.0, atol=0.02)
    np.testing.assert_allclose(np.sqrt(got.f_variance), sd, rtol=0.02)


def test_too_many_hyperparameters_are_refused_before_the_search(monkeypatch):
    def model(X, y=None):
        scale = numpyro.sample("scale", dist.Dirichlet(jnp.ones(MOST + 2)))  # MOST + 1 are free
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(jnp.sum(scale**2), 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    monkeypatch.setattr(grid, "maximise", None)
    with pytest.raises(pg.ModelError, match=f"Grid.. of {MOST + 1} hyper.*up to {MOST}"):
        pg.fit(model, pg.Laplace(hyper=pg.Grid()), 0, jnp.arange(4.0), y=jnp.arange(4))


def regression(X, y=None):
    v = numpyro.sample("v", dist.LogNormal(0.0, 0.7))
    length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(v, length), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


class Quadrature:
    """Sums over 81 x 81 values of (log v, log length)."""

    def __init__(self):
        ticks = np.linspace(-4.5, 4.5, 81)
        self.log_v, self.log_l = (x.ravel() for x in np.meshgrid(0.7 * ticks, 0.5 * ticks))
        log_p, moments = [], []
        for v, length in zip(np.exp(self.log_v), np.exp(self.log_l), strict=True):
            S = self.kernel(X, X, v, length) + (0.09 + 1e-8 * v) * np.eye(N)
            log_p.append(multivariate_normal(np.zeros(N), S).logpdf(Y))
            k = self.kernel(NEW, X, v, length)
            solved = np.linalg.solve(S, k.T)
            moments.append((solved.T @ Y, v - np.sum(k * solved.T, 1)))
        prior = -0.5 * (self.log_v / 0.7) ** 2 - 0.5 * (self.log_l / 0.5) ** 2
        log_p = np.array(log_p) + prior - np.log(2 * np.pi * 0.35)
        cell = 0.35 * (ticks[1] - ticks[0]) ** 2
        self.log_evidence = np.log(np.sum(np.exp(log_p - log_p.max())) * cell) + log_p.max()
        self.w = np.exp(log_p - log_p.max())
        self.w /= self.w.sum()
        means, variances = (np.array(x) for x in zip(*moments, strict=True))
        self.mean = self.w @ means
        self.variance = self.w @ (variances + (means - self.mean) ** 2)

    @staticmethod
    def kernel(a, b, v, length):
        return v * np.exp(-0.5 * (a[:, None] - b) ** 2 / length**2)


@pytest.fixture(scope="module")
def fit():
    return pg.fit(regression, pg.Laplace(hyper=pg.Grid()), 0, X, y=Y)


@pytest.fixture(scope="module")
def truth():
    return Quadrature()


@pytest.mark.slow
def test_hyperparameters_are_those_of_quadrature(fit, truth):
    w = np.exp(fit.draws.log_weights)
    np.testing.assert_allclose(w.sum(), 1.0, rtol=1e-10)
    for name, exact in (("v", truth.log_v), ("length", truth.log_l)):
        mean = truth.w @ exact
        sd = np.sqrt(truth.w @ (exact - mean) ** 2)
        values = np.log(fit.hyper[name])
        found = w @ values
        assert abs(found - mean) < 0.05 * sd, name
        assert abs(np.log(np.sqrt(w @ (values - found) ** 2) / sd)) < 0.1, name
    assert abs(fit.stats["log_marginal_likelihood"] - truth.log_evidence) < 0.05
    assert fit.stats["grid_failed"] == 0 and fit.stats["grid_missing_mass"] < 0.01


@pytest.mark.slow
def test_predictions_are_the_mixture(fit, truth):
    found = fit.predict(NEW)
    np.testing.assert_allclose(found.f_mean, truth.mean, atol=0.01)
    np.testing.assert_allclose(np.sqrt(found.f_variance), np.sqrt(truth.variance), rtol=0.03)
    tree = fit.to_datatree(num_draws=500)
    assert tree.posterior["v"].shape == (1, 500)
    assert np.all(np.isfinite(fit.log_density(NEW, jnp.zeros(3))))


@pytest.mark.slow
@pytest.mark.parametrize("tilt", [0.0, 0.05])
def test_a_shell_is_told_from_a_gaussian(tilt):
    """Three weights of which only the length is known, or little more, lie on a sphere, and no
    design about one of its points holds it.
    """

    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(jnp.sum(w**2), 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
        numpyro.factor("tilt", tilt * w[0])

    y = 4.0 * RNG.normal(size=N)
    ended = pg.fit(model, pg.Laplace(hyper=pg.Grid()), 0, 3.0 * X, y=y, throw=False).result
    assert ended in (pg.Result.not_gaussian, pg.Result.negative_curvature)


@pytest.mark.parametrize(("below", "failed"), [(-np.inf, 0), (np.nan, 4)])
def test_points_that_fail_leave_the_mixture_of_the_others(below, failed, recwarn):
    """The first ones of the lattice, below a floor of the noise: none by a constraint of the model,
    and by a failure that is reported, with the share of a Gaussian below -2.25 sd (4 steps of 0.5).
    Moments by quadrature over the noise, to 2 % of an sd.
    """

    def floored(x, y=None):
        s = numpyro.sample("s", dist.LogNormal(0.7, 1.0))
        numpyro.factor("floor", jnp.where(s < 0.25, below, 0.0))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), x))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(f, s), obs=y)

    x = np.linspace(0.0, 3.0, 12)
    y = np.sin(x) + 0.6 * np.random.default_rng(0).normal(size=12)
    fit = pg.fit(floored, pg.Laplace(hyper=pg.Grid()), 0, x, y=y)
    log_s, K = np.linspace(np.log(0.25), 3.0, 400), np.exp(-0.5 * (x[:, None] - x) ** 2)
    roots = [np.linalg.inv(K + np.exp(2.0 * t) * np.eye(12)) for t in log_s]
    log_p = [-0.5 * y @ P @ y + 0.5 * np.linalg.slogdet(P)[1] for P in roots]
    w = np.exp(np.array(log_p) - 0.5 * (log_s - 0.7) ** 2)
    w /= w.sum()
    means = np.array([K @ P @ y for P in roots])
    spreads = [np.diag(K - K @ P @ K) for P in roots]
    sd = np.sqrt(w @ (np.array(spreads) + (means - w @ means) ** 2))
    found = fit.predict(x)
    assert np.max(np.abs(found.f_mean - w @ means) / sd) < 0.02
    np.testing.assert_allclose(np.sqrt(found.f_variance), sd, rtol=0.02)
    assert np.all(np.isfinite(fit.draws.log_weights)) and fit.stats["grid_failed"] == failed
    told = [str(r.message) for r in recwarn if "the method failed at" in str(r.message)]
    assert len(told) == (failed > 0) and all("1.1%" in text for text in told), told


def test_a_mixture_leaves_out_what_has_no_weight():
    """Also as the first one, also if it is NaN."""
    moments, log_w = Moments(jnp.array([np.nan, 1.0, 3.0]), jnp.ones(3)), jnp.log(jnp.arange(3.0))
    found = mixture(lambda x: x, moments, log_w)
    np.testing.assert_allclose(found.mean, (1.0 + 2.0 * 3.0) / 3.0)
    terms = mixture(lambda x: x, moments.mean, log_w)
    np.testing.assert_allclose(terms, np.log((np.e + 2.0 * np.e**3) / 3.0))


def test_the_effective_number_of_weights():
    np.testing.assert_allclose(effective(np.full(7, -900.0)), 7.0)
    np.testing.assert_allclose(effective(np.array([0.0, -800.0])), 1.0)


def test_params_have_no_prior_to_integrate_over():
    def model(X, y=None):
        v = numpyro.param("v", 1.0, constraint=dist.constraints.positive)
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(v, 1.0), X))
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    with pytest.raises(pg.ModelError, match="params without a prior"):
        pg.fit(model, pg.Laplace(hyper=pg.Grid()), 0, X, y=Y)


@pytest.mark.parametrize(
    ("prior", "told"),
    [
        (dist.Bernoulli(0.5), "'k' is discrete"),
        (dist.ProjectedNormal(jnp.ones(2)), "'k' has support.*no unconstrained coordinates"),
    ],
)
def test_what_no_search_moves_in_is_named(prior, told):
    """NumPyro's registry raises an empty NotImplementedError."""

    def model(X, y=None):
        k = numpyro.sample("k", prior)
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + jnp.sum(k), 0.3), obs=y)

    for hyper in (pg.Grid(), pg.MAP(maximise=("k",))):
        with pytest.raises(pg.ModelError, match=f"hyperparameter {told}.*Fixed"):
            pg.fit(model, pg.Laplace(hyper=hyper), 0, X, y=Y)


def test_a_start_that_cannot_be_used_is_named_as_it_was_given():
    """It was called MAP's, and known after the first checks alone."""
    begun = pg.Grid(init={"v": -1.0, "length": 1.0})
    with pytest.raises(pg.DataError, match=r"Grid\(init=\.\.\.\)\['v'\] = -1.0 is outside"):
        pg.fit(regression, pg.Laplace(hyper=begun), 0, X, y=Y)


GROUP = np.arange(N) % 5
FRESH = np.array([0, 3, 4])  # groups of the new rows
LIKELIHOODS = {
    "normal": lambda eta: dist.Normal(eta, 0.3),
    "binary": lambda eta: dist.Bernoulli(logits=2.0 * eta),
}


def grouped(X, group, y=None, likelihood="normal"):
    """A smooth function and an effect a group, each of a scale that is inferred."""
    v = numpyro.sample("v", dist.LogNormal(0.0, 0.7))
    sd = numpyro.sample("sd", dist.LogNormal(-0.5, 0.7))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(v, 1.0), X))
    with numpyro.plate("groups", 5):
        u = numpyro.sample("u", dist.Normal(0.0, sd))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", LIKELIHOODS[likelihood](f + u[group]), obs=y)


def _summed(y):
    """Mean and variance of what each group adds, and of the new rows' f and u, by sums over
    81 x 81 values of (log v, log sd).
    """
    ticks = np.linspace(-4.5, 4.5, 81)
    log_v, log_sd = (x.ravel() for x in np.meshgrid(0.7 * ticks, -0.5 + 0.7 * ticks))
    same, all_x = (GROUP[:, None] == np.arange(5)).astype(float), np.concatenate([X, NEW])
    K = Quadrature.kernel(all_x, X, 1.0, 1.0)
    log_p, moments = -0.5 * ((log_v / 0.7) ** 2 + ((log_sd + 0.5) / 0.7) ** 2), []
    for i, (v, s) in enumerate(zip(np.exp(log_v), np.exp(2 * log_sd), strict=True)):
        S = v * (K[:N] + 1e-8 * np.eye(N)) + s * same @ same.T + 0.09 * np.eye(N)
        log_p[i] += multivariate_normal(np.zeros(N), S).logpdf(y)
        C = np.concatenate([s * same.T, v * K[N:]])
        prior = np.repeat([s, v], [5, len(NEW)])
        solved = np.linalg.solve(S, C.T)
        moments.append((solved.T @ y, prior - np.sum(C * solved.T, 1)))
    w = np.exp(log_p - log_p.max())
    w /= w.sum()
    means, variances = (np.array(x) for x in zip(*moments, strict=True))
    mean = w @ means
    return mean, w @ (variances + (means - mean) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hyper", [pg.Grid(), pg.Sample(300, 700, num_chains=1)], ids=lambda h: type(h).__name__
)
def test_a_gp_beside_groups_is_as_by_quadrature(hyper):
    """Means of effects and of the function within a twentieth of their standard deviations under
    either, so that they agree within a tenth; standard deviations to a tenth.
    """
    y = Y + np.array([0.4, -0.7, 0.0, 0.9, -0.3])[GROUP]
    mean, variance = _summed(y)
    fit = pg.fit(grouped, pg.Laplace(hyper=hyper), 0, X, GROUP, y=y)
    parts = [fit.sites["u"], fit.components(NEW, FRESH)["f"]]
    found = np.concatenate([p.mean for p in parts])
    np.testing.assert_array_less(np.abs(found - mean), 0.05 * np.sqrt(variance))
    spread = np.concatenate([p.variance for p in parts])
    np.testing.assert_allclose(0.5 * np.log(spread / variance), 0.0, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [pg.Laplace, pytest.param(pg.EP, marks=pytest.mark.long)],
    ids=lambda m: m.__name__,
)
def test_a_gp_beside_groups_under_a_grid_is_as_under_nuts_of_the_hyperparameters(method):
    """Binary data: means within a tenth of the posterior standard deviations."""
    y = (Y + np.array([0.4, -0.7, 0.0, 0.9, -0.3])[GROUP] > 0.0).astype(int)
    grid, drawn = (
        pg.fit(grouped, method(hyper=hyper), 0, X, GROUP, y=y, likelihood="binary")
        for hyper in (pg.Grid(), pg.Sample(300, 700, num_chains=1))
    )
    for p, q in (
        [f.sites["u"] for f in (grid, drawn)],
        [f.components(NEW, FRESH)["total"] for f in (grid, drawn)],
        [f.posterior(NEW) for f in (grid, drawn)],
    ):
        off = np.abs(p.mean - q.mean) / np.sqrt(np.asarray(q.variance))
        np.testing.assert_array_less(off, 0.1)
        np.testing.assert_allclose(0.5 * np.log(p.variance / q.variance), 0.0, atol=0.15)
