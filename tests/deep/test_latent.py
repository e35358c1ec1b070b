"""Per-datum latents: bounds against quadrature and probabilistic PCA, gradients,
errors, prediction.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro import handlers
from scipy.optimize import minimize
from scipy.special import logsumexp

import ppl_gp as pg
from models.deep import deep
from models.gplvm import gplvm
from models.latent import latent
from models.latent_deep import latent_deep
from ppl_gp.deep.bound import terms
from ppl_gp.deep.latents import Encoded, FreeGaussian, mlp_encoder
from ppl_gp.deep.structure import Structure
from ppl_gp.sparse.bound import Batch, Variational
from ppl_gp.sparse.expectation import Expectation
from ppl_gp.sparse.families import FullGaussian, Values
from ppl_gp.sparse.inducing import Points

RNG = np.random.default_rng(0)
X, Y = jnp.asarray(RNG.normal(size=(5, 1))), jnp.asarray(RNG.normal(size=5))
HYPER = {
    "lengthscale": jnp.array([1.0, 0.7]),
    "variance": jnp.asarray(1.2),
    "noise_scale": jnp.asarray(0.5),
}
Z, LOC = jnp.asarray(RNG.normal(size=(4, 2))), jnp.asarray(1.5 * RNG.normal(size=4))
SCALE = jnp.asarray(np.tril(0.2 * RNG.normal(size=(4, 4))) + 0.4 * np.eye(4))
OF = Structure(("f",), (), ("h",), ("f",), ())
FREE = FreeGaussian(
    jnp.asarray(np.stack([0.5 * RNG.normal(size=5), RNG.normal(-0.3, 0.2, size=5)], 1))
)
ENCODED = Encoded(mlp_encoder(jnp.stack([X[:, 0], Y], 1), 1, 4, 1, random.key(4)), "xy")


def bound(sampling, h, key, q=None, model=latent, of=OF):
    q = q or FullGaussian(LOC, SCALE)
    batch = Batch((X,), {"y": Y}, jnp.ones(5), key)
    return terms(
        model,
        Expectation(),
        sampling,
        of,
        HYPER,
        Variational({"f": Points(Z)}, {"f": q}, {"h": h}),
        batch,
    )


compiled = jax.jit(bound, static_argnums=0)


def over_keys(one, num, batch_size=200):
    """`one(key)` for many keys, stacked."""
    run = jax.jit(lambda keys: lax.map(one, keys, batch_size=min(batch_size, num)))
    return jax.tree.map(np.asarray, run(random.split(random.key(7), num)))


@functools.cache
def expected(K, num):
    """Estimates of the sum over data of the log weights' mean, under FREE."""
    return over_keys(
        lambda key: bound(pg.Layers(num_importance=K), FREE, key).expected,
        num,
        10 if K > 100 else 200,
    )


def standard_error(x):
    return x.std() / np.sqrt(len(x))


def log_weights(h):
    """E_q(f)[log p(y_n | f, h)] (5, H) for h (5, H), by dense formulas."""
    rbf = lambda A, B: 1.2 * np.exp(-0.5 * np.sum(((A[..., None, :] - B) / [1.0, 0.7]) ** 2, -1))  # noqa: E731
    inputs = np.stack([np.broadcast_to(np.asarray(X), h.shape), h], -1)
    R = np.linalg.cholesky(rbf(np.asarray(Z), np.asarray(Z)) + 1.2e-8 * np.eye(4))
    A = rbf(inputs, np.asarray(Z)) @ np.linalg.inv(R).T
    m, L = np.asarray(LOC), np.asarray(SCALE)
    variance = 1.2 * (1 + 1e-8) - np.sum(A**2, -1) + np.sum((A @ L) ** 2, -1)
    return (
        -0.5 * np.log(2 * np.pi * 0.25)
        - 0.5 * ((np.asarray(Y)[:, None] - A @ m) ** 2 + variance) / 0.25
    )


NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(120)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


