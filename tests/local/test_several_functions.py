"""Models in which a datum sees several functions, under local methods: against dense formulas,
against models of one function, and against stored numbers.
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

import ppl_gp as pg
from ppl_gp.local.method import first_sites
from ppl_gp.local.natural import MinusRankOne, Positive

METHODS = {"laplace": pg.Laplace(), "vi": pg.VI(), "ep": pg.EP()}
each_method = pytest.mark.parametrize("name", METHODS)


def evidence_and_gradient(method, model, hyper, *args, **kwargs):
    """(log evidence, {site: its derivative}, solution)."""

    def value(hyper):
        return pg.log_evidence(method, pg.read(model, *args, hyper=hyper, **kwargs))

    hyper = {k: jnp.asarray(v, float) for k, v in hyper.items()}
    (value, solution), slope = jax.jit(jax.value_and_grad(value, has_aux=True))(hyper)
    assert pg.Result.from_code(solution.code) == "converged"
    return float(value), {k: float(v) for k, v in slope.items()}, solution


def classes(X, y=None, C=3, jitter=1e-8, order=None):
    """C classes, each with a function of its own."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    kernel = pg.kernels.RBF(variance, lengthscale)
    with numpyro.plate("classes", C):
        f = numpyro.sample("f", pg.GP(kernel, X, jitter=jitter))
    logits = f.T if order is None else f.T[:, jnp.asarray(order)]
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def binary(X, y=None, jitter=2e-8):
    """The difference of two functions."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    kernel = pg.kernels.RBF(2.0 * variance, lengthscale)
    f = numpyro.sample("f", pg.GP(kernel, X, jitter=jitter))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


UNIT = {"variance": 1.0, "lengthscale": 1.0}


@pytest.mark.one_case
@each_method
def test_three_classes_have_the_stored_evidence(name):
    """Laplace -27.29715367 and its mode at the first datum by independent NumPy; the truth by
    importance sampling, -27.0877 +- 0.0013.
    """
    x = np.linspace(0.0, 10.0, 30)
    y = np.where(np.sin(x) < -0.35, 0, np.where(np.sin(x) < 0.35, 1, 2))
    value, _, solution = evidence_and_gradient(METHODS[name], classes, UNIT, x, y=y)
    if name == "laplace":
        np.testing.assert_allclose(value, -27.29715367, atol=1e-6)
        mode = np.reshape(solution.marginals.mean, (3, 30))[:, 0]
        np.testing.assert_allclose(mode, [-0.57085189, 0.52719356, 0.04365833], atol=1e-7)
    else:
        assert abs(value + 27.0877) < 0.1
        assert value < -27.0877 + 4 * 0.0013 or name == "ep"  # VI is a bound


@pytest.mark.slow
@each_method
def test_two_classes_are_the_binary_model_of_twice_the_variance(name):
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(12, 2)), rng.integers(0, 2, 12)
    hyper = {"variance": 1.7, "lengthscale": 0.8}
    two = evidence_and_gradient(METHODS[name], lambda X, y=None: classes(X, y, C=2), hyper, X, y=y)
    one = evidence_and_gradient(METHODS[name], binary, hyper, X, y=y)
    np.testing.assert_allclose(two[0], one[0], atol=1e-8)
    for k in hyper:
        np.testing.assert_allclose(two[1][k], one[1][k], atol=2e-7)


@pytest.mark.slow
@each_method
def test_the_order_of_classes_is_no_matter(name):
    rng = np.random.default_rng(2)
    X, y, order = rng.normal(size=(10, 2)), rng.integers(0, 3, 10), np.array([2, 0, 1])
    places = np.argsort(order)  # column j of f.T[:, order] is function order[j]
    here = evidence_and_gradient(METHODS[name], classes, UNIT, X, y=y)
    other = evidence_and_gradient(
        METHODS[name], lambda X, y=None: classes(X, y, order=order), UNIT, X, y=y
    )
    renamed = evidence_and_gradient(METHODS[name], classes, UNIT, X, y=places[y])
    for found in (other, renamed):
        np.testing.assert_allclose(found[0], here[0], atol=1e-8)
        np.testing.assert_allclose(list(found[1].values()), list(here[1].values()), atol=1e-6)


def counts_and_labels(X, y=None, z=None, which="both"):
    """Two functions, two observed sites, each of which sees one."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    if which != "labels":
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X, mean=0.3))
    if which != "counts":
        g = numpyro.sample("g", pg.GP(pg.kernels.Matern32(2.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        if which != "labels":
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
        if which != "counts":
            numpyro.sample("z", dist.Bernoulli(logits=g), obs=z)


@pytest.mark.slow
@each_method
def test_functions_that_no_datum_couples_are_separate_fits(name):
    rng = np.random.default_rng(3)
    X, y, z = rng.normal(size=(11, 1)), rng.poisson(1.5, 11), rng.integers(0, 2, 11)
    both = evidence_and_gradient(
        METHODS[name], counts_and_labels, {"lengthscale": 0.9}, X, y=y, z=z
    )
    parts = [
        evidence_and_gradient(
            METHODS[name],
            lambda X, y=None, z=None, which=which: counts_and_labels(X, y, z, which),
            {"lengthscale": 0.9},
            X,
            **data,
        )
        for which, data in (("counts", {"y": y}), ("labels", {"z": z}))
    ]
    np.testing.assert_allclose(both[0], sum(p[0] for p in parts), atol=1e-7)
    slope = sum(p[1]["lengthscale"] for p in parts)
    np.testing.assert_allclose(both[1]["lengthscale"], slope, atol=1e-6)


NOISE = np.array([[0.3, 0.1], [0.1, 0.2]])
N, M, TAU, ELL = 9, 4, 0.8, 1.2


def gaussian(x, group, y=None):
    """Two outputs with correlated noise: (f + beta_0 x, g + u_group + f / 2 + beta_1 x)."""
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
    ell = numpyro.sample("ell", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, ell), x, jitter=1e-9))
    g = numpyro.sample("g", pg.GP(pg.kernels.Matern52(0.7, ell), x, mean=0.2, jitter=1e-9))
    beta = numpyro.sample("beta", dist.Normal(jnp.array([0.1, -0.2]), 0.9).to_event(1))
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0.0, tau))
    mean = jnp.stack([f + beta[0] * x, g + u[group] + 0.5 * f + beta[1] * x], -1)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.MultivariateNormal(mean, jnp.asarray(NOISE)), obs=y)


