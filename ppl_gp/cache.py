"""Compiled functions kept on disk, so that the next process finds them."""

import os
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from ppl_gp.errors import DataError


def cache(path: str | Path | None = None) -> Path:
    """Keep every compiled function in the folder `path`, and look there first: a second process
    compiles what is new only.

    Compiling is most of the time of a first fit. `path=None`: the folder that JAX was given already
    (JAX_COMPILATION_CACHE_DIR), else `ppl_gp` in the user's cache folder ($XDG_CACHE_HOME, or
    ~/.cache). Returns it. Programs are found by what they compute, so that a changed model finds no
    old one. JAX's persistent cache, its smallest programs included; remove the folder to empty it.

    Raises `DataError` for what is no path, and for a folder that cannot be written.
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
    """The folder, made where it is not there. That a file can be written is tried: permissions do
    not tell of a file system that takes none.
    """
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
