"""The site's recipes run, each with its picture and its last assertion; every public name has its
place in the reference.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ppl_gp as pg

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs(path, tmp_path):
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_page_with_a_picture_and_a_test(path):
    text = path.read_text()
    assert len(text.splitlines()) < 85 and text.startswith("# %% [markdown]\n# # ")
    assert "plt." in text and re.search(r"title=|plot_components", text)
    assert re.search(r"^assert ", text, re.MULTILINE)


def test_every_public_name_is_in_the_reference_once():
    pages = [path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md"))]
    found = re.findall(r"^::: ppl_gp\.(\w+)$", "\n".join(pages), re.MULTILINE)
    assert sorted(found) == sorted(pg.__all__)


def test_every_typed_error_and_every_result_has_its_place():
    text = (ROOT / "docs" / "symptoms.md").read_text()
    errors = [n for n in pg.__all__ if n.endswith("Error") and n != "PplGpError"]
    assert all(f"### {name}\n" in text for name in errors)
    seen = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert seen <= {r.value for r in pg.Result}
