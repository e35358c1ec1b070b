"""Leave-one-out of every method against the truth: fits to the other rows, at the same
hyperparameters, and the density of the row under them.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from ppl_gp.results.left_out import cavity_log_densities

N = 12
X = np.linspace(-2.0, 2.0, N)
rng = np.random.default_rng(6)
F = 1.5 * np.sin(2.0 * X)
DATA = {
    "gaussian": F + 0.9 * rng.normal(size=N),
    "counts": rng.poisson(np.exp(0.5 * F)),
    "binary": (rng.uniform(size=N) < 1.0 / (1.0 + np.exp(-F))).astype(int),
    "weibull": np.exp(0.5 * F) * rng.weibull(1.5, N),
    "gamma": np.exp(0.5 * F) * rng.gamma(2.0, 0.5, N),
    "student": F + 0.3 * rng.standard_t(4.0, N),
    "negative": rng.poisson(np.exp(0.5 * F) * rng.gamma(1.5, 1.0 / 1.5, N)),
}
DATA["student"][3] += 3.0  # an outlier
LIKELIHOODS = {
    "gaussian": lambda f: dist.Normal(f, 0.9),
    "counts": lambda f: dist.Poisson(jnp.exp(f)),
    "binary": lambda f: dist.Bernoulli(logits=f),
    "weibull": lambda f: dist.Weibull(jnp.exp(0.5 * f), 1.5),
    "gamma": lambda f: dist.Gamma(2.0, 2.0 * jnp.exp(-0.5 * f)),
    "student": lambda f: dist.StudentT(4.0, f, 0.3),
    "negative": lambda f: dist.NegativeBinomial2(jnp.exp(0.5 * f), 1.5),
}
SKEWED = ("weibull", "gamma", "student", "negative")


def model_of(kind):
    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.8), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", LIKELIHOODS[kind](f), obs=y)

    return model


FIXED = pg.Fixed({})
SPARSE = {"inducing": np.linspace(-2.0, 2.0, 6), "train_inducing": False, "hyper": FIXED}
METHODS = {
    "laplace": pg.Laplace(hyper=FIXED),
    "ep": pg.EP(hyper=FIXED),
    "vi": pg.VI(hyper=FIXED),
    "bound": pg.LocalBound(hyper=FIXED),
    "svgp": pg.SVGP(**SPARSE, max_steps=200),
    "collapsed": pg.CollapsedSVGP(**SPARSE),
    "nuts": pg.NUTS(num_warmup=300, num_samples=8000, num_chains=1),
}
# A local method is exact, to rounding in nats. A sparse one's cavity leaves out how the other rows'
# sites would follow: a share of what leaving the row out changes. Draws have Monte Carlo errors.
ROUNDING = 2e-5
SHARE = {"gaussian": 0.0, "counts": 0.22, "binary": 0.03}
LOCAL = ("laplace", "ep", "vi", "bound")
DRAWS = 0.06
CASES = [
    (kind, name)
    for name in METHODS
    for kind in DATA
    if (kind == "binary" or name != "bound")
    and (kind == "gaussian" or name != "collapsed")
    and (kind not in SKEWED or name in LOCAL)
]
QUICK = [("counts", "laplace"), ("weibull", "ep"), ("gaussian", "collapsed")]


def refits(model, method, y):
    """log p(y_n | y_-n) by the fit to the other rows, and whether it converged."""
    left_out = []
    for n in range(N):
        rest = np.arange(N) != n
        fit = pg.fit(model, method, 0, X[rest], y=y[rest], throw=False)
        density = fit.log_density(X[n : n + 1], y[n : n + 1])[0]
        left_out.append((density, fit.result in ("converged", "completed")))
    return map(np.array, zip(*left_out, strict=True))


@pytest.mark.parametrize(
    ("kind", "name"), [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_leave_one_out_is_that_of_refits(kind, name):
    model, y = model_of(kind), DATA[kind]
    fit = pg.fit(model, METHODS[name], 0, X, y=y, throw=False)
    loo, (want, ended) = fit.loo(), refits(model, METHODS[name], y)
    changed = np.abs(fit.log_density(X, y) - want)  # by leaving the row out
    allowed = ROUNDING + (0.0 if name in LOCAL else SHARE[kind]) * changed
    allowed = np.full(N, DRAWS) if name == "nuts" else allowed
    assert loo.pareto_k.shape == (N,)
    # where weights of draws have a variance; cavities need none
    good = ended & (loo.pareto_k.values < (0.5 if name == "nuts" else np.inf))
    assert good.sum() >= (N // 2 if name == "nuts" else N - 2)
    wrong = np.abs(loo.elpd_i.values - want)
    assert np.all(wrong[good] <= allowed[good]), (wrong, allowed)
    assert np.max(changed) > 3.0 * np.max(allowed)


def by_cavities(fit, scaled=False):
    """As `cavity_log_densities` of a local method, other sites as they are; (N,) each."""
    data = (fit.args, fit.kwargs, scaled, N)
    found, kept, removed, _ = cavity_log_densities(fit.model, *fit.latent, fit.draws, *data)
    return np.asarray(found[0]), np.asarray(kept[0]), np.asarray(removed[0])


EVERY_ROW = {"inducing": X, "train_inducing": False, "hyper": FIXED}


@pytest.mark.parametrize("kind", ["counts", pytest.param("binary", marks=pytest.mark.slow)])
def test_a_sparse_fit_with_a_point_at_every_row_leaves_out_as_vi(kind):
    model, y = model_of(kind), DATA[kind]
    sparse = pg.fit(model, pg.SVGP(**EVERY_ROW, max_steps=200), 0, X, y=y).loo()
    left_out, kept, _ = by_cavities(pg.fit(model, METHODS["vi"], 0, X, y=y))
    np.testing.assert_allclose(sparse.elpd_i.values, left_out, atol=1e-6)
    assert sparse.p == pytest.approx(np.sum(kept - left_out), abs=1e-5)


@pytest.mark.slow
def test_a_sparse_fit_leaves_out_weighed_and_masked_rows_and_effects_as_vi():
    def model(X, groups, seen, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.8), X))
        with numpyro.plate("groups", 3):
            u = numpyro.sample("u", dist.Normal(0.0, 0.7))
        weights = jnp.linspace(0.5, 2.0, X.shape[0])
        with numpyro.plate("data", X.shape[0]), numpyro.handlers.scale(scale=weights):
            with numpyro.handlers.mask(mask=seen):
                numpyro.sample("y", dist.Poisson(jnp.exp(f + u[groups])), obs=y)

    data = (X, np.arange(N) % 3, np.arange(N) != 4)
    methods = (pg.SVGP(**EVERY_ROW, max_steps=200), METHODS["vi"])
    sparse, dense = (pg.fit(model, m, 0, *data, y=DATA["counts"]) for m in methods)
    sparse, rows = sparse.loo(), np.arange(N) != 4
    np.testing.assert_allclose(sparse.elpd_i.values, by_cavities(dense, True)[0][rows], atol=1e-5)
    assert len(sparse.elpd_i) == N - 1


def test_a_sparse_fit_that_has_not_settled_is_weighed_and_says_so():
    model, y = model_of("counts"), DATA["counts"]
    short = pg.fit(model, pg.SVGP(**EVERY_ROW, max_steps=2), 0, X, y=y, throw=False)
    with pytest.warns(UserWarning, match=r"would move by 0\.\d+ sd.*Raise max_steps"):
        loo = short.loo()
    assert loo.n_samples == 1000  # draws of q


def pairs(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(100.0, 0.8), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(3.0, f, 0.3), obs=y)


PAIRS = np.array([0.0, 1e-4, 5.0, 5.0001]), np.array([0.0, 8.0, 0.0, 0.1])


def test_a_row_without_a_proper_cavity_is_nan_alone():
    """Without the near row of a pair the far one's site, which is negative, outweighs the prior.
    q has no draw where the far row would be: of weights -1.04 with a k-hat of .65 for some -10.
    """
    x, y = PAIRS
    points = {"inducing": x[::2], "train_inducing": False}
    loo = pg.fit(pairs, pg.SVGP(**points, hyper=FIXED), 0, x, y=y, throw=False).loo()
    assert list(np.isnan(loo.elpd_i.values)) == [True, False, False, False] and loo.warning


def test_a_refit_needs_no_proper_cavity():
    x, y = PAIRS
    loo = pg.fit(pairs, METHODS["vi"], 0, x, y=y, throw=False).loo()
    refit = pg.fit(pairs, METHODS["vi"], 0, x[1:], y=y[1:])
    np.testing.assert_allclose(loo.elpd_i.values[0], refit.log_density(x[:1], y[:1])[0], atol=1e-5)
    assert not loo.warning and np.all(np.isfinite(loo.elpd_i.values))


def test_a_datum_that_q_does_not_fit_has_a_large_khat():
    """Laplace of binary rows under a wide prior is far from the posterior, EP's posterior is not;
    of Gaussian noise q is the posterior.
    """

    def wide(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(100.0, 0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    khat = {
        k: pg.fit(wide, METHODS[k], 0, X, y=DATA["binary"]).loo().pareto_k.values
        for k in ("laplace", "ep")
    }
    assert np.max(khat["laplace"]) > 0.7 and np.median(khat["laplace"]) > np.median(khat["ep"])
