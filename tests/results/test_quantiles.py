"""Quantiles of f and y against closed forms, sums over counts, roots of mixtures and draws."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions.transforms import AffineTransform, ExpTransform, SigmoidTransform
from numpyro.infer import Predictive
from scipy.optimize import brentq
from scipy.special import logit
from scipy.stats import beta, expon, lognorm, norm, pareto, poisson, truncnorm, weibull_min
from scipy.stats import t as t_of

import ppl_gp as pg
from ppl_gp.draws import Draws
from ppl_gp.errors import Result
from ppl_gp.results.fit import Fit
from ppl_gp.results.integrals.predictive_cdf import Kind, cumulative
from ppl_gp.results.integrals.quantiles import error_of_outcomes, invert, of_draws, of_outcomes
from ppl_gp.results.integrals.several import mean_and_variance
from ppl_gp.results.predict.scores import pit

LEVELS = (0.05, 0.5, 0.95)
N = 12
X = np.linspace(-2.0, 2.0, N)
NEW = X[:5] + 0.1


class Half(dist.Distribution):
    """A normal of standard deviation 1/2 that has no distribution function."""

    support = dist.constraints.real

    def __init__(self, loc):
        self.loc = loc
        super().__init__(batch_shape=jnp.shape(loc))

    def sample(self, key, sample_shape=()):
        return self.loc + 0.5 * random.normal(key, sample_shape + self.batch_shape)

    def log_prob(self, value):
        return dist.Normal(self.loc, 0.5).log_prob(value)


LIKELIHOODS = {
    "poisson": lambda f: dist.Poisson(jnp.exp(f)),
    "normal": lambda f: dist.Normal(f, 0.3),
    "lognormal": lambda f: dist.LogNormal(f, 0.2),
    "narrow": lambda f: dist.Normal(f, 1e-4),
    "student": lambda f: dist.StudentT(4.0, f, 0.1),
    "cauchy": lambda f: dist.Cauchy(f, 0.3),
    "negative_binomial": lambda f: dist.NegativeBinomial2(jnp.exp(f), 2.0),
    "zero_inflated": lambda f: dist.ZeroInflatedPoisson(0.3, jnp.exp(f)),
    "binomial": lambda f: dist.Binomial(jnp.where(f > 9.0, 3, 7), logits=f),
    "geometric": lambda f: dist.Geometric(logits=f),
    "gamma": lambda f: dist.Gamma(2.0, 2.0 * jnp.exp(-f)),
    "beta": lambda f: dist.Beta(3.0 * jax.nn.sigmoid(f), 3.0 * jax.nn.sigmoid(-f)),
    "gumbel": lambda f: dist.Gumbel(f, 0.5),
    "truncated": lambda f: dist.TruncatedNormal(f, 0.5, low=0.0),
    "mirrored": lambda f: dist.TransformedDistribution(
        dist.Normal(f, 0.3), [ExpTransform(), AffineTransform(0.0, -1.0)]
    ),
    "bernoulli": lambda f: dist.Bernoulli(logits=f),
    "half": Half,
}


def model(X, y=None, likelihood="normal"):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", LIKELIHOODS[likelihood](f), obs=y)


def fitted(likelihood, method=None):
    y = Predictive(model, num_samples=1)(random.key(1), X, likelihood=likelihood)["y"][0]
    method = method or pg.Laplace(hyper=pg.Fixed({"variance": 1.0}))
    return pg.fit(model, method, 0, X, y=y, likelihood=likelihood, throw=False)


@pytest.mark.slow
def test_closed_forms():
    for likelihood, change in (("normal", lambda x: x), ("lognormal", np.exp)):
        scale = {"normal": 0.3, "lognormal": 0.2}[likelihood]
        found = fitted(likelihood).predict(NEW, likelihood=likelihood, quantiles=LEVELS)
        z = norm.ppf(LEVELS)[:, None]
        m, v = np.asarray(found.f_mean), np.asarray(found.f_variance)
        np.testing.assert_allclose(found.f_quantiles, m + z * np.sqrt(v), atol=1e-9)
        wanted = change(m + z * np.sqrt(v + scale**2))
        np.testing.assert_allclose(found.quantiles, wanted, atol=1e-7)
        assert found.quantiles_error is None


@pytest.mark.slow
def test_counts_are_the_smallest_with_enough_probability():
    found = fitted("poisson").predict(NEW, likelihood="poisson", quantiles=LEVELS)
    x, w = np.polynomial.hermite_e.hermegauss(80)
    rates = np.exp(found.f_mean + np.sqrt(found.f_variance) * x[:, None])
    below = np.einsum("q,kqm->km", w / w.sum(), poisson.cdf(np.arange(200)[:, None, None], rates))
    for level, row in zip(LEVELS, found.quantiles, strict=True):
        np.testing.assert_array_equal(row, np.argmax(below >= level, 0))


@pytest.mark.slow
def test_draws_of_hyperparameters_are_a_mixture():
    method = pg.Laplace(hyper=pg.Sample(num_warmup=100, num_samples=50))
    fit = fitted("normal", method)
    found = fit.predict(NEW, likelihood="normal", quantiles=(0.9,))
    process = fit.posterior(NEW)
    means = np.asarray(process.component_distribution.loc)
    sds = np.asarray(process.component_distribution.scale)
    for noise, row in ((0.0, found.f_quantiles[0]), (0.3, found.quantiles[0])):
        for m, s, q in zip(means, np.sqrt(sds**2 + noise**2), row, strict=True):
            root = brentq(lambda t, m=m, s=s: norm.cdf((t - m) / s).mean() - 0.9, -50, 50)
            assert abs(q - root) < 1e-6


@pytest.mark.one_case
@pytest.mark.parametrize("likelihood", ["half", *(k for k in LIKELIHOODS if k != "half")])
def test_shares_of_draws_below_are_the_levels(likelihood):
    """To three standard errors of 200 000 draws; with the reported error where there is one."""
    fit = fitted(likelihood)
    found = fit.predict(NEW, likelihood=likelihood, quantiles=LEVELS)
    y = np.asarray(fit.sample(1, NEW, 200_000, likelihood=likelihood).y)
    for i, level in enumerate(LEVELS):
        q, slack = np.asarray(found.quantiles[i]), 3.5 * np.sqrt(level * (1 - level) / len(y))
        e = 0.0 if found.quantiles_error is None else 3.5 * np.asarray(found.quantiles_error[i])
        assert np.all((y <= q + e).mean(0) > level - slack)
        assert np.all((y < q - e).mean(0) < level + slack)
    assert (found.quantiles_error is None) == (likelihood != "half")


def test_a_truncated_normal_far_from_its_bounds_has_digits():
    """Of a location 9 sd below `low` NumPyro's has 0 / 0, and quantiles were infinite."""
    loc, t = np.linspace(-15.0, 15.0, 41)[:, None], np.array([0.01, 0.1, 0.5, 1.5])
    for high in (None, 2.0):
        fn = dist.TruncatedNormal(jnp.asarray(loc), 1.0, low=0.0, high=high)
        end = np.inf if high is None else high - loc
        wanted = truncnorm.cdf(t, -loc, end, loc=loc)
        np.testing.assert_allclose(cumulative(fn, t), wanted, atol=1e-10)


