"""Run a peer's program from our own process, which needs NumPy only: write the problem, call, read
the answer.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
NAMES = {
    "svgp": ("gpflow", "gpytorch", "gpjax"),
    "deep": ("gpflux", "gpytorch"),
    "first": ("gpflow", "gpytorch", "gpjax"),
}
OWN = ("ppl_gp", "sklearn")  # on the caller's Python
_BOTH = ["natgrad", "adam"]  # in the order in which they are tried: likely winners first
METHODS = {"ppl_gp": _BOTH, "gpflow": _BOTH, "gpytorch": _BOTH, "gpjax": [*_BOTH, "dual"]}


def available(kind: str = "svgp") -> dict[str, str]:
    """The Python of every peer of this kind that is installed: PPL_GP_PEERS/<name>, else
    .venv-<name> of the repository.

    This project's own engine, "ppl_gp", and "sklearn" run on the caller's.
    """
    places = os.environ.get("PPL_GP_PEERS")
    roots = {n: pathlib.Path(places, n) if places else ROOT / f".venv-{n}" for n in NAMES[kind]}
    pythons = {name: root / "bin" / "python" for name, root in roots.items()}
    return {name: str(python) for name, python in pythons.items() if python.exists()}


def kind_of(task: str) -> str:
    """Which program of a library answers this task."""
    return {"deep": "deep", "first": "first"}.get(task.split("_")[0], "svgp")


def run_peer(name: str, problem: dict, settings: dict, timeout: float, cold: bool = False) -> dict:
    """The peer's answer to `settings["task"]` on the arrays of `protocol`'s problem; or what went
    "error".

    "started" is the time at which its process was, on `time.time`. `cold`: JAX finds nothing
    compiled before.
    """
    kind = kind_of(settings["task"])
    python = sys.executable if name in OWN else available(kind)[name]
    with tempfile.TemporaryDirectory() as folder:
        given, answer = pathlib.Path(folder, "problem.npz"), pathlib.Path(folder, "out.json")
        np.savez(given, settings=json.dumps(settings), **problem)
        command, started = (
            [python, str(HERE / f"{name}_{kind}.py"), str(given), str(answer)],
            time.time(),
        )
        if failed := _call(command, _environment(name, cold), timeout):
            return {"library": name, "task": settings["task"], "error": failed}
        return json.loads(answer.read_text()) | {"started": started}


def _environment(name: str, cold: bool) -> dict[str, str]:
    """Ours with this checkout's package; a peer's without what belongs to our Python."""
    left_out = (
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        *(("JAX_COMPILATION_CACHE_DIR",) if cold else ()),
    )
    clean = {k: v for k, v in os.environ.items() if k not in left_out}
    return clean | {"PYTHONPATH": str(ROOT)} if name in OWN else clean


def _call(command: list[str], environment: dict[str, str], timeout: float) -> str:
    """Nothing, or why the program gave no answer."""
    try:
        done = subprocess.run(
            command, env=environment, timeout=timeout, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {timeout:g} s"
    return (
        ""
        if done.returncode == 0
        else (done.stderr.strip()[-500:] or f"exit status {done.returncode}")
    )
