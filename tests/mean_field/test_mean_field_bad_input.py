"""Mean field at the edges: components without rows, improper priors, labels that are known, nothing
to infer; each right, against a sum over all labels or a closed form, or refused by name.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints
from scipy.special import gammaln, logsumexp, multigammaln

import ppl_gp as pg
from models.mixture import mixture

ROWS = np.random.default_rng(2).normal(size=4)
POSITIVE = dist.ImproperUniform(constraints.positive, (), ())
FLAT = dist.ImproperUniform(constraints.real, (), ())


def normals(x, K=3, labels=None):
    """Components of unit spread, and of means with spread 2."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.full(K, 0.5)))
    with numpyro.plate("components", K):
        m = numpyro.sample("m", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Categorical(weights), obs=labels)
        numpyro.sample("x", dist.Normal(m[z], 1.0), obs=x)


def log_joint(x, z, K):
    """log p(x, z), weights and means integrated: a Dirichlet-multinomial and Gaussians."""
    counts = np.bincount(z, minlength=K)
    found = gammaln(0.5 * K) - gammaln(0.5 * K + len(x)) + np.sum(gammaln(0.5 + counts))
    found -= K * gammaln(0.5)
    for k in range(K):
        own = x[z == k]
        C = np.eye(len(own)) + 4.0
        found -= 0.5 * (np.linalg.slogdet(2 * np.pi * C)[1] + own @ np.linalg.solve(C, own))
    return found


def log_evidence(x, K):
    labels = itertools.product(range(K), repeat=len(x))
    return logsumexp([log_joint(x, np.array(z), K) for z in labels])


@pytest.mark.slow
@pytest.mark.parametrize(("num", "K", "start"), [(4, 3, [0, 0, 0, 0]), (2, 5, None), (1, 2, None)])
def test_components_without_rows_and_fewer_rows_than_components(num, K, start):
    """At most the sum over all labels; what has no rows is as the prior has it."""
    method = pg.MeanField(init={} if start is None else {"z": np.array(start)})
    fit = pg.fit(normals, method, 0, ROWS[:num], K)
    assert fit.result == "converged" and np.all(np.diff(fit.stats["bounds"]) > -1e-10)
    assert fit.log_evidence <= log_evidence(ROWS[:num], K) + 1e-10
    probs = np.asarray(fit.sites["z"].probs)
    np.testing.assert_allclose(probs.sum(-1), 1.0, rtol=1e-12)
    count = probs.sum(0)
    np.testing.assert_allclose(fit.sites["weights"].concentration, 0.5 + count, rtol=1e-4)
    np.testing.assert_allclose(fit.sites["m"].variance, 1.0 / (0.25 + count), rtol=1e-4)


@pytest.mark.slow
def test_labels_that_are_observed_leave_an_exact_fit():
    z = np.array([0, 2, 2, 0])
    fit = pg.fit(normals, pg.MeanField(), 0, ROWS, 3, labels=z)
    assert sorted(map(sorted, fit.factors)) == [["m"], ["weights"]]
    np.testing.assert_allclose(fit.log_evidence, log_joint(ROWS, z, 3), atol=1e-9)
    np.testing.assert_allclose(fit.sites["weights"].concentration, [2.5, 0.5, 2.5], rtol=1e-9)


def flat_precision(y=None):
    tau = numpyro.sample("tau", POSITIVE)
    with numpyro.plate("data", 4):
        numpyro.sample("y", dist.Normal(0.0, 1.0 / jnp.sqrt(tau)), obs=y)


@pytest.mark.slow
def test_a_flat_precision_has_a_gamma_posterior():
    """integral of N(y; 0, 1 / tau) dtau, and Gamma(n / 2 + 1, y.y / 2)."""
    fit = pg.fit(flat_precision, pg.MeanField(), 0, y=ROWS)
    half = 0.5 * ROWS @ ROWS
    exact = -2.0 * np.log(2 * np.pi) + gammaln(3.0) - 3.0 * np.log(half)
    np.testing.assert_allclose(fit.log_evidence, exact, atol=1e-9)
    q = fit.sites["tau"]
    np.testing.assert_allclose([q.concentration, q.rate], [3.0, half], rtol=1e-9)


def flat_precision_matrix(x):
    W = numpyro.sample("W", dist.ImproperUniform(constraints.positive_definite, (), (2, 2)))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(2), precision_matrix=W), obs=x)


