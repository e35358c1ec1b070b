"""`check` reports what `fit` would find: each line is right on a sound model and wrong on a model
broken there.
"""

import re

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from small_fits import classification

import ppl_gp as pg
from models.classification import binary
from models.counts import poisson
from ppl_gp.errors import NotPointwiseError
from ppl_gp.infer.checklist.check import check

X, y, _ = classification()
NAMES = ["arguments", "GP sites", "observations", "hyperparameters", "length scales", "predictor"]
NAMES += ["maximum", "rows", "likelihood", "dtype", "conditioning", "gradients"]


def item(checklist, name):
    return next(item for item in checklist.items if item.name == name)


def gp(X, name="f", **kwargs):
    return numpyro.sample(name, pg.GP(pg.kernels.RBF(1.0, 1.0), X, **kwargs))


def observe(X, y, logits):
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def test_sound_model():
    found = check(binary, X, y=y)
    assert found.ok and [i.name for i in found.items] == [*NAMES, "methods"]
    assert "f (25,), RBF" in item(found, "GP sites").message
    assert "lengthscale (2,) LogNormal" in item(found, "hyperparameters").message
    assert (
        item(found, "methods").message
        == "NUTS, EllipticalSlice, EP, Laplace, LocalBound, VI, SVGP, SparseNUTS"
    )
    assert len(str(found).splitlines()) == len(found.items) and str(found).startswith("ok ")


@pytest.mark.slow
def test_local_bound_is_for_logistic_likelihoods():
    for found in (check(binary, X, y=y, link="probit"), check(poisson, X, y=y)):
        assert (
            found.ok
            and item(found, "methods").message
            == "NUTS, EllipticalSlice, EP, Laplace, VI, SVGP, SparseNUTS"
        )


@pytest.mark.parametrize(
    "args, kwargs, words",
    [
        ((X,), {"y": 2 * y - 1}, "outside the support"),
        ((X,), {"y": y[:-1]}, "shape (24,)"),
        ((np.where(X > 1, np.nan, X),), {"y": y}, "nan"),
        ((), {"y": y}, "missing 1 required positional argument"),
    ],
)
def test_arguments_that_cannot_be_used(args, kwargs, words):
    found = check(binary, *args, **kwargs)
    assert not found.ok and words in item(found, "arguments").message


def test_nothing_observed():
    found = check(binary, X)
    assert not found.ok and "pass y=" in item(found, "observations").message


def test_one_value_is_not_said_to_say_little():
    held = numpyro.handlers.condition(binary, data={"variance": 1.0})
    assert "so the data say little" not in item(check(held, X, y=y), "observations").message
    told = item(check(binary, X, y=np.ones_like(y)), "observations").message
    assert "all values of ['y'] are equal" in told


def test_no_gp_site():
    found = check(lambda X, y=None: observe(X, y, X[:, 0]), X, y=y)
    assert not found.ok and "pg.GP" in item(found, "GP sites").message


def test_coupled_likelihood():
    found = check(lambda X, y=None: observe(X, y, jnp.cumsum(gp(X))), X, y=y)
    assert not item(found, "likelihood").ok and "['y'] couples" in item(found, "likelihood").message
    assert item(found, "methods") == ("methods", True, "NUTS, EllipticalSlice")


def more_rows(X, y=None):
    observe(X, y, gp(jnp.concatenate([X[:2] + 0.1, X]))[2:])


def picked_rows(X, y=None):
    f = gp(X)
    with numpyro.plate("data", X.shape[0], subsample_size=4) as rows:
        numpyro.sample("y", dist.Bernoulli(logits=f[rows]), obs=None if y is None else y[rows])


@pytest.mark.one_case
@pytest.mark.parametrize(
    "model, words, methods",
    [
        (more_rows, "depends on values at other rows than its own", (pg.Laplace(), pg.EP())),
        (picked_rows, r"GP site\(s\) \['f'\] have .* rows, and there are", (pg.SVGP(),)),
    ],
)
def test_other_rows_of_f_than_data_are_refused_by_name(model, words, methods):
    assert re.search(words, item(check(model, X, y=y), "likelihood").message)
    for method in methods:
        with pytest.raises(NotPointwiseError, match=words):
            pg.fit(model, method, 0, X, y=y)


