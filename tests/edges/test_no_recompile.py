"""A second call with new data of the same shape compiles nothing, whatever the method."""

import dataclasses

import jax
import numpy as np
import pytest
import small_fits

import ppl_gp as pg

SHORT = {"num_warmup": 5, "num_samples": 5, "num_chains": 1}
METHODS = {
    "laplace, fixed": pg.Laplace(hyper=pg.Fixed(small_fits.HYPER)),
    "ep, MAP": pg.EP(hyper=pg.MAP(max_steps=2)),
    "laplace, sample": pg.Laplace(hyper=pg.Sample(**SHORT)),
    "svgp": pg.SVGP(num_inducing=5, max_steps=4),
    "svgp, minibatches": pg.SVGP(num_inducing=5, batch_size=3, max_steps=4),
    "sparse nuts": pg.SparseNUTS(num_inducing=5, **SHORT),
    "nuts": pg.NUTS(**SHORT),
    "elliptical slice": pg.EllipticalSlice(**SHORT),
}


def _data(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(9, 2))
    return X, rng.integers(0, 2, 9)


@pytest.mark.one_case
@pytest.mark.parametrize("name", METHODS)
def test_second_call_compiles_nothing(name):
    def fitted(seed):
        X, y = _data(seed)
        return pg.fit(small_fits.classifier, METHODS[name], seed, X, y=y, throw=False)

    first, second = fitted(0), fitted(1)
    assert second.stats["compilations"] == 0, (
        first.stats["compilations"],
        second.stats["compilations"],
    )
    assert not np.allclose(first.latent["f"].mean, second.latent["f"].mean)


LOCAL = {"laplace": pg.Laplace, "ep": pg.EP, "vi": pg.VI, "bound": pg.LocalBound}


@pytest.mark.one_case
@pytest.mark.parametrize("name", LOCAL)
def test_other_fixed_values_compile_nothing(name):
    """Numbers and arrays alike, and a second dictionary of the same ones."""
    X, y = _data(0)
    values = [1.0, 1.5, np.float32(2.0), np.array(1.5), 1]
    fits = [
        pg.fit(
            small_fits.classifier,
            LOCAL[name](hyper=pg.Fixed({"lengthscale": 1.2, "variance": v})),
            0,
            X,
            y=y,
        )
        for v in values
    ]
    assert [fit.stats["compilations"] for fit in fits[1:]] == [0] * 4
    evidence = [fit.log_evidence for fit in fits]
    assert evidence[1] == evidence[3] and evidence[0] == evidence[4] and len(set(evidence)) == 3


def test_other_starts_and_settings_of_map_compile_nothing():
    X, y = _data(0)
    settings = [
        {"init": {"lengthscale": 1.0, "variance": np.array(2.0)}},
        {"init": {"lengthscale": 2.0, "variance": np.array(1.0)}},
        {"init": {"lengthscale": 1.0, "variance": np.array(2.0)}, "tol": 1e-3, "max_steps": 1},
    ]
    fits = [
        pg.fit(small_fits.classifier, pg.EP(hyper=pg.MAP(**s)), 0, X, y=y, throw=False)
        for s in settings
    ]
    assert [fit.stats["compilations"] for fit in fits[1:]] == [0, 0]
    assert (
        fits[0].log_evidence == pytest.approx(fits[1].log_evidence, abs=1e-4)
        and fits[2].result == "max_steps"
    )


@pytest.mark.slow
def test_other_rates_compile_nothing():
    """Numbers are arguments of the compiled step: rates, the KL's weight, tolerances, fixed
    hyperparameters.
    """
    X, y = _data(0)
    plain = pg.SVGP(
        num_inducing=5, max_steps=4, learning_rate=0.01, training=pg.Training(natural_rate=0.5)
    )
    others = [
        {"learning_rate": 0.02},
        {"training": pg.Training(natural_rate=0.25)},
        {"layers": pg.Layers(beta=2.0)},
        {"tol": 1e-3},
        {"patience": 50},
    ]
    held = [
        {"hyper": pg.Fixed(small_fits.HYPER)},
        {"hyper": pg.Fixed({k: 2.0 for k in small_fits.HYPER})},
    ]
    for first, changes in ((plain, others), (dataclasses.replace(plain, **held[0]), held[1:])):
        before = pg.fit(small_fits.classifier, first, 0, X, y=y)
        for change in changes:
            fit = pg.fit(small_fits.classifier, dataclasses.replace(first, **change), 0, X, y=y)
            assert fit.stats["compilations"] == 0, change
            ours = (fit.hyper, fit.latent["f"].mean)
            same = all(
                map(
                    np.array_equal,
                    *map(jax.tree.leaves, (ours, (before.hyper, before.latent["f"].mean))),
                )
            )
            assert same == (not change.keys() & {"learning_rate", "training", "layers", "hyper"}), (
                change
            )


def test_compilations_are_counted():
    """The count that the test above trusts is not always zero."""
    X, y = _data(0)
    fit = pg.fit(
        small_fits.classifier, pg.Laplace(hyper=pg.Fixed(small_fits.HYPER)), 0, X[:8], y=y[:8]
    )
    assert fit.stats["compilations"] > 0 and fit.stats["compile_seconds"] > 0
