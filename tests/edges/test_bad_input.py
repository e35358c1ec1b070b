"""Bad input, one table for all methods: a right answer, or a typed error that names the argument,
the value, the remedy.
"""

import subprocess
import sys
from collections import OrderedDict, defaultdict

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import small_fits
from jax import random
from numpyro import handlers

import ppl_gp as pg
from ppl_gp.errors import DataError, FitError, ModelError, PplGpError
from ppl_gp.infer.probes import first_trace

FIXED = pg.Fixed({"variance": 1.5, "lengthscale": 1.0})
LOCAL = {
    "laplace": pg.Laplace(hyper=FIXED),
    "ep": pg.EP(hyper=FIXED),
    "vi": pg.VI(hyper=FIXED),
    "bound": pg.LocalBound(hyper=FIXED),
}
METHODS = {**LOCAL, "nuts": pg.NUTS(10, 10, 1), "slice": pg.EllipticalSlice(10, 10, 1)}


def classifier(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def good():
    rng = np.random.default_rng(5)
    X = rng.normal(size=(12, 2))
    return X, (X[:, 0] > 0).astype(int)


def _with(array, index, value):
    array = np.array(array, float)
    array[index] = value
    return array


REFUSED = {
    "NaN in X": (
        lambda X, y: (_with(X, (3, 1), np.nan), y),
        "positional argument 0 has nan at index (3, 1)",
    ),
    "infinity in X": (lambda X, y: (_with(X, (0, 0), np.inf), y), "positional argument 0 has inf"),
    "minus infinity in X": (
        lambda X, y: (_with(X, (0, 0), -np.inf), y),
        "index (0, 0); arguments are finite numbers",
    ),
    "NaN in y": (lambda X, y: (X, _with(y, 2, np.nan)), "argument 'y' has nan at index (2,)"),
    "a list of words": (lambda X, y: (X, ["yes", "no"] * 6), "argument 'y' holds <U3 entries"),
    "a list with a gap": (lambda X, y: (X, [None, *y.tolist()[1:]]), "argument 'y' holds object"),
    "a tuple of words": (lambda X, y: (("a",) * 12, y), "positional argument 0 holds <U1 entries"),
    "lengths differ": (lambda X, y: (X, y[:-2]), "shape"),
    "y is a column": (lambda X, y: (X, y[:, None]), "y of shape (N,) rather than (N, 1)"),
    "labels -1 and 1": (lambda X, y: (X, 2 * y - 1), "binary labels are 0 and 1"),
    "no columns": (lambda X, y: (X[:, :0], y), "shape (12, 0)"),
    "no rows": (lambda X, y: (X[:0], y[:0]), "shape (0, 2)"),
    "strings": (lambda X, y: (X.astype(str), y), "convert them to numbers"),
    "objects": (lambda X, y: (X, np.array(["a"] * 12, object)), "convert them to numbers"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_work(method, case):
    change, words = REFUSED[case]
    X, y = change(*good())
    with pytest.raises(DataError) as error:
        pg.fit(classifier, METHODS[method], 0, X, y=y)
    assert words in str(error.value)


ROWS = [1, 3]  # the bad ones of twelve
OUTSIDE = {  # likelihood of f, an observation that it takes, two that it does not
    "Bernoulli": (lambda f: dist.Bernoulli(logits=f), 1, (2, -1)),
    "Beta": (lambda f: dist.Beta(jnp.exp(f), 2.0), 0.3, (0.0, 1.0)),
    "BetaBinomial": (lambda f: dist.BetaBinomial(jnp.exp(f), 1.0, 5), 1, (6, -1)),
    "Binomial": (lambda f: dist.Binomial(np.arange(1, 13), logits=f), 1, (3, 5)),
    "Categorical": (lambda f: dist.Categorical(logits=jnp.stack([f, -f], -1)), 1, (2, -1)),
    "Exponential": (lambda f: dist.Exponential(jnp.exp(f)), 0.5, (-1.0, -2.0)),
    "Gamma": (lambda f: dist.Gamma(2.0, jnp.exp(f)), 0.5, (-1.0, 0.0)),
    "Geometric": (lambda f: dist.Geometric(logits=f), 1, (-1, -2)),
    "LogNormal": (lambda f: dist.LogNormal(f, 1.0), 0.5, (-1.0, 0.0)),
    "NegativeBinomial2": (lambda f: dist.NegativeBinomial2(jnp.exp(f), 2.0), 1, (-1, -4)),
    "OrderedLogistic": (lambda f: dist.OrderedLogistic(f, jnp.array([-1.0, 1.0])), 1, (3, -1)),
    "Pareto": (lambda f: dist.Pareto(1.0, jnp.exp(f)), 2.0, (0.5, 0.9)),
    "Poisson": (lambda f: dist.Poisson(jnp.exp(f)), 1, (-1, -3)),
    "TruncatedNormal": (lambda f: dist.TruncatedNormal(f, 1.0, low=0.0), 1.0, (-1.0, -2.0)),
    "Uniform": (lambda f: dist.Uniform(jnp.zeros_like(f), 1.0), 0.5, (1.5, -0.5)),
    "VonMises": (lambda f: dist.VonMises(f, 1.0), 1.0, (4.0, -4.0)),
    "Weibull": (lambda f: dist.Weibull(jnp.exp(f), 1.0), 1.0, (-1.0, -2.0)),
    "ZeroInflatedPoisson": (lambda f: dist.ZeroInflatedPoisson(0.2, jnp.exp(f)), 1, (-1, -3)),
}


@pytest.mark.filterwarnings("ignore:Out-of-support")  # NumPyro's own
@pytest.mark.parametrize("likelihood", OUTSIDE)
def test_observations_outside_the_support_are_named_by_row(likelihood):
    conditional, fine, outside = OUTSIDE[likelihood]

    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", conditional(f), obs=y)

    X, y = np.arange(12.0), np.full(12, fine)
    first_trace(model, (X,), {"y": y})
    y[ROWS] = outside
    with pytest.raises(DataError, match=r"row\(s\) \[1, 3\]"):
        first_trace(model, (X,), {"y": y})


EVERY = {
    **METHODS,
    "svgp": pg.SVGP(3),
    "sparse nuts": pg.SparseNUTS(3),
    "mean field": pg.MeanField(),
    "svi": pg.SVI(),
}
EXPOSED = {
    "in the predictor": lambda eta, e: jnp.exp(eta + jnp.log(e)),
    "as a factor": lambda eta, e: e * jnp.exp(eta),
}


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("form", EXPOSED)
def test_rows_of_zero_exposure_are_named_by_every_method(form, method):
    def model(X, e, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 3.0))
        mean = b * X
        if not isinstance(EVERY[method], pg.MeanField | pg.SVI):  # those take no GP
            mean += numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(EXPOSED[form](mean, e)), obs=y)

    X, e, y = np.arange(12.0), np.ones(12), np.ones(12, int)
    e[ROWS], y[ROWS] = 0.0, (0, 1)  # a slope that is not a number, and impossible
    with pytest.raises(
        DataError,
        match=r"row\(s\) \[1, 3\] of site 'y', or its slope, is not finite",
    ):
        pg.fit(model, EVERY[method], 0, X, e, y=y)
    assert "row(s) [1, 3] of site 'y'" in str(pg.check(model, X, e, y=y))


def test_rows_that_are_impossible_at_one_draw_only_are_not_named():
    """A rate overflows at most draws of a wide prior, and a bound moves with a hyperparameter."""

    def model(X, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1e6))
        bound = numpyro.sample("bound", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(b * X)), obs=y)
            numpyro.sample("z", dist.Uniform(0.0, bound), obs=20.0 + X)

    X = np.arange(12.0)
    trace = first_trace(model, (X,), {"y": np.ones(12, int)})
    assert not np.all(np.isfinite(trace["y"]["fn"].log_prob(1))) and trace["bound"]["value"] < 20.0


