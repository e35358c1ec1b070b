"""What `make dist-check` asks of the wheel and the sdist, by the interpreter of an environment that
has the wheel and nothing of the sources:

    python -I tests/dist_check.py DIST_FOLDER PAGE

The page's first Python block is run from the installed package.
"""

import importlib.metadata
import re
import sys
import tarfile
import zipfile
from pathlib import Path

IN_SDIST = {"ppl_gp", "models", "notebooks", "tests", "docs", "mkdocs.yml", "Makefile"}
IN_SDIST |= {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"}


def check_wheel(path: Path) -> None:
    """The package, its marker of types, its licence, and no folder beside."""
    names = zipfile.ZipFile(path).namelist()
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"ppl_gp"}, folders
    assert "ppl_gp/py.typed" in names and any(name.endswith("/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name]


def check_sdist(path: Path) -> None:
    """Everything that the suite and the site are made of."""
    with tarfile.open(path) as archive:
        names = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert names >= IN_SDIST, IN_SDIST - names


def check_installed() -> None:
    """The package comes from this environment, with its version and its command."""
    import ppl_gp

    assert Path(ppl_gp.__file__).is_relative_to(sys.prefix), ppl_gp.__file__
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="ppl-gp")
    assert callable(command.load())
    assert importlib.metadata.version("ppl-gp") == ppl_gp.__version__
    assert Path(ppl_gp.models.__file__).is_relative_to(Path(ppl_gp.__file__).parent)


def run_example(page: Path) -> None:
    """The fit converges, and knows the expected count at the first new point."""
    block = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict = {"__name__": "example"}
    exec(compile(block[1], str(page), "exec"), names)
    first = names["prediction"].mean[0]
    assert names["fit"].result == "converged" and 7.0 < first < 8.5, first


if __name__ == "__main__":
    folder, page = map(Path, sys.argv[1:])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_wheel(wheel)
    check_sdist(sdist)
    check_installed()
    run_example(page)
    print(f"{wheel.name} and {sdist.name} are in order")
