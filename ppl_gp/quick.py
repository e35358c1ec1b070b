"""How functions are compiled in which LAPACK, or a single pass over the data, is the work: quickly."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

# Level 0 compiles some two to three times faster, and what XLA's own loops do runs slower: none of that is inside these functions.
_QUICK = {"xla_backend_optimization_level": 0}


def quick_jit(function: Callable) -> Callable[..., Any]:
    """`equinox.filter_jit` with little of LLVM's optimisation on CPU. For functions that Python calls: JAX takes compiler
    options at the outermost `jit` only.

    The backend is asked for at the first call, not at import, which would fix the number of devices.
    """

    @functools.cache
    def compiled():
        options = _QUICK if jax.default_backend() == "cpu" else None
        return eqx.filter_jit(function, compiler_options=options)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return compiled()(*args, **kwargs)

    return call
