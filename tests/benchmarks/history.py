"""`make bench-history`: every number that the benchmarks were run for, over their runs, as one
picture.

A panel a row of the tables, a dot a run, in order of time and joined where the machine is the same.
The dashed line is the row's target, and the shaded side misses it. A star after a commit: the tree
was changed.
"""

import argparse
import pathlib
import re
import textwrap
from typing import NamedTuple

import matplotlib

from tests.benchmarks.record import HISTORY, load

matplotlib.use("Agg")

from matplotlib.figure import Figure  # noqa: E402

COLUMNS, WIDTH, HEIGHT = 3, 4.6, 2.5  # panels beside each other; inches of each
LETTERS = 52  # of a title's line
TITLE = "One dot a run of the benchmarks, by machine; below, date and commit (* of a changed tree)"


class Panel(NamedTuple):
    """One row of a table over its runs: (index among the part's runs, value, machine), and the last
    run's target.
    """

    part: str
    name: str
    unit: str
    target: str
    dots: list[tuple[int, float, str]]


def panels(runs: dict[str, list[dict]]) -> list[Panel]:
    """A panel for each row and unit that has a value in some run, in the order in which the rows
    first came.
    """
    found: dict[tuple, list] = {}
    for part, lines in runs.items():
        for i, run in enumerate(lines):
            for row in run["rows"]:
                if row["value"] is not None:
                    found.setdefault((part, row["name"], row["unit"]), []).append(
                        (i, row, run["machine"])
                    )
    return [
        Panel(*key, dots[-1][1]["target"], [(i, row["value"], where) for i, row, where in dots])
        for key, dots in found.items()
    ]


def limit(target: str) -> tuple[str, float] | None:
    """("most" or "least", number) of a target such as "at least 2 x"; `None` where it names no
    number.
    """
    found = re.match(r"at (most|least) ([\d.]+(?:e-?\d+)?)", target)
    return (found[1], float(found[2])) if found else None


def draw(runs: dict[str, list[dict]], path: pathlib.Path) -> int:
    """The picture, written to `path`; returns the number of its panels.

    Raises `ValueError` where no run has a value.
    """
    drawn = panels(runs)
    if not drawn:
        raise ValueError("the history is empty: make bench writes it")
    machines = sorted({where for panel in drawn for *_, where in panel.dots})
    colours = {where: f"C{i % 10}" for i, where in enumerate(machines)}
    down = -(-len(drawn) // COLUMNS)
    figure = Figure(figsize=(COLUMNS * WIDTH, down * HEIGHT + 1.0), layout="constrained")
    axes = figure.subplots(down, COLUMNS, squeeze=False).ravel()
    for ax, panel in zip(axes, drawn, strict=False):
        _panel(ax, panel, runs[panel.part], colours)
    for ax in axes[len(drawn) :]:
        ax.set_axis_off()
    _legend(figure, colours)
    figure.savefig(path, dpi=100)
    return len(drawn)


def _legend(figure: Figure, colours: dict[str, str]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=c, marker="o", label=where) for where, c in colours.items()]
    lines.append(
        Line2D([], [], color="0.3", linestyle="--", label="target (the shaded side misses it)")
    )
    figure.legend(handles=lines, loc="outside upper center", ncols=2, title=TITLE)


def _panel(ax, panel: Panel, lines: list[dict], colours: dict[str, str]) -> None:
    """One row: dots, the last one's number, target, and the runs' dates and commits below."""
    for where, colour in colours.items():
        dots = [(i, value) for i, value, w in panel.dots if w == where]
        ax.plot(*zip(*dots, strict=True), "o-", color=colour, markersize=4) if dots else None
    i, last, _ = panel.dots[-1]
    ax.annotate(f"{last:.3g}", (i, last), textcoords="offset points", xytext=(6, 4), fontsize=8)
    wanted = limit(panel.target)
    bottom, top = _range([v for _, v, _ in panel.dots] + ([wanted[1]] if wanted else []))
    ax.set_ylim(bottom, top)
    if wanted:
        ax.axhline(wanted[1], color="0.3", linestyle="--", linewidth=1)
        ax.axhspan(
            *((wanted[1], top) if wanted[0] == "most" else (bottom, wanted[1])),
            color="C3",
            alpha=0.08,
        )
    title = textwrap.fill(f"{panel.part}: {panel.name}", LETTERS)
    ax.set_title(f"{title}\n(target: {panel.target})", fontsize=8)
    ax.set_ylabel(textwrap.fill(panel.unit, 20), fontsize=8)
    _runs(ax, lines)


def _range(values: list[float]) -> tuple[float, float]:
    """Of the axis: zero and every value are in it."""
    low, high = 1.25 * min(0.0, *values), 1.25 * max(0.0, *values)
    return (low, high) if high > low else (0.0, 1.0)


def _runs(ax, lines: list[dict], most: int = 4) -> None:
    """Dates and commits of the first, the last and some runs between below the axis."""
    last = len(lines) - 1
    shown = sorted({round(k * last / (most - 1)) for k in range(most)})
    ax.set_xticks(shown, [_when(lines[i]) for i in shown], fontsize=7)
    ax.set_xlim(-0.5, last + 0.9)
    ax.tick_params(axis="y", labelsize=7)


def _when(run: dict) -> str:
    """Date and commit, with a star where the tree was changed."""
    return (
        f"{run['date'][:10]}\n{run['commit'][:7]}{'*' if run['commit'].endswith('dirty') else ''}"
    )


def main() -> None:
    """Draw the parts that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to draw; all by default")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmark_history.png"))
    chosen, runs = parser.parse_args(), load(HISTORY)
    if not runs:
        parser.error("the history is empty: make bench writes it")
    if unknown := set(chosen.parts) - set(runs):
        parser.error(
            f"no history of {', '.join(sorted(unknown))}; there is one of "
            f"{', '.join(runs) or 'nothing'}"
        )
    number = draw({part: runs[part] for part in chosen.parts or runs}, chosen.out)
    print(f"{number} panels in {chosen.out}")


if __name__ == "__main__":
    main()
