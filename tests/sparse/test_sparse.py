"""SVGP against what it must equal: full VI where Z = X, exact regression, the collapsed bound,
other parameterisations.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import small_fits

import ppl_gp as pg
from ppl_gp.deep.bound import terms
from ppl_gp.deep.structure import Structure
from ppl_gp.local.method import log_evidence
from ppl_gp.numerics.linalg import add_diagonal
from ppl_gp.reading.dependence import degree
from ppl_gp.reading.factors import read
from ppl_gp.sparse.bound import Batch, Variational, collapsed
from ppl_gp.sparse.expectation import Expectation
from ppl_gp.sparse.families import (
    DiagonalGaussian,
    DiagonalRoot,
    FullGaussian,
    NaturalGaussian,
    dense_root,
)
from ppl_gp.sparse.inducing import Points, greedy, select
from ppl_gp.sparse.process import explained

FIXED = pg.Fixed(small_fits.HYPER)
OF = Structure(("f",), (), (), (), ("f",))  # one GP at given inputs
HELD = {"hyper": FIXED, "train_inducing": False}


def noisy(X, y=None):
    """Matern52 regression, unit variance, length scale and noise variance: GPflow's defaults."""
    f = numpyro.sample("f", pg.GP(pg.kernels.Matern52(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 1.0), obs=y)


def regression(X, y=None):
    """RBF regression with three hyperparameters and a linear mean."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample(
        "f",
        pg.GP(
            pg.kernels.RBF(variance, lengthscale), X, pg.means.Linear(jnp.array([0.5, 0.0])), 1e-6
        ),
    )
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def batch_of(X, y):
    return Batch((jnp.asarray(X),), {"y": jnp.asarray(y)}, jnp.ones(len(X)), jax.random.key(0))


@functools.cache
def data():
    X, y, X_new = small_fits.classification()
    return jnp.asarray(X), jnp.asarray(y), jnp.asarray(X_new)


@functools.cache
def on_all_points():
    """SVGP with Z = X, and VI, at the same hyperparameters."""
    X, y, _ = data()
    sparse = pg.fit(
        small_fits.classifier,
        pg.SVGP(inducing=X, expectation=pg.Expectation(num_nodes=64), tol=1e-9, **HELD),
        0,
        X,
        y=y,
    )
    return sparse, pg.fit(small_fits.classifier, pg.VI(hyper=FIXED), 0, X, y=y)


@pytest.mark.slow
def test_inducing_points_at_all_inputs_give_full_variational_inference():
    (sparse, vi), (_, _, X_new) = on_all_points(), data()
    assert sparse.result == vi.result == "converged"
    assert abs(sparse.log_evidence - vi.log_evidence) < 1e-6
    ours, theirs = sparse.predict(X_new), vi.predict(X_new)
    for name in ("f_mean", "f_variance", "probs"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-6)
    joint, exact = sparse.posterior(X_new, joint=True), vi.posterior(X_new, joint=True)
    np.testing.assert_allclose(joint.covariance_matrix, exact.covariance_matrix, atol=1e-6)


@pytest.mark.slow
def test_the_gradient_in_the_hyperparameters_is_that_of_full_variational_inference():
    (sparse, vi), (X, y, _) = on_all_points(), data()
    latent = sparse.latent["f"].draw(0)
    S = add_diagonal(-latent.reduction, 1.0)
    q = FullGaussian(latent.mean, jnp.linalg.cholesky(S))

    def bound(hyper):
        inducing = Variational({"f": latent.inducing}, {"f": q})
        batch, model = batch_of(X, y), small_fits.classifier
        return terms(model, Expectation(64), pg.Layers(), OF, hyper, inducing, batch).bound

    def full(hyper):
        factors = read(small_fits.classifier, X, y=y, hyper=hyper)
        return log_evidence(pg.VI(), factors)[0]

    ours, theirs = jax.jit(jax.grad(bound))(vi.hyper), jax.jit(jax.grad(full))(vi.hyper)
    for name in theirs:
        assert abs(ours[name] - theirs[name]) < 1e-5 * (1 + abs(theirs[name])), name


@pytest.mark.slow
def test_one_natural_step_turns_the_prior_into_exact_regression():
    """The numbers of GPflow's documentation, notebook `natural_gradients`: -426.9017 before the
    step, -139.5641 after.
    """
    np.random.seed(0)
    X = np.random.uniform(size=(100, 2))
    y = np.sin(10 * X[:, 0]) + 5 * X[:, 1] ** 2
    fit = pg.fit(noisy, pg.SVGP(inducing=X, train_inducing=False, max_steps=20), 0, X, y=y)
    np.testing.assert_allclose(
        fit.stats["bounds"][:3], [-426.9017, -139.5641, -139.5641], atol=2e-4
    )
    K = np.asarray(pg.kernels.Matern52(1.0, 1.0)(X, X))
    C = K + np.eye(100)
    exact = (
        -0.5 * y @ np.linalg.solve(C, y) - 0.5 * np.linalg.slogdet(C)[1] - 50 * np.log(2 * np.pi)
    )
    assert abs(fit.log_evidence - exact) < 1e-5
    np.testing.assert_allclose(
        fit.predict(X[:5]).f_mean, (K @ np.linalg.solve(C, y))[:5], atol=1e-5
    )


@functools.cache
def gaussian():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(60, 2))
    return X, np.sin(2 * X[:, 0]) + 0.5 * X[:, 0] + 0.2 * rng.normal(size=60)


@pytest.mark.slow
def test_one_natural_step_is_the_collapsed_optimum():
    X, y = gaussian()
    Z, hyper = X[:12], {"lengthscale": 0.8, "variance": 1.5, "noise": 0.3}
    held = {"inducing": Z, "train_inducing": False, "hyper": pg.Fixed(hyper)}
    by_steps = pg.fit(regression, pg.SVGP(max_steps=20, **held), 0, X, y=y)
    in_closed_form = pg.fit(regression, pg.CollapsedSVGP(**held), 0, X, y=y)
    assert abs(by_steps.stats["bounds"][1] - by_steps.stats["bounds"][-1]) < 1e-8
    assert abs(by_steps.log_evidence - in_closed_form.log_evidence) < 1e-8
    # Titsias (2009, eq. 9): log N(y | m, Q + noise^2 I) - tr(K - Q) / (2 noise^2).
    K = np.asarray(pg.kernels.RBF(1.5, 0.8)(X, X)) + 1e-6 * np.eye(60)
    Kuf, Kuu = np.asarray(pg.kernels.RBF(1.5, 0.8)(Z, X)), K[:12, :12]
    Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    r, C = y - 0.5 * X[:, 0], Q + 0.09 * np.eye(60)
    titsias = (
        -0.5 * r @ np.linalg.solve(C, r) - 0.5 * np.linalg.slogdet(C)[1] - 30 * np.log(2 * np.pi)
    )
    titsias -= np.trace(K - Q) / (2 * 0.09)
    assert abs(in_closed_form.log_evidence - titsias) < 1e-6


def test_the_collapsed_bound_has_the_right_gradient():
    X, y = gaussian()

    def bound(theta):
        hyper = {
            "lengthscale": jnp.exp(theta[0]),
            "variance": jnp.exp(theta[1]),
            "noise": jnp.exp(theta[2]),
        }
        variables = {"f": Points(jnp.asarray(X[:12]) + theta[3])}
        return collapsed(regression, hyper, variables, batch_of(X, y)).bound

    theta = jnp.array([0.1, 0.3, -1.0, 0.02])
    value, gradient = jax.jit(bound), jax.jit(jax.grad(bound))(theta)
    for i in range(4):
        step = 1e-5 * jnp.eye(4)[i]
        numeric = (value(theta + step) - value(theta - step)) / 2e-5
        assert abs(numeric - gradient[i]) < 1e-5 * (1 + abs(gradient[i])), i


@pytest.mark.slow
def test_the_collapsed_climb_reaches_a_stationary_point_and_the_stochastic_run_does_not_pass_it():
    X, y = gaussian()
    climbed = pg.fit(regression, pg.CollapsedSVGP(num_inducing=15), 0, X, y=y)
    trained = pg.fit(regression, pg.SVGP(num_inducing=15, max_steps=400), 0, X, y=y)
    exact = pg.fit(regression, pg.Laplace(hyper=pg.Fixed(climbed.hyper)), 0, X, y=y)
    assert climbed.result == "converged" and trained.result in ("converged", "completed")
    assert climbed.log_evidence < exact.log_evidence + 1e-8
    assert trained.stats["bounds"][-1] < climbed.stats["bounds"][-1] + 1e-6
    assert trained.stats["bounds"][-1] > climbed.stats["bounds"][-1] - 1.0


def test_collapsed_refuses_what_it_cannot_do():
    X, y, _ = data()
    with pytest.raises(pg.ModelError, match="not Gaussian"):
        pg.fit(small_fits.classifier, pg.CollapsedSVGP(), 0, X, y=y)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"training": pg.Training(natural=False)}], ids=["adam"])
def test_parameterisations_reach_the_same_optimum(options):
    X, y, X_new = data()
    common = {"inducing": X[:10], "learning_rate": 0.02, "max_steps": 3000}
    natural = pg.fit(small_fits.classifier, pg.SVGP(inducing=X[:10], **HELD), 0, X, y=y)
    other = pg.fit(small_fits.classifier, pg.SVGP(**common, **HELD, **options), 0, X, y=y)
    gain = other.log_evidence - natural.log_evidence
    assert abs(gain) < 1e-4
    np.testing.assert_allclose(
        other.predict(X_new).f_mean, natural.predict(X_new).f_mean, atol=2e-2
    )


@pytest.mark.slow
def test_a_diagonal_covariance_is_a_looser_bound():
    X, y, _ = data()
    full = pg.fit(small_fits.classifier, pg.SVGP(inducing=X[:10], **HELD), 0, X, y=y)
    diagonal = pg.SVGP(
        inducing=X[:10],
        training=pg.Training(covariance="diagonal"),
        learning_rate=0.1,
        max_steps=1000,
        **HELD,
    )
    assert (
        pg.fit(small_fits.classifier, diagonal, 0, X, y=y).log_evidence < full.log_evidence - 0.01
    )


@pytest.mark.slow
def test_more_inducing_points_never_loosen_the_bound():
    X, y, _ = data()
    bounds = [
        pg.fit(small_fits.classifier, pg.SVGP(inducing=X[:m], **HELD), 0, X, y=y).log_evidence
        for m in (3, 9, 25)
    ]
    assert bounds[0] < bounds[1] < bounds[2] <= on_all_points()[1].log_evidence + 1e-6


def _families(M):
    rng = np.random.default_rng(0)
    loc, raw = (
        jnp.asarray(rng.normal(size=M)),
        jnp.asarray(np.tril(rng.normal(size=(M, M))) + 2 * np.eye(M)),
    )
    return loc, raw


def test_every_family_says_the_same_of_one_distribution():
    loc, L = _families(6)
    S = L @ L.T
    whitened = FullGaussian(loc, L).whitened()
    nat2 = jnp.linalg.inv(S) - jnp.eye(6)
    sites = NaturalGaussian(jnp.linalg.solve(S, loc), nat2).whitened()
    kl = 0.5 * (jnp.trace(S) + loc @ loc - 6 - jnp.linalg.slogdet(S)[1])
    for q in (whitened, sites):
        np.testing.assert_allclose(q.mean, loc, atol=1e-8)
        np.testing.assert_allclose(q.reduction, np.eye(6) - S, atol=1e-8)
        assert abs(q.kl - kl) < 1e-8
    diagonal = DiagonalGaussian(loc, jnp.zeros(6)).whitened()
    assert abs(diagonal.kl - 0.5 * loc @ loc) < 1e-12 and not diagonal.reduction.any()


def test_the_reverse_rules_are_the_derivatives_of_the_plain_formulas():
    rng = np.random.default_rng(2)
    M, B = 7, 11
    H, C = jnp.asarray(rng.normal(size=(M, M))), jnp.asarray(rng.normal(size=(M, B)))
    loc, L = _families(M)
    w1, w2 = jnp.asarray(rng.normal(size=B)), jnp.asarray(rng.normal(size=B))

    def fast(H, C, loc, L):
        root = dense_root(H @ H.T + jnp.eye(M), jnp.asarray(1e-8))
        mean, square = explained(root, C, loc, jnp.eye(M) - L @ L.T)
        return (
            w1 @ mean + w2 @ square + jnp.sum(jnp.sin(root.whiten(C))) + jnp.sum(root.color(C) ** 3)
        )

    def plain(H, C, loc, L):
        R = jnp.linalg.cholesky(H @ H.T + jnp.eye(M))
        A = jax.scipy.linalg.solve_triangular(R, C, lower=True)
        square = jnp.sum(A**2, 0) - jnp.sum((L.T @ A) ** 2, 0)
        return w1 @ (loc @ A) + w2 @ square + jnp.sum(jnp.sin(A)) + jnp.sum((R @ C) ** 3)

    assert abs(fast(H, C, loc, L) - plain(H, C, loc, L)) < 1e-9
    for ours, theirs in zip(
        *(jax.grad(f, (0, 1, 2, 3))(H, C, loc, L) for f in (fast, plain)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("order", ["gradients of each", "gradient of their sum"])
def test_the_reverse_rule_of_a_root_takes_a_batch_of_covariances(order):
    """Of draws of the hyperparameters, as bounds under an autoguide have them."""
    rng = np.random.default_rng(7)
    H, C = jnp.asarray(rng.normal(size=(3, 5, 5))), jnp.asarray(rng.normal(size=(5, 4)))

    def value(H):
        root = dense_root(H @ H.T + jnp.eye(5), jnp.asarray(1e-8))
        return jnp.sum(jnp.sin(explained(root, C, jnp.ones(5), 0.5 * jnp.eye(5))[1])) + jnp.sum(
            root.color(C) ** 3
        )

    batched = (
        jax.vmap(jax.grad(value))
        if order == "gradients of each"
        else jax.grad(lambda H: jax.vmap(value)(H).sum())
    )
    np.testing.assert_allclose(
        batched(H), jnp.stack([jax.grad(value)(h) for h in H]), rtol=1e-10, atol=1e-10
    )


def test_other_roots_and_several_functions_share_the_projection():
    rng = np.random.default_rng(3)
    variance, C = jnp.asarray(rng.uniform(0.5, 2.0, size=5)), jnp.asarray(rng.normal(size=(5, 8)))
    loc, L = jnp.asarray(rng.normal(size=(3, 5))), jnp.asarray(rng.normal(size=(3, 5, 5)))
    P = jnp.eye(5) - L @ jnp.swapaxes(L, 1, 2)
    dense = explained(dense_root(jnp.diag(variance), jnp.asarray(1e-8)), C, loc, P)
    diagonal = explained(DiagonalRoot(variance), C, loc, P)
    for a, b in zip(dense, diagonal, strict=True):
        assert a.shape == (3, 8)
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_greedy_selection_is_pivoted_cholesky_and_stops_where_nothing_is_left():
    rng = np.random.default_rng(4)
    X = rng.uniform(-3, 3, size=(80, 1))
    prior = pg.GP(pg.kernels.RBF(1.0, 1.0), X)
    rows, variance = greedy(prior, 6)
    K = np.asarray(prior.covariance_matrix)
    for i in range(1, 6):
        chosen = np.asarray(rows[:i])
        left = np.diag(K) - np.sum(
            K[:, chosen] * np.linalg.solve(K[np.ix_(chosen, chosen)], K[chosen]).T, 1
        )
        assert rows[i] == np.argmax(left) and abs(variance[i] - left.max()) < 1e-6
    few = select("greedy", prior, X, 70, seed=0, tol=1e-4)
    assert 6 < len(few) < 25


@pytest.mark.parametrize("rule", ["greedy", "kmeans", "subset", "farthest"])
def test_selections_have_distinct_rows_of_the_right_shape(rule):
    X = np.repeat(np.random.default_rng(5).normal(size=(30, 2)), 3, axis=0)
    prior = pg.GP(pg.kernels.RBF(1.0, 1.0), X)
    Z = select(rule, prior, X, 12, seed=0)
    assert Z.shape == (12, 2) and len(np.unique(Z, axis=0)) == 12
    assert len(select(rule, prior, X, 500, seed=0)) == 30


def unit_regression(X, y=None, scale=None):
    """Noise 0.5, unit RBF; the GP's KL weighed by `scale`."""
    with numpyro.handlers.scale(scale=1.0 if scale is None else scale):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def unseen_latent(X, y=None):
    """The same with a latent that nothing sees: the code of layers, and the same q(f)."""
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("h", dist.Normal())
    unit_regression(X, y)


WEIGHED = pg.Layers(beta=4.0)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "model, options, kwargs",
    [
        (unit_regression, {"layers": WEIGHED}, {}),
        (unit_regression, {}, {"scale": 4.0}),
        (
            unit_regression,
            {
                "layers": WEIGHED,
                "training": pg.Training(natural=False),
                "learning_rate": 0.1,
                "max_steps": 600,
            },
            {},
        ),
        (unseen_latent, {"layers": WEIGHED, "training": pg.Training(natural_rate=1.0)}, {}),
    ],
    ids=["natural", "handler", "adam", "layers"],
)
def test_the_weight_of_the_divergence_tempers_the_likelihood(model, options, kwargs):
    """E[log p(y | f)] - 4 KL is maximal at the posterior of noise variance 4 x 0.25; `log_evidence`
    is the ELBO there.
    """
    X, y = gaussian()[0][:16, :1], gaussian()[1][:16]
    K = np.asarray(pg.kernels.RBF(1.0, 1.0)(X, X))
    gain = np.linalg.solve(K + 1.0 * np.eye(16), K).T
    mean, S = gain @ y, K - gain @ K
    method = pg.SVGP(inducing=X, train_inducing=False, **{"max_steps": 20, **options})
    fit = pg.fit(model, method, 0, X, y=y, **kwargs)
    np.testing.assert_allclose(fit.predict(X).f_mean, mean, atol=2e-3)
    np.testing.assert_allclose(fit.predict(X).f_variance, np.diag(S), atol=2e-3)
    if model is unit_regression:
        # E[log p] / 4 - KL is the log evidence of the likelihood p^(1/4), a normal density of
        # variance 1 times a constant.
        C = K + np.eye(16)
        tempered = (
            -0.5 * y @ np.linalg.solve(C, y)
            - 0.5 * np.linalg.slogdet(C)[1]
            - 2 * np.log(2 * np.pi * 0.25)
        )
        expected = -8 * np.log(2 * np.pi * 0.25) - (np.sum((y - mean) ** 2) + np.trace(S)) / 0.5
        kl = expected / 4.0 - tempered
        assert abs(fit.stats["bounds"][-1] - 4.0 * tempered) < 1e-3
        assert abs(fit.log_evidence - (expected - kwargs.get("scale", 1.0) * kl)) < 0.05


