"""Layers and copies: what feeds what, the doubly stochastic bound against closed forms and NumPy,
draws joint over copies.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions.kl import kl_divergence
from scipy.special import logsumexp

import ppl_gp as pg
from models.deep import deep
from models.gplvm import gplvm
from models.latent import latent
from models.latent_deep import latent_deep
from ppl_gp.deep import bound as deep_layers
from ppl_gp.deep.bound import _over_copies, draw_copy, terms
from ppl_gp.deep.latents import Encoded, FreeGaussian, mlp_encoder
from ppl_gp.deep.structure import Structure, structure_of
from ppl_gp.infer.batches import as_batch
from ppl_gp.infer.sources import ArraySource
from ppl_gp.reading.roles import roles
from ppl_gp.reading.tracing import run
from ppl_gp.sparse.bound import Batch, Variational
from ppl_gp.sparse.expectation import Expectation
from ppl_gp.sparse.families import FullGaussian, Values, Whitened
from ppl_gp.sparse.inducing import Points
from ppl_gp.sparse.process import sparse_process

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(6, 2)))
Y = jnp.sin(2.0 * X[:, 0]) + 0.3 * X[:, 1]
HOW = Expectation()


def layers_of(model, args, kwargs):
    trace = run(model, args, kwargs)
    return structure_of(roles(trace), trace, lambda values: run(model, args, kwargs, values))


def batch_of(y=Y, rows=None, inputs=X):
    return Batch((inputs,), {"y": y}, jnp.ones(len(inputs)), random.key(1), {}, rows)


def gaussian(seed, *shape, scale=0.3):
    """q(v) with a full random covariance."""
    rng = np.random.default_rng(seed)
    eye = np.broadcast_to(np.eye(shape[-1]), (*shape, shape[-1]))
    return FullGaussian(
        jnp.asarray(rng.normal(size=shape)),
        jnp.asarray(np.tril(scale * rng.normal(size=(*shape, shape[-1]))) + 0.5 * eye),
    )


STRUCTURES = {
    "deep1": (functools.partial(deep, depth=1), (("f",), (), (), ())),
    "deep2": (deep, (("f_1", "f"), ("f_1",), (), ())),
    "deep3": (functools.partial(deep, depth=3), (("f_1", "f_2", "f"), ("f_1", "f_2"), (), ())),
    "latent": (latent, (("f",), (), ("h",), ("f",))),
    "latent_deep": (
        functools.partial(latent_deep, depth=3),
        (("f_1", "f_2", "f"), ("f_1", "f_2"), ("h",), ("f_1", "f_2", "f")),
    ),
}


@pytest.mark.parametrize(("model", "found"), STRUCTURES.values(), ids=STRUCTURES)
def test_layers_are_read_off_the_model(model, found):
    of = layers_of(model, (X,), {"y": Y})
    assert (of.gps, of.inner, of.latents, of.varying) == found
    assert of.outer == ("f",) and of.is_shallow == (found == STRUCTURES["deep1"][1])


def test_layers_of_a_gplvm_and_of_a_latent_that_one_branch_alone_sees():
    of = layers_of(gplvm, (jnp.arange(6.0),), {"y": jnp.ones((6, 3))})
    assert tuple(of) == (("f",), (), ("h",), ("f",), ())

    def branches(X, y=None):
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", dist.Normal(0.0, 1.0))
        a = numpyro.sample("a", pg.GP(pg.kernels.RBF(), X))
        b = numpyro.sample("b", pg.GP(pg.kernels.RBF(), h[:, None]))
        c = numpyro.sample("c", pg.GP(pg.kernels.RBF(), a[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(b + c, 1.0), obs=y)

    assert tuple(layers_of(branches, (X,), {"y": Y})) == (
        ("a", "b", "c"),
        ("a",),
        ("h",),
        ("b",),
        ("a",),
    )


def test_a_kernel_or_mean_computed_from_another_gp_is_refused():
    def modulated(X, y=None, where="kernel"):
        g = numpyro.sample("g", pg.GP(pg.kernels.RBF(), X))
        kernel = pg.kernels.RBF(jnp.exp(g[0]) if where == "kernel" else 1.0)
        mean = g[0] if where == "mean" else None
        f = numpyro.sample("f", pg.GP(kernel, X, mean))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    for where in ("kernel", "mean"):
        with pytest.raises(pg.ModelError, match="computed from site 'g'"):
            layers_of(modulated, (X,), {"y": Y, "where": where})


def test_a_layer_normalised_over_rows_is_refused():
    def normalised(X, y=None):
        g = numpyro.sample("g", pg.GP(pg.kernels.RBF(), X))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(), (g - jnp.mean(g))[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    with pytest.raises(pg.NotPointwiseError, match="couples values.*g - jnp.mean"):
        pg.fit(normalised, pg.SVGP(num_inducing=3, max_steps=1), 0, X, y=Y)


LAST = {
    "lengthscale": jnp.array([1.0, 2.0]),
    "variance": jnp.asarray(1.3),
    "noise_scale": jnp.asarray(0.4),
}


def last_layer(inputs, hyper=LAST):
    """The bound's terms of one GP on given inputs, q(u) at the points Z."""

    def flat(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(hyper["variance"], hyper["lengthscale"]), X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, hyper["noise_scale"]), obs=y)

    variational = Variational({"f": Points(Z)}, {"f": gaussian(2, 4)})
    of = Structure(("f",), (), (), (), ("f",))
    return jax.jit(lambda b: terms(flat, HOW, pg.Layers(), of, {}, variational, b))(
        batch_of(inputs=inputs)
    )


