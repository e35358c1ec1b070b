"""A suite that was cut goes on where it was, and starts anew once it has ended or changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
SUITE = """
import pathlib
import pytest

RAN = pathlib.Path("ran")


@pytest.mark.parametrize("i", range(4))
def test_one(i):
    RAN.open("a").write(f"{i}")
    assert i != 2 or pathlib.Path("mended").exists()
"""


def ran(folder, *options) -> str:
    """Which tests ran, in order of their numbers."""
    (folder / "ran").write_text("")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--resume", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SUPPORT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
    )
    return "".join(sorted((folder / "ran").read_text()))


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "shared"])
def test_a_second_run_has_what_did_not_pass(tmp_path, options):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['resumed']\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    assert ran(tmp_path, *options) == "0123"
    assert ran(tmp_path, *options) == "2"
    (tmp_path / "mended").touch()  # no source
    assert ran(tmp_path, *options) == "2"
    assert ran(tmp_path, *options) == "0123"  # the run before ended well
    (tmp_path / "mended").unlink()
    assert ran(tmp_path, *options) == "0123"
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['resumed']\n# changed\n")
    assert ran(tmp_path, *options) == "0123"
