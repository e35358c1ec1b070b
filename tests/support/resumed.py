"""`pytest --resume`: a run that was cut goes on where it was, for suites of hours.

What has passed is on record under a digest of the sources and versions, so that a changed line
starts the suite anew. A run that ends well removes the record.
"""

import hashlib
import sys
from importlib.metadata import version
from pathlib import Path

SOURCES = ("*.py", "*.json", "*.ipynb", "*.toml", "*.md", "*.fit")
PACKAGES = ("jax", "numpyro", "pytest")


def pytest_addoption(parser):
    parser.addoption("--resume", action="store_true", help="leave out what has passed already")


def pytest_configure(config):
    if config.getoption("--resume"):
        config.pluginmanager.register(Resumed(config))


class Resumed:
    """Processes that share the tests read the record at their start; the one that hears their
    reports writes, into a second file, so that all read the same.
    """

    def __init__(self, config):
        root = config.rootpath
        self.old, self.new = (root / f".passed-{digest(root)}{end}" for end in ("", ".new"))
        self.is_writer = not hasattr(config, "workerinput")
        if self.is_writer:
            self.old.touch()
            self.old.write_text("".join(p.read_text() for p in (self.old, self.new) if p.exists()))
            self.new.write_text("")

    def pytest_collection_modifyitems(self, config, items):
        passed = set(self.old.read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in passed]

    def pytest_runtest_logreport(self, report):
        if self.is_writer and report.when == "call" and report.passed:
            with self.new.open("a") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session, exitstatus):
        if self.is_writer and exitstatus == 0:
            self.old.unlink(missing_ok=True)
            self.new.unlink(missing_ok=True)


def digest(root: Path) -> str:
    """Of every source that git would keep, and of the versions that run it."""
    told = hashlib.blake2b(digest_size=8)
    files = sorted(p for kind in SOURCES for p in root.rglob(kind))
    for path in (p for p in files if not any(d[0] == "." for d in p.relative_to(root).parts)):
        told.update(str(path.relative_to(root)).encode() + path.read_bytes())
    told.update(repr((sys.version, *map(version, PACKAGES))).encode())
    return told.hexdigest()