class Dense:
    """The Gaussian answer by its formula; functions outermost."""

    def __init__(self, x, group, y, tau=TAU, ell=ELL):
        self.x, self.group, self.tau, self.ell = x, group, tau, ell
        self.y = np.ravel(y.T)
        prior = self.cross(x, group) + 1e-9 * self.own()
        self.S = prior + np.kron(NOISE, np.eye(len(x)))
        self.solved = np.linalg.solve(self.S, self.y - self.mean(x))

    def own(self):
        one = np.array([[1.0, 0.5], [0.5, 1.25]])  # of f's jitter and g's
        return np.kron(one, np.eye(len(self.x)))

    def mean(self, x):
        return np.concatenate([0.1 * x, 0.2 - 0.2 * x])

    def terms(self, a, ga, b, gb):
        """{term: covariance of what it adds (2 n, 2 m)}."""
        r = np.abs(a[:, None] - b) / self.ell
        rbf = 1.5 * np.exp(-0.5 * r**2)
        matern = 0.7 * (1 + 5**0.5 * r + 5 * r**2 / 3) * np.exp(-(5**0.5) * r)
        linear = 0.81 * a[:, None] * b
        same = self.tau**2 * (ga[:, None] == gb)
        second = np.diag([0.0, 1.0])
        return {
            "f": np.kron(np.array([[1.0, 0.5], [0.5, 0.25]]), rbf),
            "g": np.kron(second, matern),
            "beta": np.kron(np.eye(2), linear),
            "u": np.kron(second, same),
        }

    def cross(self, x, group):
        return sum(self.terms(self.x, self.group, x, group).values())

    def evidence(self):
        return multivariate_normal(self.mean(self.x), self.S).logpdf(self.y)

    def at(self, x, group):
        """(mean, covariance) of all functions at new rows."""
        C = self.cross(x, group)
        prior = sum(self.terms(x, group, x, group).values())
        prior += 1e-9 * np.kron(np.array([[1.0, 0.5], [0.5, 1.25]]), np.eye(len(x)))
        return self.mean(x) + C.T @ self.solved, prior - C.T @ np.linalg.solve(self.S, C)


