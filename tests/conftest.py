"""Set-up of the suite: float64, a compilation cache on disk, and every annotation of `ppl_gp`
checked at run time.
"""

import os
from importlib.metadata import version
from pathlib import Path

# Read when jax is imported, and inherited by the processes that the tests start. Compilation is
# most of the suite's
# time, in many small pieces: all of them are kept.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ["JAX_ENABLE_X64"] = "true"
# Half of compiling is LLVM's optimisation: tests marked `long` have it (`which_tests.py`).
if os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1" and tuple(
    map(int, version("jaxlib").split(".")[:2])
) < (0, 11):
    # One part of a program costs a tenth less to compile than 32 of it at once; cores are shared.
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
        " --xla_cpu_parallel_codegen_split_count=1"
    )
# LAPACK's threads spin on matrices of a hundred rows, up to 20 times slower where several processes
# share the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from jaxtyping import install_import_hook  # noqa: E402

# Shapes and types stand in every signature; they are checked here and cost nothing to a user. What
# reads a model's constants takes any value, and is called 160 000 times per generated model.
_ANY = ("ppl_gp.reading.digest", "ppl_gp.reading.fingerprint")
_ROOT = Path(__file__).parents[1]
_MODULES = (
    ".".join(p.relative_to(_ROOT).with_suffix("").parts) for p in _ROOT.glob("ppl_gp/**/*.py")
)
# A seventh of a test's time: the long suite leaves them to the default one.
if os.environ.get("PPL_GP_TYPES", "1") == "1":
    install_import_hook(
        [m for m in _MODULES if not m.endswith("__init__") and m not in _ANY], "beartype.beartype"
    )

import ctypes  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import sys  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402
from resumed import pytest_addoption, pytest_configure  # noqa: E402
from which_tests import optimised_where_long, pytest_collection_modifyitems  # noqa: E402

from ppl_gp import runtime  # noqa: E402

__all__ = [
    "optimised_where_long",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
]

_MEMORY_MAPS, _STATUS = Path("/proc/self/maps"), Path("/proc/self/statm")
# Linux ends a process that has over 65 530; XLA holds some for each compiled function
_MANY_MAPS = 30_000
# pages of memory more than after the last clearing, from which on compiled functions are let go of
_GROWTH = 2_000_000_000 // 4096
_EVERY = 10  # tests from one look to the next
_looks = {"tests": 0, "pages": 0}
# Tracing makes small objects by the million, few of them cycles: a tenth of all time is looking for
# these at Python's own thresholds, of 700.
gc.set_threshold(20_000, 10, 10)
# The package's own look warns: in some orders of the tests one that allows no warning fails
runtime._compiled["seen"] = sys.maxsize


@pytest.fixture(autouse=True)
def _little_memory():
    """Compiled functions are let go of where they hold much memory, also inside a file of hundreds
    of tests.
    """
    yield
    _looks["tests"] += 1
    if _looks["tests"] % _EVERY or not _MEMORY_MAPS.exists():
        return
    many = len(_MEMORY_MAPS.read_bytes().splitlines()) > _MANY_MAPS
    if many or _pages() > _looks["pages"] + _GROWTH:
        jax.clear_caches()
        gc.collect()
        # gives memory back to the system, where the C library has it
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
        _looks["pages"] = _pages()


def _pages() -> int:
    return int(_STATUS.read_text().split()[1])


@pytest.fixture(scope="session")
def small_fit():
    """name -> the fit of `small_fits.classifier` by that method (laplace, ep, vi, bound,
    laplace_sample, nuts), made once.
    """
    import small_fits

    import ppl_gp as pg

    X, y, _ = small_fits.classification()

    @functools.cache
    def fitted(name):
        return pg.fit(small_fits.classifier, small_fits.methods()[name], 0, X, y=y, throw=False)

    return fitted
