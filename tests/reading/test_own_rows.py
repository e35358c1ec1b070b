"""Where a row sees more of the functions than its own entry of the predictor, or more than the
likelihood sees them: refused by name, or the right number.
"""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy.stats import multivariate_normal

import ppl_gp as pg

N = 12
X = np.linspace(0.0, 6.0, N)
Y = np.sin(X) + 0.3 * np.random.default_rng(0).normal(size=N)
WINS = np.random.default_rng(1).integers(0, 2, (N, N))
KERNEL = pg.kernels.RBF(1.0, 0.7)
K = np.asarray(KERNEL(X, X)) + 1e-8 * np.eye(N)
FIXED = {"hyper": pg.Fixed({})}


def function(x):
    return numpyro.sample("f", pg.GP(KERNEL, x))


def observe(x, y, loc, scale=0.5):
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(loc, scale), obs=y)


def seen_through(transform):
    def model(x, y=None):
        observe(x, y, transform(function(x)))

    return model


def wins_of_a_row(x, y=None):
    f = function(x)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f[:, None] - f).to_event(1), obs=y)


def one_plate_of_pairs(x, y=None):
    f = function(x)
    with numpyro.plate("data", x.shape[0], dim=-2):
        numpyro.sample("y", dist.Normal(f[:, None] + f, 0.5), obs=y)


def wins_by_strengths(x, y=None):
    with numpyro.plate("inputs", 1):
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0))
    eta = x[:, None] @ beta
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=eta[:, None] - eta).to_event(1), obs=y)


def weights_by_softmax(x, y=None):
    f = function(x)
    with handlers.scale(scale=x.shape[0] * jax.nn.softmax(f)):
        observe(x, y, f)


def effects_about_a_contrast(x, y=None):
    f = function(x)
    with numpyro.plate("data", x.shape[0]):
        e = numpyro.sample("e", dist.Normal(f - jnp.mean(f), 0.5))
        numpyro.sample("y", dist.Normal(e, 0.3), obs=y)


def level_about_a_mean(x, y=None):
    b = numpyro.sample("b", dist.Normal(jnp.mean(function(x)), 0.5))
    observe(x, y, b * jnp.ones(x.shape[0]))


def moving_average(x, y=None):
    with numpyro.plate("data", x.shape[0]):
        g = numpyro.sample("g", dist.Normal(0.0, 1.0))
        e = numpyro.sample("e", dist.Normal(g + 0.9 * jnp.roll(g, 1), 0.5))
        numpyro.sample("y", dist.Normal(e, 0.3), obs=y)


def scale_about_a_mean(x, y=None):
    f = function(x)
    observe(x, y, f, numpyro.sample("tau", dist.LogNormal(jnp.mean(f), 0.3)))


def drawn_with(f):
    return f + jax.lax.stop_gradient(jax.random.gamma(jax.random.key(0), jnp.exp(jnp.cumsum(f))))


def looked_up_by_truth(f):
    return f[jnp.arange(f.shape[0]).astype(bool).astype(int)]


def by_one_of_two_columns(f):
    index = jnp.stack([jnp.array([-1, 0])[jnp.arange(f.shape[0]) % 2], jnp.arange(f.shape[0])], 1)
    return jnp.where(index < 0, jnp.roll(f, 1)[:, None], f[:, None])[:, 0]


def scalars_in_a_loop(x, y=None):
    f = function(x)
    e = [numpyro.sample(f"e{i}", dist.Normal(0.0, 1.0)) for i in range(x.shape[0])]
    observe(x, y, f + jnp.stack(e))