ANSWERED = {
    "as it is": lambda X, y: (X, y),
    "one class": lambda X, y: (X, np.ones_like(y)),
    "duplicate rows": lambda X, y: (np.repeat(X[:6], 2, 0), y),
    "all rows equal": lambda X, y: (np.repeat(X[:1], 12, 0), y),
    "constant column": lambda X, y: (np.stack([X[:, 0], np.ones(12)], 1), y),
    "huge scale": lambda X, y: (1e8 * X, y),
    "tiny scale": lambda X, y: (1e-8 * X, y),
}


@pytest.mark.parametrize("method", LOCAL)
@pytest.mark.parametrize("case", ANSWERED)
def test_answered_and_converged(method, case):
    fit = pg.fit(
        classifier, LOCAL[method], 0, ANSWERED[case](*good())[0], y=ANSWERED[case](*good())[1]
    )
    latent = fit.latent["f"]
    assert fit.result == "converged"
    assert np.isfinite(fit.log_evidence) and fit.log_evidence < 0
    assert np.all(np.isfinite(latent.mean)) and np.all(np.asarray(latent.variance) > 0)
    # No posterior variance of a log-concave likelihood exceeds the prior's.
    assert np.all(np.asarray(latent.variance) <= 1.5 + 1e-6)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float32"])