@functools.cache
def evidence():
    """sum_n log of the integral of exp(E_q(f)[log p(y_n | f, h)]) over the prior of h: the limit of
    many copies.
    """
    return np.sum(logsumexp(log_weights(np.broadcast_to(NODES, (5, 120))), b=WEIGHTS, axis=1))


def test_one_copy_is_the_elbo():
    m, s = np.asarray(FREE.packed[:, :1]), np.exp(np.asarray(FREE.packed[:, 1:]))
    kl = np.sum(0.5 * (s**2 + m**2 - 1) - np.log(s))
    elbo = np.sum(log_weights(m + s * NODES) @ WEIGHTS) - kl
    ours = expected(1, 4000)
    assert abs(ours.mean() - elbo) < 4 * standard_error(ours) < 0.5


@pytest.mark.slow
def test_more_copies_tighten_the_bound_up_to_the_evidence():
    bounds = [expected(1, 4000), expected(5, 4000), expected(25, 2000), expected(1000, 60)]
    for loose, tight in zip(bounds[:2], bounds[1:3], strict=True):
        assert tight.mean() - loose.mean() > 4 * np.hypot(
            standard_error(loose), standard_error(tight)
        )
    assert bounds[2].mean() < evidence() + 4 * standard_error(bounds[2])
    assert abs(bounds[3].mean() - evidence()) < 4 * standard_error(bounds[3]) + 1e-2
    assert evidence() - bounds[0].mean() > 0.1


def test_paths_average_and_beta_is_linear_at_one_copy():
    one, two, three = (
        compiled(pg.Layers(beta=b), FREE, random.key(3)).bound for b in (0.0, 1.0, 2.0)
    )
    assert abs((three - two) - (two - one)) < 1e-9 and one - two > 1.0
    many = over_keys(
        lambda key: bound(pg.Layers(num_importance=5, num_paths=20), FREE, key).expected, 200
    )
    single = expected(5, 4000)
    assert abs(many.mean() - single.mean()) < 4 * np.hypot(
        standard_error(many), standard_error(single)
    )
    np.testing.assert_allclose(many.std(), single.std() / np.sqrt(20), rtol=0.25)


@functools.cache
def gradients(doubly):
    """(of the encoder, of q(u)'s mean) for each key, at 50 copies; (keys, entries)."""

    def one(key):
        def value(encoder, loc):
            sampling = pg.Layers(num_importance=50, doubly_reparameterised=doubly)
            return bound(
                sampling, eqx.combine(encoder, rest), key, FullGaussian(loc, SCALE)
            ).expected

        trained, rest = eqx.partition(ENCODED, eqx.is_inexact_array)
        of_encoder, of_loc = jax.grad(value, (0, 1))(trained, LOC)
        return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(of_encoder)]), of_loc

    return over_keys(one, 2000, 50)


@pytest.mark.slow
def test_the_doubly_reparameterised_gradient_has_the_same_mean_and_less_variance():
    plain, doubly = gradients(False), gradients(True)
    for a, b in zip(plain, doubly, strict=True):
        error = np.sqrt((a.var(0) + b.var(0)) / len(a))
        assert np.all(np.abs(a.mean(0) - b.mean(0)) <= 4 * error + 1e-12)
    # there is a signal
    assert np.abs(doubly[0].mean(0)).max() > 10 * np.sqrt(doubly[0].var(0) / 2000).max()
    assert doubly[0].var(0).sum() < 0.5 * plain[0].var(0).sum()


def test_the_doubly_reparameterised_bound_is_the_same_number():
    key = random.key(5)
    plain, doubly = (
        compiled(pg.Layers(num_importance=6, doubly_reparameterised=d), FREE, key).bound
        for d in (False, True)
    )
    assert abs(plain - doubly) < 1e-12


