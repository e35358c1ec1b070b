"""How functions are compiled in which LAPACK, or a single pass over the data, is the work:
quickly.
"""

import functools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import equinox as eqx
import jax
from jax.core import Tracer

# Level 0 compiles two to four times faster, and what XLA's own loops do runs slower: none of that
# is inside these functions. JAX 0.11 has other fusions, and 0.12 no longer knows the option.
_QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
if version("jaxlib") < "0.11":
    _QUICK["xla_cpu_use_fusion_emitters"] = False


# Data up to which a local method's fit is over before good code for it is compiled: EP and VI of
# 300 data take 0.4 s longer and are compiled 1.3 s sooner; with 1000 data they take 2 s longer.
FEW_DATA = 400


def quick_jit(function: Callable) -> Any:
    """`equinox.filter_jit` with little of LLVM's optimisation on CPU; under another transformation
    of JAX, which takes compiler options at the outermost `jit` only, as it is.

    The backend is asked for at the first call, not at import, which would fix the number of
    devices. `.full` is the same function with all optimisation, for amounts of work that repay it.
    """
    inner = eqx.filter_jit(function)

    @functools.cache
    def outermost():
        return (
            eqx.filter_jit(function, compiler_options=_QUICK)
            if jax.default_backend() == "cpu"
            else inner
        )

    @functools.wraps(function)
    def call(*args, **kwargs):
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
        return (inner if traced else outermost())(*args, **kwargs)

    quick: Any = call
    quick.full = inner
    return quick
