"""One training row broadcasts against any number of rows, and tells no option from an array of the
data by its shape: what is predicted elsewhere is what dense algebra has, or a typed refusal.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

NOISE, GROUPS = 0.4, 3
X, XN = np.array([1.0]), np.array([1.0, 1.0, 9.0])
Y, RESIDUAL = np.array([2.0]), 2.0 - 0.5
CROSS = 1.5 * np.exp(-0.5 * ((XN - X) / 0.8) ** 2)


def parts(X, g=None, W=None, off=0.0, noise=NOISE, centres=None, y=None):
    """A function, groups, fixed effects and bumps, each of them where its array is given."""
    eta = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), X)) + off
    if g is not None:
        with numpyro.plate("groups", GROUPS):
            eta += numpyro.sample("u", dist.Normal(0.0, 1.0))[g]
    if W is not None:
        with numpyro.plate("columns", W.shape[1]):
            eta += W @ numpyro.sample("b", dist.Normal(0.0, 1.0))
    if centres is not None:
        with numpyro.plate("bumps", centres.shape[0]):
            a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        eta += jnp.exp(-((X[:, None] - centres) ** 2)) @ a
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(eta, noise), obs=y)


def _group(g):
    return np.equal.outer(g, np.arange(GROUPS)).astype(float)


BUMPS = np.array([1.2])
CASES = {  # given in training, given at prediction, features there and here
    "group": ({"g": [0]}, {"g": [0, 2, 1]}, lambda v: _group(np.asarray(v["g"]))),
    "columns": ({"W": [[1.0, -2.0]]}, {"W": [[1.0, 3], [0, 1], [2, 2]]}, lambda v: v["W"]),
    "column": ({"W": [[2.0]]}, {"W": [[1.0], [0], [2]]}, lambda v: v["W"]),
    "none": ({}, {}, lambda v: np.zeros((1, 1))),
}


def _algebra(features, trained, new):
    A, B = (np.asarray(features(v), float) for v in (trained, new))
    cross = CROSS + (B @ A.T)[:, 0]
    C = 1.5 + (A @ A.T)[0, 0] + NOISE**2
    return cross / C, 1.5 + (B**2).sum(1) - cross**2 / C


def _arrays(given):
    return {k: np.array(v) for k, v in given.items()}


@pytest.mark.one_case
@pytest.mark.parametrize("method", [pg.Laplace, pg.EP])
@pytest.mark.parametrize("case", CASES)
def test_elsewhere_is_what_dense_algebra_has(case, method):
    trained, new, features = CASES[case]
    fit = pg.fit(
        parts, method(hyper=pg.Fixed({})), 0, X, y=Y, **_arrays(trained), off=np.array([0.5])
    )
    offsets = np.array([0.7, 0.1, -3.0])
    weight, variance = _algebra(features, trained, new)
    pred = fit.predict(XN, **_arrays(new), off=offsets)
    np.testing.assert_allclose(pred.mean, offsets + weight * RESIDUAL, atol=1e-6)
    np.testing.assert_allclose(pred.f_variance, variance, atol=1e-6)
    for row in range(3):
        here = {k: v[[row]] for k, v in {**_arrays(new), "off": offsets}.items()}
        np.testing.assert_allclose(
            fit.predict(XN[[row]], **here).mean[0], pred.mean[row], atol=1e-8
        )


def test_what_is_left_out_is_asked_for():
    fit = pg.fit(parts, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=Y, g=np.array([0]))
    with pytest.raises(pg.DataError, match="g"):
        fit.predict(XN)
    with pytest.raises(pg.DataError, match="g"):
        fit.predict(XN[:1])


def test_noise_of_one_entry_may_be_given_a_row():
    noise = np.array([NOISE])
    fit = pg.fit(parts, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=Y - 0.5, noise=noise)
    pred = fit.predict(XN, noise=np.array([NOISE, 1.0, 2.0]))
    np.testing.assert_allclose(pred.f_mean, CROSS / (1.5 + NOISE**2) * RESIDUAL, atol=1e-6)


def test_centres_bring_their_weights_along_and_are_options():
    fit = pg.fit(parts, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=Y - 0.5, centres=BUMPS)
    there, here = (np.exp(-((x[:, None] - BUMPS) ** 2)) for x in (XN, X))
    cross = CROSS + (there @ here.T)[:, 0]
    expected = cross / (1.5 + (here**2).sum() + NOISE**2) * RESIDUAL
    np.testing.assert_allclose(fit.predict(XN).f_mean, expected, atol=1e-6)


def scaled(X, scales, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, scales), X))
    numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def test_a_length_scale_of_one_entry_is_an_option():
    x = X[:, None]
    fit = pg.fit(scaled, pg.Laplace(hyper=pg.Fixed({})), 0, x, np.array([0.8]), y=Y - 0.5)
    mean = fit.predict(XN[:, None]).f_mean
    np.testing.assert_allclose(mean, CROSS / (1.5 + NOISE**2) * RESIDUAL, atol=1e-6)


def of_rows(X, g, plate="obs", y=None):
    """A row's own effect, in a plate (or none) that g alone has the size of."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), X))
    if plate:
        with numpyro.plate(plate, g.shape[0]):
            e = numpyro.sample("e", dist.Normal(0.0, 1.0))
    else:
        e = numpyro.sample("e", dist.Normal(jnp.zeros(g.shape[0]), 1.0).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + e, NOISE), obs=y)


