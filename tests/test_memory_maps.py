"""Long sessions: the process has room for compiled programs, and its maps do not run out."""

import jax
import jax.numpy as jnp
import pytest

from ppl_gp import memory_maps


@pytest.fixture
def few(monkeypatch):
    """As if the system allowed few maps, and no look had been taken."""
    monkeypatch.setattr(memory_maps, "_compiled", {"seen": 0})
    monkeypatch.setattr(memory_maps, "_counts", lambda: (71, 100.0))
    forgotten = []
    monkeypatch.setattr(memory_maps.jax, "clear_caches", lambda: forgotten.append(1))
    return forgotten


def test_programs_are_forgotten_where_maps_run_out(few):
    with pytest.warns(UserWarning, match="71 of the 100 memory maps.*np.array"):
        assert memory_maps.make_room(100)
    assert few == [1]
    assert not memory_maps.make_room(199) and few == [1]  # no look before another hundred


def test_nothing_happens_where_there_is_room(few, monkeypatch):
    monkeypatch.setattr(memory_maps, "_counts", lambda: (69, 100.0))
    assert not memory_maps.make_room(1000) and not few


def test_maps_are_counted_where_the_system_tells():
    taken, most = memory_maps._counts()
    assert 0 <= taken < most


@pytest.mark.slow
def test_forgetting_gives_maps_back():
    """In this process: what JAX forgot is compiled again and right."""
    before, _ = memory_maps._counts()
    programs = [jax.jit(lambda x, i=i: jnp.sin(x) * i) for i in range(40)]
    x = jnp.arange(3.0)
    values = [f(x) for f in programs]
    grown, most = memory_maps._counts()
    if most == float("inf"):
        pytest.skip("the system does not tell")
    assert grown > before
    del programs
    jax.clear_caches()
    assert memory_maps._counts()[0] < grown
    assert jnp.array_equal(jax.jit(lambda x: jnp.sin(x) * 7)(x), values[7])
