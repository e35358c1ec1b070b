"""`fit(..., tables=...)`: the user says that an array is looked up, where no proof does."""

from contextlib import nullcontext

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import multivariate_normal

import ppl_gp as pg
from ppl_gp.reading.reading import declare

RNG = np.random.default_rng(0)
PLACES, IDX = np.linspace(0.0, 3.0, 5)[:, None], RNG.integers(0, 5, 12)
HEIGHT, Y = RNG.normal(size=5), RNG.normal(size=12)


def one_event(places, idx, height, y=None):
    """All observations are one event, so that no axis of its density says what the rows are."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), places))
    mean = f[idx] + height[idx]
    numpyro.sample("y", dist.MultivariateNormal(mean, 0.1 * jnp.eye(idx.shape[0])), obs=y)


def by_rows(X, height, idx, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + height[idx], 0.3), obs=y)


def test_a_table_is_remembered_where_the_user_says_so():
    args, observed = (PLACES, IDX, HEIGHT), {"y": Y}
    assert {*declare(one_event, args, observed).reading.needed} == {"height", "idx"}
    assert declare(one_event, args, observed, ("height",)).reading.needed == ("idx",)
    method = pg.EllipticalSlice(num_warmup=5, num_samples=5)
    asked = pg.fit(one_event, method, 0, *args, **observed, throw=False)
    with pytest.raises(pg.DataError, match=r"'height' at the new inputs.*tables=\('height',\)"):
        asked.predict(PLACES, IDX)
    said = pg.fit(one_event, method, 0, *args, **observed, throw=False, tables=("height",))
    np.testing.assert_array_equal(
        said.predict(PLACES, IDX).mean, asked.predict(PLACES, IDX, HEIGHT).mean
    )


def at_places(places, idx, group, y=None, plate=True, levels=False):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), places))
    u = numpyro.sample("u", dist.Normal(0.0, 1.5).expand([2]).to_event(1)) if levels else None
    mean = f[idx] if u is None else f[idx] + u[group]
    with numpyro.plate("rows", idx.shape[0]) if plate else nullcontext():
        numpyro.sample("y", dist.Normal(mean, 0.3), obs=y)


@pytest.mark.parametrize("method", [pg.Laplace(), pg.EP(), pg.VI()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("options", [{}, {"plate": False}, {"levels": True}])
@pytest.mark.parametrize("num", [5, 12])  # as many places as rows, too
def test_a_function_of_places_is_exact(method, options, num):
    rng = np.random.default_rng(num)
    places, idx, group = rng.normal(size=(num, 2)), rng.integers(0, num, 12), rng.integers(0, 2, 12)
    fit = pg.fit(at_places, method, 0, places, idx, group, y=Y, **options)

    def between(i, g):
        distances = ((places[i][:, None] - places[idx][None]) ** 2).sum(-1)
        return np.exp(-0.5 * distances) + 2.25 * (g[:, None] == group) * ("levels" in options)

    cov = between(idx, group) + 0.09 * np.eye(12)
    truth = multivariate_normal(np.zeros(12), cov).logpdf(Y)
    assert abs(fit.log_evidence - truth) < 1e-5  # the default jitter of f moves it by 3e-6
    new, their = np.array([3, 0]), np.array([1, 0])
    mean = between(new, their) @ np.linalg.solve(cov, Y)
    found = fit.predict(places, new, their, **options).mean
    np.testing.assert_allclose(found, mean, atol=1e-6)


def test_a_proved_table_needs_no_word():
    X = RNG.normal(size=(12, 1))
    fits = [
        pg.fit(by_rows, pg.Laplace(), 0, X, HEIGHT, IDX, y=Y, tables=t) for t in ((), ("height",))
    ]
    assert fits[0].model.reading == fits[1].model.reading
    assert fits[0].log_evidence == fits[1].log_evidence


@pytest.mark.parametrize(
    "tables, error, words",
    [
        ("height", pg.DataError, r"must be a tuple of names of array arguments: \['X'"),
        (("heights",), pg.DataError, r"'heights'.*\['X', 'height', 'idx', 'y'\]"),
        (("idx",), pg.ModelError, r"\['idx'\] have an entry per datum"),
    ],
)
def test_other_words_are_refused(tables, error, words):
    X = RNG.normal(size=(12, 1))
    with pytest.raises(error, match=words):
        pg.fit(by_rows, pg.Laplace(), 0, X, HEIGHT, IDX, y=Y, tables=tables)


def test_what_a_stream_holds_are_its_rows():
    with pytest.raises(pg.DataError, match=r"tables=\('a',\): of a Stream"):
        pg.fit(by_rows, pg.SVGP(), 0, pg.Stream([(PLACES,)], 5), tables=("a",))
