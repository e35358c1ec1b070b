"""Effects in the ways in which JAX lets one write a linear map: each is proved, integrated and
equal to dense algebra; what is no such map is refused by that proof, and what only looks like one
by name.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.scipy.linalg import solve_triangular

import ppl_gp as pg
from ppl_gp.reading.dependence import Dependence, dependence

G = 4
A = jnp.asarray(np.random.default_rng(0).normal(size=(G, G))) + 3.0 * jnp.eye(G)
KERNEL = jnp.array([0.2, 0.5, 0.3])
PLACES = jnp.array([0, 0, 2, 5])


def autoregression(u):
    def step(before, e):
        return 0.7 * before + e, before

    return lax.scan(step, 0.0, u)[1]


LINEAR = {
    "contrasts": lambda u: jnp.zeros(G + 1).at[1:].set(u),
    "written over": lambda u: jnp.tile(u, 2).at[:G].set(2.0 * u),
    "added at places": lambda u: jnp.ones(6).at[PLACES].add(u),
    "taken away at places": lambda u: jnp.ones(6).at[PLACES].subtract(u),
    "segments": lambda u: jax.ops.segment_sum(u, jnp.arange(G) // 2, 2),
    "counted": lambda u: jnp.bincount(jnp.arange(G) // 2, weights=u, length=2),
    "recursion": autoregression,
    "loop": lambda u: lax.fori_loop(0, 3, lambda i, c: c + i * u, u),
    "mapped": lambda u: lax.map(lambda i: u[i], jnp.arange(G)[::-1]),
    "convolved": lambda u: jnp.convolve(u, KERNEL, mode="same"),
    "interpolated": lambda u: jnp.interp(KERNEL, jnp.linspace(0.0, 1.0, G), u),
    "solved": lambda u: jnp.linalg.solve(A, u),
    "triangle solved": lambda u: solve_triangular(jnp.tril(A), u, lower=True),
    "chosen by data": lambda u: lax.cond(A[0, 0] > 0.0, lambda: u, lambda: 2.0 * u),
    "checkpointed": jax.checkpoint(lambda u: 2.0 * u + 1.0),
    "to the first": lambda u: u**1,
    "Fourier": lambda u: jnp.real(jnp.fft.ifft(jnp.arange(1.0, G + 1) * jnp.fft.fft(u))),
    "real Fourier": lambda u: jnp.fft.irfft(1j * jnp.fft.rfft(u), n=G),
}
CURVED = {
    "written at its own place": lambda u: jnp.zeros(G).at[jnp.argmax(u)].set(1.0) * u,
    "set and squared": lambda u: jnp.zeros(G).at[1:].set(u[1:]) * u,
    "product in a recursion": lambda u: lax.scan(lambda c, e: (c * e, c), 1.0, u)[1],
    "carry that turns up later": lambda u: lax.scan(
        lambda c, e: ((c[1], c[2], e), c[0] * e), (0.0, 0.0, 0.0), u
    )[1],
    "chosen by itself": lambda u: lax.cond(u[0] > 1e9, lambda: u, lambda: 2.0 * u),
    "solved with itself": lambda u: jnp.linalg.solve(A + jnp.diag(u), u),
    "convolved with itself": lambda u: jnp.convolve(u, u, mode="same"),
    "spectrum": lambda u: jnp.abs(jnp.fft.fft(u)),
    "square of Fourier's": lambda u: jnp.real(jnp.fft.fft(u) ** 2),
    "clipped in a loop": lambda u: lax.map(lambda x: jnp.minimum(x, 1e9), u),
    "multiplied at places": lambda u: u.at[1:].multiply(u[1:]),
    "largest at places": lambda u: jnp.zeros(G).at[PLACES // 2].max(u),
    "exponential or constant": lambda u: lax.cond(A[0, 0] > 0, jnp.exp, jnp.ones_like, u),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_maps_are_proved(name):
    (how,) = dependence(LINEAR[name], jnp.zeros(G))
    assert how is Dependence.affine


@pytest.mark.parametrize("name", CURVED)
def test_no_other_map_is(name):
    (how,) = dependence(CURVED[name], jnp.zeros(G))
    assert how is Dependence.unknown


def effects_of(level, group):
    """Group effects behind a linear map, about a common level."""

    def model(group, y=None):
        u = numpyro.sample("u", dist.Normal(0.3, 0.8).expand([G]).to_event(1))
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
        with numpyro.plate("data", group.shape[0]):
            numpyro.sample("y", dist.Normal(mean + level(u)[group], 0.5), obs=y)

    return model


@pytest.mark.one_case
@pytest.mark.parametrize("name", LINEAR)
def test_they_are_integrated_as_dense_algebra_has_it(name):
    level, rng = LINEAR[name], np.random.default_rng(1)
    rows = np.asarray(jax.jacobian(level)(jnp.zeros(G)))
    group = rng.integers(0, len(rows), 12)
    y = rng.normal(size=12)
    fit = pg.fit(effects_of(level, group), pg.Laplace(), 0, group, y=y)
    design = np.column_stack([rows[group], np.ones(12)])
    prior = np.diag([*[0.64] * G, 4.0])
    mean = np.array([*[0.3] * G, 0.0])
    off = y - np.asarray(level(jnp.zeros(G)))[group] - design @ mean
    C = design @ prior @ design.T + 0.25 * np.eye(12)
    evidence = -0.5 * off @ np.linalg.solve(C, off) - 0.5 * np.linalg.slogdet(2 * np.pi * C)[1]
    assert fit.log_evidence == pytest.approx(evidence, abs=1e-8)
    gain = prior @ design.T @ np.linalg.inv(C)
    found = fit.sites["u"]
    np.testing.assert_allclose(found.mean, (mean + gain @ off)[:G], atol=1e-8)
    want = np.diag(prior - gain @ design @ prior)[:G]
    np.testing.assert_allclose(found.variance, want, atol=1e-8)


@jax.custom_jvp
def doubled(u):
    return 2.0 * u


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2.0 * tangents[0]))


@pytest.mark.one_case
@pytest.mark.parametrize(
    "level, step",
    [
        (doubled, "custom_jvp_call"),
        (lambda u: jnp.log(jnp.exp(u)), "exp"),
    ],
)
def test_what_is_not_proved_affine_is_no_point_of_map(level, step):
    group, y = np.arange(12) % G, np.arange(12.0) / 6.0
    told = f"maximise 'u' .*`{step}` is not known to be affine in 'u' .*line"
    with pytest.raises(pg.ModelError, match=told):
        pg.fit(effects_of(level, group), pg.Laplace(), 0, group, y=y)
    check = pg.check(effects_of(level, group), group, y=y)
    assert any(not i.ok and f"`{step}`" in i.message for i in check.items)
