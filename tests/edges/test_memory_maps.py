"""Long sessions: the process has room for compiled programs, and its maps do not run out."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ppl_gp import runtime as timing


@pytest.fixture
def few(monkeypatch):
    """As if the system allowed few maps, and no look had been taken."""
    monkeypatch.setattr(timing, "_compiled", {"seen": 0})
    monkeypatch.setattr(timing, "_counts", lambda: (71, 100.0))
    forgotten = []
    monkeypatch.setattr(timing.jax, "clear_caches", lambda: forgotten.append(1))
    return forgotten


def test_programs_are_forgotten_where_maps_run_out(few):
    with pytest.warns(UserWarning, match="71 of the 100 memory maps.*np.array"):
        assert timing.make_room(100)
    assert few == [1]
    assert not timing.make_room(199) and few == [1]  # no look before another hundred


def test_nothing_happens_where_there_is_room(few, monkeypatch):
    monkeypatch.setattr(timing, "_counts", lambda: (69, 100.0))
    assert not timing.make_room(1000) and not few


def test_programs_are_forgotten_where_memory_grows(few, monkeypatch):
    """By 2 GiB since the first look, or since the last time."""
    monkeypatch.setattr(timing, "_counts", lambda: (0, 100.0))
    memory = iter([1.0, 2.9, 3.1, 0.5, 2.4, 2.6, 0.5])
    monkeypatch.setattr(timing, "_resident", lambda: int(next(memory) * 2**30))
    assert not timing.make_room(100) and not timing.make_room(200)
    with pytest.warns(UserWarning, match="has grown by 2.1 GiB"):
        assert timing.make_room(300)
    assert not timing.make_room(400) and few == [1]
    with pytest.warns(UserWarning, match="has grown by 2.1 GiB"):
        assert timing.make_room(500)


_LOOP = """
import sys
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_enable_compilation_cache", False)
sys.path.insert(0, "tests/support")
import ppl_gp as pg
from small_fits import HYPER, classifier
from ppl_gp import runtime as timing
rng, smallest = np.random.default_rng(0), float(sys.argv[2])
timing._GROWN = smallest * 2**20
for i in range(int(sys.argv[1])):
    X = rng.normal(size=(20 + i, 2))
    y = (X[:, 0] > 0).astype(int)
    fit = pg.fit(classifier, pg.Laplace(hyper=pg.Fixed(HYPER)), 0, X, y=y)
    fit.predict(X[:3])
# of this process; ru_maxrss is never below the peak of the process that started it
status = Path("/proc/self/status").read_text().splitlines()
print(int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024)
"""


def _peak(fits, smallest) -> float:
    """MiB of a process with so many fits of changing shapes."""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LOOP, str(fits), str(smallest)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return float(told.stdout.split()[-1])


@pytest.mark.slow
def test_150_fits_of_changing_shapes_stay_under_4_gib():
    assert _peak(150, 2048) < 4096


@pytest.mark.slow
def test_memory_comes_back():
    """38 MiB for each fit are kept without the guard."""
    assert _peak(40, 200) < _peak(40, 10**6) - 300


def test_maps_are_counted_where_the_system_tells():
    taken, most = timing._counts()
    assert 0 <= taken < most


@pytest.mark.slow
def test_forgetting_gives_maps_back():
    """In this process: what JAX forgot is compiled again and right."""
    before, _ = timing._counts()
    programs = [jax.jit(lambda x, i=i: jnp.sin(x) * i) for i in range(40)]
    x = jnp.arange(3.0)
    values = [f(x) for f in programs]
    grown, most = timing._counts()
    if most == float("inf"):
        pytest.skip("the system does not tell")
    assert grown > before
    del programs
    jax.clear_caches()
    assert timing._counts()[0] < grown
    assert jnp.array_equal(jax.jit(lambda x: jnp.sin(x) * 7)(x), values[7])