TAILS = (0.001, 0.02, 0.5, 0.98, 0.999)


@pytest.mark.one_case
@pytest.mark.parametrize("has_cdf", [True, False])
def test_errors_of_quantiles_over_draws_cover_in_tails_too(has_cdf):
    """In 300 repetitions, each of 1500 draws, quantile -+ 2 errors holds the quantile in 95.4 %
    (less three binomial standard errors: 91.8 %): of Student-t noise, of which the farthest draws
    lie in clumps, and of a normal one that has a distribution function.
    """
    rng, p, num = np.random.default_rng(0), jnp.asarray(TAILS), 1500
    kind = Kind(None, None, False, has_cdf)
    f = rng.standard_normal((300, num)) if has_cdf else rng.standard_t(3.0, (300, num))

    def found(f):
        below = lambda t: norm_cdf((t - f) / 0.5) if has_cdf else 1.0 * (f <= t)  # noqa: E731
        log_w = jnp.full(num, -np.log(num))
        return of_draws(kind, below, log_w, float(num), p, (jnp.zeros(()), jnp.ones(())))

    q, error = (np.asarray(x) for x in jax.jit(lambda f: jax.lax.map(found, f))(f))
    exact = norm.ppf(TAILS) * np.sqrt(1.25) if has_cdf else t_of(3.0).ppf(TAILS)
    assert np.all((np.abs(q - exact) <= 2.0 * error).mean(0) > 0.918)
    known = np.isfinite(error).mean(0)
    np.testing.assert_array_equal(known[1:-1], 1.0)
    # one or two of the draws lie beyond 0.999; their distribution functions know more of it
    assert has_cdf or np.all(known[[0, -1]] == 0.0)


