"""The notebooks: each paired script runs with small settings to its last cell, whose assertions
test its claim.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))
# It compiles for nearly all of the time: 250 seconds without optimisations, 590 with them.
COMPILED = "11_what_factorising_costs"
MARKED = [
    pytest.param(p, marks=pytest.mark.slow if p.stem == COMPILED else pytest.mark.long, id=p.stem)
    for p in SCRIPTS
]


def test_there_are_notebooks():
    names = [
        "01_one_model_every_posterior",
        "02_laplace_ep_vi_nuts",
        "03_sparse_gps",
        "04_large_data",
    ]
    names += [
        "05_latent_inputs_and_encoders",
        "06_deep_gps",
        "07_importance_weighting",
        "08_four_models_of_letters",
        "09_effects_and_components",
        "10_many_classes",
        "11_what_factorising_costs",
    ]
    assert [path.stem for path in SCRIPTS] == names


@pytest.mark.parametrize("path", MARKED)
def test_the_claim_holds_with_small_settings(path):
    settings = {"PPL_GP_NOTEBOOK_SIZE": "small", "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, path.name],
        cwd=path.parent,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_opens_with_a_claim_and_ends_with_its_test(path):
    cells = jupytext.read(path).cells
    assert "**Claim.**" in cells[0].source
    assert re.search(r"^assert ", cells[-1].source, re.MULTILINE)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_and_notebook_are_the_same(path):
    pair = [
        [cell.source.strip() for cell in jupytext.read(p).cells]
        for p in (path, path.with_suffix(".ipynb"))
    ]
    assert pair[0] == pair[1]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_names_no_path_of_the_machine_that_ran_it(path):
    text = path.with_suffix(".ipynb").read_text()
    found = [name for name in ("site-packages", str(ROOT), str(Path.home())) if name in text]
    assert not found, f"{path.stem} holds {found}: clear its warnings"
