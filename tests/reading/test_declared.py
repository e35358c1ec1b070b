"""What is read off a model in training: which axes, plates and arguments are the data's, whatever
sizes coincide; and what follows.
"""

import functools
import re
import threading
import types
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import ppl_gp as pg
from ppl_gp.kernels.base import Kernel
from ppl_gp.reading.reading import declare, read_off

K = pg.kernels.RBF(1.0, 0.7)
N = 3  # as many data as there are outputs, sensors, blanks and places
X = np.linspace(-1.0, 1.0, N)[:, None]
Y = np.sin(2.0 * X[:, 0])
FIXED = pg.Laplace(hyper=pg.Fixed({}))


def _f(X):
    return numpyro.sample("f", pg.GP(K, X))


def _data(X):
    return numpyro.plate("data", X.shape[0])


def plain(X, y=None):
    f = _f(X)
    with _data(X):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def outputs(X, y=None):
    f = _f(X)
    with numpyro.plate("out", 3, dim=-1):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    with numpyro.plate("data", X.shape[0], dim=-2), numpyro.plate("out", 3, dim=-1):
        numpyro.sample("y", dist.Normal(f[:, None], noise), obs=y)


def sensors(X, y=None):
    f = _f(X)
    with numpyro.plate("sensor", 3, dim=-2):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        with _data(X):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)


def repeats(X, y=None):
    f = _f(X)
    with _data(X):
        numpyro.sample("y", dist.Normal(f[:, None], jnp.array([0.1, 0.2, 0.5])).to_event(1), obs=y)


def no_plate(X, y=None):
    numpyro.sample("y", dist.Normal(_f(X), 0.3).to_event(1), obs=y)


def blanks(X, z, y=None):
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("blanks", z.shape[0]):
        numpyro.sample("z", dist.Normal(0.0, s), obs=z)
    f = _f(X)
    with _data(X):
        numpyro.sample("y", dist.Normal(f, s), obs=y)


def table(X, offsets, place, y=None):
    f = _f(X)
    with _data(X):
        numpyro.sample("y", dist.Normal(f + offsets[place], 0.3), obs=y)


def places(X, place, y=None):
    f = _f(X)
    with numpyro.plate("data", place.shape[0]):
        numpyro.sample("y", dist.Normal(f[place], 0.3), obs=y)


def weighted(X, w, y=None):
    f = _f(X)
    with _data(X), handlers.scale(scale=w):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def in_containers(X, extra=None, y=None):
    f = numpyro.sample("f", pg.GP(K, jnp.stack([X["a"], X["b"]], -1)))
    with numpyro.plate("data", X["a"].shape[0]):
        numpyro.sample(
            "y",
            dist.Poisson(extra["exposure"] * jnp.exp(f)),
            obs=None if y is None else y["counts"],
        )


def latent(X, y=None):
    with _data(X):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    f = numpyro.sample("f", pg.GP(K, jnp.concatenate([X, h], -1)))
    with _data(X):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def subsampling(X, y=None):
    data = numpyro.plate("data", X.shape[0], subsample_size=2)
    with data as rows:
        pass
    f = _f(X[rows])
    with data:
        numpyro.sample("y", dist.Normal(f, 0.3), obs=None if y is None else y[rows])


def closure(y=None):
    f = _f(X)
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f[:, None], jnp.ones(3)).to_event(1), obs=y)


PLACES = np.arange(N)
READINGS = [  # model, arguments, observations, {site: its axis of the data}, {argument: its axis}
    (plain, (X,), Y, {"y": -1}, {"X": 0, "y": 0}),
    (outputs, (X,), np.zeros((N, 3)), {"y": -2}, {"X": 0, "y": 0}),
    (sensors, (X,), np.zeros((3, N)), {"y": -1}, {"X": 0, "y": 1}),
    (repeats, (X,), np.zeros((N, 3)), {"y": -1}, {"X": 0, "y": 0}),
    (no_plate, (X,), Y, {"y": 0}, {"X": 0, "y": 0}),
    (blanks, (X, np.zeros(3)), Y, {"y": -1}, {"X": 0, "y": 0}),
    (table, (X, np.zeros(3), PLACES), Y, {"y": -1}, {"X": 0, "place": 0, "y": 0}),
    (places, (X, PLACES), Y, {"y": -1}, {"place": 0, "y": 0}),
    (weighted, (X, np.ones(N)), Y, {"y": -1}, {"X": 0, "w": 0, "y": 0}),
    (latent, (X,), Y, {"h": -1, "y": -1}, {"X": 0, "y": 0}),
    (subsampling, (X,), Y, {"y": -1}, {"X": 0, "y": 0}),
    (closure, (), np.zeros((N, 3)), {"y": -1}, {"y": 0}),
]