Z = jnp.asarray(np.random.default_rng(5).normal(size=(4, 2)))


@pytest.mark.parametrize("num_importance", [1, 4])
def test_a_latent_that_nothing_sees_leaves_the_shallow_bound(num_importance):
    """Through the layered code: with q(h) = p(h) every weight is one."""

    def unseen(X, y=None):
        deep(X, y, depth=1)
        with numpyro.plate("data", len(X)):
            numpyro.sample("h", dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    q = {"h": FreeGaussian(jnp.zeros((6, 2)))}
    variational = Variational({"f": Points(Z)}, {"f": gaussian(2, 4)}, q)
    of = layers_of(unseen, (X,), {"y": Y})
    t = jax.jit(
        lambda v: terms(
            unseen, HOW, pg.Layers(num_importance=num_importance), of, LAST, v, batch_of()
        )
    )(variational)
    assert of.latents == ("h",) and abs(t.bound - last_layer(X).bound) < 1e-9


def test_depth_one_is_svgp():
    of = layers_of(functools.partial(deep, depth=1), (X,), {"y": Y})
    variational = Variational({"f": Points(Z)}, {"f": gaussian(2, 4)})
    model = functools.partial(deep, depth=1)
    ours = jax.jit(lambda v: terms(model, HOW, pg.Layers(), of, LAST, v, batch_of()))(variational)
    theirs = last_layer(X)
    assert (
        abs(ours.bound - theirs.bound) < 1e-10
        and abs(ours.kl - theirs.kl) < 1e-10
        and ours.kl > 1.0
    )


def test_an_inner_layer_without_noise_is_a_change_of_inputs():
    """Prior variance 0: the identity. q(v) = delta at Z = X: the values R v. Then the bound is the
    shallow one there.
    """
    of = layers_of(deep, (X,), {"y": Y})
    inner = {"lengthscale_1": jnp.ones(2), "variance_1": jnp.asarray(1e-16)}
    q = {"f_1": gaussian(3, 2, 4), "f": gaussian(2, 4)}
    variational = Variational({"f_1": Points(Z), "f": Points(Z)}, q)
    t = jax.jit(lambda v: terms(deep, HOW, pg.Layers(), of, {**inner, **LAST}, v, batch_of()))(
        variational
    )
    assert abs(t.expected - last_layer(X).expected) < 1e-6

    def known(X, y=None):
        with numpyro.plate("units", 2):
            H = numpyro.sample(
                "f_1", pg.GP(pg.kernels.Matern12(1.0, 0.5), X, pg.means.Identity(), 1e-16)
            )
        deep(H.T, y, depth=1)

    v = gaussian(4, 2, 6).loc
    root = np.linalg.cholesky(np.asarray(pg.kernels.Matern12(1.0, 0.5)(X, X)))
    moved = X + jnp.asarray(root @ np.asarray(v).T)
    variational = Variational(
        {"f_1": Points(X), "f": Points(Z)}, {"f_1": Values(v), "f": gaussian(2, 4)}
    )
    of = layers_of(known, (X,), {"y": Y})
    t = jax.jit(lambda v: terms(known, HOW, pg.Layers(), of, LAST, v, batch_of()))(variational)
    exact = last_layer(moved)
    assert abs(t.bound - exact.bound) < 1e-6 and abs(exact.bound - last_layer(X).bound) > 1.0


def rbf(A, B, variance, lengthscale):
    d = (A[..., :, None, :] - B[..., None, :, :]) / lengthscale
    return variance * np.exp(-0.5 * np.sum(d**2, -1))


def moments(x, Z, m, L, variance, lengthscale):
    """Mean (..., K) and covariance (..., K, K) of q(f(x)), zero prior mean, x (..., K, D), dense
    formulas.
    """
    jitter = 1e-8 * variance
    R = np.linalg.cholesky(rbf(Z, Z, variance, lengthscale) + jitter * np.eye(len(Z)))
    A = rbf(x, Z, variance, lengthscale) @ np.linalg.inv(R).T
    S = np.eye(len(Z)) - L @ L.T
    prior = rbf(x, x, variance, lengthscale) + jitter * np.eye(x.shape[-2])
    return A @ m, prior - A @ S @ np.swapaxes(A, -1, -2)


def by_numpy(q_f1, q_f, packed, hyper, Z1, Z2, S, K, seed=0):
    """S draws of the importance-weighted sum over data of models.latent_deep on one column of X,
    depth 2.
    """
    rng = np.random.default_rng(seed)
    x, y, N = np.asarray(X[:, 0]), np.asarray(Y), len(X)
    m, s = packed[:, 0], np.exp(packed[:, 1])
    h = m[:, None] + s[:, None] * rng.normal(size=(S, N, K))
    log_ratio = -0.5 * h**2 + 0.5 * ((h - m[:, None]) / s[:, None]) ** 2 + np.log(s)[:, None]
    inputs = np.stack([np.broadcast_to(x[:, None], h.shape), h], -1)
    below = []
    for unit in range(2):
        mean, cov = moments(
            inputs,
            Z1,
            *(np.asarray(p[unit]) for p in q_f1),
            hyper["variance_1"],
            hyper["lengthscale_1"],
        )
        draw = mean + np.einsum(
            "...ij,...j->...i", np.linalg.cholesky(cov), rng.normal(size=mean.shape)
        )
        below.append(inputs[..., unit] + draw)
    mean, cov = moments(
        np.stack(below, -1), Z2, *map(np.asarray, q_f), hyper["variance"], hyper["lengthscale"]
    )
    variance, noise = np.diagonal(cov, axis1=-2, axis2=-1), hyper["noise_scale"] ** 2
    expected = (
        -0.5 * np.log(2 * np.pi * noise) - 0.5 * ((y[:, None] - mean) ** 2 + variance) / noise
    )
    return np.sum(logsumexp(expected + log_ratio, -1) - np.log(K), -1)


def test_the_bound_averages_to_what_numpy_gives():
    K, packed = 3, np.concatenate([RNG.normal(size=(6, 1)), RNG.normal(-0.5, 0.2, size=(6, 1))], 1)
    hyper = {k: np.asarray(v) for k, v in LAST.items()} | {
        "lengthscale_1": np.array([0.8, 1.5]),
        "variance_1": 0.7,
    }
    q1, q2 = gaussian(6, 2, 4), gaussian(7, 4)
    q = Variational(
        {"f_1": Points(Z), "f": Points(Z[:, ::-1])},
        {"f_1": q1, "f": q2},
        {"h": FreeGaussian(jnp.asarray(packed))},
    )
    of = layers_of(latent_deep, (X[:, :1],), {"y": Y})
    given = {k: jnp.asarray(v) for k, v in hyper.items()}

    def one(key):
        return terms(
            latent_deep,
            HOW,
            pg.Layers(num_importance=K),
            of,
            given,
            q,
            batch_of(inputs=X[:, :1])._replace(key=key),
        ).expected

    ours = np.asarray(jax.jit(jax.vmap(one))(random.split(random.key(0), 4000)))
    lower = [np.tril(np.asarray(p)) for p in (q1.scale_tril, q2.scale_tril)]
    theirs = by_numpy(
        (q1.loc, lower[0]),
        (q2.loc, lower[1]),
        packed,
        hyper,
        np.asarray(Z),
        np.asarray(Z[:, ::-1]),
        4000,
        K,
    )
    error = np.sqrt(ours.var() / len(ours) + theirs.var() / len(theirs))
    assert abs(ours.mean() - theirs.mean()) < 4 * error and error < 0.02 * abs(theirs.mean())
    np.testing.assert_allclose(ours.std(), theirs.std(), rtol=0.1)


def processes():
    """A posterior process of every form, by name, for inputs with one column."""
    prior = pg.GP(pg.kernels.Matern32(1.4, 0.8), jnp.zeros((1, 1)), 0.3)
    points, full, many = (
        Points(jnp.linspace(-2.0, 2.0, 5)[:, None]),
        gaussian(1, 5),
        gaussian(2, 3, 5),
    )
    features = pg.features.LaplacianFeatures(5, -3.0, 3.0)
    diagonal = Whitened(full.loc, jnp.linspace(0.1, 0.9, 5), jnp.zeros(()))
    return {
        "points": sparse_process(prior, points, full.whitened()),
        "three functions": sparse_process(prior, points, many.whitened()),
        "diagonal": sparse_process(prior, points, diagonal),
        "features": sparse_process(prior, features, gaussian(3, features.num).whitened()),
    }


COPIES = jnp.asarray(np.random.default_rng(9).normal(size=(4, 3, 1)))  # K copies of B data


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("name", ["points", "three functions", "diagonal", "features"])
def test_copies_have_the_joint_covariance(name):
    process = processes()[name]
    mean, covariance = _over_copies(process, process.at(COPIES[0]), COPIES)
    for b in range(3):
        exact_mean, exact = process.joint(process.at(COPIES[:, b]))
        np.testing.assert_allclose(mean[..., b, :], exact_mean, atol=1e-10)
        np.testing.assert_allclose(covariance[..., b, :, :], exact, atol=1e-10)
    marginal = process.marginals(process.at(COPIES[1]))
    np.testing.assert_allclose(mean[..., 1], marginal[0], atol=1e-10)
    np.testing.assert_allclose(covariance[..., 1, 1], marginal[1], atol=1e-10)


def draw_rows(process, new, key):
    """Each row from its marginal, as if the copies were other data."""
    mean, variance = process.marginals(new)
    return mean + jnp.sqrt(variance) * random.normal(key, mean.shape)


def drawn(process, inputs, key):
    """f (*F, B) of each copy, (K, *F, B)."""
    one = lambda X: draw_copy(process, process.at(X), key, "k")  # noqa: E731
    return jax.vmap(one, axis_name="k")(inputs)


def test_draws_of_copies_have_that_covariance_and_rows_are_apart():
    process, S = processes()["points"], 20_000
    f = np.asarray(
        jax.jit(jax.vmap(lambda k: drawn(process, COPIES, k)))(random.split(random.key(0), S))
    )
    mean, covariance = (np.asarray(x) for x in _over_copies(process, process.at(COPIES[0]), COPIES))
    variance = np.diagonal(covariance, axis1=-2, axis2=-1)  # (B, K)
    assert np.all(np.abs(f.mean(0).T - mean) < 4 * np.sqrt(variance / S))
    white = (f - mean.T) / np.sqrt(variance).T  # (S, K, B)
    correlation = np.einsum("skb,sjc->bckj", white, white) / S
    for b in range(3):
        exact = covariance[b] / np.sqrt(variance[b][:, None] * variance[b])
        assert np.all(np.abs(correlation[b, b] - exact) < 4 * np.sqrt((1 + exact**2) / S))
        assert all(np.all(np.abs(correlation[b, c]) < 4.5 / np.sqrt(S)) for c in range(3) if c != b)


@pytest.mark.slow
def test_copies_at_one_input_have_one_value_and_finite_gradients():
    process = processes()["three functions"]
    same = jnp.broadcast_to(COPIES[:1], COPIES.shape)
    f = drawn(process, same, random.key(0))
    sd = float(np.sqrt(1.4 * 1e-8))  # of the prior's jitter
    assert f.shape == (4, 3, 3) and np.ptp(np.asarray(f), 0).max() < 12 * sd
    assert (
        np.ptp(np.asarray(draw_rows(process, process.at(same[0]), random.key(0))), -1).max()
        > 100 * sd
    )
    gradient = jax.grad(lambda p, x: jnp.sum(jnp.sin(drawn(p, x, random.key(0)))), (0, 1))(
        process, same
    )
    assert (
        all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
        and np.abs(gradient[1]).max() > 1e-3
    )


LEVELS = jnp.asarray(3.0 * (-1.0) ** np.arange(10))


def level(X, y=None):
    """One unknown level: f does not see the latent, nor x. log p(y) = -5 log 2 pi - log(11) / 2 -
    45.
    """
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.Constant(1.0), jnp.concatenate([X, h], -1)))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f, 1.0), obs=y)