def test_counts_of_any_type_are_the_same_counts(dtype):
    """NumPyro computes some terms of such counts in float32, which two programs round apart."""

    def model(X, n, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Binomial(n, logits=f), obs=y)

    X, n = jnp.linspace(-1.0, 1.0, 40)[:, None], np.arange(40) % 7 + 1
    y = (np.arange(40) % 5) * n // 5
    fits = [pg.fit(model, pg.Laplace(), 0, X, n, y=v) for v in (y, y.astype(dtype))]
    evidences = [fit.log_evidence for fit in fits]
    assert evidences[0] == pytest.approx(evidences[1], rel=1e-6)


def test_integer_inputs_and_boolean_labels_are_numbers():
    X, y = good()
    X = np.round(3 * X).astype(int)
    a = pg.fit(classifier, LOCAL["laplace"], 0, X, y=y.astype(bool))
    b = pg.fit(classifier, LOCAL["laplace"], 0, X.astype(float), y=y)
    np.testing.assert_allclose(a.log_evidence, b.log_evidence, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ("laplace", "ep", "vi"))
def test_far_apart_rows_are_independent(method):
    """At a huge scale the rows know nothing of each other: the evidence is the product of
    single-datum evidences.
    """
    X, y = good()
    fit = pg.fit(classifier, LOCAL[method], 0, 1e8 * X, y=y)
    assert np.ptp(np.asarray(fit.latent["f"].variance)) < 1e-6
    assert np.ptp(np.abs(np.asarray(fit.latent["f"].mean))) < 1e-6


@pytest.mark.one_case
@pytest.mark.parametrize("method", LOCAL)
def test_a_single_datum(method):
    fit = pg.fit(classifier, LOCAL[method], 0, np.zeros((1, 2)), y=np.array([1]))
    assert fit.result == "converged"
    # By symmetry p(y = 1) = 1/2; EP is exact for one factor, the others approximate from below or
    # above.
    tolerance = {"ep": 1e-6, "laplace": 0.05, "vi": 0.05, "bound": 0.1}[method]
    np.testing.assert_allclose(fit.log_evidence, np.log(0.5), atol=tolerance)


def negative(X1, X2):
    """Not a covariance function: minus an RBF."""
    return -jnp.exp(-0.5 * jnp.sum((X1[:, None] - X2[None]) ** 2, -1))


def broken(X, y=None):
    f = numpyro.sample("f", pg.GP(negative, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(2.0 * f)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", (pg.Laplace(hyper=pg.Fixed()), pg.EP(hyper=pg.Fixed()), pg.VI(hyper=pg.Fixed()))
)
def test_a_kernel_that_is_not_positive_definite_ends_in_a_typed_error_with_the_fit(method):
    X, y = good()
    with pytest.raises(FitError) as error:
        pg.fit(broken, method, 0, X, y=5 * y)
    assert error.value.fit.result != "converged"
    assert str(error.value.fit.result) in str(error.value)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"variance": -1.0, "lengthscale": 1.0}, "outside its support"),
        ({"variance": np.nan, "lengthscale": 1.0}, "not finite"),
        ({"variance": 1.0}, "missing ['lengthscale']"),
        ({"variance": 1.0, "lengthscale": 1.0, "noise": 1.0}, "unknown ['noise']"),
    ],
)
def test_fixed_hyperparameters_are_checked(values, words):
    X, y = good()
    with pytest.raises(PplGpError) as error:
        pg.fit(classifier, pg.Laplace(hyper=pg.Fixed(values)), 0, X, y=y)
    assert words in str(error.value)


