"""A script in a process of its own, which answers with one line of JSON."""

import json
import os
import subprocess
import sys


def without_cache() -> dict[str, str]:
    """The environment, without the folder of compiled functions: what is new is compiled again."""
    return {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}


def fresh(script: str, cold: bool = True) -> dict:
    """The last line that `script` printed, from JSON. `cold`: nothing compiled before is found.

    Raises `RuntimeError` with the end of what it wrote to stderr, where the script failed.
    """
    environment = without_cache() if cold else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"a benchmark's own process ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])