@pytest.mark.parametrize(
    "model, args, y, axes, rows", READINGS, ids=lambda x: getattr(x, "__name__", None)
)
def test_the_data_are_what_grows(model, args, y, axes, rows):
    reading = read_off(model, args, {"y": y})
    assert {k: a for k, a in reading.axes if k != "f"} == axes
    assert dict(reading.rows) == rows and reading.grows == (model is not closure)


def test_roles_of_arguments():
    reading = read_off(
        in_containers,
        ({"a": Y, "b": Y},),
        {"extra": {"exposure": np.ones(N)}, "y": {"counts": PLACES}},
    )
    assert dict(reading.rows) == {
        "X['a']": 0,
        "X['b']": 0,
        "extra['exposure']": 0,
        "y['counts']": 0,
    }
    assert reading.needed == ("extra['exposure']",) and reading.predicted == ("y",)
    assert read_off(blanks, (X, np.zeros(3)), {"y": Y}).predicted == ("y",)
    assert read_off(table, (X, np.zeros(3), PLACES), {"y": Y}).needed == ("place",)
    assert read_off(places, (X, PLACES), {"y": Y}).needed == ("place",)


ONE_NUMBER_OF_ROWS = [
    (outputs, {"noise": np.array([0.1, 0.5, 2.0])}, (), (5, 3), 0),
    (sensors, {"noise": np.array([[0.1], [0.5], [2.0]])}, (), (3, 5), 1),
    (repeats, {}, (), (5, 3), 0),
    (blanks, {"s": 0.4}, (np.array([0.1, -0.2, 0.3]),), (5,), 0),
]


@pytest.mark.one_case
@pytest.mark.parametrize(
    "model, hyper, args, shape, axis",
    ONE_NUMBER_OF_ROWS,
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_row_is_predicted_alike_whatever_the_number_of_rows(model, hyper, args, shape, axis):
    inputs, y = np.linspace(-1.0, 1.0, 5)[:, None], np.random.default_rng(0).normal(size=shape)
    fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed(hyper)), 0, inputs, *args, y=y)

    def first(M):
        p = fit.predict(inputs[:M])
        density = fit.log_density(inputs[:M], np.take(y, np.arange(M), axis))
        return [np.take(np.asarray(v), 0, axis) for v in (p.mean, p.variance)] + [density[0]]

    expected = first(1)
    for M in (2, 3, 4, 5):
        for a, b in zip(first(M), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)
    draws = np.asarray(fit.sample(0, inputs[:3], 4000).y)
    spread = draws.std(0).take(0, axis) / np.sqrt(
        np.asarray(fit.predict(inputs[:3]).variance).take(0, axis)
    )
    np.testing.assert_allclose(spread, 1.0, atol=0.06)  # standard error 0.011


@pytest.mark.slow
def test_exposures_are_asked_for_however_they_were_passed():
    def counts(X, exposure=1.0, y=None):
        f = _f(X)
        with _data(X):
            numpyro.sample("y", dist.Poisson(exposure * jnp.exp(f)), obs=y)

    E, y = np.full(N, 50.0), np.array([40, 50, 60])
    for fit in (
        pg.fit(counts, FIXED, 0, X, E, y=y),
        pg.fit(counts, FIXED, 0, X, exposure=E, y=y),
        pg.fit(counts, FIXED, 0, X, E, y),
    ):
        with pytest.raises(pg.DataError, match="exposure"):
            fit.predict(X[:2])
        by_position, by_name = (
            fit.predict(X[:2], E[:2]).mean,
            fit.predict(X[:2], exposure=E[:2]).mean,
        )
        np.testing.assert_allclose(by_position, by_name, rtol=1e-12)
        np.testing.assert_allclose(by_position, fit.predict(X, E).mean[:2], rtol=1e-9)
    # One number for all data is no array of the data, whatever its type.
    remembered = [
        pg.fit(counts, FIXED, 0, X, e, y=y).predict(X[:2]).mean
        for e in (50.0, np.float64(50.0), jnp.asarray(50.0))
    ]
    np.testing.assert_allclose(remembered, [by_position] * 3, rtol=1e-9)


