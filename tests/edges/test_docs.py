"""The site's pages run and print what they show, recipes with a picture and an assertion; every
public name has its place in the reference, every error and every result a heading, every link a
target.
"""

import doctest
import inspect
import pickle
import pkgutil
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.py"))
# Pages that are scripts: their outputs and pictures are made when the site is
SCRIPTS = [
    *sorted((ROOT / "docs").glob("*.py")),
    *sorted((ROOT / "docs" / "tutorial").glob("*.py")),
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages whose blocks run in their order; others show pieces, other libraries or a shell
SHOWN = [
    "comparing",
    "effects",
    "frames",
    "guides",
    "hyperparameters",
    "index",
    "installation",
    "large-data",
    "latents",
    "limitations",
    "methods",
    "predictions",
    "saving",
    "sklearn",
    "troubleshooting",
    "without-gp",
]
# Made by the package, not by a user
WITHOUT_PARAMETERS = {pg.Fit, pg.Prediction, pg.ModelComparison, pg.Result, pg.Whiten}
WITHOUT_PARAMETERS |= {pg.InducingVariables}
ERRORS = [getattr(pg, name) for name in pg.__all__ if name.endswith("Error")]


# The build of the site runs the recipes and the scripts, and stops at an error: `make docs`.


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_page_with_a_picture_and_a_test(path):
    text = path.read_text()
    assert len(text.splitlines()) < 85 and text.startswith("# %% [markdown]\n# # ")
    assert re.search(r"title=|pg\.plot_", text)
    assert "\nplt.show()\n" in text  # a page has the picture, not what its last line returns
    assert re.search(r"^assert ", text, re.MULTILINE)


def ours(page):
    """(what stands before, [our half of every pair]) of the page on other libraries."""
    first, *blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return first, [block for block in blocks if block.startswith("# ppl_gp\n")]


@pytest.mark.slow
@pytest.mark.parametrize("pair", range(6))
def test_our_half_of_a_pair_is_a_model_that_its_methods_take(pair):
    first, blocks = ours(ROOT / "docs" / "coming-from.md")
    assert len(blocks) == 6
    model, uses = blocks[pair].split("\n\n\n")
    names = {"__name__": "pair"}
    exec(first + model, names)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 20)
    more = (rng.normal(size=20), rng.integers(0, 8, 20)) if "group" in model else ()
    found = pg.check(names["model"], np.linspace(0.0, 3.0, 20), *more, y=y)
    (methods,) = [item.message for item in found.items if item.name == "methods"]
    used = re.findall(r"pg\.fit\(model, pg\.(\w+)", uses)
    assert found.ok and used and all(method in methods for method in used), found
    compile(uses, "uses", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN)