def level_bounds(K, num=4000):
    inputs = jnp.zeros((10, 1))
    of = layers_of(level, (inputs,), {"y": LEVELS})
    prior = FullGaussian(jnp.zeros(1), jnp.eye(1))
    q = Variational(
        {"f": Points(jnp.zeros((1, 2)))}, {"f": prior}, {"h": FreeGaussian(jnp.zeros((10, 2)))}
    )
    batch = Batch((inputs,), {"y": LEVELS}, jnp.ones(10), random.key(0))
    sampling = pg.Layers(num_importance=K, expected_last=False)
    one = lambda key: terms(level, HOW, sampling, of, {}, q, batch._replace(key=key)).bound  # noqa: E731
    return np.asarray(
        jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=200))(
            random.split(random.key(2), num)
        )
    )


EVIDENCE = -5 * np.log(2 * np.pi) - 0.5 * np.log(11.0) - 45.0


@pytest.mark.one_case
@pytest.mark.parametrize(("K", "num"), [(1, 4000), (10, 4000), (100, 400)])
def test_copies_of_one_function_bound_the_evidence(K, num):
    """E sum_n log N(y_n; u, 1) = -5 log 2 pi - 50 at any K, below log p(y) = -55.388."""
    bounds = level_bounds(K, num)
    error = bounds.std() / np.sqrt(num)
    assert abs(bounds.mean() - (-5 * np.log(2 * np.pi) - 50.0)) < 4 * error + 1e-3
    assert bounds.mean() + 4 * error < EVIDENCE


