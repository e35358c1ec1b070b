"""A press of Ctrl-C ends the work wherever it is met: also where the KeyboardInterrupt that Python
raises is dropped, or made another error, by a callback of XLA or of the garbage collector.
"""

import gc
import signal
import threading
import time

import jax
import numpy as np
import pytest
import small_fits

import ppl_gp as pg
from ppl_gp import runtime as ctrl_c
from ppl_gp.infer.hyper import map as map_run
from ppl_gp.runtime import Stage, heard, interruptible, unless_stopped, was_interrupt

X, Y, _ = small_fits.classification()


@pytest.fixture(autouse=True)
def _pythons_own_handler():
    """Processes of a test runner may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def press():
    signal.raise_signal(signal.SIGINT)


def dropped():
    """A press inside something that catches all."""
    try:
        press()
    except KeyboardInterrupt:
        pass


def changed():
    """A press inside a callback that makes its own error of what it meets."""
    try:
        press()
    except KeyboardInterrupt as error:
        raise RuntimeError("raised in callback") from error


def collected():
    """A press in the garbage collector, whose callbacks have nobody to raise to."""

    def callback(*_):
        gc.callbacks.remove(callback)
        press()

    gc.callbacks.append(callback)
    gc.collect()
    end = time.monotonic() + 60
    while time.monotonic() < end:  # the press that is made again
        time.sleep(0.001)


@pytest.mark.parametrize("pressed", [press, dropped, changed, collected])
def test_a_press_ends_in_keyboard_interrupt(pressed, capfd):
    with pytest.raises(KeyboardInterrupt), heard():
        pressed()
    assert capfd.readouterr().err == ""  # nor is the dropped one told of


def test_a_press_is_not_made_again_inside_the_hook(monkeypatch, capfd):
    """As on a busy machine, where the hook that asks for it takes longer than the press waits."""

    class Slow(threading.Timer):
        def start(self):
            super().start()
            if threading.current_thread() is threading.main_thread():
                time.sleep(20 * ctrl_c._AGAIN)

    monkeypatch.setattr(ctrl_c.threading, "Timer", Slow)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), heard():
        collected()
    assert capfd.readouterr().err == "" and time.monotonic() - begin < 30


@pytest.mark.parametrize("pressed", [press, dropped, changed, collected])
def test_it_does_so_through_a_verb_inside_another(pressed):
    with pytest.raises(KeyboardInterrupt), heard():
        with heard():
            pressed()
        pytest.fail("the outer one went on")


@pytest.mark.parametrize("pressed", [press, dropped, changed, collected])
def test_a_loop_keeps_its_last_state(pressed):
    def stages():
        for step in range(5):
            yield Stage(step, step)
            if step == 2:
                pressed()

    with heard():
        state, interrupted = interruptible(stages(), "steps", 5, progress=False)
    assert interrupted and state == (3 if pressed is dropped else 2)


@pytest.mark.parametrize("pressed", [press, dropped, changed])
def test_a_loop_without_a_state_to_keep_ends(pressed):
    def stages():
        yield Stage(0, 0, keep=False)
        pressed()
        yield Stage(1, 1, keep=False)

    with pytest.raises(KeyboardInterrupt), heard():
        interruptible(stages(), "steps", 1, progress=False)


def test_other_errors_stay_what_they_are():
    def stages():
        yield Stage(0, 0)
        raise RuntimeError("of the work")

    with pytest.raises(RuntimeError, match="of the work"), heard():
        interruptible(stages(), "steps", 1, progress=False)


def test_an_answered_press_is_over():
    """Neither what follows in the same verb nor the next verb ends by it."""
    with heard():
        try:
            changed()
        except RuntimeError as error:
            assert was_interrupt(error)
        assert not was_interrupt(ValueError())
    with pytest.raises(KeyboardInterrupt), heard():
        press()
    with heard():
        pass


@pytest.mark.parametrize("pressed", [press, dropped, changed, collected])
def test_a_press_does_not_wait_for_work_of_another_verb(pressed):
    """Nor for work outside of any verb, which has left a state to keep."""
    unless_stopped(lambda: None, None)
    with pytest.raises(KeyboardInterrupt), heard():
        pressed()


def test_a_handler_of_the_program_is_left_alone():
    calls = []
    signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    with heard():
        press()
    assert calls == [1]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_thread_hears_nothing_of_it():
    """A verb in a thread ends as it would; the press is the main thread's, and waits for that one's
    work alone.
    """
    ended = []

    def work(begun, go_on):
        with heard():
            unless_stopped(lambda: None, None)
            begun.set()
            go_on.wait(60)
        ended.append(True)

    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(begun, go_on))
    thread.start()
    begun.wait(60)
    with pytest.raises(KeyboardInterrupt), heard():
        dropped()
        go_on.set()
        thread.join()
    assert ended == [True]


def test_a_map_fit_keeps_its_point_where_xla_changed_the_error(monkeypatch):
    real, calls = map_run.advance, []

    def stopping(*args):
        calls.append(args)
        return changed() if len(calls) == 2 else real(*args)

    monkeypatch.setattr(map_run, "advance", stopping)
    fit = pg.fit(small_fits.classifier, pg.Laplace(hyper=pg.MAP()), 0, X, y=Y, throw=False)
    assert fit.result == "interrupted" and fit.stats["map_steps"] == 1


@pytest.mark.slow
def test_chains_end_by_a_press_at_any_moment_of_compiling():
    """Forty moments of tracing and compiling; one in ten was lost. Where the chains are whole
    already, which a machine that has become quicker reaches sooner, they are kept as they are.
    """
    nuts = pg.NUTS(num_warmup=20, num_samples=25, num_chains=2)

    def run():
        return pg.fit(small_fits.classifier, nuts, 0, X, y=Y, throw=False)

    run()
    jax.clear_caches()
    start = time.perf_counter()
    run()
    whole = time.perf_counter() - start
    rng = np.random.default_rng(0)
    presses = []

    def alarm(*_):
        presses.append("late" if ctrl_c.verb.waits else "on time")
        press()

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        for moment in rng.uniform(0.02, 0.8 * whole, 40):
            jax.clear_caches()
            before_this = len(presses)
            signal.setitimer(signal.ITIMER_REAL, moment)
            try:
                fit = run()
            except KeyboardInterrupt:
                continue
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if presses[before_this:] == ["on time"]:
                assert fit.result == "interrupted"
    finally:
        signal.signal(signal.SIGALRM, before)
    assert presses.count("on time") > 20
