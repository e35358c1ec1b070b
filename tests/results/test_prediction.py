"""Intervals and the table of a prediction, against the predictive distribution's own formulas."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from scipy import stats

import ppl_gp as pg

N = 12
X = np.linspace(0.0, 3.0, N)
FRAME = pd.DataFrame({"time": X}, index=[f"r{i}" for i in range(N)])


def model(X, y=None, kind="normal"):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    numbers = {
        "normal": lambda: dist.Normal(f, 0.3),
        "binary": lambda: dist.Bernoulli(logits=f),
        "counts": lambda: dist.Binomial(5, logits=f),
        "flipped": lambda: dist.MixtureSameFamily(
            dist.Categorical(jnp.array([0.9, 0.1])),
            dist.Bernoulli(logits=jnp.stack([f, jnp.zeros_like(f)], -1)),
        ),
        "flipped classes": lambda: dist.MixtureGeneral(
            dist.Categorical(jnp.array([0.9, 0.1])),
            [
                dist.Categorical(logits=jnp.stack([f, 0.0 * f, -f], -1)),
                dist.Categorical(jnp.full((*f.shape, 3), 1 / 3)),
            ],
        ),
        "marks": lambda: dist.OrderedLogistic(f, jnp.array([-0.5, 0.5])),
        "classes": lambda: pg.observations.MultinomialProbit(jnp.stack([f, 0.0 * f, -f], -1)),
    }
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", numbers[kind](), obs=y)


def two(X, y=None, z=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("z", dist.Normal(2.0 * f, 0.3), obs=z)
        with numpyro.plate("outputs", 2, dim=-2):
            numpyro.sample("y", dist.Normal(f, jnp.array([[0.1], [0.2]])), obs=y)


def test_intervals_of_a_gaussian():
    fit = pg.fit(model, pg.Laplace(), 0, X, y=np.sin(X))
    p = fit.predict(X[:4])
    for level in (0.5, 0.95):
        half = stats.norm.ppf(0.5 + 0.5 * level)
        for mean, sd, ends in (
            (p.mean, p.sd, p.interval(level)),
            (p.f_mean, p.f_sd, p.f_interval(level)),
        ):
            np.testing.assert_allclose(ends, mean + half * np.stack([-sd, sd]), rtol=1e-6)
    np.testing.assert_allclose(p.sd**2, p.f_variance + 0.09, rtol=1e-10)
    for level in (0.0, 1.0, 90.0):
        with pytest.raises(pg.DataError, match="between 0 and 1"):
            p.interval(level)
    with pytest.raises(pg.DataError, match="has lost its fit"):
        jax.tree.map(lambda x: x, p).interval()
    again = pickle.loads(pickle.dumps(p))
    np.testing.assert_array_equal(again.mean, p.mean)
    with pytest.raises(pg.DataError, match="has lost its fit"):
        again.to_frame()


def test_a_table_has_the_rows_of_the_frame():
    fit = pg.fit(model, pg.Laplace(), 0, FRAME, y=pd.Series(np.sin(X), FRAME.index))
    p, new = fit.predict(FRAME[2:5]), FRAME[2:5]
    table = p.to_frame(0.8)
    assert list(table.columns) == ["mean", "sd", "10 %", "90 %", "f_mean", "f_sd"]
    assert list(table.index) == list(new.index) and list(new.join(table).columns)[0] == "time"
    np.testing.assert_allclose(table[["10 %", "90 %"]].to_numpy().T, p.interval(0.8))
    np.testing.assert_allclose(table[["f_mean", "f_sd"]].to_numpy().T, [p.f_mean, p.f_sd])


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("kind", "levels", "columns"),
    [
        ("binary", ["no", "yes"], ["p(yes)"]),
        ("binary", None, ["p(1)"]),
        ("flipped", None, ["p(1)"]),
        ("classes", None, ["p(0)", "p(1)", "p(2)"]),
        ("flipped classes", None, ["p(0)", "p(1)", "p(2)"]),
        ("marks", ["low", "middle", "high"], ["p(low)", "p(middle)", "p(high)"]),
        ("marks", None, ["p(0)", "p(1)", "p(2)"]),
        ("counts", None, ["mean", "sd", "5 %", "95 %"]),
    ],
)
def test_a_table_of_classes_has_probabilities_and_of_counts_numbers(kind, levels, columns):
    y = np.arange(N) % (2 if kind in ("binary", "flipped") else 3)
    y = y if levels is None else pd.Series(pd.Categorical.from_codes(y, levels))
    fit = pg.fit(model, pg.Laplace(), 0, X, y=y, kind=kind)
    p = fit.predict(X[:3])
    table = p.to_frame()
    assert list(table.columns) == [*columns, "f_mean", "f_sd"]
    if kind != "counts":
        np.testing.assert_allclose(table[columns].to_numpy(), np.reshape(p.probs, (3, -1)))


@pytest.mark.slow
def test_a_table_of_several_sites_and_outputs():
    """The outputs' axis is before that of the data, and as long: M = P = 2."""
    fit = pg.fit(two, pg.Laplace(), 0, X, y=np.stack([np.sin(X)] * 2), z=2.0 * np.sin(X))
    p = fit.predict(X[:2])
    table = p.to_frame()
    np.testing.assert_allclose(table[["y mean[0]", "y mean[1]"]].to_numpy().T, p.mean["y"])
    np.testing.assert_allclose(table["z sd"], p.sd["z"])
    assert table["y sd[0]"].iloc[0] < table["y sd[1]"].iloc[0]
