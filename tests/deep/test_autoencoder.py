"""`models/autoencoder.py` by `SVI`: its encoder, beside an autoguide and beside principal
components.
"""

import numpy as np
import pytest
from numpyro.infer.autoguide import AutoNormal
from scipy.special import logsumexp
from scipy.stats import norm

import ppl_gp as pg
from models.autoencoder import autoencoder, encoder

rng = np.random.default_rng(0)
ANGLE = rng.uniform(-1.5, 1.5, 150)
X = np.stack([np.sin(ANGLE), np.cos(ANGLE), np.sin(2.0 * ANGLE), np.cos(2.0 * ANGLE)], 1)
X = (X - X.mean(0)) / X.std(0) + 0.1 * rng.normal(size=X.shape)
ONE = {"num_latents": 1, "num_hidden": 12}


@pytest.fixture(scope="module")
def fits():
    def best(guide, keys):
        """Of a few seeds by the bound, as the model's docstring says: it has several optima."""
        method = pg.SVI(guide=guide, num_steps=3000, num_draws=200)
        found = [pg.fit(autoencoder, method, key, X, **ONE) for key in keys]
        return max(found, key=lambda fit: fit.log_evidence)

    return {"encoder": best(encoder, (0,)), "autoguide": best(AutoNormal, (0, 1))}


def rebuilt(fit):
    """E_q of the mean of every row, (N, D)."""
    w = {k: np.asarray(v) for k, v in fit.hyper.items()}
    inner = np.tanh(w["h"] @ w["W_in"] + w["b_in"][:, None])
    return np.mean(inner @ w["W_out"] + w["b_out"][:, None], 0)


@pytest.mark.slow
def test_a_curve_needs_one_latent_and_more_than_one_component(fits):
    """The rows lie on a curve: one latent rebuilds them to near the noise, a line does not."""
    centred = X - X.mean(0)
    u, s, vt = np.linalg.svd(centred, full_matrices=False)
    line = np.mean((centred - s[0] * u[:, :1] * vt[:1]) ** 2)
    for fit in fits.values():
        assert np.mean((X - rebuilt(fit)) ** 2) < 0.15 * line


@pytest.mark.slow
def test_new_rows_are_scored_as_a_mixture_over_their_latent(fits):
    """log p(x_new) by draws of h from its prior, as by hand."""
    fit = fits["encoder"]
    found, error = fit.log_density(X[:3], num_draws=20_000, with_error=True)
    w = {k: np.asarray(v)[:50] for k, v in fit.hyper.items() if k != "h"}
    h = norm.ppf((np.arange(2000) + 0.5) / 2000)[:, None]
    terms = []
    for s in range(50):
        mean = np.tanh(h @ w["W_in"][s] + w["b_in"][s]) @ w["W_out"][s] + w["b_out"][s]
        log_p = norm.logpdf(X[:3, None], mean, w["noise"][s]).sum(-1)
        terms.append(logsumexp(log_p, axis=1) - np.log(2000))
    by_hand = logsumexp(terms, axis=0) - np.log(50)
    np.testing.assert_array_less(np.abs(found - by_hand), 5.0 * np.asarray(error) + 0.3)
