"""`SVGP` by batches: what a derivative may count for, levels of later batches, points and nodes as
they are given, and latents whose rows it cannot tell.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers, optim
from numpyro.infer import SVI

import ppl_gp as pg

RNG = np.random.default_rng(0)
KERNEL = pg.kernels.RBF(1.0, 1.0)
FIXED = pg.Fixed({})


def sensors(X, sensor, y=None, size=20):
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0).expand([20]).to_event(1))
    data = numpyro.plate("data", X.shape[0], subsample_size=size)
    with data as i:
        X, sensor = X[i], sensor[i]
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1e-4, 1.0), X))
    with data:
        numpyro.sample("y", dist.Normal(f, s[sensor]), obs=None if y is None else y[i])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_derivative_counts_for_a_nat_a_datum_of_all_data():
    """Where the model's own plate draws batches it counted for one a row of the batch, and the
    noise of sensors with a row in a batch now and then was the median's: .76 for 1.
    """
    X, sensor, y = RNG.uniform(0.0, 5.0, 4000), RNG.integers(0, 20, 4000), RNG.normal(size=4000)
    y /= np.sqrt([np.mean(y[sensor == k] ** 2) for k in range(20)])[sensor]
    method = pg.SVGP(num_inducing=3, max_steps=1500)
    fit = pg.fit(sensors, method, 0, X, sensor, y=y, throw=False)
    assert abs(np.mean(fit.hyper["s"]) - 1.0) < 0.06


def by_group(X, group, num_groups=5, y=None):
    with numpyro.plate("groups", num_groups):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[group], 0.3), obs=y)


def test_a_level_of_a_later_batch_that_the_model_lacks_ends_the_run():
    """It was read as the last level, without a word; of arrays it is refused."""
    X, group = RNG.uniform(0.0, 5.0, 60), np.repeat(np.arange(6), 10)
    y = np.sin(X) + group

    def batches():
        for rows in np.split(np.arange(60), 6):
            yield {"X": X[rows], "group": group[rows], "y": y[rows]}

    method = pg.SVGP(num_inducing=5, max_steps=12, hyper=FIXED)
    with pytest.raises(pg.DataError, match=r"index \[5\]"):
        pg.fit(by_group, method, 0, X, group, y=y)
    fit = pg.fit(by_group, method, 0, pg.Stream(batches, 60), throw=False)
    assert fit.result == "stream_ended" and "index [5]" in fit.stats["bad_batch"]

    def in_one_array(X, y=None):
        by_group(X[:, 0], X[:, 1].astype(int), y=y)

    def tables():
        for b in batches():
            yield {"X": np.stack([b["X"], b["group"]], 1), "y": b["y"]}

    fit = pg.fit(in_one_array, method, 0, pg.Stream(tables, 60), throw=False)
    assert fit.result == "stream_ended" and "index [5]" in fit.stats["bad_batch"]


def by_band(X, age, width=10.0, step=0, y=None):
    by_group(X, (age // width).astype(int) + 3 * step, y=y)


@pytest.mark.parametrize("max_steps", [12, 5])
@pytest.mark.parametrize("by_two", [False, True])
def test_a_level_that_is_computed_is_told_of(max_steps, by_two):
    """Of a column with fractions, of two columns whose ends other batches have reached; and of a
    batch that the sum over all data alone meets, which counted as the last level.
    """
    X, band, step = RNG.uniform(0.0, 5.0, 60), np.repeat([0, 1, 2, 3, 4, 5], 10), np.zeros(60, int)
    if by_two:
        band, step = np.repeat([0, 2, 1, 0, 1, 2], 10), np.repeat([1, 0, 0, 0, 0, 1], 10)
    age = 10.0 * band + RNG.uniform(0.1, 9.9, 60)

    def batches():
        for rows in np.split(np.arange(60), 6):
            own = {"X": X[rows], "age": age[rows], "y": np.sin(X[rows])}
            yield own | {"step": step[rows]}

    method = pg.SVGP(num_inducing=5, max_steps=max_steps, hyper=FIXED)
    fit = pg.fit(by_band, method, 0, pg.Stream(batches, 60), throw=False)
    assert fit.result == "stream_ended" and "index [5]" in fit.stats["bad_batch"]
    assert fit.stats["steps"] == 5 and fit.log_evidence is None


def curve(X, y=None):
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


X = np.arange(12)
Y = np.sin(X)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_error_of_few_nodes_is_told():
    """One node is not exact for a square: the bound was above log p(y), its error 0."""
    one = pg.Expectation(num_nodes=1)
    method = pg.SVGP(inducing=X, max_steps=50, hyper=FIXED, expectation=one)
    fit = pg.fit(curve, method, 0, X, y=Y, throw=False)
    assert fit.stats["expectation_error"] > 1.0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_points_at_whole_numbers_move():
    """They stayed where they were under `SVGP`, and a guide of them was a raw TypeError."""
    points = pg.Points(jnp.arange(0, 12, 3))
    method = pg.SVGP(inducing=points, max_steps=30, hyper=FIXED)
    fit = pg.fit(curve, method, 0, X, y=Y, throw=False)
    assert np.max(np.abs(fit.inducing.Z - points.Z)) > 1e-3
    guide = pg.guide(curve, {"f": pg.SparsePosterior(jnp.arange(0, 12, 3))})
    found = SVI(curve, guide, optim.Adam(0.01), pg.ELBO()).run(
        jax.random.key(0), 2, X, y=Y, progress_bar=False
    )
    assert np.all(np.isfinite(found.losses))


def outputs(X, y=None, seen=True, rows_first=False):
    data = numpyro.plate("data", X.shape[0], dim=-1)
    with data, handlers.mask(mask=seen):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    with numpyro.plate("units", 3):
        f = numpyro.sample("f", pg.GP(KERNEL, h))
    with data, numpyro.plate("outputs", 3, dim=-2):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y.T if rows_first else y)


def of_dictionary(X, y=None):
    outputs(X, None if y is None else y["v"])


def test_an_encoder_of_observations_wants_their_rows_first():
    """Rows from the third on shared one q(h), that of the last output."""
    y = RNG.normal(size=(3, 12))
    method = pg.SVGP(num_inducing=4, max_steps=2, hyper=FIXED)
    for own, given in ((outputs, y), (of_dictionary, {"v": y})):
        with pytest.raises(pg.DataError, match=r"rows along axis 1.* obs=y\.T"):
            pg.fit(own, method, 0, X, y=given)
    fit = pg.fit(outputs, method, 0, X, y=y.T, rows_first=True, throw=False)
    assert np.isfinite(fit.log_evidence)


def test_a_mask_around_latents_is_refused():
    """q(h) of a row that it leaves out has an entropy and no prior: 25 nats a row in 1000 steps."""
    seen = np.arange(12) % 3 > 0
    free = pg.Layers(latents=pg.Free())
    method = pg.SVGP(num_inducing=4, max_steps=2, hyper=FIXED, layers=free)
    with pytest.raises(pg.ModelError, match=r"handlers\.mask around the latents \['h'\]"):
        pg.fit(outputs, method, 0, X, y=RNG.normal(size=(3, 12)), seen=seen)


def test_points_inside_other_variables_move_in_units_of_the_inputs():
    """They moved by .05 where the inputs' range is .001, and did not come back."""
    x = np.linspace(0.0, 1e-3, 60)
    y = np.sin(2e4 * x) + 0.1 * np.random.default_rng(0).normal(size=60)
    Z = np.linspace(0.0, 1e-3, 20)

    def small(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1e-4), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    plain, inside = (
        pg.fit(small, pg.SVGP(inducing=i, max_steps=60, hyper=FIXED), 0, x, y=y, throw=False)
        for i in (Z, pg.features.Concatenated([pg.Points(Z)]))
    )
    assert inside.log_evidence == pytest.approx(plain.log_evidence, abs=1e-3)
    assert pg.Points([0, 2, 4]).num == 3
    assert pg.features.Derivatives(np.arange(5)).Z.dtype == float


def test_a_negative_index_of_a_later_batch_is_told_of():
    """JAX counts -1 from the end: the last level had the rows of a missing group, too."""
    X, group = RNG.uniform(0.0, 5.0, 60), np.repeat([0, 1, 2, 3, 4, -1], 10)

    def batches():
        for rows in np.split(np.arange(60), 6):
            yield {"X": X[rows], "group": group[rows], "y": np.sin(X[rows])}

    method = pg.SVGP(num_inducing=5, max_steps=6, hyper=FIXED)
    with pytest.warns(UserWarning, match=r"leads to negative indices \(-1\)"):
        pg.fit(by_group, method, 0, pg.Stream(batches, 60), throw=False)
