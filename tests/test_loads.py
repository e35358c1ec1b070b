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
from ppl_gp.model.loadings import FEW_LEVELS
from ppl_gp.model.predictor_prior import loads_of
from ppl_gp.numerics.loads import Dense, OneAndOthers
from ppl_gp.proofs.cut import at_places, flat_shapes
from ppl_gp.proofs.one_each import OneEach

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
    last = len(flat_shapes(function, u, rest)) - 1
    (found,) = at_places(function, u, rest, (last,)).one_each(u, rest, 0)
    return found


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