@pytest.fixture(scope="module")
def two_outputs():
    rng = np.random.default_rng(5)
    x, group = rng.normal(size=N), rng.integers(0, 3, N)
    return x, group, rng.normal(size=(N, 2))


@pytest.mark.slow
@each_method
def test_gaussian_evidence_and_gradient_are_the_dense_formula(name, two_outputs):
    hyper = {"tau": TAU, "ell": ELL}
    value, slope, _ = evidence_and_gradient(
        METHODS[name], gaussian, hyper, *two_outputs[:2], y=two_outputs[2]
    )
    np.testing.assert_allclose(value, Dense(*two_outputs).evidence(), atol=1e-8)
    for k in hyper:
        up, down = (Dense(*two_outputs, **{**hyper, k: hyper[k] + s}) for s in (1e-5, -1e-5))
        np.testing.assert_allclose(
            slope[k], (up.evidence() - down.evidence()) / 2e-5, rtol=1e-6, atol=1e-7
        )


@pytest.fixture(scope="module")
def gaussian_fit(two_outputs):
    x, group, y = two_outputs
    fixed = pg.Laplace(hyper=pg.Fixed({"tau": TAU, "ell": ELL}))
    return pg.fit(gaussian, fixed, 0, x, group, y=y)


@pytest.mark.one_case
@pytest.mark.parametrize("num", [1, 2, M, N])
def test_gaussian_answers_are_the_dense_formula(gaussian_fit, two_outputs, num):
    rng = np.random.default_rng(7)
    x, group, y = rng.normal(size=num), rng.integers(0, 3, num), rng.normal(size=(num, 2))
    dense = Dense(*two_outputs)
    mean, covariance = dense.at(x, group)
    found = gaussian_fit.predict(x, group)
    np.testing.assert_allclose(found.f_mean, mean.reshape(2, num), atol=1e-8)
    np.testing.assert_allclose(found.f_variance, np.diag(covariance).reshape(2, num), atol=1e-8)
    np.testing.assert_allclose(found.mean, mean.reshape(2, num).T, atol=1e-7)
    noisy = np.diag(covariance).reshape(2, num).T + np.diag(NOISE)
    np.testing.assert_allclose(found.variance, noisy, atol=1e-7)

    split = covariance.reshape(2, num, 2, num)
    wanted = [
        multivariate_normal(mean.reshape(2, num)[:, n], split[:, n, :, n] + NOISE).logpdf(y[n])
        for n in range(num)
    ]
    scores = gaussian_fit.log_density(x, y, group)
    np.testing.assert_allclose(scores, wanted, atol=1e-6)

    parts = gaussian_fit.components(x, group)
    centre = {"f": 0.0 * x, "g": 0.2 + 0.0 * x, "u": 0.0 * x}
    for k, prior in dense.terms(x, group, x, group).items():
        C = dense.terms(dense.x, dense.group, x, group)[k]
        m = C.T @ dense.solved
        m += np.concatenate([0.1 * x, -0.2 * x]) if k == "beta" else 0.0
        m[num:] += centre[k] if k == "g" else 0.0
        variance = np.diag(prior - C.T @ np.linalg.solve(dense.S, C))
        np.testing.assert_allclose(np.ravel(parts[k].mean), m, atol=1e-7, err_msg=k)
        np.testing.assert_allclose(np.ravel(parts[k].variance), variance, atol=1e-7, err_msg=k)
    adding = sum(np.asarray(p.mean) for k, p in parts.items() if k != "total")
    np.testing.assert_allclose(parts["total"].mean, adding, atol=1e-8)


def test_gaussian_joint_draws_have_the_dense_moments(gaussian_fit, two_outputs):
    x, group = np.array([0.1, 0.5, -1.0]), np.array([0, 1, 2])
    mean, covariance = Dense(*two_outputs).at(x, group)
    draws = gaussian_fit.sample(1, x, 20_000, group)
    f = np.reshape(draws.f, (20_000, -1))
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(np.mean(f, 0), mean, atol=4 * sd.max() / 20_000**0.5)
    np.testing.assert_allclose(np.cov(f.T), covariance, atol=0.05 * sd.max() ** 2)
    assert draws.y.shape == (20_000, 3, 2)