def test_arguments_have_the_shape_that_they_had_in_training():
    """A column in place of a vector would be broadcast against f: M values of y for each of M
    rows.
    """

    def counts(X, exposure, more, *, weights=None, y=None):
        f = _f(X)
        with _data(X):
            offset = more["a"] + more["b"][0].sum(-1)
            numpyro.sample("y", dist.Poisson(exposure * jnp.exp(f + offset + weights)), obs=y)

    E, more, y = np.full(N, 5.0), {"a": np.zeros(N), "b": (np.zeros((N, 2)),)}, np.array([4, 5, 6])
    fit = pg.fit(counts, FIXED, 0, X, E, more, weights=np.zeros(N), y=y)
    right = {"exposure": E, "more": more, "weights": np.zeros(N)}
    wrong = {
        "exposure": {"exposure": E[:, None]},
        "more['a']": {"more": {**more, "a": np.zeros((N, 1))}},
        "more['b'][0]": {"more": {**more, "b": (np.zeros((N, 4)),)}},
        "weights": {"weights": np.zeros((N, 1))},
    }
    ask = (
        fit.predict,
        lambda x, **k: fit.log_density(x, y, **k),
        lambda x, **k: fit.sample(0, x, 2, **k),
    )
    for name, change in wrong.items():
        for question in ask:
            with pytest.raises(
                pg.DataError, match=f"argument '{re.escape(name)}' has shape .* in training"
            ):
                question(X, **{**right, **change})
    np.testing.assert_allclose(
        fit.predict(X, **{**right, "exposure": 5.0}).mean, fit.predict(X, **right).mean, rtol=1e-12
    )


@pytest.mark.slow
def test_containers_are_trees_of_arguments(tmp_path):
    rng = np.random.default_rng(0)
    inputs = {"a": rng.normal(size=6), "b": rng.normal(size=6)}
    exposure, counts = rng.uniform(5.0, 9.0, 6), rng.poisson(5.0, 6)
    fit = pg.fit(
        in_containers, FIXED, 0, inputs, extra={"exposure": exposure}, y={"counts": counts}
    )
    with pytest.raises(pg.DataError, match="extra"):
        fit.predict(inputs)
    some = np.array([4, 1])
    new, extra = {k: v[some] for k, v in inputs.items()}, {"exposure": exposure[some]}
    whole = fit.predict(inputs, {"exposure": exposure})
    np.testing.assert_allclose(fit.predict(new, extra=extra).mean, whole.mean[some], rtol=1e-9)
    density = fit.log_density(inputs, {"counts": counts}, extra={"exposure": exposure})
    np.testing.assert_allclose(
        fit.log_density(new, {"counts": counts[some]}, extra), density[some], rtol=1e-8
    )
    with pytest.raises(pg.DataError, match="nan"):
        pg.fit(
            in_containers,
            FIXED,
            0,
            inputs,
            extra={"exposure": np.where(some[0], np.nan, exposure)},
            y={"counts": counts},
        )
    loaded = pg.load(fit.save(tmp_path / "a.fit"), in_containers)
    assert loaded.kwargs.get("y", {}).get("counts") is None
    np.testing.assert_allclose(loaded.predict(new, extra).mean, whole.mean[some], rtol=1e-9)