@pytest.mark.parametrize("beta", [0.0, -1.0, np.inf, np.nan])
def test_a_weight_that_no_natural_gradient_can_have(beta):
    with pytest.raises(pg.DataError, match="beta="):
        pg.SVGP(layers=pg.Layers(beta=beta))


def observed_as(likelihood, X, y=None, units=None, size=None):
    """One GP, or `units` of them, observed as told."""
    data = numpyro.plate("data", len(X), subsample_size=size)
    with data as rows:
        X, y = X[rows], y[..., rows]
    if units is None:
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    else:
        with numpyro.plate("units", units):
            f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with data, numpyro.plate("rest", units or 1, dim=-2) if units else data:
        numpyro.sample("y", likelihood(f), obs=y)


def latent_regression(X, y=None):
    with numpyro.plate("data", X.shape[0]):
        h = numpyro.sample("h", dist.Normal())
    unit_regression(jnp.concatenate([X, h[:, None]], 1), y)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "likelihood",
    [
        lambda f: dist.Normal(jnp.minimum(f, 2.0), 0.5),
        lambda f: dist.Normal(jnp.clip(f, -30.0, 30.0), 0.5),
        lambda f: dist.Normal(jnp.where(f > 3.0, 3.0, f), 0.5),
        lambda f: dist.Normal(jnp.round(1e6 * f) / 1e6, 0.5),
        lambda f: dist.StudentT(4.0, f, 0.5),
        lambda f: dist.Normal(f, jnp.exp(f)),
    ],
)
def test_a_likelihood_that_is_nearly_gaussian_has_no_collapsed_bound(likelihood):
    """Kinks far from where anybody looks: the proof is on the program, not at points."""
    X, y = gaussian()
    with pytest.raises(pg.ModelError, match="not Gaussian"):
        pg.fit(functools.partial(observed_as, likelihood), pg.CollapsedSVGP(), 0, X, y=y)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "model, kwargs, words",
    [
        (
            functools.partial(observed_as, lambda f: dist.Normal(f, 0.5), size=20),
            {},
            "plate 'data' subsamples",
        ),
        (
            functools.partial(observed_as, lambda f: dist.Normal(f, 0.5), units=2),
            {},
            r"'f': \(2, 60\)",
        ),
        (latent_regression, {}, r"latents \['h'\]"),
        (unit_regression, {"scale": 4.0}, "handlers.scale"),
    ],
)
def test_the_collapsed_bound_is_of_one_function_and_all_data(model, kwargs, words):
    X, y = gaussian()
    y = np.stack([y, -y]) if "units" in getattr(model, "keywords", {}) else y
    with pytest.raises(pg.ModelError, match=words):
        pg.fit(model, pg.CollapsedSVGP(), 0, X, y=y, **kwargs)


