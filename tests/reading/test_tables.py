"""`fit(..., tables=...)`: the user says that an array is looked up, where no proof does."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from ppl_gp.reading.declared import declare

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
