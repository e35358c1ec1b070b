"""Threads: a user's own models run in one while a fit runs in another, each with its handlers."""

import threading

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers, primitives
from small_fits import HYPER, classification, classifier

import ppl_gp as pg
from ppl_gp.reading.tracing import run

X, Y, _ = classification()


def test_a_trace_that_is_open_in_another_thread_sees_its_own_sites_alone():
    """Handlers that are entered and left in turn by two threads."""
    opened, done, found = threading.Event(), threading.Event(), {}

    def mine():
        numpyro.sample("mine", dist.Normal(0.0, 1.0))
        opened.set()
        done.wait(60)
        numpyro.sample("mine too", dist.Normal(0.0, 1.0))

    def work():
        try:
            with handlers.trace() as trace, handlers.seed(rng_seed=0):
                mine()
            found.update(trace)
        except BaseException as error:  # noqa: BLE001 - for the main thread to see
            found["error"] = error

    thread = threading.Thread(target=work)
    thread.start()
    opened.wait(60)
    with handlers.trace() as outer, handlers.seed(rng_seed=1):
        theirs = run(classifier, (X,), {"y": Y}, HYPER)
        numpyro.sample("here", dist.Normal(0.0, 1.0))
        done.set()
        thread.join()
    assert set(found) == {"mine", "mine too"}
    assert set(outer) == {"here"} and {"f", "y"} < set(theirs)
    assert len(primitives._PYRO_STACK) == 0


def test_a_handler_of_another_thread_does_not_change_a_fit():
    """A condition that the fit would obey, were it on its stack."""
    want = pg.fit(classifier, pg.Laplace(hyper=pg.Fixed(HYPER)), 0, X, y=Y)
    opened, done = threading.Event(), threading.Event()

    def work():
        with handlers.scale(scale=7.0), handlers.block():
            opened.set()
            done.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    opened.wait(60)
    jax.clear_caches()
    fit = pg.fit(classifier, pg.Laplace(hyper=pg.Fixed(HYPER)), 0, X, y=Y)
    done.set()
    thread.join()
    np.testing.assert_allclose(fit.log_evidence, want.log_evidence, rtol=1e-12)


def test_numpyros_own_handlers_work_in_one_thread_as_ever():
    """Errors inside handlers, a nested block, `scan` and `cond`, which read the stack."""
    from numpyro.contrib.control_flow import cond, scan

    def model():
        def step(carry, x):
            z = numpyro.sample("z", dist.Normal(carry, 1.0))
            return z, z

        scan(step, 0.0, np.arange(3.0))
        cond(
            True,
            lambda _: numpyro.sample("c", dist.Normal(0.0, 1.0)),
            lambda _: numpyro.sample("c", dist.Normal(5.0, 1.0)),
            None,
        )

    trace = handlers.trace(handlers.seed(model, jax.random.key(0))).get_trace()
    assert trace["z"]["value"].shape == (3,) and trace["c"]["value"].shape == ()
    try:
        with handlers.trace(), handlers.block():
            raise RuntimeError
    except RuntimeError:
        pass
    assert not primitives._PYRO_STACK
