"""Room for compiled programs: each takes some dozens of the process's memory maps, of which Linux
allows 65 530 by default; beyond them LLVM ends the process.

A loop of fits that each compile (other numbers of rows, a Python number among the arguments) gets
there in some hundred fits. JAX can forget its programs, and compiles again what is wanted again.
"""

import warnings
from pathlib import Path

import jax

_MAPS, _MOST = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_FULL = 0.7  # of what the system allows: a fit and its questions take a few thousand
_EVERY = 100  # programs between two looks, which take some hundredths of a second

_compiled = {"seen": 0}


def make_room(compilations: int) -> bool:
    """Let JAX forget its compiled programs, with a warning, where the maps are nearly used up;
    whether it did. `compilations`: how many the process has made, so that looks are rare. Nothing
    where the system does not tell.
    """
    if compilations - _compiled["seen"] < _EVERY:
        return False
    _compiled["seen"] = compilations
    taken, most = _counts()
    if taken < _FULL * most:
        return False
    jax.clear_caches()
    warnings.warn(
        f"{taken} of the {most:.0f} memory maps that the system allows a process are taken, nearly "
        "all by compiled programs; JAX's are forgotten now, and compiled again where they are "
        "wanted. Fits in a loop compile anew where shapes or Python numbers among the arguments "
        "change: pass numbers as arrays, np.array(0.3), and keep the number of rows.",
        stacklevel=3,
    )
    return True


def _counts() -> tuple[int, float]:
    """(maps that are taken, maps that are allowed)."""
    try:
        with _MAPS.open("rb") as lines:
            return sum(1 for _ in lines), float(_MOST.read_text())
    except (OSError, ValueError):
        return 0, float("inf")