def test_several_functions():
    found = check(lambda X, y=None: observe(X, y, gp(X) * gp(X, "g")), X, y=y)
    assert "its own values of 2 functions" in item(found, "likelihood").message
    methods = "NUTS, EllipticalSlice, EP, Laplace, VI, SVGP, SparseNUTS"
    assert item(found, "methods").message == methods
    assert "g (25,)" in item(found, "GP sites").message


def test_discrete_hyperparameter():
    def model(X, y=None):
        flip = numpyro.sample("flip", dist.Bernoulli(0.5))
        observe(X, y, jnp.where(flip == 1, -1.0, 1.0) * gp(X))

    found = check(model, X, y=y)
    assert (
        not item(found, "hyperparameters").ok
        and "'flip' is discrete" in item(found, "hyperparameters").message
    )
    assert (
        item(found, "methods").message
        == "EP, Laplace, LocalBound, VI, SVGP, each with hyper=Fixed(...)"
    )


@pytest.mark.slow
def test_conditioning():
    """The condition number is NumPy's, and a kernel matrix beyond repair is told."""
    far = np.linspace(0.0, 3.0, 6)[:, None]
    found = check(lambda X, y=None: observe(X, y, gp(X, jitter=1e-3)), far, y=y[:6])
    want = np.linalg.cond(np.exp(-0.5 * (far - far.T) ** 2) + 1e-3 * np.eye(6))
    assert f"condition number {want:.2g}, jitter 0.001." in item(found, "conditioning").message
    close = check(lambda X, y=None: observe(X, y, gp(X, jitter=1e-14)), 1e-3 * far, y=y[:6])
    assert not item(close, "conditioning").ok and "jitter" in item(close, "conditioning").message

    def indefinite(X1, X2):
        return -jnp.exp(-((X1 - X2.T) ** 2))

    def model(X, y=None):
        observe(X, y, numpyro.sample("f", pg.GP(indefinite, X)))

    assert "no jitter repairs it" in item(check(model, far, y=y[:6]), "conditioning").message


def test_gradient_that_is_not_finite():
    found = check(lambda X, y=None: observe(X, y, jnp.sqrt(gp(X))), X, y=y)
    assert not item(found, "gradients").ok and "['f']" in item(found, "gradients").message


def own_batches(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    plate = numpyro.plate("data", X.shape[0], subsample_size=7)
    with plate as rows:
        X_batch, y_batch = X[rows], None if y is None else y[rows]
    f = gp(X_batch)
    with plate:
        numpyro.sample("y", dist.Normal(f, scale), obs=y_batch)


@pytest.mark.slow
def test_a_plate_that_subsamples_is_for_svgp(recwarn):
    found = check(own_batches, X, y=1.0 * y)
    assert found.ok and item(found, "methods").message == "SVGP"
    assert "subsamples 7 of 25 rows" in item(found, "likelihood").message
    assert not [w for w in recwarn if "subsample_size" in str(w.message)]
    for method in (pg.NUTS(2, 2, 1), pg.SparseNUTS(4, num_warmup=2, num_samples=2, num_chains=1)):
        with pytest.raises(pg.ModelError, match="subsamples 7 of 25 rows"):
            pg.fit(own_batches, method, 0, X, y=1.0 * y)


def at_places(table, place, group, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    f = gp(table)
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", place.shape[0]):
        numpyro.sample("y", dist.Normal(f[place] + u[group], scale), obs=y)


@pytest.mark.slow
def test_effects_beside_a_table_of_places():
    model = lambda group, place, table, y=None: at_places(table, place, group, y)  # noqa: E731
    place, group = np.arange(25) % 8, np.arange(25) % 3
    found = check(model, group, place, X[:8], y=1.0 * y)
    assert item(found, "hyperparameters").message == "scale LogNormal"
    assert "SVGP" in item(found, "methods").message
    fit = pg.fit(model, pg.SVGP(4, max_steps=2), 0, group, place, X[:8], y=1.0 * y)
    assert "u" in fit.sites


def test_inputs_by_keyword_alone():
    def model(*, X, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(w * X[:, 0], 1.0), obs=y)

    message = item(check(model, X=X, y=1.0 * y), "rows").message
    assert "no argument is positional" in message and "of its own" not in message