def test_errors_of_quantiles_of_outcomes_cover():
    """Near the level where one outcome gives way to the next, too: 1000 draws, 400 repetitions, and
    less three binomial standard errors of 95.4 %.
    """
    rng = np.random.default_rng(1)
    logits = 1.5 * rng.standard_normal((400, 1000, 4))
    many = jax.nn.softmax(jnp.asarray(1.5 * rng.standard_normal((400_000, 4))), -1)
    level = jnp.array([0.2, 0.5002, 0.74, 0.9])  # each outcome has 1/4
    exact = np.argmax(np.cumsum(many.mean(0))[None] >= np.asarray(level)[:, None], 1)
    below = jnp.cumsum(jax.nn.softmax(jnp.asarray(logits), -1), -1)
    total, spread = below.mean(1), below.std(1) / np.sqrt(1000.0)
    log_probs = jnp.log(jnp.diff(total, prepend=0.0)).T
    q = of_outcomes(range(4), log_probs, level)
    error = error_of_outcomes(range(4), log_probs, spread.T, level)
    covered = (np.abs(np.asarray(q) - exact[:, None]) <= 2.0 * np.asarray(error)).mean(1)
    assert np.all(covered > 0.922)
    assert np.all(np.asarray(error)[0] == 0.0)


@pytest.mark.slow
def test_quantiles_of_averaged_probabilities_have_an_error():
    def four(X, y=None):
        with numpyro.plate("classes", 4):
            f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

    fit = pg.fit(four, pg.Laplace(), 0, X, y=np.arange(N) % 4)
    share = float(fit.predict(NEW).probs[0, 0])
    found = fit.predict(NEW, quantiles=(share - 1e-4, 0.5))
    assert found.quantiles_error.shape == found.quantiles.shape
    assert found.quantiles_error[0, 0] > 0.0  # the next class may be it


def heteroscedastic(X, y=None):
    with numpyro.plate("functions", 2):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f[0], jnp.exp(0.5 * f[1])), obs=y)


def outputs(X, y=None):
    """A site with several values per row, and another of counts."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        scale = jnp.array([0.1, 0.5, 1.0])
        numpyro.sample("y", dist.Normal(f[:, None], scale).to_event(1), obs=y)


def deep(X, y=None):
    h = numpyro.sample("h", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), h[:, None]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def line(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(w * X, 0.3), obs=y)


def two_functions(likelihood):
    def program(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        g = numpyro.sample("g", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(f, g), obs=y)

    return program


def moved(f, g):
    """Without mean and variance in NumPyro."""
    return dist.TransformedDistribution(dist.Normal(f, jnp.exp(g)), AffineTransform(1.0, 2.0))


OTHERS = {
    "cauchy": (two_functions(lambda f, g: dist.Cauchy(f, jnp.exp(g))), pg.EP()),
    "moved": (two_functions(moved), pg.EP()),
    "outputs": (outputs, pg.Laplace()),
    "heteroscedastic": (heteroscedastic, pg.EP()),
    "deep": (deep, pg.SVGP(num_inducing=8, max_steps=200)),
    "line": (line, pg.NUTS(200, 400)),
}


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name):
    program, method = OTHERS[name]
    y = Predictive(program, num_samples=1)(random.key(2), X)["y"][0]
    fit = pg.fit(program, method, 0, X, y=y, throw=False)
    found = fit.predict(NEW, quantiles=LEVELS)
    draws = np.asarray(fit.sample(1, NEW, 200_000).y)
    assert found.quantiles.shape == (3, *draws.shape[1:])
    assert (found.quantiles_error is not None) == (name == "deep")
    for i, level in enumerate(LEVELS):
        q, slack = np.asarray(found.quantiles[i]), 3.5 * np.sqrt(level * (1 - level) / len(draws))
        # 400 draws of the line's slope are spread over the samples, not drawn anew
        slack += 1e-3 if name == "line" else 0.0
        e = 0.0 if found.quantiles_error is None else 3.5 * np.asarray(found.quantiles_error[i])
        assert np.all((draws <= q + e).mean(0) > level - slack)
        assert np.all((draws < q - e).mean(0) < level + slack)


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("mixed", [True, False])
def test_moments_of_a_direction_are_not_told_as_those_of_y(mixed):
    """NumPyro's mean of a von Mises is circular, and so is its variance."""

    def directions(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            one = dist.VonMises(f, 4.0)
            two = dist.MixtureGeneral(dist.Categorical(logits=jnp.zeros((*f.shape, 2))), [one, one])
            numpyro.sample("y", two if mixed else one, obs=y)

    fit = pg.fit(directions, pg.EP(), 0, X, y=np.sin(X), throw=False)
    found = fit.predict(NEW)
    assert found.mean is None
    assert found.variance is None


@pytest.mark.slow
def test_intervals_of_counts_cover():
    """90 % intervals of 2000 counts of one model, drawn with f: 90 +- 2 %, where a count at an end
    counts by the share that the level leaves of it.
    """
    rng = np.random.default_rng(0)
    x = rng.uniform(-3.0, 3.0, 2400)

    def rates(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f + 3.0)), obs=y)

    y = np.asarray(Predictive(rates, num_samples=1)(random.key(3), x)["y"][0])
    fit = pg.fit(rates, pg.Laplace(), 0, x[:400], y=y[:400])
    low, high = np.asarray(fit.predict(x[400:], quantiles=(0.05, 0.95)).quantiles)
    # p(low <= y <= high) is at least 0.9; what it is more comes from the two ends
    inside = np.mean((y[400:] >= low) & (y[400:] <= high))
    strictly = np.mean((y[400:] > low) & (y[400:] < high))
    assert strictly - 0.02 < 0.9 < inside + 0.02
    assert inside < 0.95


