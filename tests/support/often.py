"""Parameters of a test of which `make test` takes some, and `make test-slow` the others: where each
costs many seconds of compiling, and the first ones walk the same lines.
"""

import pytest


def some(names, *chosen):
    """`names` for `parametrize`; those that are not `chosen` for `make test` are slow."""
    left = set(chosen) - set(names)
    assert not left, f"{left} are none of {list(names)}"
    return [n if n in chosen else pytest.param(n, marks=pytest.mark.slow) for n in names]