@pytest.mark.slow
def test_gaussian_leave_one_out_is_the_dense_formula(gaussian_fit, two_outputs):
    x, group, y = two_outputs
    dense = Dense(*two_outputs)
    found = gaussian_fit.loo().elpd_i.values
    for n in range(N):
        left = np.delete(np.arange(N), n)
        rows = np.concatenate([left, N + left])
        out = np.array([n, N + n])
        K, r = dense.S[np.ix_(rows, rows)], dense.y - dense.mean(x)
        C = dense.S[np.ix_(rows, out)]
        mean = dense.mean(x)[out] + C.T @ np.linalg.solve(K, r[rows])
        covariance = dense.S[np.ix_(out, out)] - C.T @ np.linalg.solve(K, C)
        wanted = multivariate_normal(mean, covariance).logpdf(y[n])
        np.testing.assert_allclose(found[n], wanted, atol=1e-5)


@pytest.mark.slow
def test_gaussian_posterior_of_sites_and_a_saved_fit(gaussian_fit, two_outputs, tmp_path):
    dense = Dense(*two_outputs)
    new = np.array([-0.3, 0.8])
    r = np.abs(dense.x[:, None] - new) / ELL
    C = np.concatenate([1.5 * np.exp(-0.5 * r**2)] * 2) * np.repeat([1.0, 0.5], N)[:, None]
    f = gaussian_fit.posterior["f"](new)
    np.testing.assert_allclose(f.mean, C.T @ dense.solved, atol=1e-8)
    variance = 1.5 - np.einsum("ij,ij->j", C, np.linalg.solve(dense.S, C))
    np.testing.assert_allclose(f.variance, variance, atol=1e-7)
    D = np.concatenate([np.zeros((N, 3)), TAU**2 * (dense.group[:, None] == np.arange(3))])
    np.testing.assert_allclose(gaussian_fit.sites["u"].mean, D.T @ dense.solved, atol=1e-8)

    gaussian_fit.save(tmp_path / "fit.npz")
    loaded = pg.load(tmp_path / "fit.npz", gaussian)
    group = np.array([2, 0])
    for a, b in zip(
        jax.tree.leaves(gaussian_fit.predict(new, group)),
        jax.tree.leaves(loaded.predict(new, group)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-12)


def heteroscedastic(x, y=None):
    """The mean, and the logarithm of the noise."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), x))
    g = numpyro.sample("g", pg.GP(pg.kernels.RBF(0.5, 2.0), x, mean=-0.5))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


@pytest.mark.slow
@each_method
def test_heteroscedastic_noise_against_importance_sampling(name):
    """From the prior of g; given g, f is integrated exactly."""
    rng = np.random.default_rng(8)
    x = np.linspace(-1.5, 1.5, 8)
    y = np.sin(2 * x) + 0.4 * rng.normal(size=8)
    r = x[:, None] - x
    Kf = np.exp(-0.5 * r**2) + 1e-8 * np.eye(8)
    L = np.linalg.cholesky(0.5 * np.exp(-0.125 * r**2) + 1e-8 * np.eye(8))
    g = -0.5 + rng.normal(size=(100_000, 8)) @ L.T
    S = Kf + np.exp(2 * g)[:, :, None] * np.eye(8)
    square = np.einsum("i,nij,j->n", y, np.linalg.inv(S), y)
    log_p = -0.5 * square - 0.5 * np.linalg.slogdet(S)[1] - 4 * np.log(2 * np.pi)
    truth = np.log(np.mean(np.exp(log_p - log_p.max()))) + log_p.max()
    value = evidence_and_gradient(METHODS[name], heteroscedastic, {}, x, y=y)[0]
    if name == "vi":
        assert value < truth  # a bound
    elif name == "ep":
        assert abs(value - truth) < 0.15
    else:
        np.testing.assert_allclose(value, _laplace_by_hand(x, y), atol=1e-6)


def _laplace_by_hand(x, y):
    """By the Hessian of the whole log density at its maximum, Newton's method from zero."""
    r = x[:, None] - x
    priors = [np.exp(-0.5 * r**2), 0.5 * np.exp(-0.125 * r**2)]
    K = np.kron(np.diag([1.0, 0.0]), priors[0]) + np.kron(np.diag([0.0, 1.0]), priors[1])
    K += np.diag(np.repeat([1e-8, 0.5e-8], len(x)))
    L, m = jnp.asarray(np.linalg.cholesky(K)), np.repeat([0.0, -0.5], len(x))

    def log_density(v):
        f, g = jnp.split(m + L @ v, 2)
        return jnp.sum(dist.Normal(f, jnp.exp(g)).log_prob(y)) - 0.5 * v @ v

    v = jnp.zeros(2 * len(x))
    for _ in range(100):
        H, slope = -jax.hessian(log_density)(v), jax.grad(log_density)(v)
        values, V = np.linalg.eigh(H)
        move = V @ ((V.T @ slope) / np.maximum(np.abs(values), 0.5))
        v = v + _best(log_density, v, move)
    return float(log_density(v) - 0.5 * np.linalg.slogdet(-jax.hessian(log_density)(v))[1])


def _best(log_density, v, move):
    fractions = (0.0, 0.01, 0.1, 0.5, 1.0)
    return max(fractions, key=lambda t: float(log_density(v + t * move))) * move


def test_what_takes_one_function_says_so():
    x, y = np.linspace(0.0, 1.0, 5), np.array([0, 1, 2, 1, 0])
    for method in (pg.LocalBound(), pg.EP(sequential=True)):
        with pytest.raises(pg.ModelError, match=r"3 functions.*takes one"):
            pg.fit(classes, method, 0, x, y=y)
    with pytest.raises(pg.ModelError, match="takes one"):
        pg.log_evidence(pg.LocalBound(), pg.read(classes, x, y=y, hyper=UNIT))


def weighed(X, y=None, mask=None, scale=1.0, order=(0, 1, 2), baseline=False):
    """Classes whose data are masked and scaled; scores are functions in some order."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("classes", 2 if baseline else 3):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.3, lengthscale), X))
    g = numpyro.sample("g", pg.GP(pg.kernels.RBF(0.5, 1.0), X)) if baseline else None
    scores = f.T if not baseline else jnp.stack([f[0] + g, f[1], g], -1)
    scores = 0.7 * scores[:, jnp.asarray(order)] + jnp.array([0.1, 0.0, -0.3])
    mask = jnp.ones(len(X), bool) if mask is None else mask
    with (
        numpyro.plate("data", X.shape[0]),
        numpyro.handlers.mask(mask=mask),
        numpyro.handlers.scale(scale=scale),
    ):
        numpyro.sample("y", dist.Categorical(logits=scores), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("baseline", [False, True], ids=["apart", "coupled"])
def test_a_softmax_of_independent_functions_is_the_block_form(baseline):
    """Rasmussen & Williams' algorithm 3.3 against blocks, values and gradients; with a function
    that two classes share, which is no prior of independent functions, it is not taken.
    """
    rng = np.random.default_rng(11)
    X, y, mask = rng.normal(size=(9, 2)), rng.integers(0, 3, 9), np.arange(9) % 4 != 1
    method, kwargs = pg.Laplace(), {"mask": mask, "order": (2, 0, 1), "baseline": baseline}

    def evidence(lengthscale, scale, general):
        factors = pg.read(
            weighed, X, y=y, scale=scale, hyper={"lengthscale": lengthscale}, **kwargs
        )
        return pg.log_evidence(method, factors, first_sites(method, factors, general))

    found = [
        jax.jit(jax.value_and_grad(lambda ell, s, g=g: evidence(ell, s, g), (0, 1), has_aux=True))(
            jnp.asarray(0.9), jnp.asarray(0.6)
        )
        for g in (True, False)
    ]
    (general, slow), (special, fast) = found
    known = type(special[1].sites)
    assert known is (Positive if baseline else MinusRankOne)
    np.testing.assert_allclose(special[0], general[0], rtol=1e-12)
    np.testing.assert_allclose(fast, slow, rtol=1e-9)
    np.testing.assert_allclose(
        special[1].marginals.mean, general[1].marginals.mean, rtol=1e-9, atol=1e-10
    )


@pytest.mark.slow
def test_a_fit_of_many_classes_and_its_probabilities():
    rng = np.random.default_rng(12)
    X, C = rng.normal(size=(20, 2)), 5
    y = np.argmax(X @ rng.normal(size=(2, C)) + rng.gumbel(size=(20, C)), 1)
    model = lambda X, y=None: classes(X, y, C=C)  # noqa: E731
    fit = pg.fit(model, pg.Laplace(), 0, X, y=y)
    new = rng.normal(size=(3, 2))
    found = fit.predict(new)
    assert found.probs.shape == (3, C) and found.f_mean.shape == (C, 3)
    np.testing.assert_allclose(jnp.sum(found.probs, 1), 1.0, atol=1e-6)
    for k in range(C):  # by weighted draws, with an error of their own
        score, error = fit.log_density(new, np.full(3, k), with_error=True)
        np.testing.assert_allclose(found.probs[:, k], np.exp(score), atol=0.05)
        assert np.all(error < 0.05)


@pytest.mark.slow
def test_hyperparameters_are_sampled_and_put_on_a_grid(two_outputs):
    """Against a grid of the dense evidence."""
    x, group, y = two_outputs
    grid = np.exp(np.linspace(-3.5, 2.0, 60))
    log_p = np.array([Dense(x, group, y, tau=t).evidence() for t in grid])
    log_p += -0.5 * np.log(grid) ** 2  # the prior's density of log tau
    w = np.exp(log_p - log_p.max())
    mean = np.sum(w * grid) / np.sum(w)
    sd = np.sqrt(np.sum(w * (grid - mean) ** 2) / np.sum(w))

    def held(x, group, y=None):
        numpyro.handlers.condition(gaussian, data={"ell": jnp.asarray(ELL)})(x, group, y)

    for hyper, share in ((pg.Grid(), 0.15), (pg.Sample(300, 600, num_chains=1), 0.3)):
        fit = pg.fit(held, pg.Laplace(hyper=hyper), 0, x, group, y=y, throw=False)
        tau, weights = np.asarray(fit.hyper["tau"]), np.exp(np.asarray(fit.draws.log_weights))
        assert abs(np.sum(weights * tau) - mean) < share * sd
        assert fit.predict(x[:2], group[:2]).f_mean.shape == (2, 2)


@pytest.mark.slow
def test_totals_of_each_row_are_arrays_of_the_model():
    """NumPyro keeps them among a multinomial's static fields."""
    rng = np.random.default_rng(13)
    X, totals = rng.normal(size=(8, 1)), rng.integers(1, 8, 8)
    y = np.stack([rng.multinomial(k, [0.3, 0.3, 0.4]) for k in totals])

    def by(likelihood):
        def model(X, totals, y=None):
            with numpyro.plate("classes", 3):
                f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", likelihood(f.T, totals), obs=y)

        return model

    logits = by(lambda s, n: dist.Multinomial(total_count=n, logits=s, total_count_max=8))
    probs = by(
        lambda s, n: dist.Multinomial(total_count=n, probs=jax.nn.softmax(s), total_count_max=8)
    )
    mixed = by(lambda s, n: dist.DirichletMultinomial(jnp.exp(s), n, total_count_max=8))
    fits = [
        pg.fit(model, pg.Laplace(hyper=pg.Fixed({})), 0, X, totals, y=y)
        for model in (logits, probs, mixed)
    ]
    np.testing.assert_allclose(fits[0].log_evidence, fits[1].log_evidence, rtol=1e-9)
    for fit in fits:
        found = fit.predict(X[:3], totals[:3])
        np.testing.assert_allclose(jnp.sum(found.mean, 1), totals[:3], rtol=1e-6)
        assert np.all(np.isfinite(fit.log_density(X[:3], y[:3], totals[:3])))


@pytest.mark.slow
def test_an_effect_that_adds_functions_is_integrated_where_it_is_named():
    """Three outputs of two functions: an intercept each makes three functions a datum."""
    rng = np.random.default_rng(14)
    x, W, y = np.linspace(-2.0, 2.0, 7), rng.normal(size=(3, 2)), rng.normal(size=(7, 3))

    def model(x, y=None):
        with numpyro.plate("functions", 2):
            g = numpyro.sample("g", pg.GP(pg.kernels.RBF(1.0, 1.0), x, jitter=1e-8))
        b = numpyro.sample("b", dist.Normal(0, 1.5).expand([3]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            mean = (jnp.asarray(W) @ g).T + b
            numpyro.sample("y", dist.Normal(mean, 0.4).to_event(1), obs=y)

    default = pg.fit(model, pg.Laplace(hyper=pg.MAP(maximise=("b",))), 0, x, y=y)
    assert set(default.hyper) == {"b"} and not default.sites
    named = pg.fit(model, pg.Laplace(integrate=("b",)), 0, x, y=y)
    assert not named.hyper and set(named.sites) == {"b"}
    K = np.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-8 * np.eye(7)
    S = np.kron(W @ W.T, K) + np.kron(2.25 * np.eye(3), np.ones((7, 7))) + 0.16 * np.eye(21)
    np.testing.assert_allclose(
        named.log_evidence, multivariate_normal(np.zeros(21), S).logpdf(y.T.ravel()), atol=1e-8
    )


def own_noise(X, y=None):
    """Two rows of an uncertain noise: what EP integrates is a funnel."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), X))
    h = numpyro.sample("h", pg.GP(pg.kernels.RBF(0.5, 1.0), X))
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(-1.0, 0.5))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + a, jnp.exp(h + b)), obs=y)


def test_more_nodes_are_what_a_funnel_needs_and_the_fit_says_so():
    """An EP of its own, with f in closed form and 1600 nodes over h, has -3.20812 and variances
    .2357, .2525, .6612, .6671.
    """
    given = (0, np.array([0.0, 1.0]))
    with pytest.warns(UserWarning, match="num_nodes=24.*2 functions.*raise num_nodes"):
        rough = pg.fit(own_noise, pg.EP(hyper=pg.Fixed({})), *given, y=np.array([0.5, -1.0]))
    method = pg.EP(hyper=pg.Fixed({}), num_nodes=200)
    fit = pg.fit(own_noise, method, *given, y=np.array([0.5, -1.0]))
    assert fit.stats["quadrature_error"] < 0.1 * rough.stats["quadrature_error"]
    np.testing.assert_allclose(fit.log_evidence, -3.20812, atol=1e-4)
    variances = np.asarray(fit.predict(given[1]).f_variance).ravel()
    np.testing.assert_allclose(variances, [0.2357, 0.2525, 0.6612, 0.6671], rtol=2e-3)


def clutter(x, y=None, D=5):
    """Half of the rows are N(theta, I), half N(0, 10 I): PRML 10.7.1 in D dimensions."""
    with numpyro.plate("dimensions", D):
        theta = numpyro.sample("theta", pg.GP(pg.kernels.Constant(100.0), x, jitter=1e-7))
    with numpyro.plate("data", x.shape[0]):
        near = -0.5 * jnp.sum((y - theta.T) ** 2, -1)
        far = -0.05 * jnp.sum(y**2, -1) - 0.5 * D * jnp.log(10.0)
        constant = 0.5 * D * jnp.log(2.0 * jnp.pi) + jnp.log(2.0)
        numpyro.factor("y", jnp.logaddexp(near, far) - constant)


def evidence_of_clutter(y):
    """The sum over which rows are near."""
    near = np.array(list(product([0.0, 1.0], repeat=len(y))))
    precision, total = 0.01 + near.sum(1), near @ y
    near_terms = near.sum(1) * y.shape[1] * np.log(2 * np.pi) + near @ np.sum(y**2, 1)
    near_terms -= np.sum(total**2, 1) / precision
    near_terms += y.shape[1] * np.log(100.0 * precision)
    far_terms = (1 - near) @ (0.1 * np.sum(y**2, 1) + y.shape[1] * np.log(20 * np.pi))
    return logsumexp(-0.5 * (near_terms + far_terms)) - len(y) * np.log(2.0)


@pytest.mark.slow
def test_ep_gets_past_the_wide_clutter_to_the_narrow_answer():
    """It stayed where its residual is least, 8 to 13 nats below."""
    solve = jax.jit(lambda x, y: pg.log_evidence(pg.EP(), pg.read(clutter, x, y=y, hyper={})))
    for seed in (1, 2, 3):
        rng = np.random.default_rng(seed)
        near = rng.uniform(size=(9, 1)) < 0.5
        y = np.where(near, 2.0 + rng.normal(size=(9, 5)), np.sqrt(10.0) * rng.normal(size=(9, 5)))
        found, solution = solve(np.zeros((9, 1)), y)
        assert pg.Result.from_code(solution.code) == "converged"
        np.testing.assert_allclose(found, evidence_of_clutter(y), rtol=0, atol=0.03)
