"""`SVGP` integrates effects beside several functions a datum: one q(u) for all of them, which are
correlated given the data.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from sparse_targets import targets

import ppl_gp as pg
from ppl_gp.sparse.expectation import Expectation, expected_log_lik

# as many rows as groups, and as inducing points at them
N = GROUPS = 12
# beside values of one: what is left is jitter's
JITTER = 1e-11
HELD = pg.Fixed({"sd": 0.7})


def arguments():
    rng = np.random.default_rng(0)
    X, W = np.sort(rng.uniform(0, 6, N)), rng.normal(size=(N, 2))
    return X, W, rng.integers(0, GROUPS - 1, N), rng  # the last group has no data


def outputs(X, W, group, y=None, relabel=None):
    """Two outputs that share a function and the effects of the groups."""
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.Matern32(1.0, 1.0), X, jitter=JITTER))
    h = numpyro.sample("h", pg.GP(pg.kernels.Matern12(0.7, 1.5), X, jitter=JITTER))
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(0.2, sd))
    seen = u[group if relabel is None else relabel[group]]
    both = jnp.stack([f + W @ beta + seen, 0.5 * f - h + 0.3 * seen], -1)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(both, 0.3).to_event(1), obs=y)


def at_the_data(X, **more):
    return pg.SVGP(hyper=HELD, inducing=X, train_inducing=False, max_steps=30, **more)


@pytest.fixture(scope="module")
def fits():
    """(by Laplace, which is the dense formula; by SVGP with inducing points at the data)."""
    X, W, group, rng = arguments()
    y = rng.normal(size=(N, 2)) + np.sin(X)[:, None]
    exact = pg.fit(outputs, pg.Laplace(hyper=HELD), 0, X, W, group, y=y)
    return exact, pg.fit(outputs, at_the_data(X), 0, X, W, group, y=y), y


@pytest.mark.slow
def test_the_bound_and_predictions_are_those_of_the_dense_formula(fits):
    exact, sparse, y = fits
    X, W, group, _ = arguments()
    assert exact.log_evidence - 1e-6 < sparse.log_evidence < exact.log_evidence + 1e-9
    new = (X[:5] + 0.1, W[:5], group[:5])
    p, q = (f.predict(*new) for f in (exact, sparse))
    for name in ("f_mean", "f_variance", "mean", "variance"):
        np.testing.assert_allclose(getattr(q, name), getattr(p, name), atol=1e-6, err_msg=name)
    p, q = (f.log_density(new[0], y[:5], *new[1:]) for f in (exact, sparse))
    np.testing.assert_allclose(q, p, atol=1e-6)


@pytest.mark.slow
def test_answers_by_part_are_those_of_the_dense_formula(fits):
    exact, sparse, _ = fits
    X, W, group, _ = arguments()
    pairs = [(exact.sites[k], sparse.sites[k]) for k in ("beta", "u")]
    here, there = (f.components(X[:5] + 0.1, W[:5], group[:5]) for f in (exact, sparse))
    assert set(here) == set(there) == {"f", "h", "beta", "u", "total"}
    assert there["f"].mean.shape == (2, 5)
    pairs += [(here[k], there[k]) for k in here]
    pairs += [(exact.posterior[k](X[:5] + 0.1), sparse.posterior[k](X[:5] + 0.1)) for k in "fh"]
    for p, q in pairs:
        np.testing.assert_allclose(q.mean, p.mean, atol=1e-6)
        np.testing.assert_allclose(q.variance, p.variance, atol=1e-6)


@pytest.mark.slow
def test_the_functions_of_a_row_are_correlated_as_by_the_dense_formula(fits):
    exact, sparse, _ = fits
    X, W, group, _ = arguments()
    new = sparse.process.prior
    for found, known in zip(sparse.process.within(new), exact.process.within(new), strict=True):
        np.testing.assert_allclose(found, known, atol=1e-6)
    p, q = (f.process(new, joint=True) for f in (exact, sparse))
    np.testing.assert_allclose(q.mean, p.mean, atol=1e-6)
    np.testing.assert_allclose(q.covariance_matrix, p.covariance_matrix, atol=1e-6)


@pytest.mark.slow
def test_a_group_without_data_has_its_prior(fits):
    u = fits[1].sites["u"]
    np.testing.assert_allclose([u.mean[-1], u.variance[-1]], [0.2, 0.49], atol=1e-9)


@pytest.mark.slow
def test_a_saved_fit_answers_as_before(fits, tmp_path):
    X, W, group, _ = arguments()
    back = pg.load(fits[1].save(tmp_path / "fit.zip"), outputs)
    new = (X[:5] + 0.1, W[:5], group[:5])
    p, q = fits[1].components(*new), back.components(*new)
    np.testing.assert_allclose(q["total"].variance, p["total"].variance, atol=1e-12)
    np.testing.assert_allclose(back.predict(*new).f_mean, fits[1].predict(*new).f_mean, atol=1e-12)


@pytest.mark.slow
def test_draws_of_the_tree_have_the_moments_of_the_parts(fits):
    """Within five standard errors of 4000 draws."""
    tree = fits[1].to_datatree(num_draws=4000).posterior
    u, sites = np.asarray(tree["u"])[0], fits[1].sites["u"]
    sd = np.sqrt(sites.variance)
    np.testing.assert_allclose(u.mean(0), sites.mean, atol=5 * np.max(sd) / np.sqrt(4000))
    np.testing.assert_allclose(u.std(0), sd, rtol=5 / np.sqrt(8000))
    assert tree["eta"].shape == (1, 4000, 2, N)


@pytest.mark.slow
def test_natural_gradients_of_minibatches_average_to_that_of_all_data():
    X, W, group, rng = arguments()
    y = rng.normal(size=(N, 2))
    method = at_the_data(X, batch_size=4)
    whole, parts = targets(method, outputs, (X, W, group), 4, y=y)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-9)


@pytest.mark.slow
def test_minibatches_and_the_order_of_groups_do_not_matter():
    """Steps on two rows of twelve, at rates that go to zero, end near all data's; the numbers that
    groups have are names.
    """
    X, W, group, rng = arguments()
    y = rng.normal(size=(N, 2)) + np.sin(X)[:, None]
    whole = pg.fit(outputs, at_the_data(X), 0, X, W, group, y=y)
    order = rng.permutation(GROUPS)
    other = pg.fit(outputs, at_the_data(X), 0, X, W, group, y=y, relabel=order)
    np.testing.assert_allclose(other.log_evidence, whole.log_evidence, atol=1e-8)
    np.testing.assert_allclose(other.sites["u"].mean[order], whole.sites["u"].mean, atol=1e-6)
    schedule = lambda step: 1.0 / (10.0 + 0.2 * step)  # noqa: E731
    part = pg.SVGP(
        hyper=HELD, inducing=X, train_inducing=False, max_steps=4000, batch_size=4,
        training=pg.Training(natural_rate=schedule),
    )  # fmt: skip
    fit = pg.fit(outputs, part, 0, X, W, group, y=y, throw=False)
    sd = np.sqrt(whole.sites["u"].variance)
    assert whole.log_evidence - 0.05 < fit.log_evidence < whole.log_evidence + 1e-9
    np.testing.assert_allclose(fit.sites["u"].mean / sd, whole.sites["u"].mean / sd, atol=0.1)


def classes(X, group, y=None):
    """Three classes, an effect of each group in each."""
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    spread = numpyro.sample("spread", dist.LogNormal(-1.0, 0.3))
    v = numpyro.sample("v", dist.Normal(0.0, spread).expand([3, 4]).to_event(2))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=(f + v[:, group]).T), obs=y)


@pytest.mark.slow
def test_a_softmax_beside_effects_ends_where_variational_inference_does():
    """Both have a full Gaussian over the three scores: the same optimum, up to nodes."""
    X, _, group, rng = arguments()
    group, y = group % 4, rng.integers(0, 3, N)
    held = pg.Fixed({"spread": 0.5})
    vi = pg.fit(classes, pg.VI(hyper=held), 0, X, group, y=y)
    method = pg.SVGP(hyper=held, inducing=X, train_inducing=False, max_steps=60)
    sparse = pg.fit(classes, method, 0, X, group, y=y)
    np.testing.assert_allclose(sparse.log_evidence, vi.log_evidence, atol=2e-3)
    np.testing.assert_allclose(sparse.sites["v"].mean, vi.sites["v"].mean, atol=2e-3)
    np.testing.assert_allclose(sparse.sites["v"].variance, vi.sites["v"].variance, atol=2e-3)
    p, q = (f.predict(X[:4] + 0.1, group[:4]).probs for f in (vi, sparse))
    np.testing.assert_allclose(q, p, atol=1e-3)


def test_expectations_under_correlated_functions_have_their_closed_form():
    """E[a^T f + (b^T f)^2] = a^T m + (b^T m)^2 + b^T C b; terms that see one function each need the
    marginals alone.
    """
    rng = np.random.default_rng(1)
    m, L = rng.normal(size=(2, 5)), rng.normal(size=(5, 2, 2))
    C = np.moveaxis(L @ np.swapaxes(L, 1, 2), 0, -1)
    a, b = rng.normal(size=2), rng.normal(size=2)
    coupled = lambda f: a @ f["eta"] + (b @ f["eta"]) ** 2  # noqa: E731
    apart = lambda f: b**2 @ f["eta"] ** 2  # noqa: E731
    mean, covariance = {"eta": jnp.asarray(m)}, {"eta": jnp.asarray(C)}
    found = expected_log_lik(coupled, mean, covariance, Expectation(), None)
    wanted = a @ m + (b @ m) ** 2 + np.einsum("a,abn,b->n", b, C, b)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    found = expected_log_lik(apart, mean, covariance, Expectation(additive=True), None)
    wanted = b**2 @ (m**2 + np.einsum("aan->an", C))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
