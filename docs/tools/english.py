"""How the pages of the site read: the length of their sentences, and words that a reader has to translate.

`python docs/tools/english.py` prints what to change, and fails if there is anything.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST, MEAN, PARAGRAPH = (
    40,
    22,
    110,
)  # words of a sentence, of a page's mean sentence, of a paragraph
# What the pages say in other words: by whom it is done, when, for what
WORDS = re.compile(
    r"\b(one a datum|an? (entry|effect|level|function) a (row|datum|group)|(?<![Tt]here )(is|are) no (?!longer)[a-z]+"
    r"|(is|are) (told|refused|held)|tells of|stands? (for|in|beside)|beside|a datum's own|draws stand)\b"
)
# Pages by and for people who know the code: benchmarks are written by a program, release notes are a list
NOT_READ = {"benchmarks.md"}


def pages() -> list[Path]:
    """Everything that the site shows as text of its own, but for the reference."""
    docs = ROOT / "docs"
    found = [
        *docs.glob("*.md"),
        *docs.glob("*.py"),
        *docs.glob("tutorial/*.py"),
        *docs.glob("recipes/*.py"),
    ]
    return sorted(path for path in found if path.name not in NOT_READ) + [ROOT / "README.md"]


def prose(path: Path) -> str:
    """The text of a page without code, tables, headings, formulas and the targets of links."""
    text = path.read_text()
    if path.suffix == ".py":
        cells = re.findall(r"^# %% \[markdown\]\n((?:#.*\n?)+)", text, re.MULTILINE)
        text = "\n\n".join(re.sub(r"^# ?", "", cell, flags=re.MULTILINE) for cell in cells)
    text = re.sub(r"```.*?```|\$\$.*?\$\$", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^(\||#+ |!!!|\?\?\?|:::).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`|\$[^$]*\$", "X", text))


def paragraphs(text: str) -> list[str]:
    parts = re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. ", text)
    return [" ".join(part.split()) for part in parts if part.split()]


def sentences(paragraph: str) -> list[str]:
    parts = re.split(r"(?<=[.!?:])\s+(?=[A-Z`\[*])", paragraph)
    return [part for part in parts if len(part.split()) > 2]


def faults(path: Path) -> list[str]:
    found, lengths = [], []
    for paragraph in paragraphs(prose(path)):
        if len(paragraph.split()) > PARAGRAPH:
            found.append(f"a paragraph of {len(paragraph.split())} words: {paragraph[:60]} ...")
        for sentence in sentences(paragraph):
            lengths.append(len(sentence.split()))
            if lengths[-1] > LONGEST:
                found.append(f"a sentence of {lengths[-1]} words: {sentence[:60]} ...")
            if word := WORDS.search(sentence):
                found.append(f"{word[0]!r} in: {sentence[:100]}")
    if lengths and sum(lengths) > MEAN * len(lengths):
        found.append(f"{sum(lengths) / len(lengths):.1f} words in a sentence on average")
    return found


if __name__ == "__main__":
    told = [f"{path.relative_to(ROOT)}: {fault}" for path in pages() for fault in faults(path)]
    print("\n".join(told))
    sys.exit(bool(told))
