"""Draws whose covariances are their own are made in batches: bounded memory, the same numbers."""

import jax
import numpy as np
import pytest
from test_saved_files import encoded

from ppl_gp.results.integrals import compiled
from ppl_gp.results.predict.prediction import query_at

NUM, EACH = 150, 40
X_NEW = np.random.default_rng(0).normal(size=(NUM, 2))


@pytest.fixture(scope="module")
def case():
    return query_at(encoded(), X_NEW, (), {})


def drawn(case, monkeypatch, room):
    """(draws, bytes that the program takes on its way)."""
    monkeypatch.setattr(compiled, "_ROOM", room)
    seen, program = [], compiled._joint_draws

    def measured(*args):
        lowered = jax.jit(lambda case: program(case, *args[1:])).lower(args[0])
        seen.append(lowered.compile().memory_analysis().temp_size_in_bytes)
        return program(*args)

    monkeypatch.setattr(compiled, "_joint_draws", measured)
    f, y, _ = compiled.joint_draws(case, jax.random.key(3), EACH)
    monkeypatch.undo()
    return f, y, seen[0]


def test_draws_of_a_latent_model_take_bounded_memory(case, monkeypatch):
    room = 2 * 25 * 8 * NUM**2  # bytes: 2 of the 40 draws at once
    f, y, whole = drawn(case, monkeypatch, 1e12)
    g, z, less = drawn(case, monkeypatch, room)
    np.testing.assert_allclose(f["f"], g["f"], rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(y["y"], z["y"])
    assert less < room < whole / 2