@pytest.mark.slow
def test_a_flat_precision_matrix_has_a_wishart_posterior():
    """integral of |W|^(n / 2) exp(-tr(S W) / 2) dW: a Wishart's normaliser (PRML B.79)."""
    x = np.random.default_rng(4).normal(size=(6, 2))
    fit, df = pg.fit(flat_precision_matrix, pg.MeanField(), 0, x), 6.0 + 3.0
    exact = -6.0 * np.log(2 * np.pi) + df * np.log(2.0) + multigammaln(0.5 * df, 2)
    exact -= 0.5 * df * np.linalg.slogdet(x.T @ x)[1]
    np.testing.assert_allclose(fit.log_evidence, exact, atol=1e-9)
    np.testing.assert_allclose(fit.sites["W"].mean, df * np.linalg.inv(x.T @ x), rtol=1e-8)


def no_density(y=None):
    tau = numpyro.sample("tau", dist.Gamma(0.0, 0.0))
    with numpyro.plate("data", 4):
        numpyro.sample("y", dist.Normal(0.0, 1.0 / jnp.sqrt(tau)), obs=y)


def test_a_prior_without_a_density_is_named():
    with pytest.raises(pg.DataError, match="Gamma distribution got invalid.*no_density"):
        pg.fit(no_density, pg.MeanField(), 0, y=ROWS)


def nothing_seen(y=None):
    """Data do not tell of u, whose prior is no distribution: neither is its posterior."""
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    numpyro.sample("u", FLAT)
    with numpyro.plate("data", 4):
        numpyro.sample("y", dist.Normal(m, 1.0), obs=y)


def test_an_improper_posterior_is_no_fit():
    with pytest.raises(pg.PplGpError, match="'u'"):
        pg.fit(nothing_seen, pg.MeanField(), 0, y=ROWS)


def no_groups(y=None):
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", 0):
        numpyro.sample("a", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", 4):
        numpyro.sample("y", dist.Normal(m, 1.0), obs=y)


def test_plates_of_size_zero_are_named():
    with pytest.raises(pg.DataError, match=r"plate .* has size zero \(no_groups"):
        pg.fit(no_groups, pg.MeanField(), 0, y=ROWS)
    with pytest.raises(pg.PplGpError, match=r"size zero|shape \(0, 2\)"):
        pg.fit(mixture, pg.MeanField(), 0, np.zeros((0, 2)), num_components=2)
    with pytest.raises(pg.PplGpError, match="size zero"):
        pg.fit(mixture, pg.MeanField(), 0, np.ones((3, 2)), num_components=0)


def repeats(x, labels_dim):
    """Two repeats a row, whose label's plate stands to the left or to the right of theirs."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("components", 2):
        m = numpyro.sample("m", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", 4, dim=labels_dim):
        z = numpyro.sample("z", dist.Categorical(weights))
        with numpyro.plate("repeats", 2, dim=-3 - labels_dim):
            numpyro.sample("x", dist.Normal(m[z], 1.0), obs=x)


def test_a_label_to_the_left_of_other_plates_is_told_where_to_stand():
    with pytest.raises(pg.NotConjugateError, match="to the right of its plate. Give .* dim=-1"):
        pg.fit(repeats, pg.MeanField(), 0, np.ones((4, 2)), -2)


@pytest.mark.slow
def test_a_label_in_the_last_plate_is_seen_by_all_repeats():
    x = np.stack([ROWS, ROWS + 0.1])
    fit = pg.fit(repeats, pg.MeanField(max_steps=3000), 0, x, -1)
    exact = logsumexp(
        [
            log_joint_of_repeats(x, np.array(z))
            for z in itertools.product(range(2), repeat=len(ROWS))
        ]
    )
    assert exact - 2.0 < fit.log_evidence < exact


def log_joint_of_repeats(x, z):
    counts = np.bincount(z, minlength=2)
    found = gammaln(2.0) - gammaln(2.0 + len(z)) + np.sum(gammaln(1.0 + counts))
    for k in range(2):
        own = x[:, z == k].ravel()
        C = np.eye(len(own)) + 4.0
        found -= 0.5 * own @ np.linalg.solve(C, own)
        found -= 0.5 * np.linalg.slogdet(2 * np.pi * C)[1]
    return found