@pytest.mark.filterwarnings("ignore")
def test_every_block_of_a_page_runs_and_prints_what_it_shows(page, capsys, tmp_path, monkeypatch):
    """Words as they are there, numbers within 2 %: they differ a little from one JAX to another."""
    monkeypatch.chdir(tmp_path)
    names, number = {"__name__": "page"}, re.compile(r"-?\d+(?:\.\d*)?")
    words = lambda text: re.sub(r"\s", "", number.sub("#", text))  # noqa: E731 - arrays are aligned
    blocks = r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?"
    for code, shown in re.findall(blocks, (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL):
        exec(code, names)
        printed = capsys.readouterr().out
        assert words(printed) == words(shown)
        found, wanted = ([float(x) for x in number.findall(text)] for text in (printed, shown))
        np.testing.assert_allclose(found, wanted, rtol=0.02)


def test_every_script_and_every_notebook_is_a_page():
    nav, gallery = (ROOT / "mkdocs.yml").read_text(), (ROOT / "docs" / "gallery.md").read_text()
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    scripts = [path.relative_to(ROOT / "docs") for path in RECIPES + SCRIPTS]
    assert all(f": {path}\n" in nav for path in scripts)
    assert all(f": notebooks/{path.name}\n" in nav for path in notebooks)
    linked = re.findall(r"^- \[.+\]\((?:\.\./notebooks|recipes)/(.+)\)\. ", gallery, re.MULTILINE)
    assert sorted(linked) == sorted(path.name for path in RECIPES + notebooks)


def test_every_public_name_is_in_the_reference_once():
    pages = [path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md"))]
    found = re.findall(r"^::: ppl_gp\.(\w+)$", "\n".join(pages), re.MULTILINE)
    assert sorted(found) == sorted(pg.__all__)


def documented() -> dict[str, str]:
    """{name: docstring with an example} of the public names and their own methods."""
    found = {}
    for name in pg.__all__:
        thing = getattr(pg, name)
        members = vars(thing).items() if inspect.isclass(thing) or inspect.ismodule(thing) else ()
        public = {f"{name}.{k}": v for k, v in members if not k.startswith("_")}
        for key, value in {name: thing, **public}.items():
            own = getattr(value, "func", value)
            if not inspect.ismodule(own) and ">>>" in (inspect.getdoc(own) or ""):
                found[key] = inspect.getdoc(own)
    return found


# A fit takes seconds to compile
FITS = re.compile(r"pg\.fit\(|_prior\(")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(k, marks=pytest.mark.slow) if FITS.search(v) else k
        for k, v in documented().items()
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_example_of_a_docstring_runs(name):
    globs = {"np": np, "jnp": jnp, "numpyro": numpyro, "dist": dist, "jax": jax, "pg": pg}
    example = doctest.DocTestParser().get_doctest(documented()[name], globs, name, None, 0)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    told, runner = [], doctest.DocTestRunner(optionflags=flags)
    # One model stands in several docstrings, and a fit may run the first: its globals stay.
    found = runner.run(example, out=told.append, clear_globs=False)
    assert example.examples and not found.failed, "".join(told)


def test_every_public_name_has_its_parameters():
    """Functions and classes that take arguments; errors take a text."""
    for name in pg.__all__:
        thing = getattr(pg, name)
        if callable(thing) and thing not in ERRORS and thing not in WITHOUT_PARAMETERS:
            assert "\nParameters\n---" in (inspect.getdoc(thing) or ""), name


def test_docstrings_have_no_words_that_a_reader_has_to_translate():
    words = runpy.run_path(str(ROOT / "docs" / "tools" / "english.py"))["WORDS"]
    things = [getattr(pg, name) for name in pg.__all__]
    told = [f"{t.__name__}: {m[0]}" for t in things if (m := words.search(inspect.getdoc(t) or ""))]
    assert not told


def test_what_the_reference_names_is_there():
    pages = [path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md"))]
    for name in re.findall(r"^::: (\S+)$", "\n".join(pages), re.MULTILINE):
        assert inspect.getdoc(pkgutil.resolve_name(name)), name


def prose(page):
    """The Markdown of a page, without its code."""
    text = page.read_text()
    if page.suffix == ".py":
        cells = re.findall(r"^# %% \[markdown\]\n((?:#.*\n?)+)", text, re.MULTILINE)
        return re.sub(r"^# ?", "", "\n".join(cells), flags=re.MULTILINE)
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Of a page's headings, as the forge, the site and the converter of scripts make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    if page.suffix == ".py":
        return {heading.strip().replace(" ", "-") for heading in headings}
    shown = [re.sub(r"\[(.+?)\]\(.*?\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in shown}


def reaches(place, start=ROOT):
    """Whether a relative link, from a folder, ends at a file, and at a heading where it names
    one.
    """
    path, _, anchor = place.partition("#")
    target = start / path
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES + RECIPES + SCRIPTS, ids=lambda page: page.stem)
def test_links_have_targets(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for link in (link for link in links if not link.startswith(("http", "#"))):
        assert reaches(link, page.parent), link
    assert {link[1:] for link in links if link.startswith("#")} <= anchors(page)


def test_every_typed_error_and_every_result_names_its_place():
    named = [thing.help for thing in (*ERRORS, *pg.Result)]
    assert all(reaches(place) for place in named)
    assert len(set(named)) == len(ERRORS) + len(pg.Result)
    error = pg.ModelError("what is wrong")
    assert str(error) == "what is wrong" and error.__notes__ == [f"See {pg.ModelError.help}"]


def test_a_fit_that_failed_names_the_place_of_its_result():
    fit = SimpleNamespace(result=pg.Result.not_mixed)
    error = pickle.loads(pickle.dumps(pg.FitError("what is wrong", fit)))
    assert error.help == pg.Result.not_mixed.help and error.__notes__ == [f"See {error.help}"]


def test_the_declared_models_are_there_after_an_installation():
    """As functions, by one name in every process: a pickle of one is found again."""
    assert all(callable(getattr(pg.models, name)) for name in pg.models.__all__)
    assert {"binary", "counts"} <= set(pg.models.__all__)
    assert pickle.loads(pickle.dumps(pg.models.binary)) is pg.models.binary
    files = {path.stem for path in (ROOT / "models").glob("*.py")} - {"__init__"}
    named = {getattr(pg.models, name).__module__ for name in pg.models.__all__}
    assert named == {f"ppl_gp.models.{file}" for file in files}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
