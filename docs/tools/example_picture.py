"""Makes docs/pictures/example.png: runs the README's example as it stands, and draws what it found.

python docs/tools/example_picture.py
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parents[2]


def example(page: Path = ROOT / "README.md") -> dict:
    """The names that a page's first Python block leaves behind."""
    block = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict = {"__name__": "example"}
    exec(compile(block[1], str(page), "exec"), names)
    return names


def draw(names: dict, path: Path) -> None:
    """Counts, their expectation, and the interval of 90 % of new ones."""
    figure, axes = plt.subplots(figsize=(7.0, 2.8), layout="constrained")
    axes.fill_between(
        names["new"], *names["found"].quantiles, step="mid", alpha=0.2, label="90 % of new counts"
    )
    axes.plot(names["new"], names["found"].mean, label="expected count")
    axes.plot(names["x"], names["y"], "k.", ms=4, label="data")
    title = "One declared model: a count's expectation, and 90 % of new counts"
    axes.set(title=title, xlabel="x", ylabel="count")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=90, metadata={"Software": None})


if __name__ == "__main__":
    draw(example(), ROOT / "docs" / "pictures" / "example.png")