def test_a_class_or_a_string_in_place_of_a_method():
    X, y = good()
    with pytest.raises(DataError, match="give an instance"):
        pg.fit(classifier, pg.EP, 0, X, y=y)
    with pytest.raises(DataError, match="no inference method"):
        pg.fit(classifier, "ep", 0, X, y=y)


WRONG_KINDS = """
import ppl_gp as pg

for call in (
    lambda: pg.fit(pg.EP(), print, 0, [1.0]),
    lambda: pg.compare(["a fit"], [1.0], [1.0]),
    lambda: pg.compare_models("a fit"),
):
    try:
        call()
    except pg.errors.DataError as error:
        print(error)
"""


def test_arguments_of_another_kind_are_told():
    """In a process without the tests' check of types, which comes first here."""
    done = subprocess.run(
        [sys.executable, "-c", WRONG_KINDS], capture_output=True, text=True, check=True
    )
    told = [line for line in done.stdout.splitlines() if not line.startswith("See ")]
    assert "model=EP(" in told[0] and "the order is fit(model, method, key, X)" in told[0]
    assert "compare(fits=['a fit'])" in told[1] and "give {name: fit, ...}" in told[1]
    assert "compare_models('a fit'): give two fits or more, {name: fit" in told[2]


def test_local_bound_refuses_other_likelihoods():
    def poisson(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    X, y = good()
    with pytest.raises(ModelError, match="Bernoulli or Binomial"):
        pg.fit(poisson, pg.LocalBound(hyper=pg.Fixed()), 0, X, y=y)


@pytest.mark.parametrize(
    "make", (lambda: pg.EP(power=0.0), lambda: pg.EP(damping=1.5), lambda: pg.VI(damping=0.0))
)
def test_configuration_outside_its_range(make):
    with pytest.raises(ValueError, match="give a"):
        make()


def test_values_that_the_model_substitutes_are_no_values_of_the_fit():
    """NumPyro leaves such a site random: a fit would set it anew, and the model ignore that."""
    X, y, _ = small_fits.classification()
    model = handlers.substitute(small_fits.classifier, {"variance": 2.0})
    with pytest.raises(
        pg.ModelError, match=r"\['variance'\] have their values from handlers.subst"
    ):
        pg.fit(model, pg.Laplace(), 0, X, y=y)
    assert not pg.check(model, X, y=y).ok
    inside = handlers.scope(model, prefix="a")  # whose names are others
    with pytest.raises(pg.ModelError, match="handlers.subst"):
        pg.fit(inside, pg.Laplace(), 0, X, y=y)
    drawn = handlers.trace(handlers.seed(small_fits.classifier, 0)).get_trace(X)
    replayed = handlers.replay(small_fits.classifier, {"variance": drawn["variance"]})
    with pytest.raises(pg.ModelError, match=r"\['variance'\] have their values from handlers.rep"):
        pg.fit(replayed, pg.Laplace(), 0, X, y=y)
    held = handlers.condition(small_fits.classifier, {"variance": 2.0})
    fit = pg.fit(held, pg.Laplace(), 0, X, y=y)
    assert "variance" not in fit.hyper


def test_sites_that_block_hides_are_no_random_constants():
    """NumPyro draws them out of sight; what it hides and nobody draws changes nothing."""
    X, y, _ = small_fits.classification()
    hidden = handlers.block(small_fits.classifier, hide=["variance"])
    for model in (hidden, handlers.scope(hidden, prefix="a")):
        with pytest.raises(pg.ModelError, match="handlers.block around the model hides"):
            pg.fit(model, pg.Laplace(), 0, X, y=y)
        assert not pg.check(model, X, y=y).ok
    method = pg.Laplace(hyper=pg.Fixed(small_fits.HYPER))
    shown, bare = (
        pg.fit(model, method, 0, X, y=y)
        for model in (handlers.block(small_fits.classifier, hide=["none"]), small_fits.classifier)
    )
    assert shown.log_evidence == bare.log_evidence


@pytest.mark.parametrize("kind", ["big-endian", "tuples"])
def test_arrays_of_other_byte_orders_and_tuples_are_arrays(kind):
    X, y = good()
    as_kind = (
        (lambda a: np.asarray(a, float).astype(">f8"))
        if kind == "big-endian"
        else (lambda a: tuple(map(tuple, a.tolist())) if a.ndim > 1 else tuple(a.tolist()))
    )
    found = pg.fit(classifier, LOCAL["laplace"], 0, as_kind(X), y=as_kind(y))
    usual = pg.fit(classifier, LOCAL["laplace"], 0, X, y=y)
    np.testing.assert_allclose(found.log_evidence, usual.log_evidence, rtol=1e-12)
    np.testing.assert_allclose(
        found.predict(as_kind(X[:3])).f_mean, usual.predict(X[:3]).f_mean, rtol=1e-10
    )


@pytest.mark.parametrize("box", [OrderedDict, lambda x: defaultdict(float, x)])
def test_arrays_in_other_dictionaries_are_arguments_too(box):
    """Small integers wrapped around in them, and they were those of the caller."""
    age, y = np.arange(20, 41).astype(np.uint8), np.linspace(0.0, 1.0, 21)

    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), (X["age"] - 30) / 5.0))
        with numpyro.plate("data", X["age"].shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    held = pg.Laplace(hyper=pg.Fixed({}))
    found = pg.fit(model, held, 0, box({"age": age}), y=y)
    assert found.log_evidence == pg.fit(model, held, 0, {"age": age}, y=y).log_evidence
    age[:] = 0
    assert np.max(found.args[0]["age"]) == 40


def test_a_random_key_is_no_argument():
    X, y = good()
    with pytest.raises(DataError, match="argument 'key' is a random key; pass its seed"):
        pg.fit(small_fits.classifier, LOCAL["laplace"], 0, X, y=y, key=random.key(0))


def inside_the_plate(X, y=None):
    with numpyro.plate("data", X.shape[0]):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def as_a_column(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f[:, None]), obs=y)


