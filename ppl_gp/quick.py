"""How functions are compiled: quickly where LAPACK, or a single pass over the data, is the work,
and with all optimisation where XLA's own loops are.

`entry` and `one_entry` are small steps between compiled functions, done on the host: an operation
of JAX outside `jit` costs tens of milliseconds of compiling for each new shape. Of concrete arrays
only, and of small ones: on an accelerator they are copied to the host.
"""

import functools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

# Fusion emitters, the default of JAX 0.9 and 0.10 on CPU, compile 1.5 to 2.5 times as long as the
# loops of before, which run as fast or faster (a step of SVGP with 200 inducing points: 0.77 of the
# time). JAX 0.11 has other fusions, and 0.12 no longer knows the option.
_FULL: dict[str, Any] = {}
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    _FULL["xla_cpu_use_fusion_emitters"] = False
# Level 0 compiles two to four times faster still, and what XLA's own loops do runs slower: none of
# that is inside functions that are compiled so.
_QUICK = {**_FULL, "xla_backend_optimization_level": 0}


# Data up to which a local method's fit is over before good code for it is compiled: EP and VI of
# 300 data take 0.4 s longer and are compiled 1.3 s sooner; with 1000 data they take 2 s longer.
FEW_DATA = 400


def full_jit(function: Callable) -> Any:
    """`equinox.filter_jit` for functions in which XLA's own loops are the work (the steps of a long
    run, say); under another transformation of JAX, which takes compiler options at the outermost
    `jit` only, as it is.

    The backend is asked for at the first call, not at import, which would fix the number of
    devices.
    """
    return _compiled(function, _FULL)


def quick_jit(function: Callable) -> Any:
    """As `full_jit`, with little of LLVM's optimisation on CPU: for a single pass, or where LAPACK
    is the work.

    `.full` is the same function with all optimisation, for amounts of work that repay it.
    """
    quick = _compiled(function, _QUICK)
    quick.full = full_jit(function)
    return quick


def _compiled(function: Callable, options: dict[str, Any]) -> Any:
    inner = eqx.filter_jit(function)

    @functools.cache
    def outermost():
        if not options or jax.default_backend() != "cpu":
            return inner
        return eqx.filter_jit(function, compiler_options=options)

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
        return (inner if traced else outermost())(*args, **kwargs)

    call: Any = wrapped
    call.outermost = outermost
    return call


def entry(tree, index: int):
    """Entry `index` of the leading axis of every array of a tree, without that axis."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[index]), tree)


def one_entry(tree):
    """Every array of a tree with a leading axis of one."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[None]), tree)


def pruned(function: Callable, x) -> Callable:
    """A function of one array to one without the steps that its result does not need: a model's
    draws of what it would observe, NumPyro's checks of parameters. Differentiating them twice costs
    tracing, and JAX 0.9 cannot do it to a loop.
    """
    closed = jax.make_jaxpr(function)(x)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True], instantiate=True)
    return lambda x: jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(x)[0]