@pytest.mark.parametrize(
    "function, found",
    [
        (
            lambda f: (
                -0.5 * ((f[::-1] - 1.0) / 3.0) ** 2 + jnp.where(jnp.arange(3) > 1, f, 2.0 * f)
            ),
            2,
        ),
        (lambda f: jnp.power(f, 3.0) * f, 4),
        (lambda f: jax.jit(lambda g: g * g)(f) @ jnp.ones(3), 2),
        (lambda f: jax.lax.switch(0, [lambda g: g, lambda g: g**3], f), 3),
        (lambda f: jnp.exp(jnp.ones(3)), 0),
        (lambda f: 1.0 / f, np.inf),
        (lambda f: 2.0**f, np.inf),
        (lambda f: f.astype(int).astype(float), np.inf),
        (lambda f: jnp.ones(3)[f.astype(int)], np.inf),
    ],
)
def test_degrees_of_polynomials(function, found):
    assert degree(function, jnp.ones(3)) == found


@pytest.mark.slow
def test_more_functions_than_cubature_serves_make_an_estimate_that_says_so():
    """Softmax of four classes, all data in a step: the bound is drawn, and never an exact one that
    stopped rising.
    """

    def softmax(X, y=None):
        with numpyro.plate("classes", 4):
            f = numpyro.sample("f", pg.GP(pg.kernels.RBF(2.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

    X = gaussian()[0]
    y = np.digitize(X[:, 0], [-0.7, 0.0, 0.7])
    method = pg.SVGP(inducing=X[:8], train_inducing=False, max_steps=60, hyper=pg.Fixed({}))
    more = dataclasses.replace(method, expectation=pg.Expectation(num_draws=100))
    fit, finer = (pg.fit(softmax, m, 0, X, y=y) for m in (method, more))
    assert (
        fit.result == "completed"
        and fit.stats["failed_steps"] == 0
        and 0.0 < fit.stats["log_evidence_se"] < 1.0
    )
    gap = fit.log_evidence - finer.log_evidence
    assert abs(gap) < 0.5 + 5 * np.hypot(
        fit.stats["log_evidence_se"], finer.stats["log_evidence_se"]
    )
    exact = pg.fit(unit_regression, pg.SVGP(num_inducing=5, max_steps=3), 0, X, y=gaussian()[1])
    assert "log_evidence_se" not in exact.stats