def site_for_each_datum(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    for i in range(X.shape[0]):
        numpyro.sample(f"y{i}", dist.Bernoulli(logits=f[i]), obs=y[i])


CAUSES = {
    inside_the_plate: "'f' stands inside the plate 'data' of the data",
    as_a_column: r"without f\[:, None\]",
    site_for_each_datum: "not a site for each datum",
}


@pytest.mark.parametrize("model", CAUSES)
def test_the_cause_of_a_shape_is_told(model):
    X, y = good()
    with pytest.raises((DataError, ModelError), match=CAUSES[model]):
        pg.fit(model, pg.Laplace(), 0, X, y=y)


def test_a_key_that_was_forgotten():
    X, y = good()
    for key in (X, None, "a", 0.5):
        with pytest.raises(DataError, match=r"rng_key must be an integer.*\(model, method, 0"):
            pg.fit(classifier, LOCAL["laplace"], key, X, y=y)


@pytest.mark.parametrize(
    "method", [pg.Laplace(max_steps=1), pg.NUTS(5, 5, 1)], ids=["mode", "nuts"]
)
@pytest.mark.parametrize("ratio", [1.0, 1e4])
def test_a_fit_that_failed_names_columns_whose_scales_are_far_apart(method, ratio):
    def model(X, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0 / np.array([1.0, ratio])).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(X @ b)), obs=y)

    X = np.stack([np.arange(20) % 5 - 2.0, ratio * np.cos(np.arange(20))], 1)
    with pytest.raises(FitError) as error:
        pg.fit(model, method, 0, X, y=np.arange(20) % 3)
    named = "column 0 of 'X' (sd 1) and that of column 1 of 'X' (sd 7e+03) are far apart"
    assert (named in str(error.value)) == (ratio > 1.0)


@pytest.mark.parametrize("edge", [0.0, 1.0])
def test_an_observation_at_the_edge_of_its_support_is_the_cause_that_is_named(edge):
    def shares(x, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Beta(2.0 * jnp.exp(b * x), 2.0), obs=y)

    with pytest.raises(pg.DataError, match=rf"row\(s\) \[2\].*\[{edge:.0f}\.\] are where") as told:
        pg.fit(shares, pg.EP(), 0, np.ones(4), y=np.array([0.2, 0.5, edge, 0.7]))
    assert "exposure" not in str(told.value)
