"""One unknown a row beside an array: the algebra, the proof, and fits that take it, against the
array written out.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from ppl_gp.numerics.low_rank import Dense, OneAndOthers
from ppl_gp.reading.predictor.parts import FEW_LEVELS, OneEach, entries_seen
from ppl_gp.reading.predictor.prior import loads_of

N, LEVELS = 40, 17


def loads(start, num_others=3, seed=0):
    rng = np.random.default_rng(seed)
    return OneAndOthers(
        jnp.asarray(rng.integers(0, LEVELS, N)),
        jnp.asarray(rng.normal(size=N)),
        jnp.asarray(rng.normal(size=(N, num_others))),
        LEVELS,
        start,
    )


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("start, num_others", [(0, 3), (2, 3), (3, 3), (0, 0)])
@pytest.mark.parametrize("least", [0.0, -0.05])
def test_one_and_others_is_its_array(start, num_others, least):
    """Every question, also where some precisions are negative and where there are no others."""
    rng = np.random.default_rng(1)
    F, U = loads(start, num_others), LEVELS + num_others
    whole, entries = Dense(F.array()), F.array() != 0
    nat2 = jnp.asarray(rng.uniform(least, 2.0, N))
    x, w, z = (jnp.asarray(rng.normal(size=s)) for s in (N, U, (5, U)))
    G, H = F.gram(nat2), whole.gram(nat2)
    covariance = np.linalg.inv(np.eye(U) + F.array().T @ (nat2[:, None] * F.array()))
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)  # noqa: E731
    same(F @ w, whole @ w)
    same(F.pull(x), whole.pull(x))
    same(F.squares(), whole.squares())
    same(G.half_log_det(), H.half_log_det())
    same(G.solve(w), covariance @ w)
    same(G.half().T @ G.half(), covariance)
    same(F.variance(G, nat2), jnp.diagonal(F.array() @ covariance @ F.array().T))
    for ours, theirs in (
        (F.through(G), whole.through(H)),
        (F.scaled(nat2), whole.scaled(nat2)),
        (F.outer(x, w), whole.outer(x, w)),
    ):
        same(ours.array(), np.where(entries, theirs.array(), 0.0))
    root = G.colour(jnp.eye(U))
    same(root.T @ root, covariance)
    assert G.colour(z).shape == z.shape


def test_an_improper_product_is_nan():
    F = loads(0)
    assert np.isnan(F.gram(jnp.full(N, -50.0)).half_log_det())


CARRIED = {
    "gather": lambda u, rest: u[rest["group"]],
    "weighed": lambda u, rest: 2.0 - 3.0 * u[rest["group"]] * rest["x"] / 4.0,
    "some": lambda u, rest: jnp.where(rest["x"] > 0, u[rest["group"]], 0.0),
    "baseline": lambda u, rest: jnp.concatenate([jnp.zeros(1), u])[rest["group"]],
    "two indices": lambda u, rest: jnp.reshape(u, (2, 4))[rest["group"] % 2, rest["group"] // 2],
    "reversed": lambda u, rest: u[::-1][rest["group"]] + rest["x"],
    "absent": lambda u, rest: rest["x"] * 1.0,
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_each_row_sees(name):
    """weight u[index] is the function's slope, for what is proved."""
    rng = np.random.default_rng(2)
    rest = {"group": jnp.asarray(rng.integers(0, 8, 5)), "x": jnp.asarray(rng.normal(size=5))}
    u = jnp.asarray(rng.normal(size=8))
    found = seen(CARRIED[name], u, rest)
    slope = jax.jacobian(CARRIED[name])(u, rest)
    np.testing.assert_allclose(
        np.asarray(found.weight)[:, None] * np.eye(8)[np.asarray(found.index)], slope, atol=1e-14
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda u, rest: rest["table"] @ u,
        lambda u, rest: u[rest["group"]] + u[rest["group"] - 1],
        lambda u, rest: jnp.cumsum(u)[rest["group"]],
        lambda u, rest: jnp.sum(u) + rest["x"],
    ],
    ids=["product", "two", "cumulated", "sum"],
)
def test_what_sees_several_is_not_proved(function):
    rng = np.random.default_rng(3)
    rest = {
        "group": jnp.asarray(rng.integers(1, 8, 5)),
        "x": jnp.asarray(rng.normal(size=5)),
        "table": jnp.asarray(rng.normal(size=(5, 8))),
    }
    assert seen(function, jnp.asarray(rng.normal(size=8)), rest) is None


