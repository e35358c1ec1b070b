"""What the tables of obeyed options share: rows, data, and how work is cut off.

A row is what it calls: functions that take `Tools` and assert, and names of tests that show it
elsewhere (`by`; `by_slow` where only `make test-slow` runs it). What an option makes is looked at
before the work begins, where that shows it: the work is cut off by `caught`.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from small_fits import HYPER

RNG = np.random.default_rng(5)
X = RNG.normal(size=(9, 2))
Y = (X[:, 0] + 0.3 * RNG.normal(size=9) > 0).astype(int)
GROUP = np.arange(9) % 3


class By(NamedTuple):
    """Tests, `file::name`, that show an option to be obeyed."""

    tests: tuple[str, ...]
    slow: bool


def by(*tests):
    return By(tests, False)


def by_slow(*tests):
    return By(tests, True)


class Tools(NamedTuple):
    patch: pytest.MonkeyPatch
    folder: Path
    small_fit: Any


class Caught(Exception):
    def __init__(self, args, kwargs):
        super().__init__()
        self.given, self.named = args, kwargs


def caught(t: Tools, module, name: str, run) -> Caught:
    """The first call of a function of a module while `run` runs, which ends there."""

    def stop(*args, **kwargs):
        raise Caught(args, kwargs)

    with t.patch.context() as patch, pytest.raises(Caught) as found:
        patch.setattr(module, name, stop)
        run()
    return found.value


def hyper_of_arrays():
    return {k: jnp.asarray(v) for k, v in HYPER.items()}
