"""Run a peer's program from our own process, which needs NumPy only: write the problem, call, read the answer."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
NAMES = {"svgp": ("gpflow", "gpytorch", "gpjax"), "deep": ("gpflux", "gpytorch")}
_BOTH = ["natgrad", "adam"]  # in the order in which they are tried: likely winners first
METHODS = {"ppl_gp": _BOTH, "gpflow": _BOTH, "gpytorch": _BOTH, "gpjax": [*_BOTH, "dual"]}


def available(kind: str = "svgp") -> dict[str, str]:
    """The Python of every peer of this kind that is installed: PPL_GP_PEERS/<name>, else .venv-<name> of the repository.

    This project's own engine, "ppl_gp", runs on the caller's.
    """
    places = os.environ.get("PPL_GP_PEERS")
    roots = {n: pathlib.Path(places, n) if places else HERE.parents[2] / f".venv-{n}" for n in NAMES[kind]}
    pythons = {name: root / "bin" / "python" for name, root in roots.items()}
    return {name: str(python) for name, python in pythons.items() if python.exists()}


def run_peer(name: str, problem: dict, settings: dict, timeout: float) -> dict:
    """The peer's answer to `settings["task"]` on the arrays of `protocol`'s problem; or what went "error"."""
    kind = "deep" if settings["task"].startswith("deep_") else "svgp"
    python = sys.executable if name == "ppl_gp" else available(kind)[name]
    with tempfile.TemporaryDirectory() as folder:
        given, answer = pathlib.Path(folder, "problem.npz"), pathlib.Path(folder, "out.json")
        np.savez(given, settings=json.dumps(settings), **problem)
        failed = _call([python, str(HERE / f"{name}_{kind}.py"), str(given), str(answer)], timeout)
        return (
            {"library": name, "task": settings["task"], "error": failed} if failed else json.loads(answer.read_text())
        )


def _call(command: list[str], timeout: float) -> str:
    """Nothing, or why the program gave no answer."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    try:
        done = subprocess.run(command, env=clean, timeout=timeout, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return f"not finished after {timeout:g} s"
    return "" if done.returncode == 0 else (done.stderr.strip()[-500:] or f"exit status {done.returncode}")
