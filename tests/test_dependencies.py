"""What is declared is imported, and what is imported is declared."""

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# xarray's engine for files and what that reads through: named in a string
BY_NAME = {"h5netcdf", "h5py"}
MODULES = {"scikit_learn": "sklearn"}


def names(requirements):
    found = {r.split(";")[0].split("[")[0].split(">")[0].strip() for r in requirements}
    return {MODULES.get(n.replace("-", "_"), n.replace("-", "_")) for n in found}


def imported(folder):
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            if isinstance(node, ast.ImportFrom) and node.module:
                yield node.module.split(".")[0]


def test_every_dependency_is_used_and_every_import_declared():
    declared = names(PROJECT["dependencies"])
    used = set(imported(ROOT / "ppl_gp")) - set(sys.stdlib_module_names) - {"ppl_gp"}
    assert declared - used == BY_NAME
    optional = PROJECT["optional-dependencies"]
    assert used - declared <= names(optional["demo"]) | names(optional["sklearn"])
