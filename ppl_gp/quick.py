"""How functions are compiled: quickly where LAPACK, or a single pass over the data, is the work,
and with all optimisation where XLA's own loops are; and how they are kept on disk.

`entry` and `one_entry` are small steps between compiled functions, done on the host: an operation
of JAX outside `jit` costs tens of milliseconds of compiling for each new shape. Of concrete arrays
only, and of small ones: on an accelerator they are copied to the host.
"""

import functools
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from ppl_gp.errors import DataError

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
    run, say), and as it is under another transformation, as compiler options are for the outermost
    `jit`. The backend is asked for at the first call: at import it would fix the number of devices.
    """
    return _compiled(function, _FULL)


def quick_jit(function: Callable) -> Any:
    """As `full_jit`, with little of LLVM's optimisation on CPU: for a single pass, or where LAPACK
    is the work. `.full`: the same function with all optimisation, for work that repays it.
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
    call.outermost = outermost  # whose cache tests look at
    return call


def entry(tree, index: int):
    """Entry `index` of the leading axis of every array of a tree, without that axis."""
    there = lambda x: jnp.asarray(np.asarray(x)[index, ...])  # noqa: E731
    return jax.tree.map(lambda x: x[index] if isinstance(x, Tracer) else there(x), tree)


def one_entry(tree):
    """Every array of a tree with a leading axis of one."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[None]), tree)


def kept_values():
    """A context in which concrete inputs give concrete arrays, which may be kept, also while a
    function is traced. `jax.ensure_compile_time_eval` there alone: with it, constants inside
    compiled functions are computed one by one, a program each.
    """
    return jax.ensure_compile_time_eval() if is_traced() else nullcontext()


def is_traced() -> bool:
    """Whether `jax.jit`, `vmap` or `grad` is at work, whose operations give no concrete arrays."""
    return isinstance(jax.device_put(np.zeros(())), Tracer)


def zeros_of(function: Callable, *args) -> Any:
    """Zeros like a function's results: what a loop starts from that compiles its body once."""
    found = eqx.filter_eval_shape(function, *args)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), found)


def pruned(function: Callable, x) -> Callable:
    """A function of one array to one without the steps that its result does not need: a model's
    draws of what it would observe, NumPyro's checks of parameters. Differentiating them twice costs
    tracing, and JAX 0.9 cannot do it to a loop.
    """
    closed = jax.make_jaxpr(function)(x)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True], instantiate=True)
    return lambda x: jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(x)[0]


def cache(path: str | Path | None = None) -> Path:
    """Keep compiled functions in a folder, so that the next process compiles only what is new.

    Compiling takes most of the time of a first fit. Call this once, at the start of a program.

    Parameters
    ----------
    path : str or Path, default None
        The folder. None takes the folder that JAX already has (JAX_COMPILATION_CACHE_DIR), else
        `ppl_gp` in the user's cache folder ($XDG_CACHE_HOME, or ~/.cache).

    Returns
    -------
    Path
        The folder. Remove it to empty the cache.

    Raises
    ------
    DataError
        If `path` is not a path, or the folder cannot be written.

    Notes
    -----
    This is JAX's persistent cache, including its smallest programs. A program is found by its
    content, so a changed model never finds an old one.

    Examples
    --------
    >>> pg.cache("compiled")  # doctest: +SKIP
    PosixPath('compiled')
    """
    users = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "ppl_gp"
    own = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue] (made when jax is imported)
    folder = _writable(own or users if path is None else path)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Most of a fit's programs are small: hundreds of them, of some hundredths of a second each.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX looks at these settings when it compiles for the first time
    compilation_cache.reset_cache()
    return folder


def _writable(path) -> Path:
    """The folder, made if missing; a file in it is tried, as permissions do not tell all."""
    if not isinstance(path, str | Path) or not str(path):
        raise DataError(f"cache(path={path!r}) is no path; give a folder, or None for the usual.")
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError(
            f"cache(path={str(folder)!r}) is no folder that can be written: {error}"
        ) from error
    return folder