# Probabilistic PCA: y_n ~ N(W h_n, noise variance), W with orthogonal columns.
rng = np.random.default_rng(2)
YS = rng.normal(size=(20, 2)) @ rng.normal(size=(2, 3)) + 0.4 * rng.normal(size=(20, 3))
YS = YS - YS.mean(0)
VALUES, AXES = (x[..., ::-1] for x in np.linalg.eigh(YS.T @ YS / 20))
NOISE = VALUES[2]
W = AXES[:, :2] * np.sqrt(VALUES[:2] - NOISE)
# the maximum (Tipping & Bishop 1999, eq. 4 and 8)
PPCA = -10 * (3 * np.log(2 * np.pi) + np.sum(np.log(VALUES)) + 3)


def linear(variance, lengthscale):
    return pg.kernels.Linear(1.0)


class LinearEncoder(eqx.Module):
    """Means B y, and one log scale for each dimension."""

    B: jax.Array
    log_scale: jax.Array

    def __call__(self, row):
        return jnp.concatenate([self.B @ row, self.log_scale])


def pca_bound(K, h, key):
    """Of models.gplvm with a linear kernel, u = f(e_1), f(e_2) known: f_d(h) = (W h)_d."""
    v = Values(jnp.asarray(W) / jnp.sqrt(1 + 1e-8))
    hyper = {"lengthscale": jnp.ones(2), "variance": jnp.ones(()), "noise_scale": jnp.sqrt(NOISE)}
    batch = Batch(
        (jnp.arange(20.0),), {"y": jnp.asarray(YS)}, jnp.ones(20), key, {}, jnp.arange(20)
    )
    variational = Variational({"f": Points(jnp.eye(2))}, {"f": v}, {"h": h})
    return terms(
        PCA, Expectation(3), pg.Layers(num_importance=K), OF, hyper, variational, batch
    ).bound


PCA = functools.partial(gplvm, kernel=linear)
POSTERIOR = np.concatenate(
    [YS @ W / VALUES[:2], np.broadcast_to(0.5 * np.log(NOISE / VALUES[:2]), (20, 2))], 1
)


def test_the_exact_posterior_gives_the_likelihood_of_probabilistic_pca():
    """Every weight is then log p(y_n), whatever the draws; another q(h) gives less."""
    C = W @ W.T + NOISE * np.eye(3)
    assert abs(np.sum(dist.MultivariateNormal(0.0, C).log_prob(YS)) - PPCA) < 1e-9
    encoder = LinearEncoder(jnp.asarray((W / VALUES[:2]).T), jnp.asarray(POSTERIOR[0, 2:]))
    exact = jax.jit(functools.partial(pca_bound, 3))
    for q in (FreeGaussian(jnp.asarray(POSTERIOR)), Encoded(encoder, "y")):
        for seed in range(3):
            assert abs(exact(q, random.key(seed)) - PPCA) < 1e-4
    wider = FreeGaussian(jnp.asarray(POSTERIOR + [0.0, 0.0, 0.3, 0.3]))
    bounds = over_keys(lambda key: pca_bound(3, wider, key), 400)
    assert bounds.mean() < PPCA - 4 * standard_error(bounds)


def test_free_and_amortised_latents_reach_the_likelihood_of_probabilistic_pca():
    start = {
        "free": FreeGaussian(jnp.zeros((20, 4))),
        "encoder": Encoded(LinearEncoder(jnp.zeros((2, 3)), jnp.zeros(2)), "y"),
    }
    optimiser = optax.adam(optax.cosine_decay_schedule(0.05, 1500, 1e-3))

    @jax.jit
    def trained(q, keys):
        def step(carry, key):
            q, state = carry
            gradient = jax.grad(lambda q: -pca_bound(1, q, key))(q)
            updates, state = optimiser.update(gradient, state)
            return (optax.apply_updates(q, updates), state), None

        (q, _), _ = lax.scan(step, (q, optimiser.init(q)), keys)
        return q, jnp.mean(jax.vmap(lambda key: pca_bound(3, q, key))(keys[:200]))

    bounds = {k: float(trained(q, random.split(random.key(0), 1500))[1]) for k, q in start.items()}
    assert PPCA - 0.03 < min(bounds.values()) and max(bounds.values()) < PPCA + 1e-2


def discrete(X, y=None):
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", dist.Bernoulli(0.5))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(), jnp.concatenate([X, h[:, None]], -1)))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f, 1.0), obs=y)


