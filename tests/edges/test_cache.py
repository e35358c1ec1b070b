"""The cache of compiled functions: filled by one process, found by the next; and what an import
brings along.
"""

import os
import subprocess
import sys

import pytest

import ppl_gp as pg

COMPILE = """
import jax, jax.numpy as jnp
jax.jit(lambda x: x + 1.0)(1.0)  # a program from before does not stop what follows from being kept
import ppl_gp as pg
print(pg.cache({path}))
jax.jit(lambda x: jnp.sin(x) @ jnp.ones(7))(jnp.zeros(7))
"""


def run(code, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    folder = tmp_path / "kept"
    assert run(COMPILE.format(path=repr(str(folder)))) == str(folder)
    first = {p.name for p in folder.iterdir()}
    assert any("jit" in name for name in first)
    run(COMPILE.format(path=repr(str(folder))))
    assert {p.name for p in folder.iterdir() if "-cache" in p.name} == {
        name for name in first if "-cache" in name
    }


def test_what_a_cache_holds_is_read_in_silence(tmp_path):
    code = f"""
import ppl_gp as pg
import jax, jax.numpy as jnp
pg.cache({str(tmp_path)!r})
jax.jit(lambda x: jnp.sin(x) @ jnp.ones(7))(jnp.zeros(7))
"""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TF_"))}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""


@pytest.mark.slow
def test_the_folder_is_jaxs_or_the_users(tmp_path):
    own = run(COMPILE.format(path="None"), JAX_COMPILATION_CACHE_DIR=str(tmp_path / "jax"))
    users = run(COMPILE.format(path="None"), XDG_CACHE_HOME=str(tmp_path / "home"))
    assert (own, users) == (str(tmp_path / "jax"), str(tmp_path / "home" / "ppl_gp"))


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(pg.DataError, match="cache\\(path=.*file/below"):
        pg.cache(tmp_path / "file" / "below")


def test_what_is_no_path_is_refused():
    with pytest.raises(pg.DataError, match="is no path"):
        pg.cache("")


def test_a_folder_that_takes_no_file_is_refused(tmp_path, monkeypatch):
    """Asked by writing: the user `root` may write anywhere, and some file systems take nothing."""

    def refused(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(pg.DataError, match="Permission denied"):
        pg.cache(tmp_path)


def test_importing_leaves_out_what_a_fit_does_not_need():
    heavy = (
        "arviz_base",
        "arviz_stats",
        "xarray",
        "pandas",
        "matplotlib",
        "scipy.stats",
        "scipy.cluster",
    )
    assert run(f"import sys, ppl_gp; print([m for m in {heavy} if m in sys.modules])") == "[]"