@pytest.mark.parametrize("plate", ["obs", ""])
def test_a_new_row_has_its_own_effect_where_another_array_sizes_them(plate):
    fit = pg.fit(of_rows, pg.Laplace(hyper=pg.Fixed({})), 0, X, np.array([0]), plate, y=Y)
    C = 1.5 + 1.0 + NOISE**2
    for given in ({}, {"g": np.array([0, 1, 2])}):
        pred = fit.predict(XN, **given)
        np.testing.assert_allclose(pred.mean, CROSS / C * Y[0], atol=1e-6)
        np.testing.assert_allclose(pred.variance, C - CROSS**2 / C, atol=1e-6)


def of_levels(X, table, level, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), X))
    with numpyro.plate("levels", table.shape[0]):
        e = numpyro.sample("e", dist.Normal(table, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + e[level], NOISE), obs=y)


def test_a_table_of_one_level_is_an_option():
    fit = pg.fit(
        of_levels, pg.Laplace(hyper=pg.Fixed({})), 0, X, np.array([0.5]), np.array([0]), y=Y
    )
    pred = fit.predict(XN, level=np.zeros(3, int))
    weight = (CROSS + 1.0) / (1.5 + 1.0 + NOISE**2)
    np.testing.assert_allclose(pred.mean, 0.5 + weight * RESIDUAL, atol=1e-6)


def seen_together(X, see, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), X))
    with numpyro.plate("data", X.shape[0]):
        e = numpyro.sample("e", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(f + see(e), NOISE), obs=y)


@pytest.mark.parametrize("see", [lambda e: e.sum(), lambda e: e.mean(), lambda e: e - e.mean()])
def test_what_sees_other_rows_is_refused_of_one_row_too(see):
    with pytest.raises(pg.NotPointwiseError, match="other rows"):
        pg.fit(seen_together, pg.Laplace(hyper=pg.Fixed({})), 0, X, see, y=Y)


def above_the_mean(X, y=None):
    """A step at the mean of f, which no slope shows."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(1.0 * (f > f.mean()), NOISE), obs=y)


def test_a_coupled_site_has_a_name():
    x = np.linspace(0.0, 3.0, 6)
    with pytest.raises(pg.NotPointwiseError, match=r"site \['y'\] couples"):
        pg.fit(above_the_mean, pg.Laplace(hyper=pg.Fixed({})), 0, x, y=np.sin(x))


@pytest.mark.parametrize("num", [1, 2])
def test_a_softmax_of_one_row_is_the_one_of_more(num):
    """Rows that follow are masked: the evidence is that of the first."""

    def classes(X, weight, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("data", X.shape[0]), numpyro.handlers.mask(mask=weight):
            numpyro.sample("y", dist.Categorical(logits=X[:, None] * b), obs=y)

    rows, y = np.array([1.3, 0.4])[:num], np.array([2, 0])[:num]
    fit = pg.fit(classes, pg.Laplace(), 0, rows, np.arange(num) == 0, y=y)
    assert fit.log_evidence == pytest.approx(ONE_SOFTMAX, abs=1e-6)


def _softmax_evidence():
    """Laplace's, by Newton's method on the three coefficients."""
    x, b = 1.3, np.zeros(3)
    for _ in range(50):
        p = np.exp(x * b) / np.exp(x * b).sum()
        gradient = x * (np.eye(3)[2] - p) - b
        H = np.eye(3) + x**2 * (np.diag(p) - np.outer(p, p))
        b = b + np.linalg.solve(H, gradient)
    return x * b[2] - np.log(np.exp(x * b).sum()) - b @ b / 2 - np.linalg.slogdet(H)[1] / 2


ONE_SOFTMAX = _softmax_evidence()


@pytest.mark.parametrize("num", [1, 2])
def test_an_argument_of_which_only_the_length_is_read_has_rows(num):
    """One value fits into a plate of any size, so that one row shows less than two do."""

    def lengths(X, W, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(W @ b, NOISE), obs=y)

    W, y = np.array([[1.0, -0.7], [0.2, 0.4]])[:num], np.array([0.9, 0.1])[:num]
    fit = pg.fit(lengths, pg.Laplace(), 0, np.zeros(num), W, y=y)
    new = np.array([[1.0, 1.0], [2.0, 0.0], [0.0, -1.0]])
    mean = new @ W.T @ np.linalg.solve(W @ W.T + NOISE**2 * np.eye(num), y)
    np.testing.assert_allclose(fit.predict(np.zeros(3), new).mean, mean, atol=1e-9)