def stream():
    return pg.Stream([(np.asarray(X), np.asarray(Y))], 5)


SVGP = functools.partial(pg.SVGP, num_inducing=3, max_steps=1)
BAD = {
    "encoder": (
        latent,
        {"latents": pg.Amortised(encoder=lambda row: jnp.zeros(3))},
        pg.DataError,
        "2 are needed",
    ),
    "encoder input": (
        latent,
        {"latents": pg.Amortised(encoder=lambda row: jnp.zeros((2, 7)) @ row)},
        pg.DataError,
        r"encoder fails on a row of shape \(2,\), the columns of 'xy' \(TypeError",
    ),
    "encoder output": (
        latent,
        {"latents": pg.Amortised(encoder=lambda row: (row[:1], row[:1]))},
        pg.DataError,
        r"encoder gives a tuple for a row of shape \(2,\)",
    ),
    "no copies": (latent, {"num_importance": 0}, pg.DataError, "num_importance=0"),
    "no paths": (latent, {"num_paths": 0}, pg.DataError, "num_paths=0"),
    "no latents": (deep, {"num_importance": 5}, pg.ModelError, "no per-datum latent"),
    "free shape": (
        latent,
        {"latents": pg.Free(init=np.zeros((5, 2)))},
        pg.DataError,
        r"needs \(5, 1\)",
    ),
    "free stream": (latent, {"latents": pg.Free()}, pg.DataError, "Stream needs an encoder"),
    "discrete": (discrete, {}, pg.ModelError, "discrete"),
    "inner": (
        latent_deep,
        {"num_importance": 2, "doubly_reparameterised": True},
        pg.ModelError,
        "doubly",
    ),
    "drawn": (
        latent,
        {"num_importance": 2, "doubly_reparameterised": True, "expected_last": False},
        pg.ModelError,
        "doubly",
    ),
}


@pytest.mark.one_case
@pytest.mark.parametrize(("model", "options", "error", "words"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_a_typed_error(model, options, error, words):
    args, kwargs = ((stream(),), {}) if words.startswith("Stream") else ((X,), {"y": Y})
    with pytest.raises(error, match=words):
        pg.fit(model, SVGP(layers=pg.Layers(**options)), 0, *args, **kwargs)


@pytest.mark.parametrize(
    "make",
    [lambda: pg.Free(scale=0.0), lambda: pg.Amortised(sees="z"), lambda: pg.Amortised(width=0)],
)
def test_configurations_outside_their_range(make):
    with pytest.raises(pg.DataError, match="scale=0.0|sees='z'|width=0"):
        make()


@functools.cache
def fitted(sees):
    rng = np.random.default_rng(5)
    X = rng.uniform(-2, 2, size=(25, 1))
    y = np.sin(2 * X[:, 0]) + rng.choice([-0.7, 0.7], 25) + 0.1 * rng.normal(size=25)
    method = pg.SVGP(
        num_inducing=8, max_steps=40, layers=pg.Layers(latents=pg.Amortised(sees=sees))
    )
    return pg.fit(latent, method, 0, X, y=y)


X_NEW, Y_NEW = np.array([[-1.5], [0.0], [1.2]]), np.array([0.3, -0.5, 1.0])


def averaged(fit, mean, scale, num=100_000):
    """(log p(y | x), its standard error) by draws of h, in NumPy; f and the noise are
    integrated.
    """
    h = mean + scale * np.random.default_rng(0).normal(size=(num, 3))
    inputs = np.stack([np.broadcast_to(X_NEW[:, 0], h.shape), h], -1).reshape(-1, 2)
    f = fit.posterior(jnp.asarray(inputs))
    variance = np.asarray(f.variance).reshape(h.shape) + float(fit.hyper["noise_scale"]) ** 2
    density = np.exp(
        -0.5 * (Y_NEW - np.asarray(f.mean).reshape(h.shape)) ** 2 / variance
    ) / np.sqrt(2 * np.pi * variance)
    return np.log(density.mean(0)), density.std(0) / density.mean(0)


@pytest.mark.slow
def test_new_latents_come_from_the_prior_where_q_needs_y():
    fit = fitted("xy")
    exact, spread = averaged(fit, 0.0, 1.0)
    # The fit's own draws are a thousand.
    assert np.all(np.abs(fit.log_density(X_NEW, Y_NEW) - exact) < 4 * spread / np.sqrt(1000))
    assert spread.max() > 0.05


@pytest.mark.slow
def test_an_encoder_that_sees_x_alone_is_used_at_new_inputs_and_kept(tmp_path):
    fit = fitted("x")
    packed = np.asarray(jax.vmap(fit.local["h"].encoder)(jnp.asarray(X_NEW)))
    exact, spread = averaged(fit, packed[:, 0], np.exp(packed[:, 1]))
    found, error = fit.log_density(X_NEW, Y_NEW, with_error=True)
    assert np.all(np.abs(found - exact) < 4 * error) and np.all(error < 0.05)
    many, _ = fit.log_density(X_NEW, Y_NEW, num_draws=100_000, with_error=True)
    assert np.all(np.abs(many - exact) < 0.01)
    prior, _ = averaged(fit, 0.0, 1.0)
    assert np.any(np.abs(prior - exact) > 8 * spread / np.sqrt(1000))
    again = pg.load(fit.save(tmp_path / "a.fit"), latent)
    np.testing.assert_allclose(again.log_density(X_NEW, Y_NEW), found, atol=1e-12)


# Inputs known up to an error: q(h) starts around its prior, and reaches what a search over all
# factorised Gaussians q(h), with the best q(u) for each, finds by exact moments of the kernel.
ERRORS = np.random.default_rng(0)
AT = np.sort(ERRORS.uniform(-2.0, 2.0, 16))
SEEN = np.sin(2.0 * AT) + 0.1 * ERRORS.normal(size=16)


def uncertain(X, sd, y=None):
    with numpyro.plate("data", X.shape[0]):
        h = numpyro.sample("h", dist.Normal(X, sd).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.8), h))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


