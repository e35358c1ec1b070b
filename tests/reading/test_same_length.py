"""Axes that meet have one length: read off the jaxpr, and never said of axes that do not meet."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from ppl_gp.reading.equal_lengths import SameLength
from ppl_gp.reading.reading import read_off

N, P = 4, 3


def _groups(function, **shapes):
    axes = SameLength()
    axes.read(
        lambda named: function(**named),
        {k: jax.ShapeDtypeStruct(s, jnp.int32 if k == "g" else float) for k, s in shapes.items()},
    )
    return lambda *those: len({axes.group(a) for a in those}) == 1


def test_sums_products_lookups_and_contractions_tie():
    def f(x, a, W, b, u, g):
        return x * a + W @ b + jnp.exp(u)[g] - jnp.where(x > 0, a, x[:, None][:, 0])

    same = _groups(f, x=(N,), a=(N,), W=(N, P), b=(P,), u=(N,), g=(N,))
    assert same(("x", 0), ("a", 0), ("W", 0), ("g", 0))
    assert same(("W", 1), ("b", 0))
    assert not same(("x", 0), ("u", 0))
    assert not same(("x", 0), ("b", 0))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, m: jnp.exp(-((x[:, None] - m) ** 2)).sum(-1),  # centres
        lambda x, m: x + m.sum(),
        lambda x, m: x + m[jnp.arange(N)],  # looked up, although in its own order
        lambda x, m: x + jnp.sort(m)[0],
        lambda x, m: jnp.concatenate([x, m]),
        lambda x, m: jnp.outer(x, m),
    ],
)
def test_what_does_not_meet_row_by_row_is_not_tied(f):
    assert not _groups(f, x=(N,), m=(N,))(("x", 0), ("m", 0))


def test_one_entry_fits_any_length():
    assert not _groups(lambda x, a: x + a, x=(1,), a=(1,))(("x", 0), ("a", 0))


def columns(data, table, y=None):
    """Twelve columns, and a table of as many entries as rows."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.5), data["x"]))
    eta = f + sum(data[f"c{i}"] for i in range(10)) + table[data["g"]]
    with numpyro.plate("data", data["x"].shape[0]):
        numpyro.sample("y", dist.Normal(eta, 0.5), obs=y)


def test_many_columns_are_read_in_few_traces():
    runs = []

    def counted(data, table, y=None):
        runs.append(1)
        columns(data, table, y)

    data = {f"c{i}": np.ones(N) for i in range(10)} | {
        "x": np.linspace(0.0, 1.0, N),
        "g": np.arange(N),
    }
    found = read_off(counted, (data, np.arange(4.0)), {"y": np.ones(N)})
    assert len(runs) < 20
    assert len(found.rows) == 13
    assert not any("table" in path for path, _ in found.rows)


def test_a_network_among_the_arguments_ties_its_weights():
    axes = SameLength()
    tree = {"W": jnp.zeros((P, N)), "b": jnp.zeros(P)}
    axes.read(
        lambda named: named["net"]["W"] @ named["x"] + named["net"]["b"],
        {"net": tree, "x": jnp.zeros(N)},
    )
    assert axes.group(("net[0]", 1)) == axes.group(("x", 0))
    assert axes.group(("net[0]", 0)) == axes.group(("net[1]", 0))