@pytest.mark.parametrize("likelihood", ["poisson", "normal"])
def test_transforms_are_probabilities_below_and_up_to(likelihood):
    fit = fitted(likelihood)
    y = np.arange(5.0) if likelihood == "normal" else np.arange(5)
    below, up_to = pit(fit, NEW, y, likelihood=likelihood)
    m, v = (np.asarray(getattr(fit.predict(NEW, likelihood=likelihood), k)) for k in _F)
    if likelihood == "normal":
        np.testing.assert_allclose(below, norm.cdf((y - m) / np.sqrt(v + 0.09)), atol=1e-10)
        np.testing.assert_array_equal(below, up_to)
    else:
        np.testing.assert_allclose(
            up_to - below, np.exp(fit.log_density(NEW, y, likelihood=likelihood)), atol=1e-9
        )
        assert below[0] == 0.0


def test_a_value_that_has_a_probability_has_a_jump_below_it():
    """Of draws as of counts: in a model that is right, transforms of zeros were all one half."""

    def rain(X, y=None):
        amount = numpyro.sample("amount", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.HurdleGamma(jnp.full(X.shape, 0.4), jnp.exp(amount)), obs=y)

    draws = Draws.equal({"amount": jnp.zeros(2)}, {})
    known = {"model": rain, "method": pg.NUTS(), "args": (X,), "kwargs": {"y": X**2}, "stats": {}}
    ended = {"log_evidence": None, "result": Result.completed, "sampled": True}
    below, up_to = pit(Fit(draws=draws, **known, **ended), NEW, np.array([0.0, 0.0, 0.5, 1.0, 9.0]))
    np.testing.assert_array_equal(below[:2], 0.0)
    np.testing.assert_allclose(up_to[:2], 0.4, atol=0.05)
    np.testing.assert_array_equal(below[2:], up_to[2:])


_F = ("f_mean", "f_variance")


@pytest.mark.slow
def test_a_row_is_answered_alike_whatever_stands_beside_it():
    fit = fitted("poisson")
    many, few = (
        fit.predict(x, likelihood="poisson", quantiles=(0.3, 0.7)) for x in (NEW, NEW[1:3])
    )
    np.testing.assert_array_equal(many.quantiles[:, 1:3], few.quantiles)
    np.testing.assert_allclose(many.f_quantiles[:, 1:3], few.f_quantiles, rtol=1e-9)


@pytest.mark.slow
def test_many_rows_come_in_chunks():
    fit = fitted("normal")
    x = np.linspace(-2.0, 2.0, 10_100)
    found = fit.predict(x, likelihood="normal", quantiles=(0.25, 0.75))
    assert found.quantiles.shape == found.f_quantiles.shape == (2, 10_100)
    part = fit.predict(x[-3:], likelihood="normal", quantiles=(0.25, 0.75))
    np.testing.assert_allclose(found.quantiles[:, -3:], part.quantiles, rtol=1e-7)