@pytest.mark.slow
def test_several_observed_sites_from_a_dictionary_are_predicted():
    def two(X, y=None):
        f = _f(X)
        with _data(X):
            numpyro.sample("u", dist.Normal(f, 0.3), obs=None if y is None else y["u"])
            numpyro.sample("v", dist.Poisson(jnp.exp(f)), obs=None if y is None else y["v"])

    fit = pg.fit(two, FIXED, 0, X, y={"u": Y, "v": np.array([0, 1, 3])})
    assert set(fit.predict(X).mean) == {"u", "v"} and fit.sample(0, X[:2], 5).y["v"].shape == (5, 2)
    f = fit.predict(X)
    grid = np.linspace(-8.0, 8.0, 4001)[:, None]
    q = np.exp(-0.5 * (grid - f.f_mean) ** 2 / f.f_variance) / np.sqrt(2 * np.pi * f.f_variance)
    both = dist.Normal(grid, 0.3).log_prob(Y) + dist.Poisson(np.exp(grid)).log_prob(
        np.array([0, 1, 3])
    )
    expected = np.log(np.trapezoid(q * np.exp(both), grid[:, 0], axis=0))
    np.testing.assert_allclose(
        fit.log_density(X, {"u": Y, "v": np.array([0, 1, 3])}), expected, atol=1e-7
    )


def test_inputs_may_be_passed_by_keyword():
    fit = pg.fit(plain, FIXED, 0, X=X, y=Y)
    np.testing.assert_allclose(
        fit.predict(X).mean, pg.fit(plain, FIXED, 0, X, y=Y).predict(X).mean, rtol=1e-12
    )


# What cannot be answered is refused


def test_a_row_that_sees_its_companions_has_no_prediction_of_its_own():
    def standardised(X, y=None):
        plain((X - X.mean(0)) / X.std(0), y)

    fit = pg.fit(standardised, FIXED, 0, X, y=Y)
    for ask in (
        lambda: fit.predict(X[:2]),
        lambda: fit.log_density(X, Y),
        lambda: fit.sample(0, X, 2),
    ):
        with pytest.raises(
            pg.ModelError, match=r"the inputs or the mean of 'f' see other rows .*X\.std\(0\)"
        ):
            ask()
    assert not pg.check(standardised, X, y=Y).ok and pg.check(plain, X, y=Y).ok


@pytest.mark.one_case
@pytest.mark.parametrize(
    "coupling",
    [
        lambda f: jnp.where(f > f.mean(), 1.0, -1.0),
        lambda f: jnp.sign(jnp.median(f)),
        lambda f: f[::-1],
    ],
)
def test_steps_and_looked_up_rows_couple_the_data(coupling):
    def model(X, y=None):
        f = _f(X)
        with _data(X):
            numpyro.sample("y", dist.Normal(f + coupling(f), 0.3), obs=y)

    inputs = np.linspace(-1.0, 1.0, 12)[:, None]
    for method in (FIXED, pg.SVGP(num_inducing=3, hyper=pg.Fixed({}), max_steps=1)):
        with pytest.raises(pg.NotPointwiseError):
            pg.fit(model, method, 0, inputs, y=np.sin(inputs[:, 0]))


def groups(X, g, y=None, base=dist.Normal):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 2):
        u = numpyro.sample("u", base(0.0, tau))
    f = _f(X)
    with _data(X):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + u[g])), obs=y)


@pytest.mark.slow
def test_a_maximum_that_was_not_found_is_said_to_be_one_that_may_not_exist():
    """A gamma frailty of unknown shape: its density grows with the shape, and a prior with a heavy
    tail does not stop it.
    """

    def frailty(X, g, y=None):
        a = numpyro.sample("a", dist.HalfCauchy(10.0))
        with numpyro.plate("groups", 8):  # density a^(8 / 2) at u = 1, and the prior falls as a^-2
            u = numpyro.sample("u", dist.Gamma(a, a))
        f = _f(X)
        with _data(X):
            numpyro.sample("y", dist.Poisson(jnp.exp(f) * u[g]), obs=y)

    with pytest.raises(
        pg.FitError,
        match="a maximum may not exist: 'u' has a variance that is computed from \\['a'\\]",
    ):
        pg.fit(
            frailty,
            pg.Laplace(hyper=pg.MAP(max_steps=20, maximise=("u",))),
            0,
            X,
            np.array([0, 1, 1]),
            y=np.array([1, 2, 3]),
        )


