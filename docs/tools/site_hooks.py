"""What the site has beside the pages of docs/: the executed notebooks, as pages; the release notes,
and what a contribution needs; and for the gallery a small picture of each page that it links to, from
the outputs of a notebook as it is stored, and of a recipe as the build has run it.

On the forge a page in docs/ reaches a notebook as `../notebooks/NAME.ipynb`, and the table of methods
in the README; in the site both stand inside of it.
"""

import base64
import io
import json
import os
import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File
from PIL import Image

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
WIDTH = 480
_TABLE_LINK = "[The table of methods](../README.md#methods) says what each of them is."
# Files of the repository that are pages of the site, by the names that pages reach them by
_BESIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# The kernel that runs recipes warns that it has no widgets, with the path of a file of ours.
_QUIET = "ignore:IProgress not found"
# What Python writes before a warning: the file of whoever built the site, and a line in it.
_PLACE = re.compile(r"(^|<pre>)\S+\.py:\d+: (?=\w*Warning: )", re.MULTILINE)
# A link of a page to another one of the sources, in the HTML of a script
_LINK = re.compile(r'href="(?![a-z]+:|#|/)([^"#]+\.(?:md|py|ipynb))(#[^"]*)?"')
# An entry of the gallery, and the first picture of a page, in HTML
_ENTRY = re.compile(r'<li><a href="\.\./(?:recipes|notebooks)/(\w+)/">')
_PICTURE = re.compile(r'src="data:image/png;base64,([^"]+)"')


def on_startup(**_):
    """Kernels inherit what they are not to say on a page."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{before},{_QUIET}" if before else _QUIET


@event_priority(100)  # before the plugin that makes pages of notebooks
def on_files(files, config):
    """The notebooks, their pictures and the pages from beside docs/ join the files of the site."""
    for name, place in _BESIDE.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, place, content=text))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        place = f"notebooks/{path.name}"
        files.append(File(place, str(ROOT), config.site_dir, config.use_directory_urls))
        picture = thumbnail(first_picture(path))
        files.append(File.generated(config, f"gallery/{path.stem}.png", content=picture))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to notebooks and to the files above stay in the site, and the README's table stands
    where a page links to it.
    """
    inside = markdown.replace("](../notebooks/", "](notebooks/")
    for name, place in _BESIDE.items():
        inside = inside.replace(f"](../{name})", f"]({place})")
    return inside.replace(_TABLE_LINK, methods()) if _TABLE_LINK in inside else inside


def on_page_content(html, page, config, files):
    """Warnings of scripts and notebooks name no file of the machine that ran them, and their links
    lead to pages: the site's builder leaves them as they are in the sources. Entries of the gallery
    become cards.
    """
    if page.file.src_uri == "gallery.md":
        cards = _ENTRY.sub(lambda found: found[0].replace("<li>", _card(found[1])), html)
        return cards.replace("<ul>", '<ul class="cards">')

    def page_of(link) -> str:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[1]))
        if (target := files.get_file_from_path(place)) is None:
            raise PluginError(f"{page.file.src_uri} links to {link[1]}, which is not there")
        return f'href="{target.url_relative_to(page.file)}{link[2] or ""}"'

    shown = _PLACE.sub(r"\1", html)
    return _LINK.sub(page_of, shown) if page.file.src_uri.endswith((".py", ".ipynb")) else shown


def _card(name: str) -> str:
    return f'<li><img src="{name}.png" alt="" loading="lazy">'


def on_post_build(config, **_):
    """The gallery's pictures of recipes: the first one that each page shows, or an empty one."""
    site = Path(config.site_dir)
    for page in sorted(site.glob("recipes/*/index.html")):
        found = _PICTURE.search(page.read_text())
        png = base64.b64decode(found[1]) if found else _empty()
        (site / "gallery" / f"{page.parent.name}.png").write_bytes(thumbnail(png))


def _empty() -> bytes:
    """A light picture for a page without one."""
    out = io.BytesIO()
    Image.new("RGB", (WIDTH, WIDTH * 2 // 3), "#eceff1").save(out, "PNG")
    return out.getvalue()


def methods() -> str:
    """The README's table of methods."""
    section = re.search(r"^## Methods\n(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = section[1].splitlines() if section else []
    return "\n".join(line for line in lines if line.startswith("|"))


def first_picture(notebook: Path) -> bytes:
    """The first PNG that a cell of the notebook has put out."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = (output for cell in cells for output in cell.get("outputs", ()))
    for output in outputs:
        if found := output.get("data", {}).get("image/png"):
            return base64.b64decode("".join(found))
    raise ValueError(f"{notebook.name} has no picture: make notebooks")


def thumbnail(png: bytes, width: int = WIDTH) -> bytes:
    """The picture at this width, on white."""
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    small = image.resize((width, round(image.height * width / image.width)), Image.LANCZOS)
    out = io.BytesIO()
    small.save(out, "PNG", optimize=True)
    return out.getvalue()
