"""Effects that are bent on their way to the observations are told or refused as points of MAP(),
whichever way the model is written.
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


TOLD = {
    "square, then looked up": (lambda u, t, g: t + (u**2)[g], None),
    "looked up, then square": (lambda u, t, g: t + u[g] ** 2, None),
    "no effect of the other": (lambda u, t, g: t * 0.0 + (u**2)[g], None),
    "noise of a group": (_nothing, lambda u, t, g: t * jnp.exp(u)[g]),
}
REFUSED = {
    "bent, then looked up": (lambda u, t, g: jax.nn.relu(t * u)[g], None),
    "looked up, then bent": (lambda u, t, g: jax.nn.relu(t * u[g]), None),
    "noise of a group": (_nothing, lambda u, t, g: jnp.exp(t * u)[g]),
    "a level for all": (lambda u, t, g: jnp.sum(jnp.tanh(t * u)), None),
}


def _said(bend, spread) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            pg.fit(model, pg.Laplace(hyper=STEPS), 0, X, G, bend, spread, y=Y)
        except pg.FitError:
            pass
    return [str(w.message) for w in caught]


@pytest.mark.one_case
@pytest.mark.parametrize("way", TOLD)
def test_several_values_are_told_once(way):
    (said,) = [w for w in _said(*TOLD[way]) if "maximises" in w]
    assert "maximises 'u' (4 values)" in said


@pytest.mark.parametrize("way", REFUSED)
def test_beside_their_scale_they_are_refused(way):
    with pytest.raises(pg.ModelError, match=r"site 'u' together with \['tau'\]"):
        pg.fit(model, pg.Laplace(), 0, X, G, *REFUSED[way], y=Y)
    checks = pg.check(model, X, G, *REFUSED[way], y=Y)
    assert not checks.ok and "together with ['tau']" in str(checks)


def test_who_says_what_is_integrated_is_not_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bend, spread = REFUSED["bent, then looked up"]
        method = pg.Laplace(integrate=("f",))
        assert "u" in pg.fit(model, method, 0, X, G, bend, spread, y=Y).hyper


def test_what_is_integrated_is_not_told():
    assert not [w for w in _said(lambda u, t, g: (t * u)[g], None) if "maximises" in w]


def test_a_scale_is_found_in_float32():
    with jax.enable_x64(False), pytest.raises(pg.ModelError, match=r"together with \['tau'\]"):
        pg.fit(model, pg.Laplace(), 0, X, G, *REFUSED["bent, then looked up"], y=Y)
