"""What `make test` takes, what is left to `make test-slow`, and in which order processes take it.

`slow`: left out by default. `long`: slow, and its time goes into running, not into compiling, so
that XLA optimises what it compiles. `one_case`: of a function with parameters, the first case runs
by default, as the others walk the same lines; they are slow.
"""

import os
from collections import Counter

import jax
import pytest

FEW_OPTIMISATIONS = "JAX_DISABLE_MOST_OPTIMIZATIONS"


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not name
def pytest_collection_modifyitems(config, items):
    """Mark the slow ones; where processes share the files, those of long tests come first."""
    seen = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        is_other = item.get_closest_marker("one_case") and function in seen
        if is_other or item.get_closest_marker("long"):
            item.add_marker("slow")
        if not item.get_closest_marker("slow"):
            seen.add(function)
    if hasattr(config, "workerinput"):
        size = Counter(item.path for item in items)
        long = {item.path for item in items if item.get_closest_marker("long")}
        items.sort(key=lambda item: (item.path not in long, -size[item.path], item.path))


@pytest.fixture(autouse=True)
def optimised_where_long(request, monkeypatch):
    """Half of compiling is LLVM's optimisation, which pays for itself in long runs only."""
    if os.environ.get(FEW_OPTIMISATIONS) == "1" and request.node.get_closest_marker("long"):
        monkeypatch.setenv(FEW_OPTIMISATIONS, "0")  # for the processes that it starts
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", True)
    else:
        yield
