"""One cheap case of each formula of an evidence, or of an error, that the slow suite alone would
guard otherwise: each against dense algebra, SciPy, or finite differences.
"""

from inspect import unwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import toy_models
from conjugate_families import NAMES, families
from scipy import stats
from test_softmax_posterior import N, R, problem, root_of  # noqa: F401

import ppl_gp as pg
from ppl_gp.draws import Moments
from ppl_gp.infer.hyper import grid
from ppl_gp.infer.hyper.grid import Lattice, composite
from ppl_gp.infer.mcmc.elliptical import EllipticalSlice, _kernel
from ppl_gp.kept import FromDraws
from ppl_gp.local.natural import Marginals, PseudoLikelihood, condition_mean
from ppl_gp.local.tilted import Cavity
from ppl_gp.local.vi import _spread
from ppl_gp.results.parts import _of_one
from ppl_gp.results.predict.scores import _squared_errors
from ppl_gp.sparse.bound import kl_weights, weighted_kl

RNG = np.random.default_rng(7)


def noisy(X, y=None, scale=0.5):
    """Exact regression: every method has one right answer."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.3, 1.0), X, mean=0.7, jitter=1e-9))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, scale), obs=y)


def probit(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.3, 1.0), X, jitter=1e-9))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", pg.observations.BernoulliProbit(1.5 * f + 0.2), obs=y)


X = np.linspace(0.0, 3.0, 5)[:, None]
Y = np.array([0.3, 1.9, 0.4, -1.0, 0.2])


@pytest.mark.parametrize("closed_form", [True, False])
def test_a_power_of_a_gaussian_is_exact(closed_form):
    """1 / power in log Z, and tilted moments of the likelihood to that power: of Gaussian noise the
    evidence does not depend on the power.
    """
    method = pg.EP(power=0.5, closed_form=closed_form)
    value, solution = toy_models.evidence(noisy, method, {}, jnp.asarray(X), y=jnp.asarray(Y))
    K = np.asarray(pg.kernels.RBF(1.3, 1.0)(X, X)) + 1e-9 * np.eye(5)
    exact = stats.multivariate_normal(np.full(5, 0.7), K + 0.25 * np.eye(5)).logpdf(Y)
    np.testing.assert_allclose(value, exact, atol=1e-7)
    mean = 0.7 + K @ np.linalg.solve(K + 0.25 * np.eye(5), Y - 0.7)
    np.testing.assert_allclose(solution.marginals.mean, mean, atol=1e-6)


def test_the_closed_form_of_a_probit_is_left_alone_under_a_power():
    """Moments of N(f; m, v) Phi(f)^(1/2) by quadrature, whatever `closed_form` says."""
    log_lik = pg.read(probit, jnp.asarray(X), y=jnp.asarray([0, 1, 1, 0, 1]), hyper={}).log_lik
    mean, variance = jnp.linspace(-1.0, 2.0, 5), jnp.full(5, 1.7)
    f = np.linspace(-14.0, 14.0, 20_001)[:, None]
    sign = 2.0 * np.array([0, 1, 1, 0, 1]) - 1.0
    for power in (1.0, 0.5):
        log_p = stats.norm.logpdf(f, mean, np.sqrt(1.7))
        p = np.exp(log_p + power * stats.norm.logcdf(sign * (1.5 * f + 0.2)))
        z = p.sum(0) * (f[1, 0] - f[0, 0])
        first = (f * p).sum(0) / p.sum(0)
        second = ((f - first) ** 2 * p).sum(0) / p.sum(0)
        for closed_form in (True, False):
            method = pg.EP(power=power, closed_form=closed_form)
            found = method._tilted(log_lik, Cavity(1.0 / variance, mean, jnp.ones(5, bool)))
            np.testing.assert_allclose(found.log_z, np.log(z), atol=1e-8)
            np.testing.assert_allclose(found.mean, first, atol=1e-7)
            np.testing.assert_allclose(found.variance, second, atol=1e-7)
            assert (found.nodes is None) == (power == 1.0 and closed_form)


def test_the_spread_of_several_functions_is_a_trace():
    """tr(T_n Sigma_n) / 2, entries off the diagonal with it."""
    A, B = RNG.normal(size=(2, 4, 3, 3))
    T, S = (x @ np.swapaxes(x, 1, 2) for x in (A, B))
    blocks = [jnp.asarray(np.moveaxis(x, 0, -1)) for x in (T, S)]
    zero = jnp.zeros(())
    q = Marginals(jnp.zeros(12), blocks[1], zero, jnp.zeros(12), zero)
    found = _spread(q, PseudoLikelihood(jnp.zeros(12), blocks[0]))
    np.testing.assert_allclose(found, 0.5 * np.trace(T @ S, axis1=1, axis2=2), rtol=1e-12)


def test_the_log_partition_has_the_means_own_term():
    """log int N(f; m, K) prod_n exp(nat1 f - nat2 f^2 / 2) df, m far from zero."""
    K = np.asarray(pg.kernels.RBF(1.3, 1.0)(X, X)) + 1e-6 * np.eye(5)
    m, nat1, nat2 = RNG.normal(2.0, 1.0, 5), RNG.normal(size=5), RNG.uniform(0.2, 2.0, 5)
    # a site is N(nat1 / nat2; f, 1 / nat2) times a constant
    y, noise = nat1 / nat2, np.diag(1.0 / nat2)
    exact = stats.multivariate_normal(m, K + noise).logpdf(y)
    exact += 0.5 * np.sum(nat1**2 / nat2 - np.log(nat2) + np.log(2.0 * np.pi))
    sites = PseudoLikelihood(jnp.asarray(nat1), jnp.asarray(nat2))
    found = condition_mean(jnp.asarray(K), jnp.asarray(m), sites).log_partition
    np.testing.assert_allclose(found, exact, rtol=1e-8)


def test_laplaces_gradient_follows_the_mode_of_a_moving_mean():
    """In the slope of the prior mean, against central differences of the evidence: R&W 5.23."""

    def logistic(X, y=None):
        slope = numpyro.sample("slope", dist.Normal())
        mean = lambda X: slope * X[:, 0]  # noqa: E731
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.3, 0.9), X, mean))
        with numpyro.plate("data", X.shape[0]), numpyro.handlers.scale(scale=2.5):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    y = jnp.asarray([0, 0, 1, 1, 1])

    @jax.jit
    def value_and_slope(slope):
        def evidence(slope):
            factors = pg.read(logistic, jnp.asarray(X), y=y, hyper={"slope": slope})
            return pg.log_evidence(pg.Laplace(), factors)[0]

        return jax.value_and_grad(evidence)(slope)

    h = 1e-4
    ahead = [float(value_and_slope(0.2 + k * h)[0]) for k in (1, -1, 2, -2)]
    wanted = (8 * (ahead[0] - ahead[1]) - (ahead[2] - ahead[3])) / (12 * h)
    np.testing.assert_allclose(value_and_slope(0.2)[1], wanted, rtol=1e-6)
    assert abs(wanted) > 0.1


def test_a_weighted_sum_under_a_softmax_has_both_of_its_weights(problem):  # noqa: F811
    K, _, _, d, dense = problem
    a, c = (jnp.asarray(RNG.normal(size=shape)) for shape in ((R, N), (N, 2)))
    stacked = np.concatenate([a[r, :, None] * c for r in range(R)])
    found = root_of(K, d).of_sum(a)
    np.testing.assert_allclose(found.quadratic(c), stacked.T @ dense @ stacked, atol=1e-10)
    # and a weighted function of that sum again
    b = jnp.asarray(RNG.normal(size=N))
    again = found.of_sum(b[None]).quadratic(c)
    np.testing.assert_allclose(again, found.quadratic(b[:, None] * c), atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_factors_of_mean_field_have_their_density_and_entropy(name):
    """log q of one site is that of its distribution, normaliser and volume included; H = -E[log q]
    over nodes, which are exact for statistics, as log q is affine in them.
    """
    q = families(np.random.default_rng(2))[name]
    z, nodes = q.random_values(jax.random.key(2)), q.nodes(q.coordinates())
    if len(q.sites) == 1:
        ((site, d),) = q.distributions().items()
        np.testing.assert_allclose(q.log_prob(z), jnp.sum(d.log_prob(z[site])), rtol=1e-9)
    if name != "discrete":
        mean = jnp.sum(nodes.weights * jax.vmap(q.log_prob)(nodes.values))
        np.testing.assert_allclose(q.entropy(), -mean, rtol=1e-9)


def test_the_volume_of_an_inverse_wishart():
    """The site is W^-1, of volume |W|^(D + 1): log q is SciPy's (whose own entropy is wrong above
    one column, 1.17.1).
    """
    q = families(np.random.default_rng(2))["inverse wishart"]
    x = np.stack([stats.wishart(6, np.eye(3)).rvs(random_state=k) for k in (1, 2)])
    own = zip(np.asarray(q.df), np.asarray(q.rate), x, strict=True)
    exact = sum(stats.invwishart(float(df), rate).logpdf(v) for df, rate, v in own)
    np.testing.assert_allclose(q.log_prob({"W": jnp.asarray(x)}), exact, rtol=1e-8)


def test_a_handlers_scale_of_a_gp_site_weighs_its_divergence():
    """With `beta`; a site without one has `beta` alone."""
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
        with numpyro.handlers.scale(scale=4.0):
            numpyro.sample("f", dist.Normal())
        numpyro.sample("g", dist.Normal())
    weights = kl_weights(trace, ("f", "g"), 0.5)
    assert {k: float(v) for k, v in weights.items()} == {"f": 2.0, "g": 0.5}

    of_three_nats = SimpleNamespace(kl=jnp.asarray([1.0, 2.0]))
    found = unwrap(weighted_kl)({"f": of_three_nats, "g": of_three_nats}, weights)
    assert float(found) == 2.0 * 3.0 + 0.5 * 3.0


def test_the_weight_of_a_component_is_squared_in_its_variance():
    """The part and the total of w f + c."""
    f = Moments(jnp.asarray([1.0, -2.0]), jnp.asarray([0.3, 0.5]))
    parts, offset = _of_one("f", f, jnp.asarray([3.0, -0.5]), jnp.asarray([0.1, 0.2]))
    np.testing.assert_allclose(parts["f"].mean, [3.0, 1.0])
    np.testing.assert_allclose(parts["total"].mean, [3.1, 1.2])
    for name in ("f", "total"):
        np.testing.assert_allclose(parts[name].variance, [2.7, 0.125])
    np.testing.assert_allclose(offset, [0.1, 0.2])


def test_the_error_of_a_log_density_falls_with_its_draws():
    """Relative squared errors of a mean of S x L weights w = exp(a_s + b_sl): Var[b] within a
    posterior draw over all of them, and Var[a] between them.
    """
    a, b = RNG.normal(size=400), RNG.normal(size=(400, 300))
    w = np.exp(0.1 * a[:, None] + 0.2 * b)
    sums = [jnp.log(jnp.asarray([x])) for x in (w.mean(), (w**2).mean(), (w.mean(1) ** 2).mean())]
    case = SimpleNamespace(draws=SimpleNamespace(effective=400))
    within, between = unwrap(_squared_errors)(case, *sums, 300)
    np.testing.assert_allclose(within, w.var(1).mean() / w.mean() ** 2 / (400 * 300), rtol=1e-6)
    np.testing.assert_allclose(between, w.mean(1).var() / w.mean() ** 2, rtol=1e-6)


def test_weights_of_a_grid_are_those_of_its_design(monkeypatch):
    """Of a density that is exactly Gaussian: the integral, second moments, and weights that add up
    to one.
    """
    kept = FromDraws(jnp.zeros((25, 1))), None, np.ones(25, bool)
    monkeypatch.setattr(grid, "kept_of_draws", lambda *_: kept)
    monkeypatch.setattr(grid, "warn_if_wide", lambda *_: {})
    S, (points, log_design) = np.diag([0.5, 2.0, 1.0, 3.0]), composite(4)
    loss = 0.5 * np.sum(points**2, 1) - 4.0
    rebuilt = SimpleNamespace(unconstrain=lambda x: x, constrain=lambda x: x)
    asked = SimpleNamespace(method=pg.Laplace(), setting=None, site="f", fit=SimpleNamespace)
    zeros = {"residual": jnp.zeros(25), "code": np.full(25, pg.Result.converged.code)}
    solution = SimpleNamespace(sites=None, steps=1, **zeros)
    mode = SimpleNamespace(hyper={"x": jnp.zeros(4)}, stats={}, solution=solution)
    at = SimpleNamespace(loss=jnp.asarray(loss), value=-loss, solution=solution)
    beyond, ended = Lattice(points, log_design, loss, 0.0, 0.0, 0), pg.Result.converged
    laid = (S, np.ones(8), beyond, ended, at)
    fit = unwrap(grid._fit)(asked, SimpleNamespace(space=rebuilt), mode, laid)
    exact = 4.0 + 2.0 * np.log(2.0 * np.pi) + np.linalg.slogdet(S)[1]
    np.testing.assert_allclose(fit.stats["log_marginal_likelihood"], exact, rtol=1e-10)
    weights, values = np.exp(fit.draws.log_weights), np.asarray(fit.draws.hyper["x"])
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-10)
    np.testing.assert_allclose(weights @ values**2, np.diag(S) ** 2, rtol=1e-8)
    assert np.ptp(log_design) > 0.5 and fit.result == "converged"
    told = fit.stats["grid_effective"], fit.stats["grid_effective_gaussian"]
    np.testing.assert_allclose(*told, rtol=1e-10)


def test_slices_hand_on_the_energy_where_they_have_moved():
    """NUTS given f starts from log p and its slope at the new f, and not at the old one."""

    def model(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        numpyro.sample("y", dist.Normal(f, scale).to_event(1), obs=y)

    method = EllipticalSlice(num_slices=1)
    kernel = _kernel(model, method, ("f",), (), True)
    kernel._nuts.sample = lambda state, args, kwargs: state  # as it is handed on
    given = (jnp.asarray(X),), {"y": jnp.asarray(Y)}

    @jax.jit
    def moved(key):
        first = kernel.init(key, 1, None, *given)
        state = kernel.sample(first, *given)

        def energy(z):
            return kernel._energy(state.z["whites"], z, *given)

        inner = state.hmc_state
        wanted = jax.value_and_grad(energy)(state.z["hyper"])
        return (inner.potential_energy, inner.z_grad), wanted, first.hmc_state.potential_energy

    found, wanted, before = moved(jax.random.key(0))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)
    assert abs(found[0] - before) > 1e-3
