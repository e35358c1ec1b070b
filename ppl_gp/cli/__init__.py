"""The command line: `ppl-gp check | fit | predict | compare | demo`."""

import os
import sys

from ppl_gp.cli.app import app
from ppl_gp.cli.run import INTERRUPTED


def main() -> None:
    """Entry point of `ppl-gp`."""
    try:
        app()
    except SystemExit as end:
        if end.code != INTERRUPTED:
            raise
        # XLA's threads still compute what Ctrl-C left behind; taking the interpreter down under
        # them is a crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