@pytest.mark.slow
def test_effects_are_not_maximised_together_with_their_scale():
    g, y = np.array([0, 1, 1]), np.array([1, 2, 3])
    sparse = pg.SVGP(num_inducing=2, max_steps=1)
    for method in (pg.Laplace(), pg.EP(), sparse):
        for base in (dist.LogNormal, dist.Cauchy):
            with pytest.raises(
                pg.ModelError, match="'u' has a spread that is computed from \\['tau'\\]"
            ):
                pg.fit(groups, method, 0, X, g, y=y, base=base)
    mixed = lambda loc, tau: dist.MixtureSameFamily(  # noqa: E731
        dist.Categorical(jnp.ones(2) / 2), dist.Normal(loc, tau * jnp.array([1.0, 2.0]))
    )
    with pytest.raises(pg.ModelError, match="'u' has a spread that is computed from \\['tau'\\]"):
        pg.fit(groups, pg.Laplace(), 0, X, g, y=y, base=mixed)
    assert "NO  maximum" in str(pg.check(groups, X, g, y=y, base=dist.Cauchy))
    for method in (pg.Laplace(), sparse):  # Gaussian effects are integrated
        integrated = pg.fit(groups, method, 0, X, g, y=y)
        assert set(integrated.hyper) == {"tau"} and set(integrated.sites) == {"u"}
    hyper = {"tau": 0.5, "u": np.array([0.1, -0.2])}
    assert pg.fit(groups, pg.Laplace(hyper=pg.Fixed(hyper)), 0, X, g, y=y).result == "converged"

    def decentred(X, g, y=None):
        with handlers.reparam(config={"u": numpyro.infer.reparam.LocScaleReparam(0.0)}):
            groups(X, g, y)

    assert "ok  maximum" in str(pg.check(decentred, X, g, y=y))


@pytest.mark.parametrize("around", [handlers.scale(scale=0.2), handlers.mask(mask=False)])
def test_handlers_around_a_gp_are_refused_by_local_methods(around):
    def model(X, y=None):
        with around:
            f = _f(X)
        with _data(X):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    with pytest.raises(pg.ModelError, match="around the GP site 'f'"):
        pg.fit(model, FIXED, 0, X, y=Y)


@pytest.mark.slow
def test_a_random_batch_is_not_the_data():
    for method in (FIXED, pg.EP(hyper=pg.Fixed({})), pg.NUTS(1, 1, 1)):
        with pytest.raises(pg.ModelError, match="subsamples 2 of 3"):
            pg.fit(subsampling, method, 0, X, y=Y)
    fit = pg.fit(subsampling, pg.SVGP(num_inducing=2, max_steps=2), 0, X, y=Y)
    for ask in (lambda: fit.predict(X), lambda: fit.log_density(X, Y), fit.loo, fit.to_datatree):
        with pytest.raises(pg.DataError, match="at random"):
            ask()


def test_masked_arrays_are_refused():
    with pytest.raises(pg.DataError, match="masked array"):
        pg.fit(plain, FIXED, 0, X, y=np.ma.masked_array(Y, [True, False, False]))


def test_options_stay_what_they_are():
    def model(X, columns=None, widths=(), y=None):
        assert (
            isinstance(columns, list)
            and columns[0] == "a"
            and all(isinstance(w, int) for w in widths)
        )
        plain(X, y)

    fit = pg.fit(model, FIXED, np.int64(0), X, columns=["a", "b"], widths=[1, 2], y=Y)
    assert fit.predict(X).mean.shape == (N,)


# Factors


