"""`SVGP` integrates effects beside a GP: one q(u) of inducing variables and effects."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

N, GROUPS = 40, 5


def data():
    rng = np.random.default_rng(0)
    X, W = np.sort(rng.uniform(0, 6, N)), rng.normal(size=(N, 2))
    group = rng.integers(0, GROUPS, N)
    eta = np.sin(X) + W @ [0.5, -0.3] + 0.6 * rng.normal(size=GROUPS)[group]
    return X, W, group, eta, rng


def model(X, W, group, y=None, counts=False):
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(0.2, sd))
    eta = f + W @ beta + u[group]
    with numpyro.plate("data", X.shape[0]):
        shown = dist.Poisson(jnp.exp(eta)) if counts else dist.Normal(eta, 0.3)
        numpyro.sample("y", shown, obs=y)


FIXED = pg.Fixed({"sd": 0.7})


def test_gaussian_noise_and_inducing_points_at_the_data_are_exact():
    """The bound is the evidence, and predictions are those of the dense formula, up to jitter."""
    X, W, group, eta, rng = data()
    y = eta + 0.3 * rng.normal(size=N)
    exact = pg.fit(model, pg.Laplace(hyper=FIXED), 0, X, W, group, y=y)
    method = pg.SVGP(hyper=FIXED, inducing=X, train_inducing=False, max_steps=40)
    sparse = pg.fit(model, method, 0, X, W, group, y=y)
    assert exact.log_evidence - 1e-4 < sparse.log_evidence < exact.log_evidence + 1e-9
    p, q = (f.predict(X[:7] + 0.1, W[:7], group[:7]) for f in (exact, sparse))
    np.testing.assert_allclose(q.f_mean, p.f_mean, atol=1e-6)
    np.testing.assert_allclose(q.f_variance, p.f_variance, atol=1e-6)


def test_a_huge_first_bound_does_not_stall_the_hyperparameters():
    """Under q = p the bound of counts is -1e6 or so, with gradients of the same size."""
    X, W, group, eta, rng = data()
    y = rng.poisson(np.exp(0.5 * np.sin(X)))  # no groups
    truth = pg.fit(model, pg.VI(), 0, X, W, group, y=y, counts=True)
    method = pg.SVGP(num_inducing=20, train_inducing=False, max_steps=600)
    sparse = pg.fit(model, method, 0, X, W, group, y=y, counts=True)
    assert sparse.stats["bounds"][0] < -1e4
    assert sparse.log_evidence > truth.log_evidence - 0.1
