"""Several functions a datum with sampled hyperparameters: what is kept of a softmax's draws."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg


def softmax(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


@pytest.mark.slow
def test_a_draw_of_a_softmax_is_kept_as_its_own_fit_keeps_it():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=6), rng.integers(0, 3, 6)
    chain = pg.Sample(num_warmup=5, num_samples=5, num_chains=1)
    fit = pg.fit(softmax, pg.Laplace(hyper=chain), 0, X, y=y, throw=False)
    held = pg.Fixed({"variance": fit.hyper["variance"][2]})
    one = pg.fit(softmax, pg.Laplace(hyper=held), 0, X, y=y)
    ((site, kept),) = fit.latent.items()
    np.testing.assert_allclose(kept.mean[2], one.latent[site].mean[0], atol=1e-5)
    np.testing.assert_allclose(kept.variance[2], one.latent[site].variance[0], atol=1e-5)
    assert np.all(np.isfinite(fit.predict(X[:2]).probs))
    # the process of a class: the mixture of its own fits'
    assert set(fit.posterior) == {"f[0]", "f[1]", "f[2]"}
    mixed, alone = (f.posterior["f[1]"](X[:3] + 0.1) for f in (fit, one))
    third = mixed.component_distribution
    np.testing.assert_allclose(third.mean[:, 2], alone.mean, atol=1e-5)
    np.testing.assert_allclose(third.variance[:, 2], alone.variance, atol=1e-5)
    np.testing.assert_allclose(mixed.mean, np.mean(third.mean, 1), atol=1e-10)