@pytest.mark.slow
def test_a_penalty_is_no_density_of_y_and_a_censored_datum_is():
    def penalised(X, y=None):
        f = _f(X)
        with _data(X):
            numpyro.factor("penalty", -0.5 * f**2)
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    labels = np.array([0, 1, 1])
    fit = pg.fit(penalised, FIXED, 0, X, y=labels)
    total = sum(np.exp(fit.log_density(X, np.full(N, k))) for k in (0, 1))
    np.testing.assert_allclose(total, 1.0, rtol=1e-9)
    assert "factor 'penalty' is a penalty" in str(pg.check(penalised, X, y=labels))

    censored = np.array([False, True, False])

    def by_factor(X, censored=None, y=None):
        f = _f(X)
        here = dist.Normal(f, 0.3)
        with _data(X):
            with handlers.mask(mask=True if censored is None else ~censored):
                numpyro.sample("y", here, obs=y)
            if y is not None and censored is not None:
                numpyro.factor("beyond", jnp.where(censored, jnp.log(1.0 - here.cdf(y)), 0.0))

    def by_distribution(X, censored=None, y=None):
        f = _f(X)
        with _data(X):
            numpyro.sample(
                "y", dist.RightCensoredDistribution(dist.Normal(f, 0.3), censored), obs=y
            )

    one, two = (
        pg.fit(m, FIXED, 0, X, censored=censored, y=Y) for m in (by_factor, by_distribution)
    )
    assert one.log_evidence == pytest.approx(two.log_evidence, abs=1e-8)
    assert (
        one.loo().elpd == pytest.approx(two.loo().elpd, abs=1e-6) and one.loo().n_data_points == N
    )


# What is compiled is keyed by what the model reads

SCALE = 1.0
SETTINGS = types.SimpleNamespace(noise=0.3)


def reading_globals(X, y=None):
    f = numpyro.sample("f", pg.GP(SCALE * K, X))
    with _data(X):
        numpyro.sample("y", dist.Normal(f, SETTINGS.noise), obs=y)


@pytest.mark.slow
def test_a_changed_constant_gives_the_new_answer(monkeypatch):
    before = pg.fit(reading_globals, FIXED, 0, X, y=Y)
    old = before.predict(X).mean
    for target, name, value in (("tests_scale", "SCALE", 9.0), ("noise", "noise", 1.5)):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, value) if target == "tests_scale" else patch.setattr(
                SETTINGS, name, value
            )
            after = pg.fit(reading_globals, FIXED, 0, X, y=Y)
            S = np.asarray(SCALE * K(X, X)) + (SETTINGS.noise**2 + 1e-8 * SCALE) * np.eye(N)
            exact = dist.MultivariateNormal(np.zeros(N), S).log_prob(Y)
            assert after.log_evidence == pytest.approx(float(exact), abs=1e-6)
            with pytest.raises(pg.ModelError, match="has changed since the fit"):
                before.predict(X)
    np.testing.assert_allclose(before.predict(X).mean, old, rtol=1e-12)


def test_a_closure_and_a_partial_are_told_by_their_values():
    def make(noise):
        def model(X, y=None):
            f = _f(X)
            with _data(X):
                numpyro.sample("y", dist.Normal(f, noise), obs=y)

        return model

    def with_option(X, noise, y=None):
        make(noise)(X, y)

    evidence = [pg.fit(make(s), FIXED, 0, X, y=Y).log_evidence for s in (0.3, 1.5, 0.3)]
    partial = [
        pg.fit(functools.partial(with_option, noise=s), FIXED, 0, X, y=Y).log_evidence
        for s in (0.3, 1.5)
    ]
    np.testing.assert_allclose(evidence, [partial[0], partial[1], partial[0]], rtol=1e-10)
    again = pg.fit(make(0.3), FIXED, 0, X, y=Y)
    assert again.stats["compilations"] == 0  # the same code with the same values


