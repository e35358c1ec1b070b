"""Posterior probabilities of models, by exact evidences; what is refused."""

import math

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy.stats import multivariate_normal

import ppl_gp as pg

N = 12
rng = np.random.default_rng(0)
X = np.linspace(-1.0, 1.0, N)
Y = np.sin(3.0 * X) + 0.3 * rng.normal(size=N)
KERNELS = {
    "smooth": lambda a, b: np.exp(-0.5 * (a - b) ** 2 / 0.5**2),
    "line": lambda a, b: 1.0 + a * b,
}
FIXED = pg.Fixed({})


def smooth(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.5), X, jitter=0.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def line(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * X, 0.3), obs=y)


def free_line(X, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0.0, scale).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * X, 0.3), obs=y)


def counted(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.0, 0.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


COUNTS = np.round(np.exp(2.0 + np.sin(3.0 * X))).astype(int)


@pytest.fixture(scope="module")
def fits():
    method = pg.Laplace(hyper=FIXED)
    return {m.__name__: pg.fit(m, method, 0, X, y=Y) for m in (smooth, line)}


def _exact(prior=(0.5, 0.5)):
    joint = []
    for k, p in zip(("smooth", "line"), prior, strict=True):
        K = KERNELS[k](X[:, None], X) + 0.09 * np.eye(N)
        joint.append(multivariate_normal(np.zeros(N), K).logpdf(Y) + math.log(p))
    odds = np.exp(joint - np.max(joint))
    return odds / odds.sum()


def test_a_loaded_fit_is_told_as_such(fits, tmp_path):
    """Its method was taken for another quantity, and its data for other data."""
    fits["line"].save(tmp_path / "line.fit")
    loaded = pg.load(tmp_path / "line.fit", line)
    for others in ({"b": fits["smooth"]}, {"b": loaded}):
        with pytest.raises(pg.DataError, match=r"'a'.* were loaded, .*before saving") as said:
            pg.compare_models({"a": loaded, **others})
        assert "SavedMethod" not in str(said.value)


def test_probabilities_are_those_of_the_exact_evidences(fits):
    found = pg.compare_models(fits)
    np.testing.assert_allclose([*found.probabilities.values()], _exact(), rtol=1e-7)
    weighed = pg.compare_models(fits, prior={"smooth": 1.0, "line": 3.0})
    np.testing.assert_allclose([*weighed.probabilities.values()], _exact((0.25, 0.75)), rtol=1e-7)
    with pytest.raises(pg.DataError, match=r"give \['smooth'\] positive numbers"):
        pg.compare_models(fits, prior={"line": 0.9})  # not 0.9 beside 1
    odds = math.log(_exact()[1] / _exact()[0])
    assert found.best == "smooth" and found.table[1]["log_odds"] == pytest.approx(odds, rel=1e-6)
    assert "estimate" in str(found) and "maximum" not in str(found)


def test_symmetric_modes_are_counted(fits):
    plain, counted = (
        pg.compare_models(fits, log_symmetry=s).table for s in (None, {"line": math.log(6)})
    )
    gained = counted[1]["log_evidence"] - plain[1]["log_evidence"]
    assert gained == pytest.approx(math.log(6)) and counted[0] != plain[0]


@pytest.mark.slow
def test_what_is_not_comparable_is_refused(fits):
    bound = pg.fit(line, pg.VI(hyper=FIXED), 0, X, y=Y)
    with pytest.raises(pg.DataError, match="not the same quantity"):
        pg.compare_models({"smooth": fits["smooth"], "line": bound})
    mixed = pg.compare_models({"smooth": fits["smooth"], "line": bound}, mixed=True)
    np.testing.assert_allclose([*mixed.probabilities.values()], _exact(), rtol=1e-5)
    other = pg.fit(line, pg.Laplace(hyper=FIXED), 0, X, y=Y + 1.0)
    with pytest.raises(pg.DataError, match="do not observe the same values"):
        pg.compare_models({"smooth": fits["smooth"], "line": other})
    drawn = pg.fit(line, pg.NUTS(30, 30, 1), 0, X, y=Y, throw=False)
    with pytest.raises(pg.DataError, match="'drawn' by NUTS has log evidence None"):
        pg.compare_models({"smooth": fits["smooth"], "drawn": drawn})
    for match, options in {
        "none of": {"prior": {"lines": 1.0}},
        "positive": {"prior": {"line": 0.0}},
    }.items():
        with pytest.raises(pg.DataError, match=match):
            pg.compare_models(fits, **options)
    with pytest.raises(pg.DataError, match="two fits or more"):
        pg.compare_models({"smooth": fits["smooth"]})


def test_a_fit_that_did_not_end_has_no_say():
    """After one step of Newton its evidence is 387 nats, and that of the mode -35."""
    few = pg.Laplace(hyper=FIXED, max_steps=1)
    short = pg.fit(counted, few, 0, X, y=COUNTS, throw=False)
    whole = pg.fit(counted, pg.Laplace(hyper=FIXED), 0, X, y=COUNTS)
    assert abs(short.log_evidence - whole.log_evidence) > 1.0
    with pytest.raises(pg.DataError, match="'short' ended as 'max_steps'"):
        pg.compare_models({"whole": whole, "short": short})


def partly_seen(X, y=None, seen=True, times=1.0):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]), handlers.scale(scale=times), handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * X, 0.3), obs=y)