COUPLED = {
    "a number for each row": (scalars_in_a_loop, Y, "jnp.stack"),
    "an event of pairs": (wins_of_a_row, WINS, "a second row"),
    "a plate of pairs": (one_plate_of_pairs, WINS.astype(float), "a second row"),
    "pairs of a predictor": (wins_by_strengths, WINS, "a second row"),
    "weights": (weights_by_softmax, Y, "softmax"),
    "effects about f": (effects_about_a_contrast, Y, "jnp.mean"),
    "a level about f": (level_about_a_mean, Y, "jnp.mean"),
    "effects about effects": (moving_average, Y, "other rows"),
    "a hyperparameter about f": (scale_about_a_mean, Y, "prior of site 'tau'"),
    "draws": (seen_through(drawn_with), Y, "gamma"),
    "numbers as booleans": (seen_through(looked_up_by_truth), Y, "astype"),
    "an index of two columns": (seen_through(by_one_of_two_columns), Y, "where"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_what_sees_the_functions_of_other_rows_is_refused(name):
    """Each was taken row by row, up to 44 nats off."""
    model, y, said = COUPLED[name]
    with pytest.raises(pg.ModelError, match=said):
        pg.fit(model, pg.EP(**FIXED), 0, X, y=y)


def test_pairs_are_taken_one_a_datum_and_factors_one_a_row():
    """The remedies of the two messages."""

    def pairs(x, i, j, y=None):
        f = function(x)
        with numpyro.plate("data", i.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f[i] - f[j]), obs=y)

    def factor(by_row):
        def model(x, y=None):
            log_p = dist.Normal(function(x), 0.5).log_prob(y)
            with numpyro.plate("data", x.shape[0]) if by_row else nullcontext():
                numpyro.factor("log_p", log_p if by_row else log_p.sum())

        return model

    i, j = (k.ravel() for k in np.meshgrid(np.arange(N), np.arange(N), indexing="ij"))
    fit = pg.fit(pairs, pg.Laplace(**FIXED), 0, X, i, j, y=WINS.ravel())
    assert fit.result == "converged"
    with pytest.raises(pg.NotPointwiseError, match="leave the sum over rows out"):
        pg.fit(factor(by_row=False), pg.Laplace(**FIXED), 0, X, y=Y)
    truth = multivariate_normal(np.zeros(N), K + 0.25 * np.eye(N)).logpdf(Y)
    fit = pg.fit(factor(by_row=True), pg.Laplace(**FIXED), 0, X, y=Y)
    assert abs(fit.log_evidence - truth) < 1e-8


def test_weights_that_a_hyperparameter_shares_out_are_each_rows_own():
    """A number that is inferred has no rows: it was taken for a value of other ones."""

    def model(x, y=None):
        tau = numpyro.sample("tau", dist.Normal(0.0, 1.0))
        f = function(x)
        with handlers.scale(scale=x.shape[0] * jax.nn.softmax(tau * x)):
            observe(x, y, f)

    fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed({"tau": 0.3})), 0, X, y=Y)
    w = N * np.exp(0.3 * X) / np.exp(0.3 * X).sum()
    powers = 0.5 * ((1.0 - w) * np.log(2.0 * np.pi * 0.25) - np.log(w)).sum()  # of p(y_n | f_n)
    truth = multivariate_normal(np.zeros(N), K + np.diag(0.25 / w)).logpdf(Y) + powers
    assert abs(fit.log_evidence - truth) < 1e-8


def test_effects_that_see_those_of_other_rows_are_exact_together():
    A = np.eye(N) + 0.9 * np.roll(np.eye(N), 1, 0)
    truth = multivariate_normal(np.zeros(N), A @ A.T + 0.34 * np.eye(N)).logpdf(Y)
    assert abs(pg.fit(moving_average, pg.Laplace(), 0, X, y=Y).log_evidence - truth) < 1e-8


def test_missing_values_that_enter_another_site_are_refused():
    """They were taken at one random draw."""
    seen = np.arange(N) % 3 > 0

    def model(t, x, y=None):
        f = function(t)
        with numpyro.plate("data", t.shape[0]):
            covariate = numpyro.sample("x", dist.Normal(f, 0.3), obs=x, obs_mask=jnp.asarray(seen))
            numpyro.sample("y", dist.Normal(2.0 * covariate, 0.5), obs=y)

    for method in (pg.EP(), pg.Laplace(), pg.NUTS()):
        with pytest.raises(pg.ModelError, match="obs_mask leaves open at site 'x'"):
            pg.fit(model, method, 0, X, np.where(seen, Y, 0.0), y=2.0 * Y)


def residuals(x, y=None):
    r = y - function(x)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("r", dist.Normal(jnp.zeros(x.shape[0]), 0.5), obs=r)