@pytest.mark.parametrize("levels", [(0.0, 0.5), (1.0,), (float("nan"),), ()])
def test_levels_are_checked(levels):
    with pytest.raises(pg.DataError, match="quantiles="):
        fitted("normal").predict(NEW, likelihood="normal", quantiles=levels)


BETA = dist.Beta(2.0, 3.0)
BEYOND = {
    "stretched": (
        dist.TransformedDistribution(BETA, AffineTransform(1.0, 2.0)),
        beta(2, 3, 1, 2).cdf,
    ),
    "mirrored": (
        dist.TransformedDistribution(BETA, AffineTransform(1.0, -2.0)),
        lambda y: beta(2, 3).sf((1.0 - y) / 2.0),
    ),
    "beta": (BETA, beta(2, 3).cdf),
    "exp_mirrored": (
        dist.TransformedDistribution(
            dist.Normal(0.3, 1.0), [ExpTransform(), AffineTransform(1.0, -2.0)]
        ),
        lambda y: lognorm(1.0, scale=np.exp(0.3)).sf((1.0 - y) / 2.0),
    ),
    "squashed_mirrored_exp": (
        dist.TransformedDistribution(
            dist.Normal(0.3, 1.0), [SigmoidTransform(), AffineTransform(2.0, -1.0), ExpTransform()]
        ),
        lambda y: norm.sf(logit(np.clip(2.0 - np.log(np.maximum(y, 1e-9)), 0.0, 1.0)) - 0.3),
    ),
    "weibull": (dist.Weibull(1.5, 2.0), weibull_min(2.0, scale=1.5).cdf),
    "pareto": (dist.Pareto(1.0, 2.0), pareto(2.0).cdf),
    "log_normal": (dist.LogNormal(0.0, 1.0), lognorm(1.0).cdf),
    "poisson": (dist.Poisson(3.0), poisson(3.0).cdf),
    "mixed": (
        dist.MixtureGeneral(
            dist.Categorical(jnp.array([0.3, 0.2, 0.1, 0.4])),
            [dist.Normal(0.0, 0.5), dist.Exponential(2.0 * jnp.ones(8)), dist.LogNormal(), BETA],
            support=dist.constraints.real,
        ),
        lambda y: (
            0.3 * norm(0.0, 0.5).cdf(y)
            + 0.2 * expon(0.0, 0.5).cdf(y)
            + 0.1 * lognorm(1.0).cdf(y)
            + 0.4 * beta(2, 3).cdf(y)
        ),
    ),
    "zero_inflated": (
        dist.ZeroInflatedPoisson(jnp.full(8, 0.2), 3.0),
        lambda y: 0.2 * (y >= 0) + 0.8 * poisson(3.0).cdf(y),
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_distribution_functions_are_zero_and_one_beyond_the_support(name):
    """NumPyro has no number there for some, and any number for others."""
    fn, exact = BEYOND[name]
    values = np.array([-9.0, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5, 9.0])
    wanted = exact(values)
    np.testing.assert_allclose(cumulative(fn, jnp.asarray(values)), wanted, atol=1e-12)


def test_inversion_of_flat_steep_and_stepped_functions():
    p = jnp.array([0.1, 0.5, 0.9])
    zero, one = jnp.zeros(3), jnp.ones(3)
    far = invert(lambda x: norm_cdf((x - 1e9) / 0.3), p, zero + 1e9, one)
    np.testing.assert_allclose(far, 1e9 + 0.3 * norm.ppf(p), atol=4e-6)
    steep = invert(lambda x: norm_cdf((x - 1e6) / 1e-3), p, zero, one)
    np.testing.assert_allclose(steep, 1e6 + 1e-3 * norm.ppf(p), atol=2e-9)
    step = invert(lambda x: jnp.where(x >= 2.5, 1.0, 0.0), p, zero, one)
    np.testing.assert_allclose(step, 2.5, atol=1e-8)
    heavy = invert(
        lambda x: 0.5 + jnp.arctan(x / 1e-8) / jnp.pi, jnp.array([0.001]), zero[:1], one[:1]
    )
    np.testing.assert_allclose(heavy, np.tan(np.pi * (0.001 - 0.5)) * 1e-8, atol=1e-8)
    k = invert(lambda k: 1.0 - 0.5 ** (jnp.floor(k) + 1.0), p, zero, one, low=-1.0, integers=True)
    np.testing.assert_array_equal(k, [0, 0, 3])


def test_a_bracket_closes_once_one_end_is_the_root():
    """Regula falsi went back to that end, and bisections alone closed the bracket: 132 steps."""
    m, sd, p = jnp.array([0.0, 3.0, -5.0]), jnp.array([1.0, 0.1, 4.0]), jnp.array([0.5, 0.05, 0.95])
    calls = []

    def F(x):
        calls.append(x)
        return norm_cdf((x - m) / sd)

    with jax.disable_jit():
        found = invert(F, p, m, sd)
    np.testing.assert_allclose(found, m + sd * norm.ppf(p), rtol=1e-8, atol=1e-8)
    assert len(calls) <= 16


@pytest.mark.parametrize("offset", [1e3, -1e6])
@pytest.mark.parametrize("hyper", [pg.MAP(), pg.Grid()], ids=lambda h: type(h).__name__)
def test_quantiles_move_with_the_data_and_their_accuracy_is_of_the_spread(hyper, offset):
    """The tolerance was relative to y: half a standard deviation at an offset of 1e9."""

    def shifted(X, offset, y=None):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(offset + f, noise), obs=y)

    y = np.round(np.sin(X) + 0.1 * np.cos(9 * X), 3)

    def centred(offset):
        fit = pg.fit(shifted, pg.Laplace(hyper=hyper), 0, X, offset, y=offset + y)
        found = fit.predict(NEW, offset, quantiles=LEVELS)
        return found.sd, found.quantiles - offset, found.f_quantiles

    sd, *wanted = centred(0.0)
    _, *found = centred(offset)
    if hyper == pg.MAP():
        level = np.array([[0.05], [0.5], [0.95]])
        mean = pg.fit(shifted, pg.Laplace(), 0, X, 0.0, y=y).predict(NEW, 0.0).mean
        np.testing.assert_allclose(wanted[0], mean + sd * norm.ppf(level), atol=1e-8)
    for a, b in zip(found, wanted, strict=True):
        rounded = 1e-7 + 1e-14 * abs(offset)  # that of y itself, through the fit
        np.testing.assert_allclose(a, b, atol=rounded * float(np.max(sd)) * 30)


def norm_cdf(x):
    return jax.scipy.special.ndtr(x)


@pytest.mark.parametrize("hyper", [pg.Grid(), pg.MAP()], ids=lambda h: type(h).__name__)
def test_quantiles_of_a_function_that_is_known_are_its_value(hyper):
    """They were infinite under a grid, where 0 / 0 was the share below."""

    def through_the_origin(dose, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 3.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        with numpyro.plate("data", dose.shape[0]):
            numpyro.sample("y", dist.Normal(dose * slope, sigma), obs=y)

    fit = pg.fit(through_the_origin, pg.Laplace(hyper=hyper), 0, X, y=0.5 * X + 0.1 * np.cos(9 * X))
    found = fit.predict(np.array([0.0, 0.5]), quantiles=(0.05, 0.95)).f_quantiles
    np.testing.assert_array_equal(found[:, 0], [0.0, 0.0])
    assert found[0, 1] < found[1, 1]


def test_moments_of_a_truncated_normal_far_from_its_bound():
    """Infinite beyond 38 standard deviations, where NumPyro's share underflows."""
    for far in (30.0, 37.0, 50.0, 1e3):
        for fn, mirrored in (
            (dist.TruncatedNormal(-far, 1.0, low=0.0), 1.0),
            (dist.TruncatedNormal(far, 1.0, high=0.0), -1.0),
            (dist.TruncatedNormal(-far, 1.0, low=0.0, high=9.0), 1.0),
        ):
            mean, variance = map(float, mean_and_variance(fn))
            # Mills' ratio by its series: 1/t - 2/t^3 + 10/t^5, 1/t^2 - 6/t^4 + 50/t^6
            series = 1 / far - 2 / far**3 + 10 / far**5, 1 / far**2 - 6 / far**4 + 50 / far**6
            assert abs(mirrored * mean / series[0] - 1.0) < 1e-5
            assert abs(variance / series[1] - 1.0) < 1e-3
