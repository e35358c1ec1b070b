"""What is declared is imported, and what is imported is declared."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# xarray's engine for files and what that reads through: named in a string
BY_NAME = {"h5netcdf", "h5py"}
INSTEAD = {"pyarrow"}  # of polars, where a user has it
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
    extras = PROJECT["optional-dependencies"]
    assert used - declared == names(extras["demo"]) | names(extras["frames"]) | INSTEAD


def test_batched_factors_of_one_program_end_on_two_threads():
    # With jaxlib 0.10.2 this program never ends: each of two threads waits for parts of its own
    # batch, which stand behind the other in the same pool.
    code = """
import jax, jax.numpy as jnp
def factors(batches):
    return [jnp.linalg.cholesky(A @ A.mT + jnp.eye(100)) for A in batches]
batches = list(jax.random.normal(jax.random.key(0), (30, 3, 100, 100)))
together = jax.jit(factors)
for _ in range(30):
    jax.block_until_ready(together(batches))
print("ended")
"""
    environment = os.environ | {"PJRT_NPROC": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "ended", done.stderr
