"""Minibatches where the first argument holds no rows: the rows are the observations', whatever
stands first and however long it is.
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import multivariate_normal

import ppl_gp as pg
from ppl_gp.deep.latents import encoder_of

RNG = np.random.default_rng(0)
N, B = 30, 10
X, Y = np.sort(RNG.uniform(0.0, 6.0, N)), RNG.normal(size=N)
LENGTHS = [12, N, 60]  # shorter than the rows, as long, longer


def noise_of_devices(sds, x, device, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), x))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f, sds[device]), obs=y)


def in_a_dictionary(data, y=None):  # its first key in the alphabet is the table's
    noise_of_devices(data["a"], data["x"], data["device"], y)


def line(heights, X, group, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b + heights[group], 0.3), obs=y)


def table(length):
    rng = np.random.default_rng(length)
    return rng.uniform(0.2, 0.6, length), rng.integers(0, length, N)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("form", ["arguments", "dictionary", "stream"])
def test_svgp_counts_the_rows_of_the_observations(form, length):
    sds, device = table(length)
    K = np.exp(-0.5 * (X[:, None] - X) ** 2)
    truth = multivariate_normal(np.zeros(N), K + np.diag(sds[device] ** 2)).logpdf(Y)
    settings = {"inducing": X, "train_inducing": False, "hyper": pg.Fixed({}), "max_steps": 600}
    method = pg.SVGP(batch_size=None if form == "stream" else B, **settings)
    if form == "stream":
        parts = [(sds, X[i::3], device[i::3], Y[i::3]) for i in range(3)]
        fit = pg.fit(noise_of_devices, method, 0, pg.Stream(parts, N))
    elif form == "dictionary":
        fit = pg.fit(in_a_dictionary, method, 0, {"a": sds, "x": X, "device": device}, y=Y)
    else:
        fit = pg.fit(noise_of_devices, method, 0, sds, X, device, y=Y)
    assert fit.stats["num_data"] == N and fit.stats["batch_size"] == B
    assert truth - 0.05 < fit.log_evidence < truth + 1e-6


@pytest.mark.parametrize("length", LENGTHS)
def test_methods_of_all_rows_take_all_of_them(length):
    _, device = table(length)
    data, observed = (np.full(length, 0.3), X, device), {"y": Y}
    K = np.exp(-0.5 * (X[:, None] - X) ** 2)
    truth = multivariate_normal(np.zeros(N), K + 0.09 * np.eye(N)).logpdf(Y)
    for method in (pg.SVGP(), pg.CollapsedSVGP()):  # N inducing points or fewer
        fit = pg.fit(noise_of_devices, method, 0, *data, **observed)
        assert fit.log_evidence == pytest.approx(truth, abs=1e-3)
    short = pg.SparseNUTS(num_warmup=2, num_samples=2)
    fit = pg.fit(noise_of_devices, short, 0, *data, **observed, throw=False)
    assert fit.predict(data[0], X[:2], device[:2]).mean.shape == (2,)


@pytest.mark.parametrize("length", LENGTHS)
def test_mean_field_counts_the_rows_of_the_observations(length):
    heights, group = table(length)
    Z = RNG.normal(size=(N, 2))
    cov = Z @ Z.T + 0.09 * np.eye(N)
    truth = multivariate_normal(heights[group], cov).logpdf(Y)
    fit = pg.fit(line, pg.MeanField(batch_size=B, max_steps=300), 0, heights, Z, group, y=Y)
    assert fit.log_evidence == pytest.approx(truth, abs=0.05)


def places_of_pairs(places, first, second, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), places))
    with numpyro.plate("data", first.shape[0]):
        numpyro.sample("y", dist.Normal(f[first] - f[second], 0.3), obs=y)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [None, B])
def test_a_function_that_rows_look_up_is_integrated(size, length):
    """Two lookups a row, with as many unknowns as places."""
    rng = np.random.default_rng(length)
    places, (first, second) = rng.uniform(0.0, 6.0, length), rng.integers(0, length, (2, N))
    A = np.eye(length)[first] - np.eye(length)[second]
    C = A @ np.exp(-0.5 * (places[:, None] - places) ** 2) @ A.T + 0.09 * np.eye(N)
    truth = multivariate_normal(np.zeros(N), C).logpdf(Y)
    method = pg.SVGP(batch_size=size, max_steps=1500)
    fit = pg.fit(places_of_pairs, method, 0, places, first, second, y=Y)
    assert fit.log_evidence == pytest.approx(truth, abs=1e-3)
    mean = (C - 0.09 * np.eye(N))[:3] @ np.linalg.solve(C, Y)
    np.testing.assert_allclose(fit.predict(places, first[:3], second[:3]).mean, mean, atol=5e-3)
    told = str(pg.check(places_of_pairs, places, first, second, y=Y))
    assert "SVGP" in told.splitlines()[-1] and "NO" not in told


def latent_rows(places, idx, y=None):
    with numpyro.plate("data", idx.shape[0]):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), h[:, None]))
    with numpyro.plate("data", idx.shape[0]):
        numpyro.sample("y", dist.Normal(places[idx] + f, 0.3), obs=y)


def in_pieces(data, y=None):
    latent_rows(data["places"], data["idx"], y)


@pytest.mark.parametrize("length", LENGTHS)
def test_an_encoder_is_given_rows_alone(length):
    """In a dictionary of a table and of rows those are the rows."""
    places, idx = table(length)
    short = {"num_inducing": 5, "max_steps": 3}
    with pytest.raises(pg.DataError, match=r"sees='x'\): .* holds no rows"):
        method = pg.SVGP(layers=pg.Layers(latents=pg.Amortised(sees="x")), **short)
        pg.fit(latent_rows, method, 0, places, idx, y=Y)
    fit = pg.fit(latent_rows, pg.SVGP(batch_size=B, **short), 0, places, idx, y=Y, throw=False)
    assert encoder_of(fit.local["h"]).shift.shape == (1,)  # y
    data = {"places": places, "idx": idx}
    fit = pg.fit(in_pieces, pg.SVGP(**short), 0, data, y=Y, throw=False)
    shift = encoder_of(fit.local["h"]).shift
    np.testing.assert_allclose(shift, [idx.mean(), Y.mean()], rtol=1e-6)
    assert fit.predict({"places": places, "idx": idx[:4]}).mean.shape == (4,)