@functools.cache
def best_factorised(sd):
    """(the bound, nats, E[y] at -1, 0 and 1.5), from a dense search that starts at the prior."""
    z, square = np.linspace(-3.2, 3.2, 20), 0.64
    K = np.exp(-0.5 * (z[:, None] - z) ** 2 / square) + 1e-6 * np.eye(20)
    root = jnp.linalg.cholesky(K)
    whiten = functools.partial(jax.scipy.linalg.solve_triangular, root, lower=True)

    def cross(m, v):
        shape = jnp.exp(-0.5 * (m[:, None] - z) ** 2 / (square + v)[:, None])
        return whiten((jnp.sqrt(square / (square + v))[:, None] * shape).T)

    def pairs(m, v):
        wide, middle = square + 2.0 * v[:, None, None], 0.5 * (z[:, None] + z)
        far = (z[:, None] - z) ** 2 / (4.0 * square) + (m[:, None, None] - middle) ** 2 / wide
        return whiten(whiten(jnp.sum(jnp.sqrt(square / wide) * jnp.exp(-far), 0)).T)

    def evaluated(packed):
        m, v = packed[:16], jnp.exp(2.0 * packed[16:])
        A, b = pairs(m, v), cross(m, v) @ SEEN / 0.01
        B = jnp.eye(20) + A / 0.01
        fit = 16 * jnp.log(2.0 * jnp.pi * 0.01) + SEEN @ SEEN / 0.01 + (16 - jnp.trace(A)) / 0.01
        fit = 0.5 * (b @ jnp.linalg.solve(B, b) - fit - jnp.linalg.slogdet(B)[1])
        kl = 0.5 * jnp.sum((v + (m - AT) ** 2) / sd**2 - 1.0 - jnp.log(v / sd**2))
        return kl - fit, jnp.linalg.solve(B, b)

    slope = jax.jit(jax.value_and_grad(lambda packed: evaluated(packed)[0]))
    start = np.concatenate([AT, np.full(16, np.log(sd))])
    end = minimize(slope, start, jac=True, method="L-BFGS-B", options={"maxiter": 500})
    new = cross(jnp.array([-1.0, 0.0, 1.5]), jnp.full(3, sd**2))
    return -end.fun, np.asarray(new.T @ evaluated(end.x)[1])