def seen(function, u, rest) -> OneEach | None:
    return entries_seen(lambda u: function(u, rest), u)


def data(seed=4, num=90):
    rng = np.random.default_rng(seed)
    X, group = rng.normal(size=(num, 2)), rng.integers(0, LEVELS, num)
    level = rng.normal(size=LEVELS)
    y = rng.poisson(np.exp(0.4 + 0.5 * X[:, 0] + 0.6 * level[group]))
    return X, group, np.eye(LEVELS)[group], y


def model(X, group=None, table=None, y=None, noise=None):
    """The same effects looked up, or as a product with a table of zeros and ones."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    with numpyro.plate("groups", LEVELS):
        u = numpyro.sample("u", dist.Normal(level, sd))
    eta = X @ beta + (u[group] if table is None else table @ u)
    with numpyro.plate("data", X.shape[0]):
        shown = dist.Poisson(jnp.exp(eta)) if noise is None else dist.Normal(eta, noise)
        numpyro.sample("y", shown, obs=y)


def evidence(method, sd, X, **kwargs):
    factors = pg.read(model, X, hyper={"sd": sd}, **kwargs)
    return pg.log_evidence(method, factors)[0]


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("method", [pg.Laplace(), pg.EP(), pg.VI()], ids=lambda m: type(m).__name__)
def test_looked_up_effects_are_those_of_a_table(method):
    """Evidence and gradient; the first takes levels, the second columns."""
    X, group, table, y = data()
    assert LEVELS >= FEW_LEVELS
    kinds = [
        type(loads_of(pg.read(model, X, y=y, hyper={"sd": 0.7}, **how).prior))
        for how in ({"group": group}, {"table": table})
    ]
    assert kinds == [OneAndOthers, Dense]
    (a, slope_a), (b, slope_b) = (
        jax.value_and_grad(lambda s, how=how: evidence(method, s, X=X, y=y, **how))(0.7)
        for how in ({"group": group}, {"table": table})
    )
    np.testing.assert_allclose(a, b, rtol=1e-10)
    np.testing.assert_allclose(slope_a, slope_b, rtol=1e-8)


def test_gaussian_effects_by_levels_are_the_dense_formula():
    X, group, table, _ = data()
    y = np.random.default_rng(5).normal(size=len(X))
    K = 4.0 * X @ X.T + np.ones((len(X), len(X))) + 0.49 * table @ table.T
    truth = dist.MultivariateNormal(jnp.zeros(len(X)), K + 0.09 * jnp.eye(len(X))).log_prob(y)
    value = evidence(pg.Laplace(), 0.7, X=X, group=group, y=y, noise=0.3)
    np.testing.assert_allclose(value, truth, rtol=1e-10)


@pytest.mark.slow
def test_answers_by_levels_are_those_of_a_table():
    """Predictions, effects, terms and draws at new rows, a single one included."""
    X, group, table, y = data()
    fits = [
        pg.fit(model, pg.Laplace(hyper=pg.Fixed({"sd": 0.7})), 0, X, y=y, **how)
        for how in ({"group": group}, {"table": table})
    ]
    for num in (7, 1):
        new = [{"group": group[:num]}, {"table": table[:num]}]
        p, q = (f.predict(X[:num] + 0.1, **k) for f, k in zip(fits, new, strict=True))
        np.testing.assert_allclose(p.f_mean, q.f_mean, rtol=1e-9)
        np.testing.assert_allclose(p.f_variance, q.f_variance, rtol=1e-9)
        p, q = (f.components(X[:num] + 0.1, **k) for f, k in zip(fits, new, strict=True))
        for term in ("beta", "level", "u", "total"):
            np.testing.assert_allclose(p[term].mean, q[term].mean, rtol=1e-8, atol=1e-10)
            np.testing.assert_allclose(p[term].variance, q[term].variance, rtol=1e-8, atol=1e-12)
    for site in ("u", "beta", "level"):
        p, q = (f.sites[site] for f in fits)
        np.testing.assert_allclose(p.mean, q.mean, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(p.variance, q.variance, rtol=1e-8)


# --- columns whose prior is far wider than all else
# -----------------------------------------------------------------------------


def linear(X, wide, kind, y=None):
    """Coefficients alone: kind 0 Gaussian rows, 1 Bernoulli, 2 Poisson."""
    beta = numpyro.sample("beta", dist.Normal(0.0, wide).to_event(1))
    _rows(X @ beta, kind, y)


def beside_a_gp(X, wide, kind, y=None):
    """Coefficients and f."""
    beta = numpyro.sample("beta", dist.Normal(0.0, wide).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X[:, 1]))
    _rows(X @ beta + f, kind, y)


def _rows(eta, kind, y):
    with numpyro.plate("data", eta.shape[0]):
        if kind == 0:
            numpyro.sample("y", dist.Normal(eta, 0.3), obs=y)
        elif kind == 1:
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)
        else:
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def _data(kind):
    rng = np.random.default_rng(4)
    X = np.stack([np.ones(30), rng.normal(size=30), rng.normal(size=30)], 1)
    eta = X @ [0.3, 0.8, -0.5]
    y = [eta + 0.3 * rng.normal(size=30), rng.uniform(size=30) < 1 / (1 + np.exp(-eta))]
    return X, np.asarray([*y, rng.poisson(np.exp(eta))][kind], float)


@pytest.mark.one_case
@pytest.mark.parametrize("kind", [0, 2, 1], ids=["gaussian", "poisson", "bernoulli"])
@pytest.mark.parametrize("method", [pg.Laplace, pg.EP, pg.VI])
def test_a_column_of_any_scale_gives_the_answer_of_the_scaled_one(method, kind):
    """Vague priors and a column of another unit are the same model as a narrower prior of that
    column in its own.
    """
    X, y = _data(kind)
    method = method(hyper=pg.Fixed({}))
    for unit in (1e-4, 1.0, 1e4, 1e6):
        scale = np.array([1.0, unit, 1.0])
        raw = pg.fit(linear, method, 0, X * scale, np.full(3, 100.0), kind, y=y)
        scaled = pg.fit(linear, method, 0, X, 100.0 * scale, kind, y=y)
        assert abs(raw.log_evidence - scaled.log_evidence) < 1e-6
        a, b = raw.sites["beta"], scaled.sites["beta"]
        np.testing.assert_allclose(a.mean * scale, b.mean, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(a.variance * scale**2, b.variance, rtol=1e-6)


def _woodbury(X, wide, y):
    """(log evidence, E[beta]) of Gaussian rows with f, by a QR factorisation."""
    C = np.exp(-0.5 * (X[:, None, 1] - X[:, 1]) ** 2) + (0.09 + 1e-8) * np.eye(30)
    L = np.linalg.cholesky(C)
    A, white = np.linalg.solve(L, X * wide), np.linalg.solve(L, y)
    Q, R = np.linalg.qr(np.concatenate([A, np.eye(3)]))
    z = Q.T @ np.concatenate([white, np.zeros(3)])
    half = np.sum(np.log(np.diag(L))) + np.sum(np.log(np.abs(np.diag(R))))
    value = -0.5 * (white @ white - z @ z) - half - 15.0 * np.log(2.0 * np.pi)
    return value, np.linalg.solve(R, z) * wide


def test_columns_beside_a_gp_keep_its_digits():
    """K as one array lost the digits of f: evidences off by 4e-4 at 1e4, NaN beyond."""
    X, y = _data(0)
    method = pg.Laplace(hyper=pg.Fixed({}))
    for wide in (1.0, 1e2, 1e4, 1e6):
        prior = np.array([10.0, wide, 10.0])
        fit = pg.fit(beside_a_gp, method, 0, X, prior, 0, y=y, throw=False)
        value, mean = _woodbury(X, prior, y)
        assert abs(fit.log_evidence - value) < 1e-6
        if wide < 1e4:
            assert fit.result == "converged"
            np.testing.assert_allclose(fit.sites["beta"].mean, mean, rtol=1e-6)
    # predictions take the array: none without digits, and the column is named
    assert fit.result == "nonfinite"
    assert "unknown 1 of 'beta'" in fit.stats["caution"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [1, 2], ids=["bernoulli", "poisson"])
@pytest.mark.parametrize("method", [pg.Laplace, pg.EP, pg.VI])
def test_columns_beside_a_gp_only_shift_the_evidence(method, kind):
    """Once a prior is vague, ten times its sd is log 10 nats less."""
    X, y = _data(kind)
    values = []
    for wide in (1e3, 1e4, 1e5):
        prior = np.array([10.0, wide, 10.0])
        fit = pg.fit(beside_a_gp, method(hyper=pg.Fixed({})), 0, X, prior, kind, y=y, throw=False)
        values.append(fit.log_evidence)
    np.testing.assert_allclose(np.diff(values), -np.log(10.0), atol=2e-5)


def vague_binomial(X, trials, y=None):
    """Effects of each row with an unknown spread, and vague coefficients."""
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, 1e3).expand([4]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        u = numpyro.sample("u", dist.Normal(0.0, tau))
        numpyro.sample("y", dist.Binomial(trials, logits=X @ beta + u), obs=y)


SEEDS = [10, 23, 23, 26, 17, 5, 53, 55, 32, 46, 10, 8, 10, 8, 23, 0, 3, 22, 15, 32, 3]
TRIALS = [39, 62, 81, 51, 39, 6, 74, 72, 51, 79, 13, 16, 30, 28, 45, 4, 12, 41, 30, 51, 7]


@pytest.mark.slow
def test_vague_priors_of_the_seeds():
    """Crowder's seeds (BUGS examples, volume 1): Newton's method stalled at tau of .9 and 1, and a
    search that began there had no first value. log p(y | tau) by dense algebra at sd 1e3.
    """
    first, second = np.repeat([0.0, 1.0], [11, 10]), np.repeat([0.0, 1.0, 0.0, 1.0], [5, 6, 5, 5])
    X = np.stack([np.ones(21), first, second, first * second], 1)
    args, y = (X, np.asarray(TRIALS, float)), np.asarray(SEEDS, float)
    for tau in (0.3, 0.9, 1.0):
        fit = pg.fit(vague_binomial, pg.Laplace(hyper=pg.Fixed({"tau": tau})), 0, *args, y=y)
        assert abs(fit.log_evidence - _of_the_seeds(X, args[1], y, tau)) < 1e-6
    fit = pg.fit(vague_binomial, pg.Laplace(), 0, *args, y=y)
    assert fit.result == "converged" and abs(float(fit.hyper["tau"]) - 0.3092) < 1e-3


def _of_the_seeds(X, trials, y, tau):
    """Laplace's evidence in the coordinates of the unknowns, with priors of precision 1."""
    F = np.concatenate([1e3 * X, tau * np.eye(21)], 1)
    w = np.linalg.lstsq(1e3 * X, np.log((y + 0.5) / (trials - y + 0.5)), rcond=None)[0]
    w = np.concatenate([w, np.zeros(21)])
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-F @ w))
        Q, R = np.linalg.qr(
            np.concatenate([np.sqrt(trials * p * (1 - p))[:, None] * F, np.eye(25)])
        )
        w = w + np.linalg.solve(R, np.linalg.solve(R.T, F.T @ (y - trials * p) - w))
    log_p = dist.Binomial(trials, logits=jnp.asarray(F @ w)).log_prob(y)
    return float(jnp.sum(log_p)) - 0.5 * w @ w - np.sum(np.log(np.abs(np.diag(R))))
