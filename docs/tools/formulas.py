"""Formulas of recipes, notebooks and pages as MathML, which browsers draw by themselves: no script
and no font has to be fetched.
"""

import html
import re

from latex2mathml.converter import convert

# What nbconvert makes of a cell of text, and the script by which it would draw formulas
_CELL = re.compile(r'jp-MarkdownOutput"[^>]*>.*?</div>', re.DOTALL)
_SCRIPT = re.compile(r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->", re.DOTALL)
_DOLLARS = re.compile(r"<code>.*?</code>|(\${1,2})([^$<]+)\1", re.DOTALL)
# What pymdownx.arithmatex makes of a formula of a page
_PAGE = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content, page, config, files):
    """Every formula of a page's text; code stays as it is."""
    content = _CELL.sub(lambda cell: _DOLLARS.sub(_of_cell, cell[0]), _SCRIPT.sub("", content))
    return _PAGE.sub(lambda found: mathml(found[3], found[2] == "["), content)


def _of_cell(found) -> str:
    return found[0] if found[1] is None else mathml(found[2], found[1] == "$$")


def mathml(formula: str, block: bool) -> str:
    return convert(html.unescape(formula), display="block" if block else "inline")
