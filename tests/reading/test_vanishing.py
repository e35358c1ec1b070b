"""A scale that a MAP search runs after without end is named, with a remedy that helps."""

import warnings

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from ppl_gp.infer.hyper.map import vanishing, weakly_known
from ppl_gp.infer.hyper.space import Space
from ppl_gp.reading.reading import declare
from ppl_gp.reading.tracing import run

X = np.linspace(0.0, 6.0, 12)


def model(X, y=None):
    """A prior of the noise whose density has no bound at zero."""
    noise = numpyro.sample("noise", dist.Gamma(0.5, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.Matern52(1.0, 2.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def hyper(X, y=None):
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    numpyro.sample("scales", dist.Pareto(2.0, 1.5).expand([2]).to_event(1))
    numpyro.sample("share", dist.Uniform(0.0, 1.0))
    shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + shift, noise), obs=y)


@pytest.fixture(scope="module")
def where():
    args, kwargs = (jnp.asarray(X),), {"y": jnp.asarray(X)}
    model = declare(hyper, args, kwargs)
    return Space(model, tuple(BEGUN), args, kwargs, {}), run(model, args, kwargs)


BEGUN = {"noise": 0.0, "scales": np.zeros(2), "share": 0.0, "shift": 0.0}


@pytest.mark.parametrize(
    "site, end, slope, said",
    [
        ("noise", -25.0, 0.5, "'noise' fell from 1 to 1e-11"),
        ("noise", -25.0, -0.5, None),  # it comes back
        ("noise", -25.0, 1e-3, None),  # flat
        ("noise", -3.0, 0.5, None),
        ("noise", 25.0, -0.5, None),
        ("scales", np.array([0.0, -9.0]), np.array([0.0, 2.0]), "'scales' fell from 1 to 0.0001"),
        ("scales", np.array([-9.0, 0.0]), np.array([0.0, 2.0]), None),
        ("share", -25.0, 0.5, None),  # `at_bound` says so
        ("shift", -25.0, 0.5, None),
    ],
)
def test_what_fell_and_still_rises_is_named(where, site, end, slope, said):
    zero = {k: 0.0 * np.asarray(v) for k, v in BEGUN.items()}
    points = (BEGUN, {**BEGUN, site: end}, {**zero, site: slope})
    begun, ended, slopes = ({k: jnp.asarray(v) for k, v in x.items()} for x in points)
    space, trace = where
    found = vanishing(trace, space.constrain(begun), space.constrain(ended), slopes)
    assert found is None if said is None else said in found


@pytest.mark.parametrize(
    "sd, scales, said",
    [
        (0.8, {"noise"}, None),
        (1.0, {"noise"}, "0.87"),
        (1.9, {"scales"}, None),
        (2.1, {}, "known. "),
    ],
)
def test_what_is_weakly_known_is_said_by_role(where, sd, scales, said):
    """sds of effects were measured for their own scales alone."""
    _, trace = where
    hyper = {"noise": np.asarray(0.5), "scales": np.array([2.0, 2.0]), "shift": np.asarray(9.0)}
    sds = {"noise": np.array([sd]), "scales": np.array([0.1, 0.2]), "shift": np.array([99.0])}
    found = weakly_known(trace, hyper, sds, frozenset(scales))
    assert (found is None) == (said is None)
    if said is not None:
        assert f"'noise': 0.5, with a posterior sd {sd:.2g} times that" in found and said in found
        assert ("0.87" in found) == bool(scales) and len(found.split()) <= 45


def test_a_mode_at_the_end_of_the_support_is_said_wherever_the_search_stopped(where):
    """A multiple of where it stopped was named, 100 times too small; of what nothing depends on,
    which stays where it began, the multiple is said."""
    _, trace = where
    stops = [(3e-6, 1e2), (1e-4, 3e3), (1e-2, 9.0)]
    found = {
        weakly_known(trace, {"noise": np.asarray(v)}, {"noise": np.array([sd])}, frozenset())
        for v, sd in stops
    }
    (said,) = found
    assert "'noise': its mode is at 0, the end of its support." in said and "Grid()" in said
    began = {"noise": np.asarray(trace["noise"]["value"])}
    flat = weakly_known(trace, began, {"noise": np.array([1e150])}, frozenset())
    assert "with a posterior sd 1e+03 times that" in flat
    far = {"scales": np.array([2.0 + 1e-6, 3.0])}
    said = weakly_known(trace, far, {"scales": np.array([99.0, 0.1])}, frozenset())
    assert "'scales': its mode is at 2, the end" in said


@pytest.mark.slow
def test_a_fit_of_data_without_noise_names_it():
    with pytest.raises(pg.FitError, match="max_steps.*'noise' fell from .*LogNormal") as caught:
        pg.fit(model, pg.Laplace(), 0, X, y=np.sin(X))
    assert "'noise'" in caught.value.fit.stats["caution"]
    held = pg.Laplace(hyper=pg.Fixed({"noise": 1e-3}))
    assert pg.fit(model, held, 0, X, y=np.sin(X)).result == "converged"


def test_every_search_that_stops_early_names_where():
    """After two steps: the site with the largest slope, and its slope."""
    held = pg.Laplace(hyper=pg.MAP(max_steps=2))
    fit = pg.fit(steep, held, 0, X, y=3.0 * np.sin(X), throw=False)
    assert fit.result == "max_steps"
    assert "'lengthscale'" in fit.stats["caution"] or "'variance'" in fit.stats["caution"]
    assert f"{fit.stats['map_gradient']:.1g} nats" in fit.stats["caution"]


def steep(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def grouped(x, group, y=None):
    """A wave, and effects of six groups whose spread has its mode at zero or not."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), x))
    with numpyro.plate("groups", 6):
        u = numpyro.sample("u", dist.Normal(0.0, tau))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[group], noise), obs=y)


@pytest.mark.parametrize(
    "method",
    [
        pg.CollapsedSVGP(num_inducing=15),
        pytest.param(pg.SVGP(num_inducing=15, max_steps=2000), marks=pytest.mark.slow),
        pytest.param(pg.Laplace(), marks=pytest.mark.slow),
    ],
)
def test_a_sparse_fit_names_a_spread_at_zero_as_laplace_does(method):
    rng = np.random.default_rng(3)
    x, group = np.sort(rng.uniform(0, 5, 60)), rng.integers(0, 6, 60)
    u, y = rng.normal(size=6), np.sin(x) + 0.3 * rng.normal(size=60)
    with pytest.warns(UserWarning, match="hardly determine 'tau': .*its effects' sds are too"):
        pg.fit(grouped, method, 0, x, group, y=y)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*hardly determine")
        pg.fit(grouped, method, 0, x, group, y=y + u[group])
