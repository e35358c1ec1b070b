"""Ctrl-C in every kind of long work: what is kept is what a shorter run would have reached.
(`SVGP`'s minibatches and their checkpoints: test_long_runs.py.)
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import small_fits

import ppl_gp as pg
from ppl_gp.infer import chains
from ppl_gp.infer.hyper import grid
from ppl_gp.infer.hyper import map as map_run
from ppl_gp.infer.hyper import restarts as map_restarts
from ppl_gp.infer.svgp import step as training

X, Y, _ = small_fits.classification()


def stopped_at(call, monkeypatch, module, name):
    """Ctrl-C inside a compiled function of a module, the `call`-th time that it is called."""
    calls, real = [], getattr(module, name)

    def stopping(*args):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(module, name, stopping)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_map_keeps_the_best_point_so_far(steps, monkeypatch):
    short = pg.Laplace(hyper=pg.MAP(restarts=2, max_steps=steps))
    fewer = pg.fit(small_fits.classifier, short, 0, X, y=Y, throw=False)
    stopped_at(steps + 1, monkeypatch, map_run, "advance")
    fit = pg.fit(small_fits.classifier, pg.Laplace(hyper=pg.MAP(restarts=2)), 0, X, y=Y)
    assert fit.result == "interrupted" and fit.stats["map_steps"] == steps
    for name in fit.hyper:
        np.testing.assert_array_equal(fit.hyper[name], fewer.hyper[name])


def test_map_before_its_first_step_has_its_start(monkeypatch):
    stopped_at(1, monkeypatch, map_restarts, "evaluate")
    method = pg.Laplace(hyper=pg.MAP(init=small_fits.HYPER))
    fit = pg.fit(small_fits.classifier, method, 0, X, y=Y, throw=False)
    assert fit.result == "interrupted" and fit.stats["map_steps"] == 0
    for name, value in small_fits.HYPER.items():
        np.testing.assert_allclose(fit.hyper[name], value, rtol=1e-12)


@pytest.mark.parametrize("after", ["spreads", "plainly"])
def test_map_keeps_a_whole_search_where_what_follows_it_is_stopped(after, monkeypatch):
    """Spreads of the hyperparameters, and other length scales: most of a compiled fit's time."""
    method = pg.Laplace(hyper=pg.MAP())
    whole = pg.fit(small_fits.classifier, method, 0, X, y=Y)
    stopped_at(1, monkeypatch, map_run, after)
    fit = pg.fit(small_fits.classifier, method, 0, X, y=Y)
    assert whole.result == "converged" and fit.result == "interrupted"
    assert fit.log_evidence == whole.log_evidence and fit.hyper == whole.hyper


@pytest.mark.one_case
@pytest.mark.parametrize("call", [1, 3, 4])
def test_a_grid_keeps_the_point_that_its_search_had_reached(call, monkeypatch):
    """In the search for the mode, at the curvature and at the points: 30 calls or so in all."""
    real, calls = map_restarts.evaluate, []

    def stopping(*args):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(map_restarts, "evaluate", stopping)
    monkeypatch.setattr(grid, "evaluate", stopping)
    method = pg.Laplace(hyper=pg.Grid(init=small_fits.HYPER, max_steps=1))
    fit = pg.fit(small_fits.classifier, method, 0, X, y=Y)
    assert fit.result == "interrupted" and not fit.sampled
    assert fit.predict(X).mean.shape == Y.shape
    if call == 1:
        np.testing.assert_allclose(fit.hyper["variance"], small_fits.HYPER["variance"], rtol=1e-12)


def regression(X, y=None):
    """A Gaussian likelihood, which the collapsed bound needs."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.slow
def test_the_collapsed_climb_keeps_whole_chunks(monkeypatch):
    """Its first chunk is done from each of several starts, and the best goes on; a climb that has
    ended may be followed by another, from elsewhere.
    """
    y, method = np.sin(2 * X[:, 0]), pg.CollapsedSVGP(num_inducing=6)
    real_climb, real_stages, climbs, starts = training._climb, training._stages, [], []

    def counting(*args):
        climbs.append(args)
        return real_climb(*args)

    def noting(problem, state, others, *rest):
        starts.append((len(climbs), 1 + len(others)))
        return real_stages(problem, state, others, *rest)

    def stopped(call):
        with monkeypatch.context() as patched:
            stopped_at(call, patched, training, "_climb")
            return pg.fit(regression, method, 0, X, y=y)

    with monkeypatch.context() as patched:
        patched.setattr(training, "_climb", counting)
        patched.setattr(training, "_stages", noting)
        pg.fit(regression, method, 0, X, y=y)
    (_, num), (second, _) = starts
    assert num > 2
    for call, chunks in ((2, 1), (num, 1), (num + 1, 1), (num + 2, 2)):
        fit = stopped(call)
        assert fit.result == "interrupted"
        assert len(fit.stats["bounds"]) == chunks * training.CHUNK
    later = stopped(num + 3).stats["bounds"]
    np.testing.assert_array_equal(fit.stats["bounds"], later[: 2 * training.CHUNK])
    first = stopped(second + 1)  # nothing of the second climb: the first one's end
    assert first.result == "interrupted"  # whether the second would end higher is not known
    np.testing.assert_array_equal(first.stats["bounds"][: len(later)], later)


NUTS = pg.NUTS(num_warmup=30, num_samples=60, num_chains=2)  # chunks: 25, 5, then 25, 25, 10


@pytest.mark.slow
def test_chains_keep_the_draws_so_far(monkeypatch):
    whole = pg.fit(small_fits.classifier, NUTS, 0, X, y=Y, throw=False)
    stopped_at(5, monkeypatch, chains, "_chunk")
    fit = pg.fit(small_fits.classifier, NUTS, 0, X, y=Y, throw=False)
    assert fit.result == "interrupted" and fit.hyper["variance"].shape == (2 * 50,)
    kept = whole.hyper["variance"].reshape(2, 60)[:, :50]
    np.testing.assert_array_equal(fit.hyper["variance"].reshape(2, 50), kept)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_chains_without_a_draw_keep_nothing(call, monkeypatch):
    stopped_at(call, monkeypatch, chains, "_chunk")
    with pytest.raises(KeyboardInterrupt):
        pg.fit(small_fits.classifier, NUTS, 0, X, y=Y)