def test_eight_threads_fit_and_predict():
    fit = pg.fit(plain, FIXED, 0, X, y=Y)
    expected, found = np.asarray(fit.predict(X).mean), [None] * 8

    def work(i):
        own = fit if i % 2 else pg.fit(plain, FIXED, 0, X, y=Y)
        found[i] = [np.asarray(own.predict(X[: 1 + (i + j) % N]).mean) for j in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for answers in found:
        for mean in answers:
            # one of the means is zero but for rounding
            np.testing.assert_allclose(mean, expected[: len(mean)], rtol=1e-9, atol=1e-12)


# Rows that do not stand alone


def _gp(X, y, kernel=K, mean=None, inputs=None):
    f = numpyro.sample("f", pg.GP(kernel, X if inputs is None else inputs, mean=mean))
    with _data(X):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def _by_number(X, y):
    f = _f(X)
    with _data(X) as rows:
        numpyro.sample("y", dist.Normal(f[rows], 0.1 + 0.05 * rows), obs=y)


def _by_size(X, y):
    f = _f(X)
    with _data(X):
        numpyro.sample("y", dist.Normal(f, 0.1 * X.shape[0]), obs=y)


RBF = pg.kernels.RBF
NOT_ALONE = {  # what a row sees beside its own arguments
    "the median of distances": lambda X, y=None: _gp(X, y, RBF(1.0, jnp.median(jnp.abs(X - X.T)))),
    "the range": lambda X, y=None: _gp(X, y, RBF(1.0, jnp.ptp(X))),
    "the number of rows, in the kernel": lambda X, y=None: _gp(X, y, RBF(1.0, 4.0 / X.shape[0])),
    "the other inputs, in the mean": lambda X, y=None: _gp(
        X, y, mean=lambda x: x[:, 0] - x[:, 0].mean()
    ),
    "y, in the mean": lambda X, y=None: _gp(X, y, mean=0.0 if y is None else jnp.mean(y)),
    "y, in the kernel": lambda X, y=None: _gp(X, y, RBF(1.0 if y is None else jnp.var(y), 1.0)),
    "its number, as an input": lambda X, y=None: _gp(X, y, inputs=jnp.arange(X.shape[0]) * 1.0),
    "its number, in the noise": lambda X, y=None: _by_number(X, y),
    "the number of rows, in frequencies": lambda X, y=None: _gp(
        X, y, mean=lambda x: jnp.cos(x * (np.arange(1, 4) / X.shape[0])) @ jnp.ones(3)
    ),
    "the number of rows, in a power": lambda X, y=None: _gp(
        X, y, mean=lambda x: x[:, 0] ** X.shape[0]
    ),
    "the number of rows, in the noise": lambda X, y=None: _by_size(X, y),
}


@pytest.mark.parametrize("model", NOT_ALONE.values(), ids=NOT_ALONE)
def test_rows_that_do_not_stand_alone_are_seen(model):
    inputs = np.linspace(-1.0, 1.0, 6)[:, None]
    arguments = ((inputs,), {"y": np.sin(inputs[:, 0])})
    assert declare(model, *arguments).reading.mixed


TABLE = np.array([0.5, 1.0, 2.0])


def _offsets(A, B):
    """A kernel over numbered groups that refuses any other number where it sees the values, and
    holds few rows at once.
    """
    groups = [x[:, 1] for x in (A, B)]
    for group in groups:
        if not isinstance(group, jax.core.Tracer):
            assert set(np.asarray(group)) <= {0.0, 2.0} and len(group) < 100
    left, right = (jnp.asarray(TABLE)[g.astype(int)] for g in groups)
    return left[:, None] * right * RBF()(A[:, :1], B[:, :1])


def test_kernels_are_read_at_no_numbers():
    inputs = np.stack([np.linspace(-1.0, 1.0, 150), 2.0 * (np.arange(150) % 2)], 1)

    def made(scale):
        def model(X, y=None):
            unit = scale(X)
            f = numpyro.sample("f", pg.GP(lambda A, B: _offsets(A / unit, B / unit), X))
            with _data(X):
                numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

        return model

    def by_values(X):  # not seen in the jaxpr
        return np.array([np.ptp(np.asarray(X)[:, 0]), 1.0])

    y = np.sin(inputs[:, 0])
    assert declare(made(lambda X: np.ones(2)), (inputs,), {"y": y}).reading.mixed == []
    with pytest.raises(pg.ModelError, match="by_values.*line"):
        pg.fit(made(by_values), FIXED, 0, inputs, y=y)


def test_rows_that_stand_alone_are_seen():
    def regression(X, w, y=None):
        f = numpyro.sample("f", pg.GP(K, X, mean=lambda x: 2.0 * x[:, 0] + w))
        with _data(X):
            numpyro.sample("y", dist.StudentT(4.0, f, 0.1 + w), obs=y)

    for model, args, y, *_ in READINGS:
        if model not in (subsampling, closure, places):
            arguments = (args, {"y": y})
            assert declare(model, *arguments).reading.mixed == []
    arguments = ((X, np.array([0.1, 0.2, 0.7])), {"y": Y})
    assert declare(regression, *arguments).reading.mixed == []


def test_new_rows_are_not_paired_with_arrays_that_a_model_holds():
    noise = np.array([0.1, 0.2, 0.7])

    def given(X, noise, y=None):
        f = _f(X)
        with _data(X):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    def holding(X, y=None):
        given(X, noise, y)

    for model in (holding, functools.partial(given, noise=noise)):
        fit = pg.fit(model, FIXED, 0, X, y=Y)
        assert fit.predict(X).mean.shape == (N,)
        with pytest.raises(pg.DataError, match="holds arrays of its own"):
            fit.predict(X[::-1])
        with pytest.raises(pg.DataError, match="holds arrays of its own"):
            pg.fit(
                model,
                pg.SVGP(num_inducing=2, batch_size=2, max_steps=1, hyper=pg.Fixed({})),
                0,
                X,
                y=Y,
            )
    fit = pg.fit(given, FIXED, 0, X, noise, y=Y)
    with pytest.raises(pg.DataError, match="'noise' has shape \\(3,\\) and X_new 2"):
        fit.predict(X[:2], noise)


def test_a_file_of_a_model_that_read_other_values_is_refused(tmp_path, monkeypatch):
    path = pg.fit(reading_globals, FIXED, 0, X, y=Y).save(tmp_path / "a.fit")
    assert pg.load(path, reading_globals).predict(X).mean.shape == (N,)
    monkeypatch.setitem(globals(), "SCALE", 9.0)
    with pytest.raises(pg.StoreError, match="SCALE"):
        pg.load(path, reading_globals)


@pytest.mark.slow
def test_predictions_by_draws_do_not_depend_on_companions():
    def classes(X, y=None):
        with numpyro.plate("classes", 4):
            f = numpyro.sample("f", pg.GP(K, X))
        with _data(X):
            numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

    inputs = np.linspace(-1.0, 1.0, 6)[:, None]
    method = pg.SVGP(inducing=inputs, train_inducing=False, hyper=pg.Fixed({}), max_steps=20)
    fit = pg.fit(classes, method, 0, inputs, y=np.arange(6) % 4)
    whole = fit.predict(inputs).probs
    np.testing.assert_allclose(fit.predict(inputs[::-1]).probs[::-1], whole, atol=1e-9)
    np.testing.assert_allclose(fit.predict(inputs[2:3]).probs[0], whole[2], atol=1e-9)


class Times(Kernel):
    """A user's kernel that holds a function."""

    function: Callable = eqx.field(static=True)

    def __call__(self, X1, X2):
        return self.function(pg.kernels.RBF(1.0, 1.0)(X1, X2))

    def diag(self, X):
        return self.function(jnp.ones(len(X)))


@pytest.mark.parametrize(
    "prior",
    [
        lambda X, a: pg.GP(pg.kernels.RBF(a, 1.0), X, lambda X: jnp.zeros(len(X)) * a),
        lambda X, a: pg.GP(lambda X1, X2: a * pg.kernels.RBF(1.0, 1.0)(X1, X2), X),
        lambda X, a: pg.GP(Times(lambda k: a * k), X),
        lambda X, a: pg.GP(Times(lambda k: a * k) + pg.kernels.RBF(1e-9, 1.0), X),
    ],
    ids=["mean", "kernel", "kernel's field", "in a sum"],
)
def test_functions_that_close_over_values_of_a_run_are_called_after_it(prior):
    """A first run is compiled, unless something of it could hold its arrays."""
    x = np.linspace(-1.0, 1.0, 6)

    def model(X, y=None):
        a = numpyro.sample("a", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", prior(X, a))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed({"a": 2.0})), 0, x, y=np.sin(x))
    K = 2.0 * np.exp(-0.5 * (x[:, None] - x) ** 2)
    right = K @ np.linalg.solve(K + 0.25 * np.eye(6), np.sin(x))
    np.testing.assert_allclose(fit.posterior(x).mean, right, atol=1e-5)
    np.testing.assert_allclose(fit.predict(x).f_mean, right, atol=1e-5)
    sparse = pg.fit(model, pg.CollapsedSVGP(inducing=x, hyper=fit.method.hyper), 0, x, y=np.sin(x))
    assert abs(sparse.log_evidence - fit.log_evidence) < 1e-4