@pytest.mark.parametrize("method", [pg.EP, pg.Laplace, pg.VI], ids=lambda m: m.__name__)
def test_observed_values_may_be_computed_from_f(method):
    """EP took log p(y - f) at one f for a constant, 9 nats off."""
    truth = multivariate_normal(np.zeros(N), K + 0.25 * np.eye(N)).logpdf(Y)
    assert abs(pg.fit(residuals, method(**FIXED), 0, X, y=Y).log_evidence - truth) < 1e-8


def weighed_by_f(x, y=None):
    f = function(x)
    with handlers.scale(scale=jax.nn.sigmoid(4.0 * f)):
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def test_weights_by_f_leave_the_likelihood_without_the_proof_of_one_mode():
    """The scale was left out of the proof: EP took each site for a positive one, and the bound of
    LocalBound was above the evidence. Rows far apart: one integral each.
    """
    x, y = np.arange(3) * 50.0, np.array([1, 0, 0])
    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    p = 1.0 / (1.0 + np.exp(-nodes * (2 * y[:, None] - 1)))
    each = p ** (1.0 / (1.0 + np.exp(-4.0 * nodes))) @ weights / weights.sum()
    fit = pg.fit(weighed_by_f, pg.EP(**FIXED), 0, x, y=y)
    assert abs(fit.log_evidence - np.log(each).sum()) < 1e-5
    with pytest.raises(pg.ModelError, match="a scale of site 'y' is computed from f"):
        pg.fit(weighed_by_f, pg.LocalBound(**FIXED), 0, x, y=y)


def test_a_function_that_a_latents_prior_sees_is_drawn_in_the_bound():
    """The prior of h was taken at the mean of q(f), and the bound was 7 nats above the evidence."""

    def model(x, y=None):
        f = function(x)
        with numpyro.plate("data", x.shape[0]):
            h = numpyro.sample("h", dist.Normal(f, 0.7))
            numpyro.sample("y", dist.Normal(h, 0.4), obs=y)

    truth = multivariate_normal(np.zeros(N), K + 0.65 * np.eye(N)).logpdf(Y)
    layers = pg.Layers(latents=pg.Free())
    method = pg.SVGP(inducing=X, max_steps=600, layers=layers, **FIXED)
    fit = pg.fit(model, method, 0, X, y=Y, throw=False)
    assert truth - 1.0 < fit.log_evidence < truth + 0.2
    found = fit.predict(X)
    assert np.all(np.isfinite(found.mean)) and np.all(found.variance > 0.16)


def test_a_pairwise_array_of_a_level_is_no_predictor():
    """Two axes grew with the rows, and the number of functions was that of the rows of a trace."""

    def model(x, y=None):
        e = numpyro.sample("b", dist.Normal(0.0, 1.0)) * jnp.ones(x.shape[0])
        observe(x, y, jnp.mean(jnp.tanh(e[:, None] + 0.5 * e), 1))

    b = np.linspace(-8.0, 8.0, 4001)
    log_p = dist.Normal(np.tanh(1.5 * b)[:, None], 0.5).log_prob(Y + 0.4).sum(1)
    log_p += np.asarray(dist.Normal(0.0, 1.0).log_prob(b))
    top = float(np.max(log_p))
    truth = top + np.log(np.sum(np.exp(np.asarray(log_p) - top)) * (b[1] - b[0]))
    assert abs(pg.fit(model, pg.Laplace(), 0, X, y=Y + 0.4).log_evidence - truth) < 0.05


@pytest.mark.parametrize("method", [pg.EP, pg.Laplace], ids=lambda m: m.__name__)
def test_what_a_hyperparameters_prior_sees_is_a_hyperparameter(method):
    """m was integrated, and the prior of log_s taken at a random draw of it."""

    def model(x, y=None):
        m = numpyro.sample("m", dist.Normal(-1.0, 0.5))
        log_s = numpyro.sample("log_s", dist.Normal(m, 0.3))
        observe(x, y, function(x), jnp.exp(log_s))

    fit = pg.fit(model, method(), 0, X, y=Y)
    log_s = float(fit.hyper["log_s"])
    m = (-1.0 / 0.25 + log_s / 0.09) / (1.0 / 0.25 + 1.0 / 0.09)
    assert abs(float(fit.hyper["m"]) - m) < 1e-5
    C = K + np.exp(2.0 * log_s) * np.eye(N)
    truth = multivariate_normal(np.zeros(N), C).logpdf(Y)
    assert abs(fit.log_evidence - truth) < 1e-7