@pytest.mark.one_case
@pytest.mark.parametrize("seed", [1, 0])
@pytest.mark.parametrize("latents", [pg.Amortised(), pg.Free()], ids=["encoder", "free"])
@pytest.mark.parametrize("sd", [0.3, 0.1, 0.03])
def test_uncertain_inputs_reach_the_best_factorised_bound(sd, latents, seed, tmp_path):
    fit = pg.fit(
        uncertain, pg.SVGP(layers=pg.Layers(latents=latents)), seed, AT[:, None], sd, y=SEEN
    )
    bound, mean = best_factorised(sd)
    error = fit.stats["log_evidence_se"]
    assert abs(fit.log_evidence - bound) < 4.0 * error + 0.3  # of a few draws the error is rough
    found = fit.predict(np.array([[-1.0], [0.0], [1.5]]), sd).mean
    np.testing.assert_allclose(found, mean, atol=0.1)
    if isinstance(latents, pg.Amortised):
        fit.save(tmp_path / "fit.zip")
        read = pg.load(tmp_path / "fit.zip", uncertain)
        assert eqx.tree_equal(read.local, fit.local)
        h = read.infer_latents(2, AT[:4, None], SEEN[:4], sd).draws["h"]
        assert np.abs(np.mean(h, 0)[:, 0] - AT[:4]).max() < 1.5 * sd


PLACES = np.linspace(1.0, 9.0, 30)
PRIORS = {
    "normal": lambda x: dist.Normal(2.0 * x, 0.1),
    "wide": lambda x: dist.Normal(0.0 * x, 3.0),
    "tails": lambda x: dist.StudentT(4.0, x, 0.1),
    "positive": lambda x: dist.LogNormal(0.5 * x, 0.2),
    "interval": lambda x: dist.Uniform(x - 0.2, x + 0.2),
    "standard": lambda x: dist.Normal(0.0 * x, 1.0),
}


def quartiles(d):
    return np.quantile(np.asarray(d.sample(random.key(5), (4000,)))[..., 0], [0.25, 0.5, 0.75], 0)


@pytest.mark.parametrize("latents", [pg.Free(scale=1.0), pg.Amortised()], ids=["free", "encoder"])
@pytest.mark.parametrize("prior", PRIORS)
def test_q_of_latents_starts_around_their_prior(prior, latents):
    """Within the prior's own width of its median."""

    def model(X, y=None):
        with numpyro.plate("data", X.shape[0]):
            h = numpyro.sample("h", PRIORS[prior](X).to_event(1))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), h))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    guide = pg.guide(model, {"f": pg.SparsePosterior(np.zeros((2, 1)))}, latents=latents)
    seeded = handlers.seed(guide, 3)
    trace = handlers.trace(seeded).get_trace(jnp.asarray(PLACES[:, None]), y=jnp.zeros(30))
    low, median, high = quartiles(PRIORS[prior](PLACES[:, None]))
    found = quartiles(trace["h"]["fn"])
    off = (found[1] - median) / (high - low)
    widths = (found[2] - found[0]) / (high - low)
    assert np.abs(off).max() < 1.0 and 0.3 < widths.min() and widths.max() < 1.5


@pytest.mark.slow
def test_an_encoder_of_single_precision_is_trained_in_double_precision():
    """As libraries of neural networks make them by default: a scan refused the mixture."""
    weights = jnp.zeros((2, 2), jnp.float32)
    encoder = jax.tree_util.Partial(lambda w, row: w @ row, weights)
    method = SVGP(layers=pg.Layers(latents=pg.Amortised(encoder=encoder)))
    fit = pg.fit(latent, method, 0, X, y=Y, throw=False)
    assert np.isfinite(fit.log_evidence)
