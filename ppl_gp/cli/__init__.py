"""The command line: `ppl-gp check | fit | predict | compare | demo`."""

from ppl_gp.cli.app import app


def main() -> None:
    """Entry point of `ppl-gp`."""
    app()