def test_data_that_one_model_masks_or_weighs_are_not_the_same(fits):
    method, some = pg.Laplace(hyper=FIXED), np.arange(N) % 3 > 0
    partly = pg.fit(partly_seen, method, 0, X, y=Y, seen=some)
    weighed = pg.fit(partly_seen, method, 0, X, y=Y, times=0.5)
    for other, told in ((partly, r".*12. values.*8. values"), (weighed, r"\[0.5\] times")):
        with pytest.raises(pg.DataError, match=f"do not observe the same values .*{told}"):
            pg.compare_models({"other": other, "smooth": fits["smooth"]})
    whole = pg.fit(partly_seen, method, 0, X, y=Y)
    found = pg.compare_models({"smooth": fits["smooth"], "line": whole})
    np.testing.assert_allclose([*found.probabilities.values()], _exact(), rtol=1e-7)


def test_hyperparameters_at_their_maximum_are_told(fits):
    fit = pg.fit(free_line, pg.Laplace(), 0, X, y=Y)
    found = pg.compare_models({"smooth": fits["smooth"], "free": fit})
    assert [row["maximised"] for row in found.table] == [0, 1]
    assert "free 1 numbers" in str(found) and jnp.isfinite(found.table[1]["log_evidence"])


def flat_line(X, y=None):
    w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real_vector, (), (2,)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * X, 0.3), obs=y)


def two(first, second):
    def model(X, **data):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            for name in (first, second):
                numpyro.sample(name, dist.Normal(w[0] + w[1] * X, 0.3), obs=data[name])

    return model


def test_improper_priors_have_no_evidence(fits):
    method = pg.Laplace(integrate=(), hyper=pg.MAP(init={"w": np.zeros(2)}))
    flat = pg.fit(flat_line, method, 0, X, y=Y)
    with pytest.raises(pg.DataError, match=r"'flat' has improper priors, of \['w'\]"):
        pg.compare_models({"smooth": fits["smooth"], "flat": flat})


def test_the_order_of_sites_and_an_expansion_are_no_difference():
    data, method = {"y": Y, "other": Y[::-1]}, pg.Laplace(integrate=())
    found = pg.compare_models(
        {k: pg.fit(two(*k.split()), method, 0, X, **data) for k in ("y other", "other y")}
    )
    np.testing.assert_allclose([*found.probabilities.values()], 0.5, atol=1e-8)
    assert [row["maximised"] for row in found.table] == [0, 0] and "maximum" not in str(found)


def test_fits_of_streams_are_of_one_stream(tmp_path):
    """Of others the first batch is all that is known, which says nothing of the rest."""

    def long(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 2.0), X, jitter=0.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    def logs(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.5), X, jitter=0.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=None if y is None else y + 1.0)

    def fit(model, *data, **named):
        points = np.linspace(-1.0, 1.0, 6)
        method = pg.SVGP(hyper=FIXED, inducing=points, train_inducing=False, max_steps=60)
        return pg.fit(model, method, 0, *data, **named)

    batches = [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])]
    stream = pg.Stream(batches, N)
    one, two = fit(smooth, stream), fit(long, stream)
    found = pg.compare_models({"one": one, "two": two})
    odds = one.log_evidence - two.log_evidence
    assert found.table[1]["log_odds"] == pytest.approx(-odds)
    one.save(tmp_path / "one.fit")
    assert pg.load(tmp_path / "one.fit", smooth).stats["stream"] == two.stats["stream"]
    with pytest.raises(pg.DataError, match="do not observe the same values"):
        pg.compare_models({"one": one, "other": fit(logs, stream)})
    others = {
        "its first rows": fit(long, X[:4], y=Y[:4]),
        "the same first batch": fit(long, pg.Stream([*batches[:2], (X[8:], Y[8:] + 1.0)], N)),
    }
    for name, other in others.items():
        with pytest.raises(pg.DataError, match="of a Stream, and not all of the same one"):
            pg.compare_models({"one": one, name: other})
    again = fit(smooth, pg.Stream([*batches[:2], (X[8:], Y[8:] + 1.0)], N))
    with pytest.raises(pg.DataError, match="Fit all of them to one Stream object"):
        pg.compare({"one": one, "other": again}, X, Y)