def test_copies_of_separate_functions_would_not(monkeypatch):
    """10 log N(3; 0, 2) = -35.155 as K grows: what the test above would see."""

    def apart(process, new, key, axis):
        return draw_rows(process, new, random.fold_in(key, jax.lax.axis_index(axis)))

    monkeypatch.setattr(deep_layers, "draw_copy", apart)
    bounds = level_bounds(100, 400)
    assert bounds.mean() > EVIDENCE + 10.0 and abs(bounds.mean() + 35.155) < 1.5


def shuffled(latents):
    """(bound, gradient in q(h)) of all data and of the batches of one epoch, with q(h) nearly
    points.
    """
    N, B = 12, 4
    rng = np.random.default_rng(3)
    inputs, y = rng.normal(size=(N, 1)), rng.normal(size=N)
    of = layers_of(latent, (jnp.asarray(inputs),), {"y": jnp.asarray(y)})

    @jax.jit
    def bound(latents, batch):
        q = Variational({"f": Points(Z)}, {"f": gaussian(2, 4)}, {"h": latents})
        return terms(latent, HOW, pg.Layers(), of, LAST, q, batch).bound

    value_and_grad = jax.jit(jax.value_and_grad(bound))
    source = ArraySource((inputs,), {"y": y}, B, 0)
    rows = [source.indices(i) for i in range(N // B)]
    parts = [
        value_and_grad(latents, as_batch(source.rows(r), random.key(i))) for i, r in enumerate(rows)
    ]
    whole = ArraySource((inputs,), {"y": y}, N, 0)
    return value_and_grad(latents, as_batch(whole.rows(np.arange(N)), random.key(9))), parts, rows


def nearly_points(what):
    rng = np.random.default_rng(4)
    if what == "free":
        return FreeGaussian(jnp.asarray(np.stack([rng.normal(size=12), np.full(12, -20.0)], 1)))
    rows = jnp.asarray(rng.normal(size=(12, 2)))
    encoder = mlp_encoder(rows, 1, 5, 1, random.key(0), scale=float(np.exp(-20.0)))
    return Encoded(encoder, "xy")


@pytest.mark.one_case
@pytest.mark.parametrize("what", ["free", "encoder"])
def test_the_batches_of_an_epoch_average_to_the_full_bound(what):
    (whole, slope), parts, rows = shuffled(nearly_points(what))
    values = [v for v, _ in parts]
    assert abs(np.mean(values) - whole) < 1e-6 and np.ptp(values) > 0.1
    assert sorted(np.concatenate(rows)) == list(range(12)) and sorted(rows[0]) != [0, 1, 2, 3]
    mean = jax.tree.map(lambda *g: sum(g) / len(g), *(g for _, g in parts))
    for a, b in zip(jax.tree.leaves(mean), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_rows_outside_a_batch_get_no_gradient():
    _, parts, rows = shuffled(nearly_points("free"))
    for (_, gradient), inside in zip(parts, rows, strict=True):
        moved = np.abs(np.asarray(gradient.packed)).sum(1) > 0
        assert sorted(np.flatnonzero(moved)) == sorted(inside)


def test_the_divergence_of_a_vector_latent_is_in_closed_form():
    site = run(latent, (X,), {"y": Y}, {})["h"]
    q = FreeGaussian(jnp.asarray(RNG.normal(size=(6, 2)))).at(site, None, (X,), {})
    m, s = q.mean[:, 0], jnp.sqrt(q.variance[:, 0])
    np.testing.assert_allclose(
        kl_divergence(q, site["fn"]), 0.5 * (s**2 + m**2 - 1) - jnp.log(s), rtol=1e-10
    )


@pytest.mark.parametrize("units", [None, 3], ids=["no plate", "another plate"])
def test_widths_that_do_not_fit_are_told(units):
    def misfit(X, y=None):
        gp = pg.GP(pg.kernels.RBF(), X, mean=pg.means.Identity())
        with contextlib.nullcontext() if units is None else numpyro.plate("units", units):
            g = numpyro.sample("g", gp)
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(), g.T))
        numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    X = np.linspace(-1.0, 1.0, 12).reshape(6, 2)
    with pytest.raises(pg.DataError, match="GP site 'g' has shape .* a plate of 2 units"):
        pg.fit(misfit, pg.SVGP(num_inducing=3, max_steps=1), 0, X, y=X[:, 0])
