"""Effects that are bent on their way to the observations are refused as points of MAP(), whichever
way the model is written.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

N, GROUPS = 10, 4
X, G = np.linspace(0.0, 5.0, N), np.arange(N) % GROUPS
Y = np.sin(X) + 0.5 * G
STEPS = pg.MAP(max_steps=3)  # what is said, is said before the fit


def model(X, g, bend, spread, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), X))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        noise = 0.4 if spread is None else spread(u, tau, g)
        numpyro.sample("y", dist.Normal(f + bend(u, tau, g), noise), obs=y)


def _nothing(u, tau, g):
    return 0.0


WAYS = {
    "square, then looked up": (lambda u, t, g: t + (u**2)[g], None),
    "looked up, then square": (lambda u, t, g: t + u[g] ** 2, None),
    "scaled noise of a group": (_nothing, lambda u, t, g: t * jnp.exp(u)[g]),
    "bent, then looked up": (lambda u, t, g: jax.nn.relu(t * u)[g], None),
    "looked up, then bent": (lambda u, t, g: jax.nn.relu(t * u[g]), None),
    "noise of a group": (_nothing, lambda u, t, g: jnp.exp(t * u)[g]),
    "a level for all": (lambda u, t, g: jnp.sum(jnp.tanh(t * u)), None),
}
BENT = WAYS["bent, then looked up"]


def _said(bend, spread) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            pg.fit(model, pg.Laplace(hyper=STEPS), 0, X, G, bend, spread, y=Y)
        except pg.FitError:
            pass
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("way", WAYS)
def test_they_are_refused_with_what_may_scale_them(way):
    told = r"'u' \(4 values\) together with \['tau'\].*maximise=\('u',\)"
    with pytest.raises(pg.ModelError, match=told):
        pg.fit(model, pg.Laplace(), 0, X, G, *WAYS[way], y=Y)
    checks = pg.check(model, X, G, *WAYS[way], y=Y)
    assert not checks.ok and "together with ['tau']" in str(checks)


def test_the_message_has_the_line_that_bends():
    step = "`custom_jvp_call` is not known to be affine in 'u'"
    told = step + r" \(test_bent_effects.py, line \d+: .*relu"
    with pytest.raises(pg.ModelError, match=told):
        pg.fit(model, pg.Laplace(), 0, X, G, *BENT, y=Y)


def test_who_says_what_is_integrated_is_not_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method = pg.Laplace(integrate=("f",))
        assert "u" in pg.fit(model, method, 0, X, G, *BENT, y=Y).hyper


def test_what_is_integrated_is_not_told():
    assert not [w for w in _said(lambda u, t, g: (t * u)[g], None) if "maximises" in w]


def test_a_scale_is_found_in_float32():
    with jax.enable_x64(False), pytest.raises(pg.ModelError, match=r"together with \['tau'\]"):
        pg.fit(model, pg.Laplace(), 0, X, G, *BENT, y=Y)
