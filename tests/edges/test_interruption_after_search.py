"""Ctrl-C in every step that follows a search: the fit is the state that the search has reached.

A profiler of Python presses at the entry of the package's own functions, each once, from the end of
the first search on: no time is involved, and a step that is added later is pressed in as well.
"""

import signal
import sys
import warnings

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import small_fits

import ppl_gp as pg
from ppl_gp import runtime as loop

X, Y, _ = small_fits.classification()
x = X[:, 0]
y = 1.0 + 0.5 * x + 0.3 * X[:, 1]
CHAINS = {"num_warmup": 25, "num_samples": 25, "num_chains": 2}


def line(x, y=None):
    """No GP; conjugate given the scale of y."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(slope * x, 1.0 / precision**0.5), obs=y)


def mixture(x, y=None):
    """A label for each row."""
    with numpyro.plate("parts", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", x.shape[0]):
        part = numpyro.sample("part", dist.Categorical(probs=np.array([0.5, 0.5])))
        numpyro.sample("y", dist.Normal(mean[part], 0.5), obs=y)


def regression(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def deep(X, y=None):
    h = numpyro.sample("h", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), h[:, None]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


MOST = 12  # presses of a slow case
GP, SPARSE = (small_fits.classifier, X, Y), {"num_inducing": 6, "max_steps": 40}
CASES = {
    "svi": (line, x, y, pg.SVI(num_steps=50, num_draws=50)),
    "mean_field": (line, x, y, pg.MeanField(num_draws=50)),
    "grid": (*GP, pg.Laplace(hyper=pg.Grid(init=small_fits.HYPER))),
    "svgp": (*GP, pg.SVGP(**SPARSE)),
}
PLACES = {  # of default runs
    "svi": ("_judged",),
    "mean_field": ("require_conjugate_nearby", "fit_of"),
    "grid": ("_scales", "warn_if_tails"),
    "svgp": ("errors_of", "_stats", "_tell_end"),
}
SLOW_CASES = {
    "map": (*GP, pg.Laplace(hyper=pg.MAP())),
    "ep": (*GP, pg.EP(hyper=pg.MAP())),
    "vi": (*GP, pg.VI(hyper=pg.MAP())),
    "joint_laplace": (line, x, y, pg.Laplace()),
    "sample": (*GP, pg.Laplace(hyper=pg.Sample(**CHAINS))),
    "nuts": (*GP, pg.NUTS(**CHAINS)),
    "elliptical": (*GP, pg.EllipticalSlice(**CHAINS)),
    "sparse_nuts": (*GP, pg.SparseNUTS(num_inducing=6, **CHAINS)),
    "batches": (line, x, y, pg.MeanField(batch_size=5, max_steps=10, num_draws=50)),
    "local_batches": (mixture, x, y, pg.MeanField(batch_size=5, max_steps=10, num_draws=50)),
    "minibatches": (*GP, pg.SVGP(batch_size=5, **SPARSE)),
    "collapsed": (regression, X, y, pg.CollapsedSVGP(num_inducing=6)),
    "deep": (deep, X, y, pg.SVGP(**SPARSE)),
}

LOOP = ("interruptible", "unless_stopped", "_bar")  # of runtime.py


class Profiler:
    """The package's functions in the order of their first calls; a press at the entry of one."""

    def __init__(self, place: str | None = None):
        self.place, self.names = place, []

    def __call__(self, frame, event, arg):
        code = frame.f_code
        begun = code.co_qualname.partition(".")[0]  # what hears Ctrl-C itself is not pressed
        hears = code.co_filename.endswith("runtime.py") and begun not in LOOP
        ours = "/ppl_gp/" in code.co_filename and not hears
        if event != "call" or not ours or code.co_qualname in self.names:
            return
        self.names.append(code.co_qualname)
        if code.co_qualname == self.place:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)


def fitted(case, monkeypatch, profiler):
    """(The fit, its warnings), with the profiler on from the end of the first search."""
    model, inputs, outputs, method = case
    real = loop.interruptible

    def followed(*args):
        found = real(*args)
        if not profiler.names:
            sys.setprofile(profiler)
        return found

    with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for name, module in tuple(sys.modules.items()):
            if name.startswith(("ppl_gp.infer.", "ppl_gp.mean_field.")) and hasattr(
                module, "interruptible"
            ):
                patched.setattr(module, "interruptible", followed)
        try:
            fit = pg.fit(model, method, 0, inputs, y=outputs, throw=False)
        finally:
            sys.setprofile(None)
    return fit, [str(w.message) for w in told]


def require_kept(case, monkeypatch, whole, place: str) -> None:
    """A press at one place gives a fit with the numbers of the whole one."""
    try:
        fit, told = fitted(case, monkeypatch, Profiler(place))
    except KeyboardInterrupt:
        pytest.fail(f"a press in {place} lost the fit")
    assert fit.result == "interrupted", place
    found, expected = (np.asarray(f.predict(case[1]).mean) for f in (fit, whole))
    if whole.sampled and not fit.sampled:  # a grid
        assert any("Ctrl-C came before the grid was complete" in x for x in told), place
        expected = grid_of_one_point(case, fit)
    else:
        assert fit.log_evidence in (None, pytest.approx(whole.log_evidence)), place
    # a collapsed fit climbs twice, to the same optimum here
    rtol = 1e-3 if isinstance(whole.method, pg.CollapsedSVGP) else 1e-8
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-10, err_msg=place)


def grid_of_one_point(case, fit) -> np.ndarray:
    model, inputs, outputs, _ = case
    hyper = pg.Fixed({k: np.asarray(v) for k, v in fit.hyper.items()})
    there = pg.fit(model, pg.Laplace(hyper=hyper), 0, inputs, y=outputs)
    return np.asarray(there.predict(inputs).mean)


@pytest.fixture(autouse=True)
def _pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", CASES)
def test_a_press_after_the_search_keeps_what_it_reached(name, monkeypatch):
    whole, _ = fitted(CASES[name], monkeypatch, Profiler())
    for place in PLACES[name]:
        require_kept(CASES[name], monkeypatch, whole, place)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES | SLOW_CASES)
def test_a_press_in_any_step_after_the_search_does(name, monkeypatch):
    """In a dozen functions, evenly over the order in which they run."""
    case, steps = (CASES | SLOW_CASES)[name], Profiler()
    fitted(case, monkeypatch, Profiler())  # what it compiles is not called again
    whole, _ = fitted(case, monkeypatch, steps)
    # of chains that have not mixed a message is left at the end, when the result is settled
    end = steps.names.index("_scales") if whole.result == "not_mixed" else len(steps.names)
    for at in np.linspace(0, end - 1, MOST).astype(int):
        require_kept(case, monkeypatch, whole, steps.names[at])


def test_a_second_press_after_the_search_raises(monkeypatch):
    """What follows a search may be long."""

    class Twice(Profiler):
        def __call__(self, frame, event, arg):
            if frame.f_code.co_qualname == "fit_of" and event == "call":
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fitted(CASES["mean_field"], monkeypatch, Twice())


def test_a_second_press_raises_where_the_first_ended_the_search(monkeypatch):
    real = loop.interruptible

    def stopped(*args):
        found, _ = loop.unless_stopped(lambda: signal.raise_signal(signal.SIGINT), None)
        return real(*args)

    class AtTheEnd(Profiler):
        def __call__(self, frame, event, arg):
            if frame.f_code.co_qualname == "fit_of" and event == "call":
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(loop, "interruptible", stopped)
    monkeypatch.setattr("ppl_gp.mean_field.method.interruptible", stopped)
    with pytest.raises(KeyboardInterrupt):
        fitted(CASES["mean_field"], monkeypatch, AtTheEnd())


@pytest.mark.parametrize(
    "name, place",
    [
        ("svgp", "ppl_gp.infer.svgp.run.LongRun._first"),
        pytest.param("collapsed", "ppl_gp.infer.svgp.step._climb", marks=pytest.mark.slow),
        pytest.param("batches", "ppl_gp.mean_field.batches.Run._advanced", marks=pytest.mark.slow),
    ],
)
def test_a_press_before_the_first_step_raises(name, place, monkeypatch):
    """q is the prior until then, which no one has asked for."""
    model, inputs, outputs, method = (CASES | SLOW_CASES)[name]

    def pressed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, pressed)
    with pytest.raises(KeyboardInterrupt):
        pg.fit(model, method, 0, inputs, y=outputs)
